"""What a user names becomes a local path, by which nothing is fetched that was not named."""

import socket
from pathlib import Path

import pytest
import yaml

from gputrain.asr.config import PUBLISHED as ASR
from gputrain.asr.config import TrainAsr
from gputrain.asr.data import is_own
from gputrain.config import assemble, flatten, to_yaml
from gputrain.errors import UserError
from gputrain.fetch.hub import HubName
from gputrain.fetch.names import CatalogueEntry, TrainedModel, find_published, kind_of, local_path
from gputrain.fetch.published import choose
from gputrain.tts.config import PUBLISHED as TTS
from gputrain.tts.load import read_trained
from gputrain.tts.pretrained_import import file_at
from gputrain.vae.config import PUBLISHED as VAE
from gputrain.vae.config import TrainVae
from gputrain.vae.pretrained import read_pretrained
from gputrain.vocoder.config import PUBLISHED as VOCODER
from gputrain.vocoder.load import weights_file
from tests.command import gputrain_here
from tests.tables import each_row

SD = ("config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
PIPELINE = (
    "model_index.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    *(f"vae/{n}" for n in SD),
)
XLSR = ("config.json", "preprocessor_config.json", "pytorch_model.bin", "model.safetensors", "flax_model.msgpack")
MMS = (*XLSR[:2], "vocab.json", "model.safetensors", "adapter.eng.safetensors", "adapter.rus.safetensors")
SHARDED = ("config.json", "model.safetensors.index.json", "model-1-of-2.safetensors", "model-2-of-2.safetensors")
PIPER = ("en/a/x.ckpt", "en/a/config.json", "en/b/x.ckpt", "en/b/y.ckpt", "README.md")


@each_row(
    (VAE, SD, "", "", SD[:2]),
    (VAE, PIPELINE, "", "vae", ("vae/config.json", "vae/diffusion_pytorch_model.safetensors")),
    (VAE, PIPELINE, "vae/config.json", "vae", ("vae/config.json", "vae/diffusion_pytorch_model.safetensors")),
    (VAE, PIPELINE, "vae", "vae", ("vae/config.json", "vae/diffusion_pytorch_model.safetensors")),
    (VAE, (*PIPELINE[:3], "vae/config.json", SD[2], f"vae/{SD[2]}"), "", f"vae/{SD[2]}",
     ("vae/config.json", f"vae/{SD[2]}")),
    (VAE, ("ae.safetensors", "ae.fp16.safetensors", "README.md"), "", "ae.safetensors", ("ae.safetensors",)),
    (VAE, ("a.safetensors", "b.safetensors"), "", None, ()),
    (VAE, ("a.safetensors", "b.safetensors"), "b.safetensors", "b.safetensors", ("b.safetensors",)),
    (VAE, ("checkpoint_last.pt", "checkpoint_best.pt", "config.yaml", "metrics.jsonl"), "", "",
     ("checkpoint_best.pt", "config.yaml")),
    (VOCODER, ("v1/model.ckpt", "v1/config.json", "v1/model.onnx"), "v1", "v1", ("v1/config.json", "v1/model.ckpt")),
    (VOCODER, ("v1/step_10.ckpt", "v1/config.json"), "v1", "v1/step_10.ckpt", ("v1/config.json", "v1/step_10.ckpt")),
    (TTS, PIPER, "en/a", "en/a/x.ckpt", ("en/a/config.json", "en/a/x.ckpt")),
    (TTS, PIPER, "en/a/config.json", "en/a/x.ckpt", ("en/a/config.json", "en/a/x.ckpt")),
    (TTS, PIPER, "en/b/y.ckpt", "en/b/y.ckpt", ("en/b/y.ckpt",)),
    (TTS, PIPER, "en/b", None, ()),
    (TTS, ("best_model.pth", "speakers.pth", "config.json"), "", "best_model.pth",
     ("best_model.pth", "config.json", "speakers.pth")),
    (ASR, XLSR, "", "", ("config.json", "model.safetensors", "preprocessor_config.json")),
    (ASR, SHARDED, "", "", SHARDED),
    (ASR, MMS, "adapter.rus.safetensors", "adapter.rus.safetensors", (*MMS[:4], "adapter.rus.safetensors")),
    (ASR, ("README.md",), "", None, ()),
)  # fmt: skip
def test_the_files_that_a_model_needs(wanted, names, path, expected, files):
    chosen = choose(names, path, wanted)
    assert (chosen and chosen.path) == expected
    assert not chosen or sorted(chosen.weights + chosen.others) == sorted(files)


@each_row(
    ("org/name", HubName("org/name")), (Path("org/name"), HubName("org/name")),
    (Path("hf://org/name:vae"), HubName("org/name", path="vae")),
    (Path("https://huggingface.co/org/name"), HubName("org/name")),
    ("out/model.ckpt", None), ("out/checkpoint_last.pt", None), ("./org/name", None), ("name", None), ("a/b/c", None),
    (r"C:\models\vae", None), ("~/org/name", None), ("", None),
    ("org/name/adapter.rus.safetensors", HubName("org/name", path="adapter.rus.safetensors")),
)  # fmt: skip
def test_what_a_text_that_is_no_path_may_name(name, expected):
    assert find_published(name) == expected


def test_short_names():
    assert find_published("sd-vae-ft-mse").repo == "stabilityai/sd-vae-ft-mse"
    assert isinstance(find_published("lpips-vgg16"), CatalogueEntry)
    assert find_published("https://example.com/model.ckpt") is None


def test_a_path_that_exists_wins(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "sd-vae-ft-mse"):
        Path(name).mkdir(parents=True)
        assert local_path(name, VAE) == Path(name)
    with pytest.raises(UserError, match="no such file or folder"):
        local_path("a" * 5000, VAE)  # The system refuses to look for such a path.
    assert not hub.server.log


@each_row(
    ("org/nam", "no such file or folder; as a name on the Hub: not on the Hugging Face Hub, or private", "spell"),
    ("nam", "nam: no such file or folder", "such as stabilityai/sd-vae-ft-mse"),
    ("sd-vae-ft-mes", "sd-vae-ft-mes: no such file or folder", "sd-vae-ft-mse"),
    ("org/empty", "as a name on the Hub: has no weights that can be read", "stabilityai/sd-vae-ft-mse"),
    ("org/many", "nothing tells which of its 2 files is the model", "name it: org/many:a.safetensors or org/many:b."),
    ("org/half:config.json", "org/half:config.json: has no weights that can be read", "stabilityai/sd-vae-ft-mse"),
    ("https://example.com/model.ckpt", "nothing is loaded from other addresses", "load it with curl"),
    ("https://huggingface.co/org", "names no model", "https://huggingface.co/org/name"),
    ("sd-vae-ft-mse", "sd-vae-ft-mse: stabilityai/sd-vae-ft-mse@", "spell"),
    ("org/deep", "nothing tells which of its 1 files is the model", "name it: org/deep:x/y/a.safetensors"),
    ("org/many:c", "org/many:c: the repository has no c", "it has a.safetensors, b.safetensors"),
)  # fmt: skip
def test_both_readings_of_a_name_are_said(hub, name, message, hint):
    hub.add("org/empty", {"README.md": b"empty"})
    hub.add("org/deep", {"x/y/a.safetensors": b"a"})
    hub.add("org/half", {"config.json": b"{}"})
    hub.add("org/many", {"a.safetensors": b"a", "b.safetensors": b"b"})
    with pytest.raises(UserError) as raised:
        local_path(name, VAE)
    assert message in raised.value.message
    assert hint in raised.value.hint


@each_row(
    "org/name", "hf://org/name:vae@v1", "https://huggingface.co/org/name/tree/main/vae", r"models\vae", "sd-vae-ft-mse"
)
def test_a_name_stays_as_it_was_given(name):
    for cls, extra in ((TrainVae, {}), (TrainAsr, {"data_path": "."})):
        settings = assemble(cls, {"init_from": name, **extra})
        written = {key: value for key, value in yaml.safe_load(to_yaml(settings)).items() if key != "kind"}
        assert settings.model.init_from == written["init_from"] == flatten(settings)["init_from"] == name
        assert type(flatten(settings)["init_from"]) is str  # A checkpoint keeps plain texts alone.
        assert assemble(cls, written).model == settings.model


def test_the_model_of_a_command_is_of_the_kind_that_its_files_tell(hub):
    hub.add("org/vae", {"config.json": b'{"_class_name": "AutoencoderKL"}', SD[1]: b"weights"})
    hub.add("org/vocoder", {"config.json": b"{}", "model.ckpt": b"weights"})
    hub.add("org/asr", {"config.json": b'{"model_type": "wav2vec2"}', "model.safetensors": b"weights"})
    for kind in ("vae", "vocoder", "asr"):
        assert kind_of(TrainedModel(model=f"org/{kind}").path).name == kind
    assert hub.fetched() == {"config.json", SD[1], "model.ckpt", "model.safetensors"}


@each_row(
    "train-vae --init-from org/other --data-path data",
    "evaluate --model org/other --data-path data",
    "transcribe --model org/other --input x.wav",
    "reconstruct --model org/other --input x.png --output-dir out",
    "validate --kind asr --check-with org/other --input-dir data",
)
def test_offline_nothing_is_asked_and_what_is_missing_is_said(hub, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "x.wav").write_bytes(b"RIFF")
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    hub.add("org/other", {"config.json": b"{}"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = gputrain_here(*words.split())
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "org/other: no such file or folder; as a name on the Hub: offline, and the cache" in said
    assert "`gputrain fetch org/other` with a network" in said
    assert not hub.server.log


@each_row(
    ("fetch sd-vae-ft-mse", "sd-vae-ft-mse: stabilityai/sd-vae-ft-mse@", "`gputrain fetch sd-vae-ft-mse` with"),
    ("evaluate --model xlsr-53 --data-path data", "xlsr-53: facebook/", "`gputrain fetch xlsr-53` with"),
    ("speak --model piper-tr-dfki-medium --text a --output-file a.wav",
     "piper-tr-dfki-medium: begins a training", "train-tts --init-from piper-tr-dfki-medium"),
)  # fmt: skip
def test_messages_name_what_was_named_by_a_short_name(hub, tmp_path, monkeypatch, words, message, hint):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = gputrain_here(*words.split())
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert f"error: {message}" in said
    assert hint in said
    assert not hub.server.log


def test_commands_that_name_nothing_connect_to_nothing(hub, tmp_path, monkeypatch, photographs):
    asked = []

    def refused(*words, **options):
        asked.append(words)
        raise OSError("no connection in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    small = "--image-size 32 --batch-size 2 --channels 32,32 --max-steps 1 --device cpu --no-plan --num-workers 0"
    run = ("--data-path", photographs, "--output-dir", tmp_path / "run", *small.split())
    export = ("--output-dir", tmp_path / "export", "--device", "cpu")
    for words in (
        ("train-vae", *run),
        ("train-vae", *run, "--resume-from", "auto", "--max-steps", 2),
        ("export", "--model", tmp_path / "run", *export),
        ("prepare-data", "--input-dir", photographs, "--output-dir", tmp_path / "data", "--num-workers", 0),
        ("normalize", "--language", "en", "--text", "1 owl"),
        ("train-vae", *run, "--init-from", "no-such-model"),
    ):
        done = gputrain_here(*words)
        assert done.returncode == (2 if "no-such-model" in words else 0), done.stderr
    assert not asked
    assert gputrain_here("train-vae", *run, "--init-from", "org/gone").returncode == 2
    assert asked  # A name is what makes it ask.


@each_row("voice.onnx", "model.int8.onnx", "singer.oudep")
def test_every_loader_refuses_an_export_in_onnx_and_names_what_to_give(tmp_path, name):
    folder = tmp_path / name / "export"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"\x08\x09")
    for load in (kind_of, read_pretrained, weights_file, file_at, is_own, read_trained):
        for path in (folder, folder / name):
            with pytest.raises(UserError, match=f"{path.name}: an export in ONNX, which gputrain writes") as refused:
                load(path)
            assert "name the run" in refused.value.hint
    (folder / "model.ckpt").write_bytes(b"")  # A graph beside weights is no hindrance.
    assert weights_file(folder) == folder / "model.ckpt"
