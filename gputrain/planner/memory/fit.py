"""The choice of micro-batch, accumulation and checkpointing: pure arithmetic on predicted memory and FLOPs.

The user's batch is kept exactly: a micro-batch divides it. The largest one that fits is chosen: it needs the fewest
launches, which take most of the time on a fast GPU. Checkpointing is chosen if nothing fits without it, or if larger
micro-batches with it are predicted to be clearly faster (roofline.py). Imports no torch. GB is 1e9 bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gputrain.errors import UserError
from gputrain.hw.plan import Setting
from gputrain.planner.time.roofline import DeviceRates, StepCost

BUDGET_SHARE = 0.93  # Share of a GPU's memory; the rest is for the CUDA context (0.3 to 0.6 GB) and a desktop.
MARGIN = 1.05  # Factor on a predicted peak, for what the prediction does not contain.
LEAST_GAIN = 0.10  # Share of the time of a step that a prediction must save before checkpointing pays.


@dataclass(frozen=True)
class MemoryModel:
    """The memory and the FLOPs of a step as linear functions of the items in its micro-batch.

    `fixed` and `item` are GB by purpose: parameters, gradients, optimizer, activations, workspace, cached (held by the
    allocator beyond its tensors).
    """

    fixed: dict[str, float]
    item: dict[str, float]
    item_flops: float  # FLOPs of all phases, forward and backward, with those that checkpointing repeats.
    cost: StepCost | None = None  # Kernels of a step; None: unknown.

    @classmethod
    def through(
        cls,
        one: dict[str, float],
        more: dict[str, float],
        item_flops: float,
        cost: StepCost | None = None,
        *,
        items: int = 2,
        cached_gb: float = 0.0,
        first: int = 1,
    ) -> "MemoryModel":
        """Returns the lines through the peak with one item, or with `first` items, and the peak with `items` items, for
        which the allocator holds `cached_gb` beyond its tensors.

        Between the two, the true peak is below the line: with few items it may be at a moment of large weights, and
        with many at one of large activations, which grow faster.
        """
        item = {kind: (more[kind] - one[kind]) / (items - first) for kind in one}
        fixed = {kind: one[kind] - first * item[kind] for kind in one}
        if cached_gb:
            fixed["cached"], item["cached"] = 0.0, cached_gb / items
        return cls(fixed=fixed, item=item, item_flops=item_flops, cost=cost)

    def parts(self, items: int) -> dict[str, float]:
        return {kind: self.fixed[kind] + self.item[kind] * items for kind in self.fixed}

    def peak_gb(self, items: int) -> float:
        return sum(self.parts(items).values())


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that training may take on a device, and the speed of the device."""

    budget_gb: float
    rates: DeviceRates | None = None  # None: unknown.
    margin: float = MARGIN
    gpus: int = 1  # Number of GPUs that share a batch; each has this budget.

    def fits(self, memory_model: MemoryModel, items: int) -> bool:
        return memory_model.peak_gb(items) * self.margin <= self.budget_gb

    def seconds(self, memory_model: MemoryModel, items: int, share: int) -> float | None:
        """Returns the predicted time of a step on `share` items in micro-batches of `items`; None if it is unknown."""
        if not (self.rates and memory_model.cost):
            return None
        return memory_model.cost.seconds(self.rates, items, -(-share // items))


@dataclass(frozen=True)
class Fit:
    """The chosen micro-batch, accumulation and checkpointing; `settings` has the choices by name, with reasons."""

    micro_batch_size: int
    accumulation_steps: int
    checkpointing: bool
    predicted_peak_gb: float
    parts: dict[str, float]  # Parts of the peak, in GB.
    item_flops: float  # FLOPs of an item, with those that checkpointing repeats.
    predicted_seconds_per_step: float | None  # None: unknown.
    budget_gb: float
    fits: bool
    settings: dict[str, Setting]
    cost: StepCost | None = None  # Kernels of a step; None: unknown.

    def to_json(self) -> dict[str, object]:
        """Returns the figures, without the settings, which the plan has."""
        figures = {name: value for name, value in vars(self).items() if name not in ("settings", "cost")}
        return {**figures, "budget_gb": self.budget_gb if math.isfinite(self.budget_gb) else None}

    def describe(self) -> str:
        parts = ", ".join(f"{kind} {gb:.2f}" for kind, gb in self.parts.items())
        budget = f" of {self.budget_gb:.1f}" if math.isfinite(self.budget_gb) else ""
        line = f"predicted peak {self.predicted_peak_gb:.2f} GB{budget} ({parts})"
        if self.predicted_seconds_per_step is None:
            return line
        return f"{line}; predicted time of a step {self.predicted_seconds_per_step:.3g} s"


def budget_gb(memory_gb: float, free_gb: float = 0.0, limit_gb: float = 0.0, share: float = BUDGET_SHARE) -> float:
    """Returns the memory that a training may take: the least of a share of the device's memory, the free memory (0:
    unknown) and the user's limit (0: none). Raises UserError for an invalid share or limit."""
    if not 0.05 <= share <= 0.98:
        raise UserError(f"a memory share of {share:g}", hint="choose 0.05 to 0.98; 0.93 suits most cards")
    if not 0 <= limit_gb <= memory_gb:
        raise UserError(
            f"a memory budget of {limit_gb:g} GB on a card of {memory_gb:.1f} GB", hint="choose less, or leave it out"
        )
    return min(gb for gb in (share * memory_gb, free_gb, limit_gb) if gb > 0)


def fit(
    batch_size: int,
    memory_model: Callable[[bool], MemoryModel],
    budget: MemoryBudget,
    *,
    largest: int = 0,
    micro_batch_size: int = 0,
    checkpointing: bool | None = None,
    ranks: int = 1,
    smallest: int = 1,
    prefers_large: bool = False,
) -> Fit:
    """Chooses micro-batch, accumulation and checkpointing for a step on `batch_size` items, over `ranks` GPUs.

    A micro-batch has at least `smallest` items, and at most `largest` (0: all). `prefers_large`: a larger micro-batch
    is chosen even if it is slower, for models whose result depends on it. `memory_model(checkpointing)` is called only
    if it is needed. A given `micro_batch_size` (0: none) or `checkpointing` is kept, even if it does not fit. If
    nothing fits, `fits` is False, and the smallest micro-batch is returned, with checkpointing if that takes less
    memory. Raises UserError if the ranks cannot share the batch equally.
    """
    if batch_size % ranks:
        raise UserError(
            f"{ranks} ranks cannot share a batch of {batch_size} equally",
            hint=f"use a batch of {batch_size // ranks * ranks + ranks}",
        )
    share = batch_size // ranks
    sizes = [m for m in range(min(smallest, share), min(share, largest or share) + 1) if share % m == 0]
    if micro_batch_size:
        sizes = [min(micro_batch_size, share)]
    choice = _Choice.largest(memory_model(bool(checkpointing)), bool(checkpointing), sizes, share, budget)
    is_open = checkpointing is None and choice.size < sizes[-1]
    if is_open and (prefers_large or choice.may_be_beaten(sizes, share, budget)):
        other = _Choice.largest(memory_model(True), True, sizes, share, budget)
        if not choice.size and not other.size:
            choice = min(choice, other, key=lambda either: either.memory_model.peak_gb(sizes[0]))
        elif prefers_large and other.size > choice.size > 0:
            other.replaced_size, choice = choice.size, other
        elif other.size and (not choice.size or (choice.seconds and other.is_faster_than(choice.seconds))):
            other.compared_seconds, choice = choice.seconds if choice.size else None, other
    chosen, repeats = choice.memory_model, choice.checkpointing
    fits, size = choice.size > 0, choice.size or sizes[0]
    passes = -(-share // size)
    peak_gb = chosen.peak_gb(size)
    return Fit(
        micro_batch_size=size,
        accumulation_steps=passes,
        checkpointing=repeats,
        predicted_peak_gb=peak_gb,
        parts=chosen.parts(size),
        item_flops=chosen.item_flops,
        predicted_seconds_per_step=budget.seconds(chosen, size, share),
        budget_gb=budget.budget_gb,
        fits=fits,
        settings={
            "micro_batch_size": _micro_batch(size, sizes, share, chosen, budget, fits, bool(micro_batch_size)),
            "accumulation_steps": _accumulation(passes),
            "gradient_checkpointing": _checkpointing(choice, asked=checkpointing is not None),
        },
        cost=chosen.cost,
    )


@dataclass
class _Choice:
    """The largest micro-batch that fits, with or without checkpointing."""

    memory_model: MemoryModel
    checkpointing: bool
    size: int  # 0: none fits.
    seconds: float | None  # Predicted time of a step; None: unknown.
    compared_seconds: float | None = None  # That of the step without checkpointing; None: none fits.
    replaced_size: int = 0  # The smaller micro-batch that fits without checkpointing, if that is why it is chosen.

    @classmethod
    def largest(
        cls, memory_model: MemoryModel, checkpointing: bool, sizes: list[int], share: int, budget: MemoryBudget
    ) -> "_Choice":
        size = max((size for size in sizes if budget.fits(memory_model, size)), default=0)
        return cls(memory_model, checkpointing, size, budget.seconds(memory_model, size, share) if size else None)

    def may_be_beaten(self, sizes: list[int], share: int, budget: MemoryBudget) -> bool:
        """Returns whether a step with checkpointing, which computes all that this one does, may be chosen instead: if
        nothing fits without, or this step would be clearly faster in larger micro-batches, which do not fit."""
        if not self.size or self.seconds is None:
            return not self.size
        larger = [budget.seconds(self.memory_model, size, share) or 0.0 for size in sizes if size > self.size]
        return min(larger) * (1 + LEAST_GAIN) < self.seconds

    def is_faster_than(self, seconds: float) -> bool:
        return self.seconds is not None and self.seconds * (1 + LEAST_GAIN) < seconds


def _micro_batch(
    size: int, sizes: list[int], share: int, memory_model: MemoryModel, budget: MemoryBudget, fits: bool, asked: bool
) -> Setting:
    cost = f"a predicted peak of {memory_model.peak_gb(size):.1f} GB"
    larger = next((m for m in sizes if m > size), 0)
    if not fits:
        reason = f"{'asked for' if asked else 'the smallest'}; it does not fit {budget.budget_gb:.1f} GB"
    elif asked:
        reason = "asked for"
    elif size == share:
        reason = "the whole batch fits at once"
    elif larger:
        larger_gb = memory_model.peak_gb(larger)
        compared = "more than" if larger_gb > budget.budget_gb else "too near to"
        reason = f"{larger} would take {larger_gb:.1f} GB, {compared} the available {budget.budget_gb:.1f} GB"
    else:
        reason = "as many items as may be computed at once"
    return Setting(size, reason, cost)


def _accumulation(passes: int) -> Setting:
    if passes == 1:
        return Setting(1, "one micro-batch is the whole batch")
    return Setting(passes, "the batch consists of this many micro-batches", "nothing in the result")


def _checkpointing(choice: _Choice, *, asked: bool) -> Setting:
    repeats = choice.checkpointing
    if asked:
        reason = "asked for" if repeats else "switched off"
    elif choice.replaced_size:
        reason = f"micro-batches of {choice.size} fit with it, {choice.replaced_size} without"
    elif repeats and choice.compared_seconds and choice.seconds:
        gain = choice.compared_seconds / choice.seconds - 1
        reason = f"it is predicted to be {gain:.0%} faster than the micro-batches that fit without it"
    else:
        needed = "nothing fits without it" if choice.size else "it takes less memory"
        reason = needed if repeats else "nothing is predicted to be faster with it"
    return Setting(repeats, reason, "up to a third more FLOPs" if repeats else "")
