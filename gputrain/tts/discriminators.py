"""The six discriminators of VITS (Kim, Kong and Son 2021, arXiv:2106.06103, section 2.5)."""

from functools import partial

from torch import nn

from gputrain.audio.discriminators import ConvolutionalDiscriminator, DiscriminatorGroup, lower_rate, multi_period
from gputrain.audio.weight_norm import WeightNormed


def discriminators(channels: int = 32, periods: tuple[int, ...] = (2, 3, 5, 7, 11)) -> DiscriminatorGroup:
    """Returns a discriminator of the raw wave with half the channels, then HiFi-GAN's period discriminators with
    `channels` channels in the first layer."""
    return DiscriminatorGroup([_scale_discriminator(channels // 2), *multi_period(periods, channels)])


def _scale_discriminator(channels: int) -> nn.Module:
    widths = [channels * factor for factor in (1, 4, 16, 64, 64, 64)]
    kernels, strides = (15, 41, 41, 41, 41, 5), (1, 4, 4, 4, 4, 1)
    groups = [1, *(max(1, width // 4) for width in widths[:4]), 1]
    rows = zip([1, *widths], widths, kernels, strides, groups, strict=False)
    convs = [WeightNormed(nn.Conv1d(i, o, k, stride, padding=k // 2, groups=split)) for i, o, k, stride, split in rows]
    last = WeightNormed(nn.Conv1d(widths[-1], 1, 3, padding=1))
    return ConvolutionalDiscriminator(partial(lower_rate, halvings=0), convs, last)
