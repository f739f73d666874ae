"""Work between the steps of a training: `StepLoop`, which all callbacks share, and `StepEnd`, by which they talk.

Each callback says after which steps it is `due`, and has a `run` for that. None of them calls another, and none has a
state that another changes; train.py has the list of them, with the reason for their order:

    clock.py        --max-time, --finish-by: cools down and stops in time
    requests.py     `gputrain watch` asks for a save, a stop or a cool-down
    metrics_log.py  metrics, warnings about the run, going back after non-finite gradients, relief of full memory
    save.py         checkpoints: what a stop requires, and what is due
    reports.py      samples and evaluations, the best score, early stopping

No completed step is lost. Before its end and before a stop, a run saves first and samples and evaluates afterwards, and
if anything ends the run between two steps, the last completed step is saved.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gputrain.engine.metrics import Metrics
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.engine.stop import Deadline
from gputrain.hw.monitor import Monitor

log = logging.getLogger(__name__)


@dataclass
class StepEnd:
    """The end of a step: what a callback decides there that those after it need to know.

    On several ranks, the clock and the requests decide on the leader alone; the decisions of all ranks are made one
    before anything is saved or reported.
    """

    step: int  # Completed steps.
    reports: list[str]  # "samples" and "eval", if they are due.
    is_last: bool = False  # True if the run ends here by its schedule, which the clock may have changed.
    begins_cooldown: bool = False  # From this checkpoint, the training can also go on at the full rate.
    lacks_time: bool = False  # The clock: there is no time for the reports before the end.
    requested_end: int = 0  # The requests: a cool-down begins now, and ends at this step. 0: none.
    stops: bool = False  # True if the run ends here, or stops with everything saved.
    save_is_due: bool = False  # True if the time for a save has come.
    names: list[str] = field(default_factory=list)  # Further names under which the checkpoint is kept, if any.
    best_score: float | None = None  # The reports: the score of the evaluation if it is the best so far, on the leader.
    is_best: bool = False  # The same for all ranks.
    ends_early: bool = False  # The reports: early stopping ends the training after this step.


@dataclass
class StepLoop:
    """The run between whose steps the callbacks work. `state.progress` holds the number of completed steps."""

    saver: Saver
    steps: StepSchedule  # A cool-down changes it.
    metrics: Metrics
    monitor: Monitor
    deadline: Deadline

    @property
    def state(self) -> TrainState:
        return self.saver.state

    @property
    def run(self) -> Run:
        return self.saver.run

    @contextmanager
    def paused(self, doing: str, report: str = "") -> Iterator[None]:
        """Leave the time of the block out of the speed of the steps, and count it as that of a kind of report."""
        with self.metrics.paused(doing), self.deadline.not_counted(report):
            yield

    def save(
        self,
        names: Sequence[str] = (),
        *,
        is_required: bool = False,
        waits: bool = False,
        best_score: float | None = None,
    ) -> None:
        """Save as `Saver.save`, without counting its time as that of a step."""
        with self.paused("saving"):
            self.saver.save(names, best_score=best_score, waits=waits, is_required=is_required)

    def cool_down(self, end: int, why: str = "") -> None:
        """Have the learning rate fall from the last completed step on until `end`, where the training ends, or have it
        go on falling to another end."""
        begins, done = not self.steps.start.cooldown_end, self.state.progress.step
        self.steps = self.steps.cooled_down(done, end)
        self.state.progress = self.steps.progress_at(done, self.state.progress)
        self.metrics.expect(self.steps.stop_step)
        if begins and end > done:
            self.note_cooldown(log_cooldown(self.steps, done, why), last_step=end)

    def note_cooldown(self, message: str, **further: int) -> None:
        """Add what becomes of the learning rate to the events of plan.json."""
        event = {"step": self.state.progress.step, "check": "cooldown", "message": message, **further}
        self.state.events.append(event)

    def set_evaluation_due(self, is_due: bool) -> None:
        """Note in the progress, and so in a save, that the evaluation of the last completed step is still to come."""
        self.state.progress = replace(self.state.progress, evaluation_due=is_due)


def log_cooldown(steps: StepSchedule, done: int, why: str = "") -> str:
    """Log the cool-down that a run is in after `done` steps. Returns the sentence."""
    rate, lowest = steps.learning_rate(done), steps.schedule.min_learning_rate
    message = f"cool-down{why}: the learning rate falls from {rate:.3g} to {lowest:.3g} until step {steps.last_step}"
    log.info(message)
    return message
