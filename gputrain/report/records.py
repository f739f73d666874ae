"""Reads run folders, once for a report or again and again while they change, however a run ended.

Reading takes bounded time and memory. Whatever is damaged is left out, counted and noted.
"""

import json
import math
import os
import platform
import stat
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeGuard

import psutil

from gputrain import config
from gputrain.engine.checkpoint import BEST, newest_first, step_of
from gputrain.engine.run_folder import CONFIG, HISTORY, METRICS, PLAN
from gputrain.errors import UserError, first_line, settings_without_secrets
from gputrain.heartbeat import HEARTBEAT, Heartbeat
from gputrain.kinds import kinds
from gputrain.report.metrics_file import LARGEST_STEP, MOST_ROWS, MetricsFile, MetricsTable
from gputrain.serialization import from_json

NOTES = "notes.md"  # What the user notes about a run.
PARTS = {
    "settings": CONFIG, "plan": PLAN, "metrics": METRICS, "history": HISTORY, "samples": "samples", "notes": NOTES,
    "heartbeat": HEARTBEAT, "best": BEST,
}  # fmt: skip
SIGNS = {"heartbeat", "metrics", "history"}  # The parts that a training writes all the time.
LONGEST_FILE = 20_000_000  # Bytes of a plan or a history.
LONGEST_SETTINGS = 1_000_000  # Bytes of a configuration, which takes a second to parse.
LONGEST_NOTES = 20_000  # Characters.
# A run without a sign for so long has ended: with a heartbeat, which a network drive may show a minute later; of a
# former version, which wrote none; and if this machine has no process of its number, which may be that of a container.
SILENT_SECONDS, SILENT_BEFORE, SILENT_WITHOUT_PROCESS = 120.0, 600.0, 10.0
FOLLOWED_SECONDS = 10.0  # What is new since a reading so long ago is as new as that.
LONGEST_SECONDS, LONGEST_PHASE = 1e10, 200  # Seconds that are left, and characters.
LARGEST_PROCESS = 2**31  # What the system takes for a number of a process.
SETTLING_SECONDS = 5.0  # After a sample has appeared, it may still be being written.


@dataclass(frozen=True)
class RunStatus:
    """The state of a run: "finished", "stopped", "failed", "running" or "unknown", and what is known about it."""

    state: str
    detail: str = ""


@dataclass
class RunRecord:
    """All that a report needs of a run folder but the samples. Settings are flat."""

    folder: Path
    name: str
    kind: str  # "" if unknown.
    settings: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    metrics: MetricsTable = field(default_factory=MetricsTable)
    history: list[dict[str, Any]] = field(default_factory=list)
    user_notes: str = ""
    notes: list[str] = field(default_factory=list)  # What is missing or damaged.
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))  # Counts of changes.
    heartbeat: Heartbeat | None = None
    best_step: int | None = None  # That of checkpoint_best.pt; None: there is none.
    written_at: float = 0.0  # By time.time(), when a file that tells of the run was written last; 0 if none ever was.
    sign_at: float = -math.inf  # By time.monotonic(), when the last sign of the run came.
    is_gone: bool = False  # True if the folder has vanished.

    @property
    def beat(self) -> Heartbeat | None:
        """The heartbeat of the last attempt; None if that has reported its end, or was one of a former version."""
        last, beat = self.history[-1] if self.history else {}, self.heartbeat
        ended = _seconds(last.get("time")) if last.get("event") == "end" else 0.0
        return beat if beat and ended < _seconds(beat.began) else None

    @property
    def last_step(self) -> int:
        ended = [int(row["step"]) for row in self.history if is_count(row.get("step"))]
        return max([self.metrics.last_step, *ended[-1:], (self.beat and self.beat.step) or 0])

    @property
    def seconds(self) -> float:
        """The time of all attempts together, as their metrics say."""
        return self.metrics.seconds_before + self.metrics.attempt_seconds

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [row for row in self.history if row.get("event") == "start"]

    @property
    def planned_steps(self) -> int:
        """The step at which the run is to end, by its heartbeat, or its last start and cool-down; 0 if unknown."""
        if self.beat and self.beat.last_step is not None:
            return self.beat.last_step
        start = self.starts[-1] if self.starts else {"last_step": self.settings.get("num_steps")}
        planned, events = start.get("last_step"), self.plan.get("events")
        for event in events if isinstance(events, list) else ():
            if isinstance(event, dict) and is_count(event.get("last_step")) and is_count(event.get("step")):
                planned = event["last_step"] if event["step"] >= self.first_step else planned
        return planned if is_count(planned) else 0

    @property
    def started_at(self) -> float:
        """When the last attempt started, by time.time(); 0 if unknown."""
        return _seconds(self.beat.began if self.beat else self.starts[-1].get("time") if self.starts else None)

    @property
    def last_sign(self) -> float:
        """When the run gave its last sign or ended, by time.time(); 0 if unknown. The file of a copied run is later
        than the time in it, and no sign is later than now."""
        last, told = self.history[-1] if self.history else {}, [_seconds(self.beat.time) if self.beat else 0.0]
        told += [_seconds(last.get("time"))] if last else []
        if last.get("event") == "start" and self.metrics.last_step > self.first_step:
            told.append(told[-1] + self.metrics.attempt_seconds)
        return min(max(told) or self.written_at, self.written_at, time.time())

    @property
    def changed_at(self) -> float:
        """When a run that goes on came to its present step or phase, and another one gave its last sign."""
        is_working = self.beat and self.status.state == "running"
        return min(_seconds(self.beat.since), self.last_sign) if self.beat and is_working else self.last_sign

    @property
    def first_step(self) -> int:
        """The step at which the present attempt began; -1 if unknown."""
        step = self.starts[-1].get("step") if self.starts else None
        return step if is_count(step) else -1

    @property
    def takes_requests(self) -> bool:
        """True if the steps of a run that goes on have begun."""
        last, began = self.history[-1] if self.history else {}, _seconds(self.beat.began) if self.beat else 0.0
        return self.status.state == "running" and last.get("event") == "start" and began <= _seconds(last.get("time"))

    @property
    def status(self) -> RunStatus:
        if self.is_gone:
            return RunStatus("unknown", "its folder has vanished")
        last, beat = self.history[-1] if self.history else {}, self.beat
        if last.get("event") == "end" and not beat:
            outcome = str(last.get("outcome", "unknown"))
            return RunStatus(outcome, str(last.get("message", "")))
        origin = asdict(beat) if beat else last
        host, process = origin.get("host"), origin.get("process")
        is_here = host == platform.node() and is_count(process) and process < LARGEST_PROCESS
        has_ended = is_here and not psutil.pid_exists(process)
        silent = SILENT_WITHOUT_PROCESS if has_ended else SILENT_SECONDS if beat else SILENT_BEFORE
        if time.monotonic() - self.sign_at < silent:
            return RunStatus("running", f"process {process} on {host}" if origin else "its metrics keep coming")
        if not beat and 0 < self.planned_steps <= self.last_step:
            return RunStatus("finished")
        if not origin:
            return RunStatus("unknown", "this folder has no history.jsonl")
        how, where = "killed" if has_ended else "killed or cut off", f" in: {beat.text}" if beat else ""
        detail = f"it did not report its end, and was {how}{where}; its last sign came {short_time(self.last_sign)}"
        return RunStatus("unknown", detail)


Sign = tuple[int, int, int, int] | str | None  # What tells whether a file has changed; a text is a fault.


class RunReader:
    """A run folder that is read again and again while it changes. `record` is what is known about it."""

    def __init__(
        self, folder: Path, name: str = "", *, most_rows: int = MOST_ROWS, follows_links: bool = False
    ) -> None:
        """Open a folder, of which nothing is read yet. Besides evaluations, at most `most_rows` lines of metrics are
        kept. Links out of the folder are not read unless it `follows_links`, since whoever writes the folder must not
        choose what others are shown."""
        self.record = RunRecord(folder, name or os.path.basename(os.path.realpath(folder)), "")
        self.most_rows, self.follows_links = most_rows, follows_links
        self._paths = {part: os.path.join(folder, file) for part, file in PARTS.items()}
        self._metrics = MetricsFile(self._paths["metrics"], most_rows)
        self._signs: dict[str, Sign] = {}
        self._faults: dict[str, list[str]] = {part: [] for part in PARTS}
        self._read_at = -math.inf  # When the last reading was.
        self._settles_at: float | None = None  # When samples that have appeared are complete.

    def refresh(self) -> None:
        """Read what is new since the last call.

        Damaged, half and vanished files are noted, and no error. What was read before from a file that cannot be read
        any more stays.
        """
        record = self.record
        record.is_gone = not os.path.isdir(record.folder)
        if record.is_gone:
            return
        changed = set()
        for part, path in self._paths.items():
            sign = _sign(path)
            is_first = part not in self._signs
            if is_first or sign != self._signs[part]:
                self._signs[part] = sign
                is_new = self._read(part, sign)
                if sign is not None if is_first else is_new:
                    changed.add(part)
        now = time.monotonic()
        if "samples" in changed:
            self._settles_at = now + SETTLING_SECONDS
        elif self._settles_at is not None and now >= self._settles_at:
            changed.add("samples")
            self._settles_at = None
        for part in changed:
            record.versions[part] += 1
        written = [sign[2] / 1e9 for part in SIGNS if isinstance(sign := self._signs[part], tuple)]
        record.written_at = max(written, default=0.0)
        if changed & SIGNS:  # Whatever the clock of a machine says: what has changed since a moment ago is a sign.
            age = max(0.0, time.time() - record.last_sign) if record.history or record.beat else math.inf
            record.sign_at = now - (0.0 if now - self._read_at < FOLLOWED_SECONDS else age)
        self._read_at = now
        record.notes = self._notes()

    def _read(self, part: str, sign: Sign) -> bool:
        """Read a file that has changed. Returns False if there is nothing new in it."""
        record, path, faults, is_changed = self.record, Path(self._paths[part]), list[str](), True
        try:
            if isinstance(sign, str):
                raise ValueError(sign)
            if not self.follows_links and os.path.islink(path) and not is_inside(path, record.folder):
                raise ValueError("it is a link out of the folder")
            if part == "metrics":
                if sign:
                    is_changed = self._metrics.read()
                else:
                    self._metrics = MetricsFile(self._paths["metrics"], self.most_rows)
                record.metrics = self._metrics.table
            elif part == "settings":
                record.settings = _read_settings(path) if sign else {}
                kind = str(record.settings.pop("kind", record.kind))
                record.kind = kind if kind in kinds() else ""
            elif part == "plan":
                record.plan = _read_mapping(path) if sign else {}
            elif part == "history":
                record.history = read_history(path, faults) if sign else []
            elif part == "notes":
                record.user_notes = _read_notes(path) if sign else ""
            elif part == "best":
                record.best_step = step_of(path) if sign else None
            elif part == "heartbeat":
                record.heartbeat = _read_heartbeat(path) if sign else None
                if record.heartbeat and record.heartbeat.kind in kinds():
                    record.kind = record.kind or record.heartbeat.kind
        except Exception as error:  # A damaged checkpoint can cause any.
            is_changed = False
            if isinstance(error, OSError):  # It may be readable again although nothing in it changes.
                self._signs[part] = "unreadable"
            reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            faults.append(f"{PARTS[part]} cannot be read: {reason}")
        is_changed = is_changed or faults != self._faults[part]
        self._faults[part] = faults
        return is_changed

    def _notes(self) -> list[str]:
        file, notes = self._metrics, []
        damaged = file.damaged + (file.waiting > 0 and self.record.status.state != "running")
        for part, faults in self._faults.items():
            notes += faults
            if self._signs[part] is None and part in ("settings", "plan", "metrics") and not self.record.beat:
                notes.append(f"{PARTS[part]} is missing")
            if part == "metrics" and damaged:
                notes.append(_skipped(damaged, METRICS))
            if part == "metrics" and file.table.every > 1:
                notes.append(f"{METRICS} is long: one line in {file.table.every} and every evaluation are shown")
        return notes


def read_run(folder: Path, name: str = "") -> RunRecord:
    """Read a run folder. Raises UserError if it is missing, or holds no run."""
    fault = ""
    if not os.path.isdir(folder):
        fault = "is a file, expected a run folder" if os.path.exists(folder) else "no such folder"
    elif not os.access(folder, os.X_OK):
        fault = "cannot be read"
    if fault:
        raise UserError(f"{folder}: {fault}", hint="name the run folder of a training")
    reader = RunReader(folder, name, follows_links=True)
    reader.refresh()
    if not any(reader.record.versions[part] for part in ("settings", "metrics", "plan")) and not newest_first(folder):
        raise UserError(f"{folder}: holds no run", hint="name the run folder of a training")
    return reader.record


def evaluated(folder: Path, name: str) -> list[float]:
    """Returns a figure on held-out data at each evaluation of a run; the first is from before training."""
    return [value for _, value in read_run(folder).metrics.series(f"eval/{name}")]


def _sign(path: str) -> Sign:
    """Returns the number of a file, its size, and when its content and its attributes changed; None if there is none,
    and a text if it cannot be read. Times alone do not tell: on some network drives they do not change."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return "not a file"
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_inside(path: str | Path, folder: Path) -> bool:
    """Returns True if a path leads to a place in a folder, whatever links it goes through."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _read_settings(path: Path) -> dict[str, Any]:
    _limited(path, LONGEST_SETTINGS)
    return settings_without_secrets(config.read_config(path))


def _read_notes(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4 * LONGEST_NOTES).decode("utf-8-sig", "replace")[:LONGEST_NOTES]


def _read_mapping(path: Path) -> dict[str, Any]:
    content = json.loads(_limited(path))
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def _read_heartbeat(path: Path) -> Heartbeat:
    beat = from_json(Heartbeat, _read_mapping(path))
    has_steps = all(is_count(step or 0) for step in (beat.step, beat.last_step))
    if not has_steps or not 0 <= (beat.seconds_left or 0) < LONGEST_SECONDS or len(beat.phase) > LONGEST_PHASE:
        raise ValueError("not a heartbeat")
    return beat


def _limited(path: Path, most: int = LONGEST_FILE) -> str:
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"longer than {most / 1e6:g} MB")
    return content.decode("utf-8", "replace")


def read_history(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Read the lines of a history.jsonl; damaged ones are skipped and counted."""
    rows, damaged = [], 0
    for line in _limited(path).splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and row.get("event") in ("start", "end"):
            rows.append(row)
        elif line.strip():
            damaged += 1
    if damaged:
        notes.append(_skipped(damaged, path.name))
    return rows


def _skipped(damaged: int, name: str) -> str:
    return f"{damaged} damaged {'line' if damaged == 1 else 'lines'} of {name} skipped"


def is_count(value: object) -> TypeGuard[int]:
    """Returns True for a number of steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_STEP


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone()
    except (ValueError, OSError, OverflowError):
        return None


def _seconds(text: object) -> float:
    """Returns a time of the history by time.time(); 0 if it is none."""
    moment = _moment(text)
    return moment.timestamp() if moment else 0.0


def short_time(time: object) -> str:
    """Returns a time of the history, or one by time.time(), as local time, to the minute; "at an unknown time" if it is
    none."""
    moment = datetime.fromtimestamp(time).astimezone() if isinstance(time, float) else _moment(time)
    return moment.strftime("%Y-%m-%d %H:%M") if moment else "at an unknown time"


def now() -> str:
    return short_time(datetime.now(timezone.utc).isoformat())
