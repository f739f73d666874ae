"""How much of a batch a card takes at once, and what that asks for: pure arithmetic on predicted memory and work.

The user's batch is kept exactly: a micro-batch divides it, and passes as often as it takes. Of the micro-batches that
fit, the smallest is taken that keeps the card at work: a larger one makes nothing faster, and leaves less room.
Imports no torch. GB is 1e9 bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gputrain.errors import UserError
from gputrain.hw.plan import Setting

BUDGET_SHARE = 0.93  # of a card's memory; the CUDA context (0.3 to 0.6 GB) and a desktop live in the rest
MARGIN = 1.05  # by which a need that is only predicted, not measured, may be exceeded
OPERATOR_SECONDS = 4e-6  # that a card loses at the kernels of an operator, launch and last threads: its magnitude
WORTHLESS = 0.02  # idle share of a step that no larger micro-batch is worth
TOLERABLE = 1 / 3  # idle share that is rather borne than checkpointing, which adds up to a third of the arithmetic


@dataclass(frozen=True)
class MemoryModel:
    """A step's memory and work by the items of its micro-batch: lines, with all resident that stays from step to step.

    `fixed` and `item` are GB by what they are for: parameters, gradients, optimizer, activations, workspace,
    cached (held by the allocator beyond its tensors).
    """

    fixed: dict[str, float]
    item: dict[str, float]
    item_flops: float  # forward and backward of all phases, what checkpointing repeats included
    kernels: int = 0  # that a micro-batch launches, whatever its size; 0: unknown

    @classmethod
    def through(
        cls, one: dict[str, float], more: dict[str, float], item_flops: float, kernels: int = 0, *, items: int = 2,
        cached_gb: float = 0.0,
    ) -> "MemoryModel":  # fmt: skip
        """The lines through what stands at the peak with one item, and with so many `items`, for which the allocator
        holds `cached_gb` more than it has given out.

        Between them a peak lies below its line: with few items it may be where the weights are, and with many, where
        the activations are, and grow faster.
        """
        item = {kind: (more[kind] - one[kind]) / (items - 1) for kind in one}
        fixed = {kind: one[kind] - item[kind] for kind in one}
        if cached_gb:
            fixed["cached"], item["cached"] = 0.0, cached_gb / items
        return cls(fixed=fixed, item=item, item_flops=item_flops, kernels=kernels)

    def parts(self, items: int) -> dict[str, float]:
        return {kind: self.fixed[kind] + self.item[kind] * items for kind in self.fixed}

    def peak_gb(self, items: int) -> float:
        return sum(self.parts(items).values())


@dataclass(frozen=True)
class MemoryBudget:
    """What a card offers a training."""

    budget_gb: float
    flops_per_second: float | None = None  # of a matrix product in the precision of the training; None: unknown
    calibration: float = 1.0  # measured / predicted peak, where this card was measured
    margin: float = MARGIN

    def peak_gb(self, memory_model: MemoryModel, items: int) -> float:
        return memory_model.peak_gb(items) * self.calibration

    def takes(self, memory_model: MemoryModel, items: int) -> bool:
        return self.peak_gb(memory_model, items) * self.margin <= self.budget_gb

    def idle_share(self, memory_model: MemoryModel, items: int) -> float:
        """Time lost between kernels, by the least time of the arithmetic; 0 where either is unknown."""
        if not (self.flops_per_second and memory_model.item_flops):
            return 0.0
        return memory_model.kernels * OPERATOR_SECONDS * self.flops_per_second / (memory_model.item_flops * items)


@dataclass(frozen=True)
class Fit:
    """How a batch goes through a card. `settings`: the choices by name, with their reasons."""

    micro_batch_size: int
    accumulation_steps: int
    checkpointing: bool
    predicted_peak_gb: float
    parts: dict[str, float]  # of the peak, in GB
    item_flops: float  # with what checkpointing repeats
    least_seconds_per_step: float | None  # the arithmetic at the card's full rate; None where that is unknown
    budget_gb: float
    fits: bool
    settings: dict[str, Setting]

    def to_json(self) -> dict[str, object]:
        """The figures; the settings go with the plan."""
        figures = {name: value for name, value in vars(self).items() if name != "settings"}
        return {**figures, "budget_gb": self.budget_gb if math.isfinite(self.budget_gb) else None}

    def in_words(self) -> str:
        """The peak, what it consists of, and the least time, in a line."""
        parts = ", ".join(f"{kind} {gb:.2f}" for kind, gb in self.parts.items())
        budget = f" of {self.budget_gb:.1f}" if math.isfinite(self.budget_gb) else ""
        line = f"predicted peak {self.predicted_peak_gb:.2f} GB{budget} ({parts})"
        if self.least_seconds_per_step is None:
            return line
        return f"{line}; a step takes {self.least_seconds_per_step:.3g} s at the least"


def budget_gb(memory_gb: float, free_gb: float = 0.0, limit_gb: float = 0.0, share: float = BUDGET_SHARE) -> float:
    """What a training may take of a card: a share of its memory, or what is free if that is less (0: unknown), or the
    user's limit if that is less still (0: none). Raises UserError for a share or a limit that cannot be."""
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
    """Choose micro-batch, accumulation and checkpointing for a step on `batch_size` items, over `ranks` cards.

    No more than `largest` (0: all) go through at once. `footprint(checkpointing)` is asked only for what is needed. A
    given `micro_batch_size` (0: none) or `checkpointing`
    is respected, whether it fits or not. Where nothing fits, `fits` is False, and the least that is possible is
    returned. Raises UserError where the ranks cannot share the batch equally.
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
        # It is for parts that would leave the card idle for as long as it costs, not for those that are merely nicer;
        # and it goes no further, so that more memory, which may do without it, never means smaller parts.
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
    """The smallest size that suits; the largest of all, if none does."""
    return next(filter(suits, sizes), sizes[-1])


def _largest(sizes: list[int], memory_model: MemoryModel, budget: MemoryBudget, useful: int) -> int:
    """The largest useful size that fits; 0, if none does."""
    return max((m for m in sizes if m <= useful and budget.takes(memory_model, m)), default=0)


def _micro_batch(
    size: int, sizes: list[int], share: int, memory_model: MemoryModel, budget: MemoryBudget, fits: bool, asked: bool
) -> Setting:
    cost = f"a predicted peak of {budget.peak_gb(memory_model, size):.1f} GB"
    larger = next((m for m in sizes if m > size), 0)
    over = bool(larger) and not budget.takes(memory_model, larger)
    if not fits:
        reason = f"{'asked for' if asked else 'the least there is'}; it does not fit {budget.budget_gb:.1f} GB"
    elif asked:
        reason = "asked for"
    elif size == share:
        reason = "the whole batch fits at once"
    elif over:
        larger_gb = budget.peak_gb(memory_model, larger)
        beside = "more than" if larger_gb > budget.budget_gb else "too near to"
        reason = f"{larger} would take {larger_gb:.1f} GB, {beside} the {budget.budget_gb:.1f} that may be taken"
    else:
        reason = "it keeps the card at work: more at once would be no faster"
    return Setting(size, reason, cost)


def _accumulation(passes: int) -> Setting:
    if passes == 1:
        return Setting(1, "one part is the whole batch")
    return Setting(passes, "so many parts make the batch, exactly", "nothing in the result")


def _checkpointing(repeats: bool, *, asked: bool) -> Setting:
    if asked:
        reason = "asked for" if repeats else "switched off"
    else:
        reason = "too little fits without it" if repeats else "what the backward pass needs fits without it"
    return Setting(repeats, reason, "up to a third more arithmetic" if repeats else "")
