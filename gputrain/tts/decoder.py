"""The decoder: HiFi-GAN's generator (Kong et al. 2020, arXiv:2010.05646, section 2.2) as in VITS, or with a head that
replaces the last and most expensive stages by an inverse STFT of each band and the filter bank that joins the bands
(MB-iSTFT-VITS, Kawamura et al. 2022, arXiv:2210.15975, section 3.2). Both are fixed transposed convolutions, which any
runtime of ONNX has.

Shape suffixes: B items, C channels, G channels of a speaker, K bands, N frequencies, F frames, L samples at the rate of
a stage or of a band, T samples of the wave, 1 a channel.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.hifigan import LAST_SLOPE, SLOPE, ResBlock, leaky_relu, mean_of_blocks, same_length, upsample
from gputrain.audio.weight_norm import WeightNormed
from gputrain.engine.recipe import at_least_fp32
from gputrain.tts.architecture import VoiceArchitecture

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


class WaveDecoder(nn.Module):
    """Decodes frames of latents into hop_size samples each. The head runs in fp32 at least.

    With `checkpointing`, a residual block keeps only its input and is recomputed in the backward pass.
    """

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        rates, kernels = architecture.upsample_rates, architecture.upsample_kernel_sizes
        widths = [architecture.upsample_initial_channel >> stage for stage in range(len(rates) + 1)]
        self.pre = nn.Conv1d(architecture.latent_channels, widths[0], 7, padding=3)
        if architecture.conditioned_channels:
            self.condition = nn.Conv1d(architecture.conditioned_channels, widths[0], 1)
        self.ups = nn.ModuleList(
            upsample(*width, kernel, rate) for width, kernel, rate in zip(pairwise(widths), kernels, rates, strict=True)
        )
        block = BLOCKS[architecture.resblock]
        shapes = list(zip(architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True))
        self.kernels = len(shapes)
        self.resblocks = nn.ModuleList(block(width, *shape) for width in widths[1:] for shape in shapes)
        self.head = HEADS[architecture.decoder](widths[-1], architecture)

    def forward(self, latent_BCF: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        """Returns a wave (B, 1, T) in fp32 at least, T = F * hop_size; HiFi-GAN's head gives values in [-1, 1]."""
        x_BCL = self.pre(latent_BCF)
        if speaker_BG1 is not None:
            x_BCL = x_BCL + self.condition(speaker_BG1)
        for stage, up in enumerate(self.ups):
            blocks = self.resblocks[self.kernels * stage : self.kernels * (stage + 1)]
            x_BCL = mean_of_blocks(blocks, up(leaky_relu(x_BCL, SLOPE)), checkpointing=self.checkpointing)
        with torch.autocast(x_BCL.device.type, enabled=False):
            wave_B1T: Tensor = self.head(leaky_relu(at_least_fp32(x_BCL), LAST_SLOPE))
        return wave_B1T


class SingleBlock(nn.Module):
    """Dilated convolutions, each with a residual connection (HiFi-GAN's ResBlock "2")."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(same_length(channels, kernel, dilation) for dilation in dilations)

    def forward(self, x_BCL: Tensor) -> Tensor:
        for conv in self.convs:
            x_BCL = x_BCL + conv(leaky_relu(x_BCL, SLOPE))
        return x_BCL


class WaveHead(nn.Module):
    """HiFi-GAN's head: the last stage runs at the sampling rate of the wave."""

    def __init__(self, channels: int, architecture: VoiceArchitecture) -> None:
        super().__init__()
        self.post = nn.Conv1d(channels, 1, 7, padding=3, bias=False)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return torch.tanh(self.post(x_BCT))


class MultiBandHead(nn.Module):
    """Predicts a spectrum for every band. One frame is added by reflection, because the inverse STFT needs one more
    (Kawamura et al. 2022, arXiv:2210.15975, section 3.2)."""

    def __init__(self, channels: int, architecture: VoiceArchitecture) -> None:
        super().__init__()
        self.bands, n_fft = architecture.subbands, architecture.istft_n_fft
        self.post = WeightNormed(nn.Conv1d(channels, self.bands * (n_fft + 2), 7, padding=3))
        self.inverse_stft = InverseSTFT(self.bands, n_fft, architecture.istft_hop_size)
        self.filter_bank = FilterBank(self.bands)

    def forward(self, x_BCL: Tensor) -> Tensor:
        spectrum = self.post(F.pad(x_BCL, (1, 0), mode="reflect")).unflatten(1, (self.bands, -1))
        log_magnitude, turn = spectrum.chunk(2, dim=2)
        bands_BKL = self.inverse_stft(log_magnitude.exp(), math.pi * turn.sin())
        wave_B1T: Tensor = self.filter_bank(bands_BKL)
        return wave_B1T


BLOCKS: dict[str, Callable[..., nn.Module]] = {"1": ResBlock, "2": SingleBlock}
HEADS: dict[str, Callable[[int, VoiceArchitecture], nn.Module]] = {"hifi-gan": WaveHead, "multi-band": MultiBandHead}
