"""How long, how often and at what rate: pure functions of the step, so that resuming needs no state of its own.

Also the knobs that every train command shares. Imports no torch.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError

LearningRateSchedule = Literal["constant", "cosine", "exponential"]


@config(panel="Training")
class Schedule:
    batch_size: int = opt(default=16, help="Items that a step learns from, at most so many at once.", min=1)
    accumulation_steps: int = opt(default=1, help="A step learns from this many times batch_size items.", min=1)
    micro_batch_size: int = opt(
        default=0, help="Items on the device at once; 0: the planner decides. Changes memory, not the result.", min=0
    )
    num_epochs: int = opt(default=100, help="Times to go through the data, at most; 0: num_steps counts alone.", min=0)
    num_steps: int = opt(default=0, help="Steps to make, at most; 0: num_epochs counts alone.", min=0)
    max_steps: int = opt(
        default=0, help="Stop at this step, without a change to the learning rate's course; 0 is off.", min=0
    )
    learning_rate: float = opt(default=1e-4, help="Learning rate after the warm-up.", min=0)
    learning_rate_schedule: LearningRateSchedule = opt(
        default="cosine", help="Course of the learning rate after the warm-up; exponential: by gamma."
    )
    gamma: float = opt(
        default=0.9999, help="Factor of an exponential learning rate from epoch to epoch.", min=1e-6, max=1
    )
    warmup_steps: int = opt(default=200, help="Steps over which the learning rate rises linearly.", min=0)
    min_learning_rate: float = opt(
        default=0.0, help="Learning rate that the warm-up begins at, and that a cosine ends at.", min=0
    )
    weight_decay: float = opt(default=0.0, help="AdamW's decay of the weights (not of gains and biases).", min=0)
    gradient_clip: float = opt(default=1.0, help="Largest norm of a phase's gradient; 0 is off.", min=0)
    ema_decay: float = opt(default=0.999, help="Decay of the averaged weights; 0 is off.", min=0, max=0.999999)
    seed: int = opt(
        default=0, help="Seed of the order of the data, crops, noise and first weights.", min=0, max=2**32 - 1
    )

    def __post_init__(self) -> None:
        if self.gamma != type(self).gamma and self.learning_rate_schedule != "exponential":
            raise UserError(
                f"gamma {self.gamma:g} has no effect with learning_rate_schedule {self.learning_rate_schedule}",
                hint="--learning-rate-schedule exponential uses it; otherwise leave gamma out",
            )
        if not self.num_epochs and not self.num_steps:
            raise UserError(
                "num_epochs and num_steps are both 0: there is no end", hint="give --num-steps or --num-epochs"
            )
        if self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"min_learning_rate {self.min_learning_rate:g} is above learning_rate {self.learning_rate:g}",
                hint="the warm-up rises from the first to the second",
            )

    @property
    def whole_batch(self) -> int:
        """Items of one optimizer step."""
        return self.batch_size * self.accumulation_steps


@config(panel="Run folder")
class Saving:
    output_dir: Path = opt(default=Path("outputs"), help="Folder of the run.")
    resume_from: str = opt(
        default="", help="A checkpoint to go on from, or `auto`: the newest in output_dir, if there is one."
    )
    checkpoint_freq: int = opt(default=5, help="Epochs between kept checkpoints; 0 is off.", min=0)
    checkpoint_minutes: float = opt(default=10, help="Minutes between saves of checkpoint_last.pt; 0 is off.", min=0)
    checkpoint_steps: int = opt(
        default=0, help="Steps between kept checkpoints; -1: at every evaluation, 0 is off.", min=-1
    )
    keep_checkpoints: int = opt(
        default=5, help="Newest checkpoint_epoch_*.pt and checkpoint_step_*.pt to keep; 0 keeps all.", min=0
    )
    permanent_start: int = opt(
        default=0, help="Step from which on some checkpoint_step_*.pt are never deleted; 0 is off.", min=0
    )
    permanent_interval: int = opt(default=40_000, help="Steps between those that are never deleted.", min=1)
    best_after: int = opt(default=0, help="Step before which no checkpoint_best.pt is written.", min=0)
    save_samples_freq: int = opt(default=500, help="Steps between samples; 0 is off.", min=0)
    samples_after_epochs: int = opt(default=0, help="Whole epochs before the first samples.", min=0)
    evaluate_freq: int = opt(default=5, help="Epochs between evaluations on held-out data; 0 is off.", min=0)
    evaluate_steps: int = opt(default=0, help="Steps between evaluations on held-out data; 0 is off.", min=0)
    eval_first: bool = opt(default=True, help="Evaluate before the first step, so that curves start there.")
    log_freq: int = opt(default=10, help="Steps between lines of metrics.", min=1)
    profile: bool = opt(default=False, help="Profile three early steps into profile/ of the run's folder.")

    def __post_init__(self) -> None:
        writes_steps = self.checkpoint_steps > 0 or (self.checkpoint_steps < 0 and self.evaluates)
        if self.permanent_start and not writes_steps:
            raise UserError(
                f"permanent_start {self.permanent_start} has no effect: no checkpoint_step_*.pt is written",
                hint="--checkpoint-steps says how often one is; otherwise --permanent-start 0",
            )

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluate_freq or self.evaluate_steps)

    def is_permanent(self, step: int) -> bool:
        """Whether the checkpoint of this step is never deleted."""
        return 0 < self.permanent_start <= step and (step - self.permanent_start) % self.permanent_interval == 0


@dataclass(frozen=True)
class RunProgress:
    """Where a run stands; part of every checkpoint.

    A stage is what one `num_epochs` counts. To go on from the end of a finished stage, at another size of picture say,
    begins a new one; to go on from the middle of a stage finishes it.
    """

    step: int = 0  # optimizer steps made
    items_seen: int = 0  # position in the endless stream of items
    items: int = 0  # size of the data set that the position counts in
    stage_step: int = 0  # step at which the stage began
    stage_epoch: int = 0  # epoch at which the stage began
    stage: int = 0  # which one of the stages that the run was asked for
    stages: int = 1
    finished: bool = False  # whether the stage's last step is made
    best_score: float = -math.inf


@dataclass(frozen=True)
class StepSchedule:
    """The steps that lie ahead of `start`, for one data set and batch size."""

    schedule: Schedule
    start: RunProgress
    step_items: int = 0  # items of the stream that a step takes; 0: the whole batch

    @property
    def items_a_step(self) -> int:
        return self.step_items or self.schedule.whole_batch

    @property
    def last_step(self) -> int:
        """Count of steps at which the stage ends: by its epochs or by its steps, whichever comes first."""
        ends = []
        if self.schedule.num_epochs:
            ends_at = (self.start.stage_epoch + self.schedule.num_epochs) * self.start.items
            ends.append(self.start.step + math.ceil(max(0, ends_at - self.start.items_seen) / self.items_a_step))
        if self.schedule.num_steps:
            ends.append(max(self.start.step, self.start.stage_step + self.schedule.num_steps))
        return min(ends)

    @property
    def stop_step(self) -> int:
        """Count of steps at which this run ends: the stage's end, or max_steps."""
        return min(self.last_step, self.schedule.max_steps) if self.schedule.max_steps else self.last_step

    def items_seen(self, step: int) -> int:
        return self.start.items_seen + (step - self.start.step) * self.items_a_step

    def epochs_done(self, step: int) -> int:
        """Whole epochs behind a run that has made `step` steps."""
        return self.items_seen(step) // self.start.items

    def ends_epoch(self, step: int) -> bool:
        """Whether the step before this count of steps reached the end of an epoch."""
        return self.epochs_done(step) > self.epochs_done(step - 1)

    def progress_at(self, step: int, best_score: float) -> RunProgress:
        return replace(
            self.start,
            step=step,
            items_seen=self.items_seen(step),
            finished=step >= self.last_step,
            best_score=best_score,
        )

    def learning_rate(self, step: int) -> float:
        """Rate for the step that follows `step` steps: a linear warm-up, then constant, half a cosine between the full
        rate and the least one, or less by `gamma` with every epoch of the stage."""
        at = step - self.start.stage_step
        base, warmup, least = self.schedule.learning_rate, self.schedule.warmup_steps, self.schedule.min_learning_rate
        if at < warmup:
            return least + (base - least) * (at + 1) / warmup
        if self.schedule.learning_rate_schedule == "constant":
            return base
        if self.schedule.learning_rate_schedule == "exponential":
            epochs = self.epochs_done(step) - self.start.stage_epoch
            return max(least, base * self.schedule.gamma**epochs)
        share = (at - warmup) / max(1, self.last_step - self.start.stage_step - warmup)
        return least + (base - least) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def stages_ahead(saved: RunProgress | None, stages: int, *, onwards: bool) -> range:
    """Which of the `stages` that a run is asked for are left to do.

    What was begun is finished first. Once all is done, `onwards` begins the stages anew; otherwise the last one is
    left, with nothing to do unless it has been given more epochs. Raises UserError where it is unclear what is left.
    """
    if saved is None:
        return range(stages)
    if not saved.finished:
        return range(min(saved.stage, stages - 1), stages)
    if saved.stages == stages and saved.stage + 1 < stages:
        return range(saved.stage + 1, stages)
    if not onwards and saved.stages != stages:
        raise UserError(
            f"the run has finished the {saved.stages} stages that it was asked for, and is now asked for {stages}",
            hint="to train on from its end, name its checkpoint: --resume-from OUTPUT_DIR/checkpoint_last.pt",
        )
    return range(stages) if onwards else range(stages - 1, stages)


def begin(saved: RunProgress | None, items: int, *, new_stage: bool, stage: int = 0, stages: int = 1) -> RunProgress:
    """Progress to start from: fresh, in the middle of the saved stage, or with a new stage after it.

    When the data set has changed its size, the position becomes the start of the epoch that was under way.
    """
    if saved is None:
        return RunProgress(items=items, stage=stage, stages=stages)
    epoch = saved.items_seen // saved.items
    start = replace(saved, items=items, stage=stage, stages=stages, finished=False)
    if new_stage and saved.finished:
        # The last batch of a stage may reach into the next epoch; the new stage begins with a whole one.
        return replace(start, items_seen=epoch * items, stage_step=saved.step, stage_epoch=epoch)
    return start if items == saved.items else replace(start, items_seen=epoch * items)


def every(count: int, interval: int) -> bool:
    """Whether something that is due every `interval` counts (0: never) is due at `count`."""
    return interval > 0 and count > 0 and count % interval == 0
