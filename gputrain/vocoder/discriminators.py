"""The discriminators of a vocoder: each kind is a list of discriminators, which can be asked one by one.

Shapes: B items, 1 channel, T samples, P period, C channels, L positions, N frequencies, F frames. A discriminator
takes waves B1T in [-1, 1] and returns logits B... and features, a list of B.... No discriminator couples the items
of a batch.

Below the name of a kind, tensors have the names and shapes of openvpi's checkpoints (whose fast task calls fast_mrd
and fast_mpd `mrd` and `mpd`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.vocoder.architecture import Resolution, Shapes
from gputrain.vocoder.generator import WeightNormed
from gputrain.vocoder.losses import magnitudes

SLOPE = 0.1  # of the leaky rectifiers
DiscriminatorOutput = tuple[Tensor, list[Tensor]]


class DiscriminatorGroup(nn.Module):
    """Discriminators of one kind, to be iterated over."""

    def __init__(self, discriminators: Iterable[nn.Module]) -> None:
        super().__init__()
        self.discriminators = nn.ModuleList(discriminators)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.discriminators)

    def __len__(self) -> int:
        return len(self.discriminators)

    def refresh_spectral_norms(self) -> None:
        """To be called once a training step."""
        for module in self.modules():
            if isinstance(module, SpectralNormed):
                module.iterate()


def multi_scale(shapes: Shapes) -> DiscriminatorGroup:
    """MelGAN's (Kumar et al. 2019) as in HiFi-GAN (Kong et al. 2020): the wave, and at 1/2 and 1/4 of its rate."""
    widths = [shapes.msd_channels * factor for factor in (1, 1, 2, 4, 8, 8, 8)]
    kernels, strides, groups = (15, 41, 41, 41, 41, 41, 5), (1, 2, 2, 4, 4, 1, 1), (1, 4, 16, 16, 16, 16, 1)

    def discriminator(scale: int) -> nn.Module:
        norm = SpectralNormed if scale == 0 else WeightNormed
        rows = zip([1, *widths], widths, kernels, strides, groups, strict=False)
        convs = [norm(nn.Conv1d(i, o, k, stride, padding=k // 2, groups=split)) for i, o, k, stride, split in rows]
        last = norm(nn.Conv1d(widths[-1], 1, 3, padding=1))
        return ConvolutionalDiscriminator(partial(lower_rate, halvings=scale), convs, last)

    return DiscriminatorGroup(discriminator(scale) for scale in range(3))


def multi_period(shapes: Shapes) -> DiscriminatorGroup:
    """HiFi-GAN's (Kong et al. 2020, section 2.3): every P-th sample, at every offset, for prime periods P."""
    widths = [shapes.mpd_channels * factor for factor in (1, 4, 16, 32, 32)]

    def discriminator(period: int) -> nn.Module:
        rows = zip([1, *widths], widths, (3, 3, 3, 3, 1), strict=False)
        convs = [WeightNormed(nn.Conv2d(i, o, (5, 1), (stride, 1), padding=(2, 0))) for i, o, stride in rows]
        last = WeightNormed(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))
        return ConvolutionalDiscriminator(partial(fold, period=period), convs, last)

    return DiscriminatorGroup(discriminator(period) for period in shapes.discriminator_periods)


def multi_resolution(shapes: Shapes) -> DiscriminatorGroup:
    """UnivNet's (Jang et al. 2021, section 2.2), which BigVGAN has too: magnitudes at three resolutions."""
    width = shapes.mrd_channels

    def discriminator(resolution: Resolution) -> nn.Module:
        rows = zip([1, *[width] * 4], (9, 9, 9, 9, 3), (1, 2, 2, 2, 1), strict=True)
        convs = [WeightNormed(nn.Conv2d(i, width, (3, k), (1, stride), padding=(1, k // 2))) for i, k, stride in rows]
        last = WeightNormed(nn.Conv2d(width, 1, 3, padding=1))
        return ConvolutionalDiscriminator(partial(spectrogram, resolution=resolution), convs, last)

    return DiscriminatorGroup(discriminator(resolution) for resolution in shapes.mrd_resolutions)


def fast_multi_period(shapes: Shapes) -> DiscriminatorGroup:
    """openvpi's: stretches of every P-th sample as tokens, few and wide, in residual blocks."""
    options = (shapes.fast_mpd_channels, shapes.fast_mpd_strides, shapes.fast_mpd_kernel_size)
    return DiscriminatorGroup(FastPeriodDiscriminator(period, *options) for period in shapes.discriminator_periods)


def fast_multi_resolution(shapes: Shapes) -> DiscriminatorGroup:
    """openvpi's: stretches of every frequency's log magnitudes as tokens, in residual blocks."""
    options = (shapes.fast_mrd_channels, shapes.fast_mrd_strides)
    return DiscriminatorGroup(
        FastSpectrumDiscriminator(resolution, *options) for resolution in shapes.fast_mrd_resolutions
    )


KINDS: dict[str, Callable[[Shapes], DiscriminatorGroup]] = {
    "msd": multi_scale,
    "mpd": multi_period,
    "mrd": multi_resolution,
    "fast_mpd": fast_multi_period,
    "fast_mrd": fast_multi_resolution,
}


class ConvolutionalDiscriminator(nn.Module):
    """A picture of the wave, and convolutions with leaky rectifiers over it. All their outputs are features."""

    def __init__(self, picture: Callable[[Tensor], Tensor], convs: Sequence[nn.Module], conv_post: nn.Module) -> None:
        super().__init__()
        self.picture = picture
        self.convs, self.conv_post = nn.ModuleList(convs), conv_post

    def forward(self, wave_B1T: Tensor) -> DiscriminatorOutput:
        x, features = self.picture(wave_B1T), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), SLOPE, inplace=True)
            features.append(x)
        features.append(self.conv_post(x))
        return features[-1].flatten(1), features


def lower_rate(wave_B1T: Tensor, halvings: int) -> Tensor:
    for _ in range(halvings):
        wave_B1T = F.avg_pool1d(wave_B1T, kernel_size=4, stride=2, padding=2)
    return wave_B1T


def fold(wave_B1T: Tensor, period: int) -> Tensor:
    """B1LP."""
    return split_last(pad_to_multiple(wave_B1T, period), period)


def spectrogram(wave_B1T: Tensor, resolution: Resolution) -> Tensor:
    """B1NF."""
    return magnitudes(resolution, wave_B1T).unsqueeze(1)


def split_last(x: Tensor, size: int) -> Tensor:
    """...(L size) to ...L size."""
    return x.reshape(*x.shape[:-1], -1, size)


def pad_to_multiple(wave_B1T: Tensor, multiple: int) -> Tensor:
    """Reflected at its end, more than once where it is shorter than what it lacks. T is at least 2."""
    while missing := -wave_B1T.shape[-1] % multiple:
        room = max(1, wave_B1T.shape[-1] - 1)
        wave_B1T = F.pad(wave_B1T, (0, min(missing, room)), mode="reflect")
    return wave_B1T


class FastDiscriminator(nn.Module):
    """Tokens of a few values, then residual blocks, before each but the first of which `stride` tokens become one, as
    wide as them all. Features are what these blocks take in."""

    def __init__(self, channels: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.strides = strides
        self.widths = [channels * math.prod(strides[: index + 1]) for index in range(len(strides))]
        self.pre = nn.Linear(strides[0], self.widths[0])
        self.post = nn.Linear(self.widths[-1], 1)

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """...LC, of L tokens that all strides divide."""
        raise NotImplementedError

    def blocks(self) -> nn.ModuleList:
        raise NotImplementedError

    def forward(self, wave_B1T: Tensor) -> DiscriminatorOutput:
        x = self.tokens(wave_B1T)
        normed, features = unit_power(x), []
        *earlier, last = self.blocks()
        for block, stride in zip(earlier, self.strides[1:], strict=True):
            x = x + block(normed)
            x = split_last(x.flatten(-2), stride * x.shape[-1])
            normed = unit_power(x)
            features.append(normed.reshape(len(wave_B1T), -1))
        logits: Tensor = self.post(unit_power(x + last(normed)))
        return logits.reshape(len(wave_B1T), -1), features


class FastPeriodDiscriminator(FastDiscriminator):
    def __init__(self, period: int, channels: int, strides: Sequence[int], kernel_size: int) -> None:
        super().__init__(channels, strides)
        self.period = period

        def block(width: int, groups: int) -> nn.Module:
            return nn.Sequential(
                MoveAxis(-1, 1),
                nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2, groups=groups),
                MoveAxis(1, -1),
                nn.Linear(width, 2 * width),
                SoftSignGate(),
                nn.Linear(width, 2 * width),
                SoftSignGate(),
                nn.Linear(width, width),
            )

        groups = [1, *self.widths[1:]]
        self.residual_layers = nn.ModuleList(Net(block(*sizes)) for sizes in zip(self.widths, groups, strict=True))

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """(B P)LC"""
        wave_B1T = pad_to_multiple(wave_B1T, self.period * math.prod(self.strides))
        offsets_BPL = split_last(wave_B1T.squeeze(1), self.period).transpose(1, 2)
        return F.gelu(self.pre(split_last(offsets_BPL.flatten(0, 1), self.strides[0])))

    def blocks(self) -> nn.ModuleList:
        return self.residual_layers


class FastSpectrumDiscriminator(FastDiscriminator):
    window: Tensor
    freq_coords: Tensor

    def __init__(self, resolution: Resolution, channels: int, strides: Sequence[int]) -> None:
        super().__init__(channels, strides)
        self.resolution = resolution
        self.freq = nn.Linear(1, self.widths[0])
        frequencies = resolution.fft_size // 2 + 1
        self.register_buffer("window", torch.hann_window(resolution.win_length))  # for the sake of its name alone
        self.register_buffer("freq_coords", torch.linspace(-1, 1, frequencies).view(-1, 1, 1))

        def block(width: int) -> nn.Module:
            return nn.Sequential(
                MoveAxis(-1, 1),
                nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
                MoveAxis(1, -1),
                SoftSignGate(),
                nn.Linear(width, width),
            )

        self.layers = nn.ModuleList(Net(block(width)) for width in self.widths)

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """BNLC"""
        wave_B1T = pad_to_multiple(wave_B1T, self.resolution.hop_size * math.prod(self.strides))
        spectrum_BNF = magnitudes(self.resolution, wave_B1T)[..., :-1]  # the last frame is centred on the very end
        spectrum_BNF = spectrum_BNF.clamp(min=1e-5).log10()
        embedded: Tensor = self.pre(split_last(spectrum_BNF, self.strides[0])) + self.freq(self.freq_coords)
        return embedded

    def blocks(self) -> nn.ModuleList:
        return self.layers


class Net(nn.Module):
    """A module under the name of `net`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class MoveAxis(nn.Module):
    def __init__(self, source: int, destination: int) -> None:
        super().__init__()
        self.source, self.destination = source, destination

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(self.source, self.destination)


class SoftSignGate(nn.Module):
    """Half of the channels times the other half, each bounded by softsign: ...(2 C) to ...C."""

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = _SoftSignGate.apply(x)  # type: ignore[no-untyped-call]
        return gated


class _SoftSignGate(torch.autograd.Function):
    """Its graph holds what came in, and nothing of what was computed on the way: a third of it all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        value, gate = F.softsign(x).chunk(2, dim=-1)
        return value * gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        softsign, slope = F.softsign(x), (1 + x.abs()) ** -2
        value, gate = softsign.chunk(2, dim=-1)
        gradient: Tensor = slope * torch.cat([gate * gradients[0], value * gradients[0]], dim=-1)
        return gradient


def unit_power(x: Tensor) -> Tensor:
    """...C over the root of its mean square (Zhang and Sennrich 2019): summed in fp32, kept in the precision of x."""
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)


class SpectralNormed(WeightNormed):
    """A convolution whose weight is divided by its largest singular value (Miyato et al. 2018, arXiv:1802.05957).

    The value is followed by power iteration, a step of it with every call of `iterate`. (Done with every forward pass,
    as is the custom, the weights would depend on how a batch was split.)
    """

    weight_u: Tensor
    weight_v: Tensor

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__(conv)
        del self.weight_g, self.weight_v
        self.weight_orig = conv.weight
        self.register_buffer("weight_u", F.normalize(torch.randn(len(conv.weight)), dim=0))
        self.register_buffer("weight_v", torch.zeros(conv.weight[0].numel()))
        self.iterate(steps=15)

    @torch.no_grad()
    def iterate(self, steps: int = 1) -> None:
        matrix = self.weight_orig.flatten(1)
        for _ in range(steps):
            self.weight_v.copy_(F.normalize(matrix.T @ self.weight_u, dim=0))
            self.weight_u.copy_(F.normalize(matrix @ self.weight_v, dim=0))

    def make_weight(self) -> Tensor:
        with torch.autocast(self.weight_orig.device.type, enabled=False):
            return self.weight_orig / (self.weight_u @ self.weight_orig.flatten(1) @ self.weight_v)
