"""GroupNorm and SiLU as functions of whole pictures: for torch's own operations one by one, or for a compiler.

Compiled functions keep what they compute in registers, in fp32. Uncompiled ones write each result to memory, so those
compute in place and store 16 bits wherever autocast has 16 bits: 54 bytes per bf16 value move in a forward
and a backward pass, where plain layers move 76. The normalised value and the gradient behind the activation are
rounded for that, as the convolution's inputs are; sums over pixels and the coefficients stay in fp32.

aten's kernel for CUDA always returns NCHW, and processes each item and group in a single block of threads. These
operations support any memory format. Gradients are returned in the dtype in which they were computed: autograd casts
each to the dtype of its input.
GroupNorm is arXiv:1803.08494, SiLU arXiv:1606.08415.

Shape suffixes: B items, C channels, H height, W width, G groups, D channels of one group.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.engine.recipe import at_least_fp32
from gputrain.vae.attention import IN_PLACE, ScoreArithmetic

aten = torch.ops.aten


class Arithmetic(NamedTuple):
    """The functions between the convolutions: `EAGER`, or compiled ones that compute the same."""

    statistics: Callable[..., tuple[Tensor, Tensor]]
    coefficients: Callable[..., tuple[Tensor, Tensor]]
    activate: Callable[..., Tensor]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]
    scores: ScoreArithmetic = IN_PLACE  # The functions of attention.

    @classmethod
    def compiled(cls, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "Arithmetic":
        """Returns an Arithmetic whose functions are compiled one by one."""
        return cls(
            compile(_statistics), compile(_coefficients), compile(_activate), compile(_gradients),
            ScoreArithmetic.compiled(compile),
        )  # fmt: skip


def _statistics(x_BCHW: Tensor, groups: int, eps: float, offset_C: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns mean and 1 / standard deviation of x + offset by item and group, in fp32 or fp64.

    They are reduced by channel first, since a reduction over height and width reads either memory format in order;
    then by the law of total variance, without cancellation: mean of the channels' variances plus variance of their
    means.
    """
    var_BC, mean_BC = torch.var_mean(at_least_fp32(x_BCHW), dim=(2, 3), correction=0)
    return _of_groups(var_BC, mean_BC, groups, eps, offset_C)


def _statistics_uncast(
    x_BCHW: Tensor, groups: int, eps: float, offset_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes `_statistics` by reductions that read 16 bits and write fp32, which `var_mean` cannot do."""
    if x_BCHW.dtype in (torch.float32, torch.float64):
        return _statistics(x_BCHW, groups, eps, offset_C)
    var_BC = x_BCHW.new_empty(x_BCHW.shape[:2], dtype=torch.float32)
    torch.var(x_BCHW, dim=(2, 3), correction=0, out=var_BC)
    return _of_groups(var_BC, x_BCHW.mean(dim=(2, 3), dtype=torch.float32), groups, eps, offset_C)


def _of_groups(
    var_BC: Tensor, mean_BC: Tensor, groups: int, eps: float, offset_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns `_statistics` from the variances and means of channels."""
    if offset_C is not None:
        mean_BC = mean_BC + offset_C
    var_BG, mean_BG = torch.var_mean(mean_BC.view(len(mean_BC), groups, -1), dim=2, correction=0)
    var_BG = var_BG + var_BC.view(len(var_BC), groups, -1).mean(2)
    return mean_BG, torch.rsqrt(var_BG + eps)


def _activate(x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns silu(norm(x)) in `dtype`."""
    return F.silu(_normalised(x_BCHW, scale_BC, shift_BC), inplace=True).to(dtype)


def _activate_in_place(x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `_activate` in the memory of its result, to which the normalised values are rounded."""
    return F.silu(_normalised_in(dtype, x_BCHW, scale_BC, shift_BC), inplace=True)


def _coefficients(
    mean_BG: Tensor, rstd_BG: Tensor, weight_C: Tensor, bias_C: Tensor, offset_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns scale and shift by item and channel: GroupNorm of x + offset is `scale * x + shift`."""
    weight_GD, bias_GD = (parameter_C.view(mean_BG.shape[1], -1) for parameter_C in (weight_C, bias_C))
    scale_BGD = rstd_BG[:, :, None] * weight_GD
    shift_BGD = torch.addcmul(bias_GD.to(scale_BGD.dtype), scale_BGD, _own_means(mean_BG, offset_C), value=-1)
    return scale_BGD.flatten(1), shift_BGD.flatten(1)


def _own_means(mean_BG: Tensor, offset_C: Tensor | None) -> Tensor:
    """Returns the mean of each channel's group, (B, G, D), less the channel's offset: x - own mean = x + offset - mean.
    Without an offset it is the same for all channels of a group, (B, G, 1)."""
    mean_BG1 = mean_BG[:, :, None]
    return mean_BG1 if offset_C is None else mean_BG1 - offset_C.view(mean_BG.shape[1], -1)


def _normalised(x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor) -> Tensor:
    """Returns GroupNorm's output, with the operations in the order of aten's kernel, so that rounding is the same."""
    return torch.addcmul(_over_pixels(shift_BC), x_BCHW, _over_pixels(scale_BC))


def _normalised_in(dtype: torch.dtype, x_BCHW: Tensor, scale_BC: Tensor, shift_BC: Tensor) -> Tensor:
    """Computes `_normalised` in fp32 or fp64 and stores it in `dtype`, in one pass. Autocast, which would convert
    `x_BCHW` in another pass, leaves an operation with a given result alone."""
    y_BCHW = torch.empty_like(x_BCHW, dtype=dtype)
    return torch.addcmul(_over_pixels(shift_BC), x_BCHW, _over_pixels(scale_BC), out=y_BCHW)


def _gradients(
    grad_BCHW: Tensor,
    x_BCHW: Tensor,
    scale_BC: Tensor,
    shift_BC: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    weight_C: Tensor,
    offset_C: Tensor | None = None,
    other_BCHW: Tensor | None = None,
    active_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight, bias and offset from that of silu(norm(x + offset)), and silu(norm(x +
    offset)) in `active_dtype`, or None.

    The input's gradient contains `other_BCHW`, the gradient that reaches the input by another way. It has the input's
    dtype, and with `active_dtype` it overwrites `grad_BCHW`.
    """
    # The gradient overwrites y_BCHW, which is not used elsewhere and has the memory format of x_BCHW.
    y_BCHW = _normalised(x_BCHW, scale_BC, shift_BC)
    active_BCHW = None if active_dtype is None else F.silu(y_BCHW).to(active_dtype)
    grad_y_BCHW = aten.silu_backward.grad_input(grad_BCHW.to(y_BCHW.dtype), y_BCHW, grad_input=y_BCHW)
    grad_x, grad_weight, grad_bias, grad_offset = _norm_gradients(
        grad_y_BCHW, x_BCHW, scale_BC, mean_BG, rstd_BG, weight_C, offset_C
    )
    if other_BCHW is not None:
        grad_x.add_(other_BCHW)
    if active_BCHW is not None:
        return grad_BCHW.copy_(grad_x), grad_weight, grad_bias, grad_offset, active_BCHW
    return grad_x.to(x_BCHW.dtype), grad_weight, grad_bias, grad_offset, None


def _gradients_in_place(
    grad_BCHW: Tensor,
    x_BCHW: Tensor,
    scale_BC: Tensor,
    shift_BC: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    weight_C: Tensor,
    offset_C: Tensor | None = None,
    other_BCHW: Tensor | None = None,
    active_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes `_gradients` in the dtype of `grad_BCHW`, which becomes the input's gradient, apart from sums."""
    y_BCHW = _normalised_in(grad_BCHW.dtype, x_BCHW, scale_BC, shift_BC)
    active_BCHW = None if active_dtype is None else F.silu(y_BCHW).to(active_dtype)
    grad_y_BCHW = aten.silu_backward.grad_input(grad_BCHW, y_BCHW, grad_input=y_BCHW)
    # A product of 16-bit tensors would be rounded to 16 bits before the sum. A third operand in fp32 prevents that, if
    # it has a dimension.
    products_BCHW = torch.empty_like(x_BCHW, dtype=rstd_BG.dtype)
    torch.addcmul(rstd_BG.new_zeros(1), grad_y_BCHW, x_BCHW, out=products_BCHW)
    sums = _PixelSums.of(grad_y_BCHW, products_BCHW, None if offset_C is None else x_BCHW, rstd_BG.dtype)
    found = _norm_coefficients(sums, x_BCHW.shape, scale_BC, mean_BG, rstd_BG, weight_C, offset_C)
    terms_BCHW = torch.addcmul(_over_pixels(found.r_BC), x_BCHW, _over_pixels(found.q_BC), out=products_BCHW)
    grad_x_BCHW = torch.addcmul(terms_BCHW, grad_y_BCHW, _over_pixels(scale_BC), out=grad_BCHW)
    if other_BCHW is not None:
        grad_x_BCHW.add_(other_BCHW)
    return grad_x_BCHW, found.weight_C, found.bias_C, found.offset_C, active_BCHW


class _PixelSums(NamedTuple):
    """Sums over pixels of a norm's gradient, of its product with the norm's input, and of the input if it has an
    offset; in fp32 or fp64."""

    grad_BC: Tensor
    products_BC: Tensor
    x_BC: Tensor | None

    @classmethod
    def of(cls, grad_BCHW: Tensor, products_BCHW: Tensor, x_BCHW: Tensor | None, dtype: torch.dtype) -> "_PixelSums":
        pixels = (2, 3)
        of_x = None if x_BCHW is None else x_BCHW.sum(dim=pixels, dtype=dtype)
        return cls(grad_BCHW.sum(dim=pixels, dtype=dtype), products_BCHW.sum(dim=pixels), of_x)


class _NormCoefficients(NamedTuple):
    """The gradient of a norm's input is `scale * grad + q * x + r`; and the gradients of weight, bias and offset."""

    q_BC: Tensor
    r_BC: Tensor
    weight_C: Tensor
    bias_C: Tensor
    offset_C: Tensor | None


def _norm_gradients(
    grad_BCHW: Tensor,
    x_BCHW: Tensor,
    scale_BC: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    weight_C: Tensor,
    offset_C: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of input, weight, bias and offset from that of norm(x + offset), in its dtype."""
    sums = _PixelSums.of(grad_BCHW, grad_BCHW * x_BCHW, None if offset_C is None else x_BCHW, grad_BCHW.dtype)
    found = _norm_coefficients(sums, x_BCHW.shape, scale_BC, mean_BG, rstd_BG, weight_C, offset_C)
    grad_x_BCHW = torch.addcmul(_over_pixels(found.r_BC), x_BCHW, _over_pixels(found.q_BC))
    grad_x_BCHW.addcmul_(grad_BCHW, _over_pixels(scale_BC))
    return grad_x_BCHW, found.weight_C, found.bias_C, found.offset_C


def _norm_coefficients(
    sums: _PixelSums,
    shape: torch.Size,
    scale_BC: Tensor,
    mean_BG: Tensor,
    rstd_BG: Tensor,
    weight_C: Tensor,
    offset_C: Tensor | None,
) -> _NormCoefficients:
    """Returns what follows from the sums for an input of `shape`.

    With z = (x + offset - mean) * rstd and <.> the mean over a group, the gradient of the input is
    rstd * (weight * grad - <weight * grad> - z * <weight * grad * z>). The offset's is the sum of that over items and
    pixels, which follows from sums that are there, and the sum of x. Both means are computed together (first dimension
    2), and coefficients are multiplied as they are, one for each group: uncompiled, each operation is a launch.
    """
    groups, pixels = mean_BG.shape[1], shape[2] * shape[3]
    grad_BGD, products_BGD = (sum_BC.view(len(sum_BC), groups, -1) for sum_BC in (sums.grad_BC, sums.products_BC))
    mean_BGD, rstd_BG1 = _own_means(mean_BG, offset_C), rstd_BG[:, :, None]
    grad_z_BGD = torch.addcmul(products_BGD, mean_BGD, grad_BGD, value=-1) * rstd_BG1
    sums_2BGD = torch.stack((grad_BGD, grad_z_BGD))
    grad_bias_C, grad_weight_C = sums_2BGD.sum(1).flatten(1)
    terms_2BG1 = (sums_2BGD * weight_C.view(groups, -1)).mean(3, keepdim=True) * (rstd_BG1 / -pixels)
    q_BG1 = terms_2BG1[1] * rstd_BG1
    r_BGD = torch.addcmul(terms_2BG1[0], q_BG1, mean_BGD, value=-1)
    grad_offset_C = None
    if sums.x_BC is not None:
        of_x_BGD = torch.addcmul(pixels * r_BGD, q_BG1, sums.x_BC.view(len(sums.x_BC), groups, -1))
        grad_offset_C = torch.addcmul(of_x_BGD.flatten(1), scale_BC, sums.grad_BC).sum(0)
    q_BC, r_BC = (coefficient_BGD.expand_as(grad_BGD).flatten(1) for coefficient_BGD in (q_BG1, r_BGD))
    return _NormCoefficients(q_BC, r_BC, grad_weight_C, grad_bias_C, grad_offset_C)


def _over_pixels(coefficient_BC: Tensor) -> Tensor:
    return coefficient_BC[:, :, None, None]


EAGER = Arithmetic(_statistics_uncast, _coefficients, _activate_in_place, _gradients_in_place)
