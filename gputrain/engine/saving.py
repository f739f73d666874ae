"""Saving a training in its run folder, from a copy in host memory.

Between two steps a save only copies the state of the training into host memory. A thread writes the copy, reads it
back, renames it, gives it its further names and deletes old checkpoints. One save is written at a time. A run waits for
the thread before it ends, goes back to a checkpoint, or saves because it must.
"""

import dataclasses
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content, distinct_tensors, map_tensors, tensor_bytes, tensor_identity
from gputrain.engine.recipe import phases_of
from gputrain.engine.run_folder import PLAN, PlanFile, Run
from gputrain.engine.schedule import RunProgress, StepSchedule
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped
from gputrain.hw.probe import ram
from gputrain.hw.runtime import is_out_of_memory, memory_gb, synchronize

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # torch rounds pinned memory up to powers of two, so tensors share chunks of this size.
ALIGNMENT = 64  # Bytes.
WRITTEN_AT_ONCE = 3  # Checkpoints that are on the disk during a save: the last, the previous and the new one.
FREE_SHARE = 0.1  # Share of the RAM that must stay free; from 0.9 on, the monitor warns.


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


class Saver:
    """Saves a training in its run folder. Only the leader of several ranks writes.

    Signals interrupt the main thread only, so that nothing stops the thread that writes between two of its steps but
    the end of the process.
    """

    def __init__(self, state: TrainState, run: Run) -> None:
        self.state, self.run = state, run
        self.host = HostSnapshot()
        self.saved_at = time.monotonic()
        self.disk_gb: dict[str, float] = {}  # Free space and size of a checkpoint, after the last save.
        self.is_overdue = False  # True if a save was postponed.
        self.pending: Future[WrittenSave] | None = None  # The save that is being written, or whose result is not taken.
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint writer")

    @property
    def is_busy(self) -> bool:
        return self.pending is not None and not self.pending.done()

    @property
    def has_result(self) -> bool:
        """True if a save has ended whose result has not been taken over yet."""
        return self.pending is not None and self.pending.done()

    def is_due(self) -> bool:
        """Return True if the time for a save has come; the leader's clock decides."""
        if self.is_busy or not self.run.group.leads:  # A save that is still being written comes first.
            return False
        minutes = (time.monotonic() - self.saved_at) / 60
        return self.is_overdue or 0 < self.run.saving.checkpoint_every_minutes <= minutes

    def save(
        self,
        names: Sequence[str] = (),
        *,
        best_score: float | None = None,
        waits: bool = False,
        is_required: bool = False,
    ) -> None:
        """Save a checkpoint, under further `names` too; with a `best_score`, as the best so far, which `state.progress`
        holds once its checkpoint was written.

        It is written in a thread, from a copy of the state; without memory for the copy, or if the run `waits` or the
        save `is_required`, before this returns. A write error ends the run only if the save is required. After a step
        with non-finite gradients a save that isn't required is postponed to the next finite step, so that doubtful
        weights don't replace a good checkpoint.
        """
        with self.run.stop.second_signal_delayed():
            self._finish()
            if (job := self._job(names, best_score, is_required=is_required)) is None:
                return
            copied = None if waits or is_required else self.host.copy(job.content, self.state.runtime.device)
            if copied is None:
                self._finish_save(self._write(job), is_required=is_required)
            else:
                self._submit(dataclasses.replace(job, content=copied))

    def finish(self) -> None:
        """Wait for the save that is being written, if there is one, and take over its result."""
        with self.run.stop.second_signal_delayed():
            self._finish()

    def _submit(self, job: SaveJob) -> None:
        self.pending = self.executor.submit(self._write, job)

    def _finish(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self._finish_save(pending.result(), is_required=False)

    def _job(self, names: Sequence[str], best_score: float | None, *, is_required: bool) -> SaveJob | None:
        """Return what is to be written, or None if the save is postponed, or another rank saves."""
        state, run, progress = self.state, self.run, self.state.progress
        self.is_overdue = not is_required and state.nonfinite.postpones_saves
        if self.is_overdue:
            for name in names if run.status.saved_step != progress.step else ():
                log.warning("%s is not written, as the gradient of its step is not finite", run.folder / name)
            return None
        if not run.group.leads:
            return None
        self.saved_at = time.monotonic()
        if best_score is not None:
            names, progress = [*names, checkpoint.BEST], dataclasses.replace(progress, best_score=best_score)
        content = {**state.snapshot(), "progress": dataclasses.asdict(progress), "names": [*names]}
        content |= {"config": run.settings, "facts": run.facts, "data": run.data}
        content["nonfinite_in_a_row"] = state.nonfinite.in_a_row
        return SaveJob(content, [*names], progress, self._plan_record())

    def _write(self, job: SaveJob) -> WrittenSave:
        """Write a checkpoint and the plan. This may run in the thread: it changes nothing but files."""
        began, kept, failure = time.monotonic(), [], None
        try:
            checkpoint.save(self.run.folder, job.content, last_is_damaged=self.run.status.last_is_damaged)
            kept = keep_and_prune(self.run, job.names, job.progress)
        except checkpoint.SaveFailed as error:
            failure = error
        _write_record(job.record, self.run)
        return WrittenSave(job, kept, time.monotonic() - began, _disk_gb(self.run.folder), failure)

    def _finish_save(self, written: WrittenSave, *, is_required: bool) -> None:
        """Take over the result of a save. Raises Stopped if it failed and is required."""
        error, job = written.error, written.job
        self.disk_gb = written.disk_gb
        if error is None:
            status = self.run.status
            status.saved_step, status.save_seconds = job.progress.step, written.seconds
            status.last_is_damaged = False
            if checkpoint.BEST in written.kept:
                self.state.progress = dataclasses.replace(self.state.progress, best_score=job.progress.best_score)
            return
        if is_required:
            earlier = "earlier checkpoints are intact; " if checkpoint.newest_first(self.run.folder) else ""
            hint = f"{error.hint}; {earlier}then {self.run.how_to_resume}"
            raise Stopped(str(error), hint=hint) from None
        log.warning("%s; %s. Training continues, and the next save tries again", error, error.hint)

    def write_plan(self) -> None:
        """Write plan.json, unless a save is being written, which writes it itself."""
        if self.run.group.leads and not self.is_busy:
            _write_record(self._plan_record(), self.run)

    def _plan_record(self) -> PlanFile:
        state, run = self.state, self.run
        measured = dict(run.status.measured_memory)
        if state.runtime.device.type == "cpu":  # This is the memory of the whole process, which no plan predicts.
            measured = {name.removeprefix("memory/"): gb for name, gb in memory_gb(state.runtime.device).items()}
        if run.status.seconds_per_step:
            measured["seconds_per_step"] = run.status.seconds_per_step
        parts = (dict(state.micro_batch), dict(run.prediction), measured, list(state.events))
        return PlanFile(state.runtime.plan, *parts)


def _disk_gb(folder: Path) -> dict[str, float]:
    """Return the size of the last checkpoint and the free space; nothing if it cannot be read."""
    try:
        size, disk = (folder / checkpoint.LAST).stat().st_size, shutil.disk_usage(folder)
    except OSError:
        return {}
    free = {"disk/free_gb": disk.free / 1e9} if disk.total else {}  # Some network drives report 0 of 0 bytes.
    return {"disk/checkpoint_gb": size / 1e9, **free}


def _write_record(record: PlanFile, run: Run) -> None:
    try:
        record.save(run.folder / PLAN)
    except OSError as error:
        log.warning("%s cannot be written (%s)", run.folder / PLAN, error.strerror)


def keep_and_prune(run: Run, names: Sequence[str], progress: RunProgress) -> list[str]:
    """Give the checkpoint that was just saved its further names, and delete old checkpoints, but not that at which a
    cool-down began. Returns the names that could be written; the others cause a warning."""
    kept = []
    for name in names:
        try:
            checkpoint.keep(run.folder, name)
            kept.append(name)
        except OSError as error:
            log.warning("%s cannot be written (%s); %s has the same content", run.folder / name, error, checkpoint.LAST)
    try:
        checkpoint.prune(
            run.folder,
            run.saving.keep_checkpoints,
            lambda step: run.saving.is_permanent(step) or step == progress.cooldown_step,
        )
    except OSError as error:
        log.warning("an old checkpoint cannot be deleted (%s)", error)
    return kept


class HostSnapshot:
    """Copies tensors into buffers in host memory, which are kept and used again from copy to copy.

    The buffers are pinned if the tensors come from a GPU, so that its copies run at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []  # Shapes, strides and types that the buffers are for.
        self._buffers: list[Tensor] = []
        self._has_said = False

    def copy(self, content: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
        """Return a copy of the content, valid until the next call; None, with one message, if memory is too short.

        On return all tensors have been copied from the device.
        """
        tensors = distinct_tensors(content)
        layout = [(key[2:], tensor.device.type) for key, tensor in tensors.items()]
        if layout != self._layout and not self._allocate(layout, list(tensors.values()), device):
            return None
        buffers = dict(zip(tensors, self._buffers, strict=True))
        with torch.no_grad():
            for key, tensor in tensors.items():
                buffers[key].copy_(tensor, non_blocking=True)
        synchronize(device)
        return dict(map_tensors(content, lambda tensor: buffers[tensor_identity(tensor)]))

    def release(self) -> None:
        """Drop the buffers; the next copy allocates new ones."""
        self._layout, self._buffers = [], []

    def _allocate(self, layout: list[Any], tensors: list[Tensor], device: torch.device) -> bool:
        """Allocate buffers. Returns False if they don't fit into the RAM."""
        self.release()
        size = sum(_padded(tensor) for tensor in tensors)
        total_gb, free_gb = ram()
        fits = not free_gb or size / 1e9 <= free_gb - FREE_SHARE * total_gb
        try:
            if fits:
                self._buffers = buffers_like(tensors, pinned=device.type == "cuda")
                self._layout = layout
                return True
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and not is_out_of_memory(error):
                raise
        if not self._has_said:
            self._has_said = True
            log.warning(
                "training waits for every save: a copy of the checkpoint takes %.2f GB of RAM, and %.2f GB are free",
                size / 1e9,
                free_gb,
            )
        return False


def buffers_like(tensors: list[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return host tensors of the same shapes, strides and types, each with a storage of its own size."""
    left = sum(_padded(tensor) for tensor in tensors)
    chunk, used, buffers = torch.empty(0, dtype=torch.uint8).numpy(), 0, []
    for tensor in tensors:
        needed = _padded(tensor)
        if used + needed > len(chunk):
            size = max(needed, min(CHUNK_BYTES, left))
            new = torch.empty(size, dtype=torch.uint8)
            chunk, used = (new.pin_memory() if pinned else new).numpy(), 0
        # A tensor made from a slice of an array has a storage of the slice alone, and torch.save writes whole storages.
        part = torch.from_numpy(chunk[used : used + tensor.numel() * tensor.element_size()])
        strides = torch.empty_like(tensor, device="meta").stride()  # Dense, in the tensor's order of dimensions.
        buffers.append(part.view(tensor.dtype).as_strided(tensor.shape, strides))
        used, left = used + needed, left - needed
    return buffers


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def warn_of_surprises(state: TrainState, run: Run, steps: StepSchedule) -> None:
    """Say how much disk space a checkpoint will take, and warn if there is too little for those that a save needs, or
    if a batch is larger than the data set."""
    if not run.group.leads:
        return
    if (items := steps.start.items) < steps.items_per_step:
        what, option = ("batches", "--accumulation-steps") if steps.step_items else ("items", "--batch-size")
        log.warning(
            "a step takes %d %s, and the data set has %d: every step repeats some of them; a lower %s avoids it",
            steps.items_per_step,
            what,
            items,
            option,
        )
    size, disk = checkpoint_gb(state), shutil.disk_usage(run.folder)
    text = f"run folder: {run.folder}; a checkpoint takes {size:.2g} GB"
    if not disk.total:  # Some network drives report 0 of 0 bytes.
        log.info("%s", text)
    elif disk.free / 1e9 < WRITTEN_AT_ONCE * size:
        log.warning("%s, and its disk has %.2g GB free: free some space", text, disk.free / 1e9)
    else:
        log.info("%s, and its disk has %.3g GB free", text, disk.free / 1e9)


def checkpoint_gb(state: TrainState) -> float:
    """Return the size of a checkpoint, with the state that the optimizers have not allocated yet."""
    phases = phases_of(state.recipe)
    optimizers = max(
        tensor_bytes([phase.optimizer.state_dict() for phase in phases]),
        sum(8 * parameter.numel() for phase in phases for parameter in phase.trained_parameters()),  # AdamW's averages.
    )
    modules = tensor_bytes({name: module.state_dict() for name, module in state.recipe.modules.items()})
    return (modules + optimizers) / 1e9
