"""The memory and the arithmetic of a recipe's step, predicted on fake tensors.

GB is 1e9 bytes.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import replace

from gputrain.engine.recipe import phases_of
from gputrain.engine.state import TrainState
from gputrain.engine.step import drop_gradients, gradients, prepare_optimizer
from gputrain.hw.plan import Hardware, Plan, decide
from gputrain.hw.probe import Machine
from gputrain.planner.allocator import CachingAllocator, PlainAllocator
from gputrain.planner.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.flops import FlopCount
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.microbatch import MemoryModel
from gputrain.planner.operators import Operator
from gputrain.planner.predict import MemoryEstimate, explained
from gputrain.planner.resident import ResidentStep, allocate_gradients, batch_tensors, optimizer_tensors, weights_of
from gputrain.planner.roofline import StepCost
from gputrain.planner.work import PlanTarget


def predict_step(
    target: PlanTarget, plan: Plan, *, micro_batch_size: int, checkpointing: bool = False
) -> MemoryEstimate:
    """Returns the memory of one micro-batch of a step.

    The real phases run on fake tensors. Everything that stays from step to step is in memory: weights, averages,
    optimizer state, the whole batch, and in each group its gradients, as in the second micro-batch of a real step.
    Raises UserError if an operator needs values, and names it.
    """
    began = time.perf_counter()
    timeline = MemoryTimeline.on(str(plan.device.value))
    with on_fake_tensors(), explained():
        resident = ResidentStep.of(target, FakeRuntime(plan, timeline), checkpointing, micro_batch_size)
        recipe, micro_batch = resident.recipe, resident.micro_batch(micro_batch_size)
        timeline.note("optimizer", optimizer_tensors(recipe))
        timeline.note("parameters", weights_of(recipe), batch_tensors(resident.batch))
        for group in recipe.step_groups:
            for phase in group.phases:
                allocate_gradients(phase)
                timeline.note("gradients", (p.grad for p in phase.parameters()))
                timeline.log.note_gradients(p.grad for p in phase.parameters())
            first = len(timeline.log.operators)
            with timeline.watching():
                resident.add_gradients(group, micro_batch)
            if group.fixed is not None:
                timeline.log.note_graph(first)
            drop_gradients(group)
        update = _update(resident)
    on_cpu, expandable = plan.device.value == "cpu", bool(plan.expandable_segments.value)
    allocator = PlainAllocator() if on_cpu else CachingAllocator(expandable=expandable)
    seconds = time.perf_counter() - began
    found = MemoryEstimate.of(timeline, timeline.log.operators, update, seconds, allocator)
    groups = sum(group.fixed is not None for group in recipe.step_groups)
    # A step copies its batch; of each group, a graph is launched and its sums are copied by one kernel.
    return replace(found, graph_launches=len(batch_tensors(resident.batch)) + 2 * groups if groups else 0)


def _update(resident: ResidentStep) -> list[Operator]:
    """Returns the operators that follow the gradients of a step: clipping, the optimizers' steps, and averages."""
    timeline = MemoryTimeline()

    for phase in phases_of(resident.recipe):
        allocate_gradients(phase)
        with timeline.watching():
            prepare_optimizer(resident.state, phase, 0.0)
            phase.optimizer.step()
        phase.optimizer.zero_grad(set_to_none=True)
    with timeline.watching():
        resident.recipe.average(resident.step)
    return timeline.log.operators


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
        one, more = (
            predict_step(target, plan, micro_batch_size=items, checkpointing=checkpointing) for items in (1, most)
        )
        flops = (more.flops - one.flops) / (most - 1)
        cost = StepCost(one.micro_batch, more.micro_batch, most, one.update, more.graph_launches)
        return MemoryModel.through(one.parts, more.parts, flops, cost, items=most, cached_gb=_cached_gb(more, plan))

    return memory_model


def least_gb(target: PlanTarget, plan: Plan, checkpointing: bool) -> float:
    one = predict_step(target, plan, micro_batch_size=1, checkpointing=checkpointing)
    return one.allocated_gb + _cached_gb(one, plan)


def prediction_key(plan: Plan) -> tuple[object, ...]:
    """Returns the settings of a plan that a prediction depends on. GPUs that agree in them share predictions."""
    sixteen_bit = plan.precision.value != "fp32"
    switches = (plan.device, plan.compile, plan.channels_last, plan.expandable_segments)
    return (sixteen_bit, *(setting.value for setting in switches))


def _cached_gb(estimate: MemoryEstimate, plan: Plan) -> float:
    """Returns the memory that the allocator holds beyond its tensors if its segments cannot grow."""
    grows = plan.expandable_segments.value or plan.device.value == "cpu"
    return 0.0 if grows else estimate.reserved_gb - estimate.allocated_gb
