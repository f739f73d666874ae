"""What the benchmarks of every model share: rows measured in fresh processes, and their table and JSON.

A model's benchmark is a list of rows and a child. `measure_rows` starts the child anew for each row, so that peak
memory and compiled code are the row's own. The child's module hands its function to `answer`, which gives it the
settings of its row and prints what it found. GB is 1e9 bytes.
"""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from gputrain.bench import chart
from gputrain.errors import UserError

ROW = "--row"  # the child's argument before the settings of its row, in JSON
Settings = dict[str, Any]
log = logging.getLogger(__name__)


class NotMeasured(Exception):
    """Raised in a child whose row this machine cannot run; the text says why."""


@dataclass(frozen=True)
class Row:
    label: str
    settings: Settings  # for the child, in values that JSON knows; "device" is one: "auto", "cuda" or "cpu"


@dataclass(frozen=True)
class Result:
    """What became of a row: its figures, or the reason why there are none."""

    label: str
    settings: Settings
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    notes: list[str] = field(default_factory=list)  # warnings of the child: memory ran out and the batch was split, say
    machine: dict[str, Any] = field(default_factory=dict)


def measure_rows(rows: Iterable[Row], child: Sequence[str], *, minutes: float) -> Iterator[Result]:
    """The result of each row as soon as it is known. `child` is a command whose program calls `answer`.

    A row that fails, or takes longer than `minutes`, leaves the others be.
    """
    for row in rows:
        log.info("measuring: %s", row.label)
        yield measure_row(row, child, minutes)


def measure_row(row: Row, child: Sequence[str], minutes: float) -> Result:
    # The child waits for the end of this pipe, which comes with the end of this process, whatever ends it.
    theirs, ours = os.pipe()
    command = [*child, ROW, json.dumps(row.settings)]
    try:
        done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60 * minutes)
    except subprocess.TimeoutExpired as late:
        return Result(row.label, row.settings, reason=f"stopped after {minutes:g} minutes; {_last_words(late.stderr)}")
    finally:
        os.close(theirs)
        os.close(ours)
    try:
        said = json.loads(_last_line(done.stdout))
    except ValueError:
        said = None
    if done.returncode or not isinstance(said, dict):
        return Result(row.label, row.settings, reason=f"{_ending(done.returncode)}; {_last_words(done.stderr)}")
    label = said.get("figures", {}).pop("label", row.label)
    return Result(label, row.settings, **said)


def model_child(kind: str) -> tuple[str, ...]:
    """Returns the command of the child process that measures a model of this kind."""
    return (sys.executable, "-m", "gputrain.planner.child", kind)


def _last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _last_words(output: bytes | None) -> str:
    line = _last_line(output)
    return f"its last line: {line}" if line else "it said nothing"


def _ending(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code}"
    if code == -9:
        return "the process was killed, as the system does where memory runs out"
    return f"the process died of {signal.Signals(-code).name}"


def answer(measure: Callable[[Settings], dict[str, Any]]) -> bool:
    """In a child, let `measure` turn the settings of the row into figures, and print them. False in any other process.

    `measure` raises NotMeasured or UserError where there is nothing to measure; a figure named "label" replaces the
    label of the row.
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
    said: dict[str, Any] = {}
    try:
        said["figures"] = measure(settings)
    except (NotMeasured, UserError) as error:
        said["reason"] = str(error)
    except RuntimeError as error:
        from gputrain.hw.runtime import is_out_of_memory  # here, as the parent needs no torch

        if not is_out_of_memory(error):
            raise
        said["reason"] = f"out of memory: {str(error).splitlines()[0]}"
    from gputrain.bench.timing import machine

    print(json.dumps({**said, "notes": notes.lines, "machine": machine(settings["device"])}), flush=True)
    return True


def _end_with_parent() -> None:
    # os.read, because sys.stdin would be locked at the end of a child that ends by itself.
    while os.read(0, 1):
        pass
    os._exit(1)


class _Notes(logging.Handler):
    """Warnings of the package, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (line := record.getMessage()) not in self.lines:
            self.lines.append(line)


@dataclass(frozen=True)
class Report:
    """A benchmark: what its table, JSON and chart are made from."""

    title: str  # "train-vae, flux, 1024 px, batch 16"
    unit: str  # what an item is, in the plural: "images"
    command: str
    results: list[Result] = field(default_factory=list)

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
        """Column heads, and the cells of each row: of one that was not measured, only its label."""
        measured = [result.figures for result in self.results if result.figures]
        columns = [column for column in COLUMNS if any(column.key in figures for figures in measured)]
        rows = []
        for result in self.results:
            cells = [result.label]
            if result.figures:
                speedup = result.figures["items_per_second"] / measured[0]["items_per_second"]
                cells += [*(column.show(result.figures) for column in columns), f"{speedup:.2f}"]
            rows.append(cells)
        return ["", *(column.head.format(unit=self.unit) for column in columns), "speed-up"], rows


@dataclass(frozen=True)
class Column:
    head: str
    key: str
    form: Callable[[Any], str] = chart.number

    def show(self, figures: dict[str, Any]) -> str:
        return self.form(figures[self.key]) if self.key in figures else "-"


COLUMNS = (
    Column("{unit}/s", "items_per_second"),
    Column("s/step", "seconds_per_step"),
    Column("CPU-s/step", "cpu_seconds_per_step"),
    Column("TFLOPS", "tflops"),
    Column("of product", "share_of_product", "{:.0%}".format),
    Column("peak GB", "peak_gb", "{:.2f}".format),
    Column("reserved GB", "peak_reserved_gb", "{:.2f}".format),
    Column("first step s", "first_step_seconds"),
    Column("at once", "micro_batch_size", str),
)


def command_line(program: str) -> str:
    """What was typed, for the record."""
    return " ".join([program, shlex.join(sys.argv[1:])]).rstrip()


def open_folder(folder: Path) -> None:
    """Make sure, before minutes are spent, that results can be written. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", hint="--output-dir takes a folder to write to") from None


def run(
    report: Report, rows: Iterable[Row], child: Sequence[str], *, minutes: float, folder: Path, name: str
) -> list[Path]:
    """Measure every row into `report`. Returns the paths of JSON and chart, which are written anew after each row.

    Raises UserError where the folder cannot be written.
    """
    open_folder(folder)
    written: list[Path] = []
    for result in measure_rows(rows, child, minutes=minutes):
        report.results.append(result)
        if report.machine:
            written = write_files(report, folder, name)
    return written or write_files(report, folder, name)


def write_files(report: Report, folder: Path, name: str) -> list[Path]:
    """Write FOLDER/NAME_DEVICE.json and .png, and return their paths."""
    table = result_path(folder, name, report.device)
    picture = table.with_suffix(".png")
    write_json(table, report.to_json())
    draw_chart(report).save(picture)
    return [table, picture]


def draw_chart(report: Report) -> Image.Image:
    """Items a second by row, and peak memory beside them."""
    keys = {f"{report.unit} a second": "items_per_second", "peak memory, GB": "peak_gb"}
    return chart.draw(
        report.title,
        f"{report.device}; torch {report.machine.get('torch', 'unknown')}",
        [result.label for result in report.results],
        [chart.Bars(head, [result.figures.get(key) for result in report.results]) for head, key in keys.items()],
        [result.reason for result in report.results],
    )


def result_path(folder: Path, name: str, device: str) -> Path:
    """FOLDER/NAME_DEVICE.json, the device's name in small letters, digits and underscores."""
    return folder / f"{name}_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
