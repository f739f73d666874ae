"""Calibration: a step's peak memory is measured on the GPU at hand, and the micro-batch is chosen by the measurement.

A child process (child.py) builds the real recipe and runs a micro-batch of one item and one of the size that is
predicted to fit, with everything in memory that stays from step to step. Their peaks give a line that replaces the
predicted one. The plan is made again by that line, until the micro-batch that it chooses has itself been measured,
without the allocator having had to release cached memory. Most often the first measurement confirms the prediction.

The child's peak memory, its compiled code and its CUDA context end with it. Probes are kept in the user's cache folder.
GB is 1e9 bytes.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gputrain import config
from gputrain.bench.runner import BenchRow, NotMeasured, Settings, measure_row, model_child
from gputrain.engine.schedule import Schedule
from gputrain.hw.plan import Plan
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply, release_memory
from gputrain.planner.calibration_cache import CalibrationCache, CalibrationProbe
from gputrain.planner.microbatch import Fit, MemoryBudget, MemoryModel
from gputrain.planner.model_planner import ModelPlanner, plan_step
from gputrain.planner.resident import ResidentStep
from gputrain.planner.spec import PlanTarget, S
from gputrain.stored import from_json

log = logging.getLogger(__name__)

MARGIN = 1.02  # Factor on a measured peak: a run also holds the next batch, and its memory is fragmented.
SECONDS = 30.0  # Time limit of all probes together.
COMPILING_SECONDS = 300.0  # Additional time if the model is compiled; the run reuses the compiled code.

# Measures micro-batches of these sizes, with or without checkpointing, within so many seconds. Raises NotMeasured.
Measure = Callable[[list[int], bool, float], list[CalibrationProbe]]


@dataclass
class Calibration:
    """The probes measured on a GPU, and the memory models that follow from them."""

    predicted: Callable[[bool], MemoryModel]
    plan: Plan
    budget: MemoryBudget  # Its margin is that of a prediction.
    probes: list[CalibrationProbe] = field(default_factory=list)
    seconds: float = 0.0
    failure: str = ""  # The reason why measuring stopped.

    @property
    def measured_budget(self) -> MemoryBudget:
        """The budget, with the margin of a measurement once there is one."""
        return replace(self.budget, margin=MARGIN) if self.probes and not self.failure else self.budget

    def measured_gb(self, checkpointing: bool) -> dict[int, float]:
        """Returns GB by items. A micro-batch that did not fit counts with the whole budget, or more."""
        counted = {}
        for probe in self.probes:
            if probe.checkpointing == checkpointing and probe.applies_to(self.budget.budget_gb):
                gb = probe.allocated_gb if self.plan.expandable_segments.value else probe.reserved_gb
                counted[probe.items] = gb if probe.fits else max(gb, self.budget.budget_gb)
        return dict(sorted(counted.items()))

    def memory_model(self, checkpointing: bool) -> MemoryModel:
        """Returns the steepest line from the smallest measured micro-batch to any other. One that did not fit counts
        with the least that it can take. The difference to the prediction counts as workspace."""
        predicted, measured = self.predicted(checkpointing), self.measured_gb(checkpointing)
        if not measured:
            return predicted
        least = min(measured)
        slopes = [(gb - measured[least]) / (items - least) for items, gb in measured.items() if items > least]
        if slopes:
            factor = max(slopes) / (predicted.peak_gb(1) - predicted.peak_gb(0))
        else:
            factor = measured[least] / predicted.peak_gb(least)
        item = {kind: gb * factor for kind, gb in predicted.item.items()}
        missing = measured[least] - sum(item.values()) * least - sum(predicted.fixed.values())
        fixed = {**predicted.fixed, "workspace": predicted.fixed["workspace"] + missing}
        return replace(predicted, fixed=fixed, item=item)

    def factor(self, items: int, checkpointing: bool) -> float:
        """Returns the measured peak divided by the predicted one; 1 if nothing was measured."""
        return self.memory_model(checkpointing).peak_gb(items) / self.predicted(checkpointing).peak_gb(items)

    def to_json(self) -> dict[str, Any]:
        failure = {"failure": self.failure} if self.failure else {}
        return {"probes": [vars(probe) for probe in self.probes], "seconds": self.seconds, **failure}


def calibrate_plan(
    settings: S, plan: Plan, budget: MemoryBudget, planner: ModelPlanner[S], machine: Machine
) -> tuple[Plan, Fit, Calibration]:
    """Returns the plan with the settings of the batch, chosen by measurements on this machine, new or from the cache.

    It takes half a minute, and minutes more if code has to be compiled. A failure is a warning.
    """
    spec = planner.spec
    cache = CalibrationCache.of(machine, plan, {**spec.memory_key(settings), **spec.data})
    known = cache.load()
    calibration = Calibration(planner.memory_model(settings, plan), plan, budget, list(known))
    task = {"train": config.flatten(settings), **spec.data}
    measure = functools.partial(measure_in_child, model_child(spec.kind), plan, budget.budget_gb, task)
    found = calibrate(calibration, settings.schedule, settings.model.gradient_checkpointing, measure)
    if calibration.probes != known:
        cache.save(calibration.probes)
    return calibration.plan, found, calibration


def calibrate(calibration: Calibration, schedule: Schedule, checkpointing: bool | None, measure: Measure) -> Fit:
    """Chooses a micro-batch by the measurements and measures it, until the two agree.

    `calibration` holds the known probes and collects the new ones; its plan gets the settings of the batch.
    `checkpointing` is the user's wish (None: none). If `measure` fails, a warning is logged, and the prediction holds
    with its margin, corrected by the probes so far.
    """
    began = time.monotonic()
    limit = SECONDS + (COMPILING_SECONDS if calibration.plan.compile.value else 0.0)
    while True:
        calibration.plan, found = plan_step(
            calibration.plan, calibration.measured_budget, schedule, calibration.memory_model, checkpointing
        )
        known = calibration.measured_gb(found.checkpointing)
        if calibration.failure:
            return found
        if found.micro_batch_size in known:
            factor = calibration.factor(found.micro_batch_size, found.checkpointing)
            log.info("measured peak %.2f GB, %.3f of the prediction", found.predicted_peak_gb, factor)
            return found
        sizes = sorted({1, found.micro_batch_size} - known.keys())
        try:
            calibration.probes += measure(sizes, found.checkpointing, began + limit - time.monotonic())
        except NotMeasured as failure:
            calibration.failure = str(failure)
            log.warning("the memory of a step could not be measured (%s); the prediction stands", failure)
        calibration.seconds = time.monotonic() - began


def measure_in_child(
    child: Sequence[str], plan: Plan, budget_gb: float, task: Settings, sizes: list[int], checkpointing: bool,
    seconds: float,
) -> list[CalibrationProbe]:  # fmt: skip
    """Returns the probes that a child process measures with `measure_sizes` for `task`. Raises NotMeasured."""
    if seconds <= 0:
        raise NotMeasured("no time was left")
    first_time = "; compiling takes minutes the first time" if plan.compile.value else ""
    log.info("measuring the memory of a step with %s at once%s", " and ".join(map(str, sizes)), first_time)
    release_memory()
    request = {
        **task, "device": plan.device.value, "plan": plan.to_json(), "budget_gb": budget_gb,
        "sizes": sizes, "checkpointing": checkpointing,
    }  # fmt: skip
    result = measure_row(BenchRow("calibration", request), child, seconds / 60)
    if result.reason:
        raise NotMeasured(result.reason)
    return [from_json(CalibrationProbe, probe) for probe in result.figures["probes"]]


def measure_sizes(target: PlanTarget, request: Settings) -> dict[str, Any]:
    """Runs in the child: measures the micro-batches of a request. Raises NotMeasured if a single item does not fit."""
    plan, budget_gb, checkpointing = from_json(Plan, request["plan"]), request["budget_gb"], request["checkpointing"]
    runtime = apply(plan)
    runtime.limit_memory(budget_gb)
    resident = ResidentStep.of(target, runtime, checkpointing)
    probes = []
    for items in request["sizes"]:
        peak = resident.measured_peak(items)
        fits = peak.complete and not peak.retries and peak.reserved_gb <= budget_gb
        probes.append(CalibrationProbe(items, checkpointing, peak.allocated_gb, peak.reserved_gb, budget_gb, fits))
        if items == 1 and not fits:
            raise NotMeasured(f"a single item does not fit {budget_gb:.1f} GB")
    return {"probes": [vars(probe) for probe in probes]}
