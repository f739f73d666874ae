"""Totals of the kernels of a step, which tests and benchmarks compare."""

from collections.abc import Sequence
from typing import NamedTuple

from gputrain.planner.time.roofline import KernelCost, StepCost


class StepTotals(NamedTuple):
    """Launches, bytes (1e9) and FLOPs (1e12) of a step."""

    kernels: int
    gb: float
    tflop: float

    @classmethod
    def of(cls, kernels: Sequence[KernelCost]) -> "StepTotals":
        launches, moved, flops = (
            sum(getattr(kernel, what) for kernel in kernels) for what in ("launches", "bytes", "flops")
        )
        return cls(round(launches), moved / 1e9, flops / 1e12)


def kernels_of(cost: StepCost, micro_batch: int, passes: int) -> tuple[KernelCost, ...]:
    """Returns all kernels of a step of so many micro-batches. The first one adds to no gradients."""
    kernels = cost.micro_batch(micro_batch)
    first = tuple(kernel for kernel in kernels if not kernel.accumulates)
    return first + kernels * (passes - 1) + cost.update


def totals_of(cost: StepCost, micro_batch: int, passes: int = 1) -> StepTotals:
    """Returns launches, bytes and FLOPs of a step of so many micro-batches."""
    return StepTotals.of(kernels_of(cost, micro_batch, passes))
