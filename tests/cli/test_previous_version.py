"""Files of the previous version: configurations, runs, checkpoints and prepared data of each kind of model are read."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from gputrain.cli.options import read_defaults
from gputrain.cli.settings import DemoSettings, PrepareSettings
from gputrain.config import assemble, read_file, to_yaml
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.kinds import kind_of
from gputrain.tts import coqui
from gputrain.tts.config import TrainTts
from gputrain.tts.load import load_voice
from gputrain.vae.config import TrainVae
from gputrain.vae.pretrained import load_model
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.load import load_vocoder
from gputrain.vocoder.openvpi import translate
from tests.tts.test_train import small_presets

pytestmark = pytest.mark.usefixtures("flops_known")

FILES = Path(__file__).parents[1] / "data" / "previous_version"
TRAIN: dict[str, Any] = {"vae": TrainVae, "vocoder": TrainVocoder, "tts": TrainTts}
MODULES = {
    "vae": {"autoencoder", "discriminator", "balance", "ema"},
    "vocoder": {"generator", "discriminators", "ema"},
    "tts": {"voice", "discriminators", "ema"},
}
CHECKPOINT = Path("run", "checkpoint_last.pt")


@pytest.fixture(autouse=True, scope="module")
def _small_voice() -> Iterator[None]:
    with small_presets(duration_layers=3):  # That version's tests had three of them.
        yield


@pytest.fixture(params=TRAIN)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of model; the current folder is a copy of its files."""
    shutil.copytree(FILES / request.param, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def defaults(kind: str, path: Path) -> dict[str, Any]:
    """Read a configuration as the train command of a kind does."""
    turn = {"vocoder": lambda content, path: translate(content, path, of="train"), "tts": coqui.translate_coqui}.get(
        kind
    )
    return read_defaults(path, TRAIN[kind], turn)


def test_a_configuration_is_read_and_written_with_its_kind(kind: str) -> None:
    assert "kind" not in read_file(Path("run", "config.yaml"))
    settings = assemble(TRAIN[kind], defaults(kind, Path("run", "config.yaml")))
    assert settings.saving.output_dir == Path("run")
    Path("new.yaml").write_text(to_yaml(settings))
    assert next(iter(read_file(Path("new.yaml")).items())) == ("kind", kind)
    once: Any = replace(settings, schedule=replace(settings.schedule, max_steps=0))  # It belongs to one command.
    assert assemble(TRAIN[kind], defaults(kind, Path("new.yaml"))) == once


def test_an_option_that_is_no_more_is_accepted_from_files_and_flags(kind: str, caplog, typed) -> None:
    assert "calibrate" in read_file(Path("run", "config.yaml"))
    with caplog.at_level("INFO"):
        assert "calibrate" not in defaults(kind, Path("run", "config.yaml"))
    assert caplog.text.count("calibrate has no effect any more") == 1
    for flag in ("--calibrate", "--no-calibrate"):
        code, printed = typed(f"train-{kind}", "--config", "run/config.yaml", flag)
        assert (code, printed.count("calibrate has no effect any more")) == (2, 2), printed
        assert "run already holds a run" in printed
    assert "calibrate" not in typed(f"train-{kind}", "--help")[1]


def test_an_option_that_is_no_more_is_accepted_beside_keys_of_openvpi(tmp_path, caplog) -> None:
    path = tmp_path / "voice.yaml"
    path.write_text("generater_optimizer_args: {lr: 0.0002}\ncrop_mel_frames: 40\ncalibrate: false\n")
    with caplog.at_level("INFO"):
        assert defaults("vocoder", path)["crop_mel_frames"] == 40
    assert "calibrate has no effect any more" in caplog.text
    assert "calibrate" not in translate(read_file(path), path, of="prepare")


def test_a_configuration_of_another_kind_is_refused(kind: str) -> None:
    other = {"vae": "tts", "vocoder": "vae", "tts": "vocoder"}[kind]
    Path("new.yaml").write_text(to_yaml(assemble(TRAIN[kind], defaults(kind, Path("run", "config.yaml")))))
    with pytest.raises(UserError, match=rf"new.yaml: kind is '{kind}', expected '{other}'") as caught:
        defaults(other, Path("new.yaml"))
    assert caught.value.hint == f"use gputrain train-{kind}"


def test_the_kind_of_a_run_and_of_a_checkpoint(kind: str) -> None:
    assert kind_of(Path("run")).name == kind
    alone = Path("alone") / CHECKPOINT.name
    alone.parent.mkdir()
    shutil.copyfile(CHECKPOINT, alone)
    assert kind_of(alone).name == kind


def test_a_run_is_resumed(kind: str, typed) -> None:
    before = torch.load(CHECKPOINT, weights_only=True)
    assert before["kind"] == {"vae": "vae", "vocoder": "vocoder", "tts": "voice"}[kind]
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


@pytest.mark.parametrize(("former", "present"), [("images", "vae"), ("vocoder", "vocoder"), ("voice", "tts")])
def test_former_names_of_kinds_are_accepted_in_files_and_on_the_command_line(
    former: str, present: str, tmp_path: Path, typed
) -> None:
    language = {"language": "uz"} if present == "tts" else {}
    Path("prepare.yaml").write_text(f"kind: {former}\n" + "".join(f"{k}: {v}\n" for k, v in language.items()))
    given = {"input_dir": "in", "output_dir": "out", **read_defaults(Path("prepare.yaml"), PrepareSettings)}
    assert assemble(PrepareSettings, given).kind == present
    assert assemble(DemoSettings, {"kind": former}).kind == present
    words = [word for name, value in language.items() for word in (f"--{name}", value)]
    code, printed = typed("prepare-data", "--kind", former, *words, "--input-dir", "gone", "--output-dir", "out")
    assert code == 2
    assert "gone: no such folder" in printed


def test_another_folder_for_a_run_that_has_made_all_its_steps_is_no_error(kind: str, typed) -> None:
    words = ["--config", "run/config.yaml", "--resume-from", CHECKPOINT, "--output-dir", "new", "--max-steps", 2]
    code, printed = typed(f"train-{kind}", *words)
    assert code == 0, printed
    assert "nothing is left to do" in printed
    assert "error" not in printed
