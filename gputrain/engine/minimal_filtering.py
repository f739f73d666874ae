"""The matrices of Winograd's minimal filtering (Lavin and Gray 2015, arXiv:1509.09308).

It computes m outputs of a kernel of r taps with m + r - 1 multiplications instead of m * r: the inputs of a tile of m
outputs and the taps become values of polynomials at m + r - 1 points, which are multiplied and interpolated.

Shapes: P points, m outputs of a tile, r taps; R rows of a transform, K x C values that it is applied to.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Matrix = tuple[tuple[float, ...], ...]
BLOCK = 1 << 15  # So many values of a transform are transposed at once, so that they stay in the cache.


def _symmetric(*points: Fraction) -> tuple[Fraction, ...]:
    return Fraction(0), *(sign * point for point in points for sign in (1, -1))


# The points beside infinity by their number, found by search: with the first integers errors are up to twice as large.
NODES = {
    5: _symmetric(Fraction(5, 8), Fraction(3, 2)),
    6: (*_symmetric(Fraction(7, 8), Fraction(2)), Fraction(3, 8)),
    7: _symmetric(Fraction(1, 2), Fraction(1), Fraction(2)),
}


@dataclass(frozen=True)
class MinimalFilter:
    """Filtering of tiles of `outputs` by `taps`."""

    outputs: int  # m
    taps: int  # r

    @property
    def points(self) -> int:
        return self.outputs + self.taps - 1

    @property
    def nodes(self) -> tuple[Fraction, ...]:
        return NODES[self.points - 1]

    @functools.cached_property
    def input_transform(self) -> Matrix:
        """The matrix (P, P) from the inputs of a tile to the values at the points: coefficients of the polynomials that
        are zero at all of the points but one."""
        nodes = self.nodes
        rows = [_from_roots(nodes[:at] + nodes[at + 1 :]) for at in range(len(nodes))]
        return _floats([[*row, Fraction(0)] for row in rows] + [_from_roots(nodes)])

    @functools.cached_property
    def output_transform(self) -> Matrix:
        """The matrix (P, m), whose transpose makes the outputs of a tile from the products at the points."""
        return _floats(self._powers(self.outputs))

    @functools.cached_property
    def filter_transform(self) -> Matrix:
        """The matrix (P, r) from the taps to their values at the points."""
        nodes = self.nodes
        scales = [_value(_from_roots(nodes[:at] + nodes[at + 1 :]), node) for at, node in enumerate(nodes)]
        rows = zip([*scales, Fraction(1)], self._powers(self.taps), strict=True)
        return _floats([[value / scale for value in values] for scale, values in rows])

    def _powers(self, count: int) -> list[list[Fraction]]:
        """Returns the powers of each point, and of infinity the highest one alone."""
        finite = [[node**power for power in range(count)] for node in self.nodes]
        return [*finite, [Fraction(0)] * (count - 1) + [Fraction(1)]]


@functools.cache
def constant(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns the matrix as a tensor, which the steps of a training share."""
    return torch.tensor(matrix, dtype=dtype, device="cpu")


def write_transposed(out_KCR: Tensor, matrix_RP: Tensor, values_PKC: Tensor) -> None:
    """Writes the transposed product of a small matrix and many columns, block by block: a transposed copy of the whole
    product does not stay in the cache, MKL takes two to three times as long for so narrow a result, and it divides
    only a batch of such products among threads."""
    rows = max(1, BLOCK // out_KCR.shape[1])
    for some_KCR, some_PKC in zip(torch.split(out_KCR, rows), torch.split(values_PKC, rows, 1), strict=True):
        matrices = matrix_RP.expand(len(some_KCR), *matrix_RP.shape)
        some_KCR.copy_(torch.bmm(matrices, some_PKC.transpose(0, 1)).mT)


def _from_roots(nodes: Sequence[Fraction]) -> list[Fraction]:
    """Returns the coefficients of the product of (x - node) over all nodes, the constant first."""
    made = [Fraction(1)]
    for node in nodes:
        made = [lower - node * same for lower, same in zip([Fraction(0), *made], [*made, Fraction(0)], strict=True)]
    return made


def _value(coefficients: Sequence[Fraction], at: Fraction) -> Fraction:
    return sum((coefficient * at**power for power, coefficient in enumerate(coefficients)), Fraction(0))


def _floats(rows: Sequence[Sequence[Fraction]]) -> Matrix:
    return tuple(tuple(float(entry) for entry in row) for row in rows)
