"""A run and its folder: opened, saved, stopped, resumed, and taken back to its last checkpoint when it goes wrong."""

import contextlib
import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from gputrain import config
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content
from gputrain.engine.optim import LossScale, has_scaled
from gputrain.engine.plan_file import NAME, PlanFile, write_text
from gputrain.engine.schedule import RunProgress, Saving, Schedule
from gputrain.engine.stop import StopSignal
from gputrain.errors import Stopped, UserError
from gputrain.hw.monitor import Pressure
from gputrain.hw.plan import Hardware
from gputrain.hw.runtime import Runtime, memory_gb, random_state, release_memory, set_random_state

if TYPE_CHECKING:
    from gputrain.engine.train import Recipe

log = logging.getLogger(__name__)

NONFINITE_LIMIT = 3  # steps in a row after which the run goes back to its last checkpoint
ROLLBACK_LIMIT = 3  # times that it may go back before it gives up
GOOD_AFTER = 10  # finite steps behind a checkpoint, which show that it is one to go back to
STEADY_STEPS = 1000  # finite steps in a row, after which earlier rollbacks no longer count
NO_CHANGE = ("resume_from", "output_dir")  # settings that may differ without a word
LOCK, CONFIG = ".lock", "config.yaml"
LEAVING_SECONDS = 30  # that a training which was asked to stop may take to save


@dataclass
class Run:
    """A run folder that is open for training."""

    folder: Path
    saving: Saving
    settings: dict[str, Any]  # the whole configuration, flat
    command: str  # what repeats this run: "gputrain train-vae"
    resumed: Content | None = None
    prediction: dict[str, Any] = field(default_factory=dict)  # of the plan, for plan.json
    given_plan: PlanFile | None = None  # that the user wants again
    facts: dict[str, Any] = field(default_factory=dict)  # of the data, that its model is of no use without
    lock: FileLock | None = None  # what keeps other processes out of the folder
    configuration: str = ""  # what config.yaml is to hold
    saved_at: float = field(default_factory=time.monotonic)
    is_overdue: bool = False  # whether a save was put off
    saved_step: int = -1  # which checkpoint_last.pt holds, of those that this process has made
    before: dict[str, Any] = field(default_factory=dict)  # settings of the checkpoint that the user resumes
    data: dict[str, Any] = field(default_factory=dict)  # counts and a digest of what it is trained on
    stop: StopSignal = field(init=False)

    def __post_init__(self) -> None:
        self.stop = StopSignal(lambda: self.how_to_resume)

    @property
    def how_to_resume(self) -> str:
        if not (self.folder / CONFIG).exists():  # it ended before its first step
            return "run the same command again, with --resume-from auto"
        return f"go on with: {self.command} --config {self.folder / CONFIG} --resume-from auto"

    def has_started(self) -> None:
        """Write the configuration into the folder, now that it has proved itself: a step was made with it.

        Until then the folder keeps the one with which its checkpoints were made.
        """
        try:
            write_text(self.folder / CONFIG, self.configuration)
        except OSError as error:
            log.warning("%s cannot be written (%s)", self.folder / CONFIG, error.strerror)

    def tell_changes(self) -> None:
        """Say in which settings and data this run differs from the checkpoint that the user resumes."""
        if not self.resumed or not self.before:
            return
        changed = [
            f"{name} {was} -> {self.settings.get(name)}"
            for name, was in self.before.items()
            if was != self.settings.get(name) and name not in NO_CHANGE
        ]
        if changed:
            log.warning("settings that differ from the checkpoint's: %s", ", ".join(changed))
        was, now = self.resumed.get("data", {}), self.data
        for part in was.keys() & now.keys():
            if was[part] != now[part]:
                items = f"{was[part]['items']} items -> {now[part]['items']}"
                same = was[part]["items"] == now[part]["items"]
                what = f"as many items ({now[part]['items']}), other content or order" if same else items
                log.warning("the %s data differ from the checkpoint's: %s", part, what)
        self.before = {}  # what this process saves from now on is no news to its user

    def save_is_due(self) -> bool:
        minutes = (time.monotonic() - self.saved_at) / 60
        return self.is_overdue or 0 < self.saving.checkpoint_minutes <= minutes

    @property
    def progress(self) -> RunProgress | None:
        """Where the resumed run stood."""
        return RunProgress(**self.resumed["progress"]) if self.resumed else None

    @property
    def goes_onwards(self) -> bool:
        """To name a checkpoint is to go on beyond it; `auto` only finishes what was begun."""
        return self.saving.resume_from not in ("", "auto")

    def reopen(self, kind: str) -> RunProgress | None:
        """Go on from the newest checkpoint, as a run would that resumes it. Returns where that stands."""
        found = checkpoint.find("auto", self.folder, kind)
        self.resumed = found[1] if found else None
        return self.progress


def open_run(settings: object, saving: Saving, *, kind: str, command: str) -> Run:
    """Make the run folder, or open it again; `Run.has_started` writes the configuration into it.

    With `auto`, a folder whose run ended before its first checkpoint is begun anew. Raises UserError if the folder
    cannot be written to, if it holds a run that is not to be resumed, or that another process trains; or if the
    checkpoint to resume cannot serve.
    """
    folder = saving.output_dir
    # Before the checkpoint is read, which another process may be about to replace.
    lock = hold(folder) if folder.is_dir() else None
    found = checkpoint.find(saving.resume_from, folder, kind) if saving.resume_from else None
    here = found is not None and found[0].parent.resolve() == folder.resolve()
    holds_run = bool(checkpoint.in_order(folder)) or (folder / "metrics.jsonl").exists()
    begins_anew = holds_run and found is None and saving.resume_from == "auto"
    if holds_run and not here and not begins_anew:
        raise UserError(
            f"{folder} already holds a run",
            hint="go on with it by --resume-from auto, or give the new run another --output-dir",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock or hold(folder)
        with tempfile.TemporaryFile(dir=folder):  # tells a folder that cannot be written to before hours of work do
            pass
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", hint="--output-dir takes a folder to write to") from None
    if lock.is_locked:
        remove_partial(folder)
    if begins_anew:
        log.info("%s holds a run that ended before its first checkpoint: starting from scratch", folder)
    if found:
        log.info("resuming %s", found[0])
    if found and here:
        checkpoint.restore_names(found[0], found[1].get("names", ()))
    resumed = found[1] if found else None
    return Run(
        folder, saving, config.flatten(settings), command, resumed, lock=lock, configuration=config.to_yaml(settings),
        before=config.completed(type(settings), found[1]["config"]) if found else {},
    )  # fmt: skip


def remove_partial(folder: Path) -> None:
    """Delete what writing that was cut off has left in a run folder."""
    for pattern in ("checkpoint_*", f"{CONFIG}*", f"{NAME}*", "metrics*"):
        for path in folder.glob(f"{pattern}.partial"):
            with contextlib.suppress(OSError):
                path.unlink()


def hold(folder: Path) -> FileLock:
    """A folder for this process alone until it ends, be it killed, or drops what is returned.

    Warns where files cannot be locked, as on some network drives. Raises UserError where another process trains in the
    folder and does not leave.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)  # the same in all of a process
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another process trains in %s: waiting for it to leave", folder)
            lock.acquire(timeout=LEAVING_SECONDS)
    except Timeout:
        raise UserError(
            f"{folder}: another process trains in it",
            hint="wait for its end or stop it, or give the new run another --output-dir",
        ) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): nothing keeps a second process out", folder, error)
    return lock


def given_plan(wishes: Hardware) -> PlanFile | None:
    """The plan that the user wants again. Raises UserError where it cannot be followed."""
    if wishes.plan_file is None:
        return None
    found = PlanFile.load(wishes.plan_file)
    if found.plan.device.value == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{wishes.plan_file} plans for a GPU, and torch sees none", hint="leave --plan-file out to plan anew"
        )
    return found


@dataclass
class TrainState:
    """A recipe under way: the state that `update` changes and a checkpoint holds."""

    recipe: "Recipe"
    runtime: Runtime
    gradient_clip: float
    micro_batch: dict[str, int]  # items at once, by the first phase of a turn; halved when memory runs out
    loss_scales: dict[str, LossScale]  # by phase; they have an effect in fp16 only
    progress: RunProgress = field(default_factory=RunProgress)  # where the weights stand
    whole: bool = True  # False while some phases of a step have moved their weights, and others have not
    nonfinite: dict[str, Tensor] = field(default_factory=dict)  # whether the last step was, by phase, on the device
    nonfinite_in_a_row: dict[str, int] = field(default_factory=dict)
    finite_in_a_row: int = 0  # steps, in which every phase was
    rollbacks: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)  # what changed the plan on the way
    warned: bool = False  # of memory that is nearly full
    pressed: int = 0  # times in a row that it was too full

    @classmethod
    def begin(cls, recipe: "Recipe", schedule: Schedule, runtime: Runtime, run: Run) -> "TrainState":
        """A training from its start, or from the checkpoint that the run was opened with."""
        names = [phase.name for phase in recipe.phases]
        gathering = [phase.name for phase in recipe.phases if phase.loss]
        state = cls(
            recipe,
            runtime,
            schedule.gradient_clip,
            micro_batch=_micro_batch(gathering, schedule, runtime, run),
            loss_scales={name: LossScale().to(runtime.device) for name in names},
        )
        if run.resumed:
            run.tell_changes()
            state.restore(run.resumed)
            state.nonfinite_in_a_row = dict(run.resumed.get("nonfinite_in_a_row", {}))
        state.write_plan(run)
        return state

    @property
    def scales_losses(self) -> bool:
        """Whether losses are multiplied by a scale, because small gradients would vanish: in fp16 only."""
        return self.runtime.dtype == torch.float16

    def loss_scale(self, phase: str) -> Tensor | float:
        """What the losses of a phase are multiplied by and its gradients divided by."""
        return self.loss_scales[phase].scale if self.scales_losses else 1.0

    def snapshot(self) -> Content:
        """All that it takes to go on as if the run had never stopped, but for the progress."""
        return {
            "kind": self.recipe.kind,
            "modules": {name: module.state_dict() for name, module in self.recipe.modules.items()},
            "optimizers": {phase.name: phase.optimizer.state_dict() for phase in self.recipe.phases},
            "loss_scales": {name: scale.state_dict() for name, scale in self.loss_scales.items() if self.scales_losses},
            "random": random_state(self.runtime.device),
        }

    def restore(self, content: Content) -> None:
        """Put a snapshot back. Raises UserError if it belongs to another model."""
        checkpoint.load_modules(self.recipe.modules, content["modules"])
        for phase in self.recipe.phases:
            checkpoint.load_optimizer(phase.name, phase.optimizer, content["optimizers"])
            saved = content["loss_scales"].get(phase.name)
            if saved and self.scales_losses and has_scaled(saved):
                self.loss_scales[phase.name].load_state_dict(saved)
        set_random_state(content["random"], self.runtime.device)

    def save(
        self, run: Run, progress: RunProgress, *, names: Sequence[str], must: bool, best_score: float | None = None
    ) -> RunProgress:
        """Save a checkpoint, under further `names` too; with a `best_score`, as the best so far. Returns the progress,
        whose best score is raised only if there is a checkpoint of it.

        A disk that refuses it ends only a run that `must` save. Weights whose gradient is not finite may be to blame
        for it, and take no good checkpoint's place unless the run must save: it is put off to the next finite step.
        """
        run.is_overdue = not must and any(map(bool, self.nonfinite.values()))
        if run.is_overdue:
            for name in names:
                log.warning("%s is not written, as the gradient of its step is not finite", run.folder / name)
            return progress
        saved = progress
        if best_score is not None:
            names, saved = [*names, checkpoint.BEST], dataclasses.replace(progress, best_score=best_score)
        content = {**self.snapshot(), "progress": dataclasses.asdict(saved), "names": [*names]}
        content |= {"config": run.settings, "facts": run.facts, "data": run.data}
        content["nonfinite_in_a_row"] = self.nonfinite_in_a_row
        try:
            with run.stop.held():
                checkpoint.save(run.folder, content)
                run.saved_step = progress.step
                kept = keep_and_prune(run, names)
        except checkpoint.SaveFailed as error:
            if must:
                hint = f"{error.hint}; the checkpoints saved before are whole; then {run.how_to_resume}"
                raise Stopped(str(error), hint=hint) from None
            log.warning("%s; %s. Training goes on, and the next save tries again", error, error.hint)
            kept = []
        run.saved_at = time.monotonic()
        self.write_plan(run)
        return saved if checkpoint.BEST in kept else progress

    def shrink(self, phase: str, cause: str, step: int) -> None:
        """Have a phase go on with half as many items at once. Its result stays the same."""
        before = self.micro_batch[phase]
        self.micro_batch[phase] = after = math.ceil(before / 2)
        self.events.append({"step": step, "phase": phase, "cause": cause, "from": before, "to": after})
        log.warning(
            "%s: the %s goes on with %d items at once instead of %d; the step stays the same",
            cause, phase, after, before,
        )  # fmt: skip

    def relieve(self, pressure: Pressure, step: int) -> None:
        """Act on what the monitor says of the device's memory: first give back what lies unused, then take less."""
        if pressure == "warn" and not self.warned:
            self.warned = True
            log.warning("the device's memory is 90 % full; at 95 %, a smaller part of the batch will be taken at once")
        if pressure != "act":
            self.pressed = 0
            return
        self.pressed += 1
        release_memory()
        if self.pressed > 1 and max(self.micro_batch.values()) > 1:
            self.shrink(max(self.micro_batch, key=lambda phase: self.micro_batch[phase]), "memory 95 % full", step)

    def write_plan(self, run: Run) -> None:
        measured = {name.removeprefix("memory/"): gb for name, gb in memory_gb(self.runtime.device).items()}
        record = PlanFile(self.runtime.plan, self.micro_batch, run.prediction, measured, self.events)
        try:
            record.save(run.folder / NAME)
        except OSError as error:
            log.warning("%s cannot be written (%s)", run.folder / NAME, error.strerror)

    def go_back_if_unstable(self, rows: list[dict[str, float]], run: Run, done: int) -> None:
        """Load a good checkpoint when a phase's gradient was not finite several times in a row. `rows` are the scalars
        of the last steps, up to the one that makes `done`.

        The data goes on where it is, so that the same batches don't lead to the same end. Raises UserError when there
        is no checkpoint, or when going back has not helped.
        """
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            cause = self._instability(row)
            if cause:
                self._go_back(cause, step - max(self.nonfinite_in_a_row.values()), run)
                return
            self.finite_in_a_row = 0 if any(self.nonfinite_in_a_row.values()) else self.finite_in_a_row + 1
            if self.finite_in_a_row >= STEADY_STEPS:
                self.rollbacks = 0

    def _go_back(self, cause: str, last_finite: int, run: Run) -> None:
        """Load the newest checkpoint that enough finite steps followed, else the oldest there is."""
        self.rollbacks += 1
        found: Content | None = None
        problem = "there is no checkpoint to go back to"
        if self.rollbacks > ROLLBACK_LIMIT:
            problem = "going back did not help"
        else:
            for content in checkpoint.readable(run.folder, self.recipe.kind):
                if found is None or content["progress"]["step"] < found["progress"]["step"]:
                    found = content
                if found["progress"]["step"] + GOOD_AFTER <= last_finite:
                    break
        if found is None:
            raise UserError(
                f"{cause}, and {problem}",
                hint="lower --learning-rate, lengthen --warmup-steps, or train in fp32 with --no-mixed-precision",
            )
        self.restore(found)
        self.nonfinite.clear()
        self.nonfinite_in_a_row.clear()
        self.finite_in_a_row = 0
        log.warning("%s; weights and optimizers are back at step %d", cause, found["progress"]["step"])

    def _instability(self, row: dict[str, float]) -> str:
        """Name the phase that has gone wrong with this step, and its terms that were not finite."""
        for name, value in row.items():
            if name.startswith("nonfinite/"):
                phase = name.removeprefix("nonfinite/")
                streak = self.nonfinite_in_a_row.get(phase, 0) + 1 if value else 0
                self.nonfinite_in_a_row[phase] = streak
                if streak >= NONFINITE_LIMIT:
                    prefix = f"loss/{phase}/"
                    terms = [n.removeprefix(prefix) for n in row if n.startswith(prefix) and not math.isfinite(row[n])]
                    what = f"its {', '.join(terms)} too" if terms else "though its losses are"
                    return f"the gradient of the {phase} was not finite in {streak} steps in a row ({what})"
        return ""


def keep_and_prune(run: Run, names: Sequence[str]) -> list[str]:
    """Give the checkpoint that was just saved its further names, and delete what is no longer kept. Returns the names
    that it has; a disk that refuses one costs a warning."""
    kept = []
    for name in names:
        try:
            checkpoint.keep(run.folder, name)
            kept.append(name)
        except OSError as error:
            log.warning("%s cannot be written (%s); %s has the same", run.folder / name, error, checkpoint.LAST)
    try:
        checkpoint.prune(run.folder, run.saving.keep_checkpoints, run.saving.is_permanent)
    except OSError as error:
        log.warning("an old checkpoint cannot be deleted (%s)", error)
    return kept


def _micro_batch(phases: list[str], schedule: Schedule, runtime: Runtime, run: Run) -> dict[str, int]:
    """Items at once by phase: those of the plan, or fewer where the run has learnt on this device that they must be."""
    size = schedule.micro_batch_size or schedule.batch_size
    known = run.given_plan
    if known is None and run.resumed:
        with contextlib.suppress(UserError):  # a plan that is damaged or of an older gputrain must not end a run
            known = PlanFile.load(run.folder / NAME)
    now = runtime.plan
    if known is None or (known.plan.device, known.plan.micro_batch_size) != (now.device, now.micro_batch_size):
        return dict.fromkeys(phases, size)
    return {phase: min(size, known.micro_batch.get(phase, size)) for phase in phases}
