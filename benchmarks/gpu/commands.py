"""gputrain's commands within this process, and what a run folder tells of them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gputrain.cli.app import command_line
from gputrain.engine.stop import COMMAND_CLOCK
from gputrain.errors import Stopped

Row = dict[str, Any]


def gputrain(*words: object) -> None:
    """Runs a command as typed. Raises UserError, SystemExit for another code than 0, and whatever else goes wrong.

    A run that was stopped early has not gone wrong.
    """
    COMMAND_CLOCK.start()
    print("$ gputrain", *words, flush=True)
    try:
        # Without its standalone mode, click returns the code of typer.Exit.
        code = command_line().main(args=[str(word) for word in words], prog_name="gputrain", standalone_mode=False)
    except Stopped as stopped:
        print(stopped.message)
        return
    if isinstance(code, int) and code:
        raise SystemExit(f"gputrain {words[0]} ended with exit code {code}")


@contextmanager
def log_of_package() -> Iterator[list[logging.LogRecord]]:
    """Gathers what the package logs within."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("gputrain")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def rows_of(run: Path) -> list[Row]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def steps_of(run: Path) -> list[Row]:
    """Returns the rows of metrics.jsonl that are of training steps."""
    return [row for row in rows_of(run) if "learning_rate" in row]


def plan_of(run: Path) -> dict[str, Any]:
    """Returns plan.json: the settings in effect at the end, and the measured peak beside the predicted one."""
    found: dict[str, Any] = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    return found
