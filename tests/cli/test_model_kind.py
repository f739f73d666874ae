"""Commands that serve several kinds of model: the kind of a path, the options refused, and a vocoder in use."""

import shutil
from pathlib import Path

import pytest
import soundfile
import torch
from rich.console import Console

from gputrain import config
from gputrain.cli.kind_commands import evaluate, format_of
from gputrain.cli.settings import EvaluateSettings, ExportSettings, refuse_others
from gputrain.config import assemble
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.fetch.names import kind_of
from gputrain.kinds import kinds
from gputrain.speech.text.frontend import frontend
from gputrain.vae.diffusers_folder import save_diffusers
from gputrain.vae.latents import LatentScaling
from gputrain.vae.model import AutoencoderKL
from gputrain.vocoder.config import TrainVocoder
from tests.asr.models import run_folder as recogniser_run
from tests.tables import each_row
from tests.toy import whole_checkpoint
from tests.training import train_vocoder
from tests.tts import test_load as voices
from tests.tts.voices import build, small
from tests.vae.test_recipe import settings_of as vae_settings
from tests.vocoder.conftest import HOP, RATE_HZ, TINY, hummed

VOCODER = kinds()["vocoder"]
pytestmark = pytest.mark.usefixtures("flops_known")


def silent(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Path:
    return hummed(tmp_path_factory.mktemp("prepared") / "notes")


@pytest.fixture(scope="module")
def vocoder_run(notes, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vocoder") / "run"
    changes = {"data_path": str(notes), "evaluate_every_steps": 0, "sample_every_steps": 0, "max_steps": 1}
    train_vocoder(assemble(TrainVocoder, {**TINY, **changes, "output_dir": str(folder)}), Console(quiet=True))
    return folder


@pytest.fixture(scope="module")
def vae_run(tmp_path_factory) -> Path:
    """A run folder as train-vae leaves it."""
    folder, settings = tmp_path_factory.mktemp("vae"), vae_settings()
    (folder / "config.yaml").write_text(config.to_yaml(settings))
    modules = {"autoencoder": AutoencoderKL(settings.architecture).state_dict()}
    checkpoint.save(folder, whole_checkpoint(kind="vae", config=config.flatten(settings), modules=modules))
    return folder


@pytest.fixture(scope="module")
def exported(vocoder_run) -> Path:
    """The vocoder in openvpi's format, exported as the command does it."""
    folder = vocoder_run.parent / "exported"
    settings = assemble(ExportSettings, {"model": str(vocoder_run), "output_dir": str(folder)})
    figures = VOCODER.exporters[format_of(settings, VOCODER)].write(settings, silent).figures
    assert figures["largest difference of a sample"] == 0  # Read back, the files give the same wave.
    return folder


def test_runs_and_their_checkpoints(vocoder_run, vae_run, tmp_path):
    voice = voices.run_folder(tmp_path / "voice", build(small("fast")), frontend("en"), voices.settings_of("fast"))
    (voice / "config.yaml").write_text("kind: tts\n")
    runs = {"vocoder": vocoder_run, "vae": vae_run, "tts": voice, "asr": recogniser_run(tmp_path / "recogniser")}
    for kind, folder in runs.items():
        assert kind_of(folder).name == kind
        assert kind_of(folder / "checkpoint_last.pt").name == kind
        (tmp_path / f"{kind}.ckpt").symlink_to(folder)
        assert kind_of(tmp_path / f"{kind}.ckpt").name == kind
        alone = tmp_path / kind / "alone.pt"
        alone.parent.mkdir()
        shutil.copyfile(folder / "checkpoint_last.pt", alone)
        assert kind_of(alone).name == kind


def test_models_of_other_programs(exported, tmp_path):
    stock = tmp_path / "stock"
    model = AutoencoderKL(vae_settings().architecture)
    save_diffusers(model, stock, LatentScaling(1.0), sample_size=24)
    assert kind_of(stock).name == "vae"
    for path in (exported, exported / "model.ckpt"):
        assert kind_of(path).name == "vocoder"
    renamed = tmp_path / "renamed"
    shutil.copytree(exported, renamed)
    (renamed / "model.ckpt").rename(renamed / "singer.ckpt")
    assert kind_of(renamed).name == "vocoder"


def test_anything_else_is_left_to_the_loader_of_the_vae(tmp_path):
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "text.pt").write_text("weights")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for name in ("", "damaged.pt", "text.pt", "broken"):
        assert kind_of(tmp_path / name).name == "vae"


@pytest.mark.parametrize("name", ["gone", "gone.ckpt"])
def test_a_missing_model_is_named_before_anything_is_said_of_options(typed, tmp_path, name):
    code, printed = typed("evaluate", "--model", tmp_path / name, "--data-path", ".", "--clip-seconds", 1)
    assert (code, "no such file or folder" in printed) == (2, True)


@each_row(
    ("evaluate", "vocoder", ["--image-size", 64], "image_size does nothing with", "drop --image-size"),
    ("evaluate", "VAE", ["--max-clips", 3], "max_clips does nothing with", "drop --max-clips"),
    ("export", "vocoder", ["--format", "diffusers"], "a vocoder, which has no format diffusers", "openvpi or onnx or"),
    ("export", "vocoder", ["--data-path", "."], "data_path does nothing with a vocoder", "drop --data-path"),
    ("export", "vocoder", ["--name", "x"], "name does nothing with a vocoder, format openvpi", "drop --name"),
    ("export", "vocoder", ["--language-code", "uz_UZ"], "language_code does nothing", "drop --language-code"),
    ("export", "vocoder", ["--default-speaker", "1"], "default_speaker does nothing", "drop --default-speaker"),
    ("export", "VAE", ["--format", "onnx"], "an image VAE, which has no format onnx", "use diffusers"),
)
def test_commands_refuse_options_of_the_other_kind(typed, vocoder_run, vae_run, command, model, option, said, hint):
    place = {"evaluate": ["--data-path", "."], "export": ["--output-dir", "out"]}[command]
    run = {"vocoder": vocoder_run, "VAE": vae_run}[model]
    code, printed = typed(command, "--model", run, *place, *option)
    assert code == 2
    assert said in printed
    assert hint in printed
    assert not Path("out").exists()


def test_options_of_another_kind_with_their_defaults_are_accepted(vocoder_run):
    settings = assemble(
        EvaluateSettings, {"model": str(vocoder_run), "data_path": ".", "max_clips": 1000, "batch_size": 4}
    )
    for kind in ("vae", "vocoder"):
        refuse_others(settings, kinds()[kind], "evaluation", "a model")
    asked = assemble(EvaluateSettings, {"model": str(vocoder_run), "data_path": ".", "clip_seconds": 2.0})
    refuse_others(asked, VOCODER, "evaluation", "a model")
    with pytest.raises(UserError, match="clip_seconds does nothing with a model"):
        refuse_others(asked, kinds()["vae"], "evaluation", "a model")


# ------------------------------------------------------------------------------------------------ a vocoder in use


def test_figures_of_a_run_are_those_of_what_was_exported(vocoder_run, exported, notes):
    printed = []
    for model, seconds in ((vocoder_run, 0.5), (exported, 0.5), (exported, 1.0)):
        settings = assemble(EvaluateSettings, {"model": str(model), "data_path": str(notes), "clip_seconds": seconds})
        title, shown, report = evaluate(settings, VOCODER, silent)
        assert title == f"{model} on 1 clip"
        printed.append(shown)
        assert report["clips"] == 1
    for name in ("m_stft", "mcd_db", "f0_rmse_cents_up"):
        assert printed[0].get(name) == printed[1].get(name)
    assert printed[0]["m_stft"] != printed[2]["m_stft"]  # More of each clip is evaluated.


def test_the_command_vocodes(typed, vocoder_run):
    time_T = torch.arange(RATE_HZ // 2) / RATE_HZ
    soundfile.write("a.wav", (0.3 * torch.sin(2 * torch.pi * 220 * time_T)).numpy(), RATE_HZ)
    words = ["--model", vocoder_run, "--input", "a.wav", "--output-dir", "sung", "--shift-semitones", 2]
    code, printed = typed("vocode", *words, "--chunk-seconds", 0.2, "--device", "cpu")
    assert code == 0, printed
    assert "Vocoded into sung" in printed
    (sung,) = Path("sung").glob("*.wav")
    made_T, rate_hz = soundfile.read(sung)
    assert rate_hz == RATE_HZ
    assert abs(len(made_T) - len(time_T)) < HOP
    assert made_T.std() > 1e-5


def test_the_command_exports_a_graph(typed, vocoder_run):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    words = ["--model", vocoder_run, "--output-dir", "out", "--format", "onnx", "--name", "tiny"]
    code, printed = typed("export", *words)
    assert code == 0, printed
    assert sorted(path.name for path in Path("out").iterdir()) == ["tiny.onnx", "vocoder.yaml"]
    assert config.read_file(Path("out", "vocoder.yaml"))["sample_rate"] == RATE_HZ
    session = runtime.InferenceSession(Path("out", "tiny.onnx"), providers=["CPUExecutionProvider"])
    mel, f0 = torch.full((1, 9, TINY["audio_num_mel_bins"]), -4.0), torch.full((1, 9), 200.0)
    (wave,) = session.run(["waveform"], {"mel": mel.numpy(), "f0": f0.numpy()})
    assert wave.shape == (1, 9 * HOP)
