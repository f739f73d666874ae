"""Monotonic rational-quadratic splines with linear tails (Durkan, Bekasov, Murray and Papamakarios 2019,
arXiv:1906.04032, section 3.1), the flow of the stochastic duration predictor.

Shapes: x and what comes of it are `...`; K bins are the last dimension of what describes them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST = 1e-3  # width and height of a bin as a share of the whole, and slope of a knot


class Knots(NamedTuple):
    """A spline of K bins on [-bound, bound], in any real numbers: shares of it by softmax, slopes by softplus."""

    widths: Tensor  # (..., K)
    heights: Tensor  # (..., K)
    slopes: Tensor  # (..., K - 1), of the inner knots; at the outer ones the slope is 1, as it is in the tails


def spline(x: Tensor, knots: Knots, bound: float, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Where x goes, and the logarithm of the slope there (of the inverse with `inverse`): both `...`.

    In the tails x stays where it is. Any value of x is safe, in both directions and in their gradients.
    """
    left_K1, width_K = _bins(knots.widths, bound)
    low_K1, height_K = _bins(knots.heights, bound)
    outer = math.log(math.expm1(1 - SMALLEST))  # whose slope is 1
    slope_K1 = SMALLEST + F.softplus(F.pad(knots.slopes, (1, 1), value=outer))
    inside = (x > -bound) & (x < bound)
    safe = x.clamp(-bound, bound)
    edges_K1 = low_K1 if inverse else left_K1
    index = (safe[..., None] >= edges_K1[..., 1:-1]).sum(dim=-1, keepdim=True)  # of the inner knots: never outside
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
    """Knots from -bound to bound, (..., K + 1), and the distances between them, (..., K)."""
    bins = shares_K.shape[-1]
    size_K = SMALLEST + (1 - SMALLEST * bins) * shares_K.softmax(dim=-1)
    inner = 2 * bound * size_K[..., :-1].cumsum(dim=-1) - bound
    knots_K1 = F.pad(F.pad(inner, (1, 0), value=-bound), (0, 1), value=bound)
    return knots_K1, knots_K1[..., 1:] - knots_K1[..., :-1]


def _place(above: Tensor, height: Tensor, steepness: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
    """From 0 to 1 in its bin: the root of a quadratic equation that lies there, without cancellation."""
    a = height * (steepness - slope) + above * bend
    b = height * slope - above * bend
    c = -steepness * above
    discriminant = (b**2 - 4 * a * c).clamp(min=0)  # below nought by rounding alone
    return 2 * c / (-b - discriminant.sqrt())


def _log_slope(place: Tensor, steepness: Tensor, slope: Tensor, next_slope: Tensor, bend: Tensor) -> Tensor:
    rest = 1 - place
    numerator = steepness**2 * (next_slope * place**2 + 2 * steepness * place * rest + slope * rest**2)
    return numerator.log() - 2 * (steepness + bend * place * rest).log()
