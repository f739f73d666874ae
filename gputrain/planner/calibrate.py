"""Calibration: a step's peak memory measured on the card at hand, and the batch chosen anew by it.

A child process builds the real recipe and goes through a micro-batch of one item and one of the size that the plan has
predicted to fit, with all resident that stays from step to step. What they took gives a line in place of the predicted
one, and the plan is made again by that line, until the micro-batch it comes to has itself been tried: without the
allocator having had to give back memory and try again. Most often the first trial confirms the prediction.

The child's peak memory, its compiled code and its CUDA context end with it. Probes are kept in the user's cache folder.
GB is 1e9 bytes.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gputrain import __version__, config
from gputrain.bench.runner import NotMeasured, Row, Settings, measure_row
from gputrain.engine.plan_file import write_text
from gputrain.engine.recipe import Batch, Recipe, StepGroup, phases_of
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.engine.train import drop_gradients, gradients
from gputrain.hw.plan import Plan, workers
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import Runtime, apply, cache_folder, is_out_of_memory, release_memory
from gputrain.planner import planning
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.microbatch import Fit, MemoryBudget, MemoryModel
from gputrain.planner.planning import (
    Planner,
    PlanTarget,
    S,
    make_gradients,
    modules_of,
    plan_step,
    planned,
    tell_setting,
)

log = logging.getLogger(__name__)

MARGIN = 1.02  # by which a measured need may be exceeded: a run holds the next batch too, and its memory has holes
SECONDS = 30.0  # for all probes together
COMPILING_SECONDS = 300.0  # beside them, where the model is compiled; the run finds the code again


@dataclass(frozen=True)
class Probe:
    """A micro-batch that was tried: the peak over all phases."""

    items: int
    checkpointing: bool
    allocated_gb: float
    reserved_gb: float  # what the allocator held for it
    budget_gb: float  # that it had
    fits: bool  # within it, without the allocator having had to give memory back and try again

    def says_of(self, budget_gb: float) -> bool:
        """Whether it also tells what becomes of its micro-batch under another budget."""
        return self.reserved_gb <= budget_gb if self.fits else budget_gb <= self.budget_gb


# Tries micro-batches of these sizes, with or without checkpointing, in so many seconds. Raises NotMeasured.
Measure = Callable[[list[int], bool, float], list[Probe]]


# ------------------------------------------------------------------------------------------------- decision


@dataclass
class Calibration:
    """What was tried on a card, and the footprints that follow from it."""

    predicted: Callable[[bool], MemoryModel]
    plan: Plan
    budget: MemoryBudget  # with the margin of a prediction
    probes: list[Probe] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""  # why it was given up

    @property
    def measured_room(self) -> MemoryBudget:
        """With the margin of a measurement, once there is one."""
        return replace(self.budget, margin=MARGIN) if self.probes and not self.failure else self.budget

    def tried(self, checkpointing: bool) -> dict[int, float]:
        """GB by items. What did not fit takes the whole budget, or more."""
        counted = {}
        for probe in self.probes:
            if probe.checkpointing == checkpointing and probe.says_of(self.budget.budget_gb):
                gb = probe.allocated_gb if self.plan.expandable_segments.value else probe.reserved_gb
                counted[probe.items] = gb if probe.fits else max(gb, self.budget.budget_gb)
        return dict(sorted(counted.items()))

    def memory_model(self, checkpointing: bool) -> MemoryModel:
        """The steepest line from the smallest micro-batch that was tried to any other: of those that fit, measured; to
        one that did not, the least it can be. Where it is off the prediction, the difference counts as workspace."""
        predicted, tried = self.predicted(checkpointing), self.tried(checkpointing)
        if not tried:
            return predicted
        least = min(tried)
        slopes = [(gb - tried[least]) / (items - least) for items, gb in tried.items() if items > least]
        if slopes:
            factor = max(slopes) / (predicted.peak_gb(1) - predicted.peak_gb(0))
        else:
            factor = tried[least] / predicted.peak_gb(least)
        item = {kind: gb * factor for kind, gb in predicted.item.items()}
        missing = tried[least] - sum(item.values()) * least - sum(predicted.fixed.values())
        fixed = {**predicted.fixed, "workspace": predicted.fixed["workspace"] + missing}
        return replace(predicted, fixed=fixed, item=item)

    def factor(self, items: int, checkpointing: bool) -> float:
        """Measured by predicted peak of a micro-batch; 1 where nothing was measured."""
        return self.memory_model(checkpointing).peak_gb(items) / self.predicted(checkpointing).peak_gb(items)

    def to_json(self) -> dict[str, Any]:
        failure = {"failure": self.failure} if self.failure else {}
        return {"probes": [vars(probe) for probe in self.probes], "seconds": self.seconds, **failure}


def choose(
    settings: S,
    run: Run,
    runtime: Runtime,
    machine: Machine,
    planner: Planner[S],
    calibrated: Callable[[S, Plan, MemoryBudget, Any, Machine], tuple[Plan, Fit, "Calibration"]],
    item_seconds: float,
) -> S:
    """Plan a training, by measuring where that can be, say so, and return its settings with what was chosen; the plan
    in effect gets it too.

    `calibrated` is the model's own; `item_seconds` are those of a core that a data worker needs for an item. Raises
    UserError where it does not fit.
    """
    wishes = settings.hardware
    space = planning.memory_budget(machine, runtime.plan, wishes, runtime.product_rate)
    plan, found = planner.plan(settings, runtime.plan, space)
    measured: dict[str, Any] = {}
    if runtime.device.type == "cuda" and wishes.calibrate and not settings.schedule.micro_batch_size:
        plan, found, calibration = calibrated(settings, runtime.plan, space, planner, machine)
        measured = {"calibration": calibration.to_json()}
    planner.settle(settings, plan, space, found)
    items_per_second = runtime.product_rate / found.item_flops
    processes = workers(machine, wishes.num_workers, item_seconds=item_seconds, items_per_second=items_per_second)
    runtime.plan = replace(plan, num_workers=processes)
    run.prediction = {**found.to_json(), **measured}
    for name in (*found.settings, "memory_budget_gb", "num_workers"):
        tell_setting(name, runtime.plan.settings[name])
    return planned(settings, runtime.plan)


def calibrated(
    settings: S,
    plan: Plan,
    budget: MemoryBudget,
    planner: Planner[S],
    machine: Machine,
    *,
    child: Sequence[str],
    facts: Settings,
    further: Settings | None = None,
) -> tuple[Plan, Fit, Calibration]:
    """The plan of a training with the settings of its batch, chosen by what is measured here, or known of this machine.

    `child` is a command whose program answers with `try_sizes`, and is given the settings as "train" and what is
    `further`; `facts` are what the memory of a step depends on beside the plan and checkpointing. Takes half a minute,
    and minutes more where code has to be compiled. What fails in it is a warning.
    """
    cache = Cache.of(machine, plan, facts)
    known = cache.load()
    calibration = Calibration(planner.memory_model(settings, plan), plan, budget, list(known))
    told = {"train": config.flatten(settings), **(further or {})}
    measure = functools.partial(measure_in_child, child, plan, budget.budget_gb, told)
    found = calibrate(calibration, settings.schedule, settings.model.gradient_checkpointing, measure)
    if calibration.probes != known:
        cache.save(calibration.probes)
    return calibration.plan, found, calibration


def calibrate(calibration: Calibration, schedule: Schedule, checkpointing: bool | None, measure: Measure) -> Fit:
    """Plan a step by what is measured, and measure what is planned, until they agree.

    `calibration` holds what is known already, and gathers what is found; its plan gets the settings of the batch.
    `checkpointing` is the user's wish (None: none). Where `measure` fails, that is a warning, and the prediction with
    its margin stands, corrected by what has been measured before.
    """
    began = time.monotonic()
    limit = SECONDS + (COMPILING_SECONDS if calibration.plan.compile.value else 0.0)
    while True:
        calibration.plan, found = plan_step(
            calibration.plan, calibration.measured_room, schedule, calibration.memory_model, checkpointing
        )
        known = calibration.tried(found.checkpointing)
        if calibration.failure:
            return found
        if found.micro_batch_size in known:
            factor = calibration.factor(found.micro_batch_size, found.checkpointing)
            log.info("measured peak %.2f GB, %.3f of what was predicted", found.predicted_peak_gb, factor)
            return found
        sizes = sorted({1, found.micro_batch_size} - known.keys())
        try:
            calibration.probes += measure(sizes, found.checkpointing, began + limit - time.monotonic())
        except NotMeasured as failure:
            calibration.failure = str(failure)
            log.warning("the memory of a step could not be measured (%s); the prediction stands", failure)
        calibration.seconds = time.monotonic() - began


def measure_in_child(
    child: Sequence[str], plan: Plan, budget_gb: float, settings: Settings, sizes: list[int], checkpointing: bool,
    seconds: float,
) -> list[Probe]:  # fmt: skip
    """Probes made by a process of their own, whose program hands `settings` on to `try_sizes`. Raises NotMeasured."""
    if seconds <= 0:
        raise NotMeasured("no time was left")
    first_time = "; compiling takes minutes the first time" if plan.compile.value else ""
    log.info("measuring the memory of a step with %s at once%s", " and ".join(map(str, sizes)), first_time)
    release_memory()
    asked = {
        **settings, "device": plan.device.value, "plan": plan.to_json(), "budget_gb": budget_gb,
        "sizes": sizes, "checkpointing": checkpointing,
    }  # fmt: skip
    result = measure_row(Row("calibration", asked), child, seconds / 60)
    if result.reason:
        raise NotMeasured(result.reason)
    return [Probe(**probe) for probe in result.figures["probes"]]


# --------------------------------------------------------------------------------------------------- child


def try_sizes(target: PlanTarget, settings: Settings) -> dict[str, Any]:
    """In the child: the probes that `measure_in_child` has asked for. Raises NotMeasured where not one item fits."""
    plan, budget_gb, checkpointing = Plan.from_json(settings["plan"]), settings["budget_gb"], settings["checkpointing"]
    runtime = apply(plan)
    runtime.limit_memory(budget_gb)
    resident = Resident.of(target, runtime, checkpointing)
    probes = []
    for items in settings["sizes"]:
        peak = resident.peak(items)
        fits = peak.complete and not peak.retries and peak.reserved_gb <= budget_gb
        probes.append(Probe(items, checkpointing, peak.allocated_gb, peak.reserved_gb, budget_gb, fits))
        if items == 1 and not fits:
            raise NotMeasured(f"a single item does not fit {budget_gb:.1f} GB")
    return {"probes": [vars(probe) for probe in probes]}


@dataclass
class Peak:
    """Of the memory that tensors took; `reserved_gb`: that the allocator held for them."""

    allocated_gb: float = 0.0
    reserved_gb: float = 0.0
    retries: int = 0  # times that the allocator had to give back what it kept before it found room
    complete: bool = True  # False: memory ran out


@dataclass(frozen=True)
class Resident:
    """A training with all on the device that stays from step to step, but no gradients yet."""

    state: TrainState
    batch: Batch
    step: int

    @classmethod
    def of(cls, target: PlanTarget, runtime: Runtime, checkpointing: bool) -> "Resident":
        recipe = target.build(runtime, checkpointing)
        step = recipe.peak_memory_step(0)
        batch = recipe.prepare(target.load(), step)
        for phase in phases_of(recipe):
            make_gradients(phase)
            phase.optimizer.step()  # makes its state
            phase.optimizer.zero_grad(set_to_none=True)
        return cls(TrainState.for_measurement(recipe, runtime), batch, step)

    def peak(self, items: int) -> Peak:
        """Of a micro-batch through every phase."""
        recipe, found = self.state.recipe, Peak()
        part = recipe.split(self.batch, math.ceil(recipe.size(self.batch) / items))[0]
        try:
            for group in recipe.step_groups:
                self._go_through(group, part, found)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found.complete = False
        for group in recipe.step_groups:  # This is outside the except block, whose traceback keeps tensors alive.
            drop_gradients(group)
        release_memory()
        return found

    def _go_through(self, group: StepGroup, part: Batch, found: Peak) -> None:
        for phase in group.phases:
            make_gradients(phase)
        if self.state.runtime.device.type == "cuda":
            # What compiling takes, and the search for the fastest convolutions, is not the step's.
            gradients(self.state, group, [part], self.step)
        with metered(self.state.runtime.device, found, standing(self.state.recipe, self.batch)):
            gradients(self.state, group, [part], self.step)
        drop_gradients(group)


@contextmanager
def metered(device: torch.device, found: Peak, resident: Sequence[Tensor] = ()) -> Iterator[None]:
    """Raise `found` to the peak of what runs within. On the CPU every storage is watched, those of `resident` too,
    which are there already: what a GPU's allocator would count."""
    if device.type == "cuda":
        del resident
        release_memory()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)["num_alloc_retries"]
        yield
        torch.cuda.synchronize(device)
        allocated_gb = torch.cuda.max_memory_allocated(device) / 1e9
        reserved_gb = torch.cuda.max_memory_reserved(device) / 1e9
        found.retries += torch.cuda.memory_stats(device)["num_alloc_retries"] - before
    else:
        timeline = MemoryTimeline()
        timeline.note("parameters", resident)
        del resident  # or what goes on the way would stay
        with timeline.watching():
            yield
        allocated_gb = reserved_gb = timeline.peak()[0] / 1e9
    found.allocated_gb = max(found.allocated_gb, allocated_gb)
    found.reserved_gb = max(found.reserved_gb, reserved_gb)


def standing(recipe: Recipe, batch: Batch) -> list[Tensor]:
    """Every tensor of a recipe: of all its modules, those that nothing trains too, of its optimizers and the batch."""
    weights = [tensor for module in modules_of(recipe) for tensor in (*module.parameters(), *module.buffers())]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    states = [state for phase in phases_of(recipe) for state in phase.optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    parts = [value for value in tree_leaves(vars(batch)) if isinstance(value, Tensor)]
    return [*weights, *gradients, *moments, *parts]


# --------------------------------------------------------------------------------------------------- cache


@dataclass(frozen=True)
class Cache:
    """Probes of a training on this machine, in a file of the user's cache folder."""

    key: dict[str, Any]  # all that the memory of a step depends on
    folder: Path

    @classmethod
    def of(cls, machine: Machine, plan: Plan, facts: Settings) -> "Cache":
        """`facts`: the model's settings that matter, in values that JSON knows. The budget is not among them: a probe
        knows what it tells of another."""
        switches = ("device", "precision", "compile", "tf32", "channels_last", "cudnn_benchmark", "expandable_segments")
        key = {
            "gpu": machine.gpu or "cpu", "memory_gb": round(machine.gpu_memory_gb, 1),
            "driver": machine.driver.version, "torch": machine.torch, "gputrain": __version__,
            "plan": {name: getattr(plan, name).value for name in switches}, **facts,
        }  # fmt: skip
        return cls(json.loads(json.dumps(key)), cache_folder() / "calibration")

    @functools.cached_property
    def path(self) -> Path:
        text = json.dumps(self.key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def load(self) -> list[Probe]:
        """What is known; nothing, where there is no file or a damaged one."""
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            return [_probe(values) for values in told["probes"]] if told["key"] == self.key else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def save(self, probes: Sequence[Probe]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"key": self.key, "probes": [vars(probe) for probe in probes]}, indent=2))
        except OSError as error:
            log.warning("%s cannot be written (%s): the next run will measure again", self.path, error.strerror)


def _probe(values: dict[str, Any]) -> Probe:
    """Raises TypeError where they are not those of a probe."""
    kinds = {part.name: part.type for part in dataclasses.fields(Probe)}
    probe = Probe(**values)
    if not all(isinstance(values[name], kind) for name, kind in kinds.items() if isinstance(kind, type)):
        raise TypeError("not a probe")
    return probe
