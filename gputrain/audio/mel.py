"""Spectrograms: magnitudes of short-time Fourier transforms and log-mels, differentiable and on any device.

Shape suffixes: B items, 1 channel, T samples, F frames, M mel bands, N frequencies and W
samples of a transform.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import once_differentiable

from gputrain.audio.config import Mel, Resolution
from gputrain.engine.recipe import at_least_fp32

OCTAVES_HZ = (250, 500, 1000, 2000, 4000, 8000, 16000)
FLOOR = 1e-5  # Lowest mel magnitude before the logarithm: silence is ln 1e-5 = -11.5.


def log_mel(wave_BT: Tensor, mel: Mel) -> Tensor:
    """Returns the natural logarithm of Slaney's mel bands of the magnitude spectrum: (B, M, F), F = T // hop_size.

    Frame f is centred on its hop. The ends are padded by reflection; a wave too short for that is first padded with
    silence. Computed on the device of the wave, in fp32 at least under any autocast, and differentiable.
    """
    magnitude_BNF = magnitudes(wave_BT, mel)
    with torch.autocast(wave_BT.device.type, enabled=False):
        bank_MN = mel_bank(mel, wave_BT.device).to(magnitude_BNF.dtype)
        return (bank_MN @ magnitude_BNF).clamp(min=FLOOR).log()


def mel_decades(wave_T: Tensor, mel: Mel) -> Tensor:
    """Returns the mel magnitudes (M, F) of a wave as powers of ten, on the CPU, for a picture."""
    with torch.no_grad():
        return log_mel(wave_T[None].float().cpu(), mel)[0] / math.log(10)


def magnitudes(wave_BT: Tensor, mel: Mel) -> Tensor:
    """Returns the magnitudes behind `log_mel`: (B, N, F), N = n_fft // 2 + 1."""
    before, after = (mel.n_fft - mel.hop_size) // 2, (mel.n_fft - mel.hop_size + 1) // 2
    frames = wave_BT.shape[-1] // mel.hop_size
    with torch.autocast(wave_BT.device.type, enabled=False):
        missing = max(mel.hop_size, after + 1) - wave_BT.shape[-1]
        wave_BT = F.pad(at_least_fp32(wave_BT), (0, max(0, missing)))
        return _frame_magnitudes(Resolution(mel.n_fft, mel.hop_size, mel.win_size), wave_BT, before, after)[
            ..., :frames
        ]


@cache  # A bank stays in memory, as a CUDA graph keeps its address.
def mel_bank(mel: Mel, device: torch.device) -> Tensor:
    """Returns the weights (M, N) of the n_fft // 2 + 1 frequencies in each band: triangles of equal area, evenly spaced
    on the mel scale of Slaney's Auditory Toolbox (1998), as in librosa."""
    bands = mel.num_mels
    edges_hz = _mel_to_hz(np.linspace(_hz_to_mel(mel.fmin), _hz_to_mel(mel.fmax), bands + 2))
    low_M1, centre_M1, high_M1 = (edges_hz[first : bands + first, None] for first in range(3))
    hz_N = np.arange(mel.n_fft // 2 + 1) * (mel.sampling_rate / mel.n_fft)
    triangles_MN = np.minimum((hz_N - low_M1) / (centre_M1 - low_M1), (high_M1 - hz_N) / (high_M1 - centre_M1))
    bank_MN = (2 / (high_M1 - low_M1) * triangles_MN.clip(min=0)).astype(np.float32)
    # The cached bank outlives its first caller, which may run in inference mode or on fake tensors.
    with torch.inference_mode(False), unset_fake_temporarily():
        return torch.from_numpy(bank_MN).to(device)


def _hz_to_mel(hz: float) -> float:
    """Converts Hz to Slaney's scale: linear up to 1000 Hz, which is 15 mel, then 27 mel for each factor of 6.4."""
    return 15 * hz / 1000 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def frequency_ticks(mel: Mel) -> list[tuple[float, str]]:
    """Returns octaves with their places in a spectrogram of all bands, as shares of its height from below."""
    lowest, highest = _hz_to_mel(mel.fmin), _hz_to_mel(mel.fmax)
    distance = (highest - lowest) / (mel.num_mels + 1)
    places = {hz: ((_hz_to_mel(hz) - lowest) / distance - 0.5) / mel.num_mels for hz in OCTAVES_HZ}
    return [
        (place, f"{hz / 1000:g} kHz" if hz >= 1000 else f"{hz} Hz") for hz, place in places.items() if 0 <= place <= 1
    ]


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Inverts `_hz_to_mel`."""
    return np.where(mel < 15, 1000 * mel / 15, 1000 * 6.4 ** ((mel - 15) / 27))


def stft_magnitudes(resolution: Resolution, wave_B1T: Tensor) -> Tensor:
    """Returns the magnitudes of a centred short-time Fourier transform with a Hann window, BNF, in fp32 at least.

    Raises RuntimeError unless T is more than half of fft_size, because the ends are padded by reflection.
    """
    half = resolution.fft_size // 2
    return _frame_magnitudes(resolution, at_least_fp32(wave_B1T.squeeze(1)), half, half)


def _frame_magnitudes(resolution: Resolution, wave_BT: Tensor, before: int, after: int) -> Tensor:
    """Returns the magnitudes, BNF, of the frames of a wave that is padded by reflection, in the wave's dtype."""
    size, missing = resolution.fft_size, resolution.fft_size - resolution.win_length
    window = torch.hann_window(resolution.win_length, dtype=wave_BT.dtype, device=wave_BT.device)
    window_W = F.pad(window, (missing // 2, missing - missing // 2))
    padded_BT = F.pad(wave_BT[:, None], (before, after), mode="reflect")[:, 0]
    frames_BFW = padded_BT.unfold(-1, size, resolution.hop_size)
    magnitude_BFN: Tensor = _FrameMagnitudes.apply(frames_BFW, window_W)  # type: ignore[no-untyped-call]
    return magnitude_BFN.transpose(1, 2)


class _FrameMagnitudes(torch.autograd.Function):
    """Computes the magnitudes BFN of the spectra of windowed frames BFW, W the samples of a transform.

    The gradient of a transform of real samples is again such a transform, which takes half of the complex one that
    torch computes there: with the gradient G_n of the spectrum, that of sample t is the real part of the sum over n of
    G_n exp(2 pi i n t / W). An inverse transform of real samples counts all frequencies twice but the first and, if W
    is even, the last.
    """

    @staticmethod
    def forward(ctx: Any, frames_BFW: Tensor, window_W: Tensor) -> Tensor:
        spectrum_BFN: Tensor = torch.fft.rfft(frames_BFW * window_W)
        ctx.save_for_backward(spectrum_BFN, window_W)
        return spectrum_BFN.abs()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_BFN: Tensor) -> tuple[Tensor, None]:
        spectrum_BFN, window_W = ctx.saved_tensors
        size = len(window_W)
        twice_BFN = spectrum_BFN.sgn().mul_(gradients_BFN[0])
        # Half the size as a step takes the first frequency and, if there are two such, the last.
        twice_BFN[..., :: size // 2 if size % 2 == 0 else size].mul_(2)
        return torch.fft.irfft(twice_BFN, n=size, norm="forward").mul_(window_W / 2), None
