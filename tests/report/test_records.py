"""Reading run folders: whole, damaged, unfinished, and very long ones."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gputrain.errors import UserError
from gputrain.report import records
from gputrain.report.metrics_file import MetricsTable
from gputrain.report.records import RunReader, RunRecord, RunStatus, read_run
from tests.report.runs import end_row, make_run, metric_rows, start_row, time_now, write_rows
from tests.tables import each_row
from tests.waiting import has_ended, wait_until


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


def test_a_run_says_what_its_first_step_waits_for():
    rows = [start_row(0, host=HERE, process=os.getpid(), time=NOW)]
    status = RunRecord(Path(), "", "", history=rows, plan={"compiling": "compiling: 12 of 42 graphs done"}).status
    assert status == RunStatus("running", f"process {os.getpid()} on this machine; compiling: 12 of 42 graphs done")


def test_a_killed_process_that_its_parent_has_not_noticed_does_not_run():
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        record = RunRecord(Path(), "", "", history=[start_row(0, host=HERE, process=process.pid, time=time_now())])
        wait_until(lambda: record.status.state == "running", "the start of the process")
        process.kill()
        wait_until(lambda: has_ended(process.pid), "the end of the process")
        assert record.status.state == "unknown"


def test_another_program_is_not_taken_for_a_training():
    """As outside of a container, where any program has the number of the training."""
    with subprocess.Popen(["sleep", "60"]) as process:
        record = RunRecord(Path(), "", "", history=[start_row(0, host=HERE, process=process.pid, time=time_now())])
        wait_until(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "the start of the program")
        assert record.status.state == "unknown"
        process.kill()


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
    assert record.versions == {"settings": 1, "plan": 1, "metrics": 1, "history": 1, "samples": 1, "notes": 0}
    changes = [
        ("metrics", lambda: add_line(folder, "metrics.jsonl", {"step": 41, "loss/a": 1.0})),
        ("history", lambda: add_line(folder, "history.jsonl", start_row(40))),
        ("settings", lambda: (folder / "config.yaml").write_text("kind: asr\nseed: 3\n")),
        ("plan", lambda: (folder / "plan.json").write_text('{"micro_batch": {"a": 2}}')),
        ("notes", lambda: (folder / "notes.md").write_text("\ufefftoo <b>large</b> a rate" + "!" * 30_000)),
        ("samples", lambda: (folder / "samples" / "new_step_00000041.txt").write_text("")),
        ("plan", lambda: (folder / "plan.json").unlink()),
        ("metrics", lambda: (folder / "metrics.jsonl").unlink()),
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


def test_a_run_of_another_machine_runs_while_its_metrics_keep_coming(live):
    folder = live.record.folder
    write_rows(folder / "history.jsonl", [start_row(0)])
    first_look = RunReader(folder)
    first_look.refresh()
    assert first_look.record.status.state == "unknown"  # The files are new, and by the times in them they are a copy.
    write_rows(folder / "history.jsonl", [start_row(0, time=time_now())])
    later, now = RunReader(folder), time.time()
    later.refresh()
    assert later.record.status == RunStatus("running", "on elsewhere")
    for reader, seconds in ((first_look, 45.0), (later, 140.0)):
        reader.refresh()
        add_line(folder, "metrics.jsonl", {"step": int(seconds), "seconds": seconds, "loss/a": 1.0})
        reader.refresh()
        assert reader.record.status == RunStatus("running", "on elsewhere")
        assert now <= reader.record.changed_at <= time.time()
    for age, state in ((100, "running"), (270, "running"), (300, "unknown")):
        later.record.news_at = time.monotonic() - age
        assert later.record.status.state == state  # The longest time between two lines was 95 s.
    later.record.changed_at = time.time() - 7050
    assert later.record.status.detail.endswith("did not report its end; the last news came 1 h 57 min ago")
    first_look.record.news_at = time.monotonic() - 130
    assert first_look.record.status.state == "unknown"


def test_a_run_in_a_container_runs_while_its_metrics_keep_coming(live):
    """The number of its process is another one outside, where the machine has the same name."""
    write_rows(live.record.folder / "history.jsonl", [start_row(0, host=HERE, process=2**22 + 1, time=NOW)])
    live.refresh()
    states = []
    for step in (50, 60, 70):
        states.append(live.record.status.state)
        add_line(live.record.folder, "metrics.jsonl", {"step": step, "seconds": float(step)})
        live.refresh()
    assert states == ["unknown", "unknown", "running"]  # One line may be the last one of a process that was killed.
    add_line(live.record.folder, "history.jsonl", start_row(70, host=HERE, process=2**22 + 1, time=NOW))
    live.refresh()
    assert live.record.status.state == "unknown"


@each_row(
    ([start_row(0, last_step=140, time=NOW)], 100 * 1.0),
    ([start_row(0, last_step=40, time=NOW)], 0.0),
    ([start_row(0, last_step=None, time=NOW)], None),
    ([start_row(0, last_step=140, time=NOW), end_row(40, "stopped")], None),
    ([start_row(0), start_row(40, last_step=140, time=NOW)], None),  # No line of this attempt yet.
    ([start_row(0, last_step=140, host=HERE, process=2**22 + 1, time=NOW)], None),
)
def test_the_time_that_is_left_is_known_of_a_run_that_goes_on(history, expected):
    table = MetricsTable()
    for number, row in enumerate(metric_rows("vae", 40)):
        table.add(number, row["step"], {name: value for name, value in row.items() if name != "step"})
    record = RunRecord(Path(), "", "", metrics=table, history=history, news_at=time.monotonic())
    assert record.seconds_left == expected


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
