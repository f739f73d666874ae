"""The two layer sequences that take most of an autoencoder's memory, with less kept for the backward pass.

Autograd keeps the input of each layer of GroupNorm -> SiLU -> convolution: ten bytes per element under bf16 autocast,
because normalisation and activation run in fp32. `norm_silu_conv` keeps the two bytes of its bf16 input and two numbers
per group, and recomputes the elementwise part in the backward pass. `upsample_conv` never materialises the doubled
picture: each of the four output pixels of an input pixel depends on 2x2 input pixels, so the operation is four 2x2
convolutions of the small picture, with four ninths of the FLOPs. No convolution is recomputed.

The operations between the convolutions are the pure functions of an Arithmetic, which may be compiled one by one.
(Compiled as a whole, both passes are one graph to the compiler, which keeps the common subexpressions instead of
recomputing them: twice the memory.)

Both functions apply autocast themselves, accept either memory format and return the same one. Gradients are returned
in the dtype in which they were computed: autograd casts each to the dtype of its input.

Shape suffixes: B items, C channels in, K channels out, H height, W width, h and w before upsampling, G groups,
D channels of one group. GroupNorm is arXiv:1803.08494, SiLU arXiv:1606.08415.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.vae.attention import IN_PLACE, ScoreArithmetic

aten = torch.ops.aten


class Arithmetic(NamedTuple):
    """The elementwise functions between the convolutions: `EAGER`, or compiled versions of the same."""

    statistics: Callable[..., tuple[Tensor, Tensor]]
    coefficients: Callable[..., tuple[Tensor, Tensor]]
    activate: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]
    native: bool = True  # use aten's own kernels on the CPU, where they are the fastest
    scores: ScoreArithmetic = IN_PLACE  # The functions of attention.

    def compiled(self, compile: Callable[[Callable[..., Any]], Callable[..., Any]], *, native: bool) -> "Arithmetic":
        """Returns an Arithmetic whose functions are compiled one by one."""
        return Arithmetic(
            compile(self.statistics), compile(self.coefficients), compile(self.activate), compile(self.gradients),
            native, ScoreArithmetic.compiled(compile),
        )  # fmt: skip


def norm_silu_conv(x_BCHW: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, arithmetic: Arithmetic) -> Tensor:
    """Returns `conv(silu(norm(x_BCHW)))`, (B, K, H, W), in the autocast dtype, or without autocast in that of `x_BCHW`.

    `norm` has a weight and a bias; `conv` has an odd kernel and stride 1, and keeps height and width.
    """
    # A batch of one may have strides of neither memory format, which aten's CPU kernels do not accept.
    x_BCHW = x_BCHW.contiguous(memory_format=_memory_format(x_BCHW))
    parameters = (norm.weight, norm.bias, conv.weight, conv.bias)
    return _norm_silu_conv(x_BCHW, *parameters, norm.num_groups, norm.eps, compute_dtype(x_BCHW), arithmetic)


def upsample_conv(x_BChw: Tensor, conv: nn.Conv2d) -> Tensor:
    """Returns `conv` of `x_BChw` with each pixel repeated twice along height and width: (B, K, 2h, 2w). The dtype is
    that of `norm_silu_conv`."""
    return _upsample_conv(x_BChw, conv.weight, conv.bias, compute_dtype(x_BChw), _memory_format(x_BChw))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of convolutions and products of `x`: the autocast dtype, or that of `x` without autocast."""
    device = x.device.type
    # Autocast is not available on the meta device, where is_autocast_enabled would raise.
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else x.dtype


class _NormSiluConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BCHW: Tensor,
        norm_weight_C: Tensor,
        norm_bias_C: Tensor,
        weight_KCHW: Tensor,
        bias_K: Tensor,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> Tensor:
        active_BCHW, mean_BG, rstd_BG = _activated(x_BCHW, norm_weight_C, norm_bias_C, groups, eps, dtype, arithmetic)
        ctx.save_for_backward(x_BCHW, mean_BG, rstd_BG, norm_weight_C, norm_bias_C, weight_KCHW)
        ctx.dtype, ctx.arithmetic = dtype, arithmetic
        return _conv(active_BCHW, weight_KCHW, bias_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BCHW, mean_BG, rstd_BG, norm_weight_C, norm_bias_C, weight_KCHW = ctx.saved_tensors
        *needs_norm, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        scale_BC, shift_BC = ctx.arithmetic.coefficients(mean_BG, rstd_BG, norm_weight_C, norm_bias_C)
        active_BCHW = ctx.arithmetic.activate(x_BCHW, scale_BC, shift_BC, ctx.dtype)
        grad_BCHW, grad_weight, grad_bias = _conv_backward(
            grad_BKHW, active_BCHW, weight_KCHW, (any(needs_norm), needs_weight, needs_bias)
        )
        del active_BCHW
        grad_x = grad_norm_weight = grad_norm_bias = None
        if grad_BCHW is not None:
            grad_x, grad_norm_weight, grad_norm_bias = ctx.arithmetic.gradients(
                grad_BCHW, x_BCHW, scale_BC, shift_BC, mean_BG, rstd_BG, norm_weight_C, ctx.arithmetic.native
            )
        return grad_x, grad_norm_weight, grad_norm_bias, grad_weight, grad_bias, None, None, None, None


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
        by_corner_BEhw = _conv(x_BChw.to(dtype), _by_corner(weight_KCHW), bias_K.repeat(4))
        return _interleaved(by_corner_BEhw, memory_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor) -> tuple[Tensor | None, ...]:
        x_BChw, weight_KCHW = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _conv_backward(
            _taken_apart(grad_BKHW, ctx.memory_format),
            x_BChw.to(ctx.dtype),
            _by_corner(weight_KCHW),
            ctx.needs_input_grad[:3],
        )
        if grad_weight is not None:
            grad_weight = _by_tap(grad_weight)
        if grad_bias is not None:
            grad_bias = _exact(grad_bias).view(4, -1).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


_norm_silu_conv: Callable[..., Tensor] = _NormSiluConv.apply
_upsample_conv: Callable[..., Tensor] = _UpsampleConv.apply


def _exact(x: Tensor) -> Tensor:
    """Returns `x` in fp32, or fp64 if it is fp64: the dtype of statistics and normalisation."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _activated(
    x_BCHW: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    groups: int,
    eps: float,
    dtype: torch.dtype,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns silu(norm(x)) in `dtype`, and mean and 1 / standard deviation by item and group.

    On the CPU aten's kernel is the fastest, and plain layers call it too. On CUDA aten's kernel always returns NCHW,
    and processes each item and group in a single block of threads; elementwise operations are used there, which
    support any memory format and which torch.compile fuses.
    """
    B, C, H, W = x_BCHW.shape
    if arithmetic.native and x_BCHW.device.type == "cpu":
        x_BCHW = _exact(x_BCHW)
        weight_C, bias_C = weight_C.to(x_BCHW.dtype), bias_C.to(x_BCHW.dtype)
        y_BCHW, mean_BG, rstd_BG = torch.native_group_norm(x_BCHW, weight_C, bias_C, B, C, H * W, groups, eps)
        return F.silu(y_BCHW, inplace=True).to(dtype), mean_BG, rstd_BG
    mean_BG, rstd_BG = arithmetic.statistics(x_BCHW, groups, eps)
    # Coefficients are a separate function: if they were inlined, the compiler would store the activation in fp32.
    scale_BC, shift_BC = arithmetic.coefficients(mean_BG, rstd_BG, weight_C, bias_C)
    return arithmetic.activate(x_BCHW, scale_BC, shift_BC, dtype), mean_BG, rstd_BG


def _statistics(x_BCHW: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Returns mean and 1 / standard deviation by item and group, in fp32 or fp64.

    They are reduced by channel first, since a reduction over height and width reads either memory format in order;
    then by the law of total variance, without cancellation: mean of the channels' variances plus variance of their
    means.
    """
    var_BC, mean_BC = torch.var_mean(_exact(x_BCHW), dim=(2, 3), correction=0)
    var_BGD, mean_BGD = (statistic_BC.view(x_BCHW.shape[0], groups, -1) for statistic_BC in (var_BC, mean_BC))
    var_BG = var_BGD.mean(2) + mean_BGD.var(2, correction=0)
    return mean_BGD.mean(2), torch.rsqrt(var_BG + eps)


def _activate(x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns silu(norm(x)) in `dtype`."""
    return F.silu(_normalised(x_BCHW, scale_BC, shift_BC), inplace=True).to(dtype)


def _coefficients(mean_BG: Tensor, rstd_BG: Tensor, weight_C: Tensor, bias_C: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scale and shift by item and channel: GroupNorm is `scale * x + shift`."""
    channels = weight_C.shape[0]
    scale_BC = _by_channel(rstd_BG, channels) * weight_C
    return scale_BC, torch.addcmul(bias_C.to(scale_BC.dtype), scale_BC, _by_channel(mean_BG, channels), value=-1)


def _normalised(x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor) -> Tensor:
    """Returns GroupNorm's output, with the operations in the order of aten's kernel, so that rounding is the same."""
    return torch.addcmul(_over_pixels(shift_BC), x_BCHW, _over_pixels(scale_BC))


def _gradients(
    grad_BCHW: Tensor,
    x_BCHW: Tensor,
    scale_BC: Tensor,
    shift_BC: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    weight_C: Tensor,
    native: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, weight and bias from that of silu(norm(x)). The device decides on the
    implementation as in `_activated`. The input's gradient has its dtype."""
    B, C, H, W = x_BCHW.shape
    # The gradient overwrites y_BCHW, which is not used elsewhere and has the memory format of x_BCHW.
    y_BCHW = _normalised(x_BCHW, scale_BC, shift_BC)
    grad_BCHW = aten.silu_backward.grad_input(grad_BCHW.to(y_BCHW.dtype), y_BCHW, grad_input=y_BCHW)
    if native and x_BCHW.device.type == "cpu":
        exact_BCHW = _exact(x_BCHW)
        sizes = (B, C, H * W, mean_BG.shape[1])
        grad_x, grad_weight, grad_bias = aten.native_group_norm_backward(
            grad_BCHW, exact_BCHW, mean_BG, rstd_BG, weight_C.to(exact_BCHW.dtype), *sizes, [True, True, True]
        )
    else:
        grad_x, grad_weight, grad_bias = _norm_gradients(grad_BCHW, x_BCHW, mean_BG, rstd_BG, weight_C)
    return grad_x.to(x_BCHW.dtype), grad_weight, grad_bias


def _norm_gradients(
    grad_BCHW: Tensor, x_BCHW: Tensor, mean_BG: Tensor, rstd_BG: Tensor, weight_C: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, weight and bias from that of norm(x): two reductions over pixels, then the
    input's gradient as `p * grad + q * x + r`.

    With z = (x - mean) * rstd and <.> the mean over a group, the gradient of the input is
    rstd * (weight * grad - <weight * grad> - z * <weight * grad * z>).
    """
    B, C, H, W = x_BCHW.shape
    groups = mean_BG.shape[1]
    mean_BC, rstd_BC = _by_channel(mean_BG, C), _by_channel(rstd_BG, C)
    grad_sum_BC = grad_BCHW.sum(dim=(2, 3))
    grad_z_sum_BC = ((grad_BCHW * x_BCHW).sum(dim=(2, 3)) - mean_BC * grad_sum_BC) * rstd_BC

    pixels = C // groups * H * W
    mean_grad_BG = (weight_C * grad_sum_BC).view(B, groups, -1).sum(2) / pixels
    mean_grad_z_BG = (weight_C * grad_z_sum_BC).view(B, groups, -1).sum(2) / pixels
    p_BC = rstd_BC * weight_C
    q_BG = -rstd_BG.square() * mean_grad_z_BG
    r_BG = -rstd_BG * mean_grad_BG - q_BG * mean_BG
    grad_x_BCHW = torch.addcmul(_over_pixels(_by_channel(r_BG, C)), x_BCHW, _over_pixels(_by_channel(q_BG, C)))
    grad_x_BCHW.addcmul_(grad_BCHW, _over_pixels(p_BC))
    return grad_x_BCHW, grad_z_sum_BC.sum(0), grad_sum_BC.sum(0)


def _by_channel(statistic_BG: Tensor, channels: int) -> Tensor:
    return statistic_BG.repeat_interleave(channels // statistic_BG.shape[1], dim=1)


def _over_pixels(coefficient_BC: Tensor) -> Tensor:
    return coefficient_BC[:, :, None, None]


def _conv(x_BCHW: Tensor, weight_KCHW: Tensor, bias_K: Tensor) -> Tensor:
    padding = weight_KCHW.shape[-1] // 2
    return F.conv2d(x_BCHW, weight_KCHW.to(x_BCHW.dtype), bias_K.to(x_BCHW.dtype), padding=padding)


def _conv_backward(
    grad_BKHW: Tensor, x_BCHW: Tensor, weight_KCHW: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias in the dtype of `x_BCHW`; None where `needs` is False."""
    padding = weight_KCHW.shape[-1] // 2
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = aten.convolution_backward(
        grad_BKHW,
        x_BCHW,
        weight_KCHW.to(x_BCHW.dtype),
        [weight_KCHW.shape[0]],
        stride=[1, 1],
        padding=[padding, padding],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=1,
        output_mask=list(needs),
    )
    return grads


def _memory_format(x_BCHW: Tensor) -> torch.memory_format:
    """Returns channels_last if the strides are exactly those, else contiguous_format."""
    _, C, H, W = x_BCHW.shape
    return torch.channels_last if x_BCHW.stride() == (H * W * C, 1, W * C, C) else torch.contiguous_format


# Rows 2i and 2i + 1 of a doubled picture repeat row i. A kernel of three taps at row 2i reads rows i - 1, i and i; at
# row 2i + 1 it reads rows i, i and i + 1. So it has two taps, (first, second + third) or (first + second, third). The
# same holds for columns. E counts channels by corner, the position among the four pixels: column first, then row.


def _by_corner(weight_KC33: Tensor) -> Tensor:
    """Converts a 3x3 kernel on the doubled picture to four 2x2 kernels on the small one: (4 K, C, 2, 2), by corner."""
    return _merged(_merged(weight_KC33.mT).mT).flatten(0, 2)


def _by_tap(grad_EC22: Tensor) -> Tensor:
    """Returns the gradient of the 3x3 kernel from that of its four 2x2 kernels, in fp32 or fp64."""
    grad_22KC22 = _exact(grad_EC22).view(2, 2, -1, *grad_EC22.shape[1:])
    return _merged_gradient(_merged_gradient(grad_22KC22).mT).mT


def _merged(taps: Tensor) -> Tensor:
    """Maps (..., 3) to (2, ..., 2): the taps of even and of odd rows."""
    first, second, third = taps.unbind(-1)
    return torch.stack([torch.stack([first, second + third], -1), torch.stack([first + second, third], -1)])


def _merged_gradient(grad: Tensor) -> Tensor:
    """Returns the gradient of `_merged`: (2, ..., 2) to (..., 3)."""
    even, odd = grad
    return torch.stack([even[..., 0] + odd[..., 0], even[..., 1] + odd[..., 0], even[..., 1] + odd[..., 1]], -1)


def _interleaved(y_BEhw: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Interleaves (B, 4 K, h + 1, w + 1), by corner, into (B, K, 2 h, 2 w). It copies, and is not compiled, since the
    compiler would add copies."""
    B, E, h, w = y_BEhw.shape
    out_BKHW = _empty_like(y_BEhw, (B, E // 4, 2 * h - 2, 2 * w - 2), memory_format)
    for corner_BKhw, window_BKhw in zip(_corners(out_BKHW), _windows(y_BEhw), strict=True):
        corner_BKhw.copy_(window_BKhw)
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

EAGER = Arithmetic(_statistics, _coefficients, _activate, _gradients)
