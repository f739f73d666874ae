"""The layers of a voice in the forms that onnxruntime computes fastest on a CPU; the results are equal up to rounding.

A one-dimensional convolution is computed there as a matrix product of gathered inputs, which are copied twice. Two-
dimensional ones of 16 channels, or multiples of it, are computed directly, from memory that is blocked by channels. So
all convolutions are two-dimensional here, along the last dimension of one or more rows. Since onnxruntime divides such
a layer among its threads by 64 channels of a row, a long signal is cut into several rows, which overlap by what the
layers can see.

Shape suffixes: B items, C channels, G channels of a speaker, F frames, R rows, L samples at the rate of a stage,
T samples of the wave, 1 a dimension of one.
"""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.hifigan import LAST_SLOPE, SLOPE, ResBlock
from gputrain.tts.decoder import WaveDecoder
from gputrain.tts.model import PlainConvolution, Voice

PARTS, CHANNELS = 8, 64  # Parts of a layer to divide among threads, and the channels of a part with AVX-512.
SHORT_FRAMES = 100  # A sentence of so many frames is made longer by the overlaps by LONGER at the most.
LONGER = 0.25


def faster_in_onnxruntime(voice: Voice) -> Voice:
    """Returns a speaking copy for tracing. What need not change is shared."""
    fast: Any = copy.copy(voice)
    fast._modules = dict(voice._modules)
    fast.text_encoder, fast.flow = copy.deepcopy(voice.text_encoder), copy.deepcopy(voice.flow)
    for module in [*fast.text_encoder.modules(), *fast.flow.modules()]:
        for name, layer in list(module.named_children()):
            if isinstance(layer, (PlainConvolution, nn.Conv1d)) and layer.weight.shape[2] > 1:
                setattr(module, name, OneRow(layer))
    fast.decoder = RowDecoder(voice.decoder, voice.architecture.upsample_rates)
    speaking: Voice = fast
    return speaking


class RowDecoder(nn.Module):
    """A decoder whose stages compute in rows. The division by the number of a stage's blocks is part of the weights of
    the layer after it, which a leaky ReLU between them does not change."""

    def __init__(self, decoder: WaveDecoder, rates: Sequence[int]) -> None:
        super().__init__()
        self.pre, count = OneRow(decoder.pre), decoder.kernels
        if hasattr(decoder, "condition"):
            self.condition = decoder.condition
        self.ups = nn.ModuleList(_divided(up, count if stage else 1) for stage, up in enumerate(decoder.ups))
        self.stages = nn.ModuleList()
        short = SHORT_FRAMES
        for stage, rate in enumerate(rates):
            short *= rate
            self.stages.append(RowStage(decoder.resblocks[count * stage : count * (stage + 1)], short))
        self.head = copy.copy(decoder.head)
        self.head._modules = {**decoder.head._modules, "post": _divided(decoder.head.post, count)}

    def forward(self, latent_BCF: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        """Returns a wave, (B, 1, T)."""
        x_BCL = self.pre(latent_BCF)
        if speaker_BG1 is not None:
            x_BCL = x_BCL + self.condition(speaker_BG1)
        for up, stage in zip(self.ups, self.stages, strict=True):
            x_BCL = stage(up(F.leaky_relu(x_BCL, SLOPE)))
        wave_B1T: Tensor = self.head(F.leaky_relu(x_BCL, LAST_SLOPE))
        return wave_B1T


class RowStage(nn.Module):
    """Computes the sum of the residual blocks of a stage. `short` is the length of a short sentence here."""

    def __init__(self, blocks: Iterable[nn.Module], short: int) -> None:
        super().__init__()
        made = [RowBlock(block) for block in blocks]
        self.blocks, self.enter = nn.ModuleList(made), Blocked(made[0].channels)
        self.halo = max(block.halo for block in made)
        parts_of_row = max(1, made[0].channels // CHANNELS)
        self.rows = max(1, min(PARTS // parts_of_row, int(LONGER * short / (2 * self.halo))))

    def forward(self, x_BCL: Tensor) -> Tensor:
        x_BCRL, starts = overlapping(x_BCL, self.rows, self.halo)
        x_BCRL = self.enter(x_BCRL)
        sum_BCRL = functools.reduce(torch.add, (block(x_BCRL) for block in self.blocks))
        return joined(sum_BCRL, starts, x_BCL.shape[2])


class RowBlock(nn.Module):
    """A residual block of either kind."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        groups = zip(block.convs1, block.convs2, strict=True) if isinstance(block, ResBlock) else zip(block.convs)
        layers = [[RowConvolution(layer) for layer in group] for group in groups]
        self.groups = nn.ModuleList(nn.ModuleList(group) for group in layers)
        self.halo = sum(layer.reach for group in layers for layer in group)
        self.channels = len(layers[0][0].weight)
        self.activation = Blocked(self.channels)

    def forward(self, x_BCRL: Tensor) -> Tensor:
        layers: Any
        for layers in self.groups:
            hidden_BCRL = self.activation(x_BCRL)
            for layer in layers:
                hidden_BCRL = layer(F.leaky_relu(hidden_BCRL, SLOPE))
            x_BCRL = x_BCRL + hidden_BCRL
        return x_BCRL


class RowConvolution(nn.Module):
    """A convolution along rows that keeps their length."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        options = layer.convolve.keywords if isinstance(layer, PlainConvolution) else vars(layer)
        (self.reach,), (self.dilation,) = options["padding"], options["dilation"]
        self.weight, self.bias = nn.Parameter(layer.weight[:, :, None], requires_grad=False), layer.bias

    def forward(self, x_BCRL: Tensor) -> Tensor:
        return F.conv2d(x_BCRL, self.weight, self.bias, padding=(0, self.reach), dilation=(1, self.dilation))


class OneRow(RowConvolution):
    """The same for a signal that is one row."""

    def forward(self, x_BCL: Tensor) -> Tensor:
        return super().forward(x_BCL[:, :, None])[:, :, 0]


class Blocked(nn.Module):
    """A convolution that changes nothing. Only with it does onnxruntime keep memory blocked by channels from one layer
    to the next: it adds blocked outputs of convolutions, and makes a leaky ReLU part of a convolution before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.ones = nn.Parameter(torch.ones(channels, 1, 1, 1), requires_grad=False)

    def forward(self, x_BCRL: Tensor) -> Tensor:
        return F.conv2d(x_BCRL, self.ones, groups=self.channels)


def overlapping(x_BCL: Tensor, rows: int, halo: int) -> tuple[Tensor, list[Tensor]]:
    """Cuts a signal into rows of one length, each with `halo` more samples on both sides as far as there are any.
    Returns the rows, BCRL, and the sample at which each begins."""
    if rows == 1:
        return x_BCL[:, :, None], [torch.tensor(0)]
    length = torch.as_tensor(x_BCL.shape[2])
    part = (length + rows - 1) // rows
    width = torch.minimum(part + 2 * halo, length)
    starts = [torch.minimum((part * row - halo).clamp(min=0), length - width) for row in range(rows)]
    return torch.stack([x_BCL[:, :, start : start + width] for start in starts], dim=2), starts


def joined(x_BCRL: Tensor, starts: Sequence[Tensor], length: int) -> Tensor:
    """Returns the signal of such rows, BCL, each without its overlap."""
    rows = len(starts)
    if rows == 1:
        return x_BCRL[:, :, 0]
    ends = torch.as_tensor(length)
    part = (ends + rows - 1) // rows
    kept = []
    for row, start in enumerate(starts):
        first, last = torch.minimum(part * row, ends), torch.minimum(part * (row + 1), ends)
        kept.append(x_BCRL[:, :, row, first - start : last - start])
    return torch.cat(kept, dim=2)


def _divided(layer: Any, count: int) -> Any:
    """Returns the layer for inputs that are `count` times as large."""
    made = copy.deepcopy(layer)
    made.weight.div_(count)
    return made
