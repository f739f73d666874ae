"""The six judges of VITS (Kim, Kong and Son 2021, arXiv:2106.06103, section 2.5)."""

from functools import partial

from torch import nn

from gputrain.vocoder.architecture import Shapes
from gputrain.vocoder.discriminators import ConvolutionalJudge, Judges, lower_rate, multi_period
from gputrain.vocoder.generator import WeightNormed


def discriminators(periods: tuple[int, ...] = (2, 3, 5, 7, 11)) -> Judges:
    """One judge of the wave as it is, then HiFi-GAN's of every P-th sample for each period P."""
    return Judges([_scale_judge(), *multi_period(Shapes(discriminator_periods=periods))])


def _scale_judge() -> nn.Module:
    widths = [16, 64, 256, 1024, 1024, 1024]
    kernels, strides, groups = (15, 41, 41, 41, 41, 5), (1, 4, 4, 4, 4, 1), (1, 4, 16, 64, 256, 1)
    rows = zip([1, *widths], widths, kernels, strides, groups, strict=False)
    convs = [WeightNormed(nn.Conv1d(i, o, k, stride, padding=k // 2, groups=split)) for i, o, k, stride, split in rows]
    last = WeightNormed(nn.Conv1d(widths[-1], 1, 3, padding=1))
    return ConvolutionalJudge(partial(lower_rate, halvings=0), convs, last)
