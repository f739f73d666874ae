"""Convolutions that a CPU computes faster in another form, exact to rounding.

torch's convolutions on the CPU are oneDNN's. Four kinds of layers are slow there, measured on cores with AVX-512:

- Wide layers over few or narrow rows, such as 1024 channels over [68, 3]: converting the weight to oneDNN's format and
  back takes as long as the products. As one matrix product of the weight with the gathered inputs they take half the
  time.
- Strided convolutions in groups of few channels with long kernels (MelGAN's, Kumar et al. 2019) run at a quarter of the
  rate of a matrix product. Several neighbouring samples as channels of one position give groups of more channels and
  short kernels, for which oneDNN has fast code.
- Upsampling by wide layers from few positions, such as 512 channels to 256 from [2, 32]: with its gradients it takes
  twice the time of a matrix product whose columns are added up where kernels overlap, on two threads three times.
- Pointwise convolutions of channels that are last in memory: torch first copies them to the usual order, and a product
  with a row for each position needs none.

Shapes: B items, C channels in, O channels out, K taps, L positions, N positions out, P columns, F input samples and
Q output samples that become channels of one position.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CpuConvolution = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# Smaller layers take no longer in oneDNN's form: channels of a layer over rows, weights of one over waves.
LEAST_CHANNELS, LEAST_WEIGHTS = 128, 2 << 20
MOST_COLUMNS = 8  # oneDNN is as fast as a matrix product on wider rows, if there are more than FEW_POSITIONS.
FEW_POSITIONS = 256  # Of a whole batch: with so few of them, converting the weights takes longer than the products.
PRODUCT_COLUMNS = 1024  # So many output positions are computed by one product, so that its operands stay in the cache.
MOST_ROWS = 512  # Up to so many output positions, a product is faster with a row for each of them than with a column.
MOST_UPSAMPLED = 512  # Positions of a batch that upsampling by a product takes; torch is as fast from twice as many.
LONGEST_KERNEL = 11  # oneDNN's fast code for gradients takes kernels up to about this length.
LEAST_OUT, WIDEST_GROUP = 16, 64  # Channels out of a group, and in times stride: other groups gain nothing.


def faster_on_cpu(conv: nn.Module) -> CpuConvolution | None:
    """Returns a function of input, weight and bias that equals the convolution, or None if torch's is as fast."""
    if not isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)) or any(step != 1 for step in conv.dilation):
        return None
    if isinstance(conv, nn.ConvTranspose1d):
        if conv.groups > 1 or conv.weight.numel() < LEAST_WEIGHTS:
            return None
        named = {name: getattr(conv, name)[0] for name in ("stride", "padding", "output_padding")}
        return functools.partial(upsampled_by_product, **named)
    if isinstance(conv.padding, str) or any((*conv.padding[1:], *(size - 1 for size in conv.kernel_size[1:]))):
        return None
    taps, stride, padding = conv.kernel_size[0], conv.stride[0], conv.padding[0]
    if isinstance(conv, nn.Conv1d) and (taps, stride, padding, conv.groups) == (1, 1, 0, 1):
        return pointwise
    narrower = min(conv.in_channels, conv.out_channels)
    if conv.groups > 1:
        widths = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        strided = isinstance(conv, nn.Conv1d) and stride > 1 and taps > LONGEST_KERNEL
        if not strided or widths[0] * stride > WIDEST_GROUP or widths[1] < LEAST_OUT:
            return None
        return functools.partial(with_samples_as_channels, stride=stride, padding=padding, groups=conv.groups)
    large = narrower >= LEAST_CHANNELS if isinstance(conv, nn.Conv2d) else conv.weight.numel() >= LEAST_WEIGHTS
    if taps == 1 or not large or any(step != 1 for step in conv.stride[1:]):
        return None
    return functools.partial(as_product, stride=stride, padding=padding)


def applies(x: Tensor, *, fake: bool = False) -> bool:
    """Returns True for values on a CPU in 32 or 64 bits. Fake tensors, from which the step on a GPU is predicted, and
    compiled functions keep torch's convolution. With `fake`, they stand for values on a CPU."""
    return (
        (fake or type(x) is Tensor)
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def as_product(x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, padding: int) -> Tensor:
    """Returns the convolution of BCL, or of BCLP along L, by matrix products. Many positions of many columns take
    torch's."""
    if x.dim() == 3:
        return as_product(x[..., None], weight[..., None], bias, stride=stride, padding=padding)[..., 0]
    (items, _, length, columns), taps = x.shape, weight.shape[2]
    positions = (length + 2 * padding - taps) // stride + 1
    if columns >= MOST_COLUMNS and items * positions * columns > FEW_POSITIONS:
        return F.conv2d(x, weight, bias, (stride, 1), (padding, 0))
    made = [
        _product(part, weight.flatten(1), bias, (taps, stride, padding), positions)
        for part in torch.split(x, max(1, PRODUCT_COLUMNS // (positions * columns)))
    ]
    return made[0].contiguous() if len(made) == 1 else torch.cat(made)


def _product(
    x_BCLP: Tensor, kernel: Tensor, bias: Tensor | None, window: tuple[int, int, int], positions: int
) -> Tensor:
    """Returns BONP from the kernel (O, C K) by one product, whose result has a row or a column for each position."""
    items, columns = len(x_BCLP), x_BCLP.shape[3]
    gathered: Tensor = _Gathered.apply(x_BCLP, *window)  # type: ignore[no-untyped-call]
    if _in_rows(items, positions, columns):
        product = gathered @ kernel.T if bias is None else torch.addmm(bias, gathered, kernel.T)
        return product.view(items, positions, columns, -1).permute(0, 3, 1, 2)
    product = kernel @ gathered if bias is None else torch.addmm(bias[:, None], kernel, gathered)
    return product.view(-1, items, positions, columns).transpose(0, 1)


def _in_rows(items: int, positions: int, columns: int) -> bool:
    return items * positions * columns <= MOST_ROWS


class _Gathered(torch.autograd.Function):
    """Returns the inputs BCLP of every tap and output position: (B N P, C K) in rows, (C K, B N P) otherwise."""

    @staticmethod
    def forward(ctx: Any, x_BCLP: Tensor, taps: int, stride: int, padding: int) -> Tensor:
        ctx.sizes, ctx.taps, ctx.stride, ctx.padding = x_BCLP.shape, taps, stride, padding
        x_BCNPK = F.pad(x_BCLP, (0, 0, padding, padding)).unfold(2, taps, stride)
        items, channels, positions, columns, _ = x_BCNPK.shape
        if _in_rows(items, positions, columns):
            return x_BCNPK.permute(0, 2, 3, 1, 4).reshape(-1, channels * taps)
        return x_BCNPK.permute(1, 4, 0, 2, 3).reshape(channels * taps, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (items, channels, length, columns), taps, padding = ctx.sizes, ctx.taps, ctx.padding
        positions = (length + 2 * padding - taps) // ctx.stride + 1
        if _in_rows(items, positions, columns):
            grad_KBCNP = grad.view(items, positions, columns, channels, taps).permute(4, 0, 3, 1, 2)
        else:
            grad_KBCNP = grad.view(channels, taps, items, positions, columns).permute(1, 2, 0, 3, 4)
        grad_x = grad.new_zeros(items, channels, length + 2 * padding, columns)
        for tap, added in enumerate(grad_KBCNP):
            grad_x[:, :, tap : tap + (positions - 1) * ctx.stride + 1 : ctx.stride] += added
        return grad_x[:, :, padding : padding + length], None, None, None


def upsampled_by_product(
    x_BCL: Tensor, weight_COK: Tensor, bias_O: Tensor | None, *, stride: int, padding: int, output_padding: int
) -> Tensor:
    """Returns the transposed convolution by one matrix product. Many positions take torch's."""
    (items, _, length), (_, channels, taps) = x_BCL.shape, weight_COK.shape
    if items * length > MOST_UPSAMPLED:
        return F.conv_transpose1d(x_BCL, weight_COK, bias_O, stride, padding, output_padding)
    product = weight_COK.flatten(1).T @ x_BCL.transpose(0, 1).flatten(1)
    product = product.view(channels * taps, items, length).transpose(0, 1)
    samples = (length - 1) * stride - 2 * padding + taps + output_padding
    made_BO1L = F.fold(product, (1, samples), (1, taps), padding=(0, padding), stride=(1, stride))
    return made_BO1L[:, :, 0] if bias_O is None else made_BO1L[:, :, 0] + bias_O[:, None]


def pointwise(x_BCL: Tensor, weight_OC1: Tensor, bias_O: Tensor | None) -> Tensor:
    """Returns the convolution with a kernel of one tap, with the channels last in memory if those of x are."""
    x_LBC = x_BCL.permute(2, 0, 1)
    if not x_LBC.is_contiguous():
        return F.conv1d(x_BCL, weight_OC1, bias_O)
    return F.linear(x_LBC, weight_OC1.squeeze(2), bias_O).permute(1, 2, 0)


def with_samples_as_channels(
    x_BCL: Tensor, weight_OCK: Tensor, bias_O: Tensor | None, *, stride: int, padding: int, groups: int
) -> Tensor:
    """Returns a strided convolution in groups as one of stride 1: F input samples are F times the channels of one
    position, Q = F / stride output samples are Q times the channels, and zeros fill up the kernels."""
    (items, _, length), (channels, _, taps) = x_BCL.shape, weight_OCK.shape
    samples_out = 1 if -(-taps // stride) <= LONGEST_KERNEL else 2
    samples_in = stride * samples_out
    kernel = -(-(taps + stride * (samples_out - 1)) // samples_in)
    positions = (length + 2 * padding - taps) // stride + 1
    wide = -(-positions // samples_out)  # Positions after samples_out of them have become one.
    x_BCL = F.pad(x_BCL, (padding, (wide - 1 + kernel) * samples_in - length - padding))
    shifted = [F.pad(weight_OCK, (stride * at, kernel * samples_in - taps - stride * at)) for at in range(samples_out)]
    bias = None if bias_O is None else bias_O.repeat_interleave(samples_out)
    weight = _samples_to_channels(torch.stack(shifted, dim=1).flatten(0, 1), samples_in)
    made = F.conv1d(_samples_to_channels(x_BCL, samples_in), weight, bias, groups=groups)
    if samples_out > 1:
        made = made.view(items, channels, samples_out, wide).transpose(2, 3).reshape(items, channels, -1)
    return made[..., :positions]


def _samples_to_channels(x_BCL: Tensor, samples: int) -> Tensor:
    """Returns (B, C samples, L / samples)."""
    return x_BCL.reshape(*x_BCL.shape[:2], -1, samples).transpose(2, 3).flatten(1, 2)
