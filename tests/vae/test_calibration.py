"""Calibration of the image VAE: predictions against real steps, and a real child that measures."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest

from gputrain.config import assemble
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.planner import calibrate
from gputrain.planner.calibrate import calibrate_plan
from gputrain.planner.microbatch import MemoryBudget, MemoryModel
from gputrain.planner.model_planner import ModelPlanner
from gputrain.planner.resident import ResidentStep
from gputrain.planner.step_memory import predict_step
from gputrain.vae.config import TrainVae
from gputrain.vae.plan import SPEC, memory_key
from gputrain.vae.recipe import plan_target

TINY = {
    "data_path": ".", "preset": "fast", "channels": [32, 32], "image_size": 64, "batch_size": 8, "device": "cpu",
}  # fmt: skip
ADVERSARY = {"adversarial_weight": 0.5, "discriminator_channels": 16, "lecam_weight": 0.1}
CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")


def settings_of(**changes: object) -> TrainVae:
    return assemble(TrainVae, {**TINY, **changes})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))


# --------------------------------------------------------------------------------- predicted and measured


slow = partial(pytest.param, marks=pytest.mark.slow)
REAL = {"channels": [], "image_size": 128}


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        (ADVERSARY, True), ({"lean": False}, False), ({"train_part": "decoder"}, False), slow({}, False),
        slow({}, True), slow(ADVERSARY, False), slow({**ADVERSARY, "discriminator_norm": "spectral"}, False),
        slow({"lean": False}, True), slow({"use_bf16": True}, False), slow({"channels_last": True}, False),
        slow({"ema_decay": 0, "perceptual_weight": 0}, False),
        slow({**REAL, **ADVERSARY}, False), slow({**REAL, "preset": "lite"}, True),
        slow({**ADVERSARY, "step_order": "alternating"}, False),
        slow({**REAL, "preset": "sd", **ADVERSARY}, False), slow({**REAL, "preset": "flux"}, True),
    ],
)  # fmt: skip
def test_a_step_takes_what_was_predicted(changes, checkpointing):
    """Compares the tensors of a real step on the CPU, tracked through their lifetimes, with fake tensors."""
    settings = settings_of(**changes)
    plan = decide(CPU, settings.hardware)
    resident = ResidentStep.of(plan_target(settings), apply(plan), checkpointing)
    predicted = predict_step(plan_target(settings), plan, micro_batch_size=2, checkpointing=checkpointing)
    assert predicted.allocated_gb == pytest.approx(resident.measured_peak(2).allocated_gb, rel=2e-3)


# ----------------------------------------------------------------------------------------------- the child


def halved(memory_model: MemoryModel) -> MemoryModel:
    item = {kind: gb / 2 for kind, gb in memory_model.item.items()}
    return replace(memory_model, fixed={kind: gb / 2 for kind, gb in memory_model.fixed.items()}, item=item)


@pytest.mark.slow
def test_a_real_child_lowers_what_was_predicted_too_low_and_is_not_asked_twice(tmp_path, monkeypatch, caplog):
    settings = settings_of(gradient_checkpointing=False)
    plan, truth = decide(CPU, settings.hardware), ModelPlanner(SPEC)
    true = truth.memory_model(settings, plan)(False)
    wrong = ModelPlanner(SPEC, {key: lambda checkpointing: halved(true) for key in truth.known})
    budget = MemoryBudget(true.peak_gb(3))  # 2 fit, 4 do not: half of what they take does
    assert wrong.plan(settings, plan, budget)[1].micro_batch_size == 4

    with caplog.at_level("INFO"):
        chosen, found, measured = calibrate_plan(settings, plan, budget, wrong, CPU)
    assert caplog.text.count("measuring the memory of a step") == 2
    assert (found.micro_batch_size, found.accumulation_steps, found.fits) == (2, 4, True)
    assert chosen.micro_batch_size.value == 2
    assert [(probe.items, probe.fits) for probe in measured.probes] == [(1, True), (4, False), (2, True)]
    assert found.predicted_peak_gb == pytest.approx(true.peak_gb(2), rel=5e-3)
    assert measured.factor(2, checkpointing=False) == pytest.approx(2.0, rel=5e-3)

    monkeypatch.setattr(calibrate, "model_child", lambda kind: (sys.executable, "-c", "raise SystemExit(1)"))
    again = calibrate_plan(settings, plan, budget, wrong, CPU)
    assert (again[1], again[2].probes) == (found, measured.probes)
    smaller = calibrate_plan(settings, plan, MemoryBudget(true.peak_gb(1) * 1.1), wrong, CPU)  # known as well
    assert (smaller[1].micro_batch_size, smaller[2].failure) == (1, "")
    (kept,) = tmp_path.rglob("*.json")
    kept.write_text(kept.read_text()[:-9])
    failed = calibrate_plan(settings, plan, budget, wrong, CPU)
    assert failed[2].failure.startswith("the process ended with code 1")


@pytest.mark.slow
def test_a_child_that_dies_leaves_the_prediction(monkeypatch, tmp_path, caplog):
    settings, planner = settings_of(), ModelPlanner(SPEC)
    plan = decide(CPU, settings.hardware)
    budget = MemoryBudget(planner.memory_model(settings, plan)(False).peak_gb(4) * 1.06)
    dying = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(calibrate, "model_child", lambda kind: dying)
    chosen, found, measured = calibrate_plan(settings, plan, budget, planner, CPU)
    expected, _ = planner.plan(settings, plan, budget)
    assert (replace(chosen, lean=expected.lean), found) == planner.plan(settings, plan, budget)
    assert found.micro_batch_size == 4
    assert "the process was killed" in measured.failure
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"data_path": "elsewhere", "learning_rate": 1.0, "num_epochs": 3, "seed": 5}, True),
        ({"gradient_checkpointing": True, "micro_batch_size": 2, "memory_budget": 1.0}, True),
        ({"preset": "lite"}, False), ({"channels": [32, 64]}, False), ({"image_size": 32}, False),
        ({"batch_size": 4}, False), ({"lean": False}, False), ({"train_part": "decoder"}, False),
        ({"ema_decay": 0}, False), ({"adversarial_weight": 0.5}, False), ({"lpips_crop": 64}, False),
        ({"adversarial_weight": 0.5, "step_order": "alternating"}, False),
    ],
)  # fmt: skip
def test_what_a_measurement_is_good_for(changes, same):
    assert (json.dumps(memory_key(settings_of(**changes))) == json.dumps(memory_key(settings_of()))) is same
