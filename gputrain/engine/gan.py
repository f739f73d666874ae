"""Adversarial losses and their adaptive weight.

Every loss is a value per item, so that the sum over a part can be divided by the count of the whole batch. Logits have
the shape B...: items, then patches or frames, over which they are averaged.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AdversarialLoss = Literal["hinge", "least-squares"]


def at_least_fp32(values: Tensor) -> Tensor:
    """Returns the values in fp32 or higher precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def per_item(values: Tensor) -> Tensor:
    """Returns the mean over all dimensions but the first, in fp32 or higher precision: B."""
    return at_least_fp32(values).flatten(1).mean(dim=1)


def discriminator_loss(kind: AdversarialLoss, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Returns the loss of each item, B: hinge (Lim and Ye 2017) or least squares (Mao et al. 2017, a = 0, b = 1)."""
    return real_loss(kind, real_logits) + fake_loss(kind, fake_logits)


def real_loss(kind: AdversarialLoss, real_logits: Tensor) -> Tensor:
    """Returns the part of `discriminator_loss` that real items have, B."""
    if kind == "hinge":
        return 0.5 * per_item(F.relu(1 - at_least_fp32(real_logits)))
    return 0.5 * per_item((at_least_fp32(real_logits) - 1) ** 2)


def fake_loss(kind: AdversarialLoss, fake_logits: Tensor) -> Tensor:
    """Returns the part of `discriminator_loss` that generated items have, B."""
    if kind == "hinge":
        return 0.5 * per_item(F.relu(1 + at_least_fp32(fake_logits)))
    return 0.5 * per_item(at_least_fp32(fake_logits) ** 2)


def generator_loss(kind: AdversarialLoss, fake_logits: Tensor) -> Tensor:
    """B: the adversarial loss of the generator."""
    if kind == "hinge":
        return -per_item(fake_logits)
    return per_item((at_least_fp32(fake_logits) - 1) ** 2)


class Balance(nn.Module):
    """Statistics of earlier batches for the adversarial losses: part of every checkpoint, constant within a step.

    - `weight` balances the adversarial loss with the other losses by the norms of their gradients on the output, as
      in the loss balancer of EnCodec (Défossez et al. 2022, section 3.4) and, on the last layer, VQGAN (Esser et al.
      2021, section 3.2): weight = |other| / |adversarial|, clamped. It is 0 until the first measurement.
    - `real` and `fake` are moving averages of the discriminator's logits, which LeCam regularisation uses (Tseng et al.
      2021, equation 3).
    """

    weight: Tensor
    real: Tensor
    fake: Tensor

    def __init__(self, limit: float = 10.0, decay: float = 0.99) -> None:
        """`limit` is the largest weight."""
        super().__init__()
        self.limit, self.decay = limit, decay
        self.register_buffer("weight", torch.tensor(0.0))
        self.register_buffer("real", torch.tensor(0.0))
        self.register_buffer("fake", torch.tensor(0.0))

    def measure(self, other_squares: Tensor, adversarial_squares: Tensor, finite: Tensor) -> None:
        """Update the weight from the squared norms of the gradients over the whole batch; ignores non-finite steps."""
        measured = (other_squares.sqrt() / (adversarial_squares.sqrt() + 1e-12)).clamp(max=self.limit)
        self.weight.copy_(torch.where(finite & measured.isfinite(), measured, self.weight))

    def observe(self, real_mean: Tensor, fake_mean: Tensor, finite: Tensor) -> None:
        """Update the averages from the mean logits over the whole batch."""
        for average, seen in ((self.real, real_mean), (self.fake, fake_mean)):
            average.copy_(torch.where(finite, self.decay * average + (1 - self.decay) * seen, average))

    def lecam(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """B: squared distances of real logits from the average of fake ones, and vice versa."""
        real_distance = (at_least_fp32(real_logits) - self.fake) ** 2
        return per_item(real_distance) + per_item((at_least_fp32(fake_logits) - self.real) ** 2)
