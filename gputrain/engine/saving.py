"""Saving a training in its run folder: checkpoints and plan.json."""

import dataclasses
import logging
import time
from collections.abc import Sequence

from gputrain.engine import checkpoint
from gputrain.engine.plan_file import NAME, PlanFile
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import RunProgress
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped
from gputrain.hw.runtime import memory_gb

log = logging.getLogger(__name__)


def save_checkpoint(
    state: TrainState,
    run: Run,
    progress: RunProgress,
    *,
    names: Sequence[str],
    must: bool,
    best_score: float | None = None,
) -> RunProgress:
    """Save a checkpoint, under further `names` too; with a `best_score`, as the best so far. Returns the progress,
    whose best score changes only if its checkpoint was written.

    A write error ends only a run that `must` save. After a step with non-finite gradients the save is postponed to the
    next finite step, so that doubtful weights don't replace a good checkpoint, unless the run must save.
    """
    run.is_overdue = not must and any(map(bool, state.nonfinite.values()))
    if not run.group.leads:
        return progress
    if run.is_overdue:
        for name in names:
            log.warning("%s is not written, as the gradient of its step is not finite", run.folder / name)
        return progress
    saved = progress
    if best_score is not None:
        names, saved = [*names, checkpoint.BEST], dataclasses.replace(progress, best_score=best_score)
    content = {**state.snapshot(), "progress": dataclasses.asdict(saved), "names": [*names]}
    content |= {"config": run.settings, "facts": run.facts, "data": run.data}
    content["nonfinite_in_a_row"] = state.nonfinite_in_a_row
    try:
        with run.stop.held():
            checkpoint.save(run.folder, content)
            run.saved_step = progress.step
            kept = keep_and_prune(run, names)
    except checkpoint.SaveFailed as error:
        if must:
            hint = f"{error.hint}; earlier checkpoints are intact; then {run.how_to_resume}"
            raise Stopped(str(error), hint=hint) from None
        log.warning("%s; %s. Training continues, and the next save tries again", error, error.hint)
        kept = []
    run.saved_at = time.monotonic()
    write_plan(state, run)
    return saved if checkpoint.BEST in kept else progress


def write_plan(state: TrainState, run: Run) -> None:
    if not run.group.leads:
        return
    measured = {name.removeprefix("memory/"): gb for name, gb in memory_gb(state.runtime.device).items()}
    record = PlanFile(state.runtime.plan, state.micro_batch, run.prediction, measured, state.events)
    try:
        record.save(run.folder / NAME)
    except OSError as error:
        log.warning("%s cannot be written (%s)", run.folder / NAME, error.strerror)


def keep_and_prune(run: Run, names: Sequence[str]) -> list[str]:
    """Give the checkpoint that was just saved its further names, and delete old checkpoints. Returns the names that
    could be written; the others cause a warning."""
    kept = []
    for name in names:
        try:
            checkpoint.keep(run.folder, name)
            kept.append(name)
        except OSError as error:
            log.warning("%s cannot be written (%s); %s has the same content", run.folder / name, error, checkpoint.LAST)
    try:
        checkpoint.prune(run.folder, run.saving.keep_checkpoints, run.saving.is_permanent)
    except OSError as error:
        log.warning("an old checkpoint cannot be deleted (%s)", error)
    return kept
