"""Learning rate, epochs and intervals as pure functions of the step, so that resuming needs no scheduler state.

Also the options that all train commands share. Imports no torch.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gputrain.config import advanced, config, file_key, opt
from gputrain.engine.stop import parse_duration, seconds_to_finish, seconds_until
from gputrain.errors import UserError

LearningRateSchedule = Literal["constant", "cosine", "exponential", "tri-stage"]
DISCRIMINATOR_START_HELP = (
    "Step at which the training of discriminators starts. Before, other losses are applied alone."
)
CHECKPOINTING_HELP = "Recompute activations in backward. Less memory, more time; default: the planner decides."
# Ends of the help of an option that names a model to start from, and of one that names data folders.
PUBLISHED_NAME = ", or a name of `gputrain fetch --list` or of the Hugging Face Hub."
SEVERAL = " Give it several times for several folders: FOLDER=2 draws each item of one twice an epoch."
TRI_STAGE_HELD = 0.4  # Share of the steps in which a tri-stage schedule holds the learning rate.
TRI_STAGE_END = 0.05  # Share of the learning rate that is left at the end of a tri-stage schedule.
OPEN_END = 10**9  # Steps of a training that only the clock ends.
PACE_TOLERANCE = 0.02  # Share of the steps left by which their number may vary without another end of the cool-down.
COOLDOWN_SHARE = 0.2  # A cool-down's share of all steps, as in Hägele et al. 2024, arXiv:2405.18392.


@config(panel="Training")
class Schedule:
    batch_size: int = opt(default=16, help="Items of a batch. It is the largest micro-batch, too.", min=1)
    accumulation_steps: int = opt(default=1, help="Batches of an optimizer step.", min=1)
    micro_batch_size: int = opt(
        default=0, help="Items on the device at once; 0: auto. Changes memory use, not the result.", min=0
    )
    num_epochs: int = opt(default=100, help="Epochs of the training. 0: only num_steps ends it.", min=0)
    num_steps: int = advanced(
        default=0, help="Steps of the training. 0: only num_epochs ends it; else the earlier does.", min=0
    )
    max_steps: int = advanced(
        default=0,
        help="Stop at this step without changing the learning-rate schedule; 0 is off. Not written to config.yaml.",
        min=0,
        is_saved=False,
    )
    learning_rate: float = opt(default=1e-4, help="Learning rate after the warm-up.", min=0)
    learning_rate_schedule: LearningRateSchedule = advanced(
        default="cosine",
        help="Learning-rate schedule after the warm-up. exponential uses gamma.",
    )
    finish_by: str = advanced(
        default="",
        help="End the training by the clock: 6h, 18:30 or 2027-01-31T18:30. The learning rate is held, and falls in "
        "the last fifth of the steps, which end then, instead of num_epochs and num_steps.",
    )
    cooldown: int = advanced(
        default=0,
        help="Steps of a cool-down from the resumed checkpoint on. The learning rate falls to its lowest, and the "
        "training ends there; with finish_by, the last steps over which it falls. 0: none, or a fifth.",
        min=0,
        is_saved=False,
    )
    gamma: float = file_key(default=0.9999, help="Factor per epoch of an exponential learning rate.", min=1e-6, max=1)
    warmup_steps: int = opt(default=200, help="Steps of a linear warm-up.", min=0)
    min_learning_rate: float = advanced(
        default=0.0, help="Learning rate at the start of the warm-up and at the end.", min=0
    )
    weight_decay: float = advanced(default=0.0, help="AdamW's weight decay. Gains and biases are excluded.", min=0)
    gradient_clip: float = opt(default=1.0, help="Maximum gradient norm; 0 is off. For each optimizer.", min=0)
    ema_decay: float = opt(default=0.999, help="Decay of the weights' average; 0 is off.", min=0, max=0.999999)
    seed: int = opt(default=0, help="Seed of data order, crops, noise, weights.", min=0, max=2**32 - 1)

    def __post_init__(self) -> None:
        if self.finish_by:
            self._check_clock()
        if self.gamma != type(self).gamma and self.rate_schedule != "exponential":
            raise UserError(
                f"gamma {self.gamma:g} has no effect with learning_rate_schedule {self.rate_schedule}",
                hint="--learning-rate-schedule exponential uses it; otherwise leave gamma out",
            )
        if not self.num_epochs and not self.num_steps and not self.finish_by:
            raise UserError(
                "num_epochs and num_steps are both 0: the training would not end",
                hint="give --num-steps or --num-epochs",
            )
        if self.min_learning_rate > self.learning_rate:
            raise UserError(
                f"min_learning_rate {self.min_learning_rate:g} is above learning_rate {self.learning_rate:g}",
                hint="the warm-up rises from the first to the second",
            )

    def _check_clock(self) -> None:
        """Raises UserError if finish_by is no time, or is given with settings that it takes the place of."""
        seconds_to_finish(self.finish_by)
        for name in ("num_epochs", "num_steps"):
            flag = f"--{name.replace('_', '-')}"
            if getattr(self, name) not in (0, getattr(type(self), name)):
                raise UserError(
                    f"{name} {getattr(self, name)} and finish_by {self.finish_by} both end the training",
                    hint=f'drop one of them, or the one of a file: {flag} 0, or --finish-by ""',
                )
        if self.learning_rate_schedule not in ("constant", type(self).learning_rate_schedule):
            raise UserError(
                f"learning_rate_schedule {self.learning_rate_schedule} has no effect with finish_by, which holds the "
                "learning rate until it falls at the end",
                hint="--learning-rate-schedule constant; --cooldown STEPS says over how many steps it falls",
            )

    @property
    def rate_schedule(self) -> LearningRateSchedule:
        """The schedule of the learning rate after the warm-up; with finish_by it is held."""
        return "constant" if self.finish_by else self.learning_rate_schedule

    @property
    def length_text(self) -> str:
        """The length of a training: "100 epochs", "5000 steps", "100 epochs or 5000 steps, whichever end first", or the
        time of finish_by."""
        if self.finish_by:
            return f"--finish-by {self.finish_by}"
        ends = [f"{self.num_epochs} epochs"] * bool(self.num_epochs) + [f"{self.num_steps} steps"] * bool(
            self.num_steps
        )
        return ends[0] if len(ends) == 1 else f"{' or '.join(ends)}, whichever end first"

    @property
    def global_batch_size(self) -> int:
        """Number of items of one optimizer step."""
        return self.batch_size * self.accumulation_steps


@config(panel="Run folder")
class Saving:
    output_dir: Path = opt(default=Path("outputs"), help="Folder of the run.")
    resume_from: str = opt(
        default="", help="Checkpoint to resume; auto: newest, if any. It is looked for in output_dir."
    )
    checkpoint_every_epochs: int = advanced(
        default=5, help="Epochs between checkpoints that are kept; 0 is off.", min=0
    )
    checkpoint_every_minutes: float = advanced(
        default=10, help="Minutes between saves of checkpoint_last.pt; 0 is off.", min=0
    )
    checkpoint_every_steps: int = advanced(
        default=0, help="Steps between checkpoints that are kept; 0 is off. -1: one at every evaluation.", min=-1
    )
    keep_checkpoints: int = opt(
        default=2, help="Kept checkpoints; 0: all. So many checkpoint_epoch_*.pt and checkpoint_step_*.pt.", min=0
    )
    permanent_start: int = file_key(
        default=0, help="From this step on, some checkpoint_step_*.pt are never deleted; 0 is off.", min=0
    )
    permanent_interval: int = file_key(default=40_000, help="Steps between checkpoints that are never deleted.", min=1)
    best_after: int = file_key(default=0, help="No checkpoint_best.pt is written before this step.", min=0)
    sample_every_steps: int = opt(default=500, help="Steps between samples; 0: at both ends.", min=0)
    samples_after_epochs: int = file_key(default=0, help="Epochs before the first samples after step 0's.", min=0)
    evaluate_every_epochs: int = opt(
        default=5,
        help="Epochs between evaluations; 0 is off. Beside one by evaluate_every_steps it is left out.",
        min=0,
    )
    evaluate_every_steps: int = advanced(default=0, help="Steps between evaluations; 0 is off.", min=0)
    early_stopping_patience: int = advanced(
        default=0, help="Evaluations in a row without a better score that end the training; 0 is off.", min=0
    )
    eval_first: bool | None = advanced(
        default=None,
        help="Evaluate before the first step, so that the curves start there. Default: if init_from is given.",
    )
    log_every_steps: int = opt(default=10, help="Steps between lines of metrics.", min=1)
    max_time: str = advanced(
        default="", help="Save and exit with 75 before this time since the start of the command, such as 3h50m."
    )
    report: bool = advanced(default=True, help="Write report.html into the run folder at the end of a run.")
    watch: bool = opt(
        default=False,
        help="Show the run in a browser. It is as `gputrain watch` shows it, and the address is printed. Not written "
        "to config.yaml.",
        is_saved=False,
    )
    allow_control: bool = advanced(
        default=False,
        help="With watch, let the page stop the training, save and cool down. Not written to config.yaml.",
        is_saved=False,
    )
    yes: bool = advanced(
        default=False,
        help="Start a training that a CPU takes more than six hours for. So does one with --preset, an end in steps, "
        "epochs or time, or --resume-from. Not written to config.yaml.",
        is_saved=False,
        implied_by=("preset", "num_epochs", "num_steps", "max_steps", "max_time", "finish_by", "resume_from"),
    )
    notify: tuple[str, ...] = advanced(
        default=(),
        help="Address that gets a message when the run ends, stops, fails or is better than before. One of apprise, "
        "such as ntfy://TOPIC; may be repeated. Never stored; GPUTRAIN_NOTIFY keeps it out of the shell's history.",
        separator="",
        is_saved=False,
        is_secret=True,
    )
    verbose: bool = advanced(
        default=False,
        help="Log every setting of the plan with its reason, and the times of the parts of the start. Not written to "
        "config.yaml.",
        is_saved=False,
    )

    def __post_init__(self) -> None:
        if self.allow_control and not self.watch:
            raise UserError("allow_control has no effect without a page", hint="--watch --allow-control serves one")
        if self.max_time:
            parse_duration(self.max_time)
        if self.early_stopping_patience and not self.evaluates:
            raise UserError(
                f"early_stopping_patience {self.early_stopping_patience} has no effect: nothing is evaluated",
                hint="--evaluate-every-steps says how often one is; otherwise --early-stopping-patience 0",
            )
        writes_steps = self.checkpoint_every_steps > 0 or (self.checkpoint_every_steps < 0 and self.evaluates)
        if self.permanent_start and not writes_steps:
            raise UserError(
                f"permanent_start {self.permanent_start} has no effect: no checkpoint_step_*.pt is written",
                hint="--checkpoint-every-steps says how often one is; otherwise permanent_start: 0",
            )

    @property
    def evaluates(self) -> bool:
        return bool(self.evaluate_every_epochs or self.evaluate_every_steps)

    def evaluation_is_due(self, step: int, *, ends_epochs: bool) -> bool:
        """Returns True if an evaluation is due after a step, which may end an epoch that asks for one. Where both
        intervals are given, an epoch's evaluation is left out next to one by steps, as it would show the same."""
        apart = (
            min(step % self.evaluate_every_steps, -step % self.evaluate_every_steps)
            if self.evaluate_every_steps
            else step
        )
        return is_due_every(step, self.evaluate_every_steps) or (ends_epochs and 4 * apart >= self.evaluate_every_steps)

    def ends_early(self, progress: "RunProgress") -> bool:
        """Returns True if so many evaluations were not better that early stopping ends the training."""
        return 0 < self.early_stopping_patience <= progress.evaluations_since_best

    def is_permanent(self, step: int) -> bool:
        """Returns True if the checkpoint of this step is never deleted."""
        return 0 < self.permanent_start <= step and (step - self.permanent_start) % self.permanent_interval == 0


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run; part of every checkpoint.

    A stage is the part of a run that one `num_epochs` counts. Resuming at the end of a finished stage, for example at
    another image size, begins a new stage; resuming in the middle of a stage finishes it.
    """

    step: int = 0  # Completed optimizer steps.
    items_seen: int = 0  # Position in the endless stream of items.
    items: int = 0  # Size of the data set.
    stage_step: int = 0  # Step at which the stage began.
    stage_epoch: int = 0  # Epoch at which the stage began.
    finished: bool = False  # True after the stage's last step.
    best_score: float = -math.inf
    evaluation_due: bool = False  # True in a checkpoint that was saved before the evaluation of its step.
    # With early stopping, evaluations since the best score, and that score, whether a checkpoint of it was kept or not.
    evaluations_since_best: int = 0
    best_evaluation: float = -math.inf
    # In a cool-down from `cooldown_step` on, the learning rate falls by `cooldown_slope` with every step, to its lowest
    # at `cooldown_end`, where the stage ends. An end of 0: there is none.
    cooldown_step: int = 0
    cooldown_end: int = 0
    cooldown_slope: float = 0.0


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of the steps after `start`, for one data set and batch size."""

    schedule: Schedule
    start: RunProgress
    step_items: int = 0  # Items of the stream per step; 0: the whole batch.

    @property
    def items_per_step(self) -> int:
        return self.step_items or self.schedule.global_batch_size

    @property
    def last_step(self) -> int:
        """Number of completed steps at which the stage ends: that of its cool-down, or what was planned."""
        return self.start.cooldown_end or self.planned_end

    @property
    def planned_end(self) -> int:
        """Number of completed steps at which the stage ends without a cool-down: by its epochs or its steps, whichever
        comes first. Until the clock begins a cool-down, the end is open."""
        if self.schedule.finish_by:
            return self.start.step + OPEN_END
        ends = []
        if self.schedule.num_epochs:
            ends_at = (self.start.stage_epoch + self.schedule.num_epochs) * self.start.items
            ends.append(self.start.step + math.ceil(max(0, ends_at - self.start.items_seen) / self.items_per_step))
        if self.schedule.num_steps:
            ends.append(max(self.start.step, self.start.stage_step + self.schedule.num_steps))
        return min(ends)

    @property
    def stop_step(self) -> int:
        """Number of completed steps at which this run ends: the stage's end, or max_steps."""
        return min(self.last_step, self.schedule.max_steps) if self.schedule.max_steps else self.last_step

    @property
    def has_open_end(self) -> bool:
        """True until the clock of finish_by has begun the cool-down."""
        return self.stop_step - self.start.step >= OPEN_END

    @property
    def known_end(self) -> int | None:
        """The step at which this run ends, or None while that is open."""
        return None if self.has_open_end else self.stop_step

    def items_seen(self, step: int) -> int:
        return self.start.items_seen + (step - self.start.step) * self.items_per_step

    def epochs_done(self, step: int) -> int:
        """Returns the number of whole epochs after `step` steps."""
        return self.items_seen(step) // self.start.items

    def ends_epoch(self, step: int) -> bool:
        """Returns True if step number `step` reached the end of an epoch."""
        return self.epochs_done(step) > self.epochs_done(step - 1)

    def progress_at(self, step: int, before: RunProgress) -> RunProgress:
        """Returns the progress after `step` steps; its scores are those of `before`."""
        return replace(
            self.start,
            step=step,
            items_seen=self.items_seen(step),
            finished=step >= self.last_step,
            best_score=before.best_score,
            best_evaluation=before.best_evaluation,
            evaluations_since_best=before.evaluations_since_best,
            evaluation_due=False,
        )

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of the step after `step` steps: a linear warm-up, then constant, half a cosine from
        the full to the minimum rate, multiplied by `gamma` with every epoch of the stage, or in three stages: after the
        warm-up it is held, and then falls exponentially to a twentieth (as in wav2vec 2.0, arXiv:2006.11477). In a
        cool-down it falls in a line."""
        at = step - self.start.stage_step
        base, warmup, least = self.schedule.learning_rate, self.schedule.warmup_steps, self.schedule.min_learning_rate
        if self.start.cooldown_end and step >= self.start.cooldown_step:
            return least + self.start.cooldown_slope * max(0, self.start.cooldown_end - step)
        if at < warmup:
            return least + (base - least) * (at + 1) / warmup
        if self.schedule.rate_schedule == "constant":
            return base
        if self.schedule.rate_schedule == "exponential":
            epochs = self.epochs_done(step) - self.start.stage_epoch
            return max(least, base * self.schedule.gamma**epochs)
        last = self.planned_end - self.start.stage_step
        if self.schedule.rate_schedule == "tri-stage":
            held = warmup + TRI_STAGE_HELD * last
            fallen = min(1.0, max(0.0, at - held) / max(1.0, last - held))
            return max(least, base * math.pow(TRI_STAGE_END, fallen))
        share = (at - warmup) / max(1, last - warmup)
        return least + (base - least) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    def cooled_down(self, step: int, end: int) -> "StepSchedule":
        """Returns the schedule whose learning rate falls in a line from that of the step after `step` steps to the
        lowest after `end` steps, where the stage ends. A cool-down that has begun goes on from the rate of its last
        step to another end."""
        start, least = self.start, self.schedule.min_learning_rate
        goes_on = bool(start.cooldown_end) and step > start.cooldown_step
        at = step - 1 if goes_on else step
        slope = (self.learning_rate(at) - least) / max(1, end - at)
        begun = start.cooldown_step if goes_on else step
        return replace(self, start=replace(start, cooldown_step=begun, cooldown_end=end, cooldown_slope=slope))

    def end_by_clock(self, step: int, steps_left: int, *, may_lengthen: bool) -> int | None:
        """Returns the step at which the cool-down must end if there is time for `steps_left` more: one begins when the
        rest is its share of all steps of the stage (or `cooldown` steps), and one that would end at another time is
        shortened, or lengthened if it may be. Returns None if nothing changes after `step` steps."""
        end, planned = step + steps_left, self.start.cooldown_end
        if planned:
            tolerance = 1 + PACE_TOLERANCE * (planned - step)
            return end if end < planned - tolerance or (may_lengthen and end > planned + tolerance) else None
        return end if steps_left <= self._usual_cooldown(step) else None

    def end_by_request(self, step: int, length: int) -> int:
        """Returns the step at which a cool-down ends that is asked for after `step` steps: `length` steps later (0: as
        many as usual), or at the end of the stage if that comes first.

        Raises UserError if one is on already, if the rate has fallen, or if the run ends.
        """
        if self.start.cooldown_end:
            raise UserError(f"the learning rate is falling already, until step {self.start.cooldown_end}")
        if step >= self.stop_step:
            raise UserError(f"the run ends after step {step}")
        self.check_rate(step)
        return min(step + max(1, length or round(self._usual_cooldown(step))), self.last_step)

    def check_rate(self, step: int) -> None:
        """Raises UserError if the learning rate after `step` steps is at its lowest, and cannot fall."""
        rate = self.learning_rate(step)
        if rate <= self.schedule.min_learning_rate:
            raise UserError(
                f"cooldown: the learning rate of step {step} has fallen to {rate:g} already",
                hint="name a checkpoint from before: --resume-from OUTPUT_DIR/checkpoint_step_N.pt",
            )

    def _usual_cooldown(self, step: int) -> float:
        """Return the steps of a cool-down that begins after `step` steps: its share of all, or those of `cooldown`."""
        share = COOLDOWN_SHARE / (1 - COOLDOWN_SHARE)
        return self.schedule.cooldown or share * (step - self.start.stage_step)


def steps_of_stage(
    schedule: Schedule,
    saved: RunProgress | None,
    items: int,
    *,
    beyond_end: bool,
    step_items: int = 0,
) -> StepSchedule:
    """Returns the steps of a stage, from its beginning or from the progress of a checkpoint, which was named if
    `beyond_end`. With `cooldown`, they are at the beginning of a new cool-down, or in that of a checkpoint that was not
    named. A named checkpoint at which a cool-down began has the full rate.

    Raises UserError for a cool-down without a checkpoint, or of a learning rate that has fallen already.
    """
    if beyond_end and saved is not None and saved.step == saved.cooldown_step:
        saved = replace(saved, cooldown_step=0, cooldown_end=0, cooldown_slope=0.0)
    cools_down = bool(schedule.cooldown and not schedule.finish_by)
    start = begin(saved, items, new_stage=beyond_end and not cools_down)
    steps = StepSchedule(schedule, start, step_items)
    if not cools_down:
        return steps
    if saved is None:
        raise UserError(
            f"cooldown {schedule.cooldown} begins at a checkpoint, and none is resumed",
            hint="name one: --resume-from OUTPUT_DIR/checkpoint_step_N.pt; a new training takes --finish-by",
        )
    if start.cooldown_end and not beyond_end:
        return steps
    steps.check_rate(start.step)
    return steps.cooled_down(start.step, start.step + schedule.cooldown)


def check_finish(schedule: Schedule, saved: RunProgress | None = None, *, beyond_end: bool = False) -> None:
    """Raises UserError if the time of finish_by is past. A run in its cool-down or after its end needs none."""
    if saved is not None and not beyond_end and (saved.cooldown_end or saved.finished):
        return
    if schedule.finish_by and seconds_until(schedule.finish_by) <= 0:
        raise UserError(
            f"finish_by {schedule.finish_by} is past",
            hint="give --finish-by a later time with its date, such as 2027-01-31T18:30, or a duration such as 6h",
        )


def begin(saved: RunProgress | None, items: int, *, new_stage: bool) -> RunProgress:
    """Returns the progress to start from: zero, in the middle of the saved stage, or at a new stage after it.

    If the size of the data set has changed, the position becomes the start of the interrupted epoch.
    """
    if saved is None:
        return RunProgress(items=items)
    epoch = saved.items_seen // saved.items
    start = replace(saved, items=items, finished=False)
    if new_stage and saved.finished:
        # The last batch of a stage may reach into the next epoch; the new stage begins with a whole epoch.
        start = replace(start, cooldown_step=0, cooldown_end=0, cooldown_slope=0.0)
        return replace(start, items_seen=epoch * items, stage_step=saved.step, stage_epoch=epoch)
    return start if items == saved.items else replace(start, items_seen=epoch * items)


def is_due_every(count: int, interval: int) -> bool:
    """Returns True if `count` is a multiple of `interval`; an interval of 0 means never."""
    return interval > 0 and count > 0 and count % interval == 0
