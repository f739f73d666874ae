"""`--profile`: a profile of a few steps, made by torch.profiler."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)

SKIPPED = 5  # Steps that compile, search for algorithms and fill the allocator.
WARMED_UP = 2  # Steps in which the profiler itself warms up.
RECORDED = 3
ROWS = 40  # Number of rows of the table.


@contextmanager
def profiling(folder: Path | None, device: torch.device) -> Iterator[Callable[[], None]]:
    """Record some steps into `folder`/table.txt and `folder`/trace.json; None records nothing.

    Yields a function to call after every step. The trace opens in chrome://tracing and ui.perfetto.dev.
    """
    if folder is None:
        yield lambda: None
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Otherwise torch's tracer prints messages.
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    steps = 0

    def write(profiler: profile) -> None:
        if steps < SKIPPED + WARMED_UP + RECORDED:
            log.warning("no profile was written: it needs %d steps", SKIPPED + WARMED_UP + RECORDED)
            return
        try:
            folder.mkdir(exist_ok=True)
            table = profiler.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=80)
            (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
            profiler.export_chrome_trace(str(folder / "trace.json"))
        except OSError as error:
            log.warning("%s cannot be written (%s); training continues", folder, error.strerror)
        else:
            log.info("profile of %d steps: %s, %s", RECORDED, folder / "table.txt", folder / "trace.json")

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan = schedule(wait=SKIPPED, warmup=WARMED_UP, active=RECORDED, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler:

        def stepped() -> None:
            nonlocal steps
            steps += 1
            profiler.step()

        yield stepped
