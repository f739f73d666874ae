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
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from gputrain.config import assemble, leaves, read_file
from gputrain.engine.checkpoint import newest_first
from gputrain.engine.history import HISTORY, last_logged_step
from gputrain.engine.requests import ASKED_TO_STOP, send
from gputrain.engine.run_folder import CONFIG, LOCK
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError, first_line
from gputrain.hw.child_process import describe_exit, package_environment
from gputrain.kinds import ModelKind, read_defaults, stated_kind
from gputrain.report.records import read_history

log = logging.getLogger(__name__)

State = Literal["waiting", "running", "finished", "stopped", "failed", "refused", "skipped"]
StateReason = tuple[State, str]  # A state, and a message that explains it.
LOOK_SECONDS = 2.0
SETTLED_SECONDS = 3.0  # Age of a change from which on a file is read: an editor may not have written all of it before.
PAUSES = (30.0, 300.0)  # Seconds before a run that failed after some steps is resumed, each time.
STOPPED = 75  # Exit code of a training that was asked to stop.
IN_TIME = "stopped in time for"  # How the message of such an end begins.
SHOWN_LINES, SHOWN_BYTES = 4, 4000  # Of a failed training's output.
PROGRAM = (sys.executable, "-m", "gputrain")
ANOTHER = "another gputrain watch works on this queue; this one only shows it"


@dataclass(frozen=True)
class QueueEntry:
    """A configuration of the queue, as it is shown. `run` is None while its folder is not known; `attempts` are the
    starts of its training by this process."""

    id: str
    name: str
    run: Path | None
    kind: str
    state: State
    message: str
    attempts: int
    command: str


@dataclass
class QueuedRun:
    """A file of the queue, and what this process knows about its run."""

    path: Path
    changed: tuple[int, int] = (0, 0)
    seen: float = 0.0  # When the change was seen, by time.monotonic.
    digest: str = ""  # Of what was read of the file; empty until then.
    error: str = "waits until nobody writes its file any more"
    kind: ModelKind | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # The settings that the file gives.
    outcome: StateReason | None = None  # How the run has ended, until the file changes or it is to be tried again.
    attempts: int = 0
    failures: int = 0
    due: float = 0.0  # When it may start, by time.monotonic.
    is_skipped: bool = False
    is_wanted: bool = False  # Goes on, whatever its run folder says.
    runs_elsewhere: bool = False  # Another process trained in its folder at the last look.
    # Of the training that this process has started last:
    process: "subprocess.Popen[bytes] | None" = None
    output_at: int = 0  # Where its output begins.
    rows_before: int = 0  # Lines of history.
    is_asked: bool = False  # To stop.

    @property
    def run(self) -> Path:
        return Path(self.values.get("output_dir", ""))

    @property
    def output(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def words(self) -> list[str]:
        """The words of its command. A run whose file names a checkpoint begins there, and goes on from its own."""
        begins = self.values.get("resume_from", "auto") not in ("", "auto") and not newest_first(self.run)
        command = self.kind.command if self.kind else "train-"
        return [command, "--config", str(self.path), *([] if begins else ["--resume-from", "auto"])]

    def refresh(self) -> None:
        """Read the file if it has changed, and nobody writes it any more."""
        try:
            found = self.path.stat()
            if (changed := (found.st_mtime_ns, found.st_size)) != self.changed:
                self.changed, self.seen = changed, time.monotonic()
            age = max(time.time() - found.st_mtime, time.monotonic() - self.seen)  # The clock of a disk may be ahead.
            if not self.seen or age < SETTLED_SECONDS:
                return
            digest, self.seen = hashlib.sha256(self.path.read_bytes()).hexdigest(), 0.0
        except OSError as error:
            self.digest, self.error = "?", f"{self.path}: {error.strerror}"
            return
        if digest == self.digest:
            return
        run, was_read, self.digest = self.run, not self.error, digest
        self._read()
        # A run that this process knows goes on with other settings; one that was there before may be another.
        self.is_wanted = was_read and self.outcome is not None and self.run == run
        self.outcome, self.failures, self.due, self.is_skipped = None, 0, 0.0, False

    def _read(self) -> None:
        """Check the file as the train command does."""
        self.error, self.values = "", {}
        try:
            self.kind = stated_kind(read_file(self.path))
            self.values = read_defaults(self.path, self.kind.train, self.kind.translate)
            if "output_dir" not in self.values:
                raise UserError(f"{self.path}: output_dir is missing", hint="give each run a folder of its own")
            assemble(self.kind.train, self.values, str(self.path))
            begin = Path(self.values.get("resume_from", "")).resolve()
            if self.run.resolve() in (begin, begin.parent):
                hint = "leave it out, as a queue resumes by itself; to train on from the end, give another output_dir"
                raise UserError(f"{self.path}: resume_from is in its own output_dir", hint=hint)
        except UserError as error:
            self.error = f"{error.message}; {error.hint}" if error.hint else error.message

    def history(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Returns the lines of the run's history, and the last start among them."""
        try:
            rows = read_history(self.run / HISTORY, [])
        except (OSError, ValueError, RecursionError):
            rows = []
        return rows, next((row for row in reversed(rows) if row["event"] == "start"), {})

    def failed(self, message: str, *, moved: bool) -> StateReason:
        """Returns the outcome of a failure, after which a run is resumed if it has moved on since its last start."""
        self.failures += 1
        if not moved or self.failures > len(PAUSES):
            return "failed", message
        pause = PAUSES[self.failures - 1]
        self.due = time.monotonic() + pause
        return "waiting", f"{message}\nIt had made steps, and is resumed after {format_duration(pause)}."

    def other_run(self) -> str:
        """Describes the run in the folder if it is not one of these settings. How a run is saved and what it runs on
        doesn't count, nor what is left to the program."""
        assert self.kind is not None
        path, known = self.run / CONFIG, leaves(self.kind.train)
        try:
            if (other := stated_kind(read_file(path))) is not self.kind:
                return f"a run of {other.command}"
            before = read_defaults(path, self.kind.train)
        except UserError:
            return ""
        given = {name: value for name, value in self.values.items() if value and known[name].is_saved}
        both = {name: (before.get(name, known[name].default), value) for name, value in given.items()}
        differing = [
            f"{name} is {was} there, {now} here"
            for name, (was, now) in both.items()
            if was != now and known[name].path[0] not in ("saving", "hardware")
        ]
        return f"a run of other settings ({'; '.join(differing)})" if differing else ""

    def last_lines(self) -> list[str]:
        """Returns the last lines of the training's output."""
        with self.output.open("rb") as file:
            file.seek(max(self.output_at, file.seek(0, os.SEEK_END) - SHOWN_BYTES))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


class Queue:
    """Starts the trainings of a folder, in a thread. `entries` and `message`, which says what holds the queue, may be
    read at any time."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if there is no such folder, or it cannot be written to."""
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            hint = "--queue takes a folder of configurations, into which the output of the trainings is written"
            raise UserError(f"{folder}: {error.strerror}", hint=hint) from None
        self.folder, self.is_paused, self.message = folder, False, ""
        self.entries: list[QueueEntry] = []
        self._jobs: dict[str, QueuedRun] = {}
        self._running: QueuedRun | None = None
        self._lock = threading.RLock()  # Held during a look and an action.
        self._ownership = FileLock(folder / LOCK, thread_local=False)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to work, or go on after a pause, also with what was stopped."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="queue", daemon=True)
            self._thread.start()
            return
        with self._acting():
            self.is_paused = False
            for job in self._jobs.values():
                if job.outcome and job.outcome[0] == "stopped":
                    job.outcome, job.is_wanted = None, True

    def pause(self) -> None:
        """Start nothing further. A training that runs goes on."""
        with self._acting():
            self.is_paused = True

    def skip(self, id: str) -> None:
        """Don't start a training; one that runs is stopped and saved first. Raises KeyError for an unknown id."""
        with self._acting():
            job = self._job(id, "waiting", "running", "stopped", "failed")
            job.is_skipped = True
            if job is self._running:
                self._stop(job)
            elif job.runs_elsewhere:
                send(job.run, "stop")

    def retry(self, id: str) -> None:
        """Let a training wait for its turn again. Raises KeyError for an unknown id."""
        with self._acting():
            job = self._job(id, "stopped", "failed", "refused", "skipped")
            job.outcome, job.is_wanted, job.is_skipped, job.failures, job.due = None, True, False, 0, 0.0

    def close(self) -> None:
        """Start nothing further, ask the training that this process has started to stop, and wait until it has saved
        and ended."""
        is_held = self._lock.acquire(timeout=LOOK_SECONDS)  # A look may wait for a disk that doesn't answer.
        self._is_closed, job = True, self._running
        if job and job.process and job.process.poll() is None:
            log.info("queue: %s stops and saves; Ctrl-C again leaves at once, and it saves all the same", job.path.name)
            self._stop(job)
            while job.process.poll() is None:
                time.sleep(0.1)
        for other in [job for job in self._jobs.values() if job.runs_elsewhere]:
            log.info("queue: the training in %s was not started by this command, and goes on", other.run)
        self._ownership.release(force=True)
        if is_held:
            self._lock.release()

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Let the block change the queue, and show at once what follows."""
        with self._lock:
            if not self._owns():
                raise UserError(ANOTHER, hint="use the page of that one")
            yield
            self.look()

    def _job(self, id: str, *states: State) -> QueuedRun:
        """Returns the job of an entry, which must have one of these states."""
        entry = {entry.id: entry for entry in self.entries}[id]
        if entry.state not in states:
            raise UserError(f"{entry.name} is {entry.state}", hint=f"this is for what is {' or '.join(states)}")
        return self._jobs[entry.name]

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
            job = self._running
            if job and job.process and (code := job.process.poll()) is not None:
                self._running, job.outcome = None, self._outcome(job, code)
            jobs = self._read_folder()
            self._show(jobs)
            states = [entry.state for entry in self.entries]
            waiting = [job for job, state in zip(jobs, states, strict=True) if state == "waiting" and not job.error]
            is_free = self._owns() and not self.is_paused and "running" not in states
            if waiting and is_free and waiting[0].due <= time.monotonic():
                self._start_training(waiting[0])
                self._show(jobs)
            self.message = ANOTHER if not self._owns() else "paused: nothing further starts" * self.is_paused

    def _owns(self) -> bool:
        """Returns True if no other process works on the queue."""
        try:
            if not self._ownership.is_locked:
                self._ownership.acquire(timeout=0)
        except Timeout:
            return False
        except (OSError, NotImplementedError):  # Some network drives lock nothing.
            pass
        return True

    def _read_folder(self) -> list[QueuedRun]:
        """Returns the jobs of the files that are there now, in their order."""
        with os.scandir(self.folder) as found:
            files = [one.name for one in found if one.name[0] != "." and one.is_file()]
        names = {name for name in files if Path(name).suffix.lower() in (".yaml", ".yml", ".json")}
        for name in names:
            job = self._jobs.setdefault(name, QueuedRun(self.folder / name))
            if job is not self._running:
                job.refresh()
        names |= {self._running.path.name} if self._running else set()
        return [self._jobs[name] for name in sorted(names, key=natural_order)]

    def _show(self, jobs: list[QueuedRun]) -> None:
        """Decide the state of each job, and log those that have changed."""
        owners = {os.path.realpath(self._running.run): self._running} if self._running else {}
        before, shown = {entry.id: entry.state for entry in self.entries}, []
        for job in jobs:
            state, message = self._state_of(job, owners)
            id, name = hashlib.sha256(os.fsencode(job.path.name)).hexdigest()[:10], job.path.name
            kind, run = job.kind.name if job.kind else "", job.run if "output_dir" in job.values else None
            command = shlex.join(["gputrain", *job.words])
            shown.append(QueueEntry(id, name, run, kind, state, message, job.attempts, command))
            if state != before.get(id, "waiting"):
                log.info("queue: %s: %s%s", name, state, f": {message}".replace("\n", "\n  ") if message else "")
        self.entries = shown

    def _state_of(self, job: QueuedRun, owners: dict[str, QueuedRun]) -> StateReason:
        if job is self._running:
            return "running", f"its output is in {job.output}"
        if job.error:
            return "refused" if job.digest else "waiting", job.error
        owner = owners.setdefault(os.path.realpath(job.run), job)
        if owner is not job:
            return "refused", f"{job.run} is the output_dir of {owner.path.name}, too: give it another one"
        ran, job.runs_elsewhere = job.runs_elsewhere, is_in_use(job.run)
        if job.runs_elsewhere:
            return "running", f"another process trains in {job.run}: its end is waited for"
        if job.is_skipped:
            return "skipped", "until it is tried again, or gputrain watch begins anew"
        if ran:
            job.outcome = self._from_history(job, was_seen=True)
        elif job.outcome is None and job.is_wanted:
            job.outcome = "waiting", ""
        elif job.outcome is None:
            if other := job.other_run():
                return "refused", f"{job.run} holds {other}: give another output_dir, or go on with it by trying again"
            job.outcome = self._from_history(job)
        return job.outcome or ("waiting", "")

    def _from_history(self, job: QueuedRun, *, was_seen: bool = False) -> StateReason:
        """Returns how a run ended that this process has not started, but perhaps seen running."""
        rows, start = job.history()
        last = rows[-1] if rows else {}
        outcome, message = last.get("outcome"), str(last.get("message", ""))
        if outcome == "finished" and start.get("stage", 0) + 1 >= start.get("stages", 1):
            return "finished", ""
        if outcome == "failed":
            ends = [row.get("outcome") for row in reversed(rows) if row["event"] == "end"]
            job.failures = next((count for count, one in enumerate(ends) if one != "failed"), len(ends)) - 1
            return job.failed(message, moved=last.get("step", 0) > start.get("step", 0))
        is_asked = message.startswith(ASKED_TO_STOP) or (was_seen and not message.startswith(IN_TIME))
        if outcome == "stopped" and is_asked:
            self.is_paused = True
            return "stopped", message
        return "waiting", ""

    def _start_training(self, job: QueuedRun) -> None:
        environment = {name: value for name, value in package_environment().items() if name != "FORCE_COLOR"}
        job.attempts, job.rows_before, job.is_asked = job.attempts + 1, len(job.history()[0]), False
        try:
            with job.output.open("ab") as file:
                file.write(f"\n$ gputrain {shlex.join(job.words)}\n".encode())
                file.flush()
                job.output_at = file.tell()
                job.process = subprocess.Popen(
                    [*PROGRAM, *job.words], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment,
                    start_new_session=True, creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )  # fmt: skip
        except OSError as error:
            job.outcome = "failed", f"cannot be started: {error}"
        else:
            self._running = job

    def _stop(self, job: QueuedRun) -> None:
        """Ask a training to save and end, once: at a second signal it would end without a save."""
        if job.process and not job.is_asked and job.process.poll() is None:
            job.is_asked = True
            job.process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))

    def _outcome(self, job: QueuedRun, code: int) -> StateReason:
        """Returns how a training that this process has started has ended."""
        (rows, start), lines = job.history(), job.last_lines()
        reached = max(rows[-1].get("step", 0) if rows else 0, last_logged_step(job.run))
        moved = len(rows) > job.rows_before and reached > start.get("step", 0)
        if code == 0:
            return "finished", ""
        if code == STOPPED:
            message = next((line[9:] for line in lines if line.startswith("stopped: ")), "")
            if message.startswith(IN_TIME):
                return ("waiting", "") if moved else ("failed", f"{message}: that is too short for a step")
            self.is_paused |= not job.is_skipped
            return "stopped", message
        if is_in_use(job.run):  # It has refused to train there, too.
            return "waiting", ""
        return job.failed("\n".join([*lines[-SHOWN_LINES:], f"({describe_exit(code)})"]), moved=moved)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Returns what sorts names as people do: 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name.lower())]


def is_in_use(run: Path) -> bool:
    """Returns True if another process trains in a run folder."""
    try:
        if (run / LOCK).exists():
            with FileLock(run / LOCK).acquire(timeout=0):
                pass
    except Timeout:
        return True
    except (OSError, NotImplementedError):
        pass
    return False
