"""Sound: the log-mel spectrogram against a stored oracle and by its properties, rates, and files of every kind."""

import contextlib
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from gputrain.audio import mel
from gputrain.audio.mel import log_mel, read_sound, resample
from gputrain.engine.wav import to_int16, write_wav
from gputrain.errors import UserError
from gputrain.planner.fake_runtime import on_fake_tensors

ORACLE = Path(__file__).parent.parent / "data" / "vocoder" / "log_mel_44k.npz"


@dataclass(frozen=True)
class Settings:
    """Those of the oracle; all fields of mel.MelSettings."""

    sampling_rate: int = 44100
    num_mels: int = 128
    hop_size: int = 512
    win_size: int = 2048
    n_fft: int = 2048
    fmin: float = 40.0
    fmax: float = 16000.0


def sine(hz: float, samples: int = 8192, rate_hz: int = 44100) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz / rate_hz * torch.arange(samples, dtype=torch.float64)).float()


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def slaney_bank(mel: Settings) -> np.ndarray:
    """(M, N) in float64: triangles of equal area, whose corners are read off a table of the scale's two pieces."""
    table_mel = np.linspace(0, 80, 800_001)  # 15 mel are 1000 Hz, and 27 more a factor of 6.4
    table_hz = np.where(table_mel < 15, table_mel / 0.015, 1000 * np.exp((table_mel - 15) * np.log(6.4) / 27))
    ends_mel = np.interp([mel.fmin, mel.fmax], table_hz, table_mel)
    corners_hz = np.interp(np.linspace(*ends_mel, mel.num_mels + 2), table_mel, table_hz)
    hz_N = np.fft.rfftfreq(mel.n_fft, 1 / mel.sampling_rate)
    bands = zip(corners_hz, corners_hz[1:], corners_hz[2:], strict=False)
    return np.stack([np.interp(hz_N, band, [0, 2 / (band[2] - band[0]), 0]) for band in bands])


def exact_log_mel(wave_T: np.ndarray, mel: Settings, key_shift: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """(M, F) twice, in float64: the log-mel, and how far rounding in fp32 may carry a computation of it.

    A Fourier transform of n samples adds to each frequency, however quiet it is, an error of up to 6.7 log2(n) units
    of rounding times the norm of what it transforms (Higham, Accuracy and Stability of Numerical Algorithms, theorem
    24.2). A band adds up the errors of its frequencies. The rest rounds some results relative to themselves.
    """
    rounding = 2.0**-24
    n, width = (round(size * 2 ** (key_shift / 12)) for size in (mel.n_fft, mel.win_size))
    before = (n - mel.hop_size) // 2
    padded_T = np.pad(wave_T.astype(np.float64), (before, n - mel.hop_size - before), mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(width) / width)
    window_n = np.pad(window, ((n - width) // 2, (n - width + 1) // 2))
    frames_Fn = np.stack([padded_T[at : at + n] for at in range(0, len(padded_T) - n + 1, mel.hop_size)]) * window_n
    frames_Fn = frames_Fn[: len(wave_T) // mel.hop_size]
    magnitude_FN = np.abs(np.fft.rfft(frames_Fn))[:, : mel.n_fft // 2 + 1]
    bank_MN = slaney_bank(mel)[:, : magnitude_FN.shape[1]]
    mel_MF = mel.win_size / width * bank_MN @ magnitude_FN.T
    norm_F = np.linalg.norm(frames_Fn, axis=1)
    error_MF = 6.7 * math.log2(n) * rounding * mel.win_size / width * bank_MN.sum(axis=1)[:, None] * norm_F
    floored_MF = np.maximum(mel_MF, 1e-5)
    return np.log(floored_MF), error_MF / floored_MF + 16 * rounding


@pytest.mark.parametrize("key_shift", [0, 5, -3])
def test_log_mel_and_the_oracle_are_within_rounding_of_float64(key_shift: int) -> None:
    with np.load(ORACLE) as oracle:
        wave_T, stored_MF = oracle["wav"], oracle[f"mel_shift_{key_shift}"][0]
    made_MF = log_mel(torch.from_numpy(wave_T)[None], Settings(), key_shift=key_shift)[0].numpy()
    exact_MF, rounding_MF = exact_log_mel(wave_T, Settings(), key_shift)
    assert made_MF.shape == stored_MF.shape == exact_MF.shape
    assert np.median(rounding_MF) < 2e-4  # so that what follows says something
    assert (np.abs(stored_MF - exact_MF) < rounding_MF).all()
    assert (np.abs(made_MF - exact_MF) < rounding_MF).all()


def test_log_mel_at_other_settings() -> None:
    """With a window shorter than the transform, another rate and a hop that does not divide either."""
    mel = Settings(sampling_rate=24000, num_mels=80, hop_size=300, win_size=1200, n_fft=2048, fmin=0, fmax=12000)
    wave_T = np.random.default_rng(0).standard_normal(24000).astype(np.float32) * 0.1
    made_MF = log_mel(torch.from_numpy(wave_T)[None], mel)[0].numpy()
    exact_MF, rounding_MF = exact_log_mel(wave_T, mel)
    assert made_MF.shape == (80, 80)
    assert (np.abs(made_MF - exact_MF) < rounding_MF).all()


@pytest.mark.parametrize("samples", [1, 511, 512, 768, 769, 1024, 5120, 5121, 6000])
@pytest.mark.parametrize("key_shift", [0.0, 0.3, 12.0, -12.0])
def test_a_frame_for_every_whole_hop(samples: int, key_shift: float) -> None:
    made = log_mel(sine(440, samples)[None].expand(2, -1), Settings(), key_shift=key_shift)
    assert made.shape == (2, 128, samples // 512)
    assert made.isfinite().all()
    assert torch.equal(made[0], made[1])


def test_silence_is_the_floor_and_has_no_gradient() -> None:
    wave_BT = torch.zeros(1, 4096, requires_grad=True)
    made = log_mel(wave_BT, Settings())
    made.sum().backward()
    assert torch.equal(made, torch.full((1, 128, 8), math.log(1e-5)))
    assert torch.equal(wave_BT.grad, torch.zeros(1, 4096))


def test_gradient_against_finite_differences() -> None:
    torch.manual_seed(0)
    wave_BT, direction = 0.3 * torch.randn(1, 2048), torch.randn(1, 2048)
    wave_BT.requires_grad_()
    log_mel(wave_BT, Settings()).sum().backward()
    with torch.no_grad():
        after, before = (log_mel(wave_BT + step * direction, Settings()).double().sum() for step in (1e-3, -1e-3))
    assert ((wave_BT.grad * direction).sum()).item() == pytest.approx(((after - before) / 2e-3).item(), rel=0.01)


def test_a_key_shift_is_a_sine_of_that_pitch() -> None:
    """The sine's spectrum is the same in windows that are longer by as much as its period."""
    shifted = log_mel(sine(440)[None], Settings(), key_shift=12)
    higher = log_mel(sine(880)[None], Settings())
    inner = slice(4, -4)  # away from the ends, where windows of two lengths see different reflections
    loud = higher[..., inner] > -4
    assert loud.any()
    assert largest((shifted - higher)[..., inner][loud]) < 0.05
    assert largest((log_mel(sine(440)[None], Settings()) - higher)[..., inner][loud]) > 1


def test_fp32_under_autocast_and_for_16_bit_waves() -> None:
    wave_BT = sine(440)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = log_mel(wave_BT, Settings())
    assert torch.equal(within, log_mel(wave_BT, Settings()))
    coarse_BT = wave_BT.bfloat16()
    assert torch.equal(log_mel(coarse_BT, Settings()), log_mel(coarse_BT.float(), Settings()))


def test_a_bank_made_on_shapes_or_in_inference_serves_training() -> None:
    for index, mode in enumerate((on_fake_tensors, torch.inference_mode)):
        mel = replace(Settings(), num_mels=20 + index)  # of which there is no bank yet
        with mode():
            assert log_mel(torch.zeros(1, 4096), mel).shape == (1, 20 + index, 8)
        wave_BT = sine(440, 4096)[None].requires_grad_()
        made = log_mel(wave_BT, mel)
        made.sum().backward()
        assert made.max().item() > 0  # a number
        assert wave_BT.grad.abs().max().item() > 0


def test_a_bank_is_made_once() -> None:
    mel._bank.cache_clear()
    for key_shift in (0, 5, -3, 0):
        log_mel(torch.zeros(1, 4096), Settings(), key_shift=key_shift)
    assert mel._bank.cache_info().misses == 1


@pytest.mark.parametrize(
    ("from_hz", "to_hz"), [(44100, 16000), (16000, 44100), (22050, 44100), (48000, 44100), (11025, 24001)]
)
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
    """First and last of the frames of 2048 samples about each 512th whose mean power is within `top_db` of the most."""
    powers = []
    for middle in range(0, len(wave_T) + 1, 512):
        heard = wave_T[max(0, middle - 1024) : middle + 1024].astype(np.float64)
        powers.append(max(np.square(heard).sum() / 2048, 1e-10))
    loud = [frame for frame, power in enumerate(powers) if 10 * math.log10(max(powers) / power) < top_db]
    return loud[0], loud[-1]


@pytest.mark.parametrize("top_db", [15.0, 45.0])
def test_trimming_keeps_the_frames_within_so_many_decibels_of_the_loudest(top_db: float) -> None:
    random = np.random.default_rng(0)
    for samples in (1, 700, 2048, 20000, 30011):
        wave_T = random.standard_normal(samples).astype(np.float32)
        wave_T[: samples // 3] *= 0.03
        wave_T[samples // 2 :] *= 1e-3
        first, last = loud_frames(wave_T, top_db)
        kept_T = mel.trim(wave_T, top_db)
        assert np.array_equal(kept_T, wave_T[first * 512 : (last + 1) * 512])
    silence_T = np.zeros(5000, np.float32)
    assert len(mel.trim(silence_T, top_db)) == 5000


@pytest.mark.parametrize(
    ("suffix", "subtype", "error"),
    [
        (".wav", "PCM_16", 1e-4), (".wav", "PCM_U8", 1e-2), (".wav", "PCM_24", 1e-6), (".wav", "FLOAT", 1e-7),
        (".wav", "DOUBLE", 1e-7), (".flac", "PCM_16", 1e-4), (".ogg", "VORBIS", 0.05), (".mp3", "MPEG_LAYER_III", 0.05),
        (".aiff", "PCM_16", 1e-4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 2])
def test_files_of_every_kind_to_one_channel(
    tmp_path: Path, suffix: str, subtype: str, error: float, channels: int
) -> None:
    left, right = sine(440, 30000).numpy(), sine(660, 30000).numpy()
    written = np.stack([left, right], axis=1)[:, :channels]
    path = tmp_path / f"klang ü{suffix}"
    soundfile.write(path, written, 44100, subtype=subtype)
    wave_T, rate_hz = read_sound(path)
    assert rate_hz == 44100
    assert wave_T.dtype == np.float32
    assert wave_T.shape == (30000,)
    assert np.abs(wave_T - written.mean(axis=1))[2000:-2000].max() < error


def test_a_long_file_is_put_together_from_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wave_T = sine(440, 10001).numpy()
    soundfile.write(tmp_path / "long.wav", wave_T, 8000, subtype="FLOAT")
    monkeypatch.setattr(mel, "BLOCK", 1000)
    assert np.array_equal(read_sound(tmp_path / "long.wav").wave_T, wave_T)


def broken_files(folder: Path) -> dict[str, Path]:
    files = {name: folder / f"{name}.wav" for name in ("missing", "empty", "no_samples", "text", "nan", "infinite")}
    files["cut_header"] = folder / "cut.flac"
    files["folder"] = folder
    files["empty"].write_bytes(b"")
    soundfile.write(files["no_samples"], np.empty(0, np.float32), 44100)
    files["text"].write_text("not a sound, whatever its name says " * 10)
    wave_T = sine(440, 4410).numpy()
    for name, value in (("nan", np.nan), ("infinite", np.inf)):
        wave_T[2205] = value
        soundfile.write(files[name], wave_T, 44100, subtype="FLOAT")
    soundfile.write(files["cut_header"], sine(440, 4410).numpy(), 44100)
    files["cut_header"].write_bytes(files["cut_header"].read_bytes()[:30])
    return files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such file"), ("folder", "no such file"), ("empty", "cannot be decoded"),
        ("text", "cannot be decoded"), ("cut_header", "cannot be decoded"), ("no_samples", "holds no sound"),
        ("nan", "at 0.050 seconds"), ("infinite", "at 0.050 seconds"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    path = broken_files(tmp_path)[name]
    with pytest.raises(UserError, match=message) as raised:
        read_sound(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert raised.value.hint


def test_damage_in_the_middle_is_a_user_error_or_a_finite_sound(tmp_path: Path) -> None:
    """Decoders forgive much; none may end in another exception, or in samples that are no numbers."""
    random = np.random.default_rng(0)
    for suffix in (".flac", ".ogg", ".mp3", ".wav"):
        path = tmp_path / f"damaged{suffix}"
        soundfile.write(path, sine(440, 20000).numpy(), 44100)
        whole = bytearray(path.read_bytes())
        for _ in range(5):
            damaged = whole.copy()
            for place in random.integers(0, len(whole), 30):
                damaged[place] = random.integers(256)
            path.write_bytes(damaged[: random.integers(len(whole) // 2, len(whole))])
            with contextlib.suppress(UserError):
                assert np.isfinite(read_sound(path).wave_T).all()


def test_wav_in_16_bits(tmp_path: Path) -> None:
    wave_T = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -7.0, 1 / 32768, 0.4 / 32768], np.float32)
    write_wav(tmp_path / "out.wav", wave_T, 22050)
    content = (tmp_path / "out.wav").read_bytes()
    assert struct.unpack("<9h", content[-18:]) == (0, 16384, -16384, 32767, -32768, 32767, -32768, 1, 0)
    assert soundfile.info(tmp_path / "out.wav").subtype == "PCM_16"
    read_T, rate_hz = read_sound(tmp_path / "out.wav")
    assert rate_hz == 22050
    assert np.array_equal(to_int16(read_T), to_int16(wave_T))


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*cannot be written"):
        write_wav(tmp_path / "nowhere" / "out.wav", np.zeros(10), 44100)
    with pytest.raises(ValueError, match="NaN"):
        write_wav(tmp_path / "out.wav", np.array([0.0, np.nan]), 44100)
    assert not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize("speed", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_a_wave_played_at_another_speed_is_what_it_was_at_other_times(speed):
    """Tones below the lower of both cutoffs, against their formula; away from the ends, which know only silence."""
    rate, samples = 16000, 8000
    wave = sum(
        torch.sin(2 * math.pi * hz * torch.arange(2 * samples, dtype=torch.float64) / rate) for hz in (150, 2900)
    )
    played = mel.play_at(wave[None], torch.tensor([speed], dtype=torch.float64), samples, fastest=2.0)[0]
    times = speed * torch.arange(samples, dtype=torch.float64) / rate
    expected = sum(torch.sin(2 * math.pi * hz * times) for hz in (150, 2900))
    inside = slice(300, samples - 300)
    assert float((played - expected)[inside].abs().max()) < (1e-11 if speed == 1 else 2e-4)


def test_playing_faster_lets_nothing_fold_back():
    """6 kHz at twice the speed would be 12 kHz of 16, and come back as 4."""
    wave = torch.sin(2 * math.pi * 6000 * torch.arange(16000, dtype=torch.float64) / 16000)
    played = mel.play_at(wave[None], torch.tensor([2.0], dtype=torch.float64), 7000, fastest=2.0)[0]
    assert float(played[300:-300].abs().max()) < 1e-3
