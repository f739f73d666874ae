"""Synthesis of a wave from bands: an inverse short-time Fourier transform of each band and the filter bank that joins
them, both as fixed transposed convolutions, which any runtime of ONNX has (MB-iSTFT-VITS, Kawamura et al. 2022,
arXiv:2210.15975, section 3.2).

Shape suffixes: B items, K bands, N frequencies, F frames of the transform, L samples of a band, T samples of the wave,
1 a channel.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BETA = 9.0  # beta of the Kaiser window


class InverseSTFT(nn.Module):
    """Converts magnitudes and phases of each band to waves, as torch.istft with a Hann window as long as the transform,
    whose frames are centred. F frames make (F - 1) * hop_size samples."""

    basis: Tensor
    envelope: Tensor

    def __init__(self, bands: int, n_fft: int, hop_size: int) -> None:
        super().__init__()
        self.bands, self.n_fft, self.hop_size = bands, n_fft, hop_size
        window = torch.hann_window(n_fft, dtype=torch.float64)
        angle = 2 * math.pi / n_fft * torch.outer(torch.arange(n_fft // 2 + 1), torch.arange(n_fft))
        share = torch.full((n_fft // 2 + 1, 1), 2.0, dtype=torch.float64) / n_fft
        share[[0, -1]] /= 2  # These two bins have no conjugate counterpart.
        basis = torch.cat([share * angle.cos(), -share * angle.sin()]) * window
        self.register_buffer("basis", basis[:, None].float().repeat(bands, 1, 1), persistent=False)
        self.register_buffer("envelope", (window**2)[None, None].float(), persistent=False)

    def forward(self, magnitude_BKNF: Tensor, phase_BKNF: Tensor) -> Tensor:
        """Returns the waves of the bands, BKL."""
        real_BKNF, imaginary_BKNF = magnitude_BKNF * phase_BKNF.cos(), magnitude_BKNF * phase_BKNF.sin()
        basis, envelope = self.basis.to(magnitude_BKNF.dtype), self.envelope.to(magnitude_BKNF.dtype)
        spectrum = torch.cat([real_BKNF, imaginary_BKNF], dim=2).flatten(1, 2)
        sum_BKL = F.conv_transpose1d(spectrum, basis, stride=self.hop_size, groups=self.bands)
        frames_11F = torch.ones_like(spectrum[:1, :1])
        envelope_11L = F.conv_transpose1d(frames_11F, envelope, stride=self.hop_size)
        centre = slice(self.n_fft // 2, -self.n_fft // 2)
        return sum_BKL[..., centre] / envelope_11L[..., centre]


class FilterBank(nn.Module):
    """A pseudo quadrature mirror filter bank: a cosine-modulated low-pass filter (Nguyen 1994, "Near-perfect-
    reconstruction pseudo-QMF banks") by a Kaiser window (Lin and Vaidyanathan 1998).

    The reconstruction error from the bands of the same filters is -64 dB with four bands, except near the ends.
    """

    filters: Tensor

    def __init__(self, bands: int) -> None:
        super().__init__()
        self.bands, self.taps = bands, 16 * bands - 2
        cutoff = 0.568 / bands  # relative to the Nyquist frequency; minimises the error with four bands
        place_T = torch.arange(self.taps + 1, dtype=torch.float64) - self.taps / 2
        window_T = torch.kaiser_window(self.taps + 1, periodic=False, beta=BETA, dtype=torch.float64)
        low_pass_T = cutoff * torch.sinc(cutoff * place_T) * window_T
        band_K1 = torch.arange(bands, dtype=torch.float64)[:, None]
        turn_K1 = math.pi / 4 * (1 - 2 * (band_K1 % 2))
        filters = 2 * low_pass_T * torch.cos((2 * band_K1 + 1) * math.pi / (2 * bands) * place_T - turn_K1)
        self.register_buffer("filters", filters[:, None].float(), persistent=False)

    def forward(self, bands_BKL: Tensor) -> Tensor:
        """Returns the wave synthesised from its bands, B1T with T = K * L."""
        return F.conv_transpose1d(
            bands_BKL,
            self.bands * self.filters.to(bands_BKL.dtype),
            stride=self.bands,
            padding=self.taps // 2,
            output_padding=self.bands - 1,
        )
