"""Splines: the inverse undoes the map, and slopes equal autograd's. Shapes: `...`, K bins."""

import torch
from torch import Tensor

from gputrain.tts.duration import Knots, spline
from tests.tables import each_row

BOUND = 5.0


def some_knots(count: int, dtype: torch.dtype, spread: float = 2.0) -> Knots:
    random = torch.Generator().manual_seed(0)
    return Knots(*(spread * torch.randn(count, bins, generator=random).to(dtype) for bins in (10, 10, 9)))


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
    one = Knots(*(part[:1].expand(10_001, -1) for part in some_knots(1, torch.float64)))
    there, log_slope = spline(x, one, BOUND)
    assert (there.diff() > 0).all()
    assert (there.diff() / x.diff()).max() < 1.01 * log_slope.exp().max()  # There is no jump at a knot.
    assert log_slope[0].abs() < 1e-6
    assert log_slope[-1].abs() < 1e-6


@each_row(False, True)
def test_gradients(inverse: bool) -> None:
    x = torch.tensor([-5.5, -3.2, 0.1, 4.9], dtype=torch.float64)
    inputs = [x, *some_knots(4, torch.float64, 1.0)]
    assert torch.autograd.gradcheck(
        lambda x, *knots: spline(x, Knots(*knots), BOUND, inverse=inverse), [part.requires_grad_() for part in inputs]
    )


@each_row(False, True)
def test_nothing_makes_nan(inverse: bool) -> None:
    """Steep and flat splines, points outside the bounds, and their gradients."""
    x, knots = places(torch.float32).requires_grad_(), Knots(*(50 * part for part in some_knots(402, torch.float32)))
    parts = [x, *(part.requires_grad_() for part in knots)]
    there, log_slope = spline(x, knots, BOUND, inverse=inverse)
    assert there.isfinite().all()
    assert log_slope.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad((there + log_slope).sum(), parts))
