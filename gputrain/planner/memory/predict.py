"""The memory and the arithmetic of a training step, predicted without a GPU: of a kind's recipe or of any torch model.

A step runs on fake tensors, which have sizes and dtypes, but no memory, and no operator computes. The allocation and
the release of every storage are noted, and replayed through a model of CUDA's caching allocator. The prediction does
not contain the CUDA context (0.3 to 0.6 GB) and workspaces of cuBLAS, and it contains intermediate results that a
compiler would fuse. GB is 1e9 bytes.
"""

import functools
import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from gputrain.engine.recipe import Batch, Phase, Recipe, StepGroup, phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import drop_gradients, gradients, prepare_optimizer
from gputrain.errors import UserError, first_line
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime, is_out_of_memory
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.allocator import CachingAllocator, PlainAllocator, StorageEvent
from gputrain.planner.memory.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.memory.fit import MemoryModel
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.time.flops import FlopCount
from gputrain.planner.time.fusion import kernel_costs
from gputrain.planner.time.operators import Operator, OperatorLog
from gputrain.planner.time.roofline import KernelCost, StepCost


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a step; `parts` are the GB at the peak by purpose."""

    allocated_gb: float
    reserved_gb: float  # Memory that the allocator takes from the device.
    parts: dict[str, float]  # Parameters, gradients, optimizer, activations, workspace.
    flops: int  # FLOPs of the step, with those that checkpointing repeats, without elementwise operations.
    micro_batch: tuple[KernelCost, ...] = ()  # Kernels of a micro-batch, without those of the optimizer.
    update: tuple[KernelCost, ...] = ()  # Kernels of the optimizer.

    @classmethod
    def of(
        cls,
        timeline: MemoryTimeline,
        micro_batch: Sequence[Operator],
        update: Sequence[Operator],
        allocator: PlainAllocator | CachingAllocator,
    ) -> "MemoryEstimate":
        peak_bytes, parts = timeline.peak(allocator)
        flops = sum(operator.flops for operator in (*micro_batch, *update))
        kernels = (kernel_costs(micro_batch), kernel_costs(update))
        return cls(peak_bytes / 1e9, allocator.reserved_bytes / 1e9, parts, round(flops), *kernels)


def predict_step(
    target: PlanTarget,
    plan: Plan,
    *,
    micro_batch_size: int,
    checkpointing: bool = False,
    gradients_resident: bool = True,
    caching_allocator: bool | None = None,
) -> MemoryEstimate:
    """Returns the memory of a step on one micro-batch.

    Weights, averages, optimizer state and the whole batch are in memory from the beginning. `gradients_resident`: so
    are the gradients of each group, as in the second micro-batch of a step. `caching_allocator`: whether the memory is
    that of CUDA's allocator; None: on a GPU. Raises UserError if an operator needs values, and names it and its module.
    """
    step = _step_on_shapes(target, plan, micro_batch_size, checkpointing, gradients_resident)
    return step.estimate(_allocator(plan, caching_allocator))


# The least number of items of a step that tells those of other sizes: more than most other sizes of a step, such as its
# frames; where a target is not proportional for so many, more than the sizes of most kernels.
LARGE_PRIME, SMALL_PRIME = 1009, 13


def predict_steps(target: PlanTarget, plan: Plan, sizes: Sequence[int], checkpointing: bool) -> list[MemoryEstimate]:
    """Returns the memory of steps on micro-batches of these sizes: of one step on a prime number of items, where all of
    it is proportional to the items or does not depend on them."""
    candidates = (max(least, *sizes) for least in (LARGE_PRIME, SMALL_PRIME))
    least = next((items for items in candidates if 2 * items <= target.proportional_up_to), None)
    if least is None:
        return [predict_step(target, plan, micro_batch_size=size, checkpointing=checkpointing) for size in sizes]
    step = _step_on_shapes(target, plan, least, checkpointing, prime=True)
    return [step.of_items(size).estimate(_allocator(plan, None)) for size in sizes]


def _step_on_shapes(
    target: PlanTarget,
    plan: Plan,
    items: int,
    checkpointing: bool,
    gradients_resident: bool = True,
    prime: bool = False,
) -> "WatchedStep":
    timeline = MemoryTimeline.on(str(plan.device.value))
    with on_fake_tensors(), explained(target.model_name):
        runtime = FakeRuntime(plan, timeline)
        return watch_step(target, runtime, timeline, items, checkpointing, gradients_resident, prime)


@dataclass(frozen=True)
class WatchedStep:
    """A step that has run: its storages and its operators."""

    timeline: MemoryTimeline
    micro_batch: list[Operator]
    update: list[Operator]  # Operators that follow the gradients: clipping, the optimizers' steps, and averages.
    items: int
    batch: range  # Storages of the whole batch.
    batch_items: int  # Items of the target's largest batch.

    def estimate(self, allocator: PlainAllocator | CachingAllocator) -> MemoryEstimate:
        return MemoryEstimate.of(self.timeline, self.micro_batch, self.update, allocator)

    def of_items(self, items: int) -> "WatchedStep":
        """Returns the step on `items` items of the target's largest batch, from one on a prime number of items.

        Sizes that the prime divides grow with the items, because it divides no dimension of a weight, and is larger
        than most other sizes, such as the number of frames.
        """
        prime = self.items

        def scaled(size: float, items: int = items) -> float:
            return size if size % prime else size / prime * items

        def scaled_operator(operator: Operator) -> Operator:
            reads, writes = (
                {number: scaled(size) for number, size in each.items()} for each in (operator.reads, operator.writes)
            )
            tiles = operator.tiles / prime * items if writes != operator.writes else operator.tiles
            return replace(operator, reads=reads, writes=writes, flops=scaled(operator.flops), tiles=tiles)

        def scaled_event(event: StorageEvent) -> StorageEvent:
            grown = scaled(event.bytes - event.weights, self.batch_items if event.storage in self.batch else items)
            return StorageEvent(event.storage, event.weights + round(grown))

        timeline = MemoryTimeline([scaled_event(event) for event in self.timeline.events], self.timeline.kinds)
        return replace(self, timeline=timeline, micro_batch=[scaled_operator(each) for each in self.micro_batch])


def watch_step(
    target: PlanTarget,
    runtime: Runtime,
    timeline: MemoryTimeline,
    items: int,
    checkpointing: bool = False,
    gradients_resident: bool = True,
    prime: bool = False,
) -> WatchedStep:
    """Runs a step of the target on one micro-batch of `items` items, or with `prime` of the next prime number of them
    that divides no dimension of a weight, and notes its storages and operators.

    The tensors are those of the runtime: fake ones, or real ones.
    """
    resident = ResidentStep.of(target, runtime, checkpointing, items, prime)
    recipe, log = resident.recipe, timeline.log
    micro_batch = resident.micro_batch(items) if not prime else resident.batch
    timeline.note("optimizer", optimizer_tensors(recipe))
    timeline.note("parameters", weights_of(recipe))
    known = len(timeline.kinds)
    timeline.note("parameters", batch_tensors(resident.batch))
    batch, begin = range(known, len(timeline.kinds)), len(timeline.events)
    computed: list[Operator] = []
    update: list[Operator] = []
    for group in recipe.step_groups:
        if gradients_resident:
            for phase in group.phases:
                allocate_gradients(phase)
            # No list of them is kept, which would hold the gradients beyond the group's step.
            timeline.note("gradients", (parameter.grad for parameter in group.parameters()))
            log.note_gradients(parameter.grad for parameter in group.parameters())
        with timeline.watching():
            gradients(resident.state, group, micro_batch, 1, resident.step)
        timeline.note("gradients", (parameter.grad for parameter in group.parameters()))
        computed += log.drain()
        if target.model_name:  # What a recipe of ours leaves out of a step trains in another one.
            timeline.forget(drop_unused(group, log))
        with timeline.watching():
            for phase in group.phases:
                prepare_optimizer(resident.state, phase, 0.0)
                phase.optimizer.step()
        update += log.drain()
        drop_gradients(group)
    with timeline.watching():
        recipe.average(resident.step)
    timeline.repeat(begin)
    watched = recipe.size(micro_batch)
    return WatchedStep(timeline, computed, update + log.drain(), watched, batch, resident.batch_items)


@dataclass(frozen=True)
class ResidentStep:
    """The step that takes the most memory, with weights, averages, optimizer state and batch, but without gradients."""

    state: TrainState
    batch: Batch
    step: int
    batch_items: int  # Items of the target's largest batch.

    @classmethod
    def of(
        cls, target: PlanTarget, runtime: Runtime, checkpointing: bool, items: int = 1, prime: bool = False
    ) -> "ResidentStep":
        """Returns the step on the target's largest batch, or on one of `items` items if that is more; with `prime` on
        the next prime number of them that divides no dimension of a weight."""
        recipe = target.build(runtime, checkpointing)
        step = recipe.peak_memory_step(0)
        batch = recipe.prepare(target.load(), step)
        batch_items = recipe.size(batch)
        if prime:
            sizes = {size for weight in weights_of(recipe) for size in weight.shape}
            items = next(number for number in primes_from(items) if all(size % number for size in sizes))
        if prime or batch_items < items:
            batch = recipe.prepare(target.load(items), step)
        for phase in phases_of(recipe):
            allocate_gradients(phase)
            phase.optimizer.step()  # It allocates the optimizer's state.
            phase.optimizer.zero_grad(set_to_none=True)
        return cls(TrainState.for_measurement(recipe, runtime), batch, step, batch_items)

    @property
    def recipe(self) -> Recipe:
        return self.state.recipe

    def micro_batch(self, items: int) -> Batch:
        """Returns the first micro-batch of at most `items` items."""
        return self.recipe.split(self.batch, math.ceil(self.recipe.size(self.batch) / items))[0]


def primes_from(least: int) -> Iterator[int]:
    return (n for n in itertools.count(least) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))


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


def drop_unused(group: StepGroup, log: OperatorLog) -> list[Tensor]:
    """Drops gradients and optimizer state of parameters that had no part in a step. Returns these tensors, none of
    which a training has."""
    dropped: list[Tensor] = []
    for phase in group.phases:
        for parameter in phase.trained_parameters():
            gradient = parameter.grad
            if gradient is None or log.is_untouched(gradient):
                state = phase.optimizer.state.pop(parameter, {})
                dropped += [tensor for tensor in (gradient, *state.values()) if isinstance(tensor, Tensor)]
                parameter.grad = None
    return dropped


def step_flops(target: PlanTarget, step: int, items: int = 0) -> int:
    """Returns the FLOPs of a step on `items` items (0: the whole batch), forward and backward of every group.

    They are counted on fake tensors, without those that checkpointing repeats.
    """
    with on_fake_tensors():
        plan = decide(Machine(system="", cpu_cores=1), Hardware(device="cpu"))
        runtime = FakeRuntime(plan, MemoryTimeline())
        recipe = target.build(runtime, False)
        state = TrainState.for_measurement(recipe, runtime)
        batch = recipe.prepare(target.load(items) if items else target.load(), step)
        with FlopCount() as counted:
            for group in recipe.step_groups:
                gradients(state, group, batch, 1, step)
        return int(counted.flops)


def memory_models(target: PlanTarget, plan: Plan, most: int) -> Callable[[bool], MemoryModel]:
    """Returns a function that gives the memory model with or without checkpointing, for micro-batches of up to `most`
    items. Each of the two is predicted when it is first asked for."""
    most = max(2, most)

    @functools.cache
    def memory_model(checkpointing: bool) -> MemoryModel:
        one, more = predict_steps(target, plan, (1, most), checkpointing)
        return memory_model_of(one, more, most, grows=_grows(plan))

    return memory_model


def memory_model_of(
    one: MemoryEstimate, more: MemoryEstimate, items: int, *, grows: bool, first: int = 1
) -> MemoryModel:
    """Returns the line through a micro-batch of one item, or of `first`, and one of `items`. `grows`: the allocator's
    segments can grow, so that it holds nothing beyond its tensors."""
    flops = (more.flops - one.flops) / (items - first)
    cost = StepCost(one.micro_batch, more.micro_batch, items, one.update, first)
    # Elementwise work alone says nothing about the rate of a step.
    known = cost if flops and one.micro_batch else None
    cached_gb = 0.0 if grows else more.reserved_gb - more.allocated_gb
    return MemoryModel.through(one.parts, more.parts, flops, known, items=items, cached_gb=cached_gb, first=first)


def least_gb(target: PlanTarget, plan: Plan, checkpointing: bool) -> float:
    one = predict_step(target, plan, micro_batch_size=1, checkpointing=checkpointing)
    return one.allocated_gb if _grows(plan) else one.reserved_gb


def prediction_key(plan: Plan) -> tuple[object, ...]:
    """Returns the settings of a plan that a prediction depends on. GPUs that agree in them share predictions."""
    bf16_products = plan.tf32.value or plan.precision.value == "bf16"  # FakeRuntime.product_dtype
    switches = (plan.device, plan.compile, plan.cuda_graphs, plan.channels_last, plan.expandable_segments)
    return (plan.precision.value, bool(bf16_products), *(setting.value for setting in switches))


def _allocator(plan: Plan, caching: bool | None) -> PlainAllocator | CachingAllocator:
    if plan.device.value != "cuda" if caching is None else not caching:
        return PlainAllocator()
    return CachingAllocator(expandable=bool(plan.expandable_segments.value))


def _grows(plan: Plan) -> bool:
    """Returns whether the allocator holds nothing beyond its tensors."""
    return bool(plan.expandable_segments.value) or plan.device.value == "cpu"


IF_NOT_ON_SHAPES = (
    "if it does with real tensors, run create_optimal_config on the machine with the GPU, where it measures a real "
    "step; else pass another batch or loss"
)


class DoesNotRun(UserError):
    """A model does not run on the batch, or not on fake tensors."""


@contextmanager
def explained(model_name: str = "", hint: str = IF_NOT_ON_SHAPES) -> Iterator[None]:
    """Turns errors of fake tensors into a UserError that names the operator and the module, and every error into one,
    with this hint, if the model is a user's. Running out of memory stays what it is."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        cause = error.args[0] if error.args else error
        raise UserError(
            f"the model needs values, not shapes alone: {cause}{module_at(error)}",
            hint="leave out inputs whose values the model chooses by, such as masks, or measure on the GPU",
        ) from None
    except UserError as error:
        raise UserError(f"{error.message}{module_at(error)}", hint=error.hint) from None
    except Exception as error:
        if not model_name or is_out_of_memory(error):
            raise
        kind = "KeyError: " if isinstance(error, KeyError) else ""  # Its message is the key alone.
        raise DoesNotRun(
            f"{model_name} does not run on such a batch: {kind}{first_line(error)}{module_at(error)}", hint=hint
        ) from error


def module_at(error: BaseException) -> str:
    """Returns the innermost module that the error passed through, in words; nothing if there is none."""
    held = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    passed = [module for module in held if isinstance(module, nn.Module)]
    if not passed:
        return ""
    names = (name for outer in passed for name, module in outer.named_modules() if module is passed[-1])
    return f" (in {next(names) or 'the model'}, a {type(passed[-1]).__name__})"
