"""Benchmarks: rows that are measured in a process each, with their table and JSON.

A benchmark is a list of rows and the command of a child process. `measure_rows` starts a new child for each row, so
that peak memory and compiled code are the row's own. The child passes a function to `answer`, which calls it with the
settings of the row and prints the figures that it returns. GB is 1e9 bytes.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gputrain.engine.data import describe_exit
from gputrain.errors import UserError, first_line
from gputrain.formatting import format_number, format_rate, shell_command

ROW = "--row"  # Argument of the child that precedes the settings of its row, in JSON.
Settings = dict[str, Any]
log = logging.getLogger(__name__)


class NotMeasured(Exception):
    """Raised in a child if this machine cannot run its row; the text says why."""


@dataclass(frozen=True)
class BenchRow:
    label: str
    settings: Settings  # Values that JSON has, for the child; "device" is one of "auto", "cuda" and "cpu".


@dataclass(frozen=True)
class BenchResult:
    """The figures of a row, or the reason why there are none."""

    label: str
    settings: Settings
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    notes: list[str] = field(default_factory=list)  # Warnings of the child, such as that the batch was split.
    machine: dict[str, Any] = field(default_factory=dict)


def measure_rows(rows: Iterable[BenchRow], child: Sequence[str], *, minutes: float) -> Iterator[BenchResult]:
    """Yields the result of each row as soon as it is known. `child` is a command whose program calls `answer`.

    A row that fails or takes longer than `minutes` does not affect the others.
    """
    for row in rows:
        log.info("measuring: %s", row.label)
        yield measure_row(row, child, minutes)


def measure_row(row: BenchRow, child: Sequence[str], minutes: float) -> BenchResult:
    """Returns the result of a row, measured in a child process."""
    # This pipe closes when this process ends, for whatever reason; the child waits for that and ends too.
    theirs, ours = os.pipe()
    command = [*child, ROW, json.dumps(row.settings)]
    try:
        done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60 * minutes)
    except subprocess.TimeoutExpired as late:
        return BenchResult(
            row.label, row.settings, reason=f"stopped after {minutes:g} minutes; {_last_output(late.stderr)}"
        )
    finally:
        os.close(theirs)
        os.close(ours)
    try:
        answered = json.loads(_last_line(done.stdout))
    except ValueError:
        answered = None
    if done.returncode or not isinstance(answered, dict):
        return BenchResult(row.label, row.settings, reason=f"{_ending(done.returncode)}; {_last_output(done.stderr)}")
    label = answered.get("figures", {}).pop("label", row.label)
    return BenchResult(label, row.settings, **answered)


def _last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _last_output(output: bytes | None) -> str:
    line = _last_line(output)
    return f"its last line: {line}" if line else "it printed nothing"


def _ending(code: int) -> str:
    if code == -9:
        return "the process was killed, as the system does when memory runs out"
    return f"the process ended with {describe_exit(code)}"


def answer(measure: Callable[[Settings], dict[str, Any]]) -> bool:
    """Calls `measure` with the settings of the row, and prints the figures that it returns. Returns False, without
    measuring, if this process is not a child.

    `measure` raises NotMeasured or UserError if the row cannot be measured; a figure named "label" replaces the label
    of the row.
    """
    if sys.argv[-2:-1] != [ROW]:
        return False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    notes = _Notes()
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    ours = logging.getLogger("gputrain")
    ours.setLevel(logging.INFO)
    ours.addHandler(notes)
    settings = json.loads(sys.argv[-1])
    answered: dict[str, Any] = {}
    try:
        answered["figures"] = measure(settings)
    except (NotMeasured, UserError) as error:
        answered["reason"] = str(error)
    except RuntimeError as error:
        from gputrain.hw.runtime import is_out_of_memory  # It is imported here, because the parent needs no torch.

        if not is_out_of_memory(error):
            raise
        answered["reason"] = f"out of memory: {first_line(error)}"
    from gputrain.hw.probe import machine_facts

    answered |= {"notes": notes.lines, "machine": machine_facts(settings["device"])}
    print(json.dumps(answered), flush=True)
    return True


def _end_with_parent() -> None:
    # A read of sys.stdin would hold its lock when the child ends by itself.
    while os.read(0, 1):
        pass
    os._exit(1)


class _Notes(logging.Handler):
    """Collects the warnings of the package, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()) not in self.lines:
            self.lines.append(line)


@dataclass(frozen=True)
class BenchReport:
    """The results of a benchmark, from which its table and JSON are made."""

    title: str  # "train-vae, flux, 1024 px, batch 16"
    unit: str  # Name of the items, in the plural: "images".
    command: str
    results: list[BenchResult] = field(default_factory=list)

    @property
    def machine(self) -> dict[str, Any]:
        return next((result.machine for result in self.results if result.machine), {})

    @property
    def device(self) -> str:
        return str(self.machine.get("device", "unknown device"))

    def to_json(self) -> dict[str, Any]:
        kept = ("label", "settings", "figures", "reason", "notes")
        rows = [{name: getattr(result, name) for name in kept if getattr(result, name)} for result in self.results]
        return {"title": self.title, "unit": self.unit, "command": self.command, **self.machine, "rows": rows}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the column heads, and the cells of each row; a row without figures has only its label."""
        measured = [result.figures for result in self.results if result.figures]
        columns = [column for column in COLUMNS if any(column.key in figures for figures in measured)]
        rows = []
        for result in self.results:
            cells = [result.label]
            if result.figures:
                speedup = result.figures["items_per_second"] / measured[0]["items_per_second"]
                cells += [*(column.show(result.figures, self.unit) for column in columns), f"{speedup:.2f}"]
            rows.append(cells)
        return ["", *(column.head for column in columns), "speed-up"], rows


@dataclass(frozen=True)
class BenchColumn:
    head: str
    key: str
    form: Callable[[Any], str] = format_number

    def show(self, figures: dict[str, Any], unit: str) -> str:
        if self.key == "items_per_second":
            return format_rate(figures[self.key], unit)
        return self.form(figures[self.key]) if self.key in figures else "-"


COLUMNS = (
    BenchColumn("speed", "items_per_second"),
    BenchColumn("s/step", "seconds_per_step"),
    BenchColumn("predicted", "predicted_seconds_per_step"),
    BenchColumn("CPU-s/step", "cpu_seconds_per_step"),
    BenchColumn("TFLOPS", "tflops"),
    BenchColumn("of product", "share_of_product", "{:.0%}".format),
    BenchColumn("peak GB", "peak_gb", "{:.2f}".format),
    BenchColumn("reserved GB", "peak_reserved_gb", "{:.2f}".format),
    BenchColumn("first step s", "first_step_seconds"),
    BenchColumn("at once", "micro_batch_size", str),
)


def command_line(program: str) -> str:
    """Returns the command that the user typed."""
    return f"{program} {shell_command(*sys.argv[1:])}".rstrip()


def open_folder(folder: Path) -> None:
    """Makes sure that results can be written, before minutes are spent on them. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", hint="--output-dir takes a folder to write to") from None


def run_rows(
    report: BenchReport, rows: Iterable[BenchRow], child: Sequence[str], *, minutes: float, folder: Path, name: str
) -> Path:
    """Measures every row into `report`. Returns the path of its JSON, FOLDER/NAME_DEVICE.json, which is rewritten after
    each row. Raises UserError if the folder cannot be written.
    """
    open_folder(folder)
    path = result_path(folder, name, report.device)
    for result in measure_rows(rows, child, minutes=minutes):
        report.results.append(result)
        path = result_path(folder, name, report.device)
        if report.machine:
            write_json(path, report.to_json())
    write_json(path, report.to_json())
    return path


def result_path(folder: Path, name: str, device: str) -> Path:
    """Returns FOLDER/NAME_DEVICE.json, with the device's name in lower-case letters, digits and underscores."""
    return folder / f"{name}_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
