"""Equivariant latents: scaled and turned, they decode to the scaled and turned picture (EQ-VAE, arXiv:2502.09509).

In a share of the steps, latents and target picture are transformed alike before the one decoding, whose result is then
compared with the transformed target. Latents that allow this are smoother, and its authors' denoisers learnt them
faster. A smaller picture takes less memory and time than the step without.

One transformation is drawn for all items of a step, as their shapes must agree, from (seed, step) alone: so it depends
neither on micro-batches nor on ranks, and a resumed run draws the same. Sizes are whole latents, so that pictures are
scaled by exactly the same factor, and few, as each size of tensors has kernels of its own.

Shapes: B items, C channels, N x N pixels or latent positions.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.vae.config import SMALLEST_DISCRIMINATED, SMALLEST_LPIPS, TrainVae

EIGHTHS = range(2, 9)  # Sizes of a transformed picture: a quarter of the side, as in the paper, up to the whole.
SMALLEST = 16  # Pixels a side of the smallest picture of the structural loss, and of a training.
LOOKED_AT = 10_000  # Steps among which the largest transformation is looked for.


@dataclass(frozen=True)
class Transformation:
    """Scales squares to `side / of` of their side, then turns them by so many quarters."""

    side: int
    of: int
    turns: int

    def __call__(self, x_BCNN: Tensor) -> Tensor:
        side = x_BCNN.shape[-1] * self.side // self.of
        if self.side != self.of:  # As by the paper's authors; half the size is the average of 2x2 positions.
            x_BCNN = F.interpolate(x_BCNN, size=(side, side), mode="bilinear")
        return torch.rot90(x_BCNN, self.turns, (2, 3))


@dataclass(frozen=True)
class Transformations:
    """Draws the transformations of the steps of a training at one size."""

    seed: int
    probability: float
    latent_side: int
    smallest_side: int  # Latents a side of the smallest picture that the losses take.

    @classmethod
    def of(cls, settings: TrainVae) -> "Transformations":
        factor, losses = settings.architecture.downsampling, settings.losses
        pixels = SMALLEST_DISCRIMINATED if losses.adversarial_weight else SMALLEST
        pixels = max(pixels, SMALLEST_LPIPS if losses.uses_lpips else 0)
        latent_side = settings.data.image_size // factor
        return cls(settings.schedule.seed, losses.eq_probability, latent_side, math.ceil(pixels / factor))

    @cached_property
    def sides(self) -> list[int]:
        """The sides of transformed latents, of which the last is that of all others."""
        rounded = {max(self.smallest_side, round(self.latent_side * eighths / 8)) for eighths in EIGHTHS}
        return sorted({side for side in rounded if side < self.latent_side} | {self.latent_side})

    def at(self, step: int) -> Transformation | None:
        """Returns the transformation of a step; None if it has none."""
        if not self.probability:
            return None
        draws = random.Random((self.seed << 32) + step)
        if draws.random() >= self.probability:
            return None
        number = 1 + int(draws.random() * (4 * len(self.sides) - 1))  # The first one would change nothing.
        return Transformation(self.sides[-1 - number // 4], self.latent_side, number % 4)

    def largest_step(self, first: int) -> int:
        """Returns the first step from `first` on that takes the most memory: it turns pictures of the whole size, and
        has a copy of them. `first` itself if there is none for long."""
        steps = range(first, first + LOOKED_AT * bool(self.probability))
        return next((step for step in steps if (at := self.at(step)) and at.side == at.of), first)
