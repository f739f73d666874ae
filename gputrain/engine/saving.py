"""Saving a training in its run folder: checkpoints and plan.json.

Between two steps a save only copies the state of the training into host memory. A thread writes the copy, reads it
back, renames it, gives it its further names and deletes old checkpoints. One save is written at a time. A run waits for
the thread before it ends, goes back to a checkpoint, or saves because it must.
"""

import dataclasses
import functools
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content
from gputrain.engine.plan_file import NAME, PlanFile
from gputrain.engine.recipe import phases_of
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import RunProgress
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped
from gputrain.hw.runtime import memory_gb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveJob:
    """All that writing a checkpoint needs."""

    content: Content
    names: list[str]  # Further names of the checkpoint.
    progress: RunProgress  # Progress in the checkpoint, with its own score if it is the best so far.
    record: PlanFile


@dataclass(frozen=True)
class WrittenSave:
    """The result of writing a checkpoint."""

    job: SaveJob
    kept: list[str]  # Names that could be written.
    seconds: float
    disk_gb: dict[str, float]  # Size of the checkpoint and free space after it, under the names of the metrics.
    error: checkpoint.SaveFailed | None = None


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
    with run.stop.held():
        progress = _fetched(run, progress)
        if (job := _job(state, run, progress, names, best_score, must=must)) is None:
            return progress
        return _settled(run, progress, _write(run, job), must=must)


def start_saving(state: TrainState, run: Run, *, names: Sequence[str], best_score: float | None = None) -> None:
    """Copy the state of the training and have it saved in a thread, as `save_checkpoint` saves it.

    Waits for the save before, if it is not finished. If there is no memory for the copy, the training waits for the
    save instead. `finish_saving` waits for the thread and reports errors.
    """
    with run.stop.held():
        state.progress = _fetched(run, state.progress)
        if (job := _job(state, run, state.progress, names, best_score, must=False)) is None:
            return
        copied = run.writer.snapshot.copy(job.content, state.runtime.device)
        if copied is None:
            state.progress = _settled(run, state.progress, _write(run, job), must=False)
            return
        run.writer.start(functools.partial(_write, run, dataclasses.replace(job, content=copied)))


def finish_saving(state: TrainState, run: Run) -> None:
    """Wait for the save that is being written, if there is one, and take over its result."""
    with run.stop.held():
        state.progress = _fetched(run, state.progress)


def _job(
    state: TrainState,
    run: Run,
    progress: RunProgress,
    names: Sequence[str],
    best_score: float | None,
    *,
    must: bool,
) -> SaveJob | None:
    """Return what is to be written, or None if the save is postponed, or another rank saves."""
    run.is_overdue = not must and any(map(bool, state.nonfinite.values()))
    if run.is_overdue:
        for name in names if run.saved_step != progress.step else ():
            log.warning("%s is not written, as the gradient of its step is not finite", run.folder / name)
        return None
    optimizers = {phase.name: state.shards.whole_state(phase) for phase in phases_of(state.recipe)}
    if not run.group.leads:
        return None
    run.saved_at = time.monotonic()
    if best_score is not None:
        names, progress = [*names, checkpoint.BEST], dataclasses.replace(progress, best_score=best_score)
    content = {
        **state.snapshot(),
        "optimizers": optimizers,
        "progress": dataclasses.asdict(progress),
        "names": [*names],
    }
    content |= {"config": run.settings, "facts": run.facts, "data": run.data}
    content["nonfinite_in_a_row"] = state.nonfinite_in_a_row
    return SaveJob(content, [*names], progress, _plan_record(state, run))


def _write(run: Run, job: SaveJob) -> WrittenSave:
    """Write a checkpoint and the plan. This may run in a thread: it changes nothing but files."""
    began, kept, failure = time.monotonic(), [], None
    try:
        checkpoint.save(run.folder, job.content, last_is_damaged=run.last_is_damaged)
        kept = keep_and_prune(run, job.names)
    except checkpoint.SaveFailed as error:
        failure = error
    _write_record(job.record, run)
    return WrittenSave(job, kept, time.monotonic() - began, _disk_gb(run.folder), failure)


def _disk_gb(folder: Path) -> dict[str, float]:
    """Return the size of the last checkpoint and the free space; nothing if it cannot be read."""
    try:
        size, disk = (folder / checkpoint.LAST).stat().st_size, shutil.disk_usage(folder)
    except OSError:
        return {}
    free = {"disk/free_gb": disk.free / 1e9} if disk.total else {}  # Some network drives report 0 of 0 bytes.
    return {"disk/checkpoint_gb": size / 1e9, **free}


def _fetched(run: Run, progress: RunProgress) -> RunProgress:
    """Wait for the thread that writes, if there is one, and take over its result."""
    written: WrittenSave | None = run.writer.finish()
    return progress if written is None else _settled(run, progress, written, must=False)


def _settled(run: Run, progress: RunProgress, written: WrittenSave, *, must: bool) -> RunProgress:
    """Take over the result of a save. Raises Stopped if it failed and the run `must` save."""
    error, job = written.error, written.job
    run.disk_gb = written.disk_gb
    if error is None:
        run.saved_step, run.save_seconds, run.last_is_damaged = job.progress.step, written.seconds, False
        is_best = checkpoint.BEST in written.kept
        return dataclasses.replace(progress, best_score=job.progress.best_score) if is_best else progress
    if must:
        earlier = "earlier checkpoints are intact; " if checkpoint.in_order(run.folder) else ""
        hint = f"{error.hint}; {earlier}then {run.how_to_resume}"
        raise Stopped(str(error), hint=hint) from None
    log.warning("%s; %s. Training continues, and the next save tries again", error, error.hint)
    return progress


def write_plan(state: TrainState, run: Run) -> None:
    if run.group.leads:
        _write_record(_plan_record(state, run), run)


def _plan_record(state: TrainState, run: Run) -> PlanFile:
    measured = dict(run.measured_memory)
    if state.runtime.device.type == "cpu":  # This is the memory of the whole process, which no plan predicts.
        measured = {name.removeprefix("memory/"): gb for name, gb in memory_gb(state.runtime.device).items()}
    if len(run.seconds_per_step) > 1:
        measured["seconds_per_step"] = run.seconds_per_step[-1]
    return PlanFile(state.runtime.plan, dict(state.micro_batch), dict(run.prediction), measured, list(state.events))


def _write_record(record: PlanFile, run: Run) -> None:
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
