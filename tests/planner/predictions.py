"""Predictions that tests and benchmarks look at: of a step of any torch model, and the totals of a step's kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from gputrain.hw.plan import Setting
from gputrain.planner.memory.fake_runtime import Rules
from gputrain.planner.memory.predict import MemoryEstimate, predict_step
from gputrain.planner.memory.torch_model import (
    Loss,
    Optimizer,
    Precision,
    model_plan,
    model_target,
    refuse_unpredictable,
)
from gputrain.planner.time.roofline import KernelCost, StepCost


def predict_training_memory(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    checkpointing: bool = False,
    gradients_resident: bool = True,
    caching_allocator: bool = True,
    expandable_segments: bool = False,
    autocast_rules: Rules = "cuda",
) -> MemoryEstimate:
    """Returns the memory of an optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `precision` is that of autocast; `checkpointing` enables the gradient checkpointing of a transformers model.
    `gradients_resident`: a micro-batch adds to existing gradients. `caching_allocator`: False for a CPU, which frees
    memory at once; `autocast_rules`: the device whose kernels and rules of autocast are assumed. Raises UserError if
    the model needs values to run, or has modules whose memory cannot be predicted.
    """
    refuse_unpredictable(model)
    target = model_target(model, loss, lambda items: batch, precision, optimizer)
    plan = replace(model_plan(autocast_rules), expandable_segments=Setting(expandable_segments, ""))
    return predict_step(
        target,
        plan,
        micro_batch_size=1,
        checkpointing=checkpointing,
        gradients_resident=gradients_resident,
        caching_allocator=caching_allocator,
    )


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
