"""Layers of HiFi-GAN's generator (Kong et al. 2020, arXiv:2010.05646, section 2.2).

Shape suffixes: B items, C channels, L samples at the rate of a stage.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gputrain.audio.weight_norm import WeightNormed

SLOPE, LAST_SLOPE = 0.1, 0.01  # Slopes of the leaky ReLUs; the last one precedes the last convolution.


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair with a residual connection (HiFi-GAN's ResBlock "1")."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(same_length(channels, kernel, dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(same_length(channels, kernel, 1) for _ in dilations)

    def forward(self, x_BCL: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            x_BCL = x_BCL + plain(leaky_relu(dilated(leaky_relu(x_BCL, SLOPE)), SLOPE))
        return x_BCL


class _LeakyReLU(torch.autograd.Function):
    """Saves its output for the backward pass, which the next convolution saves anyway, and not its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, dtype: torch.dtype) -> Tensor:
        out = F.leaky_relu(x, slope).to(dtype)
        ctx.save_for_backward(out)
        ctx.slope, ctx.dtype = slope, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (out,) = ctx.saved_tensors  # The output has the sign of the input.
        return torch.ops.aten.leaky_relu_backward(grad, out, ctx.slope, True).to(ctx.dtype), None, None


def leaky_relu(x: Tensor, slope: float) -> Tensor:
    """Computes torch's leaky_relu with half the memory where a convolution follows. `slope` is positive.

    Under autocast, the output has the precision of the following convolution, also if `x` is fp32.
    """
    device, dtype = x.device.type, x.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if not x.requires_grad:
        return F.leaky_relu(x, slope).to(dtype)
    active: Tensor = _LeakyReLU.apply(x, slope, dtype)  # type: ignore[no-untyped-call]
    return active


def mean_of_blocks(blocks: nn.ModuleList, x_BCL: Tensor, *, checkpointing: bool) -> Tensor:
    """Returns the mean of the residual blocks of a stage, which have different receptive fields. With `checkpointing`,
    a block keeps only its input and is recomputed in the backward pass; it draws no random numbers."""
    runs: list[Callable[[Tensor], Tensor]] = list(blocks)
    if checkpointing and torch.is_grad_enabled():
        runs = [functools.partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False) for run in runs]
    return functools.reduce(torch.add, (run(x_BCL) for run in runs)) / len(runs)


def upsample(channels_in: int, channels: int, kernel: int, rate: int) -> WeightNormed:
    """Returns an upsampling by exactly `rate`, for even and odd kernels and rates."""
    surplus = kernel - rate
    conv = nn.ConvTranspose1d(
        channels_in, channels, kernel, rate, padding=(surplus + 1) // 2, output_padding=surplus % 2
    )
    return WeightNormed(conv)


def same_length(channels: int, kernel: int, dilation: int) -> WeightNormed:
    """Returns a convolution that keeps the length, for odd kernels."""
    padding = dilation * (kernel - 1) // 2
    return WeightNormed(nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding))
