"""How gputrain trains: read this page first, then step.py.

A model brings a Recipe (recipe.py): groups of phases, one phase for each optimizer. `update()` makes one optimizer step
of every phase on one batch, in as many micro-batches as memory requires (step.py); `train()` repeats it, and logs,
samples, evaluates, saves and stops between the steps (callbacks/).

Step number `step`, counted from 0 over the whole run, is made with the noise, the data and the learning rate of that
number, so that a resumed run makes the steps that an uninterrupted one would have made. The host waits for the device
only where it must: the scalars of the steps stay there, and are read together once every `log_every_steps`.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from rich.console import Console

from gputrain.engine.callbacks import StepEnd, StepLoop, log_cooldown
from gputrain.engine.callbacks.clock import Clock
from gputrain.engine.callbacks.metrics_log import MetricsLog
from gputrain.engine.callbacks.reports import SKIPPED, Reports, last_reports, reports_due
from gputrain.engine.callbacks.requests import Requests
from gputrain.engine.callbacks.save import Save, SaveBeforeReports, kept_names, last_step_saved
from gputrain.engine.checkpoint import tensor_bytes
from gputrain.engine.cuda_graph import replay_gradients_if_planned
from gputrain.engine.first_steps import MemoryCheck, compiling
from gputrain.engine.metrics import Metrics
from gputrain.engine.out_of_memory import retried_once
from gputrain.engine.recipe import Batch, Recipe
from gputrain.engine.run_folder import Run, recorded
from gputrain.engine.saving import Saver, warn_of_surprises
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.engine.step import accumulate, allocate_optimizer_state, drop_gradients, update
from gputrain.engine.stop import Deadline, log_start_until, timed_part
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import Runtime, random_state, set_random_state

log = logging.getLogger(__name__)


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
    state = TrainState.begin(recipe, steps.schedule, runtime, run)  # The weights, at the checkpoint if one is resumed.
    replay_gradients_if_planned(state)
    saver = Saver(state, run)
    check = MemoryCheck(saver, steps.start.step + 1)
    saver.write_plan()  # Before the first step, so that a run that fails in it leaves behind what was planned.
    warn_of_surprises(state, run, steps)
    state.progress = steps.start
    first, end = steps.start.step, steps.stop_step
    if nothing_is_left(run, steps):
        return
    # The last of these is left first: data workers end while signals are still handled, and the line of history.jsonl
    # that says how the run has ended comes last.
    with (
        recorded(run, steps, runtime.device.type, lambda: state.progress),
        Metrics(run.folder, console, runtime, unit=recipe.unit, first_step=first, last_step=steps.known_end,
                group=run.group, heartbeat=run.heartbeat) as metrics,
        Monitor(runtime.device) as monitor,
        run.stop.handled(lambda: run.how_to_resume),
        compiling(saver, metrics) as mark_compiled,
        closing(open_batches(first, max(first, end))) as batches,
    ):  # fmt: skip
        loop = StepLoop(saver, steps, metrics, monitor, deadline_of(state, steps, run))
        callbacks = Callbacks(loop)
        callbacks.begin()
        with callbacks.running():  # However the loop ends, the last completed step is saved.
            for step in range(first, end):
                if callbacks.is_over:
                    break
                # A signal ends this wait at once, as the batch may never arrive; elsewhere it is heeded after the step.
                with run.stop.interruptible_wait(), timed_part("first batch") if step == first else nullcontext():
                    loaded = metrics.next(batches)
                if step == first:
                    log_start_until("the first step")
                    # Discriminators may join after thousands of steps. What does not fit then is found out now.
                    dry_run_later_peak(state, loaded, step, check)
                with check.watching(step):  # It measures the memory of one early step.
                    # The noise is drawn for the whole batch before it is split into micro-batches.
                    batch = prepare(recipe, loaded, step)
                    state.rank_group.reseed(steps.schedule.seed, step)  # Dropout differs from rank to rank.
                    scalars = update(state, batch, step, loop.steps.learning_rate(step))
                recipe.average(step)  # The moving average of the weights, once every phase has stepped.
                # From here on the step may be saved: weights, their average and the progress belong together again.
                state.progress = loop.steps.progress_at(step + 1, state.progress)
                state.is_consistent = True
                if step == first:
                    mark_compiled()
                    run.has_started()  # It writes config.yaml, which has shown that it works.
                metrics.add(scalars, recipe.size(batch), recipe.flops(batch, step))
                callbacks.after_step()


def nothing_is_left(run: Run, steps: StepSchedule) -> bool:
    """Returns True, and says so, if a resumed run has no step to make and none to evaluate."""
    end = steps.stop_step
    # Early stopping is part of the progress: without this, a job that is started again and again would go on each time.
    if run.saving.ends_early(steps.start):
        log.info("nothing is left to do: the run has ended early; a higher --early-stopping-patience goes on")
        return True
    if steps.start.step < end or (steps.start.evaluation_due and run.saving.evaluates):
        return False
    beyond = "; a higher --max-steps, or none, goes on" if end < steps.last_step else ""
    log.info("nothing is left to do: the run has made its %d steps%s", end, beyond)
    return True


class Callback(Protocol):
    """Something that is done after those steps after which it is due."""

    def due(self, end: StepEnd) -> bool: ...
    def run(self, end: StepEnd) -> None: ...


class Callbacks:
    """The work between two steps: its order, and how several ranks do the same."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.clock, self.requests, self.reports = Clock(loop), Requests(loop), Reports(loop)
        self.metrics_log = MetricsLog(loop)
        self.deciding: tuple[Callback, ...] = (
            self.clock,  # First, as it may end the training with this step, or have ended it at another one.
            self.requests,  # A cool-down that is asked for is refused if the clock has begun one.
        )
        self.acting: tuple[Callback, ...] = (
            self.metrics_log,  # It may go back to a checkpoint, and weights that are given up must not be saved.
            SaveBeforeReports(loop),  # Where the run ends, the step is safe before anything else is tried.
            self.reports,  # The checkpoint of a step that is evaluated is saved afterwards, with its score.
            Save(loop),  # Last, as it needs to know whether the step is the best so far.
        )
        self.ends_early = False  # True after the evaluation with which early stopping ends the training.

    @property
    def is_over(self) -> bool:
        """True if the run ends before the last step that was expected at its start, early or by the clock."""
        return self.ends_early or self.loop.state.progress.step >= self.loop.steps.stop_step

    def after_step(self) -> None:
        """Call everything that is due after the last completed step."""
        loop, step = self.loop, self.loop.state.progress.step
        end = StepEnd(step, reports_due(loop.steps, loop.run.saving, step))
        # First all decisions, on the leader; then one exchange, after which all ranks know them; then what is done.
        for callback in self.deciding:
            if callback.due(end):
                callback.run(end)
        self._agree(end)
        # A save that comes before the evaluation notes that it is due: a run that is killed in between makes it up.
        loop.set_evaluation_due("eval" in end.reports)
        # On a terminal the bar moves. A log file would show nothing until the first line of metrics.
        self.metrics_log.announce(end)
        for callback in self.acting:
            if callback.due(end):
                callback.run(end)
        self.ends_early = end.ends_early
        if end.stops or end.reports or end.names or end.save_is_due:  # The other ranks wait for what the leader did.
            loop.run.group.wait_for_all()

    def _agree(self, end: StepEnd) -> None:
        """Have all ranks do the same after this step. A signal may reach one of them alone, and the leader alone reads
        the clock and the requests; what it decided it tells here, and all act on it. One exchange for each step."""
        loop, run = self.loop, self.loop.run
        end.is_last = end.step == loop.steps.stop_step
        # A rank that stopped alone would leave the others waiting for its gradients for ever.
        stops, end.save_is_due, end.lacks_time, is_requested = run.group.any_rank(
            bool(run.stop.requested), loop.saver.is_due(), end.lacks_time, end.requested_end > 0
        )
        # On every rank, the next wait for a batch raises StopRequested, with everything saved by then.
        if stops:
            run.stop.agree()
        if is_requested:
            loop.cool_down(run.group.from_leader(lambda: end.requested_end), " as asked from gputrain watch")
        # With --finish-by, being done in time goes before the reports: the checkpoint can be evaluated later.
        if end.lacks_time:
            log.info(
                "step %d: there is no time for %s before the end",
                end.step,
                " and ".join(SKIPPED[kind] for kind in end.reports),
            )
            end.reports = []
        end.names = kept_names(loop.steps, run.saving, loop.state.progress, "eval" in end.reports)
        # The checkpoint at which a cool-down begins is kept: named, it goes on at the full learning rate.
        if (end.begins_cooldown or is_requested) and not end.is_last:
            end.names = list({*end.names, f"checkpoint_step_{end.step}.pt"})
        # A run ends with figures and samples of its last weights, whatever the intervals are.
        if end.is_last:
            end.reports = last_reports(run.saving)
        end.stops = stops or end.is_last

    def begin(self) -> None:
        """Sample before the first step, and evaluate if the settings ask for it or there is something to compare with
        later. A run that ended between saving a step and evaluating it is evaluated now."""
        loop, saving, progress = self.loop, self.loop.run.saving, self.loop.state.progress
        if progress.cooldown_end:
            log_cooldown(loop.steps, progress.step)
        eval_first = loop.run.starts_pretrained if saving.eval_first is None else saving.eval_first
        if progress.step == 0:
            with timed_part("first samples"):  # To compare those of later steps with.
                self.reports.sample()
                loop.run.group.wait_for_all()
        # A model that was trained before is evaluated first: otherwise nobody could say whether training it on helped.
        if progress.step == 0 and saving.evaluates and eval_first:
            with timed_part("first evaluation"):
                self.reports.evaluate_start()
                loop.run.group.wait_for_all()
        elif progress.evaluation_due and saving.evaluates:
            with timed_part("first evaluation"):
                self._evaluate_resumed_step(StepEnd(progress.step, ["eval"]))

    def _evaluate_resumed_step(self, end: StepEnd) -> None:
        """Evaluate the step of the resumed checkpoint, and save it as it would have been saved."""
        loop = self.loop
        log.info("evaluating step %d, after which the run ended before its evaluation", end.step)
        # The save below replaces the checkpoint, and must be the one that the undisturbed run would have written.
        self.reports.prepare_for_evaluation()
        loop.state.progress = loop.steps.progress_at(end.step, loop.state.progress)
        names = kept_names(loop.steps, loop.run.saving, loop.state.progress, evaluates=True)
        self.reports.evaluate_step(end)
        self.ends_early = end.ends_early
        loop.save(names, waits=True, best_score=end.best_score)
        loop.run.group.wait_for_all()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take requests, keep the clock, and save the last step however the block ends."""
        with last_step_saved(self.loop, self.metrics_log), self.clock.interrupting_waits(), self.requests.watched():
            yield


def deadline_of(state: TrainState, steps: StepSchedule, run: Run) -> Deadline:
    """Return the deadline of a run, with the size of its checkpoints."""
    # Before the first save, its duration is estimated from the size of what is saved.
    deadline = Deadline.of(run.saving.max_time, steps.schedule.finish_by)
    if deadline.is_set:
        deadline.save_bytes = tensor_bytes(state.snapshot())
        left = deadline.began + deadline.last_seconds - time.monotonic()
        run.heartbeat.ends_at = (datetime.now(timezone.utc) + timedelta(seconds=left)).isoformat(timespec="seconds")
    return deadline


def prepare(recipe: Recipe, loaded: Any, step: int) -> Batch:
    """Return the batch of a step on the device. When memory runs out, unused memory is released and it is retried."""
    return retried_once(lambda: recipe.prepare(loaded, step))


def dry_run_later_peak(state: TrainState, loaded: Any, first: int, check: MemoryCheck) -> None:
    """Dry-run the step that takes the most memory if it comes later than the first one. On a GPU it runs again, to be
    measured without what only a first pass takes."""
    step = state.recipe.peak_memory_step(first)
    if step == first:
        return
    # If it does not fit, the micro-batch is halved now, and not after hours.
    dry_run(state, loaded, step)
    if state.runtime.device.type == "cuda":
        check.step = step
        with check.watching(step):
            dry_run(state, loaded, step)


def dry_run(state: TrainState, loaded: Any, step: int) -> None:
    """Compute the gradients of a later step that takes more memory, without stepping, so that what does not fit shows
    now. The optimizers allocate their state and change no weight."""
    recipe, device = state.recipe, state.runtime.device
    random = random_state(device)  # The first real step must draw the dropout that it would have drawn without this.
    batch = prepare(recipe, loaded, step)
    for group in recipe.step_groups:
        accumulate(state, group, batch, step)
        for phase in group.phases:
            allocate_optimizer_state(phase)
        # The gradients of a later step are not those of this one, and must not reach the weights.
        drop_gradients(group)
    set_random_state(random, device)
