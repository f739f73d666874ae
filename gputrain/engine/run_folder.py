"""A run folder: creating, locking, resuming, its configuration, plan.json, and history.jsonl, which records every start
and every end of a run."""

import contextlib
import errno
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock, Timeout

from gputrain import config
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content
from gputrain.engine.distributed import RankGroup
from gputrain.engine.schedule import RunProgress, Saving, StepSchedule
from gputrain.engine.stop import StopSignal
from gputrain.errors import Stopped, UserError, first_line
from gputrain.files import write_text
from gputrain.formatting import shell_command
from gputrain.heartbeat import HEARTBEAT, Heartbeat, time_now
from gputrain.hw.plan import Plan
from gputrain.hw.probe import machine_facts
from gputrain.serialization import from_row

log = logging.getLogger(__name__)

# Settings whose changes are not reported.
NO_CHANGE = ("resume_from", "output_dir", "max_time", "cooldown", "verbose", "watch", "allow_control", "yes", "notify")
LOCK, CONFIG, PLAN = ".lock", "config.yaml", "plan.json"
METRICS, HISTORY = "metrics.jsonl", "history.jsonl"
MetricsRow = dict[str, Any]  # The values of a line of metrics.jsonl by name.
TAIL_BYTES = 65536  # Bytes at the end of metrics.jsonl that are read first; they hold about 200 lines.
HISTORY_BYTES = 4_000_000  # Bytes at its end that are searched for the last start, whose line has all changes.
LEAVING_SECONDS = 30  # Time for another process that was asked to stop to save.


def blocks(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Yield the first bytes of a file. Raises OSError."""
    while length > 0 and (block := file.read(min(length, 1 << 20))):
        length -= len(block)
        yield block


def lines_from(path: Path, step: int) -> tuple[int, list[bytes]]:
    """Return the lines of metrics behind the last whole one of an earlier step, and the position where they begin.

    Lines are in the order of their steps, so the file is read from its end: a long run has a million lines. Raises
    OSError.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = min(TAIL_BYTES, size)
        while True:
            file.seek(size - length)
            lines = file.read(length).splitlines(keepends=True)
            if length < size:
                lines.pop(0)  # Its beginning may not have been read.
            rows = (row_of(line) for line in reversed(lines))
            later = next((number for number, row in enumerate(rows) if row is not None and row["step"] < step), None)
            if later is not None or length == size:
                found = lines[len(lines) - later :] if later is not None else lines
                return size - sum(map(len, found)), found
            length = min(4 * length, size)


def append_line(line: bytes, path: Path) -> None:
    """Append a line to a file atomically, after completing an unfinished line. Raises OSError."""
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        line = line if file.read(1) in (b"", b"\n") else b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def row_of(line: bytes) -> MetricsRow | None:
    """Returns the values of a line by name, or None if the line is incomplete or damaged."""
    try:
        row: MetricsRow = json.loads(line.decode())
        row["step"] = int(row["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return row


@dataclass
class PlanFile:
    """`micro_batch`: present micro-batch sizes by step group; `events`: changes of the plan during the run."""

    plan: Plan
    micro_batch: dict[str, int]
    prediction: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        content = {
            "settings": self.plan.to_json(),
            "micro_batch": self.micro_batch,
            "prediction": self.prediction,
            "measured": self.measured,
            "events": self.events,
        }
        write_text(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> "PlanFile | None":
        """Read a plan file; None if it is missing or damaged, which must not end a run."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["plan"] = content.pop("settings")
            content.pop("compiling", None)  # Former versions said there what heartbeat.json says.
            found = from_row(cls, content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return found if all(is_count(size, 1) for size in found.micro_batch.values()) else None


def is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


@dataclass
class TrainingStatus:
    """Figures that a run learns while it trains: its saves, its speed, its memory."""

    saved_step: int = -1  # The step that this process saved last; -1: none.
    save_seconds: float = 0.0  # Time that writing the last checkpoint took.
    last_is_damaged: bool = False  # True if checkpoint_last.pt is damaged, until the first save.
    seconds_per_step: float = 0.0  # As measured: of the first steps, then of the last line of metrics. 0: not yet.
    measured_memory: dict[str, float] = field(default_factory=dict)  # Figures of MemoryCheck, on a GPU.


@dataclass(frozen=True)
class Run:
    """A training as it is known before its first step."""

    folder: Path
    saving: Saving
    settings: dict[str, Any]  # The whole configuration, flat.
    command: str  # The command of this run, such as "gputrain train-vae".
    configuration: str = ""  # Content of config.yaml.
    resumed: Content | None = None
    before: dict[str, Any] = field(default_factory=dict)  # Settings of the resumed checkpoint.
    prediction: dict[str, Any] = field(default_factory=dict)  # The plan's prediction, for plan.json.
    data: dict[str, Any] = field(default_factory=dict)  # Counts and a digest of the training data.
    facts: dict[str, Any] = field(default_factory=dict)  # Properties of the data that inference needs.
    starts_pretrained: bool = False  # True if it begins with the weights of init_from, with which results are compared.
    group: RankGroup = field(default_factory=RankGroup)  # The ranks that train together; the leader writes the folder.
    lock: FileLock | None = None  # Keeps other processes out of the folder.
    is_new: bool = False  # True if this process has made the folder.
    stop: StopSignal = field(default_factory=StopSignal)
    status: TrainingStatus = field(default_factory=TrainingStatus)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def how_to_resume(self) -> str:
        if not (self.folder / CONFIG).exists():  # The run ended before its first step.
            return "run the same command again, with --resume-from auto"
        limit = self.settings.get("max_steps", 0)
        further = ("--max-steps", limit) if limit else ()
        words = (*self.command.split(), "--config", self.folder / CONFIG, "--resume-from", "auto", *further)
        return f"go on with: {shell_command(*words)}"

    def has_started(self) -> None:
        """Write the configuration into the folder after the first step, which shows that it works.

        Until then the folder keeps the configuration of its checkpoints.
        """
        if not self.group.leads:
            return
        try:
            write_text(self.folder / CONFIG, self.configuration)
        except OSError as error:
            log.warning("%s cannot be written (%s)", self.folder / CONFIG, error.strerror)

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Settings and data that differ from those of the resumed checkpoint: before, now."""
        if not self.resumed or not self.before:
            return {}
        both = {name: (was, self.settings.get(name)) for name, was in self.before.items() if name not in NO_CHANGE}
        changes = {name: values for name, values in both.items() if values[0] != values[1]}
        was, now = self.resumed["data"], self.data
        for part in was.keys() & now.keys():
            if was[part] != now[part]:
                items = (was[part]["items"], now[part]["items"])
                what = f"{items[0]} items -> {items[1]}"
                if items[0] == items[1]:
                    what = f"as many items ({items[1]}), other content or order"
                changes[f"{part} data"] = (f"{items[0]} items", what)
        return changes

    def warn_of_changes(self) -> None:
        """Warn about settings and data that differ from those of the resumed checkpoint."""
        changes = dict(self.changes)
        of_data = {name: changes.pop(name) for name in [*changes] if name.endswith(" data")}
        if changed := ", ".join(f"{name} {was} -> {now}" for name, (was, now) in changes.items()):
            log.warning("settings that differ from the checkpoint's: %s", changed)
        for name, (_, what) in of_data.items():
            log.warning("the %s differ from the checkpoint's: %s", name, what)

    @property
    def progress(self) -> RunProgress | None:
        """Progress of the resumed checkpoint."""
        return RunProgress(**self.resumed["progress"]) if self.resumed else None

    @property
    def continues_beyond_end(self) -> bool:
        """True if the user named a checkpoint, which continues beyond it; `auto` only finishes an interrupted run."""
        return self.saving.resume_from not in ("", "auto")


def open_run(
    settings: object,
    saving: Saving,
    *,
    kind: str,
    command: str,
    group: RankGroup | None = None,
) -> Run:
    """Create the run folder, or open it again; `Run.has_started` writes the configuration into it.

    A run that ended before its first checkpoint begins again, with `auto` from scratch; ranks that torchrun restarts
    resume in any case. Of several ranks, the leader opens the folder, and the others receive the checkpoint from it.
    Raises UserError if the folder cannot be written to, if it holds a run that is not to be resumed or is in use by
    another process, or if the checkpoint to resume cannot be used.
    """
    group = group or RankGroup()
    if group.ranks.restarts:
        saving = replace(saving, resume_from="auto")
    opened = OpenedFolder()

    def open_folder() -> Content | None:
        nonlocal opened
        opened = _open_folder(saving, kind, type(settings))
        return opened.resumed

    resumed = group.from_leader(open_folder)
    return Run(
        saving.output_dir,
        saving,
        config.flatten(settings),
        command,
        configuration=config.to_yaml(settings),
        resumed=resumed,
        before=dict.fromkeys(config.leaves(type(settings))) | resumed["config"] if resumed else {},
        group=group,
        lock=opened.lock,
        is_new=opened.is_new,
        stop=StopSignal(group.ranks),
        status=TrainingStatus(last_is_damaged=opened.last_is_damaged),
        heartbeat=Heartbeat(kind),
    )


@contextlib.contextmanager
def discarded_if_refused(run: Run) -> Iterator[None]:
    """Delete a new run folder if the block raises UserError before anything but the lock is in it."""
    try:
        yield
    except UserError:
        if run.is_new and run.lock and [path.name for path in run.folder.iterdir()] == [LOCK]:
            run.lock.release()
            with contextlib.suppress(OSError):
                (run.folder / LOCK).unlink()
                run.folder.rmdir()
        raise


class OpenedFolder(NamedTuple):
    """A run folder that this process has opened: its lock, the checkpoint to resume, whether checkpoint_last.pt is
    damaged, and whether the folder is new."""

    lock: FileLock | None = None
    resumed: Content | None = None
    last_is_damaged: bool = False
    is_new: bool = False


def _open_folder(saving: Saving, kind: str, settings: type) -> OpenedFolder:
    """Creates or opens the run folder."""
    folder = saving.output_dir
    # The lock comes before reading the checkpoint, which another process may be about to replace.
    is_new = not folder.is_dir()
    lock = None if is_new else lock_folder(folder)
    found = checkpoint.find(saving.resume_from, folder, kind) if saving.resume_from else None
    if found:
        config.check_stored(settings, found[1]["config"], found[0])
        usual = {name: value for name, value in config.defaults(settings).items() if value is not None}
        found[1]["config"] = usual | found[1]["config"]
    here = found is not None and found[0].parent.resolve() == folder.resolve()
    has_steps, has_checkpoints = (folder / METRICS).exists(), bool(checkpoint.newest_first(folder))
    begins_anew = has_steps and not has_checkpoints and bool(saving.resume_from)
    if (has_steps or has_checkpoints) and not here and not begins_anew:
        raise UserError(
            f"{folder} already holds a run",
            hint="continue it with --resume-from auto, or give the new run another --output-dir",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock or lock_folder(folder)
        with tempfile.TemporaryFile(dir=folder):  # This detects a read-only folder before hours of work are lost.
            pass
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", hint="--output-dir takes a folder to write to") from None
    if lock.is_locked:
        remove_partial(folder)
    if begins_anew:
        again = found[0] if found else "scratch"
        log.info("%s holds a run that ended before its first checkpoint: starting from %s", folder, again)
    if found:
        log.info("resuming %s", found[0])
    if found and here:
        checkpoint.restore_names(found[0], found[1]["names"])
    damaged = found is not None and here and _skipped_last_checkpoint(saving, found[0])
    return OpenedFolder(lock, found[1] if found else None, damaged, is_new)


def _skipped_last_checkpoint(saving: Saving, found: Path) -> bool:
    """Return True if an older checkpoint than checkpoint_last.pt is resumed because that one is damaged."""
    last, named = saving.output_dir / checkpoint.LAST, Path(saving.resume_from)
    wanted_another = named.is_file() and named.resolve() != last.resolve()
    return found.name != checkpoint.LAST and last.exists() and not wanted_another


def remove_partial(folder: Path) -> None:
    """Delete incomplete files that interrupted writing left in a run folder."""
    for pattern in ("checkpoint_*", f"{CONFIG}*", f"{PLAN}*", "metrics*", f"{HEARTBEAT}*"):
        for path in folder.glob(f"{pattern}.partial"):
            with contextlib.suppress(OSError):
                path.unlink()


def lock_folder(folder: Path) -> FileLock:
    """Lock a folder for this process until it ends or drops the returned lock.

    Warns if files cannot be locked, as on some network drives. Raises UserError if another process trains in the folder
    and does not stop.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)  # All locks of a process on this file are one.
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another process trains in %s: waiting for it to stop", folder)
            lock.acquire(timeout=LEAVING_SECONDS)
    except Timeout:
        raise UserError(
            f"{folder}: another process trains in it",
            hint="wait for its end or stop it, or give the new run another --output-dir",
        ) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s): a second process in it would not be detected", folder, error)
    return lock


# ------------------------------------------------------------------------------------------------------- history.jsonl


@contextlib.contextmanager
def recorded(
    run: Run, steps: StepSchedule, device_type: str, progress_now: Callable[[], RunProgress]
) -> Iterator[None]:
    """Add a line to history.jsonl at the start of the block, and one at its end, however it ends."""
    start: dict[str, Any] = {
        "event": "start",
        "command": run.command,
        "step": steps.start.step,
        "last_step": steps.known_end,
        "logged_step": last_logged_step(run.folder),
        "ranks": run.group.ranks.count,
        "machine": machine_facts(device_type),
        "host": platform.node(),
        "process": os.getpid(),
        "changes": run.changes,
        "data": run.data,
    }
    _add_to_history(run, start)
    outcome, message = "failed", ""
    try:
        yield
        progress = progress_now()
        outcome = "finished"
        if not progress.finished:
            message = "ended early" if run.saving.ends_early(progress) else "max_steps is reached"
    except Stopped as error:
        outcome, message = "stopped", error.message
        raise
    except BaseException as error:
        message = first_line(error)
        raise
    finally:
        _add_to_history(run, {"event": "end", "step": progress_now().step, "outcome": outcome, "message": message})


def _add_to_history(run: Run, row: dict[str, Any]) -> None:
    """Append a line with the time. An error must not end the training."""
    if not run.group.leads:
        return
    line = json.dumps({"time": time_now(), **row}, default=str) + "\n"
    try:
        append_line(line.encode(), run.folder / HISTORY)
    except OSError as error:
        log.warning("%s cannot be written (%s)", run.folder / HISTORY, error.strerror or error)


def last_logged_step(folder: Path) -> int:
    """Returns the step of the last whole line of metrics.jsonl; 0 if there is none."""
    rows = (row_of(line) for line in _last_lines(folder / METRICS, TAIL_BYTES))
    return next((int(row["step"]) for row in rows if row is not None), 0)


def open_start(folder: Path) -> dict[str, Any] | None:
    """Returns the last start of history.jsonl; None if there is none, or if its end follows."""
    for line in _last_lines(folder / HISTORY, HISTORY_BYTES):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("event") in ("start", "end"):
                return row if row["event"] == "start" else None
    return None


def history_size(folder: Path) -> int:
    """Returns the size of history.jsonl, which grows when a run starts; 0 if there is none."""
    try:
        return (folder / HISTORY).stat().st_size
    except OSError:
        return 0


def _last_lines(path: Path, count: int) -> list[bytes]:
    """Return the lines of the last `count` bytes of a file, the last one first; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count))
            return file.read().splitlines()[::-1]
    except OSError:
        return []
