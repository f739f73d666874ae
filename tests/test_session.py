"""What a training says of itself before its first step."""

import json
import time
from typing import Any

import pytest
from rich.console import Console

from gputrain import session
from gputrain.config import assemble
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import RunProgress, Schedule, StepSchedule
from gputrain.engine.stop import COMMAND_CLOCK
from gputrain.errors import UserError
from gputrain.kinds import kinds
from gputrain.session import log_length, steps_left, warn_of_late_parts
from gputrain.vae.config import TrainVae
from tests.small_runs import SETTINGS, prepared
from tests.tables import each_row
from tests.test_docs import parsed
from tests.toy import quiet


def steps_of(**values: Any) -> StepSchedule:
    return StepSchedule(Schedule(batch_size=1, **{"num_epochs": 0, "warmup_steps": 0, **values}), RunProgress(items=10))


def begins(kind: str, **losses: Any) -> dict[str, int]:
    """Returns what begins late in a training of a kind with other losses than the default ones."""
    from gputrain.config import assemble

    return dict(kinds()[kind].work().begins(assemble(kinds()[kind].train, {"data_path": ".", **losses})))


@each_row(
    ("vae", {"adversarial_weight": 0.5, "discriminator_start": 60, "discriminator_warmup_steps": 40}, 100, True),
    ("vae", {"adversarial_weight": 0.5, "discriminator_start": 60, "discriminator_warmup_steps": 39}, 100, False),
    ("vae", {}, 100, False),  # Without an adversarial loss, its default start in step 5000 is of no interest.
    ("vocoder", {"discriminator_start": 100}, 100, True),
    ("vocoder", {"discriminator_start": 99}, 100, False),
    ("vocoder", {"discriminator_only_steps": 100}, 100, True),
    ("asr", {"freeze_encoder_steps": 100}, 100, True),
    ("asr", {}, 100, False),
    ("tts", {}, 1, False),
)
def test_what_begins_after_the_end_is_said(caplog, kind, losses, steps, warns):
    for schedule in (steps_of(num_steps=steps), steps_of(num_steps=10_000, max_steps=steps)):
        caplog.clear()
        warn_of_late_parts(begins(kind, **losses), schedule)
        assert (f"and this run ends after step {steps}" in caplog.text) == warns


@each_row(
    ({"num_steps": 500}, "", 500),
    ({"num_steps": 500, "max_steps": 40}, "", 40),
    ({"num_epochs": 3}, "", 30),
    ({"num_steps": 500}, "100s", 29),  # At two seconds a step, after a start of 40.
    ({"finish_by": "70s"}, "", 14),
    ({"finish_by": "30s"}, "", 0),
)
def test_how_many_steps_are_left(tmp_path, monkeypatch, schedule, max_time, steps):
    monkeypatch.setattr(COMMAND_CLOCK, "began", time.monotonic() - 1)
    run = Run(tmp_path, quiet(tmp_path, max_time=max_time), {}, "")
    assert steps_left(steps_of(**schedule), run, 2.0, 40.0) == steps


@each_row((100, 101, True), (100, 100, False), (100, 0, False))
def test_a_learning_rate_that_never_reaches_its_height_is_said(caplog, steps, warmup, warns):
    caplog.clear()
    schedule = steps_of(num_steps=steps, warmup_steps=warmup)
    warn_of_late_parts({}, schedule)
    assert ("--warmup-steps 10 would be a tenth" in caplog.text) == warns
    highest = max(schedule.learning_rate(step) for step in range(steps))
    assert (highest < schedule.schedule.learning_rate) == warns


@each_row(
    ({"num_steps": 100}, [0.5, 2.0], "time: 100 steps, 50 s to 3 min 20 s predicted, 0.5 to 2 s a step"),
    ({"num_steps": 100}, None, "time: 100 steps"),
    ({"finish_by": "100s"}, [0.5, 2.0], "time: 1 min 40 s until --finish-by 100s, 50 to 200 steps predicted"),
)
def test_the_predicted_time_is_a_range(tmp_path, monkeypatch, caplog, schedule, predicted, line):
    monkeypatch.setattr(COMMAND_CLOCK, "began", None)
    caplog.set_level("INFO")
    caplog.clear()
    prediction = {"predicted_seconds_range": predicted} if predicted else {}
    log_length(steps_of(**schedule), Run(tmp_path, quiet(tmp_path), {}, "", prediction=prediction))
    assert caplog.messages == [line]


def test_a_training_of_which_nothing_was_chosen_must_not_take_a_cpu_too_long(tmp_path, monkeypatch, caplog):
    """What it says instead is a command that begins."""
    caplog.set_level("INFO")
    monkeypatch.setattr(session, "LONGEST_CPU_HOURS", 0.0)
    values = {
        **SETTINGS["vae"],
        "plan": True,
        "adversarial_weight": 0.0,
        "data_path": [str(prepared("vae"))],
        "output_dir": tmp_path / "my run",
    }
    del values["preset"]

    def begin(**further: Any) -> None:
        settings = assemble(TrainVae, {**values, **further})
        session.train_model(kinds()["vae"].work(), settings, Console(quiet=True))

    with pytest.raises(UserError, match=r"predicted to take \d+ \w+.* on this CPU") as refused:
        begin()
    assert not (tmp_path / "my run").exists()
    name, advised = parsed(refused.value.hint.splitlines()[1].strip())
    assert (name, advised.saving.output_dir, advised.saving.yes) == ("train-vae", tmp_path / "my run", True)
    begin(max_steps=1)
    assert (tmp_path / "my run" / "checkpoint_last.pt").exists()
    fast, slow = json.loads((tmp_path / "my run" / "plan.json").read_text())["prediction"]["predicted_seconds_range"]
    assert 0 < fast < slow < 60
