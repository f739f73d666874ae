"""Splines: the inverse undoes the map, and slopes equal autograd's. Shapes: `...`, K bins."""

import torch
from torch import Tensor

from gputrain.tts.duration import SMALLEST, spline
from tests.tables import each_row

BOUND = 5.0


def some_knots(count: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(count, 29, generator=torch.Generator().manual_seed(0)).to(dtype)


def places(dtype: torch.dtype) -> Tensor:
    """Returns points inside, on both bounds, and outside."""
    return torch.cat([torch.linspace(-7, 7, 399), torch.tensor([-BOUND, BOUND, 1e30])]).to(dtype)


@each_row((torch.float64, 1.0, 1e-10), (torch.float32, 0.5, 1e-5))
def test_each_way_undoes_the_other(dtype: torch.dtype, spread: float, tolerance: float) -> None:
    x, knots = places(dtype), some_knots(402, dtype, spread)
    there, log_slope = spline(x, knots, BOUND)
    back, log_slope_back = spline(there, knots, BOUND, inverse=True)
    assert (back - x).abs().max() < tolerance
    assert (log_slope + log_slope_back).abs().max() < 100 * tolerance
    assert (there - x).abs().max() > 0.3


def test_the_slope_is_that_of_the_curve() -> None:
    x, knots = places(torch.float64).requires_grad_(), some_knots(402, torch.float64)
    there, log_slope = spline(x, knots, BOUND)
    (slope,) = torch.autograd.grad(there.sum(), x)
    assert torch.allclose(slope.log(), log_slope, atol=1e-10)
    assert torch.equal(there[x.abs() >= BOUND], x[x.abs() >= BOUND])
    assert torch.equal(log_slope[x.abs() >= BOUND], torch.zeros(int((x.abs() >= BOUND).sum()), dtype=torch.float64))


def test_one_spline_rises_and_meets_its_tails() -> None:
    x = (1 - 1e-12) * torch.linspace(-BOUND, BOUND, 10_001, dtype=torch.float64)
    one = some_knots(1, torch.float64).expand(10_001, -1)
    there, log_slope = spline(x, one, BOUND)
    assert (there.diff() > 0).all()
    assert (there.diff() / x.diff()).max() < 1.01 * log_slope.exp().max()  # There is no jump at a knot.
    assert log_slope[0].abs() < 1e-6
    assert log_slope[-1].abs() < 1e-6


@each_row(False, True)
def test_gradients(inverse: bool) -> None:
    x = torch.tensor([-5.5, -3.2, 0.1, 4.9], dtype=torch.float64)
    inputs = [part.requires_grad_() for part in (x, some_knots(4, torch.float64, 1.0))]
    assert torch.autograd.gradcheck(lambda x, knots: spline(x, knots, BOUND, temperature=1.5, inverse=inverse), inputs)


def plain_spline(x: Tensor, knots_K: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas of Durkan et al. as they stand in the paper (equations 4 and 5), one value at a time."""
    rows = []
    for value, (*raw,) in zip(x, knots_K, strict=True):
        widths, heights, inner = torch.stack(raw).split([10, 10, 9])
        sizes = [2 * BOUND * (SMALLEST + (1 - 10 * SMALLEST) * one.softmax(0)) for one in (widths, heights)]
        xs, ys = (torch.cat([one.new_zeros(1), one.cumsum(0)]) - BOUND for one in sizes)
        ends = value.new_ones(1)
        slopes = torch.cat([ends, SMALLEST + torch.nn.functional.softplus(inner), ends])
        if value.abs() >= BOUND:
            rows.append(torch.stack([value, torch.zeros_like(value)]))
            continue
        k = int((value >= xs[1:-1]).sum())
        s, xi = sizes[1][k] / sizes[0][k], (value - xs[k]) / sizes[0][k]
        both, under = xi * (1 - xi), s + (slopes[k + 1] + slopes[k] - 2 * s) * xi * (1 - xi)
        there = ys[k] + sizes[1][k] * (s * xi**2 + slopes[k] * both) / under
        slope = s**2 * (slopes[k + 1] * xi**2 + 2 * s * both + slopes[k] * (1 - xi) ** 2) / under**2
        rows.append(torch.stack([there, slope.log()]))
    there, log_slope = torch.stack(rows).unbind(1)
    return there, log_slope


def test_values_and_gradients_are_those_of_the_formulas() -> None:
    x, knots = places(torch.float64)[::7], some_knots(402, torch.float64)[::7]
    inputs = [part.requires_grad_() for part in (x, knots)]
    random = torch.Generator().manual_seed(1)
    outer = [torch.randn(len(x), generator=random, dtype=torch.float64) for _ in range(2)]
    found, expected = (function(*inputs) for function in (lambda x, knots: spline(x, knots, BOUND), plain_spline))
    for ours, reference in zip(found, expected, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(made, inputs, outer) for made in (found, expected))
    for ours, reference in zip(*gradients, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-12, atol=1e-12)


@each_row(False, True)
def test_nothing_makes_nan(inverse: bool) -> None:
    """Steep and flat splines, points outside the bounds, and their gradients."""
    parts = [places(torch.float32).requires_grad_(), (50 * some_knots(402, torch.float32)).requires_grad_()]
    there, log_slope = spline(*parts, BOUND, inverse=inverse)
    assert there.isfinite().all()
    assert log_slope.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad((there + log_slope).sum(), parts))
