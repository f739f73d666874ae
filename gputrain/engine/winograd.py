"""Convolutions with about half of the multiplications, for CPUs in fp32.

Winograd's minimal filtering runs along the height of kernels of three rows alone. The sum over channels and columns of
the kernel is one of matrix products of the transforms at each point, which reach the rate of large products. Gradients
are the transposed transforms around the transposed products.

Against fp64 the error is two to three times that of torch's convolution.

Shape suffixes: B items, C channels in, K channels out, H height, W width, P points, S shifts, N columns of a product:
the pixels of one row of each tile, with their padding. Results of products are contiguous, so that torch gives those of
all points to MKL at once, which divides them among the threads.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gputrain.engine.minimal_filtering import Matrix, MinimalFilter, constant, write_transposed
from gputrain.hw.runtime import has_mkl

ROWS, TAPS = 4, 3  # Rows of the output in a tile, and rows of the kernel.
FILTER = MinimalFilter(ROWS, TAPS)
POINTS = FILTER.points
LEAST_COLUMNS = 128  # With fewer of them, transforming the weights takes longer than the products save.
LEAST_SAVED = 350  # Multiplications for an output and a channel. With fewer, transforming inputs and outputs does.
CHUNK_COLUMNS = 1024  # So many are computed at once, so that their values stay in the cache and take little memory.
MOST_CHUNKS = 16


@dataclass(frozen=True)
class Tiling:
    """The tiles of a convolution of stride 1, and how many of them are computed at once."""

    sizes: tuple[int, ...]  # B, C, H and W of the input.
    kernel: tuple[int, ...]  # K and C, and the taps along height and width.
    padding: tuple[int, int]  # Along height and width, on both sides.

    @property
    def height(self) -> int:
        return self.sizes[2] + 2 * self.padding[0] - self.kernel[2] + 1

    @property
    def width(self) -> int:
        return self.sizes[3] + 2 * self.padding[1] - self.kernel[3] + 1

    @property
    def padded_width(self) -> int:
        return self.sizes[3] + 2 * self.padding[1]

    @property
    def tiles(self) -> int:
        return -(-self.height // ROWS)

    @property
    def shifts(self) -> range:
        """Returns how many columns of a product after the output each column of the kernel reads."""
        return range(self.kernel[3])

    def chunks(self) -> Iterator["Chunk"]:
        items, of_item = self.sizes[0], self.tiles * self.padded_width
        count = min(MOST_CHUNKS, max(1, round(items * of_item / CHUNK_COLUMNS)))
        at_once = max(1, -(-items // count))
        tiles = max(1, -(-self.tiles // max(1, count // items)))
        for item in range(0, items, at_once):
            for tile in range(0, self.tiles, tiles):
                yield Chunk(self, slice(item, min(item + at_once, items)), tile, min(tiles, self.tiles - tile))


@dataclass(frozen=True)
class Chunk:
    """Some tiles of some items of a convolution."""

    of: Tiling
    items: slice
    first: int  # The first tile.
    tiles: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Items, tiles, and pixels of a row with its padding."""
        return self.items.stop - self.items.start, self.tiles, self.of.padded_width

    @property
    def columns(self) -> int:
        return math.prod(self.shape)

    @property
    def outputs(self) -> slice:
        """The rows of the output."""
        return slice(self.first * ROWS, min((self.first + self.tiles) * ROWS, self.of.height))

    def inputs(self, x_BCHW: Tensor) -> list[Tensor]:
        """Returns the input transform, (P, C, N), shifted for each column of the kernel."""
        values_PCN, N = self._transformed(x_BCHW, FILTER.input_transform, self.of.padding, 0), self.columns
        return [values_PCN[:, :, shift : shift + N] for shift in self.of.shifts]

    def gradients(self, grad_BKHW: Tensor) -> list[Tensor]:
        """Returns the transpose of `to_outputs`, (P, K, N), which is zero where a column is no output, shifted for each
        column of the kernel in the other direction."""
        extra, N = self.of.shifts[-1], self.columns
        values_PKN = self._transformed(grad_BKHW[:, :, : self.outputs.stop], FILTER.output_transform, (0, 0), extra)
        return [values_PKN[:, :, extra - shift : extra - shift + N] for shift in self.of.shifts]

    def _transformed(self, x_BCHW: Tensor, matrix: Matrix, padding: tuple[int, int], before: int) -> Tensor:
        """Returns the product of the matrix with the rows of each tile, which are zero outside of `x_BCHW`, in columns
        of which so many are zero before the tiles, and the others of the largest shift after them."""
        (_, C, _, W), (top, side), N = x_BCHW.shape, padding, self.columns
        padded = x_BCHW.new_empty(len(matrix[0]), C, N + self.of.shifts[-1])
        padded[:, :, :before] = 0
        padded[:, :, before + N :] = 0
        rows_RCBTW = padded[:, :, before : before + N].view(*padded.shape[:2], *self.shape)
        rows_RCBTW[..., :side] = 0
        rows_RCBTW[..., side + W :] = 0
        for tiles, rows, of_x in self._pieces(x_BCHW, top, range(len(rows_RCBTW))):
            if len(rows) < len(rows_RCBTW):
                rows_RCBTW[:, :, :, tiles] = 0
            rows_RCBTW[rows.start : rows.stop, :, :, tiles, side : side + W] = of_x
        return torch.mm(constant(matrix, x_BCHW.dtype), padded.flatten(1)).view(len(matrix), C, -1)

    def to_outputs(self, values_PKN: Tensor, out_BKHW: Tensor, bias_K: Tensor | None) -> None:
        """Writes the outputs."""
        transform = constant(FILTER.output_transform, values_PKN.dtype).T
        rows_RKBTW = torch.mm(transform, values_PKN.flatten(1)).view(ROWS, values_PKN.shape[1], *self.shape)
        if bias_K is not None:
            rows_RKBTW += bias_K[:, None, None, None]
        for tiles, rows, of_out in self._pieces(out_BKHW, 0, range(ROWS)):
            of_out.copy_(rows_RKBTW[rows.start : rows.stop, :, :, tiles, : self.of.width])

    def add_to_inputs(self, values_PCN: Tensor, grad_BCHW: Tensor) -> None:
        """Adds the transpose of `inputs` to the gradient of the input."""
        (top, side), (_, C, _, W) = self.of.padding, grad_BCHW.shape
        transform = constant(FILTER.input_transform, values_PCN.dtype).T
        rows_PCBTW = torch.mm(transform, values_PCN.flatten(1)).view(POINTS, C, *self.shape)
        for apart in (range(ROWS), range(ROWS, POINTS)):  # Other rows of a tile are rows of the next one as well.
            for tiles, rows, of_grad in self._pieces(grad_BCHW, top, apart):
                of_grad += rows_PCBTW[rows.start : rows.stop, :, :, tiles, side : side + W]

    def _pieces(self, x_BCHW: Tensor, top: int, rows: range) -> Iterator[tuple[slice, range, Tensor]]:
        """Yields tiles, those of their rows that are within a picture, and a view of the latter, (R, C, B, T, W): all
        tiles that are within it as a whole, and each of the others. The first tile begins `top` rows above it."""
        at, H = self.first * ROWS - top, x_BCHW.shape[2]
        first = min(self.tiles, max(0, -((at + rows.start) // ROWS)))
        end = min(self.tiles, max(first, (H - at - rows.stop) // ROWS + 1))
        alone = [slice(tile, tile + 1) for tile in (*range(first), *range(end, self.tiles))]
        for tiles in [slice(first, end)] * (first < end) + alone:
            start = at + tiles.start * ROWS
            inside = range(max(rows.start, -start), max(0, -start, min(rows.stop, H - start)))
            of_x = x_BCHW[self.items, :, start + inside.start : at + (tiles.stop - 1) * ROWS + inside.stop]
            yield tiles, inside, of_x.unfold(2, len(inside), ROWS).permute(4, 1, 0, 2, 3)


def is_faster(x_BCHW: Tensor, weight_KCHW: Tensor) -> bool:
    """Returns whether `convolve` of an input on a CPU takes less time than torch's convolution, by what was measured on
    one core with AVX-512 and MKL's products."""
    B, _, H, W = x_BCHW.shape
    enough = B * H * W >= ROWS * LEAST_COLUMNS and x_BCHW.dtype == torch.float32
    return enough and saves_enough(weight_KCHW.shape) and has_mkl()


def saves_enough(kernel: Sequence[int]) -> bool:
    """Returns whether a convolution by a kernel of shape (K, C, H, W) saves more than the transforms take."""
    K, C, taps, columns = kernel
    return taps == TAPS and min(C, K) * columns * (TAPS - POINTS / ROWS) >= LEAST_SAVED


def convolve(x_BCHW: Tensor, weight_KCHW: Tensor, bias_K: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """Returns the convolution with stride 1 and padding along height and width, (B, K, H', W'); without a gradient."""
    tiling = Tiling(tuple(x_BCHW.shape), tuple(weight_KCHW.shape), padding)
    out_BKHW = x_BCHW.new_empty(len(x_BCHW), len(weight_KCHW), tiling.height, tiling.width)
    weight_SPKC = _transformed_weight(weight_KCHW)
    for chunk in tiling.chunks():
        made_PKN = x_BCHW.new_empty(POINTS, len(weight_KCHW), chunk.columns)
        for shift, inputs_PCN in enumerate(chunk.inputs(x_BCHW)):
            made_PKN.baddbmm_(weight_SPKC[shift], inputs_PCN, beta=min(shift, 1))
        chunk.to_outputs(made_PKN, out_BKHW, bias_K)
    return out_BKHW


def convolve_backward(
    grad_BKHW: Tensor,
    x_BCHW: Tensor,
    weight_KCHW: Tensor,
    padding: tuple[int, int],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias from that of `convolve`; None where `needs` is False."""
    needs_x, needs_weight, needs_bias = needs
    tiling = Tiling(tuple(x_BCHW.shape), tuple(weight_KCHW.shape), padding)
    weight_SPKC = _transformed_weight(weight_KCHW)
    grad_SPKC = torch.empty_like(weight_SPKC) if needs_weight else None
    grad_x = torch.zeros_like(x_BCHW, memory_format=torch.contiguous_format) if needs_x else None
    for number, chunk in enumerate(tiling.chunks()):
        grad_SPKN = chunk.gradients(grad_BKHW)
        if grad_SPKC is not None:
            for shift, inputs_PCN in enumerate(chunk.inputs(x_BCHW)):
                grad_SPKC[shift].baddbmm_(grad_SPKN[0], inputs_PCN.mT, beta=min(number, 1))
        if grad_x is not None:
            grad_PCN = x_BCHW.new_empty(POINTS, x_BCHW.shape[1], chunk.columns)
            for shift, grad_PKN in enumerate(grad_SPKN):
                grad_PCN.baddbmm_(weight_SPKC[shift].mT, grad_PKN, beta=min(shift, 1))
            chunk.add_to_inputs(grad_PCN, grad_x)
    grad_weight = None if grad_SPKC is None else _to_taps(grad_SPKC, weight_KCHW)
    return grad_x, grad_weight, grad_BKHW.sum(dim=(0, 2, 3)) if needs_bias else None


def _transformed_weight(weight_KCHW: Tensor) -> Tensor:
    """Returns the filter transform of each column of the kernel, (S, P, K, C)."""
    K, C, _, columns = weight_KCHW.shape
    matrix = constant(taps_matrix(columns), weight_KCHW.dtype)
    return torch.mm(matrix, weight_KCHW.reshape(K * C, -1).T).view(columns, POINTS, K, C)


def _to_taps(values_SPKC: Tensor, weight_KCHW: Tensor) -> Tensor:
    """Returns the transpose of `_transformed_weight`, with the shape of the weight."""
    matrix = constant(taps_matrix(weight_KCHW.shape[3]), values_SPKC.dtype)
    grad_KCHW = values_SPKC.new_empty(weight_KCHW.shape)
    write_transposed(grad_KCHW.flatten(2), matrix.T, values_SPKC.flatten(0, 1))
    return grad_KCHW


@functools.cache
def taps_matrix(width: int) -> Matrix:
    """Returns the matrix from the taps of a kernel to the filter transform of each of its columns, (S P, taps)."""
    rows = []
    for column in range(width):
        for values in FILTER.filter_transform:
            row = [0.0] * (TAPS * width)
            row[column::width] = values
            rows.append(tuple(row))
    return tuple(rows)
