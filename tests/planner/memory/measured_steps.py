"""Real steps on the CPU, whose memory is compared with predictions."""

from gputrain.hw.plan import Plan
from gputrain.hw.runtime import apply
from gputrain.planner.kind_work import PlanTarget
from gputrain.planner.memory.allocator import PlainAllocator
from gputrain.planner.memory.predict import watch_step
from gputrain.planner.memory.timeline import MemoryTimeline


def measured_peak_gb(target: PlanTarget, plan: Plan, items: int, checkpointing: bool) -> float:
    """Returns the peak of a step on one micro-batch of real tensors, with gradients in memory before it."""
    step = watch_step(target, apply(plan), MemoryTimeline(), items, checkpointing)
    return step.estimate(PlainAllocator()).allocated_gb
