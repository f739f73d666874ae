"""Measured time, rates and memory of training steps. GB is 1e9 bytes."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from gputrain.hw.runtime import Runtime, memory_gb, synchronize

log = logging.getLogger(__name__)


class Laps:
    """Times between marks: on CUDA by the device's clock, without waiting for the device; otherwise wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.cpu_marks: list[float] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
            self.cpu_marks.append(time.process_time())

    def seconds(self) -> list[float]:
        """Returns the seconds of each lap. Waits for the device."""
        if self.device.type != "cuda":
            return _differences(self.marks)
        synchronize(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]

    def cpu_seconds(self) -> list[float]:
        """Returns the CPU seconds of each lap, over all threads of this process; none on CUDA."""
        return _differences(self.cpu_marks)


def _differences(marks: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(marks)]


def time_steps(step: Callable[[], object], device: torch.device, *, warmup: int, steps: int) -> dict[str, float]:
    """Returns the seconds of a step (the median of `steps` after `warmup`) and of the first one, which compiles, and
    the peak memory.

    On CUDA the peaks are those of the timed steps, on the CPU the peak of the process so far.
    """
    began = time.perf_counter()
    for done in range(max(1, warmup)):
        log.info("warm-up step %d", done + 1)
        step()
        synchronize(device)
        if done == 0:
            first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    laps = Laps(device)
    log.info("timing %d steps", steps)
    laps.mark()
    for _ in range(steps):
        step()
        laps.mark()
    figures = {"seconds_per_step": statistics.median(laps.seconds()), "first_step_seconds": first}
    if laps.cpu_seconds():
        figures["cpu_seconds_per_step"] = statistics.median(laps.cpu_seconds())
    return figures | {name.removeprefix("memory/"): value for name, value in memory_gb(device).items()}


def rates(seconds: float, items: int, flops: float, runtime: Runtime) -> dict[str, float]:
    """Returns items a second, TFLOPS, and on a GPU their share of the FLOPS of a matrix product."""
    found = {"items_per_second": items / seconds, "tflops": flops / seconds / 1e12}
    share = runtime.peak_share(flops / seconds)
    return found if share is None else {
        **found, "product_tflops": runtime.product_rate / 1e12, "share_of_product": share
    }  # fmt: skip
