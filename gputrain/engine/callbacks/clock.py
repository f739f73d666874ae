"""The clock: a run with --max-time stops in time to save, and one with --finish-by cools down and ends in time.

Of several ranks, the leader's clock decides.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.callbacks.reports import last_reports, reports_due
from gputrain.engine.stop import COMMAND_CLOCK, REPORT_SECONDS

log = logging.getLogger(__name__)


class Clock:
    """Begins and shortens the cool-down of --finish-by, and requests the stop of --max-time."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop, self.deadline = loop, loop.deadline
        self.began_cooldown = False  # True if a cool-down began in this run, by its clock.

    def due(self, end: StepEnd) -> bool:
        return bool(self.loop.run.saving.max_time or self.loop.steps.schedule.finish_by)

    def run(self, end: StepEnd) -> None:
        leads = self.loop.run.group.leads
        if leads:
            self.deadline.add_step(time.monotonic())
        end.begins_cooldown = self._follow_the_clock()
        if leads and end.step != self.loop.steps.stop_step:
            self._stop_in_time(end.step)
        end.lacks_time = leads and self._lacks_time_for(end.reports)

    def interrupting_waits(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a wait for a batch ends in time for --max-time, even if no batch arrives. Several
        ranks could not agree to stop then, as the others may wait for gradients."""
        run, saver = self.loop.run, self.loop.saver
        if not self.deadline.is_set or run.group.ranks.count > 1:
            return contextlib.nullcontext()

        def seconds_to_leave() -> float:
            saves = 2 if saver.is_busy else 1
            return self.deadline.saving_seconds(run.status.save_seconds, saves, hangs=True)

        return self.deadline.watched(seconds_to_leave, lambda: run.stop.interrupt_wait(self._out_of_time))

    def _follow_the_clock(self) -> bool:
        """With --finish-by, begin the cool-down in time to have finished then, and give it another end if the steps
        become slower or faster. Returns whether it begins after this step. One that a resumed run has begun already is
        never lengthened, so that the run ends as if it had not been interrupted."""
        loop, steps, group = self.loop, self.loop.steps, self.loop.run.group
        done = loop.state.progress.step
        if not steps.schedule.finish_by:
            return False
        end = self._end_by_clock() if group.leads else None
        (changes,) = group.any_rank(end is not None)
        if not changes:
            return False
        end = group.from_leader(lambda: end or done)
        begins = not steps.start.cooldown_end
        self.began_cooldown |= begins
        loop.cool_down(end)
        if begins and end == done:
            log.warning(
                "--finish-by %s is reached before the learning rate, %.3g, could fall; --cooldown STEPS lowers it from "
                "this checkpoint on",
                steps.schedule.finish_by,
                steps.learning_rate(done - 1),
            )
        return begins

    def _end_by_clock(self) -> int | None:
        """Return the step at which the cool-down must end by the clock, if that changes now."""
        loop, done = self.loop, self.loop.state.progress.step
        if not self.deadline.finish_seconds:
            return None
        left = self.deadline.steps_left(time.monotonic(), self._reserve_for_end())
        if left is None:
            return None
        if loop.steps.has_open_end:
            loop.metrics.expect(done + left)
        return loop.steps.end_by_clock(done, left, may_lengthen=self.began_cooldown)

    def _stop_in_time(self, done: int) -> None:
        """Request a stop if a further step might end too late to save before the limit of --max-time."""
        steps, saving = self.loop.steps, self.loop.run.saving
        if self.deadline.limit_seconds:
            reports = reports_due(steps, saving, done) + reports_due(steps, saving, done + 1)
            if self.deadline.is_reached(time.monotonic(), self._reserve_seconds(reports)):
                self.loop.run.stop.request(self._out_of_time)

    def _lacks_time_for(self, reports: Sequence[str]) -> bool:
        """Return True if these reports would make the end of the training later than --finish-by."""
        if not reports or not self.deadline.finish_seconds:
            return False
        taken = sum(self.deadline.report_seconds.get(kind, 0.0) for kind in reports)
        finish = self.deadline.began + self.deadline.finish_seconds
        return finish < time.monotonic() + taken + self._reserve_for_end()

    def _reserve_for_end(self) -> float:
        """Return the seconds that the end of a training by the clock may take, with the last reports and saves."""
        return self._reserve_seconds(last_reports(self.loop.run.saving))

    def _reserve_seconds(self, reports: list[str]) -> float:
        """Return the seconds that a further step, these reports, the saves and the report of the command may take."""
        run = self.loop.run
        # A save that begins now or after the next step, the last one, and perhaps one that is being written.
        saves = 3 if self.loop.saver.is_busy else 2
        reserve = self.deadline.reserve_seconds(run.status.save_seconds, saves=saves, reports=reports)
        return reserve + (REPORT_SECONDS if run.saving.report and COMMAND_CLOCK.began is not None else 0.0)

    @property
    def _out_of_time(self) -> str:
        limit, deadline = self.loop.run.saving.max_time, self.deadline
        by_clock = not limit or 0 < deadline.finish_seconds < deadline.limit_seconds
        at = f"--finish-by {self.loop.steps.schedule.finish_by}" if by_clock else f"--max-time {limit}"
        return f"stopped in time for {at}"
