"""Optimizers, loss scaling, and the moving average of the weights."""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gputrain.errors import UserError

Model = TypeVar("Model", bound=nn.Module)


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Returns fused AdamW that decays weights, but not gains and biases (one dimension)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in parameters:
        (decayed if parameter.ndim > 1 else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, eps=eps, fused=True)


class LossScale(nn.Module):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), entirely on the device.

    A non-finite gradient skips the step and halves the scale; `growth_interval` finite steps in a row double it.
    """

    scale: Tensor
    good_steps: Tensor

    def __init__(self, start: float = 65536.0, growth_interval: int = 2000) -> None:
        super().__init__()
        self.growth_interval = growth_interval
        self.register_buffer("scale", torch.tensor(start))
        self.register_buffer("good_steps", torch.tensor(0))

    def adjust(self, finite: Tensor) -> None:
        good = torch.where(finite, self.good_steps + 1, 0)
        grow = good >= self.growth_interval
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale.copy_((self.scale * factor).clamp(min=1.0, max=2.0**24))
        self.good_steps.copy_(torch.where(grow, 0, good))


def has_scaled(saved: Mapping[str, Tensor]) -> bool:
    """Returns True if a saved LossScale was in use. Older checkpoints of bf16 and fp32 runs hold an unused one."""
    return bool(saved["scale"] != 1 or saved["good_steps"] != 0)


class Ema(nn.Module, Generic[Model]):
    """Exponential moving average of a model's weights; `average` is the model to evaluate and to export.

    The decay rises with the step as (1 + step) / (10 + step), so that a short run is not averaged with its beginning.
    """

    average: Model

    def __init__(self, model: Model, average: Model, decay: float) -> None:
        """`average` is a second instance of the model; it receives the weights."""
        super().__init__()
        self.decay = decay
        self.average = average
        self.average.requires_grad_(False)
        self.average.load_state_dict(model.state_dict())

    @torch.no_grad()
    def update(self, model: Model, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.parameters()), list(model.parameters()), 1 - decay)
        for mine, theirs in zip(self.average.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


def refuse_nonfinite(model: nn.Module, source: str) -> None:
    """Raises UserError if a weight that was loaded from `source` is not finite."""
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(f"{source}: {name}: not all weights are finite", hint="take an older checkpoint of the run")
