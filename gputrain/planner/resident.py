"""A training with everything in memory that stays there from step to step, to predict or measure its micro-batches.

GB is 1e9 bytes.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gputrain.engine.memory_check import MeasuredPeak
from gputrain.engine.recipe import Batch, Phase, Recipe, StepGroup, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import gradients
from gputrain.hw.runtime import Runtime
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.work import PlanTarget


@dataclass(frozen=True)
class ResidentStep:
    """The step that takes the most memory, with weights, averages, optimizer state and batch, but without gradients."""

    state: TrainState
    batch: Batch
    step: int

    @classmethod
    def of(cls, target: PlanTarget, runtime: Runtime, checkpointing: bool, items: int = 1) -> "ResidentStep":
        """Returns the step on the target's largest batch, or on one of `items` items if that is more."""
        recipe = target.build(runtime, checkpointing)
        step = recipe.peak_memory_step(0)
        batch = recipe.prepare(target.load(), step)
        if recipe.size(batch) < items:
            batch = recipe.prepare(target.load(items), step)
        for phase in phases_of(recipe):
            allocate_gradients(phase)
            phase.optimizer.step()  # It allocates the optimizer's state.
            phase.optimizer.zero_grad(set_to_none=True)
        return cls(TrainState.for_measurement(recipe, runtime), batch, step)

    @property
    def recipe(self) -> Recipe:
        return self.state.recipe

    def micro_batch(self, items: int) -> Batch:
        """Returns the first micro-batch of at most `items` items."""
        return self.recipe.split(self.batch, math.ceil(self.recipe.size(self.batch) / items))[0]

    def add_gradients(self, group: StepGroup, micro_batch: Batch) -> None:
        gradients(self.state, group, micro_batch, 1, self.step)


@contextmanager
def watched_peak(found: MeasuredPeak, resident: Iterable[Tensor] = ()) -> Iterator[None]:
    """Raises `found` to the peak of the code within, by watching every storage; those of `resident` count from the
    beginning. It is what the allocator of a GPU would count."""
    timeline = MemoryTimeline()
    timeline.note("parameters", resident)
    del resident  # Otherwise it would keep tensors that are freed on the way.
    with timeline.watching():
        yield
    peak_gb = timeline.peak()[0] / 1e9
    found.include(peak_gb, peak_gb)


def tensors_of(recipe: Recipe, batch: Batch) -> list[Tensor]:
    """Returns the tensors of a recipe's modules (trained or not), its gradients, its optimizers and a batch."""
    weights = weights_of(recipe)
    found = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *found, *optimizer_tensors(recipe), *batch_tensors(batch)]


def weights_of(recipe: Recipe) -> list[Tensor]:
    """Returns parameters and buffers of all modules that the recipe holds, those that no checkpoint has too."""
    held = (*recipe.modules.values(), *(value for value in vars(recipe).values() if isinstance(value, nn.Module)))
    return [tensor for module in held for tensor in (*module.parameters(), *module.buffers())]


def optimizer_tensors(recipe: Recipe) -> list[Tensor]:
    states = [state for phase in phases_of(recipe) for state in phase.optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def batch_tensors(batch: Batch) -> list[Tensor]:
    return [value for value in tree_leaves(vars(batch)) if isinstance(value, Tensor)]


def allocate_gradients(phase: Phase) -> None:
    """Gives every trained parameter a gradient of zeros in its own layout, as autograd would."""
    for parameter in phase.trained_parameters():
        parameter.grad = torch.zeros_like(parameter)
