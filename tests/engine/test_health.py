"""Warnings about trainings that go wrong, from recorded figures: each once, with its remedy, and none without cause."""

import dataclasses
import json
import math

import pytest
import torch

from gputrain.engine.callbacks import metrics_log as health
from gputrain.engine.callbacks.metrics_log import Health
from gputrain.hw.plan import Hardware, Setting, decide
from gputrain.hw.probe import Machine
from tests.engine.test_run import schedule
from tests.tables import each_row
from tests.toy import ToyRecipe, quiet, train_toy

PLAN = decide(Machine(system="Linux", cpu_cores=8, ram_free_gb=64.0), Hardware(device="cpu", num_workers=8))
GOOD = {"data/wait_share": 0.01, "gpu/utilisation": 0.98, "gpu/thermal_throttling": 0.0, "gpu/temperature_c": 70.0}


def plan(**settings) -> object:
    return dataclasses.replace(PLAN, **{name: Setting(value, "") for name, value in settings.items()})


def of_windows(facts, plan=PLAN) -> list[dict[str, object]]:
    """Return the events of windows with these figures, ten steps each."""
    watch = Health(plan, 8)
    return [event for number, found in enumerate(facts) for event in watch.watch([], found, 10 * (number + 1))]


def of_steps(rows, plan=PLAN) -> list[dict[str, object]]:
    """Return the events of steps with these scalars, which arrive in windows."""
    watch, rows, events = Health(plan, 8), list(rows), []
    for first in range(0, len(rows), 7):
        window = rows[first : first + 7]
        events += watch.watch(window, {}, first + len(window))
    return events


def of_losses(values) -> list[dict[str, object]]:
    return of_steps([{"loss/l1": value, "gradient_norm/g": math.inf} for value in values])


# ------------------------------------------------------------------------------------- losses and gradients


def test_a_run_that_diverges_says_so_and_records_it(tmp_path, caplog):
    recipe = ToyRecipe(schedule(40, learning_rate=10.0, warmup_steps=40))
    train_toy(recipe, quiet(tmp_path, log_every_steps=10))
    assert "the loss generator/" in caplog.text
    assert "times its median of the last" in caplog.text
    events = json.loads((tmp_path / "plan.json").read_text())["events"]
    assert [event["message"] for event in events if event["check"] == "loss"] == [
        message for message in caplog.messages if message.startswith("the loss")
    ]


def test_a_loss_that_runs_away_is_named_once_with_its_step_and_median():
    noise = torch.rand(400, generator=torch.Generator().manual_seed(0)).tolist()
    calm = [1 + 0.2 * value for value in noise]
    (event,) = of_losses([*calm[:100], *[30.0] * 100])
    assert (event["check"], event["step"]) == ("loss", 103)
    assert "the loss l1 is 30 at step 103, 27 times its median of the last 50 steps (1.1" in event["message"]


@each_row(
    [5 * 0.98**step for step in range(300)],
    [0.001 * 1.05**step for step in range(200)],  # KL rises like this.
    [1.0, 40.0, 1.0, 1.0, 40.0, 40.0] * 20,
    [0.001] * 5 + [1.0] * 5,
)
def test_a_loss_without_a_jump_that_stays_causes_no_warning(values):
    assert of_losses(values) == []


def test_a_second_episode_causes_a_second_warning():
    assert len(of_losses([*[1.0] * 60, *[30.0] * 10, *[1.0] * 60, *[30.0] * 10])) == 2


def test_gradients_that_explode_cause_a_warning_and_single_peaks_none():
    calm = [1 + 0.5 * (step % 5) for step in range(60)]  # Its median is 2.
    rows = [{"gradient_norm/generator": norm} for norm in [*calm, *[41.0] * 20]]
    (event,) = of_steps(rows)
    assert (event["check"], event["step"]) == ("gradient", 65)
    assert "the gradient norm of the generator is 41 at step 65" in event["message"]
    assert "--learning-rate" in event["message"]
    assert of_steps([{"gradient_norm/g": norm} for norm in [*calm, *[41.0] * 4, *calm, *[39.0] * 20]]) == []


# ------------------------------------------------------------------------------------- the machine


@each_row(
    ({"num_workers": 2}, "raise --num-workers from 2 to at most 8, the number of CPU cores"),
    ({}, "put the data on a faster disk"),
)
def test_steps_that_wait_for_data_name_the_setting_that_helps(settings, remedy):
    (event,) = of_windows([GOOD | {"data/wait_share": 0.35}] * 30, plan(**settings))
    assert (event["check"], event["step"]) == ("data", 10 * health.WINDOWS)
    assert "wait for data in 35 % of the time" in event["message"]
    assert remedy in event["message"]


@pytest.mark.parametrize(("compiled", "remedy"), [(False, "try --use-torch-compile"), (True, "raise --batch-size")])
def test_a_gpu_with_too_little_to_do(compiled, remedy):
    (event,) = of_windows([GOOD | {"gpu/utilisation": 0.6}] * 30, plan(compile=compiled))
    assert event["check"] == "idle"
    assert "computes in 60 % of the time, and the steps wait for data in 1 %" in event["message"]
    assert remedy in event["message"]


def test_a_gpu_that_waits_for_data_a_little_names_both_shares_and_the_data():
    (event,) = of_windows([GOOD | {"gpu/utilisation": 0.8, "data/wait_share": 0.15}] * 30, plan(num_workers=2))
    assert event["check"] == "idle"
    assert "computes in 80 % of the time, and the steps wait for data in 15 %: raise --num-workers" in event["message"]
    assert of_windows([GOOD | {"gpu/utilisation": 0.91, "data/wait_share": 0.15}] * 30) == []


@each_row(
    ("gpu/thermal_throttling", "heat slows the GPU down at 70 °C, in 50 % of the readings", "cooling"),
    ("gpu/power_brake", "the power supply slows the GPU down (power brake)", "power cables"),
    ("gpu/power_capped", "a lowered power limit slows the GPU down", "--power-limit raises it"),
)
def test_what_slows_a_gpu_down_is_named(figure, cause, remedy):
    (event,) = of_windows([GOOD | {figure: 0.5}] * 30)
    assert cause in event["message"]
    assert remedy in event["message"]


def test_a_gpu_that_waits_for_data_is_not_called_idle():
    events = of_windows([GOOD | {"gpu/utilisation": 0.6, "data/wait_share": 0.4}] * 30)
    assert [event["check"] for event in events] == ["data"]


def test_heat_is_named_with_its_temperature():
    found = of_windows([GOOD] * 5 + [GOOD | {"gpu/thermal_throttling": 0.5, "gpu/temperature_c": 88.0}] * 20)
    (event,) = found
    assert (event["check"], event["step"]) == ("heat", 150)
    assert "heat slows the GPU down at 88 °C, in 50 % of the readings" in event["message"]


def test_a_disk_that_fills_up_is_named_with_both_numbers():
    def disk(free_gb: float) -> dict[str, float]:
        return GOOD | {"disk/checkpoint_gb": 1.5, "disk/free_gb": free_gb}

    assert of_windows([disk(4.6)] * 20) == []
    (event,) = of_windows([disk(9.0), disk(4.4), disk(3.0)])
    assert (event["check"], event["step"]) == ("disk", 20)
    assert "has 4.40 GB left, and a checkpoint takes 1.50 GB" in event["message"]


def test_states_that_come_and_go_cause_no_warning():
    bad = GOOD | {"data/wait_share": 0.9, "gpu/thermal_throttling": 1.0}
    idle = GOOD | {"gpu/utilisation": 0.1}
    assert of_windows(([bad] * 4 + [idle] * 4 + [GOOD]) * 10) == []
    assert of_windows([{}] * 30) == []


def test_free_space_and_the_size_of_a_checkpoint_are_recorded(tmp_path):
    train_toy(ToyRecipe(schedule(12), adversarial_from=3), quiet(tmp_path, log_every_steps=1, checkpoint_every_steps=4))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    size = (tmp_path / "checkpoint_last.pt").stat().st_size
    # A checkpoint that is copied aside first holds the counts of AdamW's steps one by one, the last one holds them
    # together, which is some 3 kB less of 36.
    assert rows[-1]["disk/checkpoint_gb"] == pytest.approx(size / 1e9, rel=0.1)
    assert rows[-1]["disk/free_gb"] > 0
    assert "disk/free_gb" not in rows[0]
