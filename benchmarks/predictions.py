"""Predicts the time of a step of any code by the roofline of its operators (gputrain/planner/time/roofline.py).

The rates of the device are measured, and nothing is fitted.
"""

from collections.abc import Callable
from typing import cast

import torch

from gputrain.hw.plan import Hardware, PrecisionWish, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.model_planner import measured_rates
from gputrain.planner.time.fusion import kernel_costs
from gputrain.planner.time.roofline import KernelCost, busy_seconds


def peer_seconds(step: Callable[[], object], device: torch.device, *, sixteen_bit: str = "") -> float:
    """Returns the predicted time of a step of a peer, which runs once more to count its operators.

    A peer computes with torch's default switches, in fp32 with TF32 for convolutions, or with "fp16" or "bf16"
    autocast. This sets torch's switches, so that it must follow the last timed step.
    """
    kernels = kernels_of(step, MemoryTimeline.on(device.type))
    hardware = Hardware(
        device="cuda" if device.type == "cuda" else "cpu",
        precision=cast(PrecisionWish, sixteen_bit or "tf32"),
        use_torch_compile=False,
    )
    return busy_seconds(kernels, measured_rates(apply(decide(probe(), hardware))))


def kernels_of(step: Callable[[], object], timeline: MemoryTimeline | None = None) -> tuple[KernelCost, ...]:
    """Returns the kernels of one call of `step`, on real or fake tensors, by the shapes of its operators. Regions that
    `timeline` knows are counted as compiled."""
    timeline = timeline or MemoryTimeline()
    with timeline.watching():
        step()
    return kernel_costs(timeline.log.operators)
