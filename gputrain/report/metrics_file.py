"""The metrics of a run, read from a metrics.jsonl while a training writes it, in bounded time and memory.

Of a long file, all evaluations and evenly spread other lines are kept. Damaged lines are left out and counted.
"""

import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gputrain.engine.run_folder import row_of

Points = list[tuple[int, float]]  # Steps with values.

MOST_ROWS = 20_000  # Lines of metrics that are kept, besides evaluations.
LONGEST_LINE = 1_000_000
BLOCK_BYTES = 1 << 20  # Bytes that are read at a time.
LAST_LINES = 100  # Lines at the end that are all parsed, whichever are kept.
CHECKED_BYTES = 4096  # Bytes before the position of reading, which tell whether the file was written anew; some lines.
EVALUATION = b'"eval/'
LARGEST_VALUE, LARGEST_STEP = 1e30, 10**12  # Larger ones are damage, and cannot be drawn.


@dataclass
class RowGroup:
    """The kept lines that hold the same metrics: their places among all lines, their steps, and their values one line
    after the other."""

    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def thin(self, every: int) -> None:
        kept = np.array(self.numbers) % every == 0
        values = np.array(self.values).reshape(len(kept), -1)[kept]
        self.values = array("d", values.tobytes())
        self.numbers = array("q", np.array(self.numbers)[kept].tobytes())
        self.steps = array("q", np.array(self.steps)[kept].tobytes())


class MetricsTable:
    """The numbers of the lines of metrics. It keeps all evaluations and, of the other lines, one in `every`, which is
    doubled when there are more than `most_rows` of them."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.most_rows, self.every, self.kept = most_rows, 1, 0
        self.identity = object()  # The same one, in copies too, as long as lines are only added.
        self.groups: dict[tuple[str, ...], RowGroup] = {}
        self.latest: dict[str, float] = {}  # The last value of every metric.
        self.last: tuple[int, dict[str, float]] | None = None  # Step and values of the last line.
        self.last_is_kept = False
        self.last_step = 0
        # Each attempt counts its own seconds from its start.
        self.seconds_before = self.attempt_seconds = 0.0  # Those of the attempts before, and of the present one.
        self._number = -1

    def add(self, number: int, step: int, values: dict[str, float], *, is_evaluation: bool = False) -> None:
        """Add a line, in the order of the file. `number` counts the lines before it that are no evaluations."""
        now, before = values.get("seconds", self.attempt_seconds), self.attempt_seconds
        self.seconds_before += before if now < before else 0.0
        self.attempt_seconds, self._number = now, number
        self.latest.update(values)
        self.last, self.last_step = (step, values), max(step, self.last_step)
        if is_evaluation or number % self.every == 0:
            group = self.groups.setdefault(tuple(values), RowGroup())
            group.numbers.append(number)
            group.steps.append(step)
            group.values.extend(values.values())
            self.kept += not is_evaluation
        while self.kept > self.most_rows:
            self._thin()
        self.last_is_kept = is_evaluation or number % self.every == 0

    def _thin(self) -> None:
        self.every *= 2
        trained = {names: group for names, group in self.groups.items() if not any(map(_is_evaluation, names))}
        for names, group in trained.items():
            group.thin(self.every)
            if not group.steps:
                del self.groups[names]
        self.kept = sum(len(group.steps) for group in trained.values())

    @property
    def evaluations(self) -> int:
        """The number of evaluations."""
        return sum(len(group.steps) for names, group in self.groups.items() if any(map(_is_evaluation, names)))

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order of their first appearance."""
        last = () if self.last is None else self.last[1]
        return list(dict.fromkeys([*(name for names in self.groups for name in names), *last]))

    def series(self, name: str) -> Points:
        """Returns the kept values of a metric by step, and the last one."""
        numbers, steps, values = [], [], []
        for names, group in self.groups.items():
            if name in names:
                numbers.append(np.array(group.numbers))
                steps.append(np.array(group.steps))
                values.append(np.array(group.values[names.index(name) :: len(names)]))
        if not self.last_is_kept and self.last and name in self.last[1]:
            numbers.append(np.array([self._number]))
            steps.append(np.array([self.last[0]]))
            values.append(np.array([self.last[1][name]]))
        if not steps:
            return []
        all_steps = np.concatenate(steps)
        order = np.lexsort((np.concatenate(numbers), all_steps))
        return list(zip(all_steps[order].tolist(), np.concatenate(values)[order].tolist(), strict=True))


class MetricsFile:
    """A metrics.jsonl that is read further whenever it has grown, and anew if it was truncated or written anew."""

    def __init__(self, path: str, most_rows: int = MOST_ROWS) -> None:
        self.path, self.most_rows = path, most_rows
        self._begin()

    def _begin(self) -> None:
        """Forget all lines, and read from the beginning next."""
        self.table = MetricsTable(self.most_rows)
        self.position = 0  # Where the next line begins.
        self.damaged = self.waiting = 0  # Damaged lines, and bytes of a line that is not complete.
        self._checked = b""  # The last bytes before the position.
        self._number = 0
        self._is_inside = False  # True if the position is inside of a line that is too long, and is left out.

    def read(self) -> bool:
        """Read what is new. Returns False if there is nothing new. Raises OSError."""
        with Path(self.path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(self.position - len(self._checked))
            is_known = self.position <= size and file.read(len(self._checked)) == self._checked
            if not is_known:
                self._begin()
            file.seek(self.position)
            before, damaged = self.position, self.damaged
            self._read_blocks(file, size)
        return not is_known or self.position > before or self.damaged > damaged

    def _read_blocks(self, file: BinaryIO, size: int) -> None:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            read = rest + block
            lines = read.split(b"\n")
            rest = lines.pop()
            if self._is_inside and lines:
                lines[0], self._is_inside = b"", False
            is_end = file.tell() >= size
            if is_end and not self._is_inside and _row(rest) is not None:  # Only the end of the line is missing.
                lines.append(rest)
                rest = b""
            if not self.position and lines:
                # A power of 2, with which about half of the lines that there is room for are kept, or more.
                rows = size * len(lines) / len(read) / self.table.most_rows
                self.table.every = 1 << max(0, int(np.ceil(np.log2(max(1, rows)))))
            self._take(lines, len(lines) - LAST_LINES if is_end else len(lines))
            if self._is_inside or len(rest) > LONGEST_LINE:
                self.damaged += not self._is_inside
                self._is_inside, rest = True, b""
            done = len(read) - len(rest)
            self.position += done
            self._checked = (self._checked + read[max(0, done - CHECKED_BYTES) : done])[-CHECKED_BYTES:]
        self.waiting = len(rest)

    def _take(self, lines: list[bytes], recent: int) -> None:
        """Parse evaluations, lines that are kept, and the `recent` ones."""
        table = self.table
        for index, line in enumerate(lines):
            is_evaluation = EVALUATION in line
            if is_evaluation or index >= recent or self._number % table.every == 0:
                row = _row(line)
                is_evaluation = is_evaluation and row is not None and any(map(_is_evaluation, row[1]))
                if row is not None:
                    table.add(self._number, *row, is_evaluation=is_evaluation)
                elif line.strip():
                    self.damaged += 1
            self._number += not is_evaluation


def _row(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Returns the step and the finite numbers of a line; None if it is damaged."""
    try:
        row = row_of(line)
    except RecursionError:
        return None
    if row is None or not 0 <= row["step"] <= LARGEST_STEP:
        return None
    return row.pop("step"), {name: float(value) for name, value in row.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_VALUE


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval/")
