"""Runs of each kind of model are resumed, loaded, evaluated and exported."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from gputrain.cli.options import read_defaults
from gputrain.config import assemble, read_file, to_yaml
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.tts import coqui
from gputrain.tts.config import TrainTts
from gputrain.tts.load import load_voice
from gputrain.vae.config import TrainVae
from gputrain.vae.pretrained import load_model
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.load import load_vocoder
from gputrain.vocoder.openvpi import translate
from tests.small_runs import small_run
from tests.tts.test_train import small_presets

pytestmark = pytest.mark.usefixtures("flops_known")

TRAIN: dict[str, Any] = {"vae": TrainVae, "vocoder": TrainVocoder, "tts": TrainTts}
MODULES = {
    "vae": {"autoencoder", "discriminator", "balance", "ema"},
    "vocoder": {"generator", "discriminators", "ema"},
    "tts": {"voice", "discriminators", "ema"},
}
CHECKPOINT = Path("run", "checkpoint_last.pt")


@pytest.fixture(autouse=True, scope="module")
def _small_voice() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(params=TRAIN)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of model; the current folder is a copy of its files."""
    shutil.copytree(small_run(request.param), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def defaults(kind: str, path: Path) -> dict[str, Any]:
    """Read a configuration as the train command of a kind does."""
    turn = {"vocoder": lambda content, path: translate(content, path, of="train"), "tts": coqui.translate_coqui}.get(
        kind
    )
    return read_defaults(path, TRAIN[kind], turn)


def test_a_configuration_of_another_kind_is_refused(kind: str) -> None:
    other = {"vae": "tts", "vocoder": "vae", "tts": "vocoder"}[kind]
    Path("new.yaml").write_text(to_yaml(assemble(TRAIN[kind], defaults(kind, Path("run", "config.yaml")))))
    with pytest.raises(UserError, match=rf"new.yaml: kind is '{kind}', expected '{other}'") as caught:
        defaults(other, Path("new.yaml"))
    assert caught.value.hint == f"use gputrain train-{kind}"


def test_a_run_is_resumed(kind: str, typed) -> None:
    before = torch.load(CHECKPOINT, weights_only=True)
    code, printed = typed(f"train-{kind}", "--config", "run/config.yaml", "--resume-from", "auto", "--max-steps", 3)
    assert code == 0, printed
    after = torch.load(CHECKPOINT, weights_only=True)
    assert (before["progress"]["step"], after["progress"]["step"]) == (2, 3)
    assert (after["kind"], after["modules"].keys()) == (kind, MODULES[kind])
    assert read_file(Path("run", "config.yaml"))["kind"] == kind
    assert "settings that differ from the checkpoint's: max_steps 2 -> 3 " in printed  # No other setting differs.
    assert "data differ" not in printed


def test_a_run_is_loaded_for_use(kind: str) -> None:
    load, module, weight = {
        "vae": (load_model, "model", "decoder.conv_out.weight"),
        "vocoder": (load_vocoder, "generator", "noise_convs.0.bias"),
        "tts": (load_voice, "voice", "text_encoder.embedding.weight"),
    }[kind]
    loaded = load(Path("run"), torch.device("cpu"))
    expected = torch.load(CHECKPOINT, weights_only=True)["modules"]["ema"][f"average.{weight}"]
    assert torch.equal(getattr(loaded, module).state_dict()[weight], expected)
    assert kind != "tts" or loaded.speakers == ("ann", "bob")


USES = [
    ("vae", ["evaluate", "--model", "run", "--data-path", "data", "--json", "out.json"]),
    ("vocoder", ["evaluate", "--model", "run", "--data-path", "data", "--clip-seconds", 0.5, "--json", "out.json"]),
    ("tts", ["speak", "--model", "run", "--text", "an owl", "--speaker", "bob", "--output-file", "out.wav"]),
]


MODEL_COMMANDS = {
    "vae": [["evaluate", "--data-path", "data"], ["export", "--output-dir", "o"],
            ["reconstruct", "--input", "data", "--output-dir", "o"]],
    "vocoder": [["evaluate", "--data-path", "data"], ["export", "--output-dir", "o"],
                ["vocode", "--input", "song.wav", "--output-dir", "o"]],
    "tts": [["evaluate", "--data-path", "data"], ["export", "--output-dir", "o"],
            ["speak", "--text", "an owl", "--output-file", "o.wav"]],
}  # fmt: skip


def test_every_command_of_a_model_takes_the_checkpoint_that_is_named(kind: str, typed) -> None:
    soundfile.write("song.wav", np.zeros(8000), 8000)
    for name, *words in MODEL_COMMANDS[kind]:
        code, printed = typed(name, "--model", "run", "--checkpoint", "best", *words)
        assert code == 2
        assert "error: run: holds no checkpoint_best.pt hint: it holds checkpoint_last.pt" in printed, name
        code, printed = typed(name, "--model", CHECKPOINT, "--checkpoint", "last", *words)
        assert code == 2
        assert f"checkpoint last does nothing with {CHECKPOINT}" in printed, name


@pytest.mark.parametrize(("kind", "words"), USES, indirect=["kind"])
def test_the_best_checkpoint_is_used_unless_another_one_is_named(kind: str, words, typed, monkeypatch) -> None:
    content = torch.load(CHECKPOINT, weights_only=True)
    content["progress"]["step"] = 1
    torch.save(content, CHECKPOINT.with_name("checkpoint_best.pt"))
    best, last = (
        "using run/checkpoint_best.pt (step 1, the best on held-out data",
        "using run/checkpoint_last.pt (step 2)",
    )
    for chosen, said in (([], best), (["--checkpoint", "last"], last), (["--checkpoint", "checkpoint_last.pt"], last)):
        monkeypatch.setattr(checkpoint, "_shown", set())
        code, printed = typed(*words, *chosen, "--device", "cpu")
        assert code == 0, printed
        assert said in printed


@pytest.mark.parametrize(("kind", "words"), USES, indirect=["kind"])
def test_a_run_is_evaluated_or_speaks(kind: str, words: list[object], typed) -> None:
    if kind == "vocoder":
        pytest.importorskip("parselmouth")  # Its data are made with it.
    code, printed = typed(*words, "--device", "cpu")
    assert code == 0, printed
    assert Path(str(words[-1])).stat().st_size > 100


@pytest.mark.parametrize(("kind", "options"), [("vae", []), ("vocoder", ["--format", "openvpi"])], indirect=["kind"])
def test_a_run_is_exported(kind: str, options: list[str], typed) -> None:
    code, printed = typed("export", "--model", "run", "--output-dir", "exported", *options)
    assert code == 0, printed
    assert {path.name for path in Path("exported").iterdir()} >= {"config.json"}


def test_another_folder_for_a_run_that_has_made_all_its_steps_is_no_error(kind: str, typed) -> None:
    words = ["--config", "run/config.yaml", "--resume-from", CHECKPOINT, "--output-dir", "new", "--max-steps", 2]
    code, printed = typed(f"train-{kind}", *words)
    assert code == 0, printed
    assert "nothing is left to do" in printed
    assert "error" not in printed
