"""NSF-HiFiGAN: a log-mel spectrogram and a pitch to a wave, with the tensor names of openvpi's `model.ckpt`.

HiFi-GAN's generator (Kong et al. 2020, arXiv:2010.05646, section 2.2) raises the rate of the frames stage by stage. As
in the neural source-filter model (Wang et al. 2019, arXiv:1904.12088), it is given a sound that has the pitch already:
- full: nine harmonics and noise at the sampling rate, merged into one wave, which enters every stage;
- mini: one sine at the rate of the second stage, an eighth of the sampling rate, which enters there alone.

Under 16-bit autocast, convolutions take 16-bit inputs, but the sums that the residual blocks add to, the source with
its convolutions, and what makes the wave from the last stage stay in fp32: the last layer keeps small differences of
these sums, so that their rounding would be heard as noise (docs/precision.md).

Shape suffixes: B items, M mel bands, F frames, C channels, T samples, L samples at the rate of a stage, H harmonics,
N samples of a frame, each at the rate of its source.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gputrain.engine.gan import exact
from gputrain.vocoder.architecture import Architecture

HARMONICS = 9  # the fundamental and eight overtones
SINE_AMPLITUDE = 0.1
VOICED_NOISE = 0.003  # standard deviation of the noise under the sines
UNVOICED_NOISE = SINE_AMPLITUDE / 3  # and where there is no pitch
MINI_STAGE = 1  # the stage that the sine of mini-NSF enters
SLOPE, LAST_SLOPE = 0.1, 0.01  # of the leaky ReLUs, and of the one before the last convolution


class Noise(NamedTuple):
    """What is random in a forward pass, item by item, so that it can be drawn for a batch and split with it."""

    phase_BH: Tensor  # cycles by which each harmonic is ahead; the fundamental by none
    source_BTH: Tensor  # standard normal; as phase_BH, of no harmonics for mini-NSF
    features_BCF: Tensor  # standard normal; of no channels where noise_sigma is 0


def draw_noise(architecture: Architecture, items: int, frames: int, generator: torch.Generator) -> Noise:
    """Noise for `items` of `frames` each, on the device of `generator`."""
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
    """Log-mel spectrograms and pitches to waves in [-1, 1].

    With `checkpointing`, a residual block keeps only its input for the backward pass, and runs again there.
    """

    def __init__(self, architecture: Architecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture, self.checkpointing = architecture, checkpointing
        rates = architecture.upsample_rates
        widths = [architecture.upsample_initial_channel >> stage for stage in range(len(rates) + 1)]
        self.m_source: Source = (SineSource if architecture.mini_nsf else HarmonicSource)(architecture)
        if not architecture.mini_nsf:
            strides = [math.prod(rates[stage + 1 :]) for stage in range(len(rates))]
            self.noise_convs = nn.ModuleList(map(_noise_conv, widths[1:], strides))
        self.conv_pre = WeightNormed(nn.Conv1d(architecture.mel.num_mels, widths[0], 7, padding=3))
        ups = zip(pairwise(widths), architecture.upsample_kernel_sizes, rates, strict=True)
        self.ups = nn.ModuleList(_upsample(*width, kernel, rate) for width, kernel, rate in ups)
        kernels = list(zip(architecture.resblock_kernel_sizes, architecture.resblock_dilation_sizes, strict=True))
        self.resblocks = nn.ModuleList(ResBlock(width, *kernel) for width in widths[1:] for kernel in kernels)
        if architecture.mini_nsf:
            self.source_conv = nn.Conv1d(1, widths[MINI_STAGE + 1], 1)
        self.conv_post = WeightNormed(nn.Conv1d(widths[-1], 1, 7, padding=3))
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Start with a wave that has the pitch of the source, no tone at the frame rate and no offset.

        Random transposed convolutions turn even a constant mel into a pattern that repeats with every frame, a tone of
        its own beside which the source is faint; a small generator keeps it and never listens to the pitch. So these
        layers begin as interpolations (tonal artifacts: Pons et al. 2021, arXiv:2010.14356; the same for pictures:
        Aitken et al. 2017, arXiv:1707.02937), the full source enters as if its sines had an amplitude of 1, and the
        last layer has no response to a constant.
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
        self.conv_post.weight_g.copy_(_lengths(direction))
        if self.conv_post.bias is not None:
            self.conv_post.bias.zero_()

    def forward(
        self, mel_BMF: Tensor, f0_BF: Tensor, noise: Noise | None = None, start_BF: Tensor | None = None
    ) -> Tensor:
        """A wave (B, 1, T) in fp32, T = F * hop_size.

        `f0_BF` is in Hz, 0 where there is no voice. Without `noise`, there is none. `start_BF` is the phase with which
        the sine enters each frame, from `frame_starts` of a longer pitch, so that chunks of a sound fit together.
        """
        noise_sigma = self.architecture.noise_sigma
        source_B1L = self.m_source(f0_BF, noise, start_BF)
        x_BCL = exact(self.conv_pre(mel_BMF))
        in_fp32 = functools.partial(torch.autocast, x_BCL.device.type, enabled=False)
        if noise is not None and noise_sigma:
            x_BCL = x_BCL + noise_sigma * noise.features_BCF.to(x_BCL.dtype)
        for stage, up in enumerate(self.ups):
            x_BCL = exact(up(leaky_relu(x_BCL, SLOPE)))
            source_conv = self._source_conv(stage)
            if source_conv is not None:
                with in_fp32():
                    x_BCL = x_BCL + source_conv(source_B1L)
            x_BCL = self._filtered(x_BCL, stage)
        with in_fp32():
            wave_B1T: Tensor = torch.tanh(self.conv_post(leaky_relu(exact(x_BCL), LAST_SLOPE)))
        return wave_B1T

    def frame_starts(self, f0_BF: Tensor) -> Tensor:
        """The phase of the fundamental as each frame begins, in cycles, [-1, 1]: (B, F)."""
        return self.m_source.frame_starts(f0_BF)

    def _source_conv(self, stage: int) -> nn.Module | None:
        if not self.architecture.mini_nsf:
            return self.noise_convs[stage]
        return self.source_conv if stage == MINI_STAGE else None

    def _filtered(self, x_BCL: Tensor, stage: int) -> Tensor:
        """The mean of the stage's residual blocks, which see the sound over different spans."""
        count = len(self.architecture.resblock_kernel_sizes)
        blocks: Iterable[Callable[[Tensor], Tensor]] = self.resblocks[count * stage : count * (stage + 1)]
        if self.checkpointing and torch.is_grad_enabled():
            blocks = [functools.partial(checkpoint, block, use_reentrant=False) for block in blocks]
        return functools.reduce(torch.add, (block(x_BCL) for block in blocks)) / count


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair around a shortcut (HiFi-GAN's "1")."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_same_length(channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(_same_length(channels, kernel, 1) for _ in dilations)

    def forward(self, x_BCL: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            x_BCL = x_BCL + plain(leaky_relu(dilated(leaky_relu(x_BCL, SLOPE)), SLOPE))
        return x_BCL


class Source(nn.Module):
    """A sine that follows the pitch. `rate_hz` is the rate of its samples, `samples` how many of them make a frame."""

    def __init__(self, rate_hz: float, samples: int) -> None:
        super().__init__()
        self.rate_hz, self.samples = rate_hz, samples

    def frame_cycles(self, f0_BF: Tensor, count_N: Tensor) -> Tensor:
        """Cycles from the start of each frame to the end of its samples, counted from 1: (B, F, N). The pitch is
        constant in a frame."""
        return (f0_BF / self.rate_hz)[..., None] * count_N

    def frame_starts(self, f0_BF: Tensor) -> Tensor:
        """The phase as each frame begins, in cycles, [-1, 1]: (B, F)."""
        f0_BF = exact(f0_BF)
        ends_BF = self.frame_cycles(f0_BF, self._counted(f0_BF)[-1:])[..., 0]
        # Wrapped to half a cycle in the precision of the wave, as those do who trained what we load: the ninth harmonic
        # shows the rounding. Added up in fp64, because an hour has 300 000 frames.
        wrapped_BF = (ends_BF + 0.5).fmod(1.0) - 0.5
        return F.pad(wrapped_BF.double().cumsum(dim=1).fmod(1.0)[:, :-1], (1, 0)).to(ends_BF.dtype)

    def cycles(self, f0_BF: Tensor, start_BF: Tensor | None) -> Tensor:
        """The phase of every sample in cycles: (B, F * N)."""
        start_BF = self.frame_starts(f0_BF) if start_BF is None else start_BF
        return (self.frame_cycles(f0_BF, self._counted(f0_BF)) + start_BF[..., None]).flatten(1)

    def _counted(self, like: Tensor) -> Tensor:
        return torch.arange(1, self.samples + 1, dtype=like.dtype, device=like.device)


class HarmonicSource(Source):
    """Nine harmonics of the pitch, noise alone where there is none, merged by a weight each and tanh: (B, 1, T)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(architecture.mel.sampling_rate, architecture.mel.hop_size)
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, f0_BF: Tensor, noise: Noise | None, start_BF: Tensor | None) -> Tensor:
        with torch.autocast(f0_BF.device.type, enabled=False):
            with torch.no_grad():
                sines_BTH = self._sines(exact(f0_BF), noise, start_BF)
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


class SineSource(Source):
    """One sine at the rate of the second stage, whose pitch glides from frame to frame: (B, 1, L). Without parameters
    and without noise; where there is no pitch, it stands still."""

    def __init__(self, architecture: Architecture) -> None:
        before, after = architecture.upsample_rates[: MINI_STAGE + 1], architecture.upsample_rates[MINI_STAGE + 1 :]
        super().__init__(architecture.mel.sampling_rate / math.prod(after), math.prod(before))

    def frame_cycles(self, f0_BF: Tensor, count_N: Tensor) -> Tensor:
        """The pitch goes in a straight line to that of the next frame, so that the phase is a square."""
        glide_BF = F.pad(f0_BF[:, 1:] - f0_BF[:, :-1], (0, 1)) / self.rate_hz  # ONNX has no `diff`
        return super().frame_cycles(f0_BF, count_N) + 0.5 * glide_BF[..., None] * count_N * (count_N - 1) / self.samples

    @torch.no_grad()
    def forward(self, f0_BF: Tensor, noise: Noise | None, start_BF: Tensor | None) -> Tensor:
        with torch.autocast(f0_BF.device.type, enabled=False):
            return torch.sin(2 * math.pi * self.cycles(exact(f0_BF), start_BF))[:, None]


CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.ConvTranspose1d: F.conv_transpose1d,
}


class WeightNormed(nn.Module):
    """A convolution whose weight is `weight_v` at the length of `weight_g` (Salimans and Kingma 2016,
    arXiv:1602.07868), both trained. The weight is made in every forward pass, or once within `weights_made_once`."""

    def __init__(self, conv: nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) -> None:
        super().__init__()
        named: dict[str, Any] = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")}
        if isinstance(conv, nn.ConvTranspose1d):
            named["output_padding"] = conv.output_padding
        self.convolve = functools.partial(CONVOLUTIONS[type(conv)], **named)
        self.bias = conv.bias
        self.weight_g = nn.Parameter(_lengths(conv.weight.detach()))
        self.weight_v = conv.weight
        self.made: Tensor | None = None

    def make_weight(self) -> Tensor:
        """By the function behind torch.nn.utils.weight_norm, whose backward pass is one kernel. It returns a contiguous
        weight whatever comes in, so a channels_last weight is handed over in the order of its memory."""
        if not _is_channels_last(self.weight_v):
            return torch._weight_norm(self.weight_v, self.weight_g, 0)
        weight_KHWC = torch._weight_norm(self.weight_v.permute(0, 2, 3, 1), self.weight_g, 0)
        return weight_KHWC.permute(0, 3, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make_weight() if self.made is None else self.made
        made: Tensor = self.convolve(x, weight, self.bias)
        return made


@contextmanager
def weights_made_once(*modules: nn.Module) -> Iterator[None]:
    """Within, the weight-normed convolutions of `modules` make their weights once, for every part of a batch and every
    term of a loss. The gradients gather on these weights, and go on to weight_g and weight_v as the block is left; if
    by an error, they are dropped."""
    layers = [layer for module in modules for layer in module.modules() if isinstance(layer, WeightNormed)]
    weights = [layer.make_weight() for layer in layers]
    leaves = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
    for layer, leaf in zip(layers, leaves, strict=True):
        layer.made = leaf
    try:
        yield
        reached = [(weight, leaf.grad) for weight, leaf in zip(weights, leaves, strict=True) if leaf.grad is not None]
        if reached:
            torch.autograd.backward([weight for weight, _ in reached], [gradient for _, gradient in reached])
    finally:
        for layer in layers:
            layer.made = None


def leaves(module: nn.Module) -> list[Tensor]:
    """Where the gradients of a module that learns gather: its parameters, and weights that are made once."""
    made = [layer.made for layer in module.modules() if isinstance(layer, WeightNormed) and layer.made is not None]
    return [leaf for leaf in (*module.parameters(), *made) if leaf.requires_grad]


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """What is computed within asks for no gradient of the module's weights."""
    learning = leaves(module)
    for leaf in learning:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in learning:
            leaf.requires_grad_(True)


class _LeakyReLU(torch.autograd.Function):
    """Keeps its output, which the convolution behind it keeps anyway, and not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, dtype: torch.dtype) -> Tensor:
        out = F.leaky_relu(x, slope).to(dtype)
        ctx.save_for_backward(out)
        ctx.slope, ctx.dtype = slope, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors  # its sign is that of the input
        return torch.ops.aten.leaky_relu_backward(grad, out, ctx.slope, True).to(ctx.dtype), None, None


def leaky_relu(x: Tensor, slope: float) -> Tensor:
    """As torch's, with half the memory in front of a convolution. `slope` is positive.

    Under autocast, the output has the precision that the convolution behind it computes in, also where `x` is fp32.
    """
    device, dtype = x.device.type, x.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if not x.requires_grad:
        return F.leaky_relu(x, slope).to(dtype)
    active: Tensor = _LeakyReLU.apply(x, slope, dtype)  # type: ignore[no-untyped-call]
    return active


def _noise_conv(channels: int, stride: int) -> nn.Conv1d:
    """The full source at the rate of a stage, each sample seen from twice the span that it stands for."""
    if stride == 1:
        return nn.Conv1d(1, channels, 1)
    return nn.Conv1d(1, channels, 2 * stride, stride, padding=(stride + 1) // 2)


def _upsample(channels_in: int, channels: int, kernel: int, rate: int) -> WeightNormed:
    """`rate` times as many samples, also where kernel and rate are not both even or both odd."""
    surplus = kernel - rate
    conv = nn.ConvTranspose1d(
        channels_in, channels, kernel, rate, padding=(surplus + 1) // 2, output_padding=surplus % 2
    )
    return WeightNormed(conv)


def _interpolate(up: Any, kernel: int, rate: int) -> None:
    """Give every pair of channels one taper over its taps, as long as its random kernel was: each output sample weighs
    the inputs around it with a sum that is the same for all, so that a constant stays one."""
    ones = functools.partial(torch.ones, device=up.weight_v.device)
    overlap = kernel - rate + 1
    taper_K = F.conv1d(ones(1, 1, rate), ones(1, 1, overlap) / overlap, padding=overlap - 1).flatten()
    up.weight_v.copy_(up.weight_v[..., :1] * taper_K * math.sqrt(kernel) / taper_K.norm())
    up.weight_g.copy_(_lengths(up.weight_v))


def _same_length(channels: int, kernel: int, dilation: int) -> WeightNormed:
    return WeightNormed(nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2))


def _is_channels_last(weight: Tensor) -> bool:
    """Whether a weight has exactly the strides of channels_last, which a contiguous one of one channel has not."""
    if weight.ndim != 4:
        return False
    _, C, H, W = weight.shape
    return weight.stride() == (H * W * C, 1, W * C, C)


def _lengths(weight: Tensor) -> Tensor:
    """Of each row, its dimensions kept: (rows, 1, 1)."""
    lengths: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.ndim)), keepdim=True)
    return lengths
