"""Convolutions along one dimension with about half of the multiplications, for CPUs in fp32 or fp64.

Winograd's minimal filtering makes a convolution of stride 1 a product of matrices at each of its points, channels in by
channels out, over a quarter of the positions. Weights are transformed once in a step, and gradients of transformed
weights are summed. Kernels of more than five taps are a sum of parts of four taps, each of which reads the inputs of
one tile more to the right. A dilated convolution is one of as many interleaved signals.

Against fp64 the error is about four times that of torch's convolution, 1e-6 of the norm.

Shapes: B items, C channels in, K channels out, T taps, L positions, D columns: those of rows, or the signals that a
dilation interleaves; P points, S parts of a kernel, N positions of a product: tiles x D x B.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gputrain.engine.minimal_filtering import MinimalFilter, constant, write_transposed
from gputrain.hw.runtime import has_mkl

OUTPUTS = 4  # Positions of a tile.
LONGEST_PART, USUAL_PART, MOST_TAPS = 5, 4, 12
# Multiplications for an output, a channel and a part of the kernel. With fewer, transforming the signals takes longer.
LEAST_SAVED = 350
LEAST_CHANNELS = 128  # With so many and channels last, any kernel is faster: its transforms transpose nothing.


def winograd_form(conv: nn.Module, *, channels_last: bool = False) -> "WinogradConvolution | None":
    """Returns how to compute a convolution with fewer multiplications, or None where that is no faster. With
    `channels_last`, its input can have its channels last in memory."""
    if not isinstance(conv, (nn.Conv1d, nn.Conv2d)) or isinstance(conv.padding, str) or not has_mkl():
        return None
    beside = (*conv.padding[1:], *(size - 1 for size in conv.kernel_size[1:]), *(one - 1 for one in conv.dilation[1:]))
    taps, dilation, padding = conv.kernel_size[0], conv.dilation[0], conv.padding[0]
    if any(beside) or any(step != 1 for step in conv.stride) or conv.groups != 1 or padding % dilation:
        return None
    if not 3 <= taps <= MOST_TAPS or (isinstance(conv, nn.Conv2d) and dilation != 1):
        return None
    form, narrower = WinogradConvolution(taps, padding // dilation, dilation), min(conv.in_channels, conv.out_channels)
    saves = narrower >= LEAST_CHANNELS if channels_last else narrower * form.saved >= LEAST_SAVED * form.parts
    return form if saves else None


def reordered(x_BCL: Tensor, *, channels_last: bool) -> Tensor:
    """Returns the same values with their channels last in memory, or first, and the gradient in the other order. Layers
    with transformed weights read channels that are last without transposing them, and return results and gradients
    likewise."""
    made: Tensor = _Reordered.apply(x_BCL, channels_last)  # type: ignore[no-untyped-call]
    return made


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BCL: Tensor, channels_last: bool) -> Tensor:
        ctx.channels_last = channels_last
        return _in_order(x_BCL, channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BCL: Tensor) -> tuple[Tensor, None]:
        return _in_order(grad_BCL, not ctx.channels_last), None


def _in_order(x_BCL: Tensor, channels_last: bool) -> Tensor:
    return x_BCL.permute(2, 0, 1).contiguous().permute(1, 2, 0) if channels_last else x_BCL.contiguous()


@dataclass(frozen=True)
class WinogradConvolution:
    """A convolution of stride 1 along the first dimension after the channels."""

    taps: int
    padding: int  # On both sides, in steps of the dilation.
    dilation: int = 1

    @functools.cached_property
    def filter(self) -> MinimalFilter:
        return MinimalFilter(OUTPUTS, self.taps if self.taps <= LONGEST_PART else USUAL_PART)

    @property
    def parts(self) -> int:
        return -(-self.taps // self.filter.taps)

    @property
    def saved(self) -> float:
        """Multiplications that are saved for an output and a channel."""
        return self.taps - self.parts * self.filter.points / OUTPUTS

    def transformed_weight(self, weight: Tensor) -> Tensor:
        """Returns the filter transform of a weight (K, C, T) or (K, C, T, 1): (S, P, K, C)."""
        made: Tensor = _TransformedWeight.apply(weight, self)  # type: ignore[no-untyped-call]
        return made

    def convolve(self, x: Tensor, weight_SPKC: Tensor, bias_K: Tensor | None) -> Tensor:
        """Returns the convolution of BCL, or of BCLD along L, from the transformed weight."""
        tiling = SignalTiling(self, tuple(x.shape), channels_last=x.stride(1) == 1)
        values_PNC: Tensor = _TransformedInputs.apply(x, tiling)  # type: ignore[no-untyped-call]
        products_PNK = _products(x.detach(), values_PNC, weight_SPKC, tiling)
        made: Tensor = _Outputs.apply(products_PNK, bias_K, tiling)  # type: ignore[no-untyped-call]
        return made


@dataclass(frozen=True)
class SignalTiling:
    """The tiles of an input of one shape, BCL or BCLD. They are ordered by position, so that those of a later part of
    the kernel are contiguous, too."""

    form: WinogradConvolution
    shape: tuple[int, ...]
    channels_last: bool

    @property
    def columns(self) -> int:
        """Values of a channel at one position, D B."""
        return self.shape[0] * (self.shape[3] if len(self.shape) == 4 else self.form.dilation)

    @property
    def rows(self) -> int:
        """Positions of the input, L, or those of each of the interleaved signals."""
        return self.shape[2] if len(self.shape) == 4 else -(-self.shape[2] // self.form.dilation)

    @property
    def rows_out(self) -> int:
        return self.rows + 2 * self.form.padding - self.form.taps + 1

    @property
    def length_out(self) -> int:
        """Positions of the output."""
        return self.shape[2] + self.form.dilation * (2 * self.form.padding - self.form.taps + 1)

    @property
    def tiles_out(self) -> int:
        return -(-self.rows_out // OUTPUTS)

    @property
    def tiles(self) -> int:
        """Tiles of the input: later parts of the kernel read later ones."""
        return self.tiles_out + self.form.parts - 1

    def by_position(self, x: Tensor) -> Tensor:
        """Returns BCL or BCLD with its positions first, (L, B, C) or (L, D, B, C)."""
        return x.movedim((0, 1), (-2, -1))

    def by_item(self, ordered: Tensor) -> Tensor:
        """Returns (L, B, C) or (L, D, B, C) as BCL or BCLD, in the order of the input in memory."""
        x = ordered.movedim((-2, -1), (0, 1))
        return x if self.channels_last else x.contiguous()

    def transformed(self, x: Tensor) -> Tensor:
        """Returns the input transform of all tiles, (P, N, C)."""
        points, wide = self.form.filter.points, self.columns * x.shape[1]
        before = self.form.padding * wide
        padded = x.new_empty(((self.tiles - 1) * OUTPUTS + points) * wide)  # Positions x (columns and channels).
        ordered = self.by_position(x)
        end = before + ordered.numel()
        padded[:before].zero_()
        padded[end:].zero_()
        padded[before:end].view(ordered.shape).copy_(ordered)
        windows = padded.as_strided((points, self.tiles, wide), (wide, OUTPUTS * wide, 1))
        values = torch.mm(constant(self.form.filter.input_transform, x.dtype), windows.reshape(points, -1))
        return values.view(points, -1, x.shape[1])


class _TransformedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, form: WinogradConvolution) -> Tensor:
        ctx.shape, ctx.form = weight.shape, form
        K, C, *_ = weight.shape
        made_SPN = weight.new_empty(form.parts, form.filter.points, K * C)
        matrix_PT = constant(form.filter.filter_transform, weight.dtype)
        parts_TN = torch.split(weight.reshape(K * C, form.taps).T, form.filter.taps)
        for taps_TN, made_PN in zip(parts_TN, made_SPN, strict=True):
            torch.mm(matrix_PT[:, : len(taps_TN)], taps_TN, out=made_PN)
        return made_SPN.view(*made_SPN.shape[:2], K, C)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SPKC: Tensor) -> tuple[Tensor, None]:
        form: WinogradConvolution = ctx.form
        grad = grad_SPKC.new_empty(ctx.shape)
        matrix_TP = constant(form.filter.filter_transform, grad.dtype).T
        parts_KCT = torch.split(grad.view(*ctx.shape[:2], form.taps), form.filter.taps, 2)
        for taps_KCT, grad_PKC in zip(parts_KCT, grad_SPKC, strict=True):
            write_transposed(taps_KCT, matrix_TP[: taps_KCT.shape[2]], grad_PKC)
        return grad, None


class _TransformedInputs(torch.autograd.Function):
    """Returns the input transform of BCL or BCLD, (P, N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tiling: SignalTiling) -> Tensor:
        ctx.tiling = tiling
        return tiling.transformed(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNC: Tensor) -> tuple[Tensor, None]:
        tiling, form = ctx.tiling, ctx.tiling.form
        of_windows = torch.mm(constant(form.filter.input_transform, grad_PNC.dtype).T, grad_PNC.flatten(1))
        of_windows = of_windows.view(form.filter.points, tiling.tiles, -1).transpose(0, 1)
        wide = of_windows.shape[2]
        # The first positions of a window are a tile's, and the others the first ones of the next tile.
        padded = grad_PNC.new_empty(tiling.tiles + 1, OUTPUTS, wide)
        padded[:-1] = of_windows[:, :OUTPUTS]
        padded[-1].zero_()
        padded[1:, : form.filter.taps - 1] += of_windows[:, OUTPUTS:]
        B, C, L, *D = tiling.shape
        before = form.padding * wide
        grad = padded.view(-1)[before : before + B * C * L * (D[0] if D else 1)].view(L, *D, B, C)
        return tiling.by_item(grad), None


def _products(x: Tensor, values_PNC: Tensor, weight_SPKC: Tensor, tiling: SignalTiling) -> Tensor:
    """Returns the sum of the products of all parts of the kernel with the values of `x`, (P, N', K): each reads values
    that are `columns` positions after those of the part before.

    torch's own products compute no gradient that a backward pass does not ask for, but give that of the weight
    transposed, and copying it takes as long as the product. A custom function of two inputs cannot see which gradient
    is asked for. So each input has a function of its own, whose result only passes the gradient of the products on.
    That of the weight computes the values again, which are larger than the input that other functions keep as well.
    """
    shape = len(values_PNC), tiling.tiles_out * tiling.columns, weight_SPKC.shape[2]
    weight = weight_SPKC.detach()
    to_values = _ToValues.apply(values_PNC, weight, tiling.columns, shape)  # type: ignore[no-untyped-call]
    to_weight = _ToWeight.apply(weight_SPKC, x, tiling, shape)  # type: ignore[no-untyped-call]
    made: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
        to_values, to_weight, values_PNC.detach(), weight, tiling.columns
    )
    return made


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, to_values: Tensor, to_weight: Tensor, values_PNC: Tensor, weight_SPKC: Tensor, columns: int
    ) -> Tensor:
        made_PNK = values_PNC.new_empty(to_values.shape)
        for part, weight_PKC in enumerate(weight_SPKC):
            read_PNC = values_PNC[:, part * columns :][:, : made_PNK.shape[1]]
            made_PNK.baddbmm_(read_PNC, weight_PKC.mT, beta=min(part, 1))
        return made_PNK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNK: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return grad_PNK, grad_PNK, None, None, None


class _ToValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_PNC: Tensor, weight_SPKC: Tensor, columns: int, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(weight_SPKC)
        ctx.shape, ctx.columns = values_PNC.shape, columns
        return values_PNC.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNK: Tensor) -> tuple[Tensor, None, None, None]:
        (weight_SPKC,) = ctx.saved_tensors
        first, *later = weight_SPKC
        if not later:
            return torch.bmm(grad_PNK, first), None, None, None
        count = grad_PNK.shape[1]
        grad_PNC = grad_PNK.new_empty(ctx.shape)
        grad_PNC[:, :count] = torch.bmm(grad_PNK, first)
        grad_PNC[:, count:].zero_()
        for part, weight_PKC in enumerate(later, start=1):
            grad_PNC[:, part * ctx.columns :][:, :count] += torch.bmm(grad_PNK, weight_PKC)
        return grad_PNC, None, None, None


class _ToWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_SPKC: Tensor, x: Tensor, tiling: SignalTiling, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tiling = tiling
        return weight_SPKC.new_zeros(()).expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PNK: Tensor) -> tuple[Tensor, None, None, None]:
        tiling, (points, count, K) = ctx.tiling, grad_PNK.shape
        values_PNC = tiling.transformed(*ctx.saved_tensors)
        grad_SPKC = grad_PNK.new_empty(tiling.form.parts, points, K, values_PNC.shape[2])
        for part, of_part in enumerate(grad_SPKC):
            read_PNC = values_PNC[:, part * tiling.columns :][:, :count]
            of_part.baddbmm_(grad_PNK.mT, read_PNC, beta=0)
        return grad_SPKC, None, None, None


class _Outputs(torch.autograd.Function):
    """Returns the output transform of products (P, N, K), BKL or BKLD, with the bias added."""

    @staticmethod
    def forward(ctx: Any, products_PNK: Tensor, bias_K: Tensor | None, tiling: SignalTiling) -> Tensor:
        ctx.tiling, ctx.has_bias = tiling, bias_K is not None
        K = products_PNK.shape[2]
        outputs = torch.mm(constant(tiling.form.filter.output_transform, products_PNK.dtype).T, products_PNK.flatten(1))
        ordered = outputs.view(OUTPUTS, tiling.tiles_out, -1).transpose(0, 1).reshape(-1, K)
        if bias_K is not None:
            ordered += bias_K
        B, _, _, *D = tiling.shape
        return tiling.by_item(ordered.view(-1, *D, B, K)[: tiling.length_out])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        tiling, K = ctx.tiling, grad.shape[1]
        ordered = tiling.by_position(grad)
        padded = grad.new_empty(tiling.tiles_out * OUTPUTS * tiling.columns, K)
        count = ordered.numel() // K
        padded[:count].view(ordered.shape).copy_(ordered)
        padded[count:].zero_()
        tiles = padded.view(tiling.tiles_out, OUTPUTS, -1).transpose(0, 1).reshape(OUTPUTS, -1)
        products_PNK = torch.mm(constant(tiling.form.filter.output_transform, grad.dtype), tiles)
        of_bias = padded.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[1] else None
        return products_PNK.view(tiling.form.filter.points, -1, K), of_bias, None
