"""Predicted memory of the image VAE against real steps, and what it depends on."""

import json
from functools import partial

import pytest

from gputrain.config import assemble
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.planner.resident import ResidentStep
from gputrain.planner.step_memory import predict_step
from gputrain.vae.config import TrainVae
from gputrain.vae.recipe import plan_target
from gputrain.vae.work import VaeWork
from tests.planner.measured_steps import measured_peak_gb

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
    assert predicted.allocated_gb == pytest.approx(measured_peak_gb(resident, 2), rel=2e-3)


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
def test_what_a_prediction_depends_on(changes, same):
    assert (
        json.dumps(VaeWork().memory_key(settings_of(**changes))) == json.dumps(VaeWork().memory_key(settings_of()))
    ) is same
