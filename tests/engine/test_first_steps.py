"""The measured peak beside the predicted one: what is compared, and what a run on a CPU does not claim.

tests/fake_cuda/test_training.py has whole trainings on a fake card.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gputrain.engine.first_steps import MeasuredPeak, MemoryCheck
from gputrain.engine.run_folder import Run
from gputrain.engine.saving import Saver
from gputrain.engine.schedule import Schedule
from gputrain.engine.state import TrainState
from gputrain.hw.plan import Setting
from tests.toy import ToyRecipe, cpu_runtime, quiet, train_toy

PREDICTION = {"predicted_peak_gb": 10.0, "budget_gb": 20.0, "margin": 1.05}
PEAK = MeasuredPeak(allocated_gb=10.4, reserved_gb=12.0)


def check_of(
    folder: Path, *, planned: int = 8, micro_batch: int = 8, expandable: bool = True, prediction: dict = PREDICTION
) -> MemoryCheck:
    """Returns the check of a run whose plan is for a GPU."""
    run = Run(folder, quiet(folder), {}, "", prediction=prediction)
    runtime = cpu_runtime()
    runtime.plan = replace(
        runtime.plan, micro_batch_size=Setting(planned, ""), expandable_segments=Setting(expandable, "")
    )
    recipe = ToyRecipe(Schedule(batch_size=8))
    state = TrainState.begin(recipe, recipe.schedule, runtime, run)
    state.micro_batch["generator"] = micro_batch
    return MemoryCheck(Saver(state, run), 1)


def test_the_peak_is_compared_with_what_was_predicted(tmp_path, caplog):
    check = check_of(tmp_path)
    with caplog.at_level(logging.INFO):
        check.report(PEAK, 2)
    assert check.saver.run.status.measured_memory == {
        "peak_gb": 10.4, "peak_reserved_gb": 12.0, "step": 2, "ratio": pytest.approx(1.04),
    }  # fmt: skip
    assert caplog.messages == [
        "memory of step 2: predicted peak 10.00 GB, measured 10.40 GB (12.00 GB reserved), measured / predicted 1.040"
    ]
    assert check.saver.state.events == []


@pytest.mark.parametrize(
    ("micro_batch", "advice"), [(8, "--micro-batch-size 4"), (5, "--micro-batch-size 3"), (1, "does not change")]
)
def test_more_than_the_margin_is_a_warning_with_what_helps(micro_batch, advice, tmp_path, caplog):
    check = check_of(tmp_path, planned=micro_batch, micro_batch=micro_batch)
    check.saver.state.micro_batch["discriminators"] = micro_batch
    check.report(replace(PEAK, allocated_gb=10.59), 2)
    assert not caplog.records  # cuBLAS's workspaces are not predicted: 0.1 GB are left for them.
    check.report(replace(PEAK, allocated_gb=10.7), 2)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("a step takes 7% more memory than predicted, beyond the plan's margin of 5%")
    assert advice in record.message
    assert ("--micro-batch-size" in record.message) == (micro_batch > 1)
    assert check.saver.state.events == [{"step": 2, "check": "memory", "message": record.message}]


def test_gaps_count_where_segments_cannot_grow(tmp_path):
    check = check_of(tmp_path, expandable=False)
    check.report(PEAK, 2)
    assert check.saver.run.status.measured_memory["ratio"] == pytest.approx(1.2)


def test_smaller_micro_batches_than_planned_are_not_compared(tmp_path, caplog):
    """The prediction is for the planned size, which did not fit."""
    check = check_of(tmp_path, micro_batch=4)
    with caplog.at_level(logging.INFO):
        check.report(replace(PEAK, allocated_gb=11.0), 2)
    assert check.saver.run.status.measured_memory == {"peak_gb": 11.0, "peak_reserved_gb": 12.0, "step": 2}
    assert caplog.messages == []


def test_without_a_prediction_the_peak_is_noted(tmp_path, caplog):
    check = check_of(tmp_path, prediction={})
    with caplog.at_level(logging.INFO):
        check.report(PEAK, 2)
    assert check.saver.run.status.measured_memory == {"peak_gb": 10.4, "peak_reserved_gb": 12.0, "step": 2}
    assert caplog.messages == []


def test_a_cpu_is_not_compared(tmp_path, caplog):
    """plan.json has the memory of the process there, which is no peak of tensors."""
    settings = quiet(tmp_path)
    with caplog.at_level(logging.INFO):
        train_toy(ToyRecipe(Schedule(batch_size=8, max_steps=3, warmup_steps=0)), settings)
    measured: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())["measured"]
    assert {"ratio", "step", "peak_reserved_gb"}.isdisjoint(measured)
    assert "measured / predicted" not in caplog.text
