"""Positions, stages and rates by hand."""

import math

import pytest

from gputrain.engine.schedule import RunProgress, Saving, Schedule, StepSchedule, begin, is_due_every
from gputrain.errors import UserError


def test_a_stage_covers_its_epochs():
    steps = StepSchedule(Schedule(batch_size=3, accumulation_steps=2, num_epochs=5), RunProgress(items=10))
    assert steps.last_step == math.ceil(50 / 6)
    assert [steps.epochs_done(step) for step in (0, 1, 2, 9)] == [0, 0, 1, 5]
    assert [step for step in range(1, 10) if steps.ends_epoch(step)] == [2, 4, 5, 7, 9]
    assert steps.progress_at(9, RunProgress()).finished
    assert not steps.progress_at(8, RunProgress()).finished


def test_max_steps_cuts_without_finishing():
    steps = StepSchedule(Schedule(batch_size=1, num_epochs=5, max_steps=7), RunProgress(items=10))
    assert steps.stop_step == 7
    assert steps.last_step == 50
    assert not steps.progress_at(7, RunProgress()).finished


def test_learning_rate_warms_up_and_falls_as_half_a_cosine():
    schedule = Schedule(batch_size=1, num_epochs=11, learning_rate=1.0, warmup_steps=10)
    steps = StepSchedule(schedule, RunProgress(items=10))
    assert [steps.learning_rate(s) for s in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert steps.learning_rate(60) == pytest.approx(0.5)
    assert steps.learning_rate(110) == pytest.approx(0.0, abs=1e-12)
    flat = StepSchedule(
        Schedule(learning_rate=1.0, learning_rate_schedule="constant", warmup_steps=2), RunProgress(items=10)
    )
    assert [flat.learning_rate(s) for s in (0, 1, 2, 500)] == [0.5, 1.0, 1.0, 1.0]


def test_a_cut_stage_goes_on_at_the_same_rate():
    schedule = Schedule(batch_size=2, num_epochs=8, learning_rate=1.0, warmup_steps=3)
    whole = StepSchedule(schedule, RunProgress(items=10))
    cut = StepSchedule(schedule, begin(whole.progress_at(13, RunProgress()), 10, new_stage=True))
    assert cut.last_step == whole.last_step
    assert [cut.learning_rate(s) for s in range(13, 40)] == [whole.learning_rate(s) for s in range(13, 40)]
    assert cut.items_seen(20) == whole.items_seen(20)


def test_the_guides_three_resolutions():
    """25 epochs at batch 32, 50 more at 16, 25 more at 4: checkpoints at epochs 25, 75 and 100."""
    progress = None
    for epochs, batch, expected in ((25, 32, 25), (50, 16, 75), (25, 4, 100)):
        steps = StepSchedule(Schedule(batch_size=batch, num_epochs=epochs), begin(progress, 1000, new_stage=True))
        progress = steps.progress_at(steps.last_step, RunProgress())
        assert steps.epochs_done(steps.last_step) == expected
        assert progress.finished


def test_another_data_set_goes_on_at_an_epochs_start():
    saved = RunProgress(step=100, items_seen=250, items=100)
    assert begin(saved, 40, new_stage=False).items_seen == 80
    assert begin(saved, 100, new_stage=False).items_seen == 250


def test_every():
    assert [n for n in range(10) if is_due_every(n, 3)] == [3, 6, 9]
    assert not any(is_due_every(n, 0) for n in range(10))


def test_a_stage_may_be_counted_in_steps():
    steps = StepSchedule(Schedule(batch_size=4, num_epochs=0, num_steps=30), RunProgress(items=10))
    assert (steps.last_step, steps.stop_step) == (30, 30)
    assert steps.progress_at(30, RunProgress()).finished
    beyond_end = StepSchedule(steps.schedule, begin(steps.progress_at(30, RunProgress()), 10, new_stage=True))
    assert beyond_end.last_step == 60
    both = StepSchedule(Schedule(batch_size=5, num_epochs=3, num_steps=30), RunProgress(items=10))
    assert both.last_step == 6  # whichever ends first
    with pytest.raises(UserError, match="the training would not end"):
        Schedule(num_epochs=0, num_steps=0)


def test_rates_lie_between_the_least_and_the_full_one():
    schedule = Schedule(batch_size=1, num_epochs=11, learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)
    steps = StepSchedule(schedule, RunProgress(items=10))
    assert [steps.learning_rate(s) for s in (0, 4, 9, 60)] == pytest.approx([0.28, 0.6, 1.0, 0.6])
    assert steps.learning_rate(110) == pytest.approx(0.2)
    with pytest.raises(UserError, match="min_learning_rate 2 is above learning_rate 1"):
        Schedule(learning_rate=1.0, min_learning_rate=2.0)


def test_some_checkpoints_are_permanent():
    saving = Saving(checkpoint_every_steps=10, permanent_start=200, permanent_interval=40)
    assert [step for step in range(0, 330, 10) if saving.is_permanent(step)] == [200, 240, 280, 320]
    assert not any(Saving().is_permanent(step) for step in range(0, 400_000, 1000))


def test_an_epochs_evaluation_is_left_out_beside_one_by_steps():
    def due(epoch_steps: int, **intervals: int) -> list[int]:
        saving = Saving(**intervals)
        ends = {
            step
            for step in range(1, 101)
            if saving.evaluate_every_epochs and step % (epoch_steps * saving.evaluate_every_epochs) == 0
        }
        return [step for step in range(1, 101) if saving.evaluation_is_due(step, ends_epochs=step in ends)]

    assert due(29, evaluate_every_steps=20, evaluate_every_epochs=1) == [
        20,
        29,
        40,
        60,
        80,
        87,
        100,
    ]  # 58 is beside 60.
    assert due(10, evaluate_every_steps=20, evaluate_every_epochs=2) == [20, 40, 60, 80, 100]
    assert due(29, evaluate_every_steps=0, evaluate_every_epochs=1) == [29, 58, 87]
    assert due(29, evaluate_every_steps=40, evaluate_every_epochs=0) == [40, 80]


@pytest.mark.parametrize("saving", [{}, {"checkpoint_every_steps": -1, "evaluate_every_epochs": 0}])
def test_permanent_checkpoints_need_checkpoints_by_step(saving):
    with pytest.raises(UserError, match="permanent_start 200 has no effect"):
        Saving(permanent_start=200, **saving)


@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_gamma_needs_the_exponential_schedule(name):
    with pytest.raises(UserError, match=f"gamma 0.99 has no effect with learning_rate_schedule {name}"):
        Schedule(gamma=0.99, learning_rate_schedule=name)
    assert Schedule(gamma=0.99, learning_rate_schedule="exponential").gamma == 0.99
