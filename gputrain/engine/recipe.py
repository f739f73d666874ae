"""The contract between a model and the engine: a Recipe, whose step groups yield the terms of its losses."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gputrain.samples import Report

Batch = Any  # A recipe's own class; only its recipe looks inside.
Scalars = dict[str, Tensor]


@dataclass(frozen=True)
class Term:
    """A part's share of a loss of the whole batch. It is back-propagated times `weight`; metrics show it unweighted."""

    name: str
    value: Tensor
    weight: float | Tensor = 1.0
    phase: str = ""  # The phase of the group that the term belongs to; default: the first.


@dataclass(frozen=True)
class JointTerms:
    """Terms of a graph whose backward pass can run only once, and so runs for all of them together."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class BatchStat:
    """A part's share of a statistic of the whole batch, without a graph. `Phase.after_step` gets its sum over parts."""

    name: str
    value: Tensor
    phase: str = ""  # The phase of the group that the statistic belongs to; default: the first.


@dataclass(frozen=True)
class ChainGradients:
    """Gradients that earlier terms accumulated on detached copies of `tensors`, to be propagated through their
    graph."""

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


Yielded = Term | JointTerms | BatchStat | ChainGradients


@dataclass
class PhaseSums:
    """A phase's losses and statistics, summed over the parts of the batch."""

    losses: Scalars = field(default_factory=dict)
    statistics: Scalars = field(default_factory=dict)


Sums = dict[str, PhaseSums]  # By the name of the phase.


def at_least_fp32(values: Tensor) -> Tensor:
    """Returns the values in fp32 or higher precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def per_item(values: Tensor) -> Tensor:
    """Returns the mean over all dimensions but the first, in fp32 or higher precision: B."""
    return at_least_fp32(values).flatten(1).mean(dim=1)


def add_value(totals: Scalars, name: str, value: Tensor) -> None:
    """Add a value to the total of its name, without a kernel if it is the first."""
    totals[name] = totals[name] + value if name in totals else value


@dataclass(frozen=True)
class Phase:
    """One optimizer and the modules that it trains."""

    name: str
    modules: tuple[nn.Module, ...]
    optimizer: torch.optim.Optimizer
    # Called after the optimizer's step with the sums of the phase's statistics and whether its gradients were finite.
    after_step: Callable[[Scalars, Tensor], None] = lambda statistics, finite: None
    lr_scale: float = 1.0  # Learning-rate multiplier of this phase.
    frozen: tuple[nn.Parameter, ...] = ()  # Parameters of the modules that keep their values.

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that get gradients. Optimizers skip the others, and clipping does not count them."""
        frozen = {id(parameter) for parameter in self.frozen}
        return [parameter for parameter in self.parameters() if id(parameter) not in frozen]


@dataclass(frozen=True)
class StepGroup:
    """Phases whose gradients come from the same forward passes.

    While `loss` runs, only the modules of these phases require gradients. `loss` is pure: it computes and yields; it
    neither steps nor logs.
    """

    phases: tuple[Phase, ...]
    loss: Callable[[Batch, int], Iterator[Yielded]]
    step_context: Callable[[], AbstractContextManager[object]] = nullcontext  # Entered once around all micro-batches.
    # Returns all that `loss` takes from the step besides tensors whose addresses stay the same: if it is equal, batches
    # of equal shapes have the same kernels. None, or None of a step: kernels may change with every step, or are
    # those of few steps, so that no CUDA graph holds them.
    graph_key: Callable[[int], Hashable] | None = None

    @property
    def name(self) -> str:
        """The first phase's name, under which messages and the plan mention the group."""
        return self.phases[0].name

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for phase in self.phases for parameter in phase.parameters()]


class Recipe(Protocol):
    """A model to train, as the engine sees it."""

    kind: str  # Kind of model: "vae", "vocoder", "tts", "asr".
    unit: str  # What an item is, in the plural: "images".
    step_groups: list[StepGroup]
    modules: dict[str, nn.Module]  # What a checkpoint holds besides the optimizers.

    def prepare(self, loaded: Any, step: int) -> Batch:
        """Return the batch on the device, with the noise of this step."""

    def size(self, batch: Batch) -> int:
        """Return the number of items in the batch."""

    def flops(self, batch: Batch, step: int) -> float:
        """Return the FLOPs of a step on the batch, forward and backward; 0 if unknown."""

    def peak_memory_step(self, step: int) -> int:
        """Return the first step from `step` on that takes the most memory."""

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Split the batch; each part knows the counts of the whole batch."""

    def average(self, step: int) -> None:
        """Update moving averages of the weights, once every phase has stepped."""

    def sample(self) -> Report:
        """Return pictures and sounds for a person to look at."""

    def evaluate(self) -> Report:
        """Return figures on held-out data; the best checkpoint is the one with the highest "score"."""


def phases_of(recipe: Recipe) -> list[Phase]:
    """Return the phases of all step groups, in the order in which they step."""
    return [phase for group in recipe.step_groups for phase in group.phases]
