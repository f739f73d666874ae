"""--max-time: a run has saved and ended before the limit, whatever its steps, saves and evaluations take, and goes on
with the same limit."""

import random
import threading

import pytest

from gputrain.cli import ui
from gputrain.config import read_file
from gputrain.engine import saving, stop
from gputrain.engine.callbacks import clock as clock_callback
from gputrain.engine.schedule import Saving
from gputrain.engine.stop import COMMAND_CLOCK, Deadline, parse_duration
from gputrain.errors import Stopped, UserError
from tests.engine.test_leaving import saved_step
from tests.engine.test_run import assert_equal, schedule, steps_logged, trained
from tests.tables import each_row
from tests.toy import ToyRecipe, batches, quiet, train_toy, weights
from tests.waiting import HANG_SECONDS, Clock


@each_row(
    ("90s", 90), ("45m", 2700), ("3h50m", 13800), ("1d2h", 93600), ("2d1s", 172801), ("36h", 129600), ("1h0m", 3600)
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert Saving(max_time=text).max_time == text


@each_row(

    "3600", "3 h", "3h 50m", "50m3h", "1.5h", "-1h", "0s", "0h0m", "1h90m", "1d24h", "5m60s", "h", "3H", "2w",
    "1h1h", "١h ",
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(UserError, match=r"max_time is .* expected a duration such as 90s, 45m, 3h50m or 1d2h"):
        Saving(max_time=text)


@each_row(*range(40))
def test_a_run_of_any_durations_ends_before_its_limit_and_not_long_before(trial):
    """Times vary by a tenth. The first step compiles, every 50th is followed by an evaluation, and every 20th by a save
    that is being written while the steps go on."""
    rng = random.Random(trial)
    step, save, evaluation = rng.uniform(0.1, 20), rng.uniform(0.1, 60), rng.uniform(0.1, 300)
    first = step + rng.uniform(0, 200)
    began, now = 1000.0, 1000.0 + rng.uniform(5, 60)
    limit = now - began + first + 60 * (step + evaluation / 40 + save)
    watch = Deadline(limit_seconds=limit, began=began, save_bytes=int(50e6 * save))
    watch.report_seconds["eval"] = evaluation  # There is one before the first step.
    saved_seconds, written_at, largest = 0.0, 0.0, 0.0
    for number in range(1, 10**6):
        now += first if number == 1 else step * rng.uniform(0.9, 1.1)
        if written_at and now >= written_at:
            saved_seconds, written_at = save, 0.0
        watch.add_step(now)
        reports = ["eval"] if number % 50 == 0 or (number + 1) % 50 == 0 else []
        reserve = watch.reserve_seconds(saved_seconds, saves=3 if written_at else 2, reports=reports)
        largest = max(largest, reserve)
        stops = watch.is_reached(now, reserve)
        if stops:  # The write in progress, then the last save.
            now = max(now, written_at) + 1.1 * save
        elif number % 20 == 0:  # It waits for the write in progress.
            watch._left_out += max(now, written_at) - now
            now = max(now, written_at)
            written_at = now + save
        if number % 50 == 0:  # As `not_counted` counts it, on this clock.
            now += evaluation
            watch._left_out += evaluation
        if stops:
            break
    else:
        raise AssertionError("the run did not stop")
    end = now + 1.0  # The exit.
    assert number > 20
    assert end <= began + limit
    assert end >= began + limit - largest - 1.2 * step - evaluation


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """The clock of the run, on which starting and saving a training take no time. Ending the process takes 0.05 s, and
    the first save is expected to take as long."""
    monkeypatch.setattr(stop, "EXIT_SECONDS", 0.05)
    monkeypatch.setattr(stop, "SLOW_START_SECONDS", 0.05)
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)
    return Clock(monkeypatch, stop, clock_callback, saving)


def test_a_wait_for_data_that_hangs_ends_before_the_limit(tmp_path, clock):
    """No batch comes after the eighth. When only the time to save and to end is left, with workers that hang, the run
    ends from within the wait."""
    left = stop.SAVE_MARGIN * 0.05 + 2 * 0.05

    def hanging(first: int, last: int):
        yield from batches(first, min(last, 8))
        clock.now += 6 - left
        threading.Event().wait(HANG_SECONDS)

    with pytest.raises(Stopped, match="stopped in time for --max-time 6s after step 8; everything is saved"):
        train_toy(ToyRecipe(schedule(40), adversarial_from=3), quiet(tmp_path / "cut", max_time="6s"), hanging)
    recipes = []
    for folder in ("straight", "cut"):
        recipes.append(ToyRecipe(schedule(12), adversarial_from=3))
        train_toy(recipes[-1], quiet(tmp_path / folder, resume_from="auto"))
    assert_equal(*map(weights, recipes))


def test_the_wait_goes_on_while_there_is_time(clock):
    """The thread that watches looks at the clock again and again until only the time that must be left is left."""
    ended, looks = threading.Event(), []

    def seconds_to_leave() -> float:
        looks.append(clock.now)
        if len(looks) == 5:
            assert not ended.is_set()
            clock.now = 1005.0
        return 1.0

    clock.now = 1004.99
    with Deadline(limit_seconds=6, began=1000.0).watched(seconds_to_leave, ended.set):
        assert ended.wait(HANG_SECONDS)
    assert looks == [1004.99] * 5 + [1005.0]


def steps_of(clock: Clock, seconds: float = 0.02):
    def slowly(first: int, last: int):
        for x_BD in batches(first, last):
            clock.now += seconds
            yield x_BD

    return slowly


def test_a_run_saves_in_time_and_goes_on_with_the_same_limit(tmp_path, clock):
    """The limit counts from the start of each run. A further step, two saves of 0.05 s and half as much again, and the
    end of the process take 0.22 s and the time to write the weights: too long from 0.78 s on."""
    slowly = steps_of(clock)
    long = schedule(60, num_epochs=100)
    with pytest.raises(Stopped, match=r"in time for --max-time 1s after step 39; everything is saved") as caught:
        train_toy(
            ToyRecipe(long, adversarial_from=3), quiet(tmp_path / "cut", log_every_steps=1, max_time="1s"), slowly
        )
    configuration = tmp_path / "cut" / "config.yaml"
    assert caught.value.hint.endswith(f"--config {configuration} --resume-from auto --max-steps 60")
    assert saved_step(tmp_path / "cut") == 39
    assert read_file(tmp_path / "cut" / "config.yaml")["max_time"] == "1s"
    again = quiet(tmp_path / "cut", log_every_steps=1, max_time="2s", resume_from="auto")
    with pytest.raises(Stopped):
        train_toy(ToyRecipe(schedule(200, num_epochs=100), adversarial_from=3), again, slowly)
    assert saved_step(tmp_path / "cut") == 39 + 89


def test_the_limit_of_a_command_counts_its_start_and_its_report(tmp_path, clock):
    """Of 10 s, loading takes 4 s, the report at the end may take 3 s, and half of the rest is left to steps of 0.02 s:
    saves and the end take 0.2 s as above."""
    settings = quiet(tmp_path, log_every_steps=1, max_time="10s")

    def program() -> None:
        clock.now += 4
        train_toy(ToyRecipe(schedule(1000, num_epochs=1000), adversarial_from=3), settings, steps_of(clock))

    with pytest.raises(SystemExit) as ended:
        ui.run(program)
    assert ended.value.code == ui.RESUMABLE
    assert saved_step(tmp_path) == round((10 - 4 - 3 - 0.22) / 0.02)


def test_another_limit_is_no_change_of_the_run(tmp_path, caplog):
    trained(tmp_path, 4, max_time="3h")
    trained(tmp_path, 8, resume_from="auto", max_time="5h")
    assert "differ from the checkpoint's: max_steps 4 -> 8" in caplog.text.replace("schedule.", "")
    assert "max_time" not in caplog.text


def test_an_evaluation_that_would_end_too_late_is_left_to_the_resumed_run(tmp_path, clock):
    """Evaluations take 0.8 s, every 10 steps of 0.02 s. After the first one, which ends at 1 s, there is time for
    further steps until 1.78 s, and for none with a second evaluation behind it."""
    recipe = ToyRecipe(schedule(100, num_epochs=100), adversarial_from=3)
    evaluate = recipe.evaluate
    recipe.evaluate = lambda: (clock.sleep(0.8), evaluate())[1]
    settings = quiet(tmp_path, log_every_steps=1, max_time="2s", evaluate_every_steps=10, eval_first=False)
    with pytest.raises(Stopped, match="in time for --max-time 2s after step 19; everything is saved"):
        train_toy(recipe, settings, steps_of(clock))
    assert steps_logged(tmp_path, "eval/score") == [10]
    assert saved_step(tmp_path) == 19


def test_saves_and_reports_are_no_part_of_a_steps_duration(clock):
    watch = Deadline(limit_seconds=100.0)
    watch.add_step(clock.now)
    for report in ("", "eval"):
        with watch.not_counted(report):
            clock.now += 0.25
    clock.now += 0.125
    watch.add_step(clock.now)
    assert list(watch.step_seconds) == [0.125]
    assert watch.report_seconds == {"eval": 0.25}
