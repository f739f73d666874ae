"""Work between the steps of a training: a list of callbacks, each with the steps after which it is due.

No completed step is lost. Before its end and before a stop, a run saves first and samples and evaluates afterwards, and
if anything ends the run between two steps, the last completed step is saved.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import tensor_bytes
from gputrain.engine.health import Health
from gputrain.engine.metrics import Metrics
from gputrain.engine.recipe import phases_of
from gputrain.engine.requests import ASKED_TO_STOP, Request, watched
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver, go_back_if_unstable
from gputrain.engine.schedule import RunProgress, Saving, StepSchedule, is_due_every
from gputrain.engine.state import TrainState
from gputrain.engine.stop import COMMAND_CLOCK, REPORT_SECONDS, Deadline, StopRequested, timed_part
from gputrain.engine.trackers import Trackers
from gputrain.errors import Stopped, UserError, first_line
from gputrain.formatting import format_number
from gputrain.hw.monitor import Monitor, Pressure
from gputrain.hw.probe import usable_cores
from gputrain.hw.runtime import (
    is_out_of_memory,
    library_failure,
    memory_gb,
    random_state,
    release_memory,
    set_random_state,
    shapes_may_change,
)
from gputrain.samples import Report

log = logging.getLogger(__name__)

SHOWN_FIGURES = 4  # Held-out figures that are logged; all are in metrics.jsonl.
DOING = {"samples": "sampling", "eval": "evaluating"}  # What the progress bar shows meanwhile.
SKIPPED = {"samples": "the samples", "eval": "the held-out figures"}  # What is skipped if memory runs out.


@dataclass
class MemoryRelief:
    """Reduces memory use when the monitor reports that the device is nearly full."""

    state: TrainState
    warned: bool = False
    times_in_a_row: int = 0  # Number of consecutive reports that the memory was too full.

    def relieve(self, pressure: Pressure, step: int) -> None:
        """Release unused memory first; if that was not enough, reduce the largest micro-batch."""
        if pressure == "warn" and not self.warned:
            self.warned = True
            log.warning("the device's memory is 90 % full; at 95 %, the micro-batch will be reduced")
        if pressure != "act":
            self.times_in_a_row = 0
            return
        self.times_in_a_row += 1
        release_memory()
        sizes = self.state.micro_batch
        if self.times_in_a_row > 1 and max(sizes.values()) > 1:
            self.state.shrink(max(sizes, key=lambda group: sizes[group]), "memory 95 % full", step)


@dataclass
class StepEnd:
    """The end of a step, as it is known before any callback is called there."""

    step: int  # Completed steps.
    stops: bool  # True if the run ends here, or stops with everything saved.
    reports: list[str]  # "samples" and "eval", if they are due.
    names: list[str]  # Further names under which the checkpoint is kept, if any.
    save_is_due: bool  # True if the time for a save has come.
    best_score: float | None = None  # The score of its evaluation if it is the best so far, on the leader.
    is_best: bool = False  # The same for all ranks.


class Callback(NamedTuple):
    """Something that is done after those steps after which it is due."""

    due: Callable[[StepEnd], bool]
    call: Callable[[StepEnd], None]


class Callbacks:
    """The work between two steps of a run; `state.progress` holds the number of completed steps."""

    def __init__(self, saver: Saver, steps: StepSchedule, metrics: Metrics, monitor: Monitor) -> None:
        self.saver, self.state, self.run = saver, saver.state, saver.run
        self.steps, self.metrics, self.monitor = steps, metrics, monitor
        run = self.run
        self.relief = MemoryRelief(self.state)
        if run.group.leads:
            metrics.trackers = Trackers(
                run.saving.track, run.folder, run.settings, steps.start.step, repeats_steps=metrics.repeats_steps
            )
        self.health = Health(self.state.runtime.plan, usable_cores())
        self.deadline = Deadline.of(run.saving.max_time, steps.schedule.finish_by)
        if self.deadline.is_set:
            self.deadline.save_bytes = tensor_bytes(self.state.snapshot())
        self.began_cooldown = False  # True if a cool-down began in this run, by its clock.
        self.asked: deque[int] = deque()  # Cool-downs that are asked for, over so many steps.
        self.ends_early = False  # True after the evaluation with which early stopping ends the training.
        self.callbacks = (
            Callback(
                lambda end: end.stops or is_due_every(end.step, run.saving.log_every_steps), lambda end: self.log()
            ),
            Callback(lambda end: end.stops, lambda end: self.save(end.names, is_required=True)),
            Callback(lambda end: "samples" in end.reports, lambda end: self.sample()),
            Callback(lambda end: "eval" in end.reports, self._evaluate_step),
            Callback(lambda end: self.saver.has_result, lambda end: self.saver.finish()),
            Callback(self._save_is_due, lambda end: self.save(end.names, best_score=end.best_score)),
            Callback(self._ranks_must_wait, lambda end: self.run.group.wait_for_all()),
        )

    @property
    def is_over(self) -> bool:
        """True if the run ends before the last step that was expected at its start, early or by the clock."""
        return self.ends_early or self.state.progress.step >= self.steps.stop_step

    def begin(self) -> None:
        """Evaluate before the first step, if the settings ask for it or there is something to compare with later. A run
        that ended between saving a step and evaluating it is evaluated now."""
        saving, progress = self.run.saving, self.state.progress
        if progress.cooldown_end:
            log_cooldown(self.steps, progress.step)
        eval_first = self.run.starts_pretrained if saving.eval_first is None else saving.eval_first
        if progress.step == 0 and saving.evaluates and eval_first:
            with timed_part("first evaluation"):
                self.evaluate()
                self.run.group.wait_for_all()
        elif progress.evaluation_due and saving.evaluates:
            self._evaluate_resumed_step(progress)

    @timed_part("first evaluation")
    def _evaluate_resumed_step(self, progress: RunProgress) -> None:
        """Evaluate the step of the resumed checkpoint, and save it as it would have been saved."""
        log.info("evaluating step %d, after which the run ended before its evaluation", progress.step)
        self.metrics.forget_report(progress.step, "eval")
        for phase in phases_of(self.state.recipe):
            for group in phase.optimizer.param_groups if phase.optimizer.state else ():  # The others have not stepped.
                group["lr"] = self.steps.learning_rate(progress.step - 1) * phase.lr_scale
        self.state.progress = self.steps.progress_at(progress.step, progress)
        names = kept_names(self.steps, self.run.saving, self.state.progress, evaluates=True)
        self.save(names, waits=True, best_score=self._evaluate_and_count())
        self.run.group.wait_for_all()

    def after_step(self) -> None:
        """Call everything that is due after the last completed step."""
        end = self._step_end()
        self.state.progress = replace(self.state.progress, evaluation_due="eval" in end.reports)  # For a save before.
        interval = self.run.saving.log_every_steps
        first = end.step == self.steps.start.step + 1 and not end.stops
        if first and interval > 1 and not self.metrics.console.is_terminal:
            log.info("%s is done; metrics follow every %d steps", self.metrics.step_text, interval)
        for callback in self.callbacks:
            if callback.due(end):
                callback.call(end)

    def _step_end(self) -> StepEnd:
        saving, run, step = self.run.saving, self.run, self.state.progress.step
        if self.deadline.is_set and run.group.leads:
            self.deadline.add_step(time.monotonic())
        cools_down = self._follow_the_clock()
        last, end_asked_for = step == self.steps.stop_step, self._end_asked_for(step)
        if not last:
            self._stop_in_time()
        reports = self._reports_of(step)
        stops, save_is_due, lacks_time, asked = run.group.any_rank(
            bool(run.stop.requested), self.saver.is_due(), self._lacks_time_for(reports), end_asked_for > 0
        )
        if stops:
            run.stop.agree()
        if asked:
            self._cool_down(run.group.from_leader(lambda: end_asked_for), " as asked from gputrain watch")
        if lacks_time:
            skipped = " and ".join(SKIPPED[one] for one in reports)
            log.info("step %d: there is no time for %s before the end", step, skipped)
            reports = []
        names = kept_names(self.steps, saving, self.state.progress, "eval" in reports)
        if (cools_down or asked) and not last:  # From this checkpoint, the training can also go on at the full rate.
            names = list({*names, f"checkpoint_step_{step}.pt"})
        if last:
            reports = ["samples"] + ["eval"] * saving.evaluates
        return StepEnd(step, stops or last, reports, names, save_is_due)

    def _reports_of(self, step: int) -> list[str]:
        """Return the reports that are due after this many steps, unless they are the last ones."""
        saving, epoch = self.run.saving, self.steps.epochs_done(step)
        samples = is_due_every(step, saving.sample_every_steps) and epoch >= saving.samples_after_epochs
        ends_epochs = self.steps.ends_epoch(step) and is_due_every(epoch, saving.evaluate_every_epochs)
        evaluates = saving.evaluation_is_due(step, ends_epochs=ends_epochs)
        return ["samples"] * samples + ["eval"] * evaluates

    def _save_is_due(self, end: StepEnd) -> bool:
        """Return whether the step is saved now. One that was saved before its evaluation is saved again, evaluated."""
        if end.stops:
            return "eval" in end.reports
        return bool(end.names) or end.is_best or end.save_is_due or self.ends_early

    def _ranks_must_wait(self, end: StepEnd) -> bool:
        """Return whether the leader has done what the other ranks must wait for."""
        return end.stops or bool(end.reports or end.names) or end.save_is_due

    def _stop_in_time(self) -> None:
        """Request a stop if a further step might end too late to save before the limit of --max-time.

        Of several ranks, the leader's clock decides.
        """
        deadline, run, now = self.deadline, self.run, time.monotonic()
        if not deadline.limit_seconds or not run.group.leads:
            return
        # A save that begins now or after the next step, the last one, and perhaps one that is being written.
        saves = 3 if self.saver.is_busy else 2
        done = self.state.progress.step
        reports = self._reports_of(done) + self._reports_of(done + 1)
        reserve = deadline.reserve_seconds(run.status.save_seconds, saves=saves, reports=reports)
        reserve += REPORT_SECONDS if run.saving.report and COMMAND_CLOCK.began is not None else 0.0
        if deadline.is_reached(now, reserve):
            run.stop.request(self._out_of_time)

    def _follow_the_clock(self) -> bool:
        """With --finish-by, begin the cool-down in time to have finished then, and give it another end if the steps
        become slower or faster. Returns whether it begins after this step. One that a resumed run has begun already is
        never lengthened, so that the run ends as if it had not been interrupted.

        Of several ranks, the leader's clock decides.
        """
        steps, done, group = self.steps, self.state.progress.step, self.run.group
        if not steps.schedule.finish_by:
            return False
        end = self._end_by_clock() if group.leads else None
        (changes,) = group.any_rank(end is not None)
        if not changes:
            return False
        end = group.from_leader(lambda: end or done)
        begins = not steps.start.cooldown_end
        self.began_cooldown |= begins
        self._cool_down(end)
        if begins and end == done:
            log.warning(
                "--finish-by %s is reached before the learning rate, %.3g, could fall; --cooldown STEPS lowers it from "
                "this checkpoint on", steps.schedule.finish_by, steps.learning_rate(done - 1),
            )  # fmt: skip
        return begins

    def _cool_down(self, end: int, why: str = "") -> None:
        """Have the learning rate fall from the last completed step on until `end`, where the training ends, or have it
        go on falling to another end."""
        begins, done = not self.steps.start.cooldown_end, self.state.progress.step
        self.steps = self.steps.cooled_down(done, end)
        self.state.progress = self.steps.progress_at(done, self.state.progress)
        self.metrics.expect(self.steps.stop_step)
        if begins and end > done:
            self._note(log_cooldown(self.steps, done, why), last_step=end)

    def _end_asked_for(self, step: int) -> int:
        """Return the step at which a cool-down ends that is asked for and begins now; 0: none."""
        while self.asked:
            try:
                return self.steps.end_by_request(step, self.asked.popleft())
            except UserError as error:
                log.warning(message := f"no cool-down as asked from gputrain watch: {error.message}")
                self._note(message)
                self.saver.write_plan()
        return 0

    def _note(self, message: str, **further: int) -> None:
        """Add what becomes of the learning rate to the events of plan.json."""
        event = {"step": self.state.progress.step, "check": "cooldown", "message": message, **further}
        self.state.events.append(event)

    def _take_up(self, request: Request) -> None:
        """Note a request, in the thread that has found it. Several ranks could not agree to leave a wait for data."""
        stop = self.run.stop
        if request.action == "cooldown":
            self.asked.append(request.steps)
        elif request.action == "save":
            self.saver.is_overdue = True
            log.info("asked from gputrain watch: checkpoint_last.pt is written after this step")
        elif not stop.requested:
            log.warning("%s: finishing the step and saving", ASKED_TO_STOP)
            (stop.interrupt_wait if self.run.group.ranks.count == 1 else stop.request)(ASKED_TO_STOP)

    def _end_by_clock(self) -> int | None:
        """Return the step at which the cool-down must end by the clock, if that changes now."""
        if not self.deadline.finish_seconds:
            return None
        left = self.deadline.steps_left(time.monotonic(), self._reserve_for_end())
        if left is None:
            return None
        if self.steps.has_open_end:
            self.metrics.expect(self.state.progress.step + left)
        return self.steps.end_by_clock(self.state.progress.step, left, may_lengthen=self.began_cooldown)

    def _reserve_for_end(self) -> float:
        """Return the seconds that the end of a training by the clock may take, with the last reports and saves."""
        saves = 3 if self.saver.is_busy else 2
        reports = ["samples"] + ["eval"] * self.run.saving.evaluates
        reserve = self.deadline.reserve_seconds(self.run.status.save_seconds, saves=saves, reports=reports)
        return reserve + (REPORT_SECONDS if self.run.saving.report and COMMAND_CLOCK.began is not None else 0.0)

    def _lacks_time_for(self, reports: list[str]) -> bool:
        """Return True if these reports would make the end of the training later than --finish-by."""
        deadline = self.deadline
        if not reports or not deadline.finish_seconds or not self.run.group.leads:
            return False
        taken = sum(deadline.report_seconds.get(kind, 0.0) for kind in reports)
        return deadline.began + deadline.finish_seconds < time.monotonic() + taken + self._reserve_for_end()

    @property
    def _out_of_time(self) -> str:
        limit, deadline = self.run.saving.max_time, self.deadline
        by_clock = not limit or 0 < deadline.finish_seconds < deadline.limit_seconds
        at = f"--finish-by {self.steps.schedule.finish_by}" if by_clock else f"--max-time {limit}"
        return f"stopped in time for {at}"

    def _interrupt_waits_at_deadline(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a wait for a batch ends in time for --max-time, even if no batch arrives. Several
        ranks could not agree to stop then, as the others may wait for gradients."""
        run = self.run
        if not self.deadline.is_set or run.group.ranks.count > 1:
            return contextlib.nullcontext()

        def seconds_to_leave() -> float:
            saves = 2 if self.saver.is_busy else 1
            return self.deadline.saving_seconds(run.status.save_seconds, saves, hangs=True)

        return self.deadline.watched(seconds_to_leave, lambda: run.stop.interrupt_wait(self._out_of_time))

    def log(self) -> None:
        """Write the metrics of the steps since the last call, warn about what is wrong, and react to unstable gradients
        and to full memory."""
        state, run, done = self.state, self.run, self.state.progress.step
        rows = self._write_metrics()
        note_time(run, self.metrics.latest["speed/seconds_per_step"])
        events = self.health.watch(rows, self.metrics.latest, done) if run.group.leads else []
        state.events += events
        if events:
            self.saver.write_plan()
        go_back_if_unstable(self.saver, rows, done)
        pressure = self.monitor.pressure()
        if pressure == "act" and state.runtime.device.type == "cpu" and not self.saver.is_busy:
            self.saver.host.release()
        self.relief.relieve(pressure, done - 1)

    def _write_metrics(self, *, alone: bool = False) -> list[dict[str, float]]:
        """Write the line of the steps since the last one. Returns the scalars of these steps."""
        done = self.state.progress.step
        further = {"learning_rate": self.steps.learning_rate(done - 1), **memory_gb(self.state.runtime.device)}
        further |= {**self.monitor.figures(), **self.saver.disk_gb}
        return self.metrics.write(done, self.steps.epochs_done(done), further, alone=alone)

    def save(
        self,
        names: Sequence[str] = (),
        *,
        is_required: bool = False,
        waits: bool = False,
        best_score: float | None = None,
    ) -> None:
        """Save as `Saver.save`, without counting its time as that of a step."""
        with self.metrics.paused(), self.deadline.not_counted():
            self.saver.save(names, best_score=best_score, waits=waits, is_required=is_required)

    def sample(self) -> None:
        self._report("samples", self.state.recipe.sample)

    def evaluate(self, *, counts: bool = True) -> float | None:
        """Evaluate, and count it for early stopping if it `counts`. Returns the score if it is the best so far and the
        run has reached `best_after`; otherwise None."""
        report = self._report("eval", self.state.recipe.evaluate)
        progress = self.state.progress
        if report is None:
            return None
        best = progress.best_evaluation
        if progress.step and counts:
            self._count(report.scalars["score"])
        log_evaluation(progress.step, report.scalars, best, report.headline)
        if not progress.step:
            return None
        if progress.step < self.run.saving.best_after:
            return None
        self.saver.finish()  # The best score is that of a checkpoint that has been written.
        progress = self.state.progress
        score = report.scalars["score"]
        return score if score > progress.best_score else None

    def _evaluate_step(self, end: StepEnd) -> None:
        end.best_score = self._evaluate_and_count()
        self.state.progress = replace(self.state.progress, evaluation_due=False)
        (end.is_best,) = self.run.group.any_rank(end.best_score is not None)

    def _evaluate_and_count(self) -> float | None:
        """Evaluate the last completed step, and note whether early stopping ends the training, as all ranks must know.
        Returns the score if it is the best so far."""
        # An evaluation that only max_steps causes is not one of the undisturbed run, and counts for nothing.
        step, finished, saving = self.state.progress.step, self.state.progress.finished, self.run.saving
        best_score = self.evaluate(counts="eval" in self._reports_of(step) or finished)
        (self.ends_early,) = self.run.group.any_rank(saving.ends_early(self.state.progress))
        if self.ends_early:
            log.info(
                "the last %d evaluations were not better: training ends early after step %d, and %s has the best score",
                saving.early_stopping_patience, step, checkpoint.BEST,
            )  # fmt: skip
        return best_score

    def _count(self, score: float) -> None:
        """Count the evaluations since the best one, for early stopping."""
        progress = self.state.progress
        is_better = score > progress.best_evaluation
        self.state.progress = replace(
            progress,
            best_evaluation=max(score, progress.best_evaluation),
            evaluations_since_best=0 if is_better else progress.evaluations_since_best + 1,
        )

    def _report(self, group: str, make: Callable[[], Report]) -> Report | None:
        """Make a report and log it; the random state is kept. Returns None if memory ran out, and beside the leader."""
        if not self.run.group.leads:
            return None
        done, random = self.state.progress.step, random_state(device := self.state.runtime.device)
        with self.metrics.paused(DOING[group]), self.deadline.not_counted(group), shapes_may_change():
            report = self._report_if_it_fits(group, make, done)
            if report is None and self.state.free_memory():
                report = self._report_if_it_fits(group, make, done)
            if report is None:
                log.warning("out of memory: %s of step %d are skipped", SKIPPED[group], done)
        set_random_state(random, device)
        return report

    def _report_if_it_fits(self, group: str, make: Callable[[], Report], done: int) -> Report | None:
        try:
            self.metrics.report(done, self.steps.epochs_done(done), group, report := make())
            return report
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # Not in the except block, whose traceback keeps tensors alive.
        return None

    @contextmanager
    def save_last_step_on_exit(self) -> Iterator[None]:
        """Save the last completed step when the block ends early, because of a request to stop or an error. However
        it ends, wait for the checkpoint that is being written.

        Raises Stopped in the first case. An error is raised again, as a UserError if memory has run out.
        """
        try:
            with self._saved_if_stopped(), self._interrupt_waits_at_deadline(), watched(self.run, self._take_up):
                yield
        finally:
            self.saver.finish()

    @contextmanager
    def _saved_if_stopped(self) -> Iterator[None]:
        try:
            yield
            return
        except StopRequested:
            failure: Exception | None = None
        except Stopped:  # The checkpoint could not be written.
            raise
        except Exception as error:
            failure = self._failure(error)
        if failure is None:
            if self.metrics.window:
                self.log()
            with self.run.stop.second_signal_delayed():
                self._finish_saving_if_possible()
                done = self.state.progress.step
                if self.run.group.from_leader(lambda: done != self.run.status.saved_step):
                    self.save(is_required=True)
            done = self.state.progress.step
            cause = self.run.stop.requested
            raise Stopped(f"{cause} after step {done}; everything is saved", hint=self.run.how_to_resume)
        self._save_if_possible()
        raise failure

    def _failure(self, error: Exception) -> Exception:
        """Return the error that ends the run: what to do, if it is known."""
        if isinstance(error, UserError):
            return error
        if is_out_of_memory(error):
            return out_of_memory(self.state, self.run, error)
        return library_failure(error) or error

    def _save_if_possible(self) -> None:
        """Save the last completed step if it is not saved yet and its weights have not changed since."""
        state, done = self.state, self.state.progress.step
        self._finish_saving_if_possible()
        if not state.is_consistent:
            log.warning(
                "step %d failed after some of its weights had changed, and is not saved; %s",
                done + 1, self._resume_note(),
            )  # fmt: skip
            return
        if done in (self.steps.start.step, self.run.status.saved_step):
            return
        release_memory()
        try:
            self.save(waits=True)
        except Exception as error:  # The device may have failed. The error that ended the run is more important.
            log.warning("step %d cannot be saved: %s", done, error)
        if self.run.status.saved_step == done:
            log.warning("step %d is saved before the run ends with an error", done)
            with contextlib.suppress(Exception):  # The device may have failed, and with it the scalars on it.
                if self.metrics.window:
                    self._write_metrics(alone=True)  # Another rank may have ended, and with it the exchange.

    def _finish_saving_if_possible(self) -> None:
        try:
            self.saver.finish()
        except Exception as error:  # Whatever it is, the last step is saved next.
            log.warning("the checkpoint that was being written is lost: %s", error)

    def _resume_note(self) -> str:
        saved = self.run.status.saved_step if self.run.status.saved_step >= 0 else self.steps.start.step
        if not checkpoint.newest_first(self.run.folder):
            return "there is no checkpoint yet, so that a resumed run starts from scratch"
        return f"a resumed run goes on from step {saved}, as if it had never been interrupted"


def note_time(run: Run, seconds_per_step: float) -> None:
    """Keep the measured time of a step, and compare it once with the predicted one. The first line of metrics contains
    compilation and the search for algorithms, and does not count."""
    measured, predicted = run.status.seconds_per_step, run.prediction.get("predicted_seconds_per_step")
    measured.append(seconds_per_step)
    if len(measured) == 2 and predicted:
        log.info("a step takes %.3g s; %.3g s were predicted", seconds_per_step, predicted)


def log_cooldown(steps: StepSchedule, done: int, why: str = "") -> str:
    """Log the cool-down that a run is in after `done` steps. Returns the sentence."""
    rate, lowest = steps.learning_rate(done), steps.schedule.min_learning_rate
    message = f"cool-down{why}: the learning rate falls from {rate:.3g} to {lowest:.3g} until step {steps.last_step}"
    log.info(message)
    return message


def out_of_memory(state: TrainState, run: Run, error: Exception) -> UserError:
    """Returns the error for a run whose memory does not suffice with any micro-batch."""
    less = "a smaller picture or clip, --gradient-checkpointing, a smaller preset, or a larger GPU"
    return UserError(
        f"out of memory after step {state.progress.step} ({state.runtime.device}): {first_line(error)}",
        hint=f"{less}; {run.how_to_resume}",
    )


def log_evaluation(step: int, scalars: dict[str, float], best_before: float, shares: Collection[str] = ()) -> None:
    """Log the held-out figures, and the best score so far. Figures of these names are shares of 1."""
    figures = [(name, value) for name, value in scalars.items() if not name.endswith(("score", "_low", "_high"))]
    percent = {name for name, _ in figures if name in shares or name.endswith("_share")}
    text = ", ".join(
        f"{name} {format_number(100 * value)} %" if name in percent else f"{name} {format_number(value, 4)}"
        for name, value in figures[:SHOWN_FIGURES]
    )
    score = scalars["score"]
    if best_before == -math.inf:
        comparison = ""
    elif score > best_before:
        comparison = f", the best so far (before: {best_before:.4g})"
    else:
        comparison = f" (best so far: {best_before:.4g})"
    log.info("held-out at step %d: %s; score %.4g%s", step, text, score, comparison)


def kept_names(steps: StepSchedule, saving: Saving, progress: RunProgress, evaluates: bool) -> list[str]:
    """Returns the further names under which the checkpoint of this step is kept, if any."""
    done, names = progress.step, []
    epoch = steps.epochs_done(done)
    if steps.ends_epoch(done) and (is_due_every(epoch, saving.checkpoint_every_epochs) or progress.finished):
        names.append(f"checkpoint_epoch_{epoch}.pt")
    if is_due_every(done, saving.checkpoint_every_steps) or (evaluates and saving.checkpoint_every_steps < 0):
        names.append(f"checkpoint_step_{done}.pt")
    return names
