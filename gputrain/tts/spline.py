"""Monotonic rational-quadratic splines with linear tails (Durkan, Bekasov, Murray and Papamakarios 2019,
arXiv:1906.04032, section 3.1), the flow of the stochastic duration predictor.

Shapes: x and the results are `...`; tensors that describe K bins have them as their last dimension.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-3  # minimum relative width and height of a bin, and minimum slope of a knot


class Knots(NamedTuple):
    """Unconstrained parameters of a spline of K bins on [-bound, bound]; softmax gives bin sizes, softplus slopes."""

    widths: Tensor  # (..., K)
    heights: Tensor  # (..., K)
    slopes: Tensor  # (..., K - 1) for the inner knots; the outer ones have slope 1, as the tails do


def spline(x: Tensor, knots: Knots, bound: float, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the spline of x and the log of its slope (of the inverse spline with `inverse`), both `...`.

    The tails are the identity. Any value of x gives finite results and gradients, in both directions.
    """
    left_K1, width_K = _bins(knots.widths, bound)
    low_K1, height_K = _bins(knots.heights, bound)
    outer = math.log(math.expm1(1 - SMALLEST))  # makes the outer slope 1
    slope_K1 = SMALLEST + F.softplus(F.pad(knots.slopes, (1, 1), value=outer))
    inside = (x > -bound) & (x < bound)
    safe = x.clamp(-bound, bound)
    edges_K1 = low_K1 if inverse else left_K1
    # Only inner knots are counted, so the index is never out of range.
    index = (safe[..., None] >= edges_K1[..., 1:-1]).sum(dim=-1, keepdim=True)
    left, width, low, height, slope, next_slope = (
        of_bins.gather(-1, index).squeeze(-1)
        for of_bins in (left_K1, width_K, low_K1, height_K, slope_K1, slope_K1[..., 1:])
    )
    steepness = height / width
    bend = slope + next_slope - 2 * steepness
    if inverse:
        place = _place(safe - low, height, steepness, slope, bend)
        there = left + place * width
    else:
        place = (safe - left) / width
        both = place * (1 - place)
        there = low + height * (steepness * place**2 + slope * both) / (steepness + bend * both)
    log_slope = _log_slope(place, steepness, slope, next_slope, bend)
    log_slope = -log_slope if inverse else log_slope
    return torch.where(inside, there, x), torch.where(inside, log_slope, torch.zeros_like(x))


def _bins(shares_K: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Returns knots from -bound to bound, (..., K + 1), and the distances between them, (..., K)."""
    bins = shares_K.shape[-1]
    size_K = SMALLEST + (1 - SMALLEST * bins) * shares_K.softmax(dim=-1)
    inner = 2 * bound * size_K[..., :-1].cumsum(dim=-1) - bound
    knots_K1 = F.pad(F.pad(inner, (1, 0), value=-bound), (0, 1), value=bound)
    return knots_K1, knots_K1[..., 1:] - knots_K1[..., :-1]


def _place(above: Tensor, height: Tensor, steepness: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
    """Returns the position within the bin, in [0, 1], by a quadratic formula without cancellation."""
    a = height * (steepness - slope) + above * bend
    b = height * slope - above * bend
    c = -steepness * above
    discriminant = (b**2 - 4 * a * c).clamp(min=0)  # negative only by rounding
    return 2 * c / (-b - discriminant.sqrt())


def _log_slope(place: Tensor, steepness: Tensor, slope: Tensor, next_slope: Tensor, bend: Tensor) -> Tensor:
    rest = 1 - place
    numerator = steepness**2 * (next_slope * place**2 + 2 * steepness * place * rest + slope * rest**2)
    return numerator.log() - 2 * (steepness + bend * place * rest).log()
