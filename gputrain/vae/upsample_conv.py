"""Upsampling and a convolution in one, with four ninths of the FLOPs: the doubled picture is never made.

Each of the four output pixels of an input pixel depends on 2x2 input pixels, so the operation is four 2x2 convolutions
of the small picture. It applies autocast itself, accepts either memory format and returns the same one.

Shape suffixes: B items, C channels in, K channels out, H height, W width, h and w before upsampling, E channels by
corner.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.vae.memory_efficient_layers import compute_dtype, convolve, convolve_backward, exact, memory_format


def upsample_conv(x_BChw: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns `conv` of `x_BChw` with each pixel repeated twice along height and width: (B, K, 2h, 2w). The dtype is
    that of `norm_silu_conv`."""
    return _upsample_conv(x_BChw, conv.weight, conv.bias, compute_dtype(x_BChw), memory_format(x_BChw))


class _UpsampleConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BChw: Tensor,
        weight_KCHW: Tensor,
        bias_K: Tensor,
        dtype: torch.dtype,
        memory_format: torch.memory_format,
    ) -> Tensor:
        ctx.save_for_backward(x_BChw, weight_KCHW)
        ctx.dtype, ctx.memory_format = dtype, memory_format
        by_corner_BEhw = convolve(x_BChw.to(dtype), _by_corner(weight_KCHW), None)
        return _interleaved(by_corner_BEhw, bias_K.to(dtype), memory_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BChw, weight_KCHW = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = convolve_backward(
            _taken_apart(grad_BKHW, ctx.memory_format),
            x_BChw.to(ctx.dtype),
            _by_corner(weight_KCHW),
            ctx.needs_input_grad[:3],
        )
        if grad_weight is not None:
            grad_weight = _by_tap(grad_weight)
        if grad_bias is not None:
            grad_bias = exact(grad_bias).view(4, -1).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


_upsample_conv: Callable[..., Tensor] = _UpsampleConv.apply


# Rows 2i and 2i + 1 of a doubled picture repeat row i. A kernel of three taps at row 2i reads rows i - 1, i and i; at
# row 2i + 1 it reads rows i, i and i + 1. So it has two taps, (first, second + third) or (first + second, third). The
# same holds for columns. E counts channels by corner, the position among the four pixels: column first, then row.


def _by_corner(weight_KC33: Tensor) -> Tensor:
    """Converts a 3x3 kernel on the doubled picture to four 2x2 kernels on the small one: (4 K, C, 2, 2), by corner."""
    return _merged(_merged(weight_KC33.mT).mT).flatten(0, 2)


def _by_tap(grad_EC22: Tensor) -> Tensor:
    """Returns the gradient of the 3x3 kernel from that of its four 2x2 kernels, in fp32 or fp64."""
    grad_22KC22 = exact(grad_EC22).view(2, 2, -1, *grad_EC22.shape[1:])
    return _merged_gradient(_merged_gradient(grad_22KC22).mT).mT


def _merged(taps: Tensor) -> Tensor:
    """Maps (..., 3) to (2, ..., 2): the taps of even and of odd rows."""
    first, second, third = taps.unbind(-1)
    return torch.stack([torch.stack([first, second + third], -1), torch.stack([first + second, third], -1)])


def _merged_gradient(grad: Tensor) -> Tensor:
    """Returns the gradient of `_merged`: (2, ..., 2) to (..., 3)."""
    even, odd = grad
    return torch.stack([even[..., 0] + odd[..., 0], even[..., 1] + odd[..., 0], even[..., 1] + odd[..., 1]], -1)


def _interleaved(y_BEhw: Tensor, bias_K: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Interleaves (B, 4 K, h + 1, w + 1), by corner, into (B, K, 2 h, 2 w), and adds the bias on the way. It is not
    compiled, since the compiler would add copies."""
    B, E, h, w = y_BEhw.shape
    out_BKHW = _empty_like(y_BEhw, (B, E // 4, 2 * h - 2, 2 * w - 2), memory_format)
    for corner_BKhw, window_BKhw in zip(_corners(out_BKHW), _windows(y_BEhw), strict=True):
        torch.add(window_BKhw, bias_K[:, None, None], out=corner_BKhw)
    return out_BKHW


def _taken_apart(grad_BKHW: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns the gradient of `_interleaved`: zero outside the windows."""
    B, K, H, W = grad_BKHW.shape
    grad_BEhw = _empty_like(grad_BKHW, (B, 4 * K, H // 2 + 1, W // 2 + 1), memory_format).zero_()
    for corner_BKhw, window_BKhw in zip(_corners(grad_BKHW), _windows(grad_BEhw), strict=True):
        window_BKhw.copy_(corner_BKhw)
    return grad_BEhw


def _empty_like(x: Tensor, shape: tuple[int, ...], memory_format: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)


def _corners(x_BKHW: Tensor) -> list[Tensor]:
    """Returns every other pixel, by corner: views of (B, K, h, w)."""
    return [x_BKHW[:, :, row::2, column::2] for column, row in _ORDER]


def _windows(y_BEhw: Tensor) -> list[Tensor]:
    """Returns the convolution outputs that belong to the pixels of each corner: views of (B, K, h, w)."""
    h, w = y_BEhw.shape[2] - 1, y_BEhw.shape[3] - 1
    parts = zip(y_BEhw.chunk(4, dim=1), _ORDER, strict=True)
    return [part[:, :, row : row + h, column : column + w] for part, (column, row) in parts]


_ORDER = ((0, 0), (0, 1), (1, 0), (1, 1))  # column and row of each corner
