"""The work of the first steps, as a run shows it: what is compiled, and a profile of torch.profiler."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gputrain.caches import cache_folder
from gputrain.engine.metrics import Metrics
from gputrain.engine.saving import Saver
from gputrain.engine.stop import format_duration

log = logging.getLogger(__name__)

# Steps of --profile: the first ones compile, search for algorithms and fill the allocator, then the profiler warms up.
SKIPPED, WARMED_UP, RECORDED = 5, 2, 3
ROWS = 40  # Number of rows of the profile's table.
SAY_SECONDS = 30.0  # Least time between two lines on what is being compiled, where no bar shows it.


@contextmanager
def compiling(saver: Saver, metrics: Metrics) -> Iterator[Callable[[], None]]:
    """Say in the terminal and in plan.json how many graphs of the first step are compiled, of as many as the last
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
        state.compiling = metrics.bar.last_line = f"compiling: {done}{of} graphs done{rest}"
        if now - said >= SAY_SECONDS and not metrics.console.is_terminal:
            said = now
            log.info("%s", state.compiling)
        saver.write_plan()

    def end(is_compiled: bool = True) -> None:
        if callbacks and done > 0 and is_compiled:
            state.compiling = metrics.bar.last_line = ""
            saver.write_plan()
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
    steps, needed = 0, SKIPPED + WARMED_UP + RECORDED

    def write(profiler: profile) -> None:
        if steps < needed:
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

        def mark_step() -> None:
            nonlocal steps
            steps += 1
            profiler.step()

        try:
            yield mark_step
        finally:
            if steps < needed:
                log.warning("no profile was written: it needs %d steps, and this run made %d", needed, steps)
