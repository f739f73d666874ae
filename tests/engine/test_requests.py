"""Requests in the run folder: a training saves, stops or cools down, and whatever else lies there changes nothing."""

import dataclasses
import json
import os
import re
import threading

import pytest

from gputrain.engine.callbacks.requests import REQUEST, Inbox, send
from gputrain.engine.schedule import RunProgress, Schedule, StepSchedule
from gputrain.engine.stop import COMMAND_CLOCK
from gputrain.errors import Stopped, UserError
from gputrain.files import replace_file
from tests.engine.asking import Asking, note_requests
from tests.engine.test_deadline import steps_of
from tests.engine.test_finish_by import clock, rates, run  # noqa: F401 (a fixture)
from tests.engine.test_history import rows as history
from tests.engine.test_leaving import saved_step
from tests.engine.test_run import assert_equal
from tests.tables import check_rows, each_row
from tests.toy import BATCH, batches
from tests.waiting import HANG_SECONDS, wait_until

HELD = {"learning_rate_schedule": "constant", "num_epochs": 10}  # Of 4 steps each.


@pytest.fixture(autouse=True)
def _requests_are_noted(monkeypatch) -> None:
    note_requests(monkeypatch)
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)  # No command has begun, whatever ran before in this process.


def events(folder) -> list[dict]:
    return json.loads((folder / "plan.json").read_text())["events"]


def test_a_request_to_stop_ends_with_everything_saved_and_the_run_goes_on_exactly(tmp_path, caplog):
    asked = Asking(tmp_path / "cut", {8: ("stop",)})
    with pytest.raises(Stopped, match="asked to stop from gputrain watch after step 8; everything is saved") as caught:
        run(tmp_path / "cut", asked, max_steps=12)
    assert "--resume-from auto" in caught.value.hint
    assert history(tmp_path / "cut")[-1]["message"] == caught.value.message
    assert caplog.text.count("asked to stop from gputrain watch: finishing the step and saving") == 1
    assert not (tmp_path / "cut" / REQUEST).exists()
    assert_equal(run(tmp_path / "straight", max_steps=12), run(tmp_path / "cut", max_steps=12, resume_from="auto"))


def test_a_request_to_stop_ends_a_wait_for_data_that_hangs(tmp_path):
    def hanging(first: int, last: int):
        yield from batches(first, min(last, 8))
        send(tmp_path, "stop")
        threading.Event().wait(HANG_SECONDS)

    with pytest.raises(Stopped, match="after step 8; everything is saved"):
        run(tmp_path, hanging, max_steps=12)
    assert saved_step(tmp_path) == 8


def test_a_request_to_save_saves_after_the_step_and_changes_nothing(tmp_path, caplog):
    caplog.set_level("INFO")

    def source(first: int, last: int):
        for step, x_BD in enumerate(Asking(tmp_path / "a", {5: ("save",)})(first, last), start=first):
            if step == 7:
                wait_until((tmp_path / "a" / "checkpoint_last.pt").exists, "a checkpoint")
                assert saved_step(tmp_path / "a") == 6
            yield x_BD

    (tmp_path / "a").mkdir()
    assert_equal(run(tmp_path / "straight", max_steps=12), run(tmp_path / "a", source, max_steps=12))
    assert "asked from gputrain watch: checkpoint_last.pt is written after this step" in caplog.text


def test_a_cool_down_that_is_asked_for_is_that_of_a_checkpoint_and_can_be_killed(tmp_path, caplog):
    """Asked for in step 12, over 8 steps: the run is the one that --cooldown 8 makes of its checkpoint of step 12."""
    caplog.set_level("INFO")
    expected = run(tmp_path / "a", Asking(tmp_path / "a", {11: ("cooldown", 8)}), keep_checkpoints=1, **HELD)
    assert rates(tmp_path / "a")[4:] == pytest.approx([0.01] * 8 + [0.01 * left / 8 for left in range(8, 0, -1)])
    message = "cool-down as asked from gputrain watch: the learning rate falls from 0.01 to 0 until step 20"
    assert caplog.text.count(message) == 1
    assert events(tmp_path / "a") == [{"step": 12, "check": "cooldown", "message": message, "last_step": 20}]
    assert history(tmp_path / "a")[-1]["outcome"] == "finished"
    kept = str(tmp_path / "a" / "checkpoint_step_12.pt")
    assert_equal(expected, run(tmp_path / "option", resume_from=kept, cooldown=8, **HELD))
    assert rates(tmp_path / "a")[12:] == rates(tmp_path / "option")

    def failing(first: int, last: int):
        yield from Asking(tmp_path / "b", {11: ("cooldown", 8)})(first, 15)
        raise UserError("the machine was taken away")

    with pytest.raises(UserError, match="taken away"):
        run(tmp_path / "b", failing, **HELD)
    assert_equal(expected, run(tmp_path / "b", resume_from="auto", **HELD))
    assert saved_step(tmp_path / "b") == 20


COSINE = {"learning_rate_schedule": "cosine", "num_steps": 100, "num_epochs": 0}
COOLED = {"cooldown_step": 30, "cooldown_end": 50, "cooldown_slope": 1e-4}


@each_row(
    (HELD, 0, {}, 20, 5, 25),
    (HELD, 0, {}, 20, 0, 25),  # A fifth of all steps.
    (HELD, 0, {}, 1, 0, 2),
    (HELD, 0, {}, 36, 9, 40),  # No longer than the training would be.
    (HELD, 0, {}, 40, 9, "the run ends after step 40"),
    ({**HELD, "max_steps": 22}, 0, {}, 20, 5, 25),  # It goes on when it is resumed.
    ({**HELD, "max_steps": 20}, 0, {}, 20, 5, "the run ends after step 20"),
    (HELD, 0, {}, 2, 10, 12),  # In the warm-up, from the rate that it has reached.
    (COSINE, 0, {}, 50, 10, 60),
    (COSINE, 0, {}, 95, 10, 100),
    ({**COSINE, "min_learning_rate": 0.01}, 0, {}, 50, 10, "has fallen to 0.01 already"),
    ({"finish_by": "6h"}, 0, {}, 40, 0, 50),
    ({"finish_by": "6h", "cooldown": 7}, 0, {}, 40, 0, 47),
    ({"finish_by": "6h"}, 30, COOLED, 40, 5, "the learning rate is falling already, until step 50"),
)
def test_when_a_cool_down_ends_that_is_asked_for(settings, start, progress, step, length, expected):
    settings = Schedule(**{"batch_size": BATCH, "learning_rate": 0.01, "warmup_steps": 4, **settings})
    steps = StepSchedule(settings, RunProgress(step=start, items_seen=start * BATCH, items=4 * BATCH, **progress))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            steps.end_by_request(step, length)
        return
    assert steps.end_by_request(step, length) == expected
    cooled = steps.cooled_down(step, expected)
    assert cooled.learning_rate(step) == pytest.approx(steps.learning_rate(step))
    assert (cooled.last_step, cooled.learning_rate(expected)) == (expected, steps.schedule.min_learning_rate)


@pytest.mark.parametrize("schedule", ["cosine", "tri-stage"])
def test_a_cool_down_goes_on_from_the_rate_of_any_schedule(tmp_path, schedule):
    settings = {"learning_rate_schedule": schedule, "num_epochs": 10}
    run(tmp_path / "straight", max_steps=13, **settings)
    expected = run(tmp_path / "a", Asking(tmp_path / "a", {11: ("cooldown", 4)}), **settings)
    before = rates(tmp_path / "straight")
    found = before[:12] + [before[12] * left / 4 for left in range(4, 0, -1)]
    assert rates(tmp_path / "a") == pytest.approx(found)
    kept = str(tmp_path / "a" / "checkpoint_step_12.pt")
    assert_equal(expected, run(tmp_path / "option", resume_from=kept, cooldown=4, **settings))


def test_a_cool_down_that_cannot_begin_is_said_and_the_run_goes_on(tmp_path, caplog):
    asked = Asking(tmp_path / "a", {11: ("cooldown", 8), 14: ("cooldown", 3), 15: ("save",)})
    expected = run(tmp_path / "b", Asking(tmp_path / "b", {11: ("cooldown", 8)}), **HELD)
    assert_equal(expected, run(tmp_path / "a", asked, **HELD))
    message = "no cool-down as asked from gputrain watch: the learning rate is falling already, until step 20"
    assert caplog.text.count(message) == 1
    assert events(tmp_path / "a")[1:] == [{"step": 15, "check": "cooldown", "message": message}]


def test_the_clock_shortens_a_cool_down_that_is_asked_for_and_never_lengthens_it(tmp_path, clock):  # noqa: F811
    """100 steps of 0.02 s fit into 2 s."""
    asked = {"short": (50, 20, 70, 70), "long": (50, 500, 96, 100)}
    for name, (step, length, earliest, latest) in asked.items():
        clock.now = 1000.0
        source = Asking(tmp_path / name, {step - 1: ("cooldown", length)}, steps_of(clock))
        run(tmp_path / name, source, finish_by="2s")
        assert earliest <= saved_step(tmp_path / name) <= latest
        assert clock.now <= 1002.0
        found = rates(tmp_path / name)
        assert found[4:step] == [0.01] * (step - 4)
        assert min(before - after for before, after in zip(found[step:], found[step + 1 :], strict=False)) > 0
        assert (tmp_path / name / f"checkpoint_step_{step}.pt").exists()


def other(folder, action="stop", **changes) -> list[bytes]:
    """A request to another start than the last one of the run."""
    start = {**history(folder)[-1], **changes}
    attempt = [start[name] for name in ("time", "host", "process")]
    return [json.dumps({"action": action, "steps": 0, "attempt": attempt}).encode()]


def test_what_else_lies_there_is_removed_and_changes_nothing(tmp_path, caplog):
    straight = run(tmp_path / "straight", max_steps=4)
    foreign = {
        "half": lambda path: path.write_bytes(other(path.parent)[0][:40]),
        "empty": lambda path: path.write_bytes(b""),
        "other bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "a list": lambda path: path.write_bytes(b"[1, 2]"),
        "deep": lambda path: path.write_bytes(b"[" * 4000),
        "of another program": lambda path: path.write_bytes(b'{"action": "stop"}'),
        "another action": lambda path: replace_file(path, other(path.parent, "reboot")),
        "huge": lambda path: path.write_bytes(b" " * 5000 + other(path.parent)[0]),
        "a link": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": os.mkfifo,
    }
    earlier = {
        "an earlier time": lambda path: replace_file(path, other(path.parent, time="2020-01-01T00:00:00+00:00")),
        "another host": lambda path: replace_file(path, other(path.parent, host="elsewhere")),
        "another process": lambda path: replace_file(path, other(path.parent, process=1)),
    }

    def check(name: str) -> None:
        folder, path = tmp_path / name, tmp_path / name / REQUEST
        caplog.clear()

        def source(first: int, last: int):
            for step, x_BD in enumerate(batches(first, last), start=first):
                if step == 2:
                    {**foreign, **earlier}[name](path)
                    wait_until(lambda: not os.path.lexists(path), "the end of the file")
                yield x_BD

        assert_equal(straight, run(folder, source, max_steps=4))
        assert caplog.text.count("holds no request of gputrain; the training goes on") == (name in foreign)

    check_rows([(name,) for name in (*foreign, *earlier)], check)


def test_a_file_that_cannot_be_removed_counts_once(tmp_path, caplog):
    """A folder of that name is one, and a request in a folder that this user may not change."""
    path = tmp_path / REQUEST
    path.mkdir()
    inbox = Inbox(path, ["now", "here", 1])
    assert [inbox.take(), inbox.take()] == [None, None]
    assert caplog.text.count("cannot be removed") == 1
    path.rmdir()

    class Kept(type(path)):
        def unlink(self, missing_ok: bool = False) -> None:
            raise PermissionError(13, "Permission denied")

    path.write_text(json.dumps({"action": "save", "steps": 0, "attempt": ["now", "here", 1]}))
    inbox = Inbox(Kept(path), ["now", "here", 1])
    assert [request and request.action for request in (inbox.take(), inbox.take())] == ["save", None]
    path.write_text(json.dumps({"action": "stop", "steps": 0, "attempt": ["now", "here", 1]}) + "\n")
    assert inbox.take().action == "stop"
    assert caplog.text.count("cannot be removed (Permission denied)") == 1


START = {"event": "start", "time": "2027-01-31T18:30:00+00:00", "host": "there", "process": 5}
END = {"event": "end", "step": 5, "outcome": "stopped", "message": ""}


@each_row(
    ([], "save", 0, "no training is known to run there"),
    ([START, END], "stop", 0, "no training is known to run there"),
    ([START], "cooldown", -1, "a cool-down over -1 steps"),
    ([START], "cooldown", 2**40, "a cool-down over 1099511627776 steps"),
)
def test_what_cannot_be_asked_for_is_refused(tmp_path, rows, action, steps, message):
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        send(tmp_path, action, steps)
    assert caught.value.hint
    assert not (tmp_path / REQUEST).exists()


def test_a_request_that_waits_is_not_lost_to_another(tmp_path):
    (tmp_path / "history.jsonl").write_text(json.dumps(START) + '\n{"event": "en')
    send(tmp_path, "cooldown", 50)
    with pytest.raises(UserError, match="has not seen cooldown yet"):
        send(tmp_path, "save")
    send(tmp_path, "cooldown", 60)
    inbox = Inbox(tmp_path / REQUEST, ["2027-01-31T18:30:00+00:00", "there", 5])
    assert dataclasses.astuple(inbox)[3] is False
    assert inbox.take().steps == 60
    send(tmp_path, "save")
    send(tmp_path, "stop")  # It saves, too.
    assert inbox.take().action == "stop"
    (tmp_path / REQUEST).mkdir()
    with pytest.raises(UserError, match=r"request.json cannot be written: .*irectory"):
        send(tmp_path, "save")
