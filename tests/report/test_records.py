"""Reading run folders: whole, damaged, unfinished, and very long ones."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

from gputrain.errors import UserError
from gputrain.heartbeat import Heartbeat
from gputrain.report import records
from gputrain.report.metrics_file import MetricsTable
from gputrain.report.records import RunReader, RunRecord, RunStatus, read_run
from tests.report.runs import end_row, make_run, metric_rows, start_row, time_now, write_rows
from tests.tables import each_row
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one", "vae")


def test_a_whole_run(run):
    record = read_run(run)
    assert (record.name, record.kind, record.notes) == ("one", "vae", [])
    assert record.settings["batch_size"] == 4
    steps, values = zip(*record.metrics.series("eval/psnr_db"), strict=True)
    assert steps == (0, 10, 20, 30, 40)
    assert values == pytest.approx((3, 3.2, 3.1, 3.066667, 3.05), abs=1e-5)
    assert (record.last_step, record.planned_steps) == (40, 40)
    assert record.status == RunStatus("finished")


def test_a_run_without_a_history(tmp_path):
    folder = make_run(tmp_path / "run", "vae")
    (folder / "history.jsonl").unlink()
    status = read_run(folder).status
    assert (status.state, "history.jsonl" in status.detail) == ("unknown", True)


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
    assert {name: record.metrics.series(name) for name in record.metrics.names} == {
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
    assert record.kind == ""
    assert record.status.state == "unknown"


def test_all_evaluations_of_a_long_run_are_kept(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", metric_rows("asr", 2009))
    reader = RunReader(tmp_path, most_rows=50)
    reader.refresh()
    record = reader.record
    assert [step for step, _ in record.metrics.series("eval/cer")] == list(range(0, 2001, 10))
    steps = [step for step, _ in record.metrics.series("loss/model/asr")]
    assert 25 < len(steps) <= 51
    assert steps[-1] == 2009
    assert "one line in 64 and every evaluation" in record.notes[-1]


def test_the_time_of_all_attempts_is_added_up():
    seconds = [1.0, 20.0, 30.0, 0.5, 12.0, 3.0]
    table = MetricsTable()
    for number, value in enumerate(seconds):
        table.add(number, number, {"seconds": value})
    assert RunRecord(Path(), "", "", metrics=table).seconds == 30 + 12 + 3


NOW, HERE = time_now(), platform.node()
NOBODY = 2**22 + 1  # No process has this number.


@each_row(
    ([start_row(0), end_row(7, "failed", "no memory")], None, RunStatus("failed", "no memory")),
    ([end_row(7, "stopped"), start_row(7, host=HERE, process=NOBODY)], None, RunStatus("unknown", "not report")),
    # A former version wrote no heartbeat, so that only its process and its metrics tell.
    ([start_row(0, host=HERE, process=os.getpid(), time=NOW)], None, RunStatus("running", f"process {os.getpid()} on")),
    ([start_row(0, host=HERE, process=NOBODY, time=NOW)], None, RunStatus("unknown", "killed; its last sign came")),
    ([start_row(0, host=HERE, process=2**35)], None, RunStatus("running", "process")),  # No system has such a number.
    # Killed after the last save, and started again with nothing left to do, which takes the heartbeat away.
    ([start_row(7, host=HERE, process=NOBODY, last_step=7)], None, RunStatus("finished")),
    # The heartbeat of the next attempt, which plans; and one that was left behind by a process that had told its end.
    ([end_row(7)], Heartbeat(began=NOW, phase="planning"), RunStatus("running", f"process {os.getpid()} on {HERE}")),
    ([end_row(7)], Heartbeat(began="2026-01-02T03:04:05+00:00"), RunStatus("finished")),
    ([start_row(0)], Heartbeat(host=HERE, process=NOBODY, phase="evaluating", step=7, last_step=9),
     RunStatus("unknown", "was killed in: step 7/9, evaluating; its last sign came 20")),
)  # fmt: skip
def test_how_a_run_ended(rows, beat, state):
    """The last sign of all came 60 s ago."""
    record = RunRecord(Path(), "", "", history=json.loads(json.dumps(rows)), heartbeat=beat, written_at=time.time())
    record.sign_at = time.monotonic() - 60
    assert record.status.state == state.state
    assert state.detail in record.status.detail


@each_row(
    (Heartbeat(host="elsewhere"), 119, "running"),  # A network drive may show it later.
    (Heartbeat(host="elsewhere"), 121, "unknown"),
    (Heartbeat(host=HERE), 119, "running"),  # This process is there.
    (Heartbeat(host=HERE, process=NOBODY), 9, "running"),  # The number may be that of a container.
    (Heartbeat(host=HERE, process=NOBODY), 11, "unknown"),
    (Heartbeat(host="elsewhere", process=NOBODY), 11, "running"),
    (None, 599, "running"),
    (None, 601, "unknown"),
)
def test_a_run_without_a_sign_has_ended(beat, silent_seconds, state):
    record = RunRecord(Path(), "", "", history=[start_row(0)], heartbeat=beat)
    record.sign_at = time.monotonic() - silent_seconds
    assert record.status.state == state


BEGAN = datetime(2026, 1, 2, 3, 0, tzinfo=timezone.utc)


def moment(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def beat_at(seconds: float, **others: object) -> Heartbeat:
    return Heartbeat(began=moment(0), since=moment(400), time=moment(seconds), **others)


STARTED = start_row(0, time=moment(0))


@each_row(
    # The history, the heartbeat, when the files were written, and when the last news came, in seconds.
    ([STARTED, {**end_row(7), "time": moment(700)}], None, 700, 700),
    ([STARTED, {**end_row(7), "time": moment(700)}], None, 9000, 700),  # A copy.
    ([STARTED], beat_at(410, host=HERE, process=NOBODY), 410, 410),  # It was killed.
    ([STARTED], beat_at(410, host=HERE, process=NOBODY), 9000, 410),
    ([STARTED], None, 9000, 40),  # So long are the steps in its metrics.
    ([start_row(0, time=moment(9000))], None, 800, 800),  # By a clock that is fast.
    ([], None, 800, 800),
    ([STARTED], beat_at(1e9), time.time() - BEGAN.timestamp(), 400),  # It runs, and came to its step then.
)
def test_the_last_news_are_as_old_as_the_files_say(run, tmp_path_factory, history, beat, written, news):
    folder = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(run, folder)
    write_rows(folder / "history.jsonl", history) if history else (folder / "history.jsonl").unlink()
    if beat:
        (folder / "heartbeat.json").write_text(json.dumps(asdict(beat)))
    for path in folder.iterdir():
        os.utime(path, (BEGAN.timestamp() + written,) * 2)
    assert read_run(folder).changed_at - BEGAN.timestamp() == pytest.approx(news, abs=0.01)


def test_a_heartbeat_tells_of_a_run_before_its_first_step_and_ends_with_its_process(tmp_path):
    """The process is killed, and before that stopped, in which it must not look alive."""
    program = (
        "import sys, time, pathlib; from gputrain import heartbeat\n"
        "heartbeat.BEAT_SECONDS, beat = 0.01, heartbeat.Heartbeat('vae')\n"
        "with beat.beating(pathlib.Path(sys.argv[1])), beat.doing('planning the training'):\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path]) as process:
        reader = RunReader(tmp_path)
        record = reader.record

        def is_planning() -> bool:
            reader.refresh()
            return record.beat is not None and record.beat.text == "planning the training"

        wait_until(is_planning, "the heartbeat")
        assert record.status == RunStatus("running", f"process {process.pid} on {HERE}")
        assert (record.kind, record.notes, record.last_step, record.planned_steps) == ("vae", [], 0, 0)
        first = record.sign_at
        wait_until(lambda: is_planning() and record.sign_at > first, "the next one")
        process.kill()
    last = record.sign_at
    for _ in range(3):
        reader.refresh()
    assert (record.status.state, record.sign_at) == ("running", last)
    record.sign_at -= 11
    assert "was killed in: planning the training" in record.status.detail


def test_an_end_takes_the_heartbeat_away_and_a_full_disk_is_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("gputrain.heartbeat.BEAT_SECONDS", 0.001)
    with Heartbeat().beating(tmp_path):
        wait_until((tmp_path / "heartbeat.json").exists, "the heartbeat")
    assert list(tmp_path.iterdir()) == []
    written = []

    def full(*_: object, **__: object) -> None:
        written.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gputrain.heartbeat.replace_file", full)
    with Heartbeat().beating(tmp_path):
        wait_until(lambda: len(written) > 2, "three attempts")
    assert [one.getMessage().split(" ", 1)[1] for one in caplog.records] == [
        "cannot be written (No space left on device); the training goes on"
    ]


# ------------------------------------------------------------------------------------------------- while a run changes


@pytest.fixture
def live(run, tmp_path):
    """A copy of a run that may change, and a reader that has read it."""
    shutil.copytree(run, tmp_path / "live")
    reader = RunReader(tmp_path / "live")
    reader.refresh()
    return reader


def add_line(folder: Path, name: str, row: dict) -> None:
    with (folder / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_versions_tell_which_part_has_changed(live):
    folder, record = live.record.folder, live.record
    once = dict.fromkeys(("settings", "plan", "metrics", "history", "samples"), 1)
    assert record.versions == {**once, "notes": 0, "heartbeat": 0, "best": 0}
    changes = [
        ("metrics", lambda: add_line(folder, "metrics.jsonl", {"step": 41, "loss/a": 1.0})),
        ("history", lambda: add_line(folder, "history.jsonl", start_row(40))),
        ("settings", lambda: (folder / "config.yaml").write_text("kind: asr\nseed: 3\n")),
        ("plan", lambda: (folder / "plan.json").write_text('{"micro_batch": {"a": 2}}')),
        ("notes", lambda: (folder / "notes.md").write_text("\ufefftoo <b>large</b> a rate" + "!" * 30_000)),
        ("samples", lambda: (folder / "samples" / "new_step_00000041.txt").write_text("")),
        ("plan", lambda: (folder / "plan.json").unlink()),
        ("metrics", lambda: (folder / "metrics.jsonl").unlink()),
        ("heartbeat", lambda: (folder / "heartbeat.json").write_text("{}")),
        ("heartbeat", lambda: (folder / "heartbeat.json").unlink()),
        ("best", lambda: (folder / "checkpoint_best.pt").write_bytes(b"damaged")),
        ("best", lambda: torch.save({"progress": {"step": 20}}, folder / "checkpoint_best.pt")),
        ("", lambda: (folder / "checkpoint_last.pt").write_bytes(b"")),
    ]
    for part, change in changes:
        before = dict(record.versions)
        change()
        live.refresh()
        assert record.versions == {name: count + (name == part) for name, count in before.items()}, part
        live.refresh()
        assert record.versions == {name: count + (name == part) for name, count in before.items()}, part
    assert (record.kind, record.settings, record.plan, record.metrics.names) == ("asr", {"seed": 3}, {}, [])
    assert record.best_step == 20
    assert record.user_notes.startswith("too <b>large</b> a rate!!")
    assert len(record.user_notes) == 20_000
    assert record.notes == ["plan.json is missing", "metrics.jsonl is missing"]


def test_what_cannot_be_read_for_a_while_stays_as_it_was(live):
    """A plan that is half written or is a folder, settings of megabytes, and a folder that vanishes and comes back."""
    folder, record = live.record.folder, live.record
    plan, settings = dict(record.plan), dict(record.settings)
    for content, note in (('{"settings": {', "plan.json cannot be read: Expecting"), (json.dumps(plan), "")):
        (folder / "plan.json").write_text(content)
        live.refresh()
        assert (record.plan, "".join(record.notes)[:34]) == (plan, note[:34])
    (folder / "config.yaml").write_text("a: 1\n" * 1_000_000)
    (folder / "plan.json").unlink()
    (folder / "plan.json").mkdir()
    live.refresh()
    versions = dict(record.versions)
    live.refresh()
    assert (record.plan, record.settings, record.versions) == (plan, settings, versions)
    assert [note.split(": ")[1] for note in record.notes] == ["longer than 1 MB", "Is a directory"]
    folder.rename(folder.with_name("away"))
    live.refresh()
    assert (record.is_gone, record.status.state, record.last_step) == (True, "unknown", 40)
    folder.with_name("away").rename(folder)
    live.refresh()
    assert (record.is_gone, record.status.state, record.versions) == (False, "finished", versions)


def test_a_half_line_is_damage_unless_it_is_still_being_written(live):
    with (live.record.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss')
    live.refresh()
    assert live.record.notes == ["1 damaged line of metrics.jsonl skipped"]
    add_line(live.record.folder, "history.jsonl", start_row(40, host=HERE, process=os.getpid(), time=NOW))
    live.refresh()
    assert (live.record.status.state, live.record.notes) == ("running", [])


def test_files_that_wait_or_lead_out_of_the_folder_are_not_opened(live, tmp_path):
    folder, record = live.record.folder, live.record
    settings = dict(record.settings)
    (tmp_path / "secret").write_text("password: secret")
    for name in ("notes.md", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "secret")
    (folder / "plan.json").rename(folder / "the plan")
    (folder / "plan.json").symlink_to("the plan")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    live.refresh()
    assert record.notes == [
        "config.yaml cannot be read: it is a link out of the folder", "metrics.jsonl cannot be read: not a file",
        "notes.md cannot be read: it is a link out of the folder",
    ]  # fmt: skip
    assert (record.settings, record.user_notes, record.last_step) == (settings, "", 40)
    (folder / "plan.json").unlink()
    assert read_run(folder).settings == {"password": "secret"}  # Who asks for this report may read the file.


def test_what_changes_while_it_is_followed_is_a_sign_whatever_the_clocks_say(live):
    """The clock of the other machine is slow. What has changed over a night in which nobody looked is as
    old as it says."""
    folder = live.record.folder
    write_rows(folder / "history.jsonl", [STARTED])
    reader, states = RunReader(folder), []
    for written, pause in ((400, 0), (402, 0), (404, 0), (406, 3600)):
        (folder / "heartbeat.json").write_text(json.dumps(asdict(beat_at(written, host="elsewhere"))))
        reader._read_at -= pause
        reader.refresh()
        states.append(reader.record.status.state)
    assert states == ["unknown", "running", "running", "unknown"]


@each_row(
    ('{"step": -1}', "not a heartbeat"),
    ('{"last_step": 1e9}', "the file: last_step is"),
    ('{"seconds_left": -5.0}', "not a heartbeat"),
    ('{"seconds_left": Infinity}', "not a heartbeat"),
    (f'{{"phase": "{"a" * 201}"}}', "not a heartbeat"),
    ('{"phase": ["a"]}', "the file: phase is"),
    ("[]", "not a mapping"),
)
def test_a_damaged_heartbeat_is_noted(run, tmp_path_factory, content, fault):
    folder = tmp_path_factory.mktemp("runs") / "run"
    shutil.copytree(run, folder)
    (folder / "heartbeat.json").write_text(content)
    record = read_run(folder)
    assert (record.beat, record.status.state) == (None, "finished")
    assert record.notes[0].startswith(f"heartbeat.json cannot be read: {fault}")


def test_a_heartbeat_tells_step_and_end_between_two_lines_of_metrics(run):
    record = read_run(run)
    record.history = [start_row(0, last_step=1400)]
    record.heartbeat = Heartbeat(step=47, last_step=60)
    assert (record.last_step, record.planned_steps) == (47, 60)
    record.heartbeat = None
    assert (record.last_step, record.planned_steps) == (40, 1400)


def test_a_cool_down_gives_a_run_another_end(run):
    record, events = read_run(run), [{"step": 3, "check": "cooldown", "message": "falls", "last_step": 60}]
    record.plan = {"events": [*events, {"step": 9, "check": "rise"}, {"step": 9, "last_step": "x"}, None]}
    for history, end in (([], 60), ([start_row(0)], 60), ([start_row(0), start_row(20)], 40)):
        record.history = history
        assert record.planned_steps == end


def test_the_time_of_a_file_is_no_later_than_now(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", metric_rows("vae", 3))
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    assert read_run(tmp_path).changed_at == 1e9
    os.utime(tmp_path / "metrics.jsonl", (1e10, 1e10))  # By the clock of a machine that is wrong.
    assert read_run(tmp_path).changed_at <= time.time()


def test_samples_count_as_changed_again_when_they_are_complete(live, monkeypatch):
    """A file appears before it is written, and its folder does not change after that."""
    monkeypatch.setattr(records, "SETTLING_SECONDS", 0.0)
    live.refresh()
    (live.record.folder / "samples" / "new_step_00000041.txt").write_text("")
    counts = []
    for _ in range(4):
        counts.append(live.record.versions["samples"])
        live.refresh()
    assert counts == [1, 2, 3, 3]


def test_settings_are_read_without_passwords(tmp_path):
    (tmp_path / "config.yaml").write_text("kind: vae\ninit_from: https://ann:secret@a.b/c.pt?token=secret\n")
    assert records._read_settings(tmp_path / "config.yaml") == {"kind": "vae", "init_from": "https://a.b/c.pt"}
