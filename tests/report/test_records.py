"""Reading run folders: whole, damaged, unfinished, of earlier versions, and very long ones."""

import json
import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.report.metrics_file import MetricsTable
from gputrain.report.records import RunReader, RunRecord, RunStatus, read_run
from tests.report.runs import KINDS, end_row, make_run, metric_rows, start_row, write_rows
from tests.tables import each_row
from tests.waiting import has_ended, wait_until

PREVIOUS = Path(__file__).parents[1] / "data" / "previous_version"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one", "vae")


def test_a_whole_run(run):
    record = read_run(run)
    assert (record.name, record.kind, record.notes) == ("one", "vae", [])
    assert record.settings["batch_size"] == 4
    steps, values = zip(*record.series("eval/psnr_db"), strict=True)
    assert steps == (0, 10, 20, 30, 40)
    assert values == pytest.approx((3, 3.2, 3.1, 3.066667, 3.05), abs=1e-5)
    assert (record.last_step, record.planned_steps) == (40, 40)
    assert record.status == RunStatus("finished")


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_run_of_an_earlier_version(kind):
    record = read_run(PREVIOUS / kind / "run")
    assert record.kind == kind
    assert record.last_step == 2
    assert record.status.state == "unknown"
    assert "history.jsonl" in record.status.detail


def test_folders_without_a_run_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for name, message in (("none", "no such folder"), ("file", "is a file"), (".", "holds no run")):
        with pytest.raises(UserError, match=message):
            read_run(tmp_path / name)


def test_damaged_lines_are_skipped_and_counted(tmp_path):
    lines = [b'{"step": 1, "seconds": 1, "loss/a": 5.0}', b'{"step": 2, "loss', b"\xff\xfe\x00", b"[1]", b"",
             b'{"step": 3, "loss/a": NaN, "loss/b": null, "loss/c": true, "loss/d": "x", "loss/e": 1}']  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    record = read_run(tmp_path)
    assert {name: record.series(name) for name in record.names} == {
        "seconds": [(1, 1)], "loss/a": [(1, 5.0)], "loss/e": [(3, 1)],
    }  # fmt: skip
    assert record.notes[-1] == "3 damaged lines of metrics.jsonl skipped"


def test_damaged_files_are_noted_and_the_rest_is_read(run, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(run, folder)
    (folder / "plan.json").write_text("[1, 2")
    (folder / "config.yaml").write_text("a: [")
    (folder / "history.jsonl").write_text('nothing\n{"event": "start"}\n{"event": "other"}\n')
    record = read_run(folder)
    assert [note.split(" ", 2)[0] for note in record.notes[:2]] == ["config.yaml", "plan.json"]
    assert record.notes[2] == "2 damaged lines of history.jsonl skipped"
    assert record.kind == "vae"  # By its metrics.
    assert record.status.state == "unknown"


def test_all_evaluations_of_a_long_run_are_kept(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", metric_rows("asr", 2009))
    reader = RunReader(tmp_path, most_rows=50)
    reader.refresh()
    record = reader.record
    assert [step for step, _ in record.series("eval/cer")] == list(range(0, 2001, 10))
    steps = [step for step, _ in record.series("loss/model/asr")]
    assert 25 < len(steps) <= 51
    assert steps[-1] == 2009
    assert "one line in 64 and every evaluation" in record.notes[-1]


def test_the_time_of_all_attempts_is_added_up():
    seconds = [1.0, 20.0, 30.0, 0.5, 12.0, 3.0]
    table = MetricsTable()
    for number, value in enumerate(seconds):
        table.add(number, number, {"seconds": value})
    assert RunRecord(Path(), "", "", metrics=table).seconds == 30 + 12 + 3


NOW, HERE = datetime.now(timezone.utc).isoformat(timespec="seconds"), platform.node()


@each_row(
    ([start_row(0), end_row(7, "failed", "no memory")], RunStatus("failed", "no memory")),
    ([start_row(0), end_row(7, "stopped"), start_row(7)], RunStatus("unknown", "did not report its end")),
    ([start_row(0, host=HERE, process=os.getpid(), time=NOW)], RunStatus("running", f"process {os.getpid()} on this")),
    # A process that began long after this start has the number of one that has ended.
    ([start_row(0, host=HERE, process=os.getpid())], RunStatus("unknown", "did not report its end")),
    ([start_row(0, host=HERE, process=2**22 + 1, time=NOW)], RunStatus("unknown", "did not report its end")),
)
def test_how_a_run_ended(rows, state):
    status = RunRecord(Path(), "", "", history=json.loads(json.dumps(rows))).status
    assert status.state == state.state
    assert state.detail in status.detail


def test_a_killed_process_that_its_parent_has_not_noticed_does_not_run():
    with subprocess.Popen(["sleep", "60"]) as process:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = RunRecord(Path(), "", "", history=[start_row(0, host=HERE, process=process.pid, time=now)])
        assert record.status.state == "running"
        process.kill()
        wait_until(lambda: has_ended(process.pid), "the end of the process")
        assert record.status.state == "unknown"
