"""The log-mel spectrogram compared with a stored oracle, and its properties; spectra under autocast."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gputrain.audio.config import Mel, Resolution
from gputrain.audio.mel import log_mel, stft_magnitudes
from gputrain.planner.memory.fake_runtime import on_fake_tensors
from tests.tables import each_row

ORACLE = Path(__file__).parent.parent / "data" / "vocoder" / "log_mel_44k.npz"


def sine(hz: float, samples: int = 8192, rate_hz: int = 44100) -> Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz / rate_hz * torch.arange(samples, dtype=torch.float64)).float()


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def slaney_bank(mel: Mel) -> np.ndarray:
    """Returns the bank (M, N) in float64: triangles of equal area, whose corners are read from a table of the scale's
    two pieces."""
    table_mel = np.linspace(0, 80, 800_001)  # 15 mel are 1000 Hz, and 27 more a factor of 6.4
    table_hz = np.where(table_mel < 15, table_mel / 0.015, 1000 * np.exp((table_mel - 15) * np.log(6.4) / 27))
    ends_mel = np.interp([mel.fmin, mel.fmax], table_hz, table_mel)
    corners_hz = np.interp(np.linspace(*ends_mel, mel.num_mels + 2), table_mel, table_hz)
    hz_N = np.fft.rfftfreq(mel.n_fft, 1 / mel.sampling_rate)
    bands = zip(corners_hz, corners_hz[1:], corners_hz[2:], strict=False)
    return np.stack([np.interp(hz_N, band, [0, 2 / (band[2] - band[0]), 0]) for band in bands])


def exact_log_mel(wave_T: np.ndarray, mel: Mel) -> tuple[np.ndarray, np.ndarray]:
    """Returns (M, F) twice, in float64: the log-mel, and a bound of the rounding error of its computation in fp32.

    A Fourier transform of n samples adds to each frequency, however quiet it is, an error of up to 6.7 log2(n) units
    of rounding times the norm of what it transforms (Higham, Accuracy and Stability of Numerical Algorithms, theorem
    24.2). A band adds up the errors of its frequencies. The rest rounds some results relative to themselves.
    """
    rounding = 2.0**-24
    n, width = mel.n_fft, mel.win_size
    before = (n - mel.hop_size) // 2
    padded_T = np.pad(wave_T.astype(np.float64), (before, n - mel.hop_size - before), mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(width) / width)
    window_n = np.pad(window, ((n - width) // 2, (n - width + 1) // 2))
    frames_Fn = np.stack([padded_T[at : at + n] for at in range(0, len(padded_T) - n + 1, mel.hop_size)]) * window_n
    frames_Fn = frames_Fn[: len(wave_T) // mel.hop_size]
    bank_MN = slaney_bank(mel)
    mel_MF = bank_MN @ np.abs(np.fft.rfft(frames_Fn)).T
    norm_F = np.linalg.norm(frames_Fn, axis=1)
    error_MF = 6.7 * math.log2(n) * rounding * bank_MN.sum(axis=1)[:, None] * norm_F
    floored_MF = np.maximum(mel_MF, 1e-5)
    return np.log(floored_MF), error_MF / floored_MF + 16 * rounding


def test_log_mel_and_the_oracle_are_within_rounding_of_float64() -> None:
    with np.load(ORACLE) as oracle:
        wave_T, stored_MF = oracle["wav"], oracle["mel_shift_0"][0]
    made_MF = log_mel(torch.from_numpy(wave_T)[None], Mel())[0].numpy()
    exact_MF, rounding_MF = exact_log_mel(wave_T, Mel())
    assert made_MF.shape == stored_MF.shape == exact_MF.shape
    assert np.median(rounding_MF) < 2e-4  # Otherwise the next assertion would be weak.
    assert (np.abs(stored_MF - exact_MF) < rounding_MF).all()
    assert (np.abs(made_MF - exact_MF) < rounding_MF).all()


def test_log_mel_at_other_settings() -> None:
    """The window is shorter than the transform, and the hop divides neither of them."""
    mel = Mel(sampling_rate=24000, num_mels=80, hop_size=300, win_size=1200, n_fft=2048, fmin=0, fmax=12000)
    wave_T = np.random.default_rng(0).standard_normal(24000).astype(np.float32) * 0.1
    made_MF = log_mel(torch.from_numpy(wave_T)[None], mel)[0].numpy()
    exact_MF, rounding_MF = exact_log_mel(wave_T, mel)
    assert made_MF.shape == (80, 80)
    assert (np.abs(made_MF - exact_MF) < rounding_MF).all()


@each_row(1, 511, 512, 768, 769, 1024, 5120, 5121, 6000)
def test_a_frame_for_every_whole_hop(samples: int) -> None:
    made = log_mel(sine(440, samples)[None].expand(2, -1), Mel())
    assert made.shape == (2, 128, samples // 512)
    assert made.isfinite().all()
    assert torch.equal(made[0], made[1])


def test_silence_is_the_floor_and_has_no_gradient() -> None:
    wave_BT = torch.zeros(1, 4096, requires_grad=True)
    made = log_mel(wave_BT, Mel())
    made.sum().backward()
    assert torch.equal(made, torch.full((1, 128, 8), math.log(1e-5)))
    assert torch.equal(wave_BT.grad, torch.zeros(1, 4096))


def test_gradient_against_finite_differences() -> None:
    torch.manual_seed(0)
    wave_BT, direction = 0.3 * torch.randn(1, 2048), torch.randn(1, 2048)
    wave_BT.requires_grad_()
    log_mel(wave_BT, Mel()).sum().backward()
    with torch.no_grad():
        after, before = (log_mel(wave_BT + step * direction, Mel()).double().sum() for step in (1e-3, -1e-3))
    assert ((wave_BT.grad * direction).sum()).item() == pytest.approx(((after - before) / 2e-3).item(), rel=0.01)


def test_fp32_under_autocast_and_for_16_bit_waves() -> None:
    wave_BT = sine(440)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = log_mel(wave_BT, Mel())
    assert torch.equal(within, log_mel(wave_BT, Mel()))
    coarse_BT = wave_BT.bfloat16()
    assert torch.equal(log_mel(coarse_BT, Mel()), log_mel(coarse_BT.float(), Mel()))


def test_a_bank_made_on_shapes_or_in_inference_serves_training() -> None:
    for index, mode in enumerate((on_fake_tensors, torch.inference_mode)):
        mel = replace(Mel(), num_mels=20 + index)  # Mel without a cached bank.
        with mode():
            assert log_mel(torch.zeros(1, 4096), mel).shape == (1, 20 + index, 8)
        wave_BT = sine(440, 4096)[None].requires_grad_()
        made = log_mel(wave_BT, mel)
        made.sum().backward()
        assert made.max().item() > 0  # The value is a number.
        assert wave_BT.grad.abs().max().item() > 0


def test_spectra_are_exact_under_autocast():
    wave = 0.3 * torch.randn(4, 1, 500, generator=torch.Generator().manual_seed(0))
    expected = stft_magnitudes(Resolution(128, 16, 100), wave)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stft_magnitudes(Resolution(128, 16, 100), wave), expected)
        rounded = stft_magnitudes(Resolution(128, 16, 100), wave.bfloat16())
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, stft_magnitudes(Resolution(128, 16, 100), wave.bfloat16().float()))
