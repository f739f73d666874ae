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
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from gputrain.config import assemble, leaves, read_file
from gputrain.engine.checkpoint import newest_first
from gputrain.engine.history import HISTORY, history_size, last_logged_step
from gputrain.engine.requests import ASKED_TO_STOP, send
from gputrain.engine.run_folder import CONFIG, LOCK
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError, first_line
from gputrain.hw.child_process import describe_exit, package_environment, remedy_for_exit
from gputrain.kinds import ModelKind, default_kind, read_defaults, stated_kind
from gputrain.report.records import is_count, read_history

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "finished", "stopped", "failed", "refused", "skipped"]
LOOK_SECONDS = 2.0
SETTLED_SECONDS = 3.0  # Age of a change from which on a file is read: an editor may not have written all of it before.
PAUSES = (30.0, 300.0)  # Seconds before a run that failed after some steps is resumed, each time.
ASKING_SECONDS = 0.2  # A lock that is held for longer is that of a training.
STOPPED = 75  # Exit code of a training that was asked to stop.
IN_TIME = "stopped in time for --max-time"  # The message of an end that is none; that of --finish-by is one.
SHOWN_LINES, SHOWN_BYTES = 4, 4000  # Of a failed training's output.
LONGEST_HINT = 400
PROGRAM = (sys.executable, "-m", "gputrain")
SUFFIXES = (".yaml", ".yml", ".json")
ANOTHER = "another gputrain watch works on this queue; this one only shows it"


class Known(NamedTuple):
    """The state of an entry as its run gives it, and a message."""

    state: State
    message: str = ""


WAITING = Known("waiting")


@dataclass(eq=False)
class QueueEntry:
    """A file of the queue, and what this process knows about its run."""

    path: Path
    state: State = "waiting"
    message: str = ""
    trains: ModelKind = field(default_factory=default_kind)
    values: Mapping[str, Any] = field(default_factory=dict)  # The settings that the file gives.
    stamp: tuple[int, int] = (0, 0)  # Time and size of the file that was read.
    is_changing: bool = False
    error: str = ""  # What is wrong with the file.
    known: Known | None = None  # None: its run folder has not been looked at yet.
    failures: int = 0  # Of its run, in a row.
    due: float = 0.0  # When it may start, by time.monotonic.
    is_skipped: bool = False
    process: "subprocess.Popen[bytes] | None" = None  # Its training, if this process has started it.
    history_before: int = 0  # Size of the history before it.

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def id(self) -> str:
        return hashlib.sha256(os.fsencode(self.name)).hexdigest()[:10]

    @property
    def run(self) -> Path | None:
        return self.values.get("output_dir")  # None while it is not known.

    @property
    def folder(self) -> Path:
        return Path(self.values.get("output_dir", ""))

    @property
    def output(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def words(self) -> list[str]:
        """The words of its command. A run whose file names a checkpoint begins there, and goes on from its own."""
        resumes = [] if begin_of(self.values) and not newest_first(self.folder) else ["--resume-from", "auto"]
        return [self.trains.command, "--config", str(self.path), *resumes]

    def refresh(self) -> None:
        """Read the file if it has changed, and nobody writes it any more."""
        try:
            found = self.path.stat()
            stamp = (found.st_mtime_ns, found.st_size)
            self.is_changing = stamp != self.stamp and 0 <= time.time() - found.st_mtime < SETTLED_SECONDS
            if stamp == self.stamp or self.is_changing:
                return
            self.path.open("rb").close()  # A disk that is away is an OSError here, and tried again.
            self.stamp, self.error = stamp, ""
            trains, values = read_settings(self.path)
        except UserError as error:
            # A list of all keys is for a terminal.
            self.error = f"{error.message}; {error.hint}" if 0 < len(error.hint) < LONGEST_HINT else error.message
        except (OSError, ValueError) as error:
            self.stamp, self.error = (0, 0), f"{self.path}: {first_line(error)}"
        else:
            if (trains, values) != (self.trains, self.values):
                # A run that is known goes on with other settings; one that was there before may be another.
                is_known = self.known and self.known.state != "refused" and self.run == values["output_dir"]
                self.trains, self.values = trains, values
                self.reset(WAITING if is_known else None)

    def reset(self, known: Known | None = WAITING) -> None:
        self.known, self.failures, self.due, self.is_skipped = known, 0, 0.0, False

    def other_run(self) -> str:
        """Describes the run in the folder if it is not one of these settings. How a run is saved and what it runs on
        doesn't count, nor what is left to the program."""
        path = self.folder / CONFIG
        try:
            if (other := stated_kind(read_file(path))) is not self.trains:
                return f"a run of {other.command}"
            before = read_defaults(path, self.trains.train)
        except UserError:
            return ""
        differing = [
            f"{leaf.name} is {was} there, {now} here"
            for leaf in leaves(self.trains.train).values()
            if (now := self.values.get(leaf.name)) and now != (was := before.get(leaf.name, leaf.default))
            if leaf.is_saved and leaf.path[0] not in ("saving", "hardware")
        ]
        return f"a run of other settings ({'; '.join(differing)})" if differing else ""

    def start(self) -> None:
        """Start the training. Raises OSError."""
        environment = {name: value for name, value in package_environment().items() if name != "FORCE_COLOR"}
        self.history_before = history_size(self.folder)
        with self.output.open("ab") as file:
            file.write(f"\n$ gputrain {shlex.join(self.words)}\n".encode(errors="surrogateescape"))
            file.flush()
            self.process = subprocess.Popen(
                [*PROGRAM, *self.words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )  # fmt: skip

    def stop(self) -> None:
        """Ask the training to save and end. Raises UserError if it is another process's and cannot be asked."""
        if self.process and not self.is_skipped:  # At a second signal it would end without a save.
            self.process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
        elif self.state == "running" and not self.process:
            send(self.folder, "stop")

    def end(self) -> Known:
        """Returns how the run has ended: a training that this process has started, another one that it has seen
        running, or one of the time before."""
        rows: list[dict[str, Any]] = []
        own, self.process, was_seen = self.process, None, self.known is not None
        if own is None or history_size(self.folder) > self.history_before:  # Otherwise it has ended before it began.
            with suppress(OSError, ValueError, RecursionError):
                rows = read_history(self.folder / HISTORY, [])
        start: Mapping[str, Any] = next((row for row in reversed(rows) if row["event"] == "start"), {})
        last = rows[-1] if rows else {}
        moved = bool(rows) and max(_count(last, "step"), last_logged_step(self.folder)) > _count(start, "step")
        outcome, message = last.get("outcome"), str(last.get("message", ""))
        if own:
            outcome = {0: "finished", STOPPED: "stopped"}.get(own.returncode, "failed")
            message = self._last_words(own.returncode) if outcome == "failed" else message
        else:
            if outcome == "finished" and _count(start, "stage") + 1 < _count(start, "stages"):
                outcome = None  # Another stage of the training follows.
            ends = [row.get("outcome") for row in rows if row["event"] == "end"]
            self.failures = sum(1 for _ in takewhile(lambda one: one == "failed", ends[-2::-1]))  # Before the last one.
        if outcome == "stopped" and message.startswith(IN_TIME):
            outcome, message = (None, "") if moved else ("failed", f"{message}: its max_time is too short for a step")
        if outcome == "finished" or 0 < self.values.get("max_steps", 0) <= _count(last, "step"):
            return Known("finished")
        if outcome == "stopped" and (was_seen or message.startswith(ASKED_TO_STOP)):
            return Known("stopped", message)
        if outcome != "failed":
            self.failures = 0
            return WAITING
        if self.failures >= len(PAUSES) or not (moved or self.failures):  # A lost GPU is not back at the first retry.
            return Known("failed", message)
        pause = PAUSES[self.failures]
        self.failures, self.due = self.failures + 1, time.monotonic() + pause
        return Known("waiting", f"{message}\nIt had made steps, and is resumed after {format_duration(pause)}.")

    def _last_words(self, code: int) -> str:
        """Returns the last lines of a training that has failed."""
        lines: list[str] = []
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
            text = file.read().decode(errors="replace").rpartition("\n$ gputrain ")[2]
            lines = [line for line in text.splitlines()[1:] if line.strip()]
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
        self._known: dict[Path, QueueEntry] = {}  # By file; those of removed files, too.
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
                    entry.reset()

    def pause(self) -> None:
        """Start nothing further. A training that runs goes on."""
        with self._acting():
            self.is_paused = True

    def skip(self, id: str) -> None:
        """Don't start a training; one that runs is stopped and saved first. Raises KeyError for an unknown id."""
        with self._acting():
            entry = self._entry(id, "waiting", "running", "stopped")
            entry.stop()
            entry.is_skipped = True

    def retry(self, id: str) -> None:
        """Let a training wait for its turn again. Raises KeyError for an unknown id."""
        with self._acting():
            self._entry(id, "failed", "refused", "skipped").reset()

    def close(self) -> None:
        """Start nothing further, ask the training that this process has started to stop, and wait until it has saved
        and ended."""
        with self._lock:
            self._is_closed = True
            for entry in self._known.values():
                if entry.process and entry.process.poll() is None:
                    log.info("queue: %s stops and saves; Ctrl-C again leaves, and it saves all the same", entry.name)
                    entry.stop()
                    while entry.process.poll() is None:
                        time.sleep(0.1)
                elif entry.state == "running" and not entry.process:
                    log.info("queue: the training in %s was not started by this command, and goes on", entry.run)
            self._ownership.release(force=True)

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Let the block change the queue, and look at once."""
        with self._lock:
            if is_held_elsewhere(self._ownership):
                raise UserError(ANOTHER, hint="use the page of that one")
            yield
            self.look()

    def _entry(self, id: str, *states: State) -> QueueEntry:
        """Returns the entry of an id, which must have one of these states."""
        entry = {entry.id: entry for entry in self.entries}[id]
        if entry.state not in states:
            raise UserError(f"{entry.name} is {entry.state}", hint=f"this is for what is {' or '.join(states)}")
        return entry

    def _work(self) -> None:
        while not self._is_closed:
            self.look()
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Read what has changed, note what has ended, and start what is next."""
        with self._lock:
            if self._is_closed:
                return
            try:
                self.message = self._look()
            except Exception as error:  # Whatever it is, such as a disk that is away, the next look may have more luck.
                if self.message != (fault := f"the queue waits: {first_line(error)}"):
                    log.warning("queue: %s", fault)
                self.message = fault

    def _look(self) -> str:
        """Returns what holds the queue."""
        owns = not is_held_elsewhere(self._ownership)
        entries, owners = self._read_folder(), dict[str, QueueEntry]()
        # A folder stays that of the entry whose run is known.
        for entry in sorted(entries, key=lambda entry: entry.known is None or entry.state == "refused"):
            self._decide(entry, owners)
        self.entries, states = entries, {entry.state for entry in entries}
        self.is_paused |= owns and "stopped" in states
        if not owns or self.is_paused:
            return "paused: nothing further starts" if owns else ANOTHER
        first = next((entry for entry in entries if entry.state == "waiting"), None)
        if first and "running" not in states and not first.is_changing and first.due <= time.monotonic():
            first.start()
            self._decide(first, owners)
        return ""

    def _read_folder(self) -> list[QueueEntry]:
        """Returns the entries of the files that are there now and of a training that runs, in the order of their
        names, 2 before 10."""
        paths = [path for path in self.folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
        there = {path for path in paths if os.path.isfile(path)}
        for path in there:
            entry = self._known.setdefault(path, QueueEntry(path))
            if entry.state != "running":
                entry.refresh()
        entries = [entry for path, entry in self._known.items() if path in there or entry.state == "running"]
        return sorted(
            entries, key=lambda entry: re.sub("[0-9]+", lambda digits: digits[0].zfill(255), entry.name.lower())
        )

    def _decide(self, entry: QueueEntry, owners: dict[str, QueueEntry]) -> None:
        """Decide the state of an entry, and log it if it has changed."""
        before = entry.state
        try:
            entry.state, entry.message = self._state_of(entry, owners)
        except (OSError, ValueError) as error:
            if entry.state == "running":  # Nothing else may start while its disk is away.
                raise
            entry.state, entry.message = "refused", f"{entry.run}: {first_line(error)}"
        if entry.state != before:
            message = f": {entry.message}".replace("\n", "\n  ") if entry.message else ""
            log.info("queue: %s: %s%s", entry.name, entry.state, message)

    def _state_of(self, entry: QueueEntry, owners: dict[str, QueueEntry]) -> Known:
        if entry.run:
            owner = owners.setdefault(os.path.realpath(entry.run), entry)
            if owner is not entry:
                return Known("refused", f"{entry.run} is the output_dir of {owner.name}, too: give it another one")
        if entry.process:
            if entry.process.poll() is None:
                return Known("running", f"its output is in {entry.output}")
            entry.known = entry.end()
        if entry.is_changing:
            return Known("waiting", "its file was changed just now")
        known = entry.known
        if entry.run and is_in_use(entry.run):
            known = Known("running", f"another process trains in {entry.run}: its end is waited for")
        elif entry.error:
            return Known("refused", entry.error)
        elif known is None and (other := entry.other_run()):
            remedy = "give another output_dir, or try again to go on with it"
            known = Known("refused", f"{entry.run} holds {other}: {remedy}")
        elif known is None or known.state == "running":
            known = entry.end()
        entry.known = known
        if entry.is_skipped and known.state not in ("running", "finished"):
            return Known("skipped", "it is left out until it is tried again, or gputrain watch is started again")
        return known


def begin_of(values: Mapping[str, Any]) -> str:
    """Returns the checkpoint that settings name, if any."""
    given = str(values.get("resume_from", ""))
    return given if given != "auto" else ""


def read_settings(path: Path) -> tuple[ModelKind, dict[str, Any]]:
    """Read a configuration, and check it as its train command does. Raises UserError."""
    trains = stated_kind(read_file(path))
    values = read_defaults(path, trains.train, trains.translate)
    if "output_dir" not in values:
        raise UserError(f"{path}: output_dir is missing", hint="give each run a folder of its own")
    assemble(trains.train, values, str(path))
    begin = Path(begin_of(values)).resolve()
    if begin_of(values) and values["output_dir"].resolve() == (begin.parent if begin.suffix == ".pt" else begin):
        hint = "leave it out, as a queue resumes by itself; to train on from the end, give another output_dir"
        raise UserError(f"{path}: resume_from is in its own output_dir", hint=hint)
    return trains, values


def _count(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    return value if is_count(value) else 0


def is_held_elsewhere(lock: FileLock, seconds: float = 0.0) -> bool:
    """Returns True if another process holds a lock for longer; otherwise this one does now."""
    try:
        if not lock.is_locked:
            lock.acquire(timeout=seconds)
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # Some network drives lock nothing.
        pass
    return False


def is_in_use(run: Path) -> bool:
    """Returns True if another process trains in a run folder; one that asks this, too, holds the lock for a moment."""
    lock = FileLock(run / LOCK)
    found = (run / LOCK).exists() and is_held_elsewhere(lock, ASKING_SECONDS)
    lock.release()
    return found
