"""history.jsonl, which records every start and every end of a run."""

import contextlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gputrain.engine.metrics import METRICS, TAIL_BYTES, append_line, row_of
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.errors import Stopped, first_line
from gputrain.hw.probe import machine_facts

log = logging.getLogger(__name__)

HISTORY = "history.jsonl"
HISTORY_BYTES = 4_000_000  # Bytes at its end that are searched for the last start, whose line has all changes.


@contextmanager
def recorded(run: Run, steps: StepSchedule, state: TrainState) -> Iterator[None]:
    """Add a line to history.jsonl at the start of the block, and one at its end, however it ends."""
    progress = steps.start
    start: dict[str, Any] = {
        "event": "start",
        "command": run.command,
        "step": progress.step,
        "last_step": None if steps.has_open_end else steps.last_step,
        "logged_step": last_logged_step(run.folder),
        "ranks": run.group.ranks.count,
        "machine": machine_facts(state.runtime.device.type),
        "host": platform.node(),
        "process": os.getpid(),
        "changes": run.changes,
        "data": run.data,
    }
    _add(run, start)
    outcome, message = "failed", ""
    try:
        yield
        progress = state.progress
        outcome = "finished" if progress.finished or run.saving.ends_early(progress) else "stopped"
        if not progress.finished:
            message = "ended early" if outcome == "finished" else "max_steps is reached"
    except Stopped as error:
        outcome, message = "stopped", error.message
        raise
    except BaseException as error:
        message = first_line(error)
        raise
    finally:
        _add(run, {"event": "end", "step": state.progress.step, "outcome": outcome, "message": message})


def _add(run: Run, row: dict[str, Any]) -> None:
    """Append a line with the time. An error must not end the training."""
    if not run.group.leads:
        return
    line = json.dumps({"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **row}, default=str) + "\n"
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
