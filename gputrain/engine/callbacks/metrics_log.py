"""Metrics and warnings every few steps, and what a run does about unstable gradients and full memory.

Warnings are about trainings that go wrong or waste their machine, each with its remedy: a table of rules. Everything is
detected from what metrics.jsonl records anyway: the scalars of the steps, and the figures of a window (the steps
between two lines). A warning is also an event in plan.json.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.metrics import FIRST_STEPS
from gputrain.engine.nonfinite import Rollback
from gputrain.engine.out_of_memory import MemoryRelief
from gputrain.engine.saving import Saver
from gputrain.engine.schedule import is_due_every
from gputrain.hw.plan import Plan
from gputrain.hw.probe import usable_cores
from gputrain.hw.runtime import memory_gb

log = logging.getLogger(__name__)

HISTORY = 50  # Number of steps of a median; short enough for losses that rise slowly by nature, such as KL.
LEAST_HISTORY = 10
CALM = 20  # Steps within bounds after which a loss or a gradient can cause another warning.

WINDOWS = 10  # A state of the machine causes a warning when it lasts for so many windows.
WAIT_SHARE = 0.2  # Share of the time that steps wait for data.
LEAST_UTILISATION, LITTLE_WAIT = 0.9, 0.05
THROTTLED_SHARE = 0.2  # Share of the readings in which something slows the GPU down.
NEXT_CHECKPOINTS = 3  # The disk should have room for so many further checkpoints.

# What slows a GPU down, by the name of its figure, with the remedy.
THROTTLES = {
    "gpu/thermal_throttling": (
        "heat slows the GPU down", "improve its cooling, or lower its power limit with nvidia-smi --power-limit"
    ),
    "gpu/power_brake": (
        "the power supply slows the GPU down (power brake)", "check its power cables, and whether the supply is strong "
        "enough for all cards"
    ),
    "gpu/power_capped": (
        "a lowered power limit slows the GPU down", "nvidia-smi --power-limit raises it, if the cooling suffices"
    ),
}  # fmt: skip

StepScalars = Mapping[str, float]  # The scalars of a step, or the figures of a window, by name.


class MetricsLog:
    """Writes the metrics of the steps since the last line, warns about what is wrong, and reacts to it."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop, state = loop, loop.state
        self.health = Health(state.runtime.plan, usable_cores())
        self.relief = MemoryRelief(state.micro_batch, state.shrink)

    def due(self, end: StepEnd) -> bool:
        return end.stops or is_due_every(end.step, self.loop.run.saving.log_every_steps)

    def run(self, end: StepEnd) -> None:
        self.write_and_react()

    def announce(self, end: StepEnd) -> None:
        """Say where no bar shows it that the first step is done, and when there will be metrics; and after the first
        few steps how long the others will take, if that was predicted otherwise."""
        metrics, run, made = self.loop.metrics, self.loop.run, end.step - self.loop.steps.start.step
        if made == 1 and not end.stops and run.saving.log_every_steps > 1 and not metrics.console.is_terminal:
            log.info("%s is done; metrics follow every %d steps", metrics.step_text, run.saving.log_every_steps)
        if made != FIRST_STEPS or not (seconds := metrics.first_step_seconds):
            return
        run.status.seconds_per_step = seconds
        self.loop.saver.write_plan()
        fast, slow = run.prediction.get("predicted_seconds_range") or (0.0, math.inf)
        if not fast <= seconds <= slow:
            left = f": {left}" if (left := metrics.move_bar()) else ""
            if seconds > slow and metrics.runtime.device.type == "cpu":
                left += "; beside other programs, OMP_NUM_THREADS=1 may be faster"
            log.info("a step takes %.3g s; %.3g to %.3g s were predicted%s", seconds, fast, slow, left)

    def write_and_react(self) -> None:
        loop, state, run = self.loop, self.loop.state, self.loop.run
        done = state.progress.step
        rows = self.write()
        if len(loop.metrics.pace.windows) > 1:  # The first line contains compilation and the search for algorithms.
            run.status.seconds_per_step = loop.metrics.latest["speed/seconds_per_step"]
        events = self.health.watch(rows, loop.metrics.latest, done) if run.group.leads else []
        state.events += events
        if events:
            loop.saver.write_plan()
        go_back_if_unstable(loop.saver, rows, done)
        pressure = loop.monitor.pressure()
        if pressure == "act" and state.runtime.device.type == "cpu" and not loop.saver.is_busy:
            loop.saver.host.release()
        self.relief.relieve(pressure, done - 1)

    def write(self, *, alone: bool = False) -> list[dict[str, float]]:
        """Write the line of the steps since the last one. Returns the scalars of these steps."""
        loop, done = self.loop, self.loop.state.progress.step
        further = {"learning_rate": loop.steps.learning_rate(done - 1), **memory_gb(loop.state.runtime.device)}
        further |= {**loop.monitor.figures(), **loop.saver.disk_gb}
        return loop.metrics.write(done, loop.steps.epochs_done(done), further, alone=alone)


def go_back_if_unstable(saver: Saver, rows: list[dict[str, float]], done: int) -> None:
    """Load a good checkpoint if the gradients of the last steps say so (nonfinite.py). `rows` are the scalars of these
    steps, up to step number `done`.

    The data continues from the present position, so that the same batches don't cause the same failure. Raises
    UserError if there is no checkpoint, or if earlier rollbacks did not help.
    """
    state, run = saver.state, saver.run
    rollback: Rollback | None = state.nonfinite.watch(rows, done)
    if rollback is None:
        return
    saver.finish()
    content = rollback.checkpoint(run, state.recipe.kind)
    state.restore(content)
    state.nonfinite.forget()
    log.warning("%s; weights and optimizers are back at step %d", rollback.cause, content["progress"]["step"])


# ------------------------------------------------------------------------------------------------------------ warnings


class Finding(NamedTuple):
    """Something that may be out of bounds in a step or window, by its name, and the values that a message shows."""

    name: str
    holds: bool
    shown: Mapping[str, object]


@dataclass(frozen=True)
class HealthRule:
    """A rule of the table: `signal` returns its findings in the figures of one step or one window."""

    check: str  # Its name in the events of plan.json.
    signal: Callable[[StepScalars], Iterable[Finding]]
    lasts: int  # Steps or windows in a row in which it holds before a warning, as a single unusual batch means nothing.
    message: str
    of_steps: bool = False  # False: it looks at windows.
    calm: float = math.inf  # Steps within bounds after which there may be another warning of the same name.


def rules(plan: Plan, cores: int) -> tuple[HealthRule, ...]:
    """Return the table for a run with this plan on so many CPU cores."""
    return (
        HealthRule(
            "loss", Rise("loss/", 5.0), 3,
            "the loss {name} is {value:.4g} at step {step}, {times:.0f} times its median of the last {count} steps "
            "({median:.4g}): the training may diverge; if it stays there, go back to an earlier checkpoint with a "
            "lower --learning-rate", of_steps=True, calm=CALM,
        ),
        HealthRule(
            "gradient", Rise("gradient_norm/", 20.0), 5,
            "the gradient norm of the {name} is {value:.4g} at step {step}, {times:.0f} times its median of the last "
            "{count} steps ({median:.4g}): the gradients explode; lower --learning-rate, lengthen --warmup-steps, or "
            "lower --gradient-clip", of_steps=True, calm=CALM,
        ),
        HealthRule(
            "data", lambda facts: waiting_for_data(facts, plan, cores), WINDOWS,
            "the steps wait for data in {waits:.0f} % of the time{busy}: {remedy}",
        ),
        HealthRule(
            "idle", lambda facts: idle(facts, plan, cores), WINDOWS,
            "the GPU computes in {busy:.0f} % of the time, and the steps wait for data in {waits:.0f} %: {remedy}",
        ),
        HealthRule("heat", throttled, WINDOWS, "{cause}{at}, in {share:.0f} % of the readings: {remedy}"),
        HealthRule(
            "disk", filling_disk, 1,
            "the disk of the run folder has {free_gb:.2f} GB left, and a checkpoint takes {size_gb:.2f} GB: free some "
            "space, or keep fewer with --keep-checkpoints",
        ),
    )  # fmt: skip


@dataclass
class Streak:
    """The number of times in a row that a finding has held, and when it last held after a warning."""

    in_a_row: int = 0
    warned_at: float = -math.inf


class Health:
    """Applies the rules to a run."""

    def __init__(self, plan: Plan, cores: int) -> None:
        self.rules = rules(plan, cores)
        self.streaks: dict[tuple[str, str], Streak] = {}

    def watch(self, rows: Sequence[StepScalars], facts: StepScalars, done: int) -> list[dict[str, Any]]:
        """Warn about what is wrong in the last steps, up to step number `done`, whose scalars are `rows`, and in their
        window, whose figures are `facts`. Returns the warnings as events for plan.json."""
        events = []
        steps = list(enumerate(rows, start=done - len(rows) + 1))
        for rule in self.rules:
            for step, figures in steps if rule.of_steps else [(done, facts)]:
                for message in self._messages(rule, figures, step):
                    log.warning("%s", message)
                    events.append({"step": step, "check": rule.check, "message": message})
        return events

    def _messages(self, rule: HealthRule, figures: StepScalars, step: int) -> Iterator[str]:
        for name, holds, shown in rule.signal(figures):
            streak = self.streaks.setdefault((rule.check, name), Streak())
            streak.in_a_row = streak.in_a_row + 1 if holds else 0
            if streak.in_a_row < rule.lasts:
                continue
            is_new = streak.in_a_row == rule.lasts and step - streak.warned_at >= rule.calm
            streak.warned_at = step
            if is_new:
                yield rule.message.format_map({"name": name, "step": step, **shown})


# ------------------------------------------------------------------------------------------------ signals of steps


@dataclass
class Rise:
    """Finds scalars that rise far above the median of their last values. It ends when they are as low as before, or at
    a level that has lasted so long that it has become the median."""

    prefix: str  # Start of the scalars' names.
    factor: float  # A value is out of bounds above this multiple of its median.
    history: dict[str, deque[float]] = field(default_factory=dict)

    def __call__(self, row: StepScalars) -> Iterator[Finding]:
        for name, value in row.items():
            if not name.startswith(self.prefix) or not math.isfinite(value):  # Non-finite values have their own guard.
                continue
            before = self.history.setdefault(name, deque(maxlen=HISTORY))
            median = statistics.median(map(abs, before)) if len(before) >= LEAST_HISTORY else 0.0
            holds = abs(value) > self.factor * median > 0
            times = abs(value) / median if holds else 0.0
            shown = {"value": value, "times": times, "count": len(before), "median": median}
            yield Finding(name.removeprefix(self.prefix), holds, shown)
            before.append(value)


# ------------------------------------------------------------------------------------------------ signals of windows


def waiting_for_data(facts: StepScalars, plan: Plan, cores: int) -> Iterator[Finding]:
    """Finds that the steps wait for data, and names the setting that helps."""
    waits = facts.get("data/wait_share", 0.0)
    busy = f", and the GPU computes in {100 * facts['gpu/utilisation']:.0f} %" if "gpu/utilisation" in facts else ""
    yield Finding("", waits > WAIT_SHARE, {"waits": 100 * waits, "busy": busy, "remedy": data_remedy(plan, cores)})


def data_remedy(plan: Plan, cores: int) -> str:
    """Return what makes data arrive sooner."""
    processes = int(plan.num_workers.value)
    if processes < cores:
        return f"raise --num-workers from {processes} to at most {cores}, the number of CPU cores"
    return "take smaller source files, put the data on a faster disk, or train with more CPU cores for each GPU"


def idle(facts: StepScalars, plan: Plan, cores: int) -> Iterator[Finding]:
    """Finds that a GPU has too little to do, unless it mostly waits for data, which has a rule of its own."""
    busy, waits = facts.get("gpu/utilisation", 1.0), facts.get("data/wait_share", 0.0)
    remedy = "raise --batch-size" if plan.compile.value else "try --use-torch-compile, or raise --batch-size"
    if waits >= LITTLE_WAIT:
        remedy = data_remedy(plan, cores)
    holds = busy < LEAST_UTILISATION and waits <= WAIT_SHARE
    yield Finding("", holds, {"busy": 100 * busy, "waits": 100 * waits, "remedy": remedy})


def throttled(facts: StepScalars) -> Iterator[Finding]:
    """Finds that the GPU is slowed down, and by what."""
    at = f" at {facts['gpu/temperature_c']:.0f} °C" if "gpu/temperature_c" in facts else ""
    for name, (cause, remedy) in THROTTLES.items():
        share = facts.get(name, 0.0)
        shown = {"cause": cause, "at": at, "share": 100 * share, "remedy": remedy}
        yield Finding(name, share > THROTTLED_SHARE, shown)


def filling_disk(facts: StepScalars) -> Iterator[Finding]:
    """Finds that the disk is filling up, by the free space after a save and the size of the checkpoint."""
    size_gb, free_gb = facts.get("disk/checkpoint_gb", 0.0), facts.get("disk/free_gb", math.inf)
    yield Finding("", free_gb < NEXT_CHECKPOINTS * size_gb, {"size_gb": size_gb, "free_gb": free_gb})
