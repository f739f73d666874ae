"""The decoder: HiFi-GAN's generator (Kong et al. 2020, arXiv:2010.05646, section 2.2) as in VITS, or with a head that
replaces the last and most expensive stages by an inverse STFT and a filter bank.

Shape suffixes: B items, C channels, G channels of a speaker, F frames, L samples at the rate of a stage, K bands,
T samples, 1 a channel.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.hifigan import LAST_SLOPE, SLOPE, ResBlock, leaky_relu, mean_of_blocks, same_length, upsample
from gputrain.audio.weight_norm import WeightNormed
from gputrain.engine.gan import exact
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.multiband import FilterBank, InverseSTFT


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
            wave_B1T: Tensor = self.head(leaky_relu(exact(x_BCL), LAST_SLOPE))
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
