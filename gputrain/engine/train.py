"""How gputrain trains: read this page first, then step.py.

A model brings a Recipe (recipe.py): groups of phases, one phase for each optimizer. `update()` makes one optimizer step
of every phase on one batch, in as many micro-batches as memory requires (step.py); `train()` repeats it, and logs,
samples, evaluates, saves and stops between the steps (callbacks.py).
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, schedule

from gputrain.caches import cache_folder
from gputrain.engine.callbacks import Callbacks
from gputrain.engine.cuda_graph import replay_gradients_if_planned
from gputrain.engine.history import recorded
from gputrain.engine.memory_check import MemoryCheck
from gputrain.engine.metrics import Metrics
from gputrain.engine.recipe import Batch, Recipe
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver, warn_of_surprises
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.engine.step import accumulate, allocate_optimizer_state, drop_gradients, update
from gputrain.engine.stop import format_duration, log_start_until, timed_part
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import Runtime, is_out_of_memory, random_state, release_memory, set_random_state

log = logging.getLogger(__name__)

# Steps of --profile: the first ones compile, search for algorithms and fill the allocator, then the profiler warms up.
SKIPPED, WARMED_UP, RECORDED = 5, 2, 3
ROWS = 40  # Number of rows of the profile's table.
SAY_SECONDS = 30.0  # Least time between two lines on what is being compiled, where no bar shows it.


def train(
    recipe: Recipe,
    open_batches: Callable[[int, int], Generator[Any, None, None]],
    steps: StepSchedule,
    run: Run,
    runtime: Runtime,
    console: Console,
) -> None:
    """Train to the end of the schedule. `open_batches(first, last)` yields the batches of those steps, in order. Raises
    Stopped, with everything saved, when a signal asks for it."""
    state = TrainState.begin(recipe, steps.schedule, runtime, run)
    replay_gradients_if_planned(state)
    saver = Saver(state, run)
    check = MemoryCheck(saver, steps.start.step + 1)
    saver.write_plan()
    warn_of_surprises(state, run, steps)
    state.progress = steps.start
    first, end = steps.start.step, steps.stop_step
    if run.saving.ends_early(steps.start):
        log.info("nothing is left to do: the run has ended early; a higher --early-stopping-patience goes on")
        return
    if first >= end and not (steps.start.evaluation_due and run.saving.evaluates):
        beyond = "; a higher --max-steps, or none, goes on" if end < steps.last_step else ""
        log.info("nothing is left to do: the run has made its %d steps%s", end, beyond)
        return
    with (
        recorded(run, steps, state),
        Metrics(
            run.folder, console, runtime, unit=recipe.unit, first_step=first, last_step=steps.known_end, group=run.group
        ) as metrics,
        profiling(run.folder / "profile" if run.saving.profile else None, runtime.device) as mark_step,
        Monitor(runtime.device) as monitor,
        run.stop.handled(lambda: run.how_to_resume),
        compiling(saver, metrics) as mark_compiled,
        closing(open_batches(first, max(first, end))) as batches,
    ):
        callbacks = Callbacks(saver, steps, metrics, monitor)
        callbacks.begin()
        with callbacks.save_last_step_on_exit():
            for step in range(first, end):
                if callbacks.is_over:
                    break
                with run.stop.interruptible_wait(), timed_part("first batch") if step == first else nullcontext():
                    loaded = metrics.next(batches)
                if step == first:
                    log_start_until("the first step")
                    dry_run_later_peak(state, loaded, step, check)
                with check.watching(step):
                    batch = prepare(recipe, loaded, step)
                    state.group.reseed(steps.schedule.seed, step)
                    scalars = update(state, batch, step, callbacks.steps.learning_rate(step))
                recipe.average(step)
                state.progress = callbacks.steps.progress_at(step + 1, state.progress)
                state.is_consistent = True
                if step == first:
                    mark_compiled()
                    run.has_started()
                metrics.add(scalars, recipe.size(batch), recipe.flops(batch, step))
                mark_step()
                callbacks.after_step()


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


def prepare(recipe: Recipe, loaded: Any, step: int) -> Batch:
    """Return the batch of a step on the device. When memory runs out, unused memory is released and it is retried."""
    try:
        return recipe.prepare(loaded, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return recipe.prepare(loaded, step)


def dry_run_later_peak(state: TrainState, loaded: Any, first: int, check: MemoryCheck) -> None:
    """Dry-run the step that takes the most memory if it comes later than the first one. On a GPU it runs again, to be
    measured without what only a first pass takes."""
    step = state.recipe.peak_memory_step(first)
    if step == first:
        return
    dry_run(state, loaded, step)
    if state.runtime.device.type == "cuda":
        check.step = step
        with check.watching(step):
            dry_run(state, loaded, step)


def dry_run(state: TrainState, loaded: Any, step: int) -> None:
    """Compute the gradients of a later step that takes more memory, without stepping, so that what does not fit shows
    now. The optimizers allocate their state and change no weight."""
    recipe, device = state.recipe, state.runtime.device
    random = random_state(device)
    batch = prepare(recipe, loaded, step)
    for group in recipe.step_groups:
        accumulate(state, group, batch, step)
        for phase in group.phases:
            allocate_optimizer_state(phase)
        drop_gradients(group)
    set_random_state(random, device)


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
