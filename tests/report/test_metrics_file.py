"""Reading metrics while a training appends to them, truncates them and replaces them."""

import json
import os
import random
from pathlib import Path

import pytest

from gputrain.report.metrics_file import MetricsFile
from tests.report.runs import metric_rows, write_rows
from tests.tables import each_row


def line(step: int, seconds: float | None = None, **values: float) -> bytes:
    seconds = float(step) if seconds is None else seconds
    return (json.dumps({"step": step, "epoch": 0, "seconds": seconds, "loss/a": step / 8, **values}) + "\n").encode()


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def facts(file: MetricsFile) -> dict[str, object]:
    """What is known of a file, to be compared with what a fresh reader knows."""
    table = file.table
    series = {name: table.series(name) for name in table.names}
    return {
        "series": series, "latest": table.latest, "damaged": file.damaged, "every": table.every, "last": table.last,
        "seconds": (table.seconds_before, table.attempt_seconds),
    }  # fmt: skip


def fresh(path: Path, most_rows: int = 20_000) -> dict[str, object]:
    file = MetricsFile(str(path), most_rows)
    file.read()
    return facts(file)


def test_any_growth_reads_as_the_whole_file_does(tmp_path):
    """Pieces of any length, cut anywhere in lines, among them damaged, blank and half ones."""
    draws, path = random.Random(0), tmp_path / "metrics.jsonl"
    lines = [line(step, **({"eval/x": step * 2.0} if step % 7 == 0 else {})) for step in range(1, 200)]
    lines[20:20] = [b"{\n", b"\n", b"[" * 9000 + b"\n", b"\xff\xfe\n", line(20)[:-9] + b"\n"]
    content, at = b"".join(lines), 0
    path.write_bytes(b"")
    file = MetricsFile(str(path))
    while at < len(content):
        size = draws.choice([1, 3, 70, 500, 3000])
        append(path, content[at : at + size])
        at += size
        before = facts(file)
        assert file.read() == (facts(file) != before)
    assert facts(file) == fresh(path)
    assert file.damaged == 4
    assert not file.read()


def test_a_half_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2)[:30])
    file = MetricsFile(str(path))
    file.read()
    assert (file.table.last_step, file.damaged, file.waiting) == (1, 0, 30)
    append(path, line(2)[30:])
    assert file.read()
    assert (file.table.last_step, file.damaged, file.waiting) == (2, 0, 0)
    append(path, line(3)[:30])
    file.read()
    append(path, b"\n" + line(4))  # As `append_line` completes what a killed process has left.
    file.read()
    assert (file.table.last_step, file.damaged, file.waiting) == (4, 1, 0)


FOUR_LINES = b"".join(line(step, step + 0.5) for step in range(1, 5))


def truncated(path: Path, content: bytes) -> None:
    os.truncate(path, len(FOUR_LINES))
    append(path, content)


def replaced(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(FOUR_LINES + content)
    os.replace(other, path)


@pytest.mark.parametrize("change", [truncated, replaced])
@pytest.mark.parametrize("more", [0, 5, 20, 200])
def test_what_a_resumed_training_removes_is_forgotten(change, more, tmp_path):
    """Also if the file has its former size or a larger one, by lines that differ in their times alone."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(FOUR_LINES + b"".join(line(step, step + 0.5) for step in range(5, 10)))
    file = MetricsFile(str(path))
    file.read()
    change(path, b"".join(line(step, step + 0.7) for step in range(5, 5 + more)))
    assert file.read()
    assert facts(file) == fresh(path)
    assert file.table.last_step == 4 + more


def test_a_file_that_was_copied_again_is_not_read_again(tmp_path):
    """As rsync does, which puts a longer copy in the place of a file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step) for step in range(1, 300)))
    file = MetricsFile(str(path))
    file.read()
    table = file.table
    replaced_by = tmp_path / "copy"
    replaced_by.write_bytes(path.read_bytes() + line(300))
    os.replace(replaced_by, path)
    assert file.read()
    assert file.table is table
    assert table.last_step == 300


@each_row((1, 50), (7, 50), (3000, 50), (3000, 1), (100, 100))
def test_the_rows_that_are_kept_are_spread_evenly(rows, most):
    """However the rows come; values are those of their steps, and the last one is always there."""
    file = MetricsFile("", most)
    for number in range(rows):
        file.table.add(number, number, {"seconds": float(number), "loss/a": number / 8})
    points = file.table.series("loss/a")
    every = file.table.every
    assert every == 1 << max(0, (-(-rows // most) - 1)).bit_length()
    assert points == [(step, step / 8) for step in sorted({*range(0, rows, every), rows - 1})]


def test_evaluations_at_every_line_and_without_numbers_are_read(tmp_path):
    rows = [row | {"eval/x": None} for row in metric_rows("asr", 300)] + [{"step": 300, "eval/x": 2.0}]
    write_rows(tmp_path / "metrics.jsonl", rows)
    file = MetricsFile(str(tmp_path / "metrics.jsonl"), most_rows=20)
    file.read()
    assert file.table.series("eval/x") == [(300, 2.0)]
    assert 5 < len(file.table.series("loss/model/asr")) <= 21
