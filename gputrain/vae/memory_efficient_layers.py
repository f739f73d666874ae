"""The layers that take most of an autoencoder's memory and time, with less kept for the backward pass.

Autograd keeps the input of each layer of GroupNorm -> SiLU -> convolution: ten bytes per element under bf16 autocast,
because normalisation and activation run in fp32. `norm_silu_conv` keeps the two bytes of its bf16 input and two numbers
per group, and recomputes the elementwise part in the backward pass. No convolution is recomputed. A residual
block is two of them.

The operations between the convolutions are the functions of an Arithmetic, which may be compiled one by one. (Compiled
as a whole, both passes are one graph to the compiler, which keeps the common subexpressions instead of recomputing
them: twice the memory.) On a GPU a convolution adds its bias in a pass of its own, and the bias's gradient takes
another. Here biases wait in `Features.offset_C` for a norm, whose means they move: that costs no pass.

The functions apply autocast themselves, accept either memory format and return the same one. Gradients are returned
in the dtype in which they were computed: autograd casts each to the dtype of its input.

Shape suffixes: B items, C channels in, K channels out, H height, W width, G groups.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.vae.norm_arithmetic import Arithmetic


class Features(NamedTuple):
    """A tensor that one layer passes on to the next, `x_BCHW + offset_C`. The offset holds biases not added yet."""

    x_BCHW: Tensor
    offset_C: Tensor | None = None

    def added(self) -> Tensor:
        """Returns the sum, (B, C, H, W), in the dtype of `x_BCHW`."""
        if self.offset_C is None:
            return self.x_BCHW
        return self.x_BCHW + self.offset_C.to(self.x_BCHW.dtype)[:, None, None]

    def plus(self, other: "Features") -> "Features":
        """Returns the sum of two features, offsets apart."""
        offsets = [features.offset_C for features in (self, other) if features.offset_C is not None]
        return Features(self.x_BCHW + other.x_BCHW, sum(offsets[1:], offsets[0]) if offsets else None)


def norm_silu_conv(
    features: Features, norm: nn.GroupNorm, conv: nn.Conv2d, arithmetic: Arithmetic
) -> tuple[Features, Features]:
    """Returns `conv(silu(norm(features)))`, (B, K, H, W), in the autocast dtype, or without autocast in that of the
    input; and the input for whatever else is made of it, whose gradients are then added without a pass of their own.

    `norm` has a weight and a bias; `conv` has an odd kernel and stride 1, and keeps height and width.
    """
    # A batch of one may have strides of neither memory format.
    x_BCHW = features.x_BCHW.contiguous(memory_format=memory_format(features.x_BCHW))
    parameters = (norm.weight, norm.bias, conv.weight, features.offset_C)
    out_BKHW, x_BCHW = _norm_silu_conv(
        x_BCHW, *parameters, norm.num_groups, norm.eps, compute_dtype(x_BCHW), arithmetic
    )
    return Features(out_BKHW, conv.bias), Features(x_BCHW, features.offset_C)


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
        offset_C: Tensor | None,
        groups: int,
        eps: float,
        dtype: torch.dtype,
        arithmetic: Arithmetic,
    ) -> tuple[Tensor, Tensor]:
        mean_BG, rstd_BG = arithmetic.statistics(x_BCHW, groups, eps, offset_C)
        # Coefficients are a function of their own: if they were inlined, the compiler would store the activation in
        # fp32.
        scale_BC, shift_BC = arithmetic.coefficients(mean_BG, rstd_BG, norm_weight_C, norm_bias_C, offset_C)
        active_BCHW = arithmetic.activate(x_BCHW, scale_BC, shift_BC, dtype)
        ctx.save_for_backward(x_BCHW, mean_BG, rstd_BG, norm_weight_C, norm_bias_C, weight_KCHW, offset_C)
        ctx.dtype, ctx.arithmetic = dtype, arithmetic
        ctx.set_materialize_grads(False)
        passed_BCHW = x_BCHW.view_as(x_BCHW)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(passed_BCHW)
        return F.conv2d(active_BCHW, weight_KCHW.to(dtype), padding=weight_KCHW.shape[-1] // 2), passed_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BKHW: Tensor | None, other_BCHW: Tensor | None) -> tuple[Tensor | None, ...]:
        x_BCHW, mean_BG, rstd_BG, norm_weight_C, norm_bias_C, weight_KCHW, offset_C = ctx.saved_tensors
        needs_x, needs_scale, needs_shift, needs_weight, needs_offset = ctx.needs_input_grad[:5]
        if grad_BKHW is None:
            return other_BCHW, *(None,) * 8
        arithmetic, weight_KCHW = ctx.arithmetic, weight_KCHW.to(ctx.dtype)
        scale_BC, shift_BC = arithmetic.coefficients(mean_BG, rstd_BG, norm_weight_C, norm_bias_C, offset_C)
        if not (needs_x or needs_scale or needs_shift or needs_offset):
            active_BCHW = arithmetic.activate(x_BCHW, scale_BC, shift_BC, ctx.dtype)
            only = _gradient(grad_BKHW, active_BCHW, weight_KCHW, "weight")
            return None, None, None, only, *(None,) * 5
        grad_BCHW = _gradient(grad_BKHW, x_BCHW.to(ctx.dtype), weight_KCHW, "input")
        # The elementwise functions compute the activation again on the way to the norm's gradients, and the gradient of
        # the convolution's weight follows.
        grad_x, grad_scale, grad_shift, grad_offset, active_BCHW = arithmetic.gradients(
            grad_BCHW, x_BCHW, scale_BC, shift_BC, mean_BG, rstd_BG, norm_weight_C, offset_C, other_BCHW,
            ctx.dtype if needs_weight else None
        )  # fmt: skip
        grad_weight = None
        if active_BCHW is not None:
            grad_weight = _gradient(grad_BKHW, active_BCHW, weight_KCHW, "weight")
        return grad_x, grad_scale, grad_shift, grad_weight, grad_offset, *(None,) * 4


_norm_silu_conv: Callable[..., tuple[Tensor, Tensor]] = _NormSiluConv.apply


def _gradient(grad_BKHW: Tensor, x_BCHW: Tensor, weight_KCHW: Tensor, of: Literal["input", "weight"]) -> Tensor:
    """Returns the gradient of a convolution's input, for which only the form of `x_BCHW` is read, or of its weight."""
    padding = weight_KCHW.shape[-1] // 2
    found: tuple[Tensor, Tensor, None] = torch.ops.aten.convolution_backward(
        grad_BKHW,
        x_BCHW,
        weight_KCHW,
        [weight_KCHW.shape[0]],
        stride=[1, 1],
        padding=[padding, padding],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=1,
        output_mask=[of == "input", of == "weight", False],
    )
    return found[1] if of == "weight" else found[0]


def memory_format(x_BCHW: Tensor) -> torch.memory_format:
    """Returns channels_last if the strides are exactly those, else contiguous_format."""
    _, C, H, W = x_BCHW.shape
    return torch.channels_last if x_BCHW.stride() == (H * W * C, 1, W * C, C) else torch.contiguous_format
