"""--finish-by and --cooldown: a held learning rate falls in a line, and the training ends by the clock or so many steps
after a checkpoint. Killed and resumed, it is bit for bit the undisturbed one."""

import dataclasses
import json
import re
import time
from datetime import datetime, timedelta, timezone

import pytest

from gputrain.engine import saving, stop
from gputrain.engine.callbacks import clock as clock_callback
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import RunProgress, Schedule, StepSchedule, check_finish, steps_of_stage
from gputrain.engine.stop import COMMAND_CLOCK, Deadline, finish_moment, seconds_to_finish
from gputrain.errors import UserError
from gputrain.session import with_finish_moment
from gputrain.vae.config import TrainVae
from tests.engine.test_deadline import steps_of
from tests.engine.test_leaving import saved_step
from tests.engine.test_run import assert_equal, rows_of
from tests.tables import each_row, slow
from tests.toy import BATCH, ToyRecipe, batches, quiet, train_toy, weights
from tests.waiting import Clock


@pytest.fixture(autouse=True)
def _command_begins_now(monkeypatch) -> None:
    """No command has begun, whatever ran before in this process."""
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the run, on which starting and saving take no time: that of a thread that saves while the clock is
    set forward is not reserved."""
    for name in ("EXIT_SECONDS", "SAVE_MARGIN"):
        monkeypatch.setattr(stop, name, 0.0)
    return Clock(monkeypatch, stop, clock_callback, saving)


def schedule(**others) -> Schedule:
    return Schedule(**{"batch_size": BATCH, "learning_rate": 0.01, "warmup_steps": 4, **others})


def run(folder, source=batches, **others):
    saving_of = {name: others.pop(name) for name in ("resume_from", "max_time", "keep_checkpoints") if name in others}
    recipe = ToyRecipe(schedule(**others), adversarial_from=3)
    train_toy(recipe, quiet(folder, log_every_steps=1, **saving_of), source)
    return weights(recipe)


def rates(folder) -> list[float]:
    return [row["learning_rate"] for row in rows_of(folder) if "learning_rate" in row]


def test_times_of_the_day_are_the_next_ones_and_durations_count_from_the_start_of_the_command(monkeypatch):
    assert seconds_to_finish("3h50m") == 13800
    now = datetime.now().astimezone()
    soon, earlier = now + timedelta(minutes=90), now - timedelta(minutes=90)
    assert seconds_to_finish(f"{soon:%H:%M}") == pytest.approx(5400, abs=70)
    assert seconds_to_finish(f"{earlier:%H:%M}") == pytest.approx(86400 - 5400, abs=3700)  # An hour of summer time.
    for form in ("%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:00+00:00"):
        moment = soon.astimezone(timezone.utc) if "+" in form else soon
        assert seconds_to_finish(format(moment, form)) == pytest.approx(5400, abs=70)
    assert seconds_to_finish(f"{earlier:%Y-%m-%dT%H:%M}") == pytest.approx(-5400, abs=70)
    monkeypatch.setattr(COMMAND_CLOCK, "began", stop.time.monotonic() - 600)
    assert seconds_to_finish(f"{soon:%Y-%m-%dT%H:%M}") == pytest.approx(6000, abs=70)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="Windows has one time zone for a process")
def test_a_time_of_the_day_after_the_end_of_summer_time_is_that_of_the_clock_on_the_wall(monkeypatch):
    """In the night of 31 October 2027, 8 hours of Berlin's clock take 9."""

    class Evening(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2027, 10, 31, 0, 0, tzinfo=tz)

    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        monkeypatch.setattr(stop, "datetime", Evening)
        assert seconds_to_finish("08:00") == seconds_to_finish("2027-10-31T08:00") == 9 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_time_of_the_day_keeps_its_day_when_the_run_is_resumed(monkeypatch, tmp_path):
    """Also by the same command, after the time; another time, and a checkpoint that is named, are a new end."""
    soon, later = (datetime.now().astimezone().replace(microsecond=0) + timedelta(hours=n) for n in (1, 2))
    stored = finish_moment("3600s")
    assert abs(datetime.fromisoformat(stored) - soon) <= timedelta(seconds=2)
    assert finish_moment(stored) == finish_moment(stored, stored) == stored
    settings = TrainVae(schedule=Schedule(finish_by=f"{later:%H:%M}"))
    run = Run(tmp_path, quiet(tmp_path), {}, "")
    moment = with_finish_moment(settings, run).schedule.finish_by
    assert moment == f"{later.replace(second=0).isoformat()}"
    past = (later - timedelta(days=1)).replace(second=0).isoformat()
    run = dataclasses.replace(run, before={"finish_by": past})
    resumed = with_finish_moment(settings, run)
    assert resumed.schedule.finish_by == past
    with pytest.raises(UserError, match=re.escape(f"finish_by {past} is past")) as error:
        check_finish(resumed.schedule)
    seconds_to_finish(re.search(r"such as (\S+),", error.value.hint)[1])
    run = dataclasses.replace(run, saving=quiet(tmp_path, resume_from="checkpoint_step_9.pt"))
    assert with_finish_moment(settings, run).schedule.finish_by == moment


@each_row(
    "", "6", "6 h", "25:00", "18:60", "18.30", "2027-13-01T10:00", "2027-01-31", "tomorrow", "0h", "-6h", "1000000d",
    "9" * 5000 + "h",
)  # fmt: skip
def test_what_is_no_time_is_refused_with_examples(text):
    with pytest.raises(UserError, match=r"finish_by is .*, expected a duration such as 6h or 3h50m, or a time such as"):
        seconds_to_finish(text)


@each_row(
    ({"num_epochs": 50}, "num_epochs 50 and finish_by 6h both end the training"),
    ({"num_steps": 500}, "num_steps 500 and finish_by 6h both end the training"),
    ({"learning_rate_schedule": "tri-stage"}, "learning_rate_schedule tri-stage has no effect with finish_by"),
    ({"gamma": 0.9, "learning_rate_schedule": "constant"}, "gamma 0.9 has no effect"),
    ({"finish_by": "soon"}, "finish_by is 'soon'"),
)
def test_settings_without_effect_beside_the_clock_are_refused(others, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Schedule(**{"finish_by": "6h", **others})


def test_what_a_file_says_of_the_end_gives_way_to_the_clock_by_a_flag():
    for value, flag in (("num_steps", "--num-steps 0"), ("num_epochs", "--num-epochs 0")):
        with pytest.raises(UserError) as error:
            Schedule(finish_by="6h", **{value: 500})
        assert flag in error.value.hint
        assert Schedule(finish_by="6h", **{value: 0}).rate_schedule == "constant"
    with pytest.raises(UserError) as error:
        Schedule(finish_by="6h", learning_rate_schedule="exponential")
    assert "--learning-rate-schedule constant" in error.value.hint
    assert Schedule(finish_by="6h", learning_rate_schedule="constant").length_text == "--finish-by 6h"


def test_a_past_time_is_refused(monkeypatch):
    check_finish(Schedule(finish_by="6h"))
    past, held = Schedule(finish_by="2020-01-31T18:30"), RunProgress(step=9, items=32)
    for saved in (None, held):
        with pytest.raises(UserError, match="finish_by 2020-01-31T18:30 is past"):
            check_finish(past, saved)
    check_finish(past, dataclasses.replace(held, cooldown_step=8, cooldown_end=12))
    check_finish(past, dataclasses.replace(held, finished=True))
    with pytest.raises(UserError, match="is past"):
        check_finish(past, dataclasses.replace(held, finished=True), beyond_end=True)
    monkeypatch.setattr(COMMAND_CLOCK, "began", stop.time.monotonic() - 600)
    with pytest.raises(UserError, match="finish_by 5m is past"):
        check_finish(Schedule(finish_by="5m"))


def cooldown_of(folder) -> tuple[list[float], int]:
    """Returns the learning rates of a run, and the number of steps before they fall."""
    found = rates(folder)
    return found, next(step for step, rate in enumerate(found) if step > 4 and rate < 0.01) - 1


def test_a_run_holds_its_rate_and_has_lowered_it_when_the_time_has_come(tmp_path, clock):
    """100 steps of 0.02 s fit into 2 s. The cool-down is a fifth of them. The checkpoint at its beginning is kept: from
    it the run goes on at the full rate, or cools down over another number of steps."""
    run(tmp_path, steps_of(clock), finish_by="2s", keep_checkpoints=1)
    (found, begin), steps = cooldown_of(tmp_path), saved_step(tmp_path)
    assert 97 <= steps <= 100
    assert clock.now <= 1002.0
    assert 0.18 < (steps - begin) / steps < 0.22
    assert found[4 : begin + 1] == [0.01] * (begin - 3)
    assert found[begin:] == pytest.approx([0.01 * (steps - step) / (steps - begin) for step in range(begin, steps)])
    assert (tmp_path / f"checkpoint_step_{begin}.pt").exists()
    assert rows_of(tmp_path)[-1]["step"] == steps
    first, last = map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    assert (first["last_step"], last["outcome"]) == (None, "finished")
    kept, held = str(tmp_path / f"checkpoint_step_{begin}.pt"), {"learning_rate_schedule": "constant"}
    run(tmp_path / "on", resume_from=kept, max_steps=begin + 30, **held)
    assert rates(tmp_path / "on") == [0.01] * 30
    run(tmp_path / "cooled", resume_from=kept, cooldown=40, **held)
    assert rates(tmp_path / "cooled") == pytest.approx([0.01 * left / 40 for left in range(40, 0, -1)])


def changing(clock: Clock, at: int, seconds: float):
    """Returns a source of batches, each of 0.02 s and after `at` steps of `seconds`."""

    def source(first: int, last: int):
        for step, x_BD in enumerate(batches(first, last), start=first):
            clock.now += 0.02 if step < at else seconds
            yield x_BD

    return source


@pytest.mark.parametrize(("at", "seconds", "earliest"), [slow(120, 0.08, 3.7), (170, 0.06, 3.8), slow(170, 0.01, 3.9)])
def test_steps_that_change_their_pace_end_in_time_all_the_same(tmp_path, clock, at, seconds, earliest):
    """Within the cool-down, too, which begins after 160 steps of 0.02 s: the rate goes on falling in a line, without a
    jump, to another end."""
    run(tmp_path, changing(clock, at, seconds), finish_by="4s")
    (found, begin), steps = cooldown_of(tmp_path), saved_step(tmp_path)
    assert earliest < clock.now - 1000 <= 4.0
    falls = [a - b for a, b in zip(found[begin:], found[begin + 1 :], strict=False)]
    assert min(falls) > 0
    assert found[-1] <= 2 * falls[-1]
    assert max(falls) < 0.2 * 0.01
    assert (begin < 160) == (at < 160), (begin, steps)


@pytest.mark.parametrize(
    "again", [{"finish_by": "2020-01-31T18:30"}, *map(slow, ({"finish_by": "6h"}, {"num_epochs": 100}))]
)
def test_a_killed_cool_down_ends_as_the_undisturbed_one(tmp_path, clock, again):
    """The resumed run has a past time, another one, or none; the end that the checkpoint names stays."""
    expected = run(tmp_path / "straight", steps_of(clock), finish_by="2s")
    steps = saved_step(tmp_path / "straight")
    clock.now = 1000.0
    cut = tmp_path / "cut"

    def failing(first: int, last: int):
        yield from steps_of(clock)(first, 90)
        raise UserError("the machine was taken away")

    with pytest.raises(UserError, match="taken away"):
        run(cut, failing, finish_by="2s")
    assert saved_step(cut) == 90
    clock.now += 3600
    assert_equal(expected, run(cut, steps_of(clock), resume_from="auto", **again))
    assert saved_step(cut) == steps
    assert rates(cut) == rates(tmp_path / "straight")


def test_the_cool_down_of_a_checkpoint_ends_after_so_many_steps_and_can_be_killed(tmp_path, clock, caplog):
    """A stable run cools down from step 12. The same command with `auto` goes on in the cool-down, and has nothing to
    do after it."""
    held = {"learning_rate_schedule": "constant"}
    caplog.set_level("INFO")
    run(tmp_path / "stable", max_steps=12, **held)
    start = str(tmp_path / "stable" / "checkpoint_last.pt")
    expected = run(tmp_path / "a", resume_from=start, cooldown=8, **held)
    assert rates(tmp_path / "a") == pytest.approx([0.01 * left / 8 for left in range(8, 0, -1)])
    run(tmp_path / "b", resume_from=start, cooldown=8, max_steps=15, **held)
    assert_equal(expected, run(tmp_path / "b", resume_from="auto", cooldown=8, **held))
    assert_equal(expected, run(tmp_path / "b", resume_from="auto", **held))
    assert saved_step(tmp_path / "b") == 20
    run(tmp_path / "e", resume_from=start, cooldown=8, max_steps=15, **held)
    run(tmp_path / "f", resume_from=str(tmp_path / "e" / "checkpoint_last.pt"), cooldown=2, **held)
    assert saved_step(tmp_path / "f") == 17
    assert "nothing is left to do: the run has made its 20 steps" in caplog.text
    with pytest.raises(UserError, match="the learning rate of step 20 has fallen to 0 already"):
        run(tmp_path / "c", resume_from=str(tmp_path / "b" / "checkpoint_last.pt"), cooldown=8, **held)
    with pytest.raises(UserError, match="cooldown 8 begins at a checkpoint, and none is resumed"):
        run(tmp_path / "d", resume_from="auto", cooldown=8, **held)


def test_a_named_checkpoint_after_a_cool_down_begins_a_new_stage_at_the_full_rate():
    end = RunProgress(step=20, items_seen=640, items=32, finished=True, cooldown_step=12, cooldown_end=20)
    steps = steps_of_stage(schedule(num_epochs=5, learning_rate_schedule="constant"), end, 32, beyond_end=True)
    assert [steps.learning_rate(20 + step) for step in (0, 3, 4)] == [0.0025, 0.01, 0.01]
    assert steps.last_step == 20 + 5 * 32 // BATCH


def test_a_cosine_is_cooled_from_the_rate_that_it_has_reached():
    settings = schedule(num_steps=100, num_epochs=0, warmup_steps=0, min_learning_rate=0.001)
    before = StepSchedule(settings, RunProgress(items=32))
    at = dataclasses.replace(before.start, step=40, items_seen=320)
    steps = steps_of_stage(dataclasses.replace(settings, cooldown=10), at, 32, beyond_end=True)
    assert steps.learning_rate(40) == pytest.approx(before.learning_rate(40))
    assert steps.learning_rate(45) == pytest.approx((before.learning_rate(40) + 0.001) / 2)
    assert (steps.learning_rate(50), steps.last_step) == (0.001, 50)


def test_an_evaluation_that_would_end_too_late_is_left_out(tmp_path, clock, caplog):
    """One takes 0.7 s, and samples as long, those of step 0 too. One after 100 steps would leave no time at the end."""
    caplog.set_level("INFO")
    recipe = ToyRecipe(schedule(finish_by="5s"), adversarial_from=3)
    evaluate, sample = recipe.evaluate, recipe.sample
    recipe.evaluate = lambda: (clock.sleep(0.7), evaluate())[1]
    recipe.sample = lambda: (clock.sleep(0.7), sample())[1]
    train_toy(recipe, quiet(tmp_path, log_every_steps=1, evaluate_every_steps=100), steps_of(clock))
    assert 4.9 < clock.now - 1000 <= 5.0
    evaluated = [row["step"] for row in rows_of(tmp_path) if "eval/score" in row]
    assert evaluated == [0, saved_step(tmp_path)]
    assert "step 100: there is no time for the held-out figures before the end" in caplog.text


def test_a_time_that_is_too_short_for_a_cool_down_is_said(tmp_path, clock, caplog):
    run(tmp_path, steps_of(clock, seconds=5.0), finish_by="2s")
    assert saved_step(tmp_path) == 1
    assert "--finish-by 2s is reached before the learning rate, 0.0025, could fall" in caplog.text


def test_the_length_of_the_cool_down_can_be_chosen(tmp_path, clock):
    run(tmp_path, steps_of(clock), finish_by="2s", cooldown=50)
    found, begin = cooldown_of(tmp_path)
    assert 48 <= len(found) - begin <= 50


def test_the_first_steps_begin_no_cool_down_while_there_is_time():
    """The first steps took 10 s each: 5 such steps are left, which would be within a `cooldown` of 50."""
    watch = Deadline(began=0.0, finish_seconds=150.0)
    for now in (50.0, 60.0, 70.0):
        watch.add_step(now)
    assert watch.steps_left(70.0, 0.0) is None
    assert watch.steps_left(70.0, 60.0) == 2  # Less is left than they took.
    assert watch.steps_left(150.0, 0.0) == 0
