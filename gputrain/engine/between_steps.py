"""Work between the steps of a training: logging, saving, sampling, evaluating, and stopping with everything saved.

No completed step is lost. Before its end and before a stop, a run saves first and samples and evaluates afterwards, and
if anything ends the run between two steps, the last completed step is saved.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gputrain.engine import checkpoint
from gputrain.engine.deadline import COMMAND_CLOCK, REPORT_SECONDS, Deadline
from gputrain.engine.health import Health
from gputrain.engine.metrics import Metrics, Report
from gputrain.engine.recipe import phases_of
from gputrain.engine.rollback import go_back_if_unstable
from gputrain.engine.run_dir import Run
from gputrain.engine.saving import finish_saving, save_checkpoint, start_saving, write_plan
from gputrain.engine.schedule import RunProgress, Saving, StepSchedule, every
from gputrain.engine.snapshot import tensor_bytes
from gputrain.engine.state import TrainState
from gputrain.engine.stop import StopRequested
from gputrain.engine.trackers import Trackers
from gputrain.errors import Stopped, UserError, first_line
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

log = logging.getLogger(__name__)


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
class BetweenSteps:
    """The work between two steps of a run; `state.progress` holds the number of completed steps."""

    state: TrainState
    run: Run
    steps: StepSchedule
    metrics: Metrics
    monitor: Monitor
    health: Health = field(init=False)
    relief: MemoryRelief = field(init=False)
    deadline: Deadline = field(init=False)
    ends_early: bool = False  # True after the evaluation with which early stopping ends the training.

    def __post_init__(self) -> None:
        self.relief = MemoryRelief(self.state)
        if self.run.group.leads:
            self.metrics.trackers = Trackers(
                self.run.saving.track, self.run.folder, self.run.settings, self.steps.start.step
            )
        self.health = Health(self.state.runtime.plan, usable_cores())
        self.deadline = Deadline.of(self.run.saving.max_time)
        if self.deadline.limit_seconds:
            self.deadline.save_bytes = tensor_bytes(self.state.snapshot())

    def begin(self) -> None:
        """Evaluate before the first step, if the settings ask for it, so that the curves start there. A run that ended
        between saving a step and evaluating it makes up for the evaluation."""
        saving, progress = self.run.saving, self.state.progress
        if progress.step == 0 and saving.evaluates and saving.eval_first:
            self.evaluate()
            self.run.group.wait_for_all()
        elif progress.evaluation_due and saving.evaluates:
            self._make_up_for_evaluation(progress)

    def _make_up_for_evaluation(self, progress: RunProgress) -> None:
        """Evaluate the step of the resumed checkpoint, and save it as it would have been saved."""
        log.info("evaluating step %d, after which the run ended before its evaluation", progress.step)
        self.metrics.forget_report(progress.step, "eval")
        for phase in phases_of(self.state.recipe):
            for group in phase.optimizer.param_groups if phase.optimizer.state else ():  # The others have not stepped.
                group["lr"] = self.steps.learning_rate(progress.step - 1) * phase.lr_scale
        self.state.progress = self.steps.progress_at(progress.step, progress)
        names = kept_as(self.steps, self.run.saving, self.state.progress, evaluates=True)
        self.save(names, waits=True, best_score=self._evaluate_and_count(self.state.progress))
        self.run.group.wait_for_all()

    def after_step(self) -> None:
        """Do everything that is due after the last completed step."""
        saving, progress = self.run.saving, self.state.progress
        done, last = progress.step, progress.step == self.steps.stop_step
        if not last:
            self._stop_in_time()
        stopping, is_due = self.run.group.any_of(bool(self.run.stop.requested), self.run.save_is_due())
        if stopping:
            self.run.stop.agree()
        reports = self._reports_of(done)
        names = kept_as(self.steps, saving, progress, "eval" in reports)
        evaluates = "eval" in reports or (last and saving.evaluates)
        self.state.progress = replace(progress, evaluation_due=evaluates)  # Until the evaluation, for any save before.

        if every(done, saving.log_freq) or last or stopping:
            self.log()
        if last or stopping:
            self.save(names, must=True)
        samples = "samples" in reports or last
        if samples:
            self.sample()
        best_score = self._evaluate_and_count(progress) if evaluates else None
        self.state.progress = replace(self.state.progress, evaluation_due=False)
        (is_best,) = self.run.group.any_of(best_score is not None) if evaluates else (False,)
        if self.run.writer.has_result:
            finish_saving(self.state, self.run)
        # A step that was saved before its evaluation is saved again, as an evaluated one.
        if evaluates if last or stopping else (names or is_best or is_due or self.ends_early):
            self.save(names, best_score=best_score)
        if last or stopping or samples or evaluates or names or is_due:
            self.run.group.wait_for_all()  # The others wait here while the leader works.

    def _reports_of(self, done: int) -> list[str]:
        """Return the reports that are due after this many steps."""
        saving, epoch = self.run.saving, self.steps.epochs_done(done)
        samples = every(done, saving.save_samples_freq) and epoch >= saving.samples_after_epochs
        ends_epochs = self.steps.ends_epoch(done) and every(epoch, saving.evaluate_freq)
        evaluates = ends_epochs or every(done, saving.evaluate_steps)
        return ["samples"] * samples + ["eval"] * evaluates

    def _stop_in_time(self) -> None:
        """Request a stop if a further step might end too late to save before the limit of --max-time.

        Of several ranks, the leader's clock decides.
        """
        deadline, run, now = self.deadline, self.run, time.monotonic()
        if not deadline.limit_seconds or not run.group.leads:
            return
        deadline.add_step(now)
        # A save that begins now or after the next step, the last one, and perhaps one that is being written.
        saves = 3 if run.writer.is_busy else 2
        done = self.state.progress.step
        reports = self._reports_of(done) + self._reports_of(done + 1)
        reserve = deadline.reserve_seconds(run.save_seconds, saves=saves, reports=reports)
        reserve += REPORT_SECONDS if run.saving.report and COMMAND_CLOCK.began is not None else 0.0
        if deadline.is_reached(now, reserve):
            run.stop.request(self._out_of_time)

    @property
    def _out_of_time(self) -> str:
        return f"stopped in time for --max-time {self.run.saving.max_time}"

    def _waits_in_time(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a wait for a batch ends in time for --max-time, even if no batch arrives. Several
        ranks could not agree to stop then, as the others may wait for gradients."""
        run = self.run
        if not self.deadline.limit_seconds or run.group.ranks.count > 1:
            return contextlib.nullcontext()

        def seconds_to_leave() -> float:
            saves = 2 if run.writer.is_busy else 1
            return self.deadline.saving_seconds(run.save_seconds, saves, hangs=True)

        return self.deadline.watched(seconds_to_leave, lambda: run.stop.end_wait(self._out_of_time))

    def log(self) -> None:
        """Write the metrics of the steps since the last call, warn about what is wrong, and react to unstable gradients
        and to full memory."""
        state, run, done = self.state, self.run, self.state.progress.step
        rows = self._write_metrics()
        run.note_time(self.metrics.latest["speed/seconds_per_step"])
        events = self.health.watch(rows, self.metrics.latest, done) if run.group.leads else []
        state.events += events
        if events and not run.writer.is_busy:  # A save in progress writes the plan itself, and the next one again.
            write_plan(state, run)
        go_back_if_unstable(state, rows, run, done)
        pressure = self.monitor.pressure()
        if pressure == "act" and state.runtime.device.type == "cpu" and not run.writer.is_busy:
            run.writer.snapshot.release()
        self.relief.relieve(pressure, done - 1)

    def _write_metrics(self, *, alone: bool = False) -> list[dict[str, float]]:
        """Write the line of the steps since the last one. Returns the scalars of these steps."""
        done = self.state.progress.step
        further = {"learning_rate": self.steps.learning_rate(done - 1), **memory_gb(self.state.runtime.device)}
        further |= {**self.monitor.figures(), **self.run.disk_gb}
        return self.metrics.write(done, self.steps.epochs_done(done), further, alone=alone)

    def save(
        self, names: list[str], *, must: bool = False, waits: bool = False, best_score: float | None = None
    ) -> None:
        """Save in a thread while the training goes on; if it `waits` or `must` save, before returning."""
        state, run = self.state, self.run
        with self.metrics.paused(), self.deadline.beside_the_steps():
            if must or waits:
                state.progress = save_checkpoint(
                    state, run, state.progress, names=names, must=must, best_score=best_score
                )
            else:
                start_saving(state, run, names=names, best_score=best_score)

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
        log_evaluation(progress.step, report.scalars, best)
        if not progress.step:
            return None
        if progress.step < self.run.saving.best_after:
            return None
        finish_saving(self.state, self.run)  # The best score is that of a checkpoint that has been written.
        progress = self.state.progress
        score = report.scalars["score"]
        return score if score > progress.best_score else None

    def _evaluate_and_count(self, progress: RunProgress) -> float | None:
        """Evaluate the step of `progress`, and note whether early stopping ends the training, as all ranks must know.
        Returns the score if it is the best so far."""
        # An evaluation that only max_steps causes is not one of the undisturbed run, and counts for nothing.
        counts = "eval" in self._reports_of(progress.step) or progress.finished
        best_score, saving = self.evaluate(counts=counts), self.run.saving
        (self.ends_early,) = self.run.group.any_of(saving.ends_early(self.state.progress))
        if self.ends_early:
            log.info(
                "the last %d evaluations were not better: training ends early after step %d, and %s has the best score",
                saving.early_stopping_patience, progress.step, checkpoint.BEST,
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
        with self.metrics.paused(), self.deadline.beside_the_steps(group), shapes_may_change():
            report = self._made(group, make, done)
            if report is None and self.state.free_memory():
                report = self._made(group, make, done)
            if report is None:
                log.warning("out of memory: %s of step %d are skipped", GROUPS[group], done)
        set_random_state(random, device)
        return report

    def _made(self, group: str, make: Callable[[], Report], done: int) -> Report | None:
        try:
            self.metrics.report(done, self.steps.epochs_done(done), group, report := make())
            return report
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # Not in the except block, whose traceback keeps tensors alive.
        return None

    @contextmanager
    def saved_whatever_comes(self) -> Iterator[None]:
        """Save the last completed step when the block ends early, because of a request to stop or an error. However
        it ends, wait for the checkpoint that is being written.

        Raises Stopped in the first case. An error is raised again, as a UserError if memory has run out.
        """
        try:
            with self._saved_if_stopped(), self._waits_in_time():
                yield
        finally:
            finish_saving(self.state, self.run)

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
            with self.run.stop.held():
                self._finish_saving_if_possible()
                done = self.state.progress.step
                if self.run.group.of_leader(lambda: done != self.run.saved_step):
                    self.save([], must=True)
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
                done + 1, self._where_it_resumes(),
            )  # fmt: skip
            return
        if done in (self.steps.start.step, self.run.saved_step):
            return
        if self.run.divides_optimizers:
            log.warning("step %d is not saved, as other ranks hold parts of it; %s", done, self._where_it_resumes())
            return
        release_memory()
        try:
            self.save([], waits=True)
        except Exception as error:  # The device may have failed. The error that ended the run is more important.
            log.warning("step %d cannot be saved: %s", done, error)
        if self.run.saved_step == done:
            log.warning("step %d is saved before the run ends with an error", done)
            with contextlib.suppress(Exception):  # The device may have failed, and with it the scalars on it.
                if self.metrics.window:
                    self._write_metrics(alone=True)  # Another rank may have ended, and with it the exchange.

    def _finish_saving_if_possible(self) -> None:
        try:
            finish_saving(self.state, self.run)
        except Exception as error:  # Whatever it is, the last step is saved next.
            log.warning("the checkpoint that was being written is lost: %s", error)

    def _where_it_resumes(self) -> str:
        saved = self.run.saved_step if self.run.saved_step >= 0 else self.steps.start.step
        if not checkpoint.in_order(self.run.folder):
            return "there is no checkpoint yet, so that a resumed run starts from scratch"
        return f"a resumed run goes on from step {saved}, as if it had never been interrupted"


SHOWN_FIGURES = 4  # Held-out figures that are logged; all are in metrics.jsonl.
GROUPS = {"samples": "the samples", "eval": "the held-out figures"}


def out_of_memory(state: TrainState, run: Run, error: Exception) -> UserError:
    """Returns the error for a run whose memory does not suffice with any micro-batch."""
    less = "a smaller picture or clip, --gradient-checkpointing, a smaller preset, or a larger GPU"
    return UserError(
        f"out of memory after step {state.progress.step} ({state.runtime.device}): {first_line(error)}",
        hint=f"{less}; {run.how_to_resume}",
    )


def log_evaluation(step: int, scalars: dict[str, float], best_before: float) -> None:
    """Log the held-out figures, and the best score so far."""
    figures = {name: value for name, value in scalars.items() if name != "score"}
    text = ", ".join(f"{name} {value:.4g}" for name, value in list(figures.items())[:SHOWN_FIGURES])
    score = scalars["score"]
    if best_before == -math.inf:
        comparison = ""
    elif score > best_before:
        comparison = f", the best so far (before: {best_before:.4g})"
    else:
        comparison = f" (best so far: {best_before:.4g})"
    log.info("held-out at step %d: %s; score %.4g%s", step, text, score, comparison)


def kept_as(steps: StepSchedule, saving: Saving, progress: RunProgress, evaluates: bool) -> list[str]:
    """Returns the further names under which the checkpoint of this step is kept, if any."""
    done, names = progress.step, []
    epoch = steps.epochs_done(done)
    if steps.ends_epoch(done) and (every(epoch, saving.checkpoint_freq) or progress.finished):
        names.append(f"checkpoint_epoch_{epoch}.pt")
    if every(done, saving.checkpoint_steps) or (evaluates and saving.checkpoint_steps < 0):
        names.append(f"checkpoint_step_{done}.pt")
    return names
