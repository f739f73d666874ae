"""Tells before the first step which items a batch repeats, and how much disk space checkpoints will take."""

import logging
import shutil

from gputrain.engine.recipe import phases_of
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import Saving, StepSchedule
from gputrain.engine.snapshot import tensor_bytes
from gputrain.engine.state import TrainState
from gputrain.hw.runtime import memory_gb

log = logging.getLogger(__name__)

MOMENT_BYTES = 8  # AdamW's two moments of a parameter, in fp32.


def warn_of_surprises(state: TrainState, run: Run, steps: StepSchedule) -> None:
    """Say how much disk space the checkpoints will take, and warn if it is not there, or if a batch is larger than the
    data set."""
    if not run.group.leads:
        return
    if (items := steps.start.items) < steps.items_a_step:
        what, option = ("batches", "--accumulation-steps") if steps.step_items else ("items", "--batch-size")
        log.warning(
            "a step takes %d %s, and the data set has %d: every step repeats some of them; a lower %s avoids it",
            steps.items_a_step, what, items, option,
        )  # fmt: skip
    present = memory_gb(state.runtime.device).get("memory/peak_gb", 0.0)
    if state.runtime.device.type == "cpu" and present:
        log.info(
            "the memory that is shown is the RAM of the whole process, with Python, torch and the data: %.1f GB before "
            "the first step; the prediction counts the tensors of a step", present,
        )  # fmt: skip
    each_gb = checkpoint_gb(state)
    count = kept_checkpoints(run.saving, steps)
    files = [path.stat() for path in run.folder.glob("checkpoint_*.pt")]
    present_gb = sum({file.st_ino: file.st_size for file in files}.values()) / 1e9  # Names of one file count once.
    needed_gb = max(0.0, count * each_gb - present_gb)
    disk = shutil.disk_usage(run.folder)
    text = f"checkpoints will take up to {needed_gb:.3g} GB ({count} of {each_gb:.3g} GB)"
    if not disk.total:  # Some network drives report 0 of 0 bytes.
        log.info("%s", text)
    elif disk.free / 1e9 < needed_gb:
        log.warning(
            "%s, and the disk of %s has %.3g GB free: free some space, or keep fewer with --keep-checkpoints",
            text, run.folder, disk.free / 1e9,
        )  # fmt: skip
    else:
        log.info("%s; the disk has %.3g GB free", text, disk.free / 1e9)


def checkpoint_gb(state: TrainState) -> float:
    """Return the size of a checkpoint, with the state that the optimizers have not allocated yet."""
    phases = phases_of(state.recipe)
    optimizers = max(
        tensor_bytes([phase.optimizer.state_dict() for phase in phases]),
        sum(MOMENT_BYTES * parameter.numel() for phase in phases for parameter in phase.trained_parameters()),
    )
    modules = tensor_bytes({name: module.state_dict() for name, module in state.recipe.modules.items()})
    return (modules + optimizers) / 1e9


def kept_checkpoints(saving: Saving, steps: StepSchedule) -> int:
    """Return the largest number of different checkpoints on the disk during the run, the one being written included."""
    first, end = steps.start.step, steps.stop_step
    kept = 0
    if saving.checkpoint_freq:
        kept += _at_most(saving, (steps.epochs_done(end) - steps.epochs_done(first)) // saving.checkpoint_freq + 1)
    interval = saving.checkpoint_steps
    if interval < 0:
        interval = saving.evaluate_steps or saving.evaluate_freq * max(1, steps.start.items // steps.items_a_step)
    if interval > 0:
        kept += _at_most(saving, (end - first) // interval)
        kept += sum(map(saving.is_permanent, range(first - first % interval, end, interval)))
    return 2 + saving.evaluates + min(kept, end - first) + 1  # The last, the previous and the best one.


def _at_most(saving: Saving, count: int) -> int:
    return min(count, saving.keep_checkpoints) if saving.keep_checkpoints else count
