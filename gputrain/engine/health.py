"""Warnings about trainings that go wrong or waste their machine, each with its remedy.

Everything is detected from what metrics.jsonl records anyway: the scalars of the steps, and the figures of a window
(the steps between two lines). A warning is also an event in plan.json. Non-finite gradients and full memory, to which a
run reacts, are handled elsewhere (saving.py, callbacks.py).
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gputrain.hw.plan import Plan

log = logging.getLogger(__name__)

ScalarRows = Sequence[Mapping[str, float]]
StepWarning = tuple[int, str]  # The step and the message of a warning.

HISTORY = 50  # Number of steps of a median; short enough for losses that rise slowly by nature, such as KL.
LEAST_HISTORY = 10
CALM = 20  # Steps within bounds after which a loss or a gradient can cause another warning.

WINDOWS = 10  # A state of the machine causes a warning when it lasts for so many windows.
WAIT_SHARE = 0.2  # Share of the time that steps wait for data.
LEAST_UTILISATION, LITTLE_WAIT = 0.9, 0.05
THROTTLED_SHARE = 0.2  # Share of the readings in which something slows the GPU down.
HOT_CELSIUS = 85.0
OTHERS_GB = 1.0  # Growth of the GPU memory outside torch's allocator; its own libraries load in the first steps.
NEXT_CHECKPOINTS = 3  # The disk should have room for so many further checkpoints.

FLOOR_SHARE = 0.04  # A discriminator's loss below this share of its first median is near its floor, 0.
CEILING_SHARE = 0.9  # The adversarial loss grows or is saturated above this share of its largest median.
COLLAPSED_STEPS = 200


@dataclass
class RiseWatch:
    """Keeps the last values of every scalar of a kind, and finds those that rise far above their median.

    The next warning for the same scalar requires CALM steps within bounds: either as low as before, or at a level that
    has lasted so long that it has become the median.
    """

    prefix: str  # Start of the scalars' names.
    factor: float  # A value is out of bounds above this multiple of its median.
    in_a_row: int  # Steps out of bounds before a warning, so that a single unusual batch causes none.
    message: str
    history: dict[str, deque[float]] = field(default_factory=dict)
    above: dict[str, int] = field(default_factory=dict)  # Consecutive steps out of bounds.
    warned_at: dict[str, int] = field(default_factory=dict)  # Last step out of bounds after a warning.

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        found = []
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            for name, value in row.items():
                if name.startswith(self.prefix) and math.isfinite(value):  # Non-finite values have their own guard.
                    found += self._look(name.removeprefix(self.prefix), value, step)
        return found

    def _look(self, name: str, value: float, step: int) -> list[StepWarning]:
        before, found = self.history.setdefault(name, deque(maxlen=HISTORY)), []
        if len(before) >= LEAST_HISTORY:
            median = statistics.median(map(abs, before))
            self.above[name] = self.above.get(name, 0) + 1 if abs(value) > self.factor * median > 0 else 0
            is_new = step - self.warned_at.get(name, -CALM) >= CALM
            if self.above[name] >= self.in_a_row:
                self.warned_at[name] = step
            if self.above[name] == self.in_a_row and is_new:
                rise = f"{value:.4g} at step {step}, {abs(value) / median:.0f} times its median of the last "
                rise += f"{len(before)} steps ({median:.4g})"
                found.append((step, self.message.format(name=name, rise=rise)))
        before.append(value)
        return found


@dataclass
class Lasting:
    """Finds once that a state has lasted for `needed` windows or steps in a row."""

    needed: int
    times: int = 0
    has_warned: bool = False

    def is_new(self, holds: bool) -> bool:
        self.times = self.times + 1 if holds else 0
        if self.times < self.needed or self.has_warned:
            return False
        self.has_warned = True
        return True


@dataclass
class MedianTrack:
    """The running median of a scalar, with the first median and the largest one so far."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    first: float | None = None
    largest: float = -math.inf

    def add(self, value: float) -> float | None:
        """Return the median, or None before there are enough values."""
        self.values.append(value)
        if len(self.values) < LEAST_HISTORY:
            return None
        median = statistics.median(self.values)
        self.first = median if self.first is None else self.first
        self.largest = max(self.largest, median)
        return median


@dataclass
class CollapseWatch:
    """Finds discriminators that have won: they tell real from generated items without error, and teach nothing.

    Both losses (hinge, least squares) are 0 for a discriminator without error, and far from it for an untrained one: 1
    and 0.5. The adversarial loss of the generator then grows without limit (hinge: minus the logit) or stays at what it
    is for logits of 0 (least squares: 1), so it is at its largest in both cases. With a regulariser in the loss its
    floor is not 0; there the means of the logits show that the hinges are passed on both sides.
    """

    losses: dict[str, MedianTrack] = field(default_factory=dict)
    adversarial: dict[str, MedianTrack] = field(default_factory=dict)
    lasting: dict[str, Lasting] = field(default_factory=dict)

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        found = []
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            for name, value in row.items():
                kind, _, rest = name.partition("/")
                phase, _, term = rest.partition("/")
                if kind != "loss" or not phase.startswith("discriminator"):
                    continue
                against = adversarial_loss(row, phase, term)
                if against is None or not (math.isfinite(value) and math.isfinite(against)):
                    continue
                if self._has_won(rest, value, against, row, phase):
                    found.append((step, COLLAPSED.format(name=rest, value=value, against=against)))
        return found

    def _has_won(self, name: str, loss: float, against: float, row: Mapping[str, float], phase: str) -> bool:
        own, other = self.losses.setdefault(name, MedianTrack()), self.adversarial.setdefault(name, MedianTrack())
        median, adversarial = own.add(loss), other.add(against)
        if median is None or adversarial is None or own.first is None:
            return False
        near_floor = 0 <= median < FLOOR_SHARE * own.first
        real, fake = (row.get(f"statistics/{phase}/{side}_logits", 0.0) for side in ("real", "fake"))
        separated = near_floor or (real >= 1 and fake <= -1)
        is_largest = adversarial > 0 and adversarial >= CEILING_SHARE * other.largest
        return self.lasting.setdefault(name, Lasting(COLLAPSED_STEPS)).is_new(separated and is_largest)


COLLAPSED = (
    "the discriminator has won: its loss {name} is {value:.2g}, near its floor, and the adversarial loss against it "
    "stays at its largest ({against:.3g}), so that it teaches nothing; go back to an earlier checkpoint, with a weaker "
    "discriminator (a lower learning rate, a later start)"
)


def adversarial_loss(row: Mapping[str, float], phase: str, term: str) -> float | None:
    """Return the loss of the generator against a discriminator's term, without its feature matching, if recorded."""
    for name, value in row.items():
        kind, _, rest = name.partition("/")
        other, _, its_term = rest.partition("/")
        if kind == "loss" and other != phase and its_term in (term, "adversarial"):
            return value - row.get(f"statistics/{other}/{term}_features", 0.0)
    return None


@dataclass
class DataWatch:
    """Finds that the steps wait for data, and names the setting that helps."""

    plan: Plan
    cores: int
    lasting: Lasting = field(default_factory=lambda: Lasting(WINDOWS))

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        share = facts.get("data/wait_share", 0.0)
        if not self.lasting.is_new(share > WAIT_SHARE):
            return []
        busy = f", and the GPU computes in {100 * facts['gpu/utilisation']:.0f} %" if "gpu/utilisation" in facts else ""
        text = f"the steps wait for data in {100 * share:.0f} % of the time{busy}"
        return [(done, f"{text}: {data_remedy(self.plan, self.cores)}")]


def data_remedy(plan: Plan, cores: int) -> str:
    """Return what makes data arrive sooner."""
    processes, kept = int(plan.num_workers.value), plan.data_in_memory
    if processes < cores:
        return f"raise --num-workers from {processes} to at most {cores}, the number of CPU cores"
    if kept is not None and not kept.value:
        return "--data-in-memory keeps decoded data, if the RAM suffices; otherwise take smaller source files"
    return "put the data on a faster disk, or train on a machine with more CPU cores for each GPU"


@dataclass
class IdleWatch:
    """Finds that a GPU has too little to do, whether it waits for data or not; DataWatch finds that it mostly waits."""

    plan: Plan
    cores: int
    lasting: Lasting = field(default_factory=lambda: Lasting(WINDOWS))

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        busy, waits = facts.get("gpu/utilisation", 1.0), facts.get("data/wait_share", 0.0)
        if not self.lasting.is_new(busy < LEAST_UTILISATION and waits <= WAIT_SHARE):
            return []
        remedy = "raise --batch-size" if self.plan.compile.value else "try --use-torch-compile, or raise --batch-size"
        if waits >= LITTLE_WAIT:
            remedy = data_remedy(self.plan, self.cores)
        text = f"the GPU computes in {100 * busy:.0f} % of the time, and the steps wait for data in {100 * waits:.0f} %"
        return [(done, f"{text}: {remedy}")]


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


@dataclass
class ThrottleWatch:
    """Finds that the GPU is slowed down, and by what."""

    lasting: dict[str, Lasting] = field(default_factory=lambda: {name: Lasting(WINDOWS) for name in THROTTLES})

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        found = []
        for name, (cause, remedy) in THROTTLES.items():
            share = facts.get(name, 0.0)
            if self.lasting[name].is_new(share > THROTTLED_SHARE):
                at = f" at {facts['gpu/temperature_c']:.0f} °C" if "gpu/temperature_c" in facts else ""
                found.append((done, f"{cause}{at}, in {100 * share:.0f} % of the readings: {remedy}"))
        return found


@dataclass
class TemperatureWatch:
    """Finds that the GPU is hot, before heat slows it down."""

    lasting: Lasting = field(default_factory=lambda: Lasting(WINDOWS))

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        celsius = facts.get("gpu/temperature_c", 0.0)
        if not self.lasting.is_new(celsius >= HOT_CELSIUS):
            return []
        message = f"the GPU is at {celsius:.0f} °C; it should stay below {HOT_CELSIUS:.0f}"
        return [(done, f"{message}: improve the airflow, raise the fan curve, or lower its power limit")]


@dataclass
class NeighbourWatch:
    """Finds that other programs take memory of the GPU after the run has planned with it."""

    least_gb: float = math.inf  # The least memory outside torch's allocator so far.
    lasting: Lasting = field(default_factory=lambda: Lasting(WINDOWS))

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        if "memory/device_gb" not in facts or "memory/reserved_gb" not in facts:
            return []
        outside_gb = max(0.0, facts["memory/device_gb"] - facts["memory/reserved_gb"])
        self.least_gb = min(self.least_gb, outside_gb)
        more_gb = outside_gb - self.least_gb
        if not self.lasting.is_new(more_gb > OTHERS_GB):
            return []
        message = f"other programs have taken {more_gb:.1f} GB of the GPU's memory since the start of the run"
        return [(done, f"{message}: end them (nvidia-smi lists them), or resume with a lower --memory-budget")]


@dataclass
class DiskWatch:
    """Finds that the disk is filling up, by the free space after a save and the size of the checkpoint."""

    lasting: Lasting = field(default_factory=lambda: Lasting(1))

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]:
        size_gb, free_gb = facts.get("disk/checkpoint_gb", 0.0), facts.get("disk/free_gb", math.inf)
        if not self.lasting.is_new(free_gb < NEXT_CHECKPOINTS * size_gb):
            return []
        message = f"the disk of the run folder has {free_gb:.2f} GB left, and a checkpoint takes {size_gb:.2f} GB"
        return [(done, f"{message}: free some space, or keep fewer with --keep-checkpoints")]


class HealthCheck(Protocol):
    """Looks at the scalars of the last steps, up to step number `done`, and at the figures of their window."""

    def look(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[StepWarning]: ...


class Health:
    """All checks of a run."""

    def __init__(self, plan: Plan, cores: int) -> None:
        self.checks: dict[str, HealthCheck] = {
            "loss": RiseWatch(
                "loss/", 5.0, 3,
                "the loss {name} is {rise}: the training may diverge; if it stays there, go back to an earlier "
                "checkpoint with a lower --learning-rate",
            ),
            "gradient": RiseWatch(
                "gradient_norm/", 20.0, 5,
                "the gradient norm of the {name} is {rise}: the gradients explode; lower --learning-rate, lengthen "
                "--warmup-steps, or lower --gradient-clip",
            ),
            "discriminator": CollapseWatch(),
            "data": DataWatch(plan, cores),
            "idle": IdleWatch(plan, cores),
            "heat": ThrottleWatch(),
            "temperature": TemperatureWatch(),
            "neighbours": NeighbourWatch(),
            "disk": DiskWatch(),
        }  # fmt: skip

    def watch(self, rows: ScalarRows, facts: Mapping[str, float], done: int) -> list[dict[str, Any]]:
        """Warn about what is wrong, and return the warnings as events for plan.json."""
        events = []
        for name, check in self.checks.items():
            for step, message in check.look(rows, facts, done):
                log.warning("%s", message)
                events.append({"step": step, "check": name, "message": message})
        return events
