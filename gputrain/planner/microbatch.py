"""The choice of micro-batch, accumulation and checkpointing: pure arithmetic on predicted memory and FLOPs.

The user's batch is kept exactly: a micro-batch divides it. Of the micro-batches that fit, the smallest that keeps the
GPU busy is chosen, because a larger one is not faster and takes more memory. Imports no torch. GB is 1e9 bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gputrain.errors import UserError
from gputrain.hw.plan import Setting

BUDGET_SHARE = 0.93  # Share of a GPU's memory; the rest is for the CUDA context (0.3 to 0.6 GB) and a desktop.
MARGIN = 1.05  # Factor on a peak that is only predicted, not measured.
OPERATOR_SECONDS = 4e-6  # Idle time of a GPU at an operator (launch and last threads), an order of magnitude.
WORTHLESS = 0.02  # Idle share of a step below which a larger micro-batch has no benefit.
TOLERABLE = 1 / 3  # Idle share below which checkpointing has none; it adds up to a third of the FLOPs.


@dataclass(frozen=True)
class MemoryModel:
    """The memory and the FLOPs of a step as linear functions of the items in its micro-batch.

    `fixed` and `item` are GB by purpose: parameters, gradients, optimizer, activations, workspace, cached (held by the
    allocator beyond its tensors).
    """

    fixed: dict[str, float]
    item: dict[str, float]
    item_flops: float  # FLOPs of all phases, forward and backward, with those that checkpointing repeats.
    kernels: int = 0  # Kernels that a micro-batch of any size launches; 0: unknown.

    @classmethod
    def through(
        cls, one: dict[str, float], more: dict[str, float], item_flops: float, kernels: int = 0, *, items: int = 2,
        cached_gb: float = 0.0,
    ) -> "MemoryModel":  # fmt: skip
        """Returns the lines through the peak with one item and the peak with `items` items, for which the allocator
        holds `cached_gb` beyond its tensors.

        Between the two, the true peak is below the line: with few items it may be at a moment of large weights, and
        with many at one of large activations, which grow faster.
        """
        item = {kind: (more[kind] - one[kind]) / (items - 1) for kind in one}
        fixed = {kind: one[kind] - item[kind] for kind in one}
        if cached_gb:
            fixed["cached"], item["cached"] = 0.0, cached_gb / items
        return cls(fixed=fixed, item=item, item_flops=item_flops, kernels=kernels)

    def divided_optimizer(self, ranks: int) -> "MemoryModel":
        """Returns the memory of a step if the ranks divide the optimizer's state among themselves."""
        return replace(self, fixed={**self.fixed, "optimizer": self.fixed["optimizer"] / ranks})

    def parts(self, items: int) -> dict[str, float]:
        return {kind: self.fixed[kind] + self.item[kind] * items for kind in self.fixed}

    def peak_gb(self, items: int) -> float:
        return sum(self.parts(items).values())


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that training may take on a device, and the device's FLOPS."""

    budget_gb: float
    flops_per_second: float | None = None  # Rate of a matrix product in the precision of the training; None: unknown.
    calibration: float = 1.0  # Measured / predicted peak, if this GPU was measured.
    margin: float = MARGIN
    gpus: int = 1  # Number of GPUs that share a batch; each has this budget.

    def peak_gb(self, memory_model: MemoryModel, items: int) -> float:
        return memory_model.peak_gb(items) * self.calibration

    def takes(self, memory_model: MemoryModel, items: int) -> bool:
        return self.peak_gb(memory_model, items) * self.margin <= self.budget_gb

    def idle_share(self, memory_model: MemoryModel, items: int) -> float:
        """Returns the idle time between kernels divided by the least compute time; 0 if either is unknown."""
        if not (self.flops_per_second and memory_model.item_flops):
            return 0.0
        return memory_model.kernels * OPERATOR_SECONDS * self.flops_per_second / (memory_model.item_flops * items)


@dataclass(frozen=True)
class Fit:
    """The chosen micro-batch, accumulation and checkpointing; `settings` has the choices by name, with reasons."""

    micro_batch_size: int
    accumulation_steps: int
    checkpointing: bool
    predicted_peak_gb: float
    parts: dict[str, float]  # Parts of the peak, in GB.
    item_flops: float  # FLOPs of an item, with those that checkpointing repeats.
    least_seconds_per_step: float | None  # Time of the FLOPs at the full rate; None: unknown.
    budget_gb: float
    fits: bool
    settings: dict[str, Setting]

    def to_json(self) -> dict[str, object]:
        """Returns the figures, without the settings, which the plan has."""
        figures = {name: value for name, value in vars(self).items() if name != "settings"}
        return {**figures, "budget_gb": self.budget_gb if math.isfinite(self.budget_gb) else None}

    def in_words(self) -> str:
        parts = ", ".join(f"{kind} {gb:.2f}" for kind, gb in self.parts.items())
        budget = f" of {self.budget_gb:.1f}" if math.isfinite(self.budget_gb) else ""
        line = f"predicted peak {self.predicted_peak_gb:.2f} GB{budget} ({parts})"
        if self.least_seconds_per_step is None:
            return line
        return f"{line}; a step takes at least {self.least_seconds_per_step:.3g} s"


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
) -> Fit:
    """Chooses micro-batch, accumulation and checkpointing for a step on `batch_size` items, over `ranks` GPUs.

    A micro-batch has at most `largest` items (0: all). `memory_model(checkpointing)` is called only if it is needed. A
    given `micro_batch_size` (0: none) or `checkpointing` is kept, even if it does not fit. If nothing fits, `fits` is
    False, and the smallest micro-batch is returned. Raises UserError if the ranks cannot share the batch equally.
    """
    if batch_size % ranks:
        raise UserError(
            f"{ranks} ranks cannot share a batch of {batch_size} equally",
            hint=f"use a batch of {batch_size // ranks * ranks + ranks}",
        )
    share = batch_size // ranks
    sizes = [m for m in range(1, min(share, largest or share) + 1) if share % m == 0]
    if micro_batch_size:
        sizes = [min(micro_batch_size, share)]
    chosen = memory_model(bool(checkpointing))
    known = budget.flops_per_second and chosen.kernels and chosen.item_flops
    useful = _first(sizes, lambda m: budget.idle_share(chosen, m) <= WORTHLESS) if known else sizes[-1]
    size = _largest(sizes, chosen, budget, useful)
    repeats = bool(checkpointing)
    if checkpointing is None:
        # Checkpointing is only for micro-batches that would leave the GPU idle for as long as checkpointing costs. It
        # makes them no larger than that, so that more memory, which needs none, never means smaller micro-batches.
        pressing = _first(sizes, lambda m: budget.idle_share(chosen, m) <= TOLERABLE)
        if size < pressing:
            leaner = memory_model(True)
            reached = _largest(sizes, leaner, budget, pressing)
            if reached > size or not size:
                size, chosen, repeats = reached, leaner, True
    fits, size = size > 0, size or sizes[0]
    passes = -(-share // size)
    peak_gb = budget.peak_gb(chosen, size)
    return Fit(
        micro_batch_size=size,
        accumulation_steps=passes,
        checkpointing=repeats,
        predicted_peak_gb=peak_gb,
        parts=chosen.parts(size),
        item_flops=chosen.item_flops,
        least_seconds_per_step=share * chosen.item_flops / budget.flops_per_second if budget.flops_per_second else None,
        budget_gb=budget.budget_gb,
        fits=fits,
        settings={
            "micro_batch_size": _micro_batch(size, sizes, share, chosen, budget, fits, bool(micro_batch_size)),
            "accumulation_steps": _accumulation(passes),
            "gradient_checkpointing": _checkpointing(repeats, asked=checkpointing is not None),
        },
    )


def _first(sizes: list[int], suits: Callable[[int], bool]) -> int:
    """Returns the smallest size that suits; the largest of all if none does."""
    return next(filter(suits, sizes), sizes[-1])


def _largest(sizes: list[int], memory_model: MemoryModel, budget: MemoryBudget, useful: int) -> int:
    """Returns the largest useful size that fits; 0 if none does."""
    return max((m for m in sizes if m <= useful and budget.takes(memory_model, m)), default=0)


def _micro_batch(
    size: int, sizes: list[int], share: int, memory_model: MemoryModel, budget: MemoryBudget, fits: bool, asked: bool
) -> Setting:
    cost = f"a predicted peak of {budget.peak_gb(memory_model, size):.1f} GB"
    larger = next((m for m in sizes if m > size), 0)
    over = bool(larger) and not budget.takes(memory_model, larger)
    if not fits:
        reason = f"{'asked for' if asked else 'the smallest'}; it does not fit {budget.budget_gb:.1f} GB"
    elif asked:
        reason = "asked for"
    elif size == share:
        reason = "the whole batch fits at once"
    elif over:
        larger_gb = budget.peak_gb(memory_model, larger)
        compared = "more than" if larger_gb > budget.budget_gb else "too near to"
        reason = f"{larger} would take {larger_gb:.1f} GB, {compared} the available {budget.budget_gb:.1f} GB"
    else:
        reason = "it keeps the device busy: a larger one would be no faster"
    return Setting(size, reason, cost)


def _accumulation(passes: int) -> Setting:
    if passes == 1:
        return Setting(1, "one micro-batch is the whole batch")
    return Setting(passes, "the batch consists of this many micro-batches", "nothing in the result")


def _checkpointing(repeats: bool, *, asked: bool) -> Setting:
    if asked:
        reason = "asked for" if repeats else "switched off"
    else:
        reason = "too little fits without it" if repeats else "the activations fit without it"
    return Setting(repeats, reason, "up to a third more FLOPs" if repeats else "")
