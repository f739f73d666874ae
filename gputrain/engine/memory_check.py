"""The check of a plan's memory: the peak that an early step takes on a GPU, beside the predicted one.

The second step of a run is measured. The first is not like the others: cuDNN tries algorithms in as much memory as is
free, the compiler tunes kernels, and the optimizers allocate their state only after the gradients. If a later step
takes more memory, its dry run is measured instead, when it runs a second time. The allocator counts on the host, so
nothing waits for the device. On a CPU nothing is compared: the memory of the process, with Python, torch and the data,
says nothing about the predicted tensors. GB is 1e9 bytes.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gputrain.engine.saving import Saver

log = logging.getLogger(__name__)

LIBRARIES_GB = 0.1  # Workspaces of cuBLAS, 32 MiB a thread on a Hopper, which are not predicted.


@dataclass
class MeasuredPeak:
    """The peak of the memory that tensors took."""

    allocated_gb: float = 0.0
    reserved_gb: float = 0.0  # Memory that the allocator held.
    retries: int = 0  # Times that the allocator had to release cached memory before it could allocate.

    def include(self, allocated_gb: float, reserved_gb: float) -> None:
        self.allocated_gb = max(self.allocated_gb, allocated_gb)
        self.reserved_gb = max(self.reserved_gb, reserved_gb)


@contextmanager
def allocator_peak(device: torch.device, found: MeasuredPeak) -> Iterator[None]:
    """Raises `found` to the peak of the code within, as the allocator of a CUDA device counts it."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["num_alloc_retries"]
    yield
    found.include(torch.cuda.max_memory_allocated(device) / 1e9, torch.cuda.max_memory_reserved(device) / 1e9)
    found.retries += torch.cuda.memory_stats(device)["num_alloc_retries"] - before


@dataclass
class MemoryCheck:
    """Compares the peak of one step of a run with the plan's prediction."""

    saver: Saver
    step: int | None  # The step that is measured; None: it has been.

    def __post_init__(self) -> None:
        self.saver.run.status.measured_memory = {}  # A run of several stages has measured the plan of the stage before.

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Measures the code within if it is the step to be measured, on a GPU."""
        device = self.saver.state.runtime.device
        if device.type != "cuda" or step != self.step:
            yield
            return
        found = MeasuredPeak()
        with allocator_peak(device, found):
            yield
        self.step = None
        self.report(found, step + 1)

    def report(self, found: MeasuredPeak, done: int) -> None:
        """Log the measured peak beside the predicted one, and write both into plan.json; warn if it is larger by more
        than the plan's margin and what libraries take."""
        state, run = self.saver.state, self.saver.run
        plan = state.runtime.plan
        measured = {"peak_gb": found.allocated_gb, "peak_reserved_gb": found.reserved_gb, "step": done}
        predicted_gb = run.prediction.get("predicted_peak_gb")
        planned = int(plan.micro_batch_size.value) if plan.micro_batch_size else 0
        if predicted_gb and all(size >= planned for size in state.micro_batch.values()):
            # Segments that cannot grow have gaps, which the prediction counts too.
            peak_gb = found.allocated_gb if plan.expandable_segments.value else found.reserved_gb
            measured["ratio"] = ratio = peak_gb / predicted_gb
            log.info(
                "memory of step %d: predicted peak %.2f GB, measured %.2f GB (%.2f GB reserved), measured / predicted "
                "%.3f", done, predicted_gb, found.allocated_gb, found.reserved_gb, ratio,
            )  # fmt: skip
            if peak_gb > run.prediction["margin"] * predicted_gb + LIBRARIES_GB:
                self.warn(ratio, done)
        run.status.measured_memory = measured
        self.saver.write_plan()

    def warn(self, ratio: float, done: int) -> None:
        message = (
            f"a step takes {ratio - 1:.0%} more memory than predicted, beyond the plan's margin of "
            f"{self.saver.run.prediction['margin'] - 1:.0%}. It has fitted; if memory runs out later, the same items "
            "are computed in smaller micro-batches, and the result does not change"
        )
        if (largest := max(self.saver.state.micro_batch.values())) > 1:
            message += f"; --micro-batch-size {math.ceil(largest / 2)} leaves more room"
        log.warning("%s", message)
        self.saver.state.events.append({"step": done, "check": "memory", "message": message})
