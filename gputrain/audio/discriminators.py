"""Convolutional discriminators of waves: at several scales, of several periods, at several resolutions.

Shapes: B items, 1 channel, T samples, P period, L positions, N frequencies, F frames. A discriminator takes waves B1T
in [-1, 1] and returns logits B... and features, a list of B.... No discriminator couples the items of a batch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.config import Resolution
from gputrain.audio.mel import stft_magnitudes
from gputrain.audio.weight_norm import SpectralNormed, WeightNormed

SLOPE = 0.1  # Slope of the leaky ReLUs.
DiscriminatorOutput = tuple[Tensor, list[Tensor]]


class DiscriminatorGroup(nn.Module):
    """Discriminators of one kind; iterating yields each."""

    def __init__(self, discriminators: Iterable[nn.Module]) -> None:
        super().__init__()
        self.discriminators = nn.ModuleList(discriminators)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.discriminators)

    def __len__(self) -> int:
        return len(self.discriminators)

    def refresh_spectral_norms(self) -> None:
        """Runs one step of power iteration in each spectrally normalised layer; to be called once per training step."""
        for module in self.modules():
            if isinstance(module, SpectralNormed):
                module.iterate()


def multi_scale(channels: int) -> DiscriminatorGroup:
    """Returns MelGAN's discriminators (Kumar et al. 2019) as in HiFi-GAN (Kong et al. 2020), which see the wave at its
    rate, 1/2 and 1/4 of it. `channels` is the width of the first layer."""
    widths = [channels * factor for factor in (1, 1, 2, 4, 8, 8, 8)]
    shape = (widths, (15, 41, 41, 41, 41, 41, 5), (1, 2, 2, 4, 4, 1, 1), (1, 4, 16, 16, 16, 16, 1))
    return DiscriminatorGroup(
        scale_discriminator(*shape, norm=WeightNormed if halvings else SpectralNormed, halvings=halvings)
        for halvings in range(3)
    )


def scale_discriminator(
    widths: Sequence[int],
    kernels: Sequence[int],
    strides: Sequence[int],
    groups: Sequence[int],
    *,
    norm: type[WeightNormed] = WeightNormed,
    halvings: int = 0,
) -> nn.Module:
    """Returns a discriminator of the wave, whose rate is halved so often; its convolutions are given layer by layer."""
    rows = zip([1, *widths], widths, kernels, strides, groups, strict=False)
    convs = [norm(nn.Conv1d(i, o, k, stride, padding=k // 2, groups=split)) for i, o, k, stride, split in rows]
    last = norm(nn.Conv1d(widths[-1], 1, 3, padding=1))
    return ConvolutionalDiscriminator(partial(lower_rate, halvings=halvings), convs, last)


def vits_discriminators(channels: int = 32) -> DiscriminatorGroup:
    """Returns the six discriminators of VITS (Kim, Kong and Son 2021, arXiv:2106.06103, section 2.5): one of the raw
    wave with half the channels, then HiFi-GAN's period discriminators with `channels` channels in the first layer."""
    widths = [channels // 2 * factor for factor in (1, 4, 16, 64, 64, 64)]
    groups = [1, *(max(1, width // 4) for width in widths[:4]), 1]
    raw = scale_discriminator(widths, (15, 41, 41, 41, 41, 5), (1, 4, 4, 4, 4, 1), groups)
    return DiscriminatorGroup([raw, *multi_period((2, 3, 5, 7, 11), channels)])


def multi_period(periods: Iterable[int], channels: int) -> DiscriminatorGroup:
    """Returns HiFi-GAN's discriminators (Kong et al. 2020, section 2.3), which see every P-th sample at every offset,
    for prime periods P. `channels` is the width of the first layer."""
    widths = [channels * factor for factor in (1, 4, 16, 32, 32)]

    def discriminator(period: int) -> nn.Module:
        rows = zip([1, *widths], widths, (3, 3, 3, 3, 1), strict=False)
        convs = [WeightNormed(nn.Conv2d(i, o, (5, 1), (stride, 1), padding=(2, 0))) for i, o, stride in rows]
        last = WeightNormed(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))
        return ConvolutionalDiscriminator(partial(fold, period=period), convs, last)

    return DiscriminatorGroup(discriminator(period) for period in periods)


def multi_resolution(resolutions: Iterable[Resolution], channels: int) -> DiscriminatorGroup:
    """Returns UnivNet's discriminators (Jang et al. 2021, section 2.2), of magnitudes at several resolutions."""

    def discriminator(resolution: Resolution) -> nn.Module:
        rows = zip([1, *[channels] * 4], (9, 9, 9, 9, 3), (1, 2, 2, 2, 1), strict=True)
        convs = [
            WeightNormed(nn.Conv2d(i, channels, (3, k), (1, stride), padding=(1, k // 2))) for i, k, stride in rows
        ]
        last = WeightNormed(nn.Conv2d(channels, 1, 3, padding=1))
        return ConvolutionalDiscriminator(partial(spectrogram, resolution=resolution), convs, last)

    return DiscriminatorGroup(discriminator(resolution) for resolution in resolutions)


class ConvolutionalDiscriminator(nn.Module):
    """Convolutions with leaky ReLUs over a view of the wave. All their outputs are features."""

    def __init__(self, view: Callable[[Tensor], Tensor], convs: Sequence[nn.Module], conv_post: nn.Module) -> None:
        super().__init__()
        self.view = view
        self.convs, self.conv_post = nn.ModuleList(convs), conv_post

    def forward(self, wave_B1T: Tensor) -> DiscriminatorOutput:
        x, features = self.view(wave_B1T), []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), SLOPE, inplace=True)
            features.append(x)
        features.append(self.conv_post(x))
        return features[-1].flatten(1), features


def lower_rate(wave_B1T: Tensor, halvings: int) -> Tensor:
    """Returns the wave at half its rate, `halvings` times over."""
    for _ in range(halvings):
        wave_B1T = F.avg_pool1d(wave_B1T, kernel_size=4, stride=2, padding=2)
    return wave_B1T


def fold(wave_B1T: Tensor, period: int) -> Tensor:
    """Returns the wave in rows of `period` samples, B1LP."""
    return split_last(pad_to_multiple(wave_B1T, period), period)


def spectrogram(wave_B1T: Tensor, resolution: Resolution) -> Tensor:
    """Returns the magnitudes of the wave, B1NF."""
    return stft_magnitudes(resolution, wave_B1T).unsqueeze(1)


def split_last(x: Tensor, size: int) -> Tensor:
    """Splits the last dimension, ...(L size) to ...L size."""
    return x.reshape(*x.shape[:-1], -1, size)


def pad_to_multiple(wave_B1T: Tensor, multiple: int) -> Tensor:
    """Pads the wave at its end by reflection, repeatedly if it is shorter than the padding. T is at least 2."""
    while missing := -wave_B1T.shape[-1] % multiple:
        room = max(1, wave_B1T.shape[-1] - 1)
        wave_B1T = F.pad(wave_B1T, (0, min(missing, room)), mode="reflect")
    return wave_B1T
