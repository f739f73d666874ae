"""The saves: before the reports if the run ends, and after them when a checkpoint is due or the best so far."""

from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.schedule import RunProgress, Saving, StepSchedule, is_due_every


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
