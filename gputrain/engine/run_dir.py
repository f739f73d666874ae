"""A run and its folder: opened, saved, stopped, resumed, and taken back to its last checkpoint when it goes wrong."""

import contextlib
import logging
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from gputrain import config
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content
from gputrain.engine.plan_file import NAME, PlanFile, write_text
from gputrain.engine.schedule import RunProgress, Saving
from gputrain.engine.stop import StopSignal
from gputrain.errors import UserError
from gputrain.hw.plan import Hardware

log = logging.getLogger(__name__)

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
