"""What a recipe's step takes, predicted on shapes, and how it goes through the device: its plan."""

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gputrain.engine.recipe import Phase, Recipe, phases_of
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.engine.train import drop_gradients, gradients
from gputrain.errors import UserError
from gputrain.hw.gpus import smallest_gpu
from gputrain.hw.plan import Cards, Hardware, Plan, Setting, decide, fit_shared_memory
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.allocator import CachingAllocator, PlainAllocator
from gputrain.planner.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.flops import FlopCount
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.microbatch import BUDGET_SHARE, Fit, MemoryBudget, MemoryModel, budget_gb, fit
from gputrain.planner.predict import MemoryEstimate, explained
from gputrain.planner.target import target_machines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanTarget:
    """A training to plan: how its recipe is made, with or without checkpointing, and its largest batch."""

    build: Callable[[Runtime, bool], Recipe]
    load: Callable[..., Any]  # the whole batch as the data loader gives it, or one of so many items


def predict_step(
    target: PlanTarget, plan: Plan, *, micro_batch_size: int, checkpointing: bool = False
) -> MemoryEstimate:
    """What one micro-batch of a step takes.

    Its real phases run on tensors without memory. All that stays from step to step is there: weights, averages,
    optimizer state, the whole batch, and in each phase its gradients, as in the second micro-batch of a real step.
    Raises UserError where an operator needs values, naming it.
    """
    began = time.perf_counter()
    timeline = MemoryTimeline()
    flops = 0
    with on_fake_tensors(), explained():
        runtime = FakeRuntime(plan, timeline)
        recipe = target.build(runtime, checkpointing)
        state = TrainState.for_measurement(recipe, runtime)
        step = recipe.peak_memory_step(0)
        batch = recipe.prepare(target.load(), step)
        if recipe.size(batch) < micro_batch_size:  # a step on one item has no parts of two, but a line needs them
            batch = recipe.prepare(target.load(micro_batch_size), step)
        part = recipe.split(batch, math.ceil(recipe.size(batch) / micro_batch_size))[0]
        for phase in phases_of(recipe):
            make_gradients(phase)
            phase.optimizer.step()  # makes its state
            phase.optimizer.zero_grad(set_to_none=True)
            timeline.note("optimizer", *(state.values() for state in phase.optimizer.state.values()))
        weights = ([*module.parameters(), *module.buffers()] for module in modules_of(recipe))
        timeline.note("parameters", *weights, tree_leaves(vars(batch)))
        for group in recipe.step_groups:
            for phase in group.phases:
                make_gradients(phase)
                timeline.note("gradients", (p.grad for p in phase.parameters()))
            with FlopCount() as count, timeline.watching():
                gradients(state, group, [part], step)
            flops += count.total
            drop_gradients(group)
    on_cpu, expandable = plan.device.value == "cpu", bool(plan.expandable_segments.value)
    allocator = PlainAllocator() if on_cpu else CachingAllocator(expandable=expandable)
    return MemoryEstimate.of(timeline, flops, timeline.kernels, time.perf_counter() - began, allocator)


def step_flops(target: PlanTarget, step: int, items: int = 0) -> int:
    """FLOPs of a step on `items` (0: the whole batch): forward and backward of every phase, counted on shapes.

    What checkpointing computes again is not counted.
    """
    with on_fake_tensors():
        runtime = apply(decide(Machine(system="", cpu_cores=1), Hardware(device="cpu")))
        recipe = target.build(runtime, False)
        state = TrainState.for_measurement(recipe, runtime)
        batch = recipe.prepare(target.load(items) if items else target.load(), step)
        total = 0
        for group in recipe.step_groups:
            with FlopCount() as count:
                gradients(state, group, [batch], step)
            total += count.total
    return total


def modules_of(recipe: Recipe) -> list[nn.Module]:
    """All that a recipe holds, those that nothing trains and no checkpoint keeps too."""
    return [*recipe.modules.values(), *(held for held in vars(recipe).values() if isinstance(held, nn.Module))]


def make_gradients(phase: Phase) -> None:
    for parameter in phase.parameters():
        parameter.grad = torch.zeros_like(parameter)  # in its own layout, as autograd makes it


def memory_models(target: PlanTarget, plan: Plan, most: int) -> Callable[[bool], MemoryModel]:
    """The footprint with and without checkpointing of up to `most` items at once, each predicted when it is first asked
    for."""
    most = max(2, most)

    @functools.cache
    def memory_model(checkpointing: bool) -> MemoryModel:
        one, more = (
            predict_step(target, plan, micro_batch_size=items, checkpointing=checkpointing) for items in (1, most)
        )
        flops = (more.flops - one.flops) / (most - 1)
        return MemoryModel.through(
            one.parts, more.parts, flops, one.kernels, items=most, cached_gb=_cached_gb(more, plan)
        )  # fmt: skip

    return memory_model


def least_gb(target: PlanTarget, plan: Plan, checkpointing: bool) -> float:
    """The peak with one item at once."""
    one = predict_step(target, plan, micro_batch_size=1, checkpointing=checkpointing)
    return one.allocated_gb + _cached_gb(one, plan)


def arithmetic(plan: Plan) -> tuple[object, ...]:
    """What of a plan a prediction depends on: cards that agree in it share one."""
    sixteen = plan.precision.value != "fp32"
    switches = (plan.device, plan.compile, plan.channels_last, plan.expandable_segments)
    return (sixteen, *(setting.value for setting in switches))


def _cached_gb(estimate: MemoryEstimate, plan: Plan) -> float:
    """What the allocator holds beyond its tensors, where its segments cannot grow."""
    grows = plan.expandable_segments.value or plan.device.value == "cpu"
    return 0.0 if grows else estimate.reserved_gb - estimate.allocated_gb


def memory_budget(machine: Machine, plan: Plan, wishes: Hardware, flops_per_second: float | None) -> MemoryBudget:
    """What the device of the plan offers. A CPU's rate is no matter: it is at work with any micro-batch."""
    if plan.device.value == "cuda":
        total_gb, free_gb = machine.gpu_memory_gb, machine.gpu_free_gb
    else:
        total_gb, free_gb, flops_per_second = machine.ram_gb, machine.ram_free_gb, None
    if not total_gb:
        return MemoryBudget(wishes.memory_budget or math.inf, flops_per_second)
    return MemoryBudget(budget_gb(total_gb, free_gb, wishes.memory_budget), flops_per_second)


def plan_step(
    plan: Plan,
    budget: MemoryBudget,
    schedule: Schedule,
    memory_model: Callable[[bool], MemoryModel],
    checkpointing: bool | None,
) -> tuple[Plan, Fit]:
    """The plan with the settings of its batch, and what they come to."""
    found = fit(
        schedule.whole_batch,
        memory_model,
        budget,
        largest=schedule.batch_size,
        micro_batch_size=schedule.micro_batch_size,
        checkpointing=checkpointing,
    )
    return replace(plan, **found.settings, memory_budget_gb=_budget(budget)), found


class Trained(Protocol):
    """The settings of a train command, as far as its planning goes."""

    @property
    def model(self) -> Any: ...  # with gradient_checkpointing
    @property
    def schedule(self) -> Schedule: ...
    @property
    def hardware(self) -> Hardware: ...


S = TypeVar("S", bound=Trained)


@dataclass
class Planner(Generic[S]):
    """Plans trainings of one kind of model, for any card. Cards that compute alike share what was predicted."""

    item: ClassVar[str]  # what a batch is of
    fixed_shapes: ClassVar[bool] = True  # whether all batches are of one shape
    generator_is_1d: ClassVar[bool] = False  # whether only discriminators have 2-D convolutions
    fp32_because: ClassVar[str] = ""  # why 16 bit is taken only where the user asks for it; empty: by default
    known: dict[object, Callable[[bool], MemoryModel]] = field(default_factory=dict)

    @classmethod
    def decide(cls, machine: Machine, wishes: Hardware) -> Plan:
        """Settle the switches for this model."""
        return decide(
            machine,
            wishes,
            fixed_shapes=cls.fixed_shapes,
            generator_is_1d=cls.generator_is_1d,
            fp32_because=cls.fp32_because,
        )

    def target(self, settings: S) -> PlanTarget:
        raise NotImplementedError

    def key(self, settings: S) -> object:
        """What of the settings a prediction depends on."""
        raise NotImplementedError

    def remedies(self, settings: S, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        """What would make a training fit that does not as it was `found`, the least loss first."""
        raise NotImplementedError

    def memory_model(self, settings: S, plan: Plan) -> Callable[[bool], MemoryModel]:
        key = (self.key(settings), arithmetic(plan))
        if key not in self.known:
            self.known[key] = memory_models(self.target(settings), plan, settings.schedule.batch_size)
        return self.known[key]

    def plan(self, settings: S, plan: Plan, budget: MemoryBudget) -> tuple[Plan, Fit]:
        """The plan with the settings of the batch, and what they come to."""
        memory_model = self.memory_model(settings, plan)
        return plan_step(plan, budget, settings.schedule, memory_model, settings.model.gradient_checkpointing)

    def told(self, changes: Mapping[str, S], settings: S, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        """Those of the changed settings, by flag, that would fit, one for each option; and a card that would do."""
        told: dict[str, str] = {}
        for flag, changed in changes.items():
            option = flag.split()[0]
            if changed != settings and option not in told:
                checkpointing = changed.model.gradient_checkpointing is not False
                need_gb = least_gb(self.target(changed), plan, checkpointing)
                if need_gb * budget.margin <= budget.budget_gb:
                    told[option] = f"{flag} would take {need_gb:.1f} GB at the least"
        card = smallest_gpu(found.predicted_peak_gb * budget.margin / BUDGET_SHARE)
        larger = [f"a card of {card.memory_gb:g} GB, such as {card.key}, would do"] if card else []
        return [*told.values(), *larger]

    def settle(self, settings: S, plan: Plan, budget: MemoryBudget, found: Fit) -> None:
        """Say what was found. Raises UserError where it does not fit, unless it is what the user has asked for."""
        log.info("%s", found.in_words())
        if not found.fits:
            remedies = self.remedies(settings, plan, budget, found)
            if not settings.schedule.micro_batch_size:
                raise does_not_fit(self.item, found, remedies)
            log.warning("micro_batch_size %d is not predicted to fit; %s", found.micro_batch_size, "; ".join(remedies))

    def card_plans(self, cards: Cards, stages: Sequence[tuple[S, dict[str, Any]]]) -> list["CardPlan"]:
        """Every stage of a training, with what a reader wants beside it, for every card asked for."""
        made = []
        for machine_target in target_machines(cards):
            switches = self.decide(machine_target.machine, stages[0][0].hardware)
            memory_gb = (
                machine_target.machine.gpu_memory_gb
                if switches.device.value == "cuda"
                else machine_target.machine.ram_gb
            )
            for stage, told in stages:
                space = memory_budget(
                    machine_target.machine, switches, stage.hardware, machine_target.flops_per_second(switches)
                )
                plan, found = self.plan(stage, switches, space)
                remedies = [] if found.fits else self.remedies(stage, switches, space, found)
                made.append(CardPlan(machine_target.name, memory_gb, told, plan, found, remedies))
        return made


def planned(settings: S, plan: Plan) -> S:
    """The settings with what the plan has chosen."""
    if not (plan.micro_batch_size and plan.gradient_checkpointing):
        return settings
    chosen: Any = settings
    made: S = replace(
        chosen,
        model=replace(settings.model, gradient_checkpointing=bool(plan.gradient_checkpointing.value)),
        schedule=replace(settings.schedule, micro_batch_size=int(plan.micro_batch_size.value)),
    )
    return made


def _budget(budget: MemoryBudget) -> Setting:
    if math.isinf(budget.budget_gb):
        return Setting(0.0, "the memory of this machine is not known")
    return Setting(round(budget.budget_gb, 2), "of the memory, what training may take; the rest is the driver's")


def fit_workers(runtime: Runtime, machine: Machine, batch_bytes: int) -> None:
    """Have the batches of the plan's data workers fit into shared memory, and say so where that changes the plan."""
    before, runtime.plan = runtime.plan, fit_shared_memory(runtime.plan, machine, batch_bytes)
    for name in ("num_workers", "prefetch_factor"):
        if before.settings[name] != runtime.plan.settings[name]:
            tell_setting(name, runtime.plan.settings[name])


def tell_setting(name: str, setting: Setting) -> None:
    value = {True: "on", False: "off"}[setting.value] if isinstance(setting.value, bool) else setting.value
    cost = f"; costs {setting.cost}" if setting.cost else ""
    log.info("%s: %s (%s%s)", name, value, setting.reason, cost)


def tell_runtime(runtime: Runtime) -> None:
    """Say how this machine is used, and at what rate it computes."""
    for name, setting in runtime.plan.settings.items():
        tell_setting(name, setting)
    # Measured now, before the data workers take a part of the machine.
    rate = runtime.product_rate / 1e12
    log.info("peak: %.3g TFLOPS (a large matrix product in %s, measured)", rate, runtime.plan.precision.value)


def does_not_fit(item: str, found: Fit, remedies: list[str]) -> UserError:
    """The error for a training of which not even one item fits."""
    over_gb = found.predicted_peak_gb - found.budget_gb
    beyond = f"{over_gb:.1f} GB more than" if over_gb > 0 else "too near to"
    return UserError(
        f"a single {item} is predicted to take {found.predicted_peak_gb:.1f} GB, {beyond} the "
        f"{found.budget_gb:.1f} GB that training may take",
        hint="; ".join([*remedies, "--no-plan tries it nevertheless"]),
    )


@dataclass(frozen=True)
class CardPlan:
    """A stage of a training on a card."""

    gpu: str
    memory_gb: float
    stage: dict[str, Any]  # what of the training a reader wants beside it: size and batch
    plan: Plan
    fit: Fit
    remedies: list[str]  # where it does not fit: what would help

    def to_json(self) -> dict[str, Any]:
        figures = self.fit.to_json()
        del figures["item_flops"]
        return {
            "gpu": self.gpu,
            "memory_gb": self.memory_gb,
            **self.stage,
            **figures,
            "precision": self.plan.precision.value,
            "reasons": {name: setting.reason for name, setting in self.plan.settings.items()},
            "settings": {name: setting.value for name, setting in self.plan.settings.items()},
            "remedies": self.remedies,
        }
