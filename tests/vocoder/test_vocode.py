"""Tests chunks of sounds of any length, recordings and mels as input, and errors for invalid files."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.f0 import f0, interpolated
from gputrain.audio.mel import log_mel
from gputrain.errors import UserError
from gputrain.files import no_progress
from gputrain.vocoder.config import NsfHifiganArchitecture, Vocode
from gputrain.vocoder.export import export_openvpi
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.load import LoadedVocoder
from gputrain.vocoder.vocode import (
    FrameNoise,
    Vocoded,
    VocoderInputReader,
    receptive_field_frames,
    vocode,
    vocode_files,
    wave_chunks,
)
from tests.tables import check_rows, each_row, slow
from tests.vocoder.test_generator import inputs, largest, variants
from tests.vocoder.test_load import CPU, loaded, openvpi_folder

pytest.importorskip("parselmouth")  # The vocoders of these tests want its pitch.

MEL = Mel()


def song(frames: int) -> tuple[Tensor, Tensor]:
    mel_1MF, f0_1F = inputs(items=1, frames=frames)
    f0_1F[:, frames // 3 : frames // 2] = 0
    return mel_1MF[0] - 4, f0_1F[0]  # Logarithms of amplitudes, some of them of silence.


def in_chunks(generator: Generator, frames: int, chunk: int, seed: int = 1) -> Tensor:
    return torch.cat(list(wave_chunks(generator, *song(frames), seed=seed, frames=chunk)))


def at_once(generator: Generator, frames: int, seed: int = 1) -> Tensor:
    mel_MF, f0_F = song(frames)
    noise = FrameNoise(generator.architecture, seed, CPU).between(0, frames)
    given_F = torch.from_numpy(interpolated(f0_F.numpy()))
    with torch.no_grad():
        wave_T: Tensor = generator(mel_MF[None], given_F[None], noise)[0, 0]
    return wave_T


@pytest.mark.parametrize(
    ("name", "noise_sigma"),
    [
        ("mini", 0.1),
        *(slow(*case) for case in (("mini", 0.0), ("full", 0.0), ("full", 0.1))),
    ],
)
def test_chunks_leave_no_seams(name: str, noise_sigma: float) -> None:
    """The lengths are below a chunk, one chunk, a frame more, and many more than a block of noise."""
    generator = loaded(name, noise_sigma=noise_sigma).generator
    for frames, chunk in ((1, 40), (39, 40), (40, 40), (41, 40), (300, 40), (300, 299)):
        made = in_chunks(generator, frames, chunk)
        assert made.shape == (frames * 512,)
        assert largest(made - at_once(generator, frames)) < 1e-5


@variants
def test_the_reach_of_a_frame(name: str) -> None:
    """Beyond it nothing changes, and little near its end; also with rates, kernels and dilations of another model."""
    other = NsfHifiganArchitecture(
        mel=Mel(hop_size=32), upsample_rates=(4, 4, 2), upsample_kernel_sizes=(8, 10, 6), upsample_initial_channel=32,
        resblock_kernel_sizes=(3, 5), resblock_dilation_sizes=((1, 2), (2, 6)), mini_nsf=name == "mini",
    )  # fmt: skip
    for generator in (loaded(name).generator, Generator(other)):
        architecture, frames = generator.architecture, 61
        reach = receptive_field_frames(architecture)
        mel_MF, f0_F = song(frames)
        changed_MF = mel_MF.clone()
        changed_MF[:, 30] += 100
        with torch.no_grad():
            before, after = (generator(m[None], f0_F[None])[0, 0].view(frames, -1) for m in (mel_MF, changed_MF))
        changed = (before != after).any(dim=1).nonzero().flatten()
        assert 30 - reach <= changed.min()
        assert changed.max() <= 30 + reach
        assert changed.max() >= 30 + reach / 2


def test_noise_is_of_the_seed_and_the_moment() -> None:
    generator = loaded("full").generator
    made = at_once(generator, 40)
    assert torch.equal(vocode(generator, *song(40), seed=1), made)
    assert largest(at_once(generator, 40, seed=2) - made) > 1e-3
    noise = FrameNoise(generator.architecture, 1, CPU)
    source_TH = noise.between(0, 600).source_BTH[0]
    assert torch.equal(noise.between(250, 520).source_BTH[0], source_TH[250 * 512 : 520 * 512])
    blocks = source_TH[: 512 * 512].view(2, -1)
    assert abs(torch.corrcoef(blocks)[0, 1].item()) < 0.01
    assert source_TH.std().item() == pytest.approx(1, abs=0.01)


def test_chunks_are_as_long_as_is_said() -> None:
    generator = loaded("mini").generator
    lengths = [len(wave_T) for wave_T in wave_chunks(generator, *song(70), seed=0, frames=30)]
    assert lengths == [30 * 512, 30 * 512, 10 * 512]
    seen: list[int] = []
    generator.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[-1]))
    reach = receptive_field_frames(generator.architecture)
    vocode(generator, *song(70), chunk_seconds=30 * 512 / 44100)
    assert seen == [30 + reach, 70 - (30 - reach), 70 - (60 - reach)]
    seen.clear()
    vocode(generator, *song(3), chunk_seconds=0)
    assert seen == [3, 3, 3]


def tone(seconds: float, rate_hz: int, hz: float = 220.0) -> np.ndarray[Any, Any]:
    at = np.arange(round(seconds * rate_hz)) / rate_hz
    return sum(0.5 / n * np.sin(2 * np.pi * hz * n * at) for n in range(1, 8)) * 0.3


def write(path: Path, wave: np.ndarray[Any, Any], rate_hz: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate_hz)
    return path


def run_vocode(model: Path, input: Path, output: Path, **options: Any) -> Vocoded:
    named = {"model": model, "input": input, "output_dir": output, "device": "cpu", "f0_method": "parselmouth"}
    progress = options.pop("progress", no_progress)
    return vocode_files(Vocode(**named, **options), progress=progress)


def relative(paths: list[Path], root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in paths)


def test_a_tree_of_recordings(tmp_path: Path) -> None:
    """Recordings of any rate, format and number of channels become wav files at the model's rate with their length."""
    model, root, out = openvpi_folder(tmp_path / "model", "mini"), tmp_path / "in", tmp_path / "out"
    stereo = np.stack([tone(0.3, 22050), 0.5 * tone(0.3, 22050)], axis=1)
    write(root / "deep" / "a.flac", stereo, 22050)
    write(root / "b.wav", tone(0.25, 48000), 48000)
    write(root / "b.ogg", tone(0.2, 44100), 44100)
    write(root / "click.WAV", tone(0.005, 44100), 44100)
    write(root / ".hidden.wav", tone(0.1, 44100), 44100)
    (root / "notes.txt").write_text("no sound")
    seen: list[tuple[int, int]] = []
    done = run_vocode(model, root, out, progress=lambda *counts: seen.append(counts))
    assert done.refused == []
    assert relative(done.written, out) == ["b.ogg.wav", "b.wav.wav", "click.wav", "deep/a.wav"]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for name, samples in (("deep/a.wav", 13230), ("b.wav.wav", 11025), ("b.ogg.wav", 8820), ("click.wav", 220)):
        info = soundfile.info(out / name)
        assert (info.samplerate, info.channels, info.subtype, info.frames) == (44100, 1, "PCM_16", samples)


def test_what_is_sung_is_the_mel_and_the_pitch_of_the_recording(tmp_path: Path) -> None:
    """The samples are equal, shifted by 3 semitones, in three chunks."""
    path = write(tmp_path / "in.wav", tone(0.5, 44100), 44100)
    model = openvpi_folder(tmp_path / "model", "full")
    done = run_vocode(model, path, tmp_path / "out", shift_semitones=3, chunk_seconds=0.2, seed=5)
    wave_T = np.pad(soundfile.read(path, dtype="float32")[0], (0, 44 * 512 - 22050))
    f0_F = torch.from_numpy(f0(wave_T, 44100, 512, "parselmouth"))
    assert f0_F[20].item() == pytest.approx(220, abs=0.5)
    mel_1MF = log_mel(torch.from_numpy(wave_T)[None], MEL)
    noise = FrameNoise(NsfHifiganArchitecture(), 5, CPU).between(0, 44)
    with torch.no_grad():
        expected = loaded("full").generator(mel_1MF, f0_F[None] * 2 ** (3 / 12), noise)[0, 0, :22050]
    made = torch.from_numpy(soundfile.read(done.written[0], dtype="float32")[0])
    assert largest(made - expected.clamp(-1, 1)) < 1e-4  # Three quantisation steps of 16 bits.


def test_a_long_recording_is_taken_apart_in_stretches(tmp_path: Path) -> None:
    """The mel and pitch equal those of the whole; a hop of 16 samples keeps 8192 frames short."""
    mel = Mel(8000, 16, 16, 64, 64, 0, 4000)
    glide = tone(1, 8000, 150.0)
    wave = np.tile(np.append(glide, np.zeros(700)), 19).astype(np.float32)
    path = write(tmp_path / "long.wav", wave, 8000)
    read = VocoderInputReader(mel, "parselmouth", 60, 400, CPU)(path)
    wave_T = soundfile.read(path, dtype="float32")[0]
    assert len(wave_T) // 16 > 8192
    assert read.samples == len(wave_T)
    whole_T = np.pad(wave_T, (0, -len(wave_T) % 16))
    assert largest(read.mel_MF - log_mel(torch.from_numpy(whole_T)[None], mel)[0]) < 1e-5
    pitch_F = torch.from_numpy(f0(whole_T, 8000, 16, "parselmouth", floor_hz=60, ceiling_hz=400))
    assert ((read.f0_F > 0) != (pitch_F > 0)).float().mean() < 0.002
    both = (read.f0_F > 0) & (pitch_F > 0)
    assert largest((read.f0_F - pitch_F)[both]) < 0.5


@pytest.mark.parametrize("layout", ["frames first", "bands first", "a batch of one", "two files", "a frame more"])
def test_mel_and_pitch_from_files(tmp_path: Path, layout: str) -> None:
    mel_MF, f0_F = (part.numpy() for part in song(30))
    root = tmp_path / "in"
    root.mkdir()
    if layout == "two files":
        np.save(root / "la.mel.npy", mel_MF.T)
        np.save(root / "la.f0.npy", f0_F.astype(np.float64))
    else:
        mel = {"bands first": mel_MF, "a batch of one": mel_MF.T[None]}.get(layout, mel_MF.T)
        longer = np.append(f0_F, 100.0) if layout == "a frame more" else f0_F
        np.savez(root / "la.npz", mel=mel, f0=longer[None])
    done = run_vocode(openvpi_folder(tmp_path / "model", "mini"), root, tmp_path / "out")
    assert relative(done.written, tmp_path / "out") == ["la.wav"]
    expected = vocode(loaded("mini").generator, *song(30))
    made = torch.from_numpy(soundfile.read(done.written[0], dtype="float32")[0])
    assert made.shape == (30 * 512,)
    assert largest(made - expected.clamp(-1, 1)) < 2e-5


def npz(path: Path, **changes: Any) -> Path:
    mel_MF, f0_F = (part.numpy().copy() for part in song(30))
    arrays = {"mel": mel_MF.T, "f0": f0_F, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def spoiled(array: Tensor, value: float) -> np.ndarray[Any, Any]:
    made = array.numpy().copy()
    made[..., 7] = value
    return made


@each_row(
    ({"mel": spoiled(song(30)[0], float("nan")).T}, "mel is NaN or infinite in frame 7"),
    ({"f0": spoiled(song(30)[1], float("inf"))}, "f0 is NaN, infinite or negative in frame 7"),
    ({"f0": spoiled(song(30)[1], -1)}, "f0 is NaN, infinite or negative in frame 7"),
    ({"mel": np.full((30, 128), 1e300)}, "mel is NaN or infinite in frame 0"),
    ({"f0": np.zeros(28)}, "a mel of 30 frames and an f0 of 28"),
    ({"f0": np.zeros((3, 10))}, r"f0 of shape \(3, 10\), expected \(frames,\)"),
    ({"mel": np.zeros((30, 80))}, r"a mel of shape \(30, 80\), expected \(frames, 128\)"),
    ({"mel": np.zeros((0, 128)), "f0": np.zeros(0)}, "a mel of 0 frames and an f0 of 0"),
    ({"sr": 24000}, "its sr is 24000, that of the model 44100"),
    ({"hop_length": 256, "sr": 44100}, "its hop_length is 256, that of the model 512"),
    ({"f0": None}, "does not hold both mel and f0"),
    ({"f0": np.array(["a"] * 30)}, "holds values that are not numbers"),
    ({"f0": np.array([None] * 30)}, "damaged, or no arrays of numbers"),
)
def test_features_that_cannot_be_sung(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = npz(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=rf"a\.npz: {said}"):
        VocoderInputReader(MEL, "parselmouth", 40, 1100, CPU)(path)


def test_mels_and_pitches_in_other_units_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wave = np.concatenate([tone(1, 44100, 440), np.zeros(11264)]).astype(np.float32)
    mel_MF = log_mel(torch.from_numpy(wave)[None], MEL)[0].numpy()
    f0_F = np.full(mel_MF.shape[1], 440.0)
    bass_MF = log_mel(torch.from_numpy(np.append(tone(1, 44100, 70), np.zeros(11264)).astype(np.float32))[None], MEL)[0]
    amplitude_MF = np.exp(mel_MF)
    rows = (
        (mel_MF, f0_F, ""),
        (bass_MF.numpy(), np.full_like(f0_F, 70.0), ""),
        (mel_MF - 0.4, np.zeros_like(f0_F), ""),
        (mel_MF / np.log(10), f0_F, "from -5 to .* no natural logarithm of amplitudes; hint: store ln.*2.3026"),
        (20 / np.log(10) * mel_MF, f0_F, "no natural logarithm"),
        (2 * mel_MF, f0_F, "no natural logarithm"),
        (mel_MF / np.log(2), f0_F, "no natural logarithm"),
        (amplitude_MF, f0_F, "no natural logarithm"),
        ((mel_MF + 12) / 7 - 1, f0_F, "no natural logarithm"),
        (mel_MF, np.full_like(f0_F, 33.0), "f0, with a median of 33, is likely not in Hz; hint: store it in Hz"),
        (mel_MF, np.log(f0_F), "not in Hz"),
        (mel_MF, 5700 + 0 * f0_F, "not in Hz"),
        (mel_MF, np.where(np.arange(len(f0_F)) < 60, 115.0, 1.0), "not in Hz"),  # the bins of a coarse pitch
    )

    def check(mel: np.ndarray[Any, Any], pitch: np.ndarray[Any, Any], said: str) -> None:
        path = npz(tmp_path / "a.npz", mel=mel, f0=pitch)
        found = ""
        try:
            VocoderInputReader(MEL, "parselmouth", 40, 1100, CPU)(path)
        except UserError as error:
            found = f"{error.message}; hint: {error.hint}"
        assert re.search(said, found) if said else not found, found

    check_rows(rows, check)
    caplog.clear()
    check(mel_MF, np.full_like(f0_F, 69.0), "")
    assert "its f0, about 69, is read as Hz, a deep bass: convert it if it is in notes of MIDI" in caplog.text


def test_one_bad_file_of_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, out = tmp_path / "in", tmp_path / "out"
    write(root / "good.wav", tone(0.1, 44100), 44100)
    write(root / "silent.wav", np.zeros(4410), 44100)
    write(root / "empty.wav", np.zeros(0), 44100)
    soundfile.write(root / "nan.wav", np.full(4410, np.nan, np.float32), 44100, subtype="FLOAT")
    (root / "torn.flac").write_bytes(write(tmp_path / "whole.flac", tone(0.1, 44100), 44100).read_bytes()[:30])
    (root / "torn.npz").write_bytes(npz(tmp_path / "whole.npz").read_bytes()[:1000])
    np.save(root / "alone.mel.npy", np.zeros((4, 128)))
    npz(root / "unvoiced.npz", f0=np.zeros(30))  # It is valid.
    done = run_vocode(openvpi_folder(tmp_path / "model", "mini"), root, out)
    assert relative(done.written, out) == ["good.wav", "unvoiced.wav"]
    said = {Path(refusal.path).name: refusal.detail for refusal in done.refused}
    assert said.keys() == {"silent.wav", "empty.wav", "nan.wav", "torn.flac", "torn.npz", "alone.mel.npy"}
    assert said["silent.wav"] == "silent; its peak is 0 of full scale"
    assert said["empty.wav"] == "holds no sound"
    assert said["nan.wav"].startswith("a sample is no finite number")
    assert said["torn.flac"].startswith("cannot be decoded")
    assert said["torn.npz"].startswith("damaged, or no arrays of numbers")
    assert said["alone.mel.npy"] == "no alone.f0.npy next to it"
    assert sum("left out" in message for message in caplog.messages) == 6
    for name in ("good.wav", "unvoiced.npz"):
        (root / name).unlink()
    with pytest.raises(UserError, match=r"no usable input: .*empty\.wav: holds no sound"):
        run_vocode(tmp_path / "model", root, out)
    with pytest.raises(UserError, match=r"empty\.wav: holds no sound") as alone:  # A single file has its own advice.
        run_vocode(tmp_path / "model", root / "empty.wav", out)
    assert alone.value.hint == "leave it out, or record it again"


@pytest.mark.parametrize(("name", "ceiling_hz"), [("mini", 44100 / 8 / 2), ("full", 22050)])
def test_pitch_above_what_the_source_can_be_is_clipped(
    tmp_path: Path, name: str, ceiling_hz: float, caplog: pytest.LogCaptureFixture
) -> None:
    f0_F = song(30)[1]
    f0_F[3:5] = ceiling_hz / 2 + 1
    path = npz(tmp_path / "a.npz", f0=f0_F.numpy())
    with caplog.at_level(logging.WARNING):
        done = run_vocode(openvpi_folder(tmp_path / "model", name), path, tmp_path / "out", shift_semitones=12)
    assert f"2 frames are above {ceiling_hz:.0f} Hz" in caplog.text
    expected = vocode(loaded(name).generator, song(30)[0], (2 * f0_F).clamp(max=ceiling_hz))
    made = torch.from_numpy(soundfile.read(done.written[0], dtype="float32")[0])
    assert largest(made - expected.clamp(-1, 1)) < 2e-5


def test_nothing_to_run_vocode(tmp_path: Path) -> None:
    model = openvpi_folder(tmp_path / "model", "mini")
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="no such file or folder"):
        run_vocode(model, tmp_path / "elsewhere", tmp_path / "out")
    with pytest.raises(UserError, match="no recording and no mel in it"):
        run_vocode(model, tmp_path / "in", tmp_path / "out")
    path = write(tmp_path / "in" / "a.wav", tone(0.1, 44100), 44100)
    before = path.read_bytes()
    for input in (tmp_path / "in", path):
        with pytest.raises(UserError, match=r"a\.wav would be overwritten"):
            run_vocode(model, input, tmp_path / "in")
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        run_vocode(model, path, tmp_path / "file")
    np.save(tmp_path / "mel.npy", np.zeros((4, 128)))
    with pytest.raises(UserError, match=r"mel\.npy: mel or pitch\?"):
        run_vocode(model, tmp_path / "mel.npy", tmp_path / "out")


def test_a_model_at_another_rate(tmp_path: Path) -> None:
    """The model has 16 kHz and hops of 256: a recording of 44.1 kHz is resampled to 16 kHz."""
    architecture = NsfHifiganArchitecture(
        mel=Mel(16000, 40, 256, 1024, 1024, 0, 8000), upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4),
        upsample_initial_channel=32,
    )  # fmt: skip
    export_openvpi(LoadedVocoder(Generator(architecture).requires_grad_(False), None, ""), tmp_path / "model")
    path = write(tmp_path / "a.wav", tone(0.3, 44100), 44100)
    done = run_vocode(tmp_path / "model", path, tmp_path / "out")
    info = soundfile.info(done.written[0])
    assert (info.samplerate, info.frames) == (16000, 4800)
