"""Upsampling and a convolution in one with a quarter of the multiplications, for CPUs.

Rows 2i and 2i + 1 of a doubled picture repeat row x[i] of the small one. With the taps a, b and c their outputs are

    a x[i - 1] + (b + c) x[i] = s x[i] - a d[i]        and        (a + b) x[i] + c x[i + 1] = s x[i] + c d[i + 1],

where s = a + b + c and d[i] = x[i] - x[i - 1]: three products for two rows, of the taps before, after and summed. With
the same along columns, the four output pixels of an input pixel take nine products of the channels instead of 36, or
16 as a transposed convolution. They are four matrix products, of the differences along both dimensions, along rows,
along columns, and of the pixels themselves.

Against fp64 the error is about twice that of torch's convolution.

Shape suffixes: B items, C channels in, K channels out, H height, W width, h and w before upsampling, n rows of a part
and m its rows with one above and below, v columns with one on each side, N pixels.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gputrain.engine.minimal_filtering import write_transposed

# Products of each kind of difference: along both dimensions, along rows, along columns, and of the pixels themselves.
PRODUCTS = (4, 2, 2, 1)
PART_PIXELS = 2048  # So many pixels of the small picture are computed at once, which bounds the memory.


def upsample_convolve(x_BChw: Tensor, weight_KC33: Tensor, bias_K: Tensor | None) -> Tensor:
    """Returns the convolution, padded by 1, of the picture with each pixel repeated twice along height and width:
    (B, K, 2h, 2w); without a gradient. All values have one dtype."""
    B, _, h, w = x_BChw.shape
    K, kernels = len(weight_KC33), _kernels(weight_KC33)
    out_BKHW = x_BChw.new_empty(B, K, 2 * h, 2 * w)
    for item, rows in _parts(x_BChw):
        n = len(rows)
        made = [
            torch.mm(kernel, values.flatten(1)).view(-1, K, *values.shape[1:])
            for kernel, values in zip(kernels, _differences(_with_edges(x_BChw[item], rows)), strict=True)
        ]
        of_both, of_rows, of_columns, (pixels_Knw,) = made
        if bias_K is not None:
            pixels_Knw += bias_K[:, None, None]
        out_KHW = out_BKHW[item, :, 2 * rows.start : 2 * rows.stop]
        for y in range(2):
            row_Knw = of_rows[y, :, y : y + n].add_(pixels_Knw)
            for x in range(2):
                pixel_Knw = of_both[2 * y + x, :, y : y + n, x : x + w].add_(row_Knw)
                torch.add(pixel_Knw, of_columns[x, :, :, x : x + w], out=out_KHW[:, y::2, x::2])
    return out_BKHW


def upsample_convolve_backward(
    grad_BKHW: Tensor, x_BChw: Tensor, weight_KC33: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias from that of `upsample_convolve`; None where `needs` is False."""
    needs_x, needs_weight, needs_bias = needs
    K, C = weight_KC33.shape[:2]
    kernels = _kernels(weight_KC33)
    grad_x = torch.zeros_like(x_BChw) if needs_x else None
    grads: list[Tensor] = []
    for item, rows in _parts(x_BChw):
        of_outputs = _gradients_of_products(grad_BKHW[item, :, 2 * rows.start : 2 * rows.stop])
        if needs_weight:
            values = _differences(_with_edges(x_BChw[item], rows))
            added = [
                torch.mm(grad_KN, values_Cnw.flatten(1).T)
                for grad_KN, values_Cnw in zip(of_outputs, values, strict=True)
            ]
            grads = [grad + more for grad, more in zip(grads, added, strict=True)] if grads else added
        if grad_x is not None:
            found = [torch.mm(kernel.T, grad_KN) for kernel, grad_KN in zip(kernels, of_outputs, strict=True)]
            _add_differences(found, grad_x[item], rows)
    grad_weight = None
    if needs_weight:
        grad_weight = torch.empty_like(weight_KC33, memory_format=torch.contiguous_format)
        write_transposed(grad_weight.flatten(2), _sums_matrix(grad_weight).T, torch.cat(grads).view(9, K, C))
    return grad_x, grad_weight, grad_BKHW.sum(dim=(0, 2, 3)) if needs_bias else None


def _kernels(weight_KC33: Tensor) -> list[Tensor]:
    """Returns the kernels of each kind of difference, one below the other: (4 K, C), (2 K, C), (2 K, C) and (K, C)."""
    K, C = weight_KC33.shape[:2]
    kernels = torch.mm(_sums_matrix(weight_KC33), weight_KC33.reshape(K * C, 9).T)
    return list(torch.split(kernels.view(9 * K, C), [count * K for count in PRODUCTS]))


def _sums_matrix(like: Tensor) -> Tensor:
    """Returns the matrix (9, 9) from the taps to those of the products: along a dimension the one before, negative, and
    the one after belong to differences, and the sum of all to pixels."""
    of_differences, of_pixels = torch.eye(3, dtype=like.dtype, device=like.device)[::2].clone(), like.new_ones(1, 3)
    of_differences[0].neg_()
    of_dimensions = itertools.product((of_differences, of_pixels), repeat=2)
    return torch.cat([torch.kron(of_row, of_column) for of_row, of_column in of_dimensions])


def _parts(x_BChw: Tensor) -> Iterator[tuple[int, range]]:
    """Yields items and rows of them that are computed at once."""
    B, _, h, w = x_BChw.shape
    at_once = max(1, PART_PIXELS // w)
    for item in range(B):
        for row in range(0, h, at_once):
            yield item, range(row, min(h, row + at_once))


def _with_edges(x_Chw: Tensor, rows: range) -> Tensor:
    """Returns rows of a picture, with one pixel more on every side, (C, m, v). Outside of the picture they are zero."""
    C, h, w = x_Chw.shape
    first, end = max(0, rows.start - 1), min(h, rows.stop + 1)
    padded_Cmv = x_Chw.new_zeros(C, len(rows) + 2, w + 2)
    padded_Cmv[:, first - rows.start + 1 : end - rows.start + 1, 1:-1] = x_Chw[:, first:end]
    return padded_Cmv


def _differences(x_Cmv: Tensor) -> tuple[Tensor, ...]:
    """Returns the values of each kind of difference, (C, n + 1, w + 1), (C, n + 1, w), (C, n, w + 1) and (C, n, w)."""
    along_rows = x_Cmv[:, 1:] - x_Cmv[:, :-1]
    pixels = x_Cmv[:, 1:-1]
    return (
        along_rows[..., 1:] - along_rows[..., :-1],
        along_rows[..., 1:-1],
        pixels[..., 1:] - pixels[..., :-1],
        pixels[..., 1:-1],
    )


def _add_differences(grads: Sequence[Tensor], grad_Chw: Tensor, rows: range) -> None:
    """Adds the transpose of `_differences` and `_with_edges` to the gradient of a picture."""
    (C, h, w), n = grad_Chw.shape, len(rows)
    of_both, of_rows, of_columns, of_pixels = (
        grad.view(C, n + more, w + beside)
        for grad, (more, beside) in zip(grads, ((1, 1), (1, 0), (0, 1), (0, 0)), strict=True)
    )
    of_rows += of_both[..., :-1]
    of_rows -= of_both[..., 1:]
    of_pixels += of_columns[..., :-1]
    of_pixels -= of_columns[..., 1:]
    grad_Chw[:, rows.start : rows.stop] += of_pixels
    end = min(h, rows.stop + 1)
    grad_Chw[:, rows.start : end] += of_rows[:, : end - rows.start]
    first = max(0, rows.start - 1)
    grad_Chw[:, first : rows.stop] -= of_rows[:, first - rows.start + 1 :]


def _gradients_of_products(grad_KHW: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of the products with each kind of difference, (4 K, N), (2 K, N), (2 K, N) and (K, N)."""
    K, n, w = grad_KHW.shape[0], grad_KHW.shape[1] // 2, grad_KHW.shape[2] // 2
    of_both, of_rows = grad_KHW.new_empty(2, 2, K, n + 1, w + 1), grad_KHW.new_empty(2, K, n + 1, w)
    of_columns = grad_KHW.new_empty(2, K, n, w + 1)
    # The first output of a pixel does not read the difference after the pixel, nor the second one that before it.
    for edge in range(2):
        of_both[edge, :, :, n * (1 - edge)].zero_()
        of_both[:, edge, :, :, w * (1 - edge)].zero_()
        of_rows[edge, :, n * (1 - edge)].zero_()
        of_columns[edge, :, :, w * (1 - edge)].zero_()
    inside = [slice(edge, None if edge else -1) for edge in range(2)]
    for y in range(2):
        for x in range(2):
            of_both[y, x, :, inside[y], inside[x]] = grad_KHW[:, y::2, x::2]
        torch.add(*(of_both[y, x, :, inside[y], inside[x]] for x in range(2)), out=of_rows[y, :, inside[y]])
    for x in range(2):
        torch.add(*(of_both[y, x, :, inside[y], inside[x]] for y in range(2)), out=of_columns[x, :, :, inside[x]])
    of_pixels = of_rows[0, :, inside[0]] + of_rows[1, :, inside[1]]
    return tuple(grad.view(-1, grad.shape[-2] * grad.shape[-1]) for grad in (of_both, of_rows, of_columns, of_pixels))
