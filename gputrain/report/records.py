"""Reads a run folder for a report, however the run ended, and whichever version wrote it.

Reading takes bounded time and memory: of a long metrics.jsonl, all evaluations and evenly spread other lines are kept.
Whatever is damaged is left out, counted and noted.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from gputrain import config
from gputrain.engine.checkpoint import newest_first
from gputrain.engine.history import HISTORY
from gputrain.engine.metrics import METRICS, row_of
from gputrain.engine.run_folder import CONFIG, PLAN
from gputrain.errors import UserError
from gputrain.kinds import kinds, present_name

T = TypeVar("T")
Points = list[tuple[int, float]]  # Steps with values.

MOST_ROWS = 20_000  # Lines of metrics that are read, besides evaluations.
LINE_BYTES = 600  # Typical length of a line, by which the lines of a large file are spread.
LONGEST_LINE = 1_000_000
LONGEST_FILE = 20_000_000  # Bytes of a plan or a history.
LARGEST_VALUE, LARGEST_STEP = 1e30, 10**12  # Larger ones are damage, and cannot be drawn.


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
    rows: list[dict[str, float]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # What is missing or damaged.

    @cached_property
    def names(self) -> list[str]:
        """The names of all metrics, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def series(self, name: str) -> Points:
        return [(int(row["step"]), row[name]) for row in self.rows if name in row]

    @property
    def last_step(self) -> int:
        ended = [int(row["step"]) for row in self.history if is_count(row.get("step"))]
        return max([int(row["step"]) for row in self.rows[-1:]] + ended[-1:], default=0)

    @property
    def seconds(self) -> float:
        """The time of all attempts together: each counts its own seconds from its start."""
        total = before = 0.0
        for row in self.rows:
            now = row.get("seconds", before)
            total, before = (total + before, now) if now < before else (total, now)
        return total + before

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [row for row in self.history if row.get("event") == "start"]

    @property
    def planned_steps(self) -> int:
        """The step at which the run is to end; 0 if unknown."""
        planned = self.starts[-1].get("last_step") if self.starts else self.settings.get("num_steps")
        return planned if is_count(planned) else 0

    @property
    def status(self) -> RunStatus:
        if not self.history:
            done = 0 < self.planned_steps <= self.last_step
            return RunStatus("finished") if done else RunStatus("unknown", "this folder has no history.jsonl")
        last = self.history[-1]
        if last.get("event") == "end":
            outcome = str(last.get("outcome", "unknown"))
            return RunStatus(outcome, str(last.get("message", "")))
        if _is_alive(last):
            return RunStatus("running", f"process {last['process']} on this machine")
        return RunStatus("unknown", f"started {short_time(last.get('time'))}, and did not report its end")


def read_run(folder: Path, name: str = "") -> RunRecord:
    """Read a run folder. Raises UserError if it is missing, or holds no run."""
    if not folder.is_dir():
        fault = "is a file, expected a run folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {fault}", hint="name the --output-dir of a training")
    if not any((folder / part).exists() for part in (CONFIG, METRICS, PLAN)) and not newest_first(folder):
        raise UserError(f"{folder}: holds no run", hint="name the --output-dir of a training")
    record = RunRecord(folder, name or folder.resolve().name, "")
    noted = record.notes
    record.settings = _attempt(folder / CONFIG, config.read_file, {}, noted)
    record.plan = _attempt(folder / PLAN, _read_mapping, {}, noted)
    record.rows = _attempt(folder / METRICS, lambda path: read_rows(path, noted), [], noted)
    record.history = _attempt(folder / HISTORY, lambda path: read_history(path, noted), [], noted)
    record.kind = _kind(record)
    record.settings.pop("kind", None)
    return record


def evaluated(folder: Path, name: str) -> list[float]:
    """Returns a figure on held-out data at each evaluation of a run; the first is from before training."""
    return [value for _, value in read_run(folder).series(f"eval/{name}")]


def _attempt(path: Path, read: Callable[[Path], T], otherwise: T, notes: list[str]) -> T:
    """Read a file. If it is missing or damaged, note that and return something else."""
    if not path.exists():
        if path.name != HISTORY:
            notes.append(f"{path.name} is missing")
        return otherwise
    try:
        return read(path)
    except (OSError, ValueError, RecursionError, UserError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0] if str(error) else 'damaged'}")
        return otherwise


def _read_mapping(path: Path) -> dict[str, Any]:
    content = json.loads(_limited(path))
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def _limited(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(LONGEST_FILE + 1)
    if len(content) > LONGEST_FILE:
        raise ValueError(f"longer than {LONGEST_FILE / 1e6:g} MB")
    return content.decode("utf-8", "replace")


def read_rows(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """Read the finite numbers of the lines of a metrics.jsonl, sorted by step. Damaged lines are skipped and counted,
    and of a long file only some lines are read, which the notes say."""
    every = max(1, round(path.stat().st_size / LINE_BYTES / MOST_ROWS))
    rows, damaged, left_out = [], 0, b""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b"")):
            left_out = line if number % every and b'"eval/' not in line else b""
            if left_out or not line.strip():
                continue
            row = _row(line)
            damaged += row is None
            rows += [_numbers(row)] if row is not None else []
    if last := _row(left_out):
        rows.append(_numbers(last))
    if damaged:
        notes.append(f"{damaged} damaged {'line' if damaged == 1 else 'lines'} of {path.name} skipped")
    if every > 1:
        notes.append(f"{path.name} is long: one line in {every} and every evaluation are shown")
    return sorted(rows, key=lambda row: row["step"])


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
        notes.append(f"{damaged} damaged {'line' if damaged == 1 else 'lines'} of {path.name} skipped")
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    row = row_of(line)
    return row if row is not None and 0 <= row["step"] <= LARGEST_STEP else None


def is_count(value: object) -> TypeGuard[int]:
    """Returns True for a number of steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_STEP


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_VALUE


def _kind(record: RunRecord) -> str:
    """Returns the kind of a run; that of a run of an older version follows from the names of its metrics."""
    written = str(record.settings.get("kind", ""))
    if (kind := present_name(written)) in kinds():
        return kind
    signs = {one.metric: one.name for one in kinds().values() if one.metric}
    return next((kind for sign, kind in signs.items() if sign in record.names), "")


def _is_alive(start: Mapping[str, Any]) -> bool:
    """Returns True if the process that wrote the last start still runs on this machine."""
    process = start.get("process")
    if os.name != "posix" or start.get("host") != platform.node() or not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def short_time(text: object) -> str:
    """Returns a time of the history as local time, to the minute; "at an unknown time" if it is none."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return "at an unknown time"
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


def now() -> str:
    return short_time(datetime.now(timezone.utc).isoformat())
