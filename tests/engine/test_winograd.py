"""Convolutions by minimal filtering against torch's in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.engine import winograd
from gputrain.engine.winograd import Tiling, convolve, convolve_backward
from gputrain.hw.runtime import has_mkl

# B, C, K, H, W, columns of the kernel, padding: heights that are no multiple of a tile, and less than one.
SHAPES = [
    (2, 5, 7, 13, 9, 3, (1, 1)),
    (1, 4, 6, 16, 16, 3, (1, 1)),
    (3, 4, 2, 5, 3, 3, (0, 2)),
    (2, 3, 4, 17, 6, 5, (2, 1)),
    (3, 5, 7, 14, 1, 1, (1, 0)),
    (1, 3, 3, 2, 4, 3, (1, 1)),
    (40, 3, 4, 8, 6, 3, (1, 1)),
]


def both(sizes, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Returns output and gradients of input, weight and bias, ours in `dtype` and torch's in fp64."""
    B, C, K, H, W, columns, padding = sizes
    torch.manual_seed(0)
    x, weight = torch.randn(B, C, H, W, dtype=dtype), torch.randn(K, C, 3, columns, dtype=dtype)
    bias = torch.randn(K, dtype=dtype)
    exact = [tensor.to(torch.float64, copy=True).requires_grad_() for tensor in (x, weight, bias)]
    out = F.conv2d(*exact, padding=padding)
    grad = torch.randn(out.shape, dtype=dtype)
    made = convolve(x, weight, bias, padding)
    ours = [made, *convolve_backward(grad, x, weight, padding, (True, True, True))]
    return ours, [out.detach(), *torch.autograd.grad(out, exact, grad.double())]


def errors(ours: list[Tensor], expected: list[Tensor]) -> list[float]:
    assert [one.shape for one in ours] == [one.shape for one in expected]
    return [((one - other).norm() / other.norm()).item() for one, other in zip(ours, expected, strict=True)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_convolution_and_gradients_equal_torchs_in_fp64(sizes):
    assert max(errors(*both(sizes, torch.float64))) < 1e-13


@pytest.mark.parametrize("sizes", SHAPES)
def test_rounding_in_fp32_is_amplified_little(sizes):
    # Rounding once has a relative error of 2^-24. The transforms amplify it by the norms of their rows, about 4 each.
    assert max(errors(*both(sizes, torch.float32))) < 4 * 4 * 2**-24


@pytest.mark.parametrize("columns", [1, 30, 50])
def test_parts_of_tiles_and_items_make_the_whole(monkeypatch, columns):
    monkeypatch.setattr(winograd, "CHUNK_COLUMNS", columns)
    whole = Tiling((2, 5, 13, 9), (7, 5, 3, 3), (1, 1))
    assert len(list(whole.chunks())) > 1
    assert max(errors(*both(SHAPES[0], torch.float64))) < 1e-13


def test_gradients_that_are_not_needed_are_none():
    x, weight, grad = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3), torch.randn(1, 3, 8, 8)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = convolve_backward(grad, x, weight, (1, 1), needs)
        assert tuple(one is not None for one in found) == needs


def test_few_chunks_however_large_the_input():
    large = Tiling((64, 8, 2048, 2048), (8, 8, 3, 3), (1, 1))
    assert len(list(large.chunks())) <= 2 * winograd.MOST_CHUNKS
    outputs = [(chunk.items.start, chunk.outputs.start) for chunk in large.chunks()]
    assert len(set(outputs)) == len(outputs)
    assert sum((c.items.stop - c.items.start) * c.tiles for c in large.chunks()) == 64 * math.ceil(2048 / winograd.ROWS)


def test_layers_that_save_enough_over_enough_pixels_in_fp32_are_faster():
    x, weight = torch.empty(1, 96, 32, 32), torch.empty(96, 96, 3, 3)
    assert winograd.is_faster(x, weight) == has_mkl()
    slower = [
        (x.double(), weight.double()),
        (x.bfloat16(), weight.bfloat16()),
        (x[:, :, :16, :16], weight),
        (x[:, :64], weight[:, :64]),
        (x, weight[:64]),
        (x, weight[:, :, :1, :1]),
        (x, torch.empty(96, 96, 5, 5)),
    ]
    assert [winograd.is_faster(*pair) for pair in slower] == [False] * len(slower)
