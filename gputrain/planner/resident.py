"""A training with everything in memory that stays there from step to step, to predict or measure its micro-batches.

GB is 1e9 bytes.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gputrain.engine.graphs import StepGraphs
from gputrain.engine.recipe import Batch, Phase, Recipe, StepGroup, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.train import drop_gradients, gradients
from gputrain.hw.runtime import Runtime, is_out_of_memory, release_memory
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.spec import PlanTarget


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
        state = TrainState.for_measurement(recipe, runtime)
        state.graphs = StepGraphs()  # A capture would be measured too.
        return cls(state, batch, step)

    @property
    def recipe(self) -> Recipe:
        return self.state.recipe

    def micro_batch(self, items: int) -> Batch:
        """Returns the first micro-batch of at most `items` items."""
        return self.recipe.split(self.batch, math.ceil(self.recipe.size(self.batch) / items))[0]

    def add_gradients(self, group: StepGroup, micro_batch: Batch) -> None:
        gradients(self.state, group, [micro_batch], self.step)

    def measured_peak(self, items: int) -> "MeasuredPeak":
        """Returns the peak of a micro-batch through every group, with all gradients of the group allocated before."""
        found, micro_batch = MeasuredPeak(), self.micro_batch(items)
        try:
            for group in self.recipe.step_groups:
                self._measure(group, micro_batch, found)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found.complete = False
        for group in self.recipe.step_groups:  # This is outside the except block, whose traceback keeps tensors alive.
            drop_gradients(group)
        release_memory()
        return found

    def _measure(self, group: StepGroup, micro_batch: Batch, found: "MeasuredPeak") -> None:
        for phase in group.phases:
            allocate_gradients(phase)
        device = self.state.runtime.device
        if device.type == "cuda":
            self.add_gradients(group, micro_batch)  # Compiling and cuDNN's search for algorithms are not measured.
        with metered(device, found, tensors_of(self.recipe, self.batch)):
            self.add_gradients(group, micro_batch)
        drop_gradients(group)


@dataclass
class MeasuredPeak:
    """The peak of the memory that tensors took."""

    allocated_gb: float = 0.0
    reserved_gb: float = 0.0  # Memory that the allocator held.
    retries: int = 0  # Times that the allocator had to release cached memory before it could allocate.
    complete: bool = True  # False if memory ran out.

    def include(self, allocated_gb: float, reserved_gb: float) -> None:
        self.allocated_gb = max(self.allocated_gb, allocated_gb)
        self.reserved_gb = max(self.reserved_gb, reserved_gb)


def metered(device: torch.device, found: MeasuredPeak, resident: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Raises `found` to the peak of the code within; `resident` are the tensors that are in memory already."""
    if device.type != "cuda":
        return watched_peak(found, resident)
    release_memory()
    return allocator_peak(device, found)


@contextmanager
def allocator_peak(device: torch.device, found: MeasuredPeak) -> Iterator[None]:
    """Raises `found` to the peak of the code within, as the allocator of a CUDA device counts it."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    yield
    torch.cuda.synchronize(device)
    found.include(torch.cuda.max_memory_allocated(device) / 1e9, torch.cuda.max_memory_reserved(device) / 1e9)
    found.retries += torch.cuda.memory_stats(device)["num_alloc_retries"] - before


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
