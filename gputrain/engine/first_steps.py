"""The first steps of a run: what they compile, and the peak of memory next to the predicted one.

The check of the plan's memory measures the second step of a run on a GPU. The first is not like the others: cuDNN tries
algorithms in as much memory as is free, the compiler tunes kernels, and the optimizers allocate their state only after
the gradients. If a later step takes more memory, its dry run is measured instead, when it runs a second time. The
allocator counts on the host, so nothing waits for the device. On a CPU nothing is compared: the memory of the process,
with Python, torch and the data, says nothing about the predicted tensors. GB is 1e9 bytes.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gputrain.caches import cache_folder
from gputrain.engine.metrics import Metrics
from gputrain.engine.saving import Saver
from gputrain.engine.stop import format_duration

log = logging.getLogger(__name__)

LIBRARIES_GB = 0.1  # Workspaces of cuBLAS, 32 MiB a thread on a Hopper, which are not predicted.
SAY_SECONDS = 30.0  # Least time between two lines on what is being compiled, where no bar shows it.


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
        """Log the measured peak with the predicted one, and write both into plan.json; warn if it is larger by more
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
                "%.3f",
                done,
                predicted_gb,
                found.allocated_gb,
                found.reserved_gb,
                ratio,
            )
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


@contextmanager
def compiling(saver: Saver, metrics: Metrics) -> Iterator[Callable[[], None]]:
    """Say in the terminal and in heartbeat.json how many graphs of the first step are compiled, of as many as the last
    training of this kind had. Yields a function that ends this."""
    state, note = saver.state, cache_folder() / "compiled" / f"{saver.state.recipe.kind}_graphs"
    done, began, said, expected = 0, 0.0, -math.inf, 0
    with contextlib.suppress(OSError, ValueError):
        expected = int(note.read_text())

    def show(is_done: int, event: object) -> None:
        nonlocal done, began, said
        now = time.monotonic()
        began, done = began or now, done + is_done
        of, rest = "", "; compiled code is kept for the next start"
        if done <= expected > 0:
            seconds = (now - began) / max(1, done) * (expected - done)
            of, rest = f" of {expected}", f", about {format_duration(seconds)} left" if done else ""
        metrics.bar.last_line = phase = f"compiling: {done}{of} graphs done{rest}"
        metrics.heartbeat.note(phase)
        if now - said >= SAY_SECONDS and not metrics.console.is_terminal:
            said = now
            log.info("%s", phase)

    def end(is_compiled: bool = True) -> None:
        if callbacks and done > 0 and is_compiled:
            metrics.bar.last_line = ""
            log.info("compiled %d graphs in %s", done, format_duration(time.monotonic() - began))
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.write_text(str(done))
        while callbacks:
            handler.remove_end_callback(callbacks.pop())
            handler.remove_start_callback(callbacks.pop())

    callbacks: list[Any] = []
    if state.runtime.plan.compile.value:
        handler = torch._dynamo.callback.callback_handler
        callbacks += [handler.register_start_callback(functools.partial(show, 0))]
        callbacks += [handler.register_end_callback(functools.partial(show, 1))]
    try:
        yield end
    finally:
        end(False)
