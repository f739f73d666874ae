"""Tests resampling, trimming, and reading files of all formats."""

import math
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from gputrain.audio import io
from gputrain.audio.io import read_sound, resample, trim
from gputrain.errors import UserError
from gputrain.files import to_int16, write_wav
from tests.tables import check_rows, each_row


def sine(hz: float, samples: int = 8192, rate_hz: int = 44100) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz / rate_hz * torch.arange(samples, dtype=torch.float64)).float()


@each_row((44100, 16000), (16000, 44100), (22050, 44100), (48000, 44100), (11025, 24001))
def test_resampled_sines_keep_their_pitch_and_loudness(from_hz: int, to_hz: int) -> None:
    made_T = resample(sine(1000, from_hz // 2, from_hz).numpy(), from_hz, to_hz)
    assert len(made_T) == math.ceil(from_hz // 2 * to_hz / from_hz)
    assert made_T.dtype == np.float32
    expected_T = sine(1000, len(made_T), to_hz).numpy()
    inner = slice(to_hz // 20, -to_hz // 20)
    assert np.abs(made_T - expected_T)[inner].max() < 1e-3


def test_resampling_removes_what_the_lower_rate_cannot_hold() -> None:
    made_T = resample(sine(12000, 22050).numpy(), 44100, 16000)
    assert np.abs(made_T)[800:-800].max() < 1e-3


def loud_frames(wave_T: np.ndarray, top_db: float) -> tuple[int, int]:
    """Returns the first and the last frame (2048 samples around each 512th) with a mean power within `top_db` of the
    highest."""
    powers = []
    for middle in range(0, len(wave_T) + 1, 512):
        window_T = wave_T[max(0, middle - 1024) : middle + 1024].astype(np.float64)
        powers.append(max(np.square(window_T).sum() / 2048, 1e-10))
    loud = [frame for frame, power in enumerate(powers) if 10 * math.log10(max(powers) / power) < top_db]
    return loud[0], loud[-1]


@each_row(15.0, 45.0)
def test_trimming_keeps_the_frames_within_so_many_decibels_of_the_loudest(top_db: float) -> None:
    random = np.random.default_rng(0)
    for samples in (1, 700, 2048, 20000, 30011):
        wave_T = random.standard_normal(samples).astype(np.float32)
        wave_T[: samples // 3] *= 0.03
        wave_T[samples // 2 :] *= 1e-3
        first, last = loud_frames(wave_T, top_db)
        kept_T = trim(wave_T, top_db)
        assert np.array_equal(kept_T, wave_T[first * 512 : (last + 1) * 512])
    silence_T = np.zeros(5000, np.float32)
    assert len(trim(silence_T, top_db)) == 5000


@each_row(
    (".wav", "PCM_16", 1e-4), (".wav", "PCM_U8", 1e-2), (".wav", "PCM_24", 1e-6), (".wav", "FLOAT", 1e-7),
    (".wav", "DOUBLE", 1e-7), (".flac", "PCM_16", 1e-4), (".ogg", "VORBIS", 0.05), (".mp3", "MPEG_LAYER_III", 0.05),
    (".aiff", "PCM_16", 1e-4),
)  # fmt: skip
def test_files_of_every_kind_to_one_channel(tmp_path: Path, suffix: str, subtype: str, error: float) -> None:
    left, right = sine(440, 30000).numpy(), sine(660, 30000).numpy()
    path = tmp_path / f"klang ü{suffix}"
    for channels in (1, 2):
        written = np.stack([left, right], axis=1)[:, :channels]
        soundfile.write(path, written, 44100, subtype=subtype)
        wave_T, rate_hz = read_sound(path)
        assert (rate_hz, wave_T.dtype, wave_T.shape) == (44100, np.float32, (30000,))
        assert np.abs(wave_T - written.mean(axis=1))[2000:-2000].max() < error


def test_a_long_file_is_put_together_from_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wave_T = sine(440, 10001).numpy()
    soundfile.write(tmp_path / "long.wav", wave_T, 8000, subtype="FLOAT")
    monkeypatch.setattr(io, "BLOCK", 1000)
    assert np.array_equal(read_sound(tmp_path / "long.wav").wave_T, wave_T)


def test_wav_in_16_bits(tmp_path: Path) -> None:
    wave_T = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -7.0, 1 / 32768, 0.4 / 32768], np.float32)
    write_wav(tmp_path / "out.wav", wave_T, 22050)
    content = (tmp_path / "out.wav").read_bytes()
    assert struct.unpack("<9h", content[-18:]) == (0, 16384, -16384, 32767, -32768, 32767, -32768, 1, 0)
    assert soundfile.info(tmp_path / "out.wav").subtype == "PCM_16"
    read_T, rate_hz = read_sound(tmp_path / "out.wav")
    assert rate_hz == 22050
    assert np.array_equal(to_int16(read_T), to_int16(wave_T))


SPEECH = np.sin(np.arange(16000) / 9) * np.linspace(0.5, 1, 16000)
SPEECH = (0.6 / np.abs(SPEECH).max() * SPEECH).astype(np.float32)


@each_row(
    ("a.wav", 1.6 / 0.6, "FLOAT", 1.0, "its samples reach 1.6 times full scale and are scaled down"),
    ("a.wav", 1.0, "FLOAT", 0.6, ""), ("a.wav", 1.0, "PCM_32", 0.6, ""), ("a.wav", 0.01, "PCM_24", 0.006, ""),
)  # fmt: skip
def test_floating_point_of_another_scale(
    tmp_path: Path, name: str, factor: float, subtype: str, peak: float, remark: str
) -> None:
    """The peak becomes that of the recording before it was multiplied, in whole files and in blocks."""
    soundfile.write(tmp_path / name, SPEECH.astype(np.float64) * factor, 16000, subtype=subtype)
    remarks: list[str] = []
    wave_T = read_sound(tmp_path / name, remarks).wave_T
    np.testing.assert_allclose(wave_T, SPEECH / np.abs(SPEECH).max() * peak, atol=1e-4)
    assert remarks == ([remark] if remark else [])
    assert np.array_equal(np.concatenate(list(io.read_in_blocks(tmp_path / name, 16000))), wave_T)


@each_row(
    (100.0, "FLOAT", "reach 60, and full scale of floating point is 1"),
    (32768.0, "FLOAT", "reach 1.97e\\+04, and full scale"),
    (1e13, "DOUBLE", r"reach 6e\+12, and full scale"),
    (2.0**-8, "PCM_32", "32 bits reach 5033165, which is the scale of fewer bits"),
)
def test_an_unknown_scale_is_named(tmp_path: Path, factor: float, subtype: str, message: str) -> None:
    soundfile.write(tmp_path / "a.wav", SPEECH.astype(np.float64) * factor, 16000, subtype)
    with pytest.raises(UserError, match=message):
        read_sound(tmp_path / "a.wav")


@each_row(
    ([1, -1], 0), ([1, -0.97], 0), ([-0.5, 1], 1), ([1, -1, 1, -1], 0), ([0, 0.8, -1, 0], 2), ([1, 1], None),
    ([1, 0], None), ([1, -0.2], None), ([0, 0, 1, 0, 0, 0], None),
)  # fmt: skip
def test_channels_that_cancel_each_other_are_not_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gains: list[float], taken: int | None
) -> None:
    channels_TC = SPEECH[:, None] * np.array(gains, np.float32)
    for suffix in ("wav", "flac"):
        soundfile.write(tmp_path / f"a.{suffix}", channels_TC, 16000)
        caplog.clear()
        wave_T = read_sound(tmp_path / f"a.{suffix}").wave_T
        expected_T = channels_TC.mean(axis=1) if taken is None else channels_TC[:, taken]
        np.testing.assert_allclose(wave_T, expected_T, atol=2 / 32768)
        said = [] if taken is None else [f"{tmp_path}/a.{suffix}: its channels cancel each other when mixed, so that "]
        assert [message.partition("channel ")[0] for message in caplog.messages] == said


@each_row((-1.0, True), (1.0, False))
def test_one_of_twenty_seconds_in_opposite_phase(tmp_path: Path, sign: float, cancels: bool) -> None:
    left_T = np.tile(SPEECH, 20)
    right_T = np.where(np.arange(len(left_T)) // 16000 == 5, sign * left_T, left_T)
    soundfile.write(tmp_path / "a.wav", np.stack([left_T, right_T], axis=1), 16000)
    read_sound(tmp_path / "a.wav", remarks := [])
    assert bool(remarks) == cancels


def test_a_constant_offset_hides_no_opposite_phases(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([SPEECH + 0.3, 0.3 - SPEECH], axis=1), 16000)
    wave_T = read_sound(tmp_path / "a.wav", remarks := []).wave_T
    assert len(remarks) == 1
    assert np.std(wave_T) == pytest.approx(np.std(SPEECH), rel=1e-3)


def test_a_second_reading_in_blocks_says_nothing_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([SPEECH, -SPEECH], axis=1), 16000)
    known: list[io.Mixing] = []
    for _ in range(2):
        assert np.abs(np.concatenate(list(io.read_in_blocks(tmp_path / "a.wav", 8000, known)))).max() > 0.5
    assert len(caplog.messages) == 1


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*cannot be written"):
        write_wav(tmp_path / "nowhere" / "out.wav", np.zeros(10), 44100)
    with pytest.raises(ValueError, match="NaN"):
        write_wav(tmp_path / "out.wav", np.array([0.0, np.nan]), 44100)
    assert not (tmp_path / "out.wav").exists()


@each_row((16000, 1), (44100, 2), (8000, 1), (22050, 1), (48000, 2))
def test_reading_in_blocks_gives_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate_hz: int, channels: int
) -> None:
    monkeypatch.setattr(io, "BLOCK", 1000)
    file = tmp_path / "sound.wav"
    soundfile.write(file, np.random.default_rng(0).uniform(-0.5, 0.5, size=(rate_hz + 123, channels)), rate_hz)
    whole_T = resample(*read_sound(file), 16000)
    blocks = list(io.read_in_blocks(file, 16000))
    assert len(blocks) > 5
    np.testing.assert_allclose(np.concatenate(blocks), whole_T, atol=1e-6)


needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")


def by_ffmpeg(path: Path, *words: str) -> Path:
    subprocess.run(["ffmpeg", "-v", "error", "-nostdin", *words, str(path)], check=True)
    return path


@needs_ffmpeg
@each_row("a.m4a", "-a b.aac", "a%d.webm", "a.mkv", "a.mp4")
def test_ffmpeg_decodes_what_libsndfile_does_not(tmp_path: Path, name: str) -> None:
    source, rate_hz = tmp_path / "source.wav", 48000
    wave_T = sine(440, rate_hz, rate_hz)
    write_wav(source, wave_T.numpy(), rate_hz)
    picture = ["-f", "lavfi", "-i", "color=c=red:s=64x64:d=1"] if name == "a.mp4" else []
    read_T, read_hz = read_sound(by_ffmpeg(tmp_path / name, "-i", str(source), *picture))
    assert read_hz == rate_hz
    assert abs(len(read_T) - rate_hz) < 0.1 * rate_hz  # Codecs add silence at the ends.
    spectrum = np.abs(np.fft.rfft(read_T[4800:43200]))
    assert np.argmax(spectrum) * rate_hz / 38400 == pytest.approx(440, abs=2)
    assert np.sqrt(np.mean(read_T[4800:43200] ** 2)) == pytest.approx(0.5 / math.sqrt(2), rel=0.05)
    blocks = list(io.read_in_blocks(tmp_path / name, 16000))
    assert abs(sum(map(len, blocks)) - 16000) < 1600
    assert not list(Path(tempfile.gettempdir()).glob("gputrain-*/sound.wav"))


@needs_ffmpeg
def test_what_ffmpeg_cannot_read_is_named(tmp_path: Path) -> None:
    silent = by_ffmpeg(tmp_path / "silent.mp4", "-f", "lavfi", "-i", "color=c=red:s=64x64:d=1")
    with pytest.raises(UserError, match=r"silent\.mp4: cannot be decoded by ffmpeg: it has no sound track"):
        read_sound(silent)
    (tmp_path / "broken.m4a").write_bytes(b"no sound")
    with pytest.raises(UserError, match=r"broken\.m4a: cannot be decoded by ffmpeg: "):
        read_sound(tmp_path / "broken.m4a")


def test_without_ffmpeg_its_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "a.webm").write_bytes(b"any")
    with pytest.raises(UserError, match="cannot be decoded without ffmpeg, which is not installed") as failure:
        read_sound(tmp_path / "a.webm")
    assert "install" in str(failure.value.hint)


def test_damage_that_libsndfile_passes_over_is_named(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    wave_T = (0.3 * random.standard_normal(120000)).clip(-1, 1)
    wave_T[80000:104000] = 0  # Digital silence is no damage.

    def half(content: bytes) -> bytes:
        return content[: len(content) // 2]

    def hole(content: bytes) -> bytes:
        first = len(content) // 4 // 512 * 512
        return content[:first] + bytes(512) + content[first + 512 :]

    def twice(content: bytes) -> bytes:
        return content + content

    def flip(content: bytes) -> bytes:
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]

    rows = (
        *(("a.wav", change, said) for change, said in ((half, "of the 240000 bytes"), (hole, "are zero"), (bytes, ""))),
        *(("a.aiff", change, said) for change, said in ((half, "damaged: it holds"), (bytes, ""))),
        *(("a.ogg", change, "damaged") for change in (half, hole, flip)),
        ("a.mp3", half, "it holds"),
        *((name, twice, "another recording follows in it") for name in ("a.mp3", "a.flac")),
        *(("a.flac", change, "cannot be decoded") for change in (half, hole, flip)),
        *((name, bytes, "") for name in ("a.ogg", "a.mp3", "a.flac")),
    )

    def check(name: str, change: Callable[[bytes], bytes], said: str) -> None:
        path = tmp_path / name
        soundfile.write(path, wave_T, 16000, bitrate_mode="VARIABLE" if name == "a.mp3" else None)
        path.write_bytes(change(path.read_bytes()))
        if said:
            with pytest.raises(UserError, match=said):
                read_sound(path, [])
        else:
            assert len(read_sound(path, []).wave_T) == 120000

    check_rows(rows, check)


def test_two_speakers_of_a_call_are_named(tmp_path: Path) -> None:
    """Turns with crosstalk, and two people at once; the same voice in both channels is no call."""
    first_T, second_T = SPEECH, np.random.default_rng(0).uniform(-0.6, 0.6, len(SPEECH)).astype(np.float32)
    turns_TC = np.concatenate(
        [np.stack([wave_T, 0.05 * wave_T], 1)[:, ::step] for wave_T, step in ((first_T, 1), (second_T, -1))]
    )
    both_TC, same_TC = np.stack([first_T, second_T], 1), np.stack([first_T, 0.5 * first_T], 1)
    for name, wave_TC, is_call in (("turns", turns_TC, True), ("both", both_TC, True), ("same", same_TC, False)):
        soundfile.write(tmp_path / f"{name}.wav", wave_TC, 16000, subtype="FLOAT")
        wave_T = read_sound(tmp_path / f"{name}.wav", remarks := []).wave_T
        assert any("such as the two speakers of a call" in remark for remark in remarks) == is_call, name
        np.testing.assert_allclose(wave_T, wave_TC.mean(axis=1), atol=1e-6)
