"""Reads run folders, once for a report or again and again while they change, however a run ended.

Reading takes bounded time and memory. Whatever is damaged is left out, counted and noted.
"""

import json
import os
import platform
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeGuard

import psutil

from gputrain import config
from gputrain.engine.checkpoint import newest_first
from gputrain.engine.run_folder import CONFIG, HISTORY, METRICS, PLAN
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError, first_line, settings_without_secrets
from gputrain.kinds import kinds
from gputrain.report.metrics_file import LARGEST_STEP, MOST_ROWS, MetricsFile, MetricsTable

NOTES = "notes.md"  # What the user notes about a run.
PARTS = {"settings": CONFIG, "plan": PLAN, "metrics": METRICS, "history": HISTORY, "samples": "samples", "notes": NOTES}
LONGEST_FILE = 20_000_000  # Bytes of a plan or a history.
LONGEST_SETTINGS = 1_000_000  # Bytes of a configuration, which takes a second to parse.
LONGEST_NOTES = 20_000  # Characters.
NEWS_SECONDS = 120.0  # Without news for so long, or longer than usual, a run of another machine may have ended.
NEWS_GAPS = 3
START_SECONDS = 5.0  # By so much may the times of a process and of its first line be inexact.
CLOCK_SECONDS = 600.0  # By so much may the clocks of two machines differ.
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
    changed_at: float = 0.0  # By time.time(), when the metrics or the history changed last; 0 if they never did.
    news_at: float | None = None  # The same by time.monotonic(), as far as changes tell that the run goes on.
    is_gone: bool = False  # True if the folder has vanished.
    is_elsewhere: bool = False  # True if news come although no process has the number: it is that of a container.

    @property
    def last_step(self) -> int:
        ended = [int(row["step"]) for row in self.history if is_count(row.get("step"))]
        return max([self.metrics.last_step, *ended[-1:]])

    @property
    def seconds(self) -> float:
        """The time of all attempts together, as their metrics say."""
        return self.metrics.seconds_before + self.metrics.attempt_seconds

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [row for row in self.history if row.get("event") == "start"]

    @property
    def planned_steps(self) -> int:
        """The step at which the run is to end, by its last start or by a cool-down since; 0 if unknown."""
        start = self.starts[-1] if self.starts else {"last_step": self.settings.get("num_steps")}
        planned, events = start.get("last_step"), self.plan.get("events")
        for event in events if isinstance(events, list) else ():
            if isinstance(event, dict) and is_count(event.get("last_step")) and is_count(event.get("step")):
                planned = event["last_step"] if event["step"] >= self.first_step else planned
        return planned if is_count(planned) else 0

    @property
    def started_at(self) -> float:
        """When the last attempt started, by time.time(); 0 if unknown."""
        began = _moment(self.starts[-1].get("time")) if self.starts else None
        return began.timestamp() if began else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The time to the end at the pace of the last lines of this attempt, with the evaluations and saves between
        them; None if the run does not go on, or if its end or its pace is unknown."""
        pace, steps = self.metrics.seconds_per_step(self.first_step), self.planned_steps - self.metrics.last_step
        return None if pace is None or steps < 0 or self.status.state != "running" else steps * pace

    @property
    def first_step(self) -> int:
        """The step at which the present attempt began; -1 if unknown."""
        step = self.starts[-1].get("step") if self.starts else None
        return step if is_count(step) else -1

    @property
    def status(self) -> RunStatus:
        if self.is_gone:
            return RunStatus("unknown", "its folder has vanished")
        if not self.history:
            if self._has_news:
                return RunStatus("running", "its metrics keep coming")
            done = 0 < self.planned_steps <= self.last_step
            return RunStatus("finished") if done else RunStatus("unknown", "this folder has no history.jsonl")
        last = self.history[-1]
        if last.get("event") == "end":
            outcome = str(last.get("outcome", "unknown"))
            return RunStatus(outcome, str(last.get("message", "")))
        is_alive = None if self.is_elsewhere else _is_alive(last)
        doing = f"; {self.plan['compiling']}" if self.plan.get("compiling") else ""
        if is_alive:
            return RunStatus("running", f"process {last['process']} on this machine{doing}")
        if is_alive is None and self._has_news:
            return RunStatus("running", f"on {last.get('host') or 'another machine'}{doing}")
        detail = f"started {short_time(last.get('time'))}, and did not report its end"
        if self.changed_at:
            minutes = int((time.time() - self.changed_at) / 60)
            age = format_duration(60 * minutes) if minutes > 0 else "less than a minute"
            detail += f"; the last news came {age} ago"
        return RunStatus("unknown", detail)

    @property
    def _has_news(self) -> bool:
        """True if news came as recently as the rhythm of the metrics lets expect."""
        longest = max(NEWS_SECONDS, NEWS_GAPS * self.metrics.longest_gap)
        return self.news_at is not None and time.monotonic() - self.news_at < longest


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
        self._news: tuple[object, object] | None = None  # The last line of the metrics, and the history.
        self._late_news = 0  # How often news came although the process had ended.
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
        if changed & {"metrics", "history"} or self._news is None:
            self._note_news()
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
                kind = str(record.settings.pop("kind", ""))
                record.kind = kind if kind in kinds() else ""
            elif part == "plan":
                record.plan = _read_mapping(path) if sign else {}
            elif part == "history":
                record.history = read_history(path, faults) if sign else []
            elif part == "notes":
                record.user_notes = _read_notes(path) if sign else ""
        except (OSError, ValueError, RecursionError, UserError) as error:
            is_changed = False
            if isinstance(error, OSError):  # It may be readable again although nothing in it changes.
                self._signs[part] = "unreadable"
            reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            faults.append(f"{PARTS[part]} cannot be read: {reason}")
        if sign is None and part in ("settings", "plan", "metrics"):
            faults.append(f"{PARTS[part]} is missing")
        is_changed = is_changed or faults != self._faults[part]
        self._faults[part] = faults
        return is_changed

    def _note_news(self) -> None:
        """Note when the metrics and the history changed last: by our clock if we saw it, otherwise by the time of the
        files and, since that of a copy is a later one, by the times in them."""
        record, now = self.record, time.time()
        line, history = self._news or (None, None)
        news = (record.metrics.last or line, record.history or history)
        if self._news is None:
            signs = [self._signs.get(part) for part in ("metrics", "history")]
            changed_at = max((sign[2] / 1e9 for sign in signs if isinstance(sign, tuple)), default=0.0)
            record.changed_at = min(changed_at, now)
            if began := record.started_at:
                metrics = record.metrics
                logged = metrics.attempt_seconds if metrics.last_step > record.first_step else 0.0
                record.news_at = time.monotonic() - max(now - record.changed_at, now - began - logged - CLOCK_SECONDS)
        elif news != self._news:
            record.changed_at, record.news_at = now, time.monotonic()
            if news[1] != history:
                self._late_news = 0
            elif record.history and _is_alive(record.history[-1]) is False:
                self._late_news += 1  # The first ones may be the last ones of a process that has just ended.
            record.is_elsewhere = self._late_news > 1
        self._news = news

    def _notes(self) -> list[str]:
        file, notes = self._metrics, []
        damaged = file.damaged + (file.waiting > 0 and self.record.status.state != "running")
        for part, faults in self._faults.items():
            notes += faults
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
        raise UserError(f"{folder}: {fault}", hint="name the --output-dir of a training")
    reader = RunReader(folder, name, follows_links=True)
    reader.refresh()
    if not any(reader.record.versions[part] for part in ("settings", "metrics", "plan")) and not newest_first(folder):
        raise UserError(f"{folder}: holds no run", hint="name the --output-dir of a training")
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


def _is_alive(start: Mapping[str, Any]) -> bool | None:
    """Returns True if the process that wrote a start runs on this machine, False if it has ended, and None if that
    cannot be known: it is another machine's, or another process has its number, a later one or, outside of a container,
    any other."""
    process, written = start.get("process"), _moment(start.get("time"))
    if start.get("host") != platform.node() or not is_count(process) or not process or not written:
        return None
    try:
        found = psutil.Process(process)
        if found.status() == psutil.STATUS_ZOMBIE:
            return False
        is_python = any(name in word for word in found.cmdline() for name in ("python", "gputrain"))
        return True if is_python and found.create_time() < written.timestamp() + START_SECONDS else None
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError, OverflowError):
        return None


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone()
    except (ValueError, OSError, OverflowError):
        return None


def short_time(text: object) -> str:
    """Returns a time of the history as local time, to the minute; "at an unknown time" if it is none."""
    moment = _moment(text)
    return moment.strftime("%Y-%m-%d %H:%M") if moment else "at an unknown time"


def now() -> str:
    return short_time(datetime.now(timezone.utc).isoformat())
