"""How gputrain trains: read this page first, then step.py.

A model brings a Recipe (recipe.py): groups of phases, one phase for each optimizer. `update()` makes one optimizer step
of every phase on one batch, in as many micro-batches as memory requires (step.py); `train()` repeats it, and logs,
samples, evaluates, saves and stops between the steps (between_steps.py).
"""

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from rich.console import Console

from gputrain.engine.between_steps import BetweenSteps
from gputrain.engine.cuda_graph import replay_gradients_if_planned
from gputrain.engine.history import recorded
from gputrain.engine.memory_check import MemoryCheck
from gputrain.engine.metrics import Metrics
from gputrain.engine.preflight import warn_of_surprises
from gputrain.engine.profiler import profiling
from gputrain.engine.recipe import Batch, Recipe
from gputrain.engine.run_dir import Run
from gputrain.engine.saving import write_plan
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.engine.step import accumulate, allocate_optimizer_state, drop_gradients, update
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import Runtime, is_out_of_memory, random_state, release_memory, set_random_state

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    open_batches: Callable[[int, int], Generator[Any, None, None]],
    steps: StepSchedule,
    run: Run,
    runtime: Runtime,
    console: Console,
) -> None:
    """Train to the end of the schedule. `open_batches(first, last)` yields the batches of those steps, in order.

    Raises Stopped, with everything saved, when a signal asks for it.
    """
    state = TrainState.begin(recipe, steps.schedule, runtime, run)
    replay_gradients_if_planned(state)
    check = MemoryCheck(state, run, steps.start.step + 1)
    write_plan(state, run)
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
            run.folder, console, runtime, unit=recipe.unit, first_step=first, last_step=end, group=run.group
        ) as metrics,
        profiling(run.folder / "profile" if run.saving.profile else None, runtime.device) as stepped,
        Monitor(runtime.device) as monitor,
        run.stop,
        closing(open_batches(first, max(first, end))) as batches,
    ):
        between = BetweenSteps(state, run, steps, metrics, monitor)
        between.begin()
        with between.saved_whatever_comes():
            for step in range(first, end):
                if between.ends_early:
                    break
                with run.stop.ends_waiting():
                    loaded = metrics.next(batches)
                if step == first:
                    dry_run_later_peak(state, loaded, step, check)
                with check.watching(step):
                    batch = prepare(recipe, loaded, step)
                    state.group.reseed(steps.schedule.seed, step)
                    scalars = update(state, batch, step, steps.learning_rate(step))
                recipe.average(step)
                state.progress = steps.progress_at(step + 1, state.progress)
                state.is_consistent = True
                if step == first:
                    run.has_started()
                metrics.add(scalars, recipe.size(batch), recipe.flops(batch, step))
                stepped()
                between.after_step()


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
            state.shards.keep_own_gradients(phase)
            allocate_optimizer_state(phase)
        drop_gradients(group)
    set_random_state(random, device)
