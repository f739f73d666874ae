"""Upsampling and a convolution in one, with four ninths of the FLOPs: the doubled picture is never made.

Each of the four output pixels of an input pixel depends on 2x2 input pixels, so the operation is a transposed
convolution of the small picture with stride 2 and a 4x4 kernel. It applies autocast itself, accepts either memory
format and returns the same one.

Shape suffixes: B items, C channels in, K channels out, H height, W width, h and w before upsampling.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.vae.memory_efficient_layers import Features, compute_dtype, memory_format
from gputrain.vae.norm_arithmetic import exact


def upsample_conv(x_BChw: Tensor, conv: nn.Conv2d) -> Features:
    """Returns `conv` of `x_BChw` with each pixel repeated twice along height and width: (B, K, 2h, 2w). The dtype is
    that of `norm_silu_conv`."""
    out_BKHW = _upsample_conv(x_BChw, conv.weight, compute_dtype(x_BChw), memory_format(x_BChw))
    return Features(out_BKHW, conv.bias)


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BChw: Tensor, weight_KC33: Tensor, dtype: torch.dtype, memory_format: torch.memory_format
    ) -> Tensor:
        ctx.save_for_backward(x_BChw, weight_KC33)
        ctx.dtype, ctx.memory_format = dtype, memory_format
        return F.conv_transpose2d(x_BChw.to(dtype), _doubled(weight_KC33).to(dtype), stride=2, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BChw, weight_KC33 = ctx.saved_tensors
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_BKHW.contiguous(memory_format=ctx.memory_format),
            x_BChw.to(ctx.dtype),
            _doubled(weight_KC33).to(ctx.dtype),
            [weight_KC33.shape[0]],
            stride=[2, 2],
            padding=[1, 1],
            dilation=[1, 1],
            transposed=True,
            output_padding=[0, 0],
            groups=1,
            output_mask=[*ctx.needs_input_grad[:2], False],
        )
        return grad_x, None if grad_weight is None else _undoubled(grad_weight), None, None


_upsample_conv: Callable[..., Tensor] = _UpsampleConv.apply


# Rows 2i and 2i + 1 of a doubled picture repeat row i. Three taps at row 2i read rows i - 1, i and i of the small one,
# which are two taps (first, second + third); at row 2i + 1 they read rows i, i and i + 1: (first + second, third). The
# same holds for columns. The kernel of a transposed convolution has these taps in reverse, odd and even rows in turns.
def _doubled(weight_KC33: Tensor) -> Tensor:
    """Returns the kernel (C, K, 4, 4) of the transposed convolution, in fp32 or fp64: the sums over windows of 2x2
    taps, in reverse."""
    taps_CK33 = exact(weight_KC33).transpose(0, 1)
    return F.avg_pool2d(taps_CK33.flip(2, 3), 2, stride=1, padding=1, divisor_override=1)


def _undoubled(grad_CK44: Tensor) -> Tensor:
    """Returns the gradient of the 3x3 kernel from that of `_doubled`, (K, C, 3, 3) in fp32 or fp64."""
    grad_CK33 = F.avg_pool2d(exact(grad_CK44), 2, stride=1, divisor_override=1)
    return grad_CK33.flip(2, 3).transpose(0, 1)
