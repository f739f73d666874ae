"""A queue of trainings for one GPU: the configurations in a folder start one after the other, in the order of their
names, and are resumed until they end.

There is no file of states. What has finished, failed or was stopped follows from the histories of the run folders and
from what this process has seen, so that a queue goes on where it was after the end of this process or of the machine. A
training is a process of its own: if this one is killed, it goes on, and is found again by the lock of its folder.
"""

import hashlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from gputrain.config import LONGEST_FILE, assemble, checked, leaves, read_file, without_retired
from gputrain.engine.checkpoint import newest_first
from gputrain.engine.history import HISTORY, last_logged_step
from gputrain.engine.requests import ASKED_TO_STOP, send
from gputrain.engine.run_folder import CONFIG, LOCK
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError, first_line
from gputrain.hw.child_process import describe_exit, package_environment, remedy_for_exit
from gputrain.kinds import ModelKind, read_defaults, stated_kind, without_kind
from gputrain.report.records import is_count, read_history

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "finished", "stopped", "failed", "refused", "skipped"]
StateReason = tuple[State, str]
LOOK_SECONDS = 2.0
SETTLED_SECONDS = 3.0  # Age of a change from which on a file is read: an editor may not have written all of it before.
PAUSES = (30.0, 300.0)  # Seconds before a run that failed after some steps is resumed, each time.
STOPPED = 75  # Exit code of a training that was asked to stop.
IN_TIME = "stopped in time for"  # How the message of such an end begins.
SHOWN_LINES, SHOWN_BYTES = 4, 4000  # Of a failed training's output.
LONGEST_HINT = 400
PROGRAM = (sys.executable, "-m", "gputrain")
ANOTHER = "another gputrain watch works on this queue; this one only shows it"


@dataclass(eq=False)
class QueueEntry:
    """A file of the queue, and what this process knows about its run. `attempts` are its starts by this process."""

    path: Path
    state: State = "waiting"
    message: str = ""
    attempts: int = 0
    trains: ModelKind | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # The settings that the file gives.
    changed: tuple[int, int] = (0, 0)  # Time and size of what was read.
    digest: str = ""
    is_changing: bool = False
    error: str = ""  # What is wrong with the file.
    ended: StateReason | None = None  # How the run has ended, until the file changes or it is to be tried again.
    failures: int = 0
    due: float = 0.0  # When it may start, by time.monotonic.
    is_skipped: bool = False
    is_wanted: bool = False  # Goes on, whatever its run folder says.
    runs_elsewhere: bool = False  # Another process trained in its folder at the last look.
    process: "subprocess.Popen[bytes] | None" = None  # Its training, if this process has started it.
    rows_before: int = 0  # Lines of history before it.
    is_asked: bool = False  # It was asked to stop.

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def id(self) -> str:
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:10]

    @property
    def kind(self) -> str:
        return self.trains.name if self.trains else ""

    @property
    def folder(self) -> Path:
        return Path(self.values.get("output_dir", ""))

    @property
    def run(self) -> Path | None:
        return self.values.get("output_dir")  # None while it is not known.

    @property
    def command(self) -> str:
        return shlex.join(["gputrain", *self.words])

    @property
    def output(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def begins_at(self) -> str:
        """The checkpoint that its file names, if any."""
        given = str(self.values.get("resume_from", ""))
        return given if given != "auto" else ""

    @property
    def words(self) -> list[str]:
        """The words of its command. A run whose file names a checkpoint begins there, and goes on from its own."""
        resumes = [] if self.begins_at and not newest_first(self.folder) else ["--resume-from", "auto"]
        return [self.trains.command if self.trains else "train-", "--config", str(self.path), *resumes]

    def refresh(self) -> None:
        """Read the file if it has changed, and nobody writes it any more."""
        try:
            found = self.path.stat()
            changed = (found.st_mtime_ns, found.st_size)
            self.is_changing = changed != self.changed and 0 <= time.time() - found.st_mtime < SETTLED_SECONDS
            if changed == self.changed or self.is_changing:
                return
            with self.path.open("rb") as file:
                self.changed, digest = changed, hashlib.sha256(file.read(LONGEST_FILE + 1)).hexdigest()
        except OSError as error:
            self.digest, self.error = "", f"{self.path}: {error.strerror}"
            return
        if digest == self.digest:
            return
        run, was_read, self.digest = self.run, not self.error, digest
        self._read()
        # A run that this process knows goes on with other settings; one that was there before may be another.
        self.is_wanted = was_read and self.ended is not None and self.run == run
        self.ended, self.failures, self.due, self.is_skipped = None, 0, 0.0, False

    def _read(self) -> None:
        """Check the file as the train command does."""
        self.error, self.values = "", {}
        try:
            self.trains = stated_kind(read_file(self.path))
            self.values = read_defaults(self.path, self.trains.train, self.trains.translate)
            if "output_dir" not in self.values:
                raise UserError(f"{self.path}: output_dir is missing", hint="give each run a folder of its own")
            assemble(self.trains.train, self.values, str(self.path))
            begin = Path(self.begins_at).resolve()
            if self.begins_at and self.folder.resolve() == (begin.parent if begin.suffix == ".pt" else begin):
                hint = "leave it out, as a queue resumes by itself; to train on from the end, give another output_dir"
                raise UserError(f"{self.path}: resume_from is in its own output_dir", hint=hint)
        except UserError as error:
            # A list of all keys is for a terminal.
            self.error = f"{error.message}; {error.hint}" if 0 < len(error.hint) < LONGEST_HINT else error.message

    def other_run(self) -> str:
        """Describes the run in the folder if it is not one of these settings. How a run is saved and what it runs on
        doesn't count, nor what is left to the program."""
        assert self.trains is not None
        path, known = self.folder / CONFIG, leaves(self.trains.train)
        try:
            content = read_file(path)
            if (other := stated_kind(content)) is not self.trains:
                return f"a run of {other.command}"
            own = without_kind(self.trains.train, content, str(path))
            before = checked(self.trains.train, without_retired(self.trains.train, own))
        except UserError:
            return ""
        counted = [leaf for leaf in known.values() if leaf.is_saved and leaf.path[0] not in ("saving", "hardware")]
        both = {leaf.name: (before.get(leaf.name, leaf.default), self.values.get(leaf.name)) for leaf in counted}
        differing = [f"{name} is {was} there, {now} here" for name, (was, now) in both.items() if now and was != now]
        return f"a run of other settings ({'; '.join(differing)})" if differing else ""

    def start(self) -> None:
        """Start the training. Raises OSError."""
        environment = {name: value for name, value in package_environment().items() if name != "FORCE_COLOR"}
        self.attempts, self.rows_before, self.is_asked = self.attempts + 1, len(self.history()), False
        with self.output.open("ab") as file:
            file.write(f"\n$ gputrain {shlex.join(self.words)}\n".encode())
            file.flush()
            self.process = subprocess.Popen(
                [*PROGRAM, *self.words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )  # fmt: skip

    def stop(self) -> None:
        """Ask the training to save and end, once: at a second signal it would end without a save."""
        if self.process and not self.is_asked and self.process.poll() is None:
            self.is_asked = True
            self.process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
        elif self.runs_elsewhere:
            send(self.folder, "stop")

    def history(self) -> list[dict[str, Any]]:
        try:
            return read_history(self.folder / HISTORY, [])
        except (OSError, ValueError, RecursionError):
            return []

    def end(self, *, was_seen: bool) -> StateReason:
        """Returns how the run has ended: the training that this process has started, or another one, which this
        process may have seen running."""
        rows, code, self.process = self.history(), self.process.returncode if self.process else None, None
        start: Mapping[str, Any] = next((row for row in reversed(rows) if row["event"] == "start"), {})
        last = rows[-1] if rows else {}
        moved = max(_count(last, "step"), last_logged_step(self.folder)) > _count(start, "step")
        if code is None:
            outcome, message = last.get("outcome"), str(last.get("message", ""))
            if outcome == "finished" and _count(start, "stage") + 1 < _count(start, "stages"):
                outcome = None  # Another stage of the training follows.
            ends = [row.get("outcome") for row in rows if row["event"] == "end"]
            self.failures = sum(1 for _ in takewhile(lambda one: one == "failed", ends[-2::-1]))  # Before the last one.
        else:
            outcome, message = {0: "finished", STOPPED: "stopped"}.get(code, "failed"), self._last_words(code)
            moved &= len(rows) > self.rows_before
        if outcome == "finished" or 0 < self.values.get("max_steps", 0) <= _count(last, "step"):
            return "finished", ""
        if outcome == "stopped" and message.startswith(IN_TIME):
            return ("waiting", "") if moved else ("failed", f"{message}: its max_time is too short for a step")
        if outcome == "stopped" and (was_seen or message.startswith(ASKED_TO_STOP)):
            return "stopped", message
        if outcome != "failed" or is_in_use(self.folder):  # It failed as another process has begun to train there.
            return "waiting", ""
        self.failures += 1
        if not moved or self.failures > len(PAUSES):
            return "failed", message
        pause = PAUSES[self.failures - 1]
        self.due = time.monotonic() + pause
        return "waiting", f"{message}\nIt had made steps, and is resumed after {format_duration(pause)}."

    def _last_words(self, code: int) -> str:
        """Returns the cause of a stop, or the last lines of a training that has failed."""
        lines: list[str] = []
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
            text = file.read().decode(errors="replace").rpartition("\n$ gputrain ")[2]
            lines = [line for line in text.splitlines()[1:] if line.strip()]
        if code == STOPPED:
            return next((line.removeprefix("stopped: ") for line in lines if line.startswith("stopped: ")), "")
        remedy = f": {remedy_for_exit(code)}" if code < 0 else ""
        return "\n".join([*lines[-SHOWN_LINES:], f"({describe_exit(code)}{remedy})"])


class Queue:
    """Starts the trainings of a folder, in a thread. `entries` and `message`, which says what holds the queue, may be
    read at any time."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if there is no such folder, or it cannot be written to."""
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            hint = "--queue takes a folder of configurations, into which the output of their trainings is written"
            raise UserError(f"{folder}: no folder that can be written to", hint=hint)
        self.folder, self.is_paused, self.message = folder, False, ""
        self.entries: list[QueueEntry] = []  # Of the files that are there now, in their order.
        self._known: dict[str, QueueEntry] = {}  # By name; those of removed files, too.
        self._lock = threading.RLock()  # Held during a look and an action.
        self._ownership = FileLock(folder / ".queue.lock", thread_local=False)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to work, or go on after a pause, also with what was stopped."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="queue", daemon=True)
            return self._thread.start()
        with self._acting():
            self.is_paused = False
            for entry in self.entries:
                if entry.state == "stopped":
                    entry.ended, entry.is_wanted = None, True

    def pause(self) -> None:
        """Start nothing further. A training that runs goes on."""
        with self._acting():
            self.is_paused = True

    def skip(self, id: str) -> None:
        """Don't start a training; one that runs is stopped and saved first. Raises KeyError for an unknown id."""
        with self._acting(id, "waiting", "running", "stopped", "failed") as entry:
            entry.stop()
            entry.is_skipped = True

    def retry(self, id: str) -> None:
        """Let a training wait for its turn again. Raises KeyError for an unknown id."""
        with self._acting(id, "stopped", "failed", "refused", "skipped") as entry:
            entry.ended, entry.is_wanted, entry.is_skipped, entry.failures, entry.due = None, True, False, 0, 0.0

    def close(self) -> None:
        """Start nothing further, ask the training that this process has started to stop, and wait until it has saved
        and ended."""
        is_held = self._lock.acquire(timeout=LOOK_SECONDS)  # A look may wait for a disk that doesn't answer.
        self._is_closed = True
        for entry in [entry for entry in self.entries if entry.state == "running"]:
            if entry.process is None:
                log.info("queue: the training in %s was not started by this command, and goes on", entry.run)
            elif entry.process.poll() is None:
                log.info("queue: %s stops and saves; Ctrl-C again leaves, and it saves all the same", entry.name)
                entry.stop()
                while entry.process.poll() is None:
                    time.sleep(0.1)
        self._ownership.release(force=True)
        if is_held:
            self._lock.release()

    @contextmanager
    def _acting(self, id: str = "", *states: State) -> Iterator[QueueEntry]:
        """Let the block change the queue, or the entry of this id if it has one of these states, and look at once."""
        with self._lock:
            if is_held_elsewhere(self._ownership):
                raise UserError(ANOTHER, hint="use the page of that one")
            entry = {entry.id: entry for entry in self.entries}[id] if id else QueueEntry(self.folder)
            if id and entry.state not in states:
                raise UserError(f"{entry.name} is {entry.state}", hint=f"this is for what is {' or '.join(states)}")
            yield entry
            self.look()

    def _work(self) -> None:
        while not self._is_closed:
            try:
                self.look()
            except Exception as error:  # Whatever it is, such as a disk that is away, the next look may have more luck.
                if self.message != (fault := f"the queue waits: {first_line(error)}"):
                    log.warning("queue: %s", fault)
                self.message = fault
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Read what has changed, note what has ended, and start what is next."""
        with self._lock:
            if self._is_closed:
                return
            owns = not is_held_elsewhere(self._ownership)
            for entry in self.entries:
                if entry.process and entry.process.poll() is not None:
                    self._note_end(entry, was_seen=True)
            entries = self._read_folder()
            self._decide(entries)
            first = next((entry for entry in entries if entry.state == "waiting"), None)
            is_free = owns and not self.is_paused and all(entry.state != "running" for entry in entries)
            if first and is_free and not (self._is_closed or first.is_changing) and first.due <= time.monotonic():
                try:
                    first.start()
                except OSError as error:
                    first.ended = "failed", f"cannot be started: {error}"
                self._decide(entries)
            self.entries = entries
            self.message = "paused: nothing further starts" * self.is_paused if owns else ANOTHER

    def _read_folder(self) -> list[QueueEntry]:
        """Returns the entries of the files that are there now and of a training that runs, in the order of their
        names, 2 before 10."""
        with os.scandir(self.folder) as found:
            names = {one.name for one in found if one.name[0] != "." and one.is_file()}
        names = {name for name in names if Path(name).suffix.lower() in (".yaml", ".yml", ".json")}
        for name in names:
            entry = self._known.setdefault(name, QueueEntry(self.folder / name))
            if not entry.process:
                entry.refresh()
        entries = [entry for name, entry in self._known.items() if name in names or entry.process]

        def order(entry: QueueEntry) -> list[tuple[int, str]]:
            parts = re.split("([0-9]+)", entry.name.lower())
            return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

        return sorted(entries, key=order)

    def _note_end(self, entry: QueueEntry, *, was_seen: bool) -> None:
        entry.ended = entry.end(was_seen=was_seen)
        self.is_paused |= entry.ended[0] == "stopped" and not entry.is_skipped
        entry.is_skipped &= entry.ended[0] != "finished"

    def _decide(self, entries: list[QueueEntry]) -> None:
        """Decide the state of each entry, and log those that have changed."""
        owners = {os.path.realpath(entry.folder): entry for entry in entries if entry.attempts and not entry.error}
        for entry in entries:
            before = entry.state
            try:
                entry.state, entry.message = self._state_of(entry, owners)
            except (OSError, ValueError) as error:  # Its run folder has an impossible name, or may not be read.
                entry.state, entry.message = "refused", f"{entry.run}: {first_line(error)}"
            if entry.state != before:
                message = f": {entry.message}".replace("\n", "\n  ") if entry.message else ""
                log.info("queue: %s: %s%s", entry.name, entry.state, message)

    def _state_of(self, entry: QueueEntry, owners: dict[str, QueueEntry]) -> StateReason:
        if entry.process:
            return "running", f"its output is in {entry.output}"
        if entry.is_changing:
            return "waiting", "its file was changed just now"
        if entry.error:
            return "refused", entry.error
        owner = owners.setdefault(os.path.realpath(entry.folder), entry)
        if owner is not entry:
            return "refused", f"{entry.run} is the output_dir of {owner.name}, too: give it another one"
        ran, entry.runs_elsewhere = entry.runs_elsewhere, is_in_use(entry.folder)
        if entry.runs_elsewhere:
            return "running", f"another process trains in {entry.run}: its end is waited for"
        if entry.is_skipped:
            return "skipped", "until it is tried again, or gputrain watch begins anew"
        if ran or entry.ended is None:
            if not (ran or entry.is_wanted) and (other := entry.other_run()):
                return "refused", f"{entry.run} holds {other}: give another output_dir, or try again to go on with it"
            if ran or not entry.is_wanted:
                self._note_end(entry, was_seen=ran)
        return entry.ended or ("waiting", "")


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return value if is_count(value) else 0


def is_held_elsewhere(lock: FileLock) -> bool:
    """Returns True if another process holds a lock; otherwise this one does now."""
    try:
        if not lock.is_locked:
            lock.acquire(timeout=0)
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # Some network drives lock nothing.
        pass
    return False


def is_in_use(run: Path) -> bool:
    """Returns True if another process trains in a run folder."""
    lock = FileLock(run / LOCK)
    found = (run / LOCK).exists() and is_held_elsewhere(lock)
    lock.release()
    return found
