"""WaveNet's gated convolutions without causality (van den Oord et al. 2016, arXiv:1609.03499, section 2.3; as in
WaveGlow, Prenger et al. 2018, arXiv:1811.00002), the body of the posterior encoder and of the flow.

Shape suffixes: B items, C channels, G channels of a speaker, T frames, 1 a dimension to broadcast over.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.audio.weight_norm import WeightNormed


class WaveNet(nn.Module):
    """Layers of a gated convolution, each of which adds to the next one's input and to the result.

    With `checkpointing`, a layer keeps only its input and is recomputed in the backward pass.
    """

    def __init__(
        self, channels: int, kernel: int, layers: int, speaker_channels: int, *, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        last = layers - 1  # The last layer has no residual output.
        self.layers = nn.ModuleList(GatedLayer(channels, kernel, last=index == last) for index in range(layers))
        if speaker_channels:
            self.condition = WeightNormed(nn.Conv1d(speaker_channels, 2 * channels * layers, 1))

    def forward(self, x_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        """Returns BCT, zero where the mask is False. `x_BCT` must be zero there as well."""
        offsets: Any = [None] * len(self.layers)
        if speaker_BG1 is not None:
            offsets = self.condition(speaker_BG1).chunk(len(self.layers), dim=1)
        sum_BCT: Tensor | None = None
        for layer, offset_BD1 in zip(self.layers, offsets, strict=True):
            run: Callable[..., tuple[Tensor, Tensor]] = layer
            if self.checkpointing and torch.is_grad_enabled():
                run = functools.partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
            x_BCT, skip_BCT = run(x_BCT, mask_B1T, offset_BD1)
            sum_BCT = skip_BCT if sum_BCT is None else sum_BCT + skip_BCT
        assert sum_BCT is not None
        return sum_BCT * mask_B1T


class GatedLayer(nn.Module):
    def __init__(self, channels: int, kernel: int, *, last: bool) -> None:
        super().__init__()
        self.channels, self.last = channels, last
        self.conv = WeightNormed(nn.Conv1d(channels, 2 * channels, kernel, padding=kernel // 2))
        self.out = WeightNormed(nn.Conv1d(channels, channels if last else 2 * channels, 1))

    def forward(self, x_BCT: Tensor, mask_B1T: Tensor, offset_BD1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the next layer's input and the skip output, both BCT."""
        gated_BDT = self.conv(x_BCT)
        if offset_BD1 is not None:
            gated_BDT = gated_BDT + offset_BD1
        out_BDT = self.out(gate(gated_BDT))
        if self.last:
            return x_BCT, out_BDT
        onward_BCT, skip_BCT = out_BDT.split(self.channels, dim=1)
        return (x_BCT + onward_BCT) * mask_B1T, skip_BCT


def gate(x_BDT: Tensor) -> Tensor:
    """Returns the tanh of the first half of the channels times the sigmoid of the second: (B, 2 C, T) to (B, C, T)."""
    value_BCT, gate_BCT = x_BDT.chunk(2, dim=1)
    return torch.tanh(value_BCT) * torch.sigmoid(gate_BCT)
