"""Loading voices from run folders and checkpoints, for inference and to initialise other voices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gputrain.config import assemble, flatten
from gputrain.engine import checkpoint
from gputrain.engine.optim import Ema
from gputrain.errors import UserError
from gputrain.speech.text.frontend import Frontend, frontend
from gputrain.tts.architecture import VoicePreset, voice_architecture
from gputrain.tts.config import TrainTts
from gputrain.tts.load import LoadedVoice, architecture_of, load_voice, read_origin, start_from
from gputrain.tts.model import Voice, inference_copy
from tests.toy import whole_checkpoint
from tests.tts.test_train import small_presets
from tests.tts.voices import begun_from, build, small

CPU = torch.device("cpu")


def settings_of(preset: VoicePreset = "fast", **changes: object) -> TrainTts:
    return assemble(TrainTts, {"data_path": "unused", "preset": preset, **changes})


def full(preset: VoicePreset, reading: Frontend, speakers: Sequence[str] = ("anna",)) -> Voice:
    return build(voice_architecture(preset, num_symbols=len(reading.symbols), num_speakers=len(speakers)))


def some_discriminators(channels: int = 3) -> nn.Module:
    return nn.ModuleDict({"waves": nn.Sequential(nn.Conv1d(1, channels, 5), nn.Conv1d(channels, 1, 3))})


def narrow(
    preset: VoicePreset = "fast", reads: str | Frontend = "en", speakers: Sequence[str] = ("anna",)
) -> LoadedVoice:
    """Returns a loaded voice that is smaller than the presets."""
    reading = frontend(reads) if isinstance(reads, str) else reads
    sizes = replace(small(preset, len(speakers)), num_symbols=len(reading.symbols))
    return LoadedVoice(inference_copy(build(sizes)), reading, settings_of(preset), tuple(speakers), "narrow")


def run_folder(
    folder: Path,
    voice: Voice,
    reading: Frontend,
    settings: TrainTts,
    speakers: Sequence[str] = ("anna",),
    **more: nn.Module,
) -> Path:
    """Writes a run's checkpoint as the engine does."""
    folder.mkdir(parents=True)
    mel = voice.architecture.mel
    modules = {"voice": voice, "discriminators": some_discriminators(), **more}
    facts = {"text": reading.to_json(), "sampling_rate": mel.sampling_rate, "hop_size": mel.hop_size}
    checkpoint.save(
        folder,
        whole_checkpoint(
            kind="tts", config=flatten(settings), facts={**facts, "speakers": list(speakers)},
            modules={name: module.state_dict() for name, module in modules.items()},
        ),
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Voice]:
    """Returns a run of a `fast` voice, and its trained modules."""
    reading = frontend("en")
    voice = full("fast", reading, ("anna", "boris"))
    folder = tmp_path_factory.mktemp("voices") / "english"
    return run_folder(folder, voice, reading, settings_of("fast"), ("anna", "boris")), voice


@torch.no_grad()
def still_wave(voice: Voice, speaker: int = 1) -> Tensor:
    ids_BS = torch.arange(3, 18)[None]
    wave_B1T, _ = voice.infer(ids_BS, torch.tensor([15]), torch.tensor([speaker]), noise_scale=0.0, noise_w=0.0)
    return wave_B1T


def test_a_loaded_voice_speaks_as_the_trained_one(english: tuple[Path, Voice]) -> None:
    folder, voice = english
    loaded = load_voice(folder, CPU)
    assert (loaded.speakers, loaded.frontend) == (("anna", "boris"), frontend("en"))
    assert loaded.settings.model.preset == "fast"
    assert loaded.source == str(folder / "checkpoint_last.pt")
    assert not any(parameter.requires_grad for parameter in loaded.voice.parameters())
    assert not loaded.voice.training
    wave, expected = still_wave(loaded.voice), still_wave(voice.eval())
    assert expected.std() > 1e-3
    assert wave.shape == expected.shape
    assert (wave - expected).abs().max() < 1e-5
    assert torch.equal(wave, still_wave(load_voice(folder / "checkpoint_last.pt", CPU).voice))


def test_the_average_is_what_speaks(tmp_path: Path) -> None:
    reading = frontend("uz")
    trained, averaged = (full("fast", reading) for _ in range(2))
    with torch.no_grad():
        averaged.decoder.pre.weight += 0.1
    ema = Ema(averaged, full("fast", reading), 0.9)
    loaded = load_voice(run_folder(tmp_path / "run", trained, reading, settings_of("fast"), ema=ema), CPU)
    assert torch.equal(loaded.voice.decoder.pre.weight, averaged.decoder.pre.weight)
    assert not torch.equal(loaded.voice.decoder.pre.weight, trained.decoder.pre.weight)


def test_the_architecture_of_a_run() -> None:
    facts = {"text": frontend("ru").to_json(), "sampling_rate": 16000, "hop_size": 256, "speakers": ["a", "b", "c"]}
    settings = settings_of("high", encoder_dropout=0.2, duration_dropout=0.3)
    sizes = architecture_of(settings, facts)
    assert (sizes.num_symbols, sizes.num_speakers) == (len(frontend("ru").symbols), 3)
    assert (sizes.mel.sampling_rate, sizes.mel.fmax, sizes.upsample_rates) == (16000, 8000.0, (8, 8, 2, 2))
    assert (sizes.encoder_dropout, sizes.duration_dropout) == (0.2, 0.3)


def state(voice: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in voice.state_dict().items()}


def test_weights_of_another_preset_are_no_voice(tmp_path: Path) -> None:
    reading = frontend("en")
    other = run_folder(tmp_path / "run", full("fast", reading), reading, settings_of("medium"))
    with pytest.raises(UserError, match="the checkpoint's voice differs in"):
        load_voice(other, CPU)


def test_symbols_that_no_clip_has_are_not_named(english: tuple[Path, Voice]) -> None:
    uzbek = frontend("uz")
    voice = Voice(voice_architecture("fast", num_symbols=len(uzbek.symbols), num_speakers=2))
    discriminators = some_discriminators()
    origin = read_origin(english[0], voice, discriminators)
    speakers = ("clara", "anna")
    assert start_from(origin, voice, discriminators, uzbek, speakers, "abc") == ["speakers: clara"]
    assert "symbols: ʻ" in start_from(origin, voice, discriminators, uzbek, speakers, "aʻ")


def test_another_language_begins_with_all_but_its_own_symbols(english: tuple[Path, Voice]) -> None:
    folder, source = english
    english_symbols, uzbek = frontend("en").symbols, frontend("uz")
    torch.manual_seed(1)
    voice = Voice(voice_architecture("fast", num_symbols=len(uzbek.symbols), num_speakers=2))
    discriminators, before = some_discriminators(), state(voice)
    assert begun_from(folder, voice, discriminators, uzbek, ("clara", "anna")) == ["symbols: ʻ", "speakers: clara"]
    after, given = state(voice), source.state_dict()
    tables = {"text_encoder.embedding.weight", "speakers.weight"}
    assert all(torch.equal(after[name], given[name]) for name in after.keys() - tables)
    assert sum(not torch.equal(before[name], given[name]) for name in after.keys() - tables) > 100
    for row, symbol in enumerate(uzbek.symbols):
        old = before[min(tables ^ {"speakers.weight"})][row]
        known = symbol in english_symbols
        expected = given["text_encoder.embedding.weight"][english_symbols.index(symbol)] if known else old
        assert torch.equal(after["text_encoder.embedding.weight"][row], expected), symbol
    assert torch.equal(after["speakers.weight"][0], before["speakers.weight"][0])
    assert torch.equal(after["speakers.weight"][1], given["speakers.weight"][0])
    saved = torch.load(folder / "checkpoint_last.pt", weights_only=True)["modules"]["discriminators"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in discriminators.state_dict().items())


def test_another_preset_begins_with_all_but_the_decoder(english: tuple[Path, Voice]) -> None:
    folder, source = english
    reading = frontend("en")
    voice = Voice(voice_architecture("high", num_symbols=len(reading.symbols)))
    reinitialised = begun_from(folder, voice, some_discriminators(5), reading, ("someone",))
    parts = [line.split(":")[0] for line in reinitialised]
    assert parts == ["decoder", "discriminators.waves"]  # A single-speaker voice has no speaker to report.
    assert reinitialised[1] == "discriminators.waves: 2 of 2 layers"
    given, after = source.state_dict(), state(voice)
    same = [name for name, tensor in after.items() if name in given and torch.equal(tensor, given[name])]
    assert {name.partition(".")[0] for name in after.keys() - set(same)} == {"decoder"}


def test_a_layer_is_taken_as_a_whole(english: tuple[Path, Voice]) -> None:
    """The length and the direction of a weight-normed weight are only copied together."""
    folder, source = english
    reading = frontend("en")
    sizes = voice_architecture("fast", num_symbols=len(reading.symbols), num_speakers=2, upsample_kernel_sizes=(16, 12))
    voice = Voice(sizes)
    assert begun_from(folder, voice, some_discriminators(), reading, ("anna", "boris")) == ["decoder: 1 of 9 layers"]
    assert voice.decoder.ups[1].weight_g.shape == source.decoder.ups[1].weight_g.shape
    assert not torch.equal(voice.decoder.ups[1].weight_g, source.decoder.ups[1].weight_g)


def test_broken_weights_are_nothing_to_begin_with(tmp_path: Path) -> None:
    reading = frontend("en")
    broken = full("fast", reading)
    with torch.no_grad():
        broken.decoder.pre.bias[3] = torch.nan
    folder = run_folder(tmp_path / "run", broken, reading, settings_of("fast"))
    with pytest.raises(UserError, match=r"decoder\.pre\.bias: not all weights are finite"):
        begun_from(folder, full("fast", reading), some_discriminators(), reading, ("anna",))
