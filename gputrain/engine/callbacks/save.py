"""The saves: before the reports if the run ends, after them when a checkpoint is due or the best so far, and of the
last completed step if anything else ends the run."""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gputrain.engine import checkpoint
from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.callbacks.metrics_log import MetricsLog
from gputrain.engine.out_of_memory import REMEDY
from gputrain.engine.schedule import RunProgress, Saving, StepSchedule, is_due_every
from gputrain.engine.stop import StopRequested
from gputrain.errors import Stopped, UserError, first_line
from gputrain.hw.runtime import is_out_of_memory, library_failure, release_memory

log = logging.getLogger(__name__)


class SaveBeforeReports:
    """Saves where the run ends, before samples and evaluations that may fail or be interrupted. It must succeed."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop

    def due(self, end: StepEnd) -> bool:
        return end.stops

    def run(self, end: StepEnd) -> None:
        self.loop.save(end.names, is_required=True)


class Save:
    """Saves what is due, the best so far, and evaluated what was saved before its evaluation. Takes over the result of
    a save that a thread has ended."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop

    def due(self, end: StepEnd) -> bool:
        return self.loop.saver.has_result or self._is_needed(end)

    def run(self, end: StepEnd) -> None:
        if self.loop.saver.has_result:
            self.loop.saver.finish()
        if self._is_needed(end):
            self.loop.save(end.names, best_score=end.best_score)

    def _is_needed(self, end: StepEnd) -> bool:
        if end.stops:  # It is saved already, and once more with its evaluation.
            return "eval" in end.reports
        return bool(end.names) or end.is_best or end.save_is_due or end.ends_early


def kept_names(steps: StepSchedule, saving: Saving, progress: RunProgress, evaluates: bool) -> list[str]:
    """Returns the further names under which the checkpoint of this step is kept, if any."""
    done, names = progress.step, []
    epoch = steps.epochs_done(done)
    if steps.ends_epoch(done) and (is_due_every(epoch, saving.checkpoint_every_epochs) or progress.finished):
        names.append(f"checkpoint_epoch_{epoch}.pt")
    if is_due_every(done, saving.checkpoint_every_steps) or (evaluates and saving.checkpoint_every_steps < 0):
        names.append(f"checkpoint_step_{done}.pt")
    return names


# -------------------------------------------------------------------------------- a run that ends otherwise


@contextmanager
def last_step_saved(loop: StepLoop, metrics_log: MetricsLog) -> Iterator[None]:
    """Save the last completed step when the block ends early, because of a request to stop or an error. However it
    ends, wait for the checkpoint that is being written.

    Raises Stopped in the first case. An error is raised again, as a UserError if memory has run out.
    """
    is_stopped, failure = False, None
    with contextlib.ExitStack() as ending:
        ending.callback(loop.saver.finish)
        try:
            yield
        except StopRequested:
            is_stopped = True
        except Stopped:  # The checkpoint could not be written.
            raise
        except Exception as error:
            failure = explained(loop, error)
        # This is outside the except block, whose traceback keeps the tensors of the failed step alive.
        if is_stopped:
            save_and_stop(loop, metrics_log)
        if failure is not None:
            save_if_possible(loop, metrics_log)
            raise failure


def save_and_stop(loop: StepLoop, metrics_log: MetricsLog) -> None:
    """Save the last completed step, unless it is saved already. Raises Stopped."""
    run, done = loop.run, loop.state.progress.step
    if loop.metrics.window:
        metrics_log.write_and_react()
    with run.stop.second_signal_delayed():
        finish_pending_save(loop)
        if run.group.from_leader(lambda: done != run.status.saved_step):
            loop.save(is_required=True)
    raise Stopped(f"{run.stop.requested} after step {done}; everything is saved", hint=run.how_to_resume)


def save_if_possible(loop: StepLoop, metrics_log: MetricsLog) -> None:
    """Save the last completed step if it is not saved yet and its weights have not changed since."""
    run, done = loop.run, loop.state.progress.step
    finish_pending_save(loop)
    if not loop.state.is_consistent:
        saved = run.status.saved_step if run.status.saved_step >= 0 else loop.steps.start.step
        resumed = f"a resumed run goes on from step {saved}, as if it had never been interrupted"
        if not checkpoint.newest_first(run.folder):
            resumed = "there is no checkpoint yet, so that a resumed run starts from scratch"
        log.warning("step %d failed after some of its weights had changed, and is not saved; %s", done + 1, resumed)
        return
    if done in (loop.steps.start.step, run.status.saved_step):
        return
    release_memory()
    try:
        loop.save(waits=True)
    except Exception as error:  # The device may have failed. The error that ended the run is more important.
        log.warning("step %d cannot be saved: %s", done, error)
    if run.status.saved_step == done:
        log.warning("step %d is saved before the run ends with an error", done)
        with contextlib.suppress(Exception):  # The device may have failed, and with it the scalars on it.
            if loop.metrics.window:
                metrics_log.write(alone=True)  # Another rank may have ended, and with it the exchange.


def finish_pending_save(loop: StepLoop) -> None:
    try:
        loop.saver.finish()
    except Exception as error:  # Whatever it is, the last step is saved next.
        log.warning("the checkpoint that was being written is lost: %s", error)


def explained(loop: StepLoop, error: Exception) -> Exception:
    """Returns the error that ends the run: what to do, if it is known."""
    if isinstance(error, UserError):
        return error
    if is_out_of_memory(error):
        state = loop.state
        return UserError(
            f"out of memory after step {state.progress.step} ({state.runtime.device}): {first_line(error)}",
            hint=f"{REMEDY}; {loop.run.how_to_resume}",
        )
    return library_failure(error) or error
