"""Upsampling and a convolution in one, with four ninths of the FLOPs: the doubled picture is never made.

Each of the four output pixels of an input pixel depends on 2x2 input pixels, so the operation is a transposed
convolution of the small picture with stride 2 and a 4x4 kernel. In fp32, a CPU computes it from differences of
neighbouring pixels (`upsample_conv_cpu`). It applies autocast itself, accepts either memory format and returns the
same one.

Shape suffixes: B items, C channels in, K channels out, H height, W width, h and w before upsampling.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.vae.memory_efficient_layers import Features, compute_dtype, leaves_biases, memory_format
from gputrain.vae.norm_arithmetic import Arithmetic, exact, uses_cpu_kernels
from gputrain.vae.upsample_conv_cpu import upsample_convolve, upsample_convolve_backward


def upsample_conv(x_BChw: Tensor, conv: nn.Conv2d, arithmetic: Arithmetic) -> Features:
    """Returns `conv` of `x_BChw` with each pixel repeated twice along height and width: (B, K, 2h, 2w). The dtype is
    that of `norm_silu_conv`."""
    later = leaves_biases(x_BChw, arithmetic)
    how = compute_dtype(x_BChw), memory_format(x_BChw), uses_cpu_kernels(x_BChw, arithmetic)
    out_BKHW = _upsample_conv(x_BChw, conv.weight, None if later else conv.bias, *how)
    return Features(out_BKHW, conv.bias if later else None)


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BChw: Tensor,
        weight_KC33: Tensor,
        bias_K: Tensor | None,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
        on_cpu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BChw, weight_KC33)
        ctx.dtype, ctx.memory_format, ctx.on_cpu = dtype, memory_format, on_cpu
        x_BChw, bias_K = x_BChw.to(dtype), None if bias_K is None else bias_K.to(dtype)
        if by_differences(dtype, on_cpu):
            made_BKHW = upsample_convolve(x_BChw, weight_KC33.to(dtype), bias_K)
            return made_BKHW.contiguous(memory_format=memory_format)
        return F.conv_transpose2d(x_BChw, _doubled(weight_KC33, on_cpu).to(dtype), bias_K, stride=2, padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BChw, weight_KC33 = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if by_differences(ctx.dtype, ctx.on_cpu):
            grads = upsample_convolve_backward(grad_BKHW, x_BChw.to(ctx.dtype), weight_KC33.to(ctx.dtype), needs)
            return *grads, None, None, None
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad_BKHW.contiguous(memory_format=ctx.memory_format),
            x_BChw.to(ctx.dtype),
            _doubled(weight_KC33, ctx.on_cpu).to(ctx.dtype),
            [weight_KC33.shape[0]],
            stride=[2, 2],
            padding=[1, 1],
            dilation=[1, 1],
            transposed=True,
            output_padding=[0, 0],
            groups=1,
            output_mask=list(needs),
        )
        return grad_x, None if grad_weight is None else _undoubled(grad_weight, ctx.on_cpu), grad_bias, None, None, None


_upsample_conv: Callable[..., Tensor] = _UpsampleConv.apply


def by_differences(dtype: torch.dtype, on_cpu: bool) -> bool:
    """Returns whether the convolution is one of `upsample_conv_cpu`. In 16 bits its error would be twice as large as
    that of the transposed convolution, which is fast there."""
    return on_cpu and dtype in (torch.float32, torch.float64)


# Rows 2i and 2i + 1 of a doubled picture repeat row i. Three taps at row 2i read rows i - 1, i and i of the small one,
# which are two taps (first, second + third); at row 2i + 1 they read rows i, i and i + 1: (first + second, third). The
# same holds for columns. The kernel of a transposed convolution has these taps in reverse, odd and even rows in turns.
def _doubled(weight_KC33: Tensor, on_cpu: bool) -> Tensor:
    """Returns the kernel (C, K, 4, 4) of the transposed convolution, in fp32 or fp64."""
    taps_CK33 = exact(weight_KC33).transpose(0, 1)
    return (_by_products if on_cpu else _by_windows)(taps_CK33)


def _undoubled(grad_CK44: Tensor, on_cpu: bool) -> Tensor:
    """Returns the gradient of the 3x3 kernel from that of `_doubled`, (K, C, 3, 3) in fp32 or fp64."""
    return (_gradient_by_products if on_cpu else _gradient_by_windows)(exact(grad_CK44)).transpose(0, 1)


def _by_windows(taps_CK33: Tensor) -> Tensor:
    """Returns the sums over windows of 2x2 taps, in reverse."""
    return F.avg_pool2d(taps_CK33.flip(2, 3), 2, stride=1, padding=1, divisor_override=1)


def _gradient_by_windows(grad_CK44: Tensor) -> Tensor:
    return F.avg_pool2d(grad_CK44, 2, stride=1, divisor_override=1).flip(2, 3)


def _by_products(taps_CK33: Tensor) -> Tensor:
    """Returns what `_by_windows` does, for which a CPU takes ten times as long."""
    return _product(taps_CK33.flatten(2), _sums_matrix(taps_CK33)).view(*taps_CK33.shape[:2], 4, 4)


def _gradient_by_products(grad_CK44: Tensor) -> Tensor:
    return _product(grad_CK44.flatten(2), _sums_matrix(grad_CK44).T).view(*grad_CK44.shape[:2], 3, 3)


def _sums_matrix(like: Tensor) -> Tensor:
    """Returns the matrix (9, 16) from the 3x3 taps to the 4x4 of the transposed convolution."""
    reverse = torch.eye(3, dtype=like.dtype, device=like.device).flip(0)
    sums_43 = F.pad(reverse, (0, 0, 0, 1)) + F.pad(reverse, (0, 0, 1, 0))
    return torch.kron(sums_43, sums_43).T.contiguous()


def _product(taps: Tensor, matrix: Tensor) -> Tensor:
    """Returns sums of taps in their own dtype."""
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(taps, matrix)
