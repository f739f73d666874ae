"""Predicted memory of the image VAE against real steps, and what it depends on."""

from dataclasses import replace
from functools import partial

import pytest

from gputrain.config import assemble
from gputrain.hw.plan import Setting, decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import ModelPlanner
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import plan_target
from gputrain.vae.work import VaeWork
from tests.planner.memory.measured_steps import measured_peak_gb
from tests.toy import as_on_a_gpu

TINY = {
    "data_path": ".", "preset": "fast", "channels": [32, 32], "image_size": 64, "batch_size": 8, "device": "cpu",
}  # fmt: skip
ADVERSARY = {"adversarial_weight": 0.5, "discriminator_channels": 16, "lecam_weight": 0.1}
CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")


def settings_of(**changes: object) -> TrainVae:
    return assemble(TrainVae, {**TINY, **changes})


slow = partial(pytest.param, marks=pytest.mark.slow)
REAL = {"channels": [], "image_size": 128}


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        (ADVERSARY, True), ({"padding": "reflect", "image_size": 32}, False),
        ({"lean": False}, False), ({"train_part": "decoder"}, False),
        ({"train_part": "tiny-decoder"}, False), slow({"train_part": "tiny-decoder"}, True), slow({}, False),
        slow({}, True), slow(ADVERSARY, False), slow({**ADVERSARY, "discriminator_norm": "spectral"}, False),
        slow({"lean": False}, True), slow({"precision": "bf16"}, False), slow({"channels_last": True}, False),
        slow({"ema_decay": 0, "perceptual_weight": 0}, False),
        slow({**REAL, **ADVERSARY}, False), slow({**REAL, "preset": "lite"}, True),
        slow({**ADVERSARY, "step_order": "alternating"}, False),
        slow({**REAL, "preset": "sd", **ADVERSARY}, False), slow({**REAL, "preset": "flux"}, True),
    ],
)  # fmt: skip
def test_a_step_takes_what_was_predicted(changes, checkpointing):
    """Compares the tensors of a real step on the CPU, tracked through their lifetimes, with fake tensors."""
    settings = settings_of(**changes)
    plan = as_on_a_gpu(decide(CPU, settings.hardware), precision=changes.get("precision", "fp32"))
    predicted = predict_step(plan_target(settings), plan, micro_batch_size=2, checkpointing=checkpointing)
    assert predicted.allocated_gb == pytest.approx(
        measured_peak_gb(plan_target(settings), plan, 2, checkpointing), rel=2e-3
    )


def test_plans_share_a_prediction_unless_its_step_differs():
    planner, plan = ModelPlanner(VaeWork()), decide(CPU, settings_of().hardware)
    first = planner.memory_model(settings_of(), plan)
    for same in ({"memory_budget": 1.0}, {"keep_checkpoints": 7}, {"prefetch_factor": 9}):
        assert planner.memory_model(settings_of(**same), plan) is first, same
    for other in ({"preset": "lite"}, {"image_size": 32}, {"batch_size": 4}, {"lean": False}, {"ema_decay": 0}):
        assert planner.memory_model(settings_of(**other), plan) is not first, other
    assert planner.memory_model(settings_of(), replace(plan, precision=Setting("bf16", ""))) is not first
