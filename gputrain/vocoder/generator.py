"""NSF-HiFiGAN: turns a log-mel spectrogram and a pitch into a wave, with the tensor names of openvpi's `model.ckpt`.

HiFi-GAN's generator (Kong et al. 2020, arXiv:2010.05646, section 2.2) upsamples frames stage by stage. As in the neural
source-filter model (Wang et al. 2019, arXiv:1904.12088), it also gets an excitation that has the pitch:
- full: nine harmonics and noise at the sampling rate, merged into one wave, which is added in every stage;
- mini: one sine at the rate of the second stage, an eighth of the sampling rate, which is added only there.

Under 16-bit autocast, convolutions take 16-bit inputs, but the sums that the residual blocks add to, the source with
its convolutions, and the layers behind the last stage stay in fp32: the last layer keeps small differences of these
sums, so that their rounding would be audible as noise (docs/precision.md).

Shape suffixes: B items, M mel bands, F frames, C channels, T samples, L samples at the rate of a stage, H harmonics,
N samples of a frame, each at the rate of its source.
"""

import functools
import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.hifigan import LAST_SLOPE, SLOPE, ResBlock, leaky_relu, mean_of_blocks, upsample
from gputrain.audio.weight_norm import WeightNormed, row_norms
from gputrain.engine.recipe import at_least_fp32
from gputrain.vocoder.config import NsfHifiganArchitecture

HARMONICS = 9  # Number of sines: the fundamental and eight overtones.
SINE_AMPLITUDE = 0.1
VOICED_NOISE = 0.003  # Standard deviation of the noise in voiced frames.
UNVOICED_NOISE = SINE_AMPLITUDE / 3  # Standard deviation of the noise in unvoiced frames.
MINI_STAGE = 1  # Stage in which the sine of mini-NSF is added.


class Noise(NamedTuple):
    """Random inputs of a forward pass by item, so that they can be drawn for a batch and split with it."""

    phase_BH: Tensor  # Initial phases in cycles; 0 for the fundamental.
    source_BTH: Tensor  # Standard normal; like phase_BH, without harmonics for mini-NSF.
    features_BCF: Tensor  # Standard normal; without channels if noise_sigma is 0.


def draw_noise(architecture: NsfHifiganArchitecture, items: int, frames: int, generator: torch.Generator) -> Noise:
    """Draws noise for `items` of `frames` each, on the device of `generator`."""
    harmonics = 0 if architecture.mini_nsf else HARMONICS
    channels = architecture.upsample_initial_channel if architecture.noise_sigma else 0
    samples = frames * architecture.mel.hop_size
    where: dict[str, Any] = {"generator": generator, "device": generator.device}
    phase_BH = torch.rand(items, harmonics, **where)
    phase_BH[:, :1] = 0
    return Noise(
        phase_BH, torch.randn(items, samples, harmonics, **where), torch.randn(items, channels, frames, **where)
    )


class Generator(nn.Module):
    """Generates waves in [-1, 1] from log-mel spectrograms and pitches.

    With `checkpointing`, a residual block keeps only its input and is recomputed in the backward pass.
    """

    def __init__(self, architecture: NsfHifiganArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture, self.checkpointing = architecture, checkpointing
        rates = architecture.upsample_rates
        widths = [architecture.upsample_initial_channel >> stage for stage in range(len(rates) + 1)]
        self.m_source: PitchSource = (SineSource if architecture.mini_nsf else HarmonicSource)(architecture)
        if not architecture.mini_nsf:
            strides = [math.prod(rates[stage + 1 :]) for stage in range(len(rates))]
            self.noise_convs = nn.ModuleList(map(_noise_conv, widths[1:], strides))
        self.conv_pre = WeightNormed(nn.Conv1d(architecture.mel.num_mels, widths[0], 7, padding=3))
        ups = zip(pairwise(widths), architecture.upsample_kernel_sizes, rates, strict=True)
        self.ups = nn.ModuleList(upsample(*width, kernel, rate) for width, kernel, rate in ups)
        kernels = list(zip(architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True))
        self.resblocks = nn.ModuleList(ResBlock(width, *kernel) for width in widths[1:] for kernel in kernels)
        if architecture.mini_nsf:
            self.source_conv = nn.Conv1d(1, widths[MINI_STAGE + 1], 1)
        self.conv_post = WeightNormed(nn.Conv1d(widths[-1], 1, 7, padding=3))
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialises the weights so that the first waves have the pitch of the source, no tone at the frame rate and
        no offset.

        Random transposed convolutions turn even a constant mel into a pattern that repeats with every frame, a tone
        much louder than the source; a small generator keeps it and ignores the pitch. So these layers start as
        interpolations (tonal artifacts: Pons et al. 2021, arXiv:2010.14356; the same for images: Aitken et al. 2017,
        arXiv:1707.02937), the full source is scaled as if its sines had an amplitude of 1, and the last layer has no
        response to a constant.
        """
        architecture = self.architecture
        kernels, rates = architecture.upsample_kernel_sizes, architecture.upsample_rates
        for up, kernel, rate in zip(self.ups, kernels, rates, strict=True):
            _interpolate(up, kernel, rate)
        if not architecture.mini_nsf:
            for weight in (parameter for parameter in self.noise_convs.parameters() if parameter.dim() > 1):
                weight.div_(SINE_AMPLITUDE)
        direction = self.conv_post.weight_v
        direction -= direction.mean(dim=2, keepdim=True)
        self.conv_post.weight_g.copy_(row_norms(direction))
        if self.conv_post.bias is not None:
            self.conv_post.bias.zero_()

    def forward(
        self, mel_BMF: Tensor, f0_BF: Tensor, noise: Noise | None = None, start_BF: Tensor | None = None
    ) -> Tensor:
        """Returns a wave (B, 1, T) in fp32, T = F * hop_size.

        `f0_BF` is in Hz, without gaps where it is unvoiced (`audio.f0.interpolated`). Without `noise`, none is added.
        `start_BF` is the phase of the sine at the start of each frame, from `frame_starts` of a longer pitch, so that
        chunks of a sound join without a phase jump.
        """
        noise_sigma, count = self.architecture.noise_sigma, len(self.architecture.resblock_kernel_sizes)
        source_B1L = self.m_source(f0_BF, noise, start_BF)
        x_BCL = at_least_fp32(self.conv_pre(mel_BMF))
        in_fp32 = functools.partial(torch.autocast, x_BCL.device.type, enabled=False)
        if noise is not None and noise_sigma:
            x_BCL = x_BCL + noise_sigma * noise.features_BCF.to(x_BCL.dtype)
        for stage, up in enumerate(self.ups):
            x_BCL = at_least_fp32(up(leaky_relu(x_BCL, SLOPE)))
            mini = self.architecture.mini_nsf
            if stage == MINI_STAGE or not mini:
                with in_fp32():
                    x_BCL = x_BCL + (self.source_conv if mini else self.noise_convs[stage])(source_B1L)
            blocks = self.resblocks[count * stage : count * (stage + 1)]
            x_BCL = mean_of_blocks(blocks, x_BCL, checkpointing=self.checkpointing)
        with in_fp32():
            wave_B1T: Tensor = torch.tanh(self.conv_post(leaky_relu(at_least_fp32(x_BCL), LAST_SLOPE)))
        return wave_B1T

    def frame_starts(self, f0_BF: Tensor) -> Tensor:
        """Returns the phase of the fundamental at the start of each frame, in cycles, [-1, 1]: (B, F)."""
        return self.m_source.frame_starts(f0_BF)

    def computing_in_fp32(self) -> list[nn.Module]:
        """Returns the parts that compute in fp32 under autocast too."""
        sources = self.source_conv if self.architecture.mini_nsf else self.noise_convs
        return [self.m_source, sources, self.conv_post]


class PitchSource(nn.Module):
    """A sine that follows the pitch. `rate_hz` is its sampling rate, `samples` the number of its samples per frame."""

    def __init__(self, rate_hz: float, samples: int) -> None:
        super().__init__()
        self.rate_hz, self.samples = rate_hz, samples

    def frame_cycles(self, f0_BF: Tensor, count_N: Tensor) -> Tensor:
        """Returns the cycles from the start of each frame to the end of its samples, counted from 1: (B, F, N). The
        pitch is constant in a frame."""
        return (f0_BF / self.rate_hz)[..., None] * count_N

    def frame_starts(self, f0_BF: Tensor) -> Tensor:
        """Returns the phase at the start of each frame, in cycles, [-1, 1]: (B, F)."""
        f0_BF = at_least_fp32(f0_BF)
        ends_BF = self.frame_cycles(f0_BF, self._counted(f0_BF)[-1:])[..., 0]
        # It is wrapped to half a cycle in the precision of the wave, as in the training of the models that we load: the
        # ninth harmonic shows the rounding. The sum is in fp64, because an hour has 300 000 frames.
        wrapped_BF = (ends_BF + 0.5).fmod(1.0) - 0.5
        return F.pad(wrapped_BF.double().cumsum(dim=1).fmod(1.0)[:, :-1], (1, 0)).to(ends_BF.dtype)

    def cycles(self, f0_BF: Tensor, start_BF: Tensor | None) -> Tensor:
        """Returns the phase of every sample in cycles: (B, F * N)."""
        start_BF = self.frame_starts(f0_BF) if start_BF is None else start_BF
        return (self.frame_cycles(f0_BF, self._counted(f0_BF)) + start_BF[..., None]).flatten(1)

    def _counted(self, like: Tensor) -> Tensor:
        return torch.arange(1, self.samples + 1, dtype=like.dtype, device=like.device)


class HarmonicSource(PitchSource):
    """Nine harmonics of the pitch, only noise where unvoiced, merged by a linear layer and tanh: (B, 1, T)."""

    def __init__(self, architecture: NsfHifiganArchitecture) -> None:
        super().__init__(architecture.mel.sampling_rate, architecture.mel.hop_size)
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, f0_BF: Tensor, noise: Noise | None, start_BF: Tensor | None) -> Tensor:
        with torch.autocast(f0_BF.device.type, enabled=False):
            with torch.no_grad():
                sines_BTH = self._sines(at_least_fp32(f0_BF), noise, start_BF)
            merged_B1T: Tensor = torch.tanh(self.l_linear(sines_BTH)).transpose(1, 2)
            return merged_B1T

    def _sines(self, f0_BF: Tensor, noise: Noise | None, start_BF: Tensor | None) -> Tensor:
        harmonic_H = torch.arange(1, HARMONICS + 1, dtype=f0_BF.dtype, device=f0_BF.device)
        cycles_BTH = self.cycles(f0_BF, start_BF)[..., None] * harmonic_H
        voiced_BT1 = (f0_BF > 0).repeat_interleave(self.samples, dim=1)[..., None]
        if noise is None:
            return SINE_AMPLITUDE * torch.sin(2 * math.pi * cycles_BTH) * voiced_BT1
        sines_BTH = SINE_AMPLITUDE * torch.sin(2 * math.pi * (cycles_BTH + noise.phase_BH[:, None])) * voiced_BT1
        return sines_BTH + torch.where(voiced_BT1, VOICED_NOISE, UNVOICED_NOISE) * noise.source_BTH


class SineSource(PitchSource):
    """One sine at the rate of the second stage, whose pitch glides from frame to frame: (B, 1, L). It has no parameters
    and no noise; its phase is constant where unvoiced."""

    def __init__(self, architecture: NsfHifiganArchitecture) -> None:
        before, after = architecture.upsample_rates[: MINI_STAGE + 1], architecture.upsample_rates[MINI_STAGE + 1 :]
        super().__init__(architecture.mel.sampling_rate / math.prod(after), math.prod(before))

    def frame_cycles(self, f0_BF: Tensor, count_N: Tensor) -> Tensor:
        """Interpolates the pitch linearly to that of the next frame, so that the phase is quadratic."""
        glide_BF = F.pad(f0_BF[:, 1:] - f0_BF[:, :-1], (0, 1)) / self.rate_hz  # ONNX has no `diff`.
        return super().frame_cycles(f0_BF, count_N) + 0.5 * glide_BF[..., None] * count_N * (count_N - 1) / self.samples

    @torch.no_grad()
    def forward(self, f0_BF: Tensor, noise: Noise | None, start_BF: Tensor | None) -> Tensor:
        with torch.autocast(f0_BF.device.type, enabled=False):
            return torch.sin(2 * math.pi * self.cycles(at_least_fp32(f0_BF), start_BF))[:, None]


def _noise_conv(channels: int, stride: int) -> nn.Conv1d:
    """Returns the convolution of the full source to the rate of a stage; its kernel is two strides long."""
    if stride == 1:
        return nn.Conv1d(1, channels, 1)
    return nn.Conv1d(1, channels, 2 * stride, stride, padding=(stride + 1) // 2)


def _interpolate(up: Any, kernel: int, rate: int) -> None:
    """Sets the kernel of every pair of channels to one taper with the length of the random kernel: the weights of the
    inputs have the same sum for every output sample, so that a constant stays constant."""
    ones = functools.partial(torch.ones, device=up.weight_v.device)
    overlap = kernel - rate + 1
    taper_K = F.conv1d(ones(1, 1, rate), ones(1, 1, overlap) / overlap, padding=overlap - 1).flatten()
    up.weight_v.copy_(up.weight_v[..., :1] * taper_K * math.sqrt(kernel) / taper_K.norm())
    up.weight_g.copy_(row_norms(up.weight_v))
