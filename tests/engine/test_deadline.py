"""--max-time: a run has saved and ended before the limit, whatever its steps, saves and evaluations take, and goes on
with the same limit."""

import random
import time

import pytest

from gputrain.config import read_file
from gputrain.engine import checkpoint, deadline
from gputrain.engine.deadline import COMMAND_CLOCK, Deadline, seconds_of
from gputrain.engine.schedule import Saving
from gputrain.errors import Stopped, UserError
from tests.children import Child
from tests.engine.test_run import assert_equal, schedule, steps_logged, trained
from tests.toy import ToyRecipe, batches, quiet, train_toy, weights


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("45m", 2700), ("3h50m", 13800), ("1d2h", 93600), ("2d1s", 172801), ("36h", 129600), ("1h0m", 3600)],
)
def test_durations(text, seconds):
    assert seconds_of(text) == seconds
    assert Saving(max_time=text).max_time == text


@pytest.mark.parametrize(
    "text",
    [
        "3600",
        "3 h",
        "3h 50m",
        "50m3h",
        "1.5h",
        "-1h",
        "0s",
        "0h0m",
        "1h90m",
        "1d24h",
        "5m60s",
        "h",
        "3H",
        "2w",
        "1h1h",
        "١h ",
    ],
)
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(UserError, match=r"max_time is .* expected a duration such as 90s, 45m, 3h50m or 1d2h"):
        Saving(max_time=text)


@pytest.mark.parametrize("trial", range(40))
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
        if number % 50 == 0:  # As `beside_the_steps` counts it, on this clock.
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


def hanging(first: int, last: int):
    yield from batches(first, min(last, 8))
    time.sleep(1000)


def test_a_wait_for_data_that_hangs_ends_before_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, "SLOW_START_SECONDS", 0.05)
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)
    began = time.monotonic()
    with pytest.raises(Stopped, match="stopped in time for --max-time 6s after step 8; everything is saved"):
        train_toy(ToyRecipe(schedule(40), adversarial_from=3), quiet(tmp_path / "cut", max_time="6s"), hanging)
    assert time.monotonic() - began < 6 - deadline.EXIT_SECONDS
    recipes = []
    for folder in ("straight", "cut"):
        recipes.append(ToyRecipe(schedule(12), adversarial_from=3))
        train_toy(recipes[-1], quiet(tmp_path / folder, resume_from="auto"))
    assert_equal(*map(weights, recipes))


def slowly(first: int, last: int):
    for x_BD in batches(first, last):
        time.sleep(0.02)
        yield x_BD


def test_a_run_saves_in_time_and_goes_on_with_the_same_limit(tmp_path, monkeypatch):
    """The limit counts from the start of each command. Ending the process takes no time here."""
    monkeypatch.setattr(deadline, "EXIT_SECONDS", 0.05)
    monkeypatch.setattr(deadline, "SLOW_START_SECONDS", 0.05)
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)
    began = time.monotonic()
    long = schedule(60, num_epochs=100)
    with pytest.raises(
        Stopped, match=r"stopped in time for --max-time 1s after step \d+; everything is saved"
    ) as caught:
        train_toy(ToyRecipe(long, adversarial_from=3), quiet(tmp_path / "cut", log_freq=1, max_time="1s"), slowly)
    assert time.monotonic() - began < 1.0
    assert caught.value.hint.endswith("--resume-from auto --max-steps 60")
    done = checkpoint.read(tmp_path / "cut" / "checkpoint_last.pt", "toy")["progress"]["step"]
    assert 1 <= done < 50
    assert read_file(tmp_path / "cut" / "config.yaml")["max_time"] == "1s"
    again = quiet(tmp_path / "cut", log_freq=1, max_time="2s", resume_from="auto")
    with pytest.raises(Stopped):
        train_toy(ToyRecipe(schedule(200, num_epochs=100), adversarial_from=3), again, slowly)
    assert checkpoint.read(tmp_path / "cut" / "checkpoint_last.pt", "toy")["progress"]["step"] >= done + 10


def test_another_limit_is_no_change_of_the_run(tmp_path, caplog):
    trained(tmp_path, 4, max_time="3h")
    trained(tmp_path, 8, resume_from="auto", max_time="5h")
    assert "differ from the checkpoint's: max_steps 4 -> 8" in caplog.text.replace("schedule.", "")
    assert "max_time" not in caplog.text


def test_an_evaluation_that_would_end_too_late_is_left_to_the_resumed_run(tmp_path, monkeypatch):
    """Evaluations take 0.6 s, every 10 steps. There is time for one, and not for a second one."""
    monkeypatch.setattr(deadline, "EXIT_SECONDS", 0.05)
    monkeypatch.setattr(deadline, "SLOW_START_SECONDS", 0.05)
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)
    recipe = ToyRecipe(schedule(100, num_epochs=100), adversarial_from=3)
    evaluate = recipe.evaluate
    recipe.evaluate = lambda: (time.sleep(0.6), evaluate())[1]
    saving = quiet(tmp_path, log_freq=1, max_time="2s", evaluate_steps=10, eval_first=False)
    began = time.monotonic()
    with pytest.raises(Stopped, match="in time for --max-time 2s"):
        train_toy(recipe, saving, slowly)
    assert time.monotonic() - began < 2.0
    evaluated = steps_logged(tmp_path, "eval/score")
    done = checkpoint.read(tmp_path / "checkpoint_last.pt", "toy")["progress"]["step"]
    assert evaluated
    assert done < evaluated[-1] + 10


@pytest.mark.slow
def test_a_command_ends_with_75_before_its_limit_which_counts_its_start(tmp_path):
    began = time.monotonic()
    process = Child(tmp_path / "cut", schedule(2000, num_epochs=1000), max_time="16s", checkpoint_steps=5)
    code, talk = process.wait()
    assert time.monotonic() - began < 16 + 3  # The process of the test starts one that starts the command.
    assert code == 75
    assert "stopped in time for --max-time 16s" in talk
    assert "--resume-from auto" in talk
    done = checkpoint.read(tmp_path / "cut" / "checkpoint_last.pt", "toy")["progress"]["step"]
    assert done > 20
    recipes = []
    for folder in ("straight", "cut"):
        recipes.append(ToyRecipe(schedule(done + 5, num_epochs=1000), adversarial_from=3))
        train_toy(recipes[-1], quiet(tmp_path / folder, resume_from="auto"))
    assert_equal(*map(weights, recipes))


def test_saves_and_reports_are_no_part_of_a_steps_duration():
    watch = Deadline(limit_seconds=100.0)
    watch.add_step(time.monotonic())
    for report in ("", "eval"):
        with watch.beside_the_steps(report):
            time.sleep(0.2)
    watch.add_step(time.monotonic())
    assert watch.step_seconds[0] < 0.1
    assert 0.2 <= watch.report_seconds["eval"] < 0.4
