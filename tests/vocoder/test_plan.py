"""Plans of train-vocoder without the card: memory against one sum of the losses, cards of the user's, bad fits."""

import importlib.util
import json
from pathlib import Path

import pytest

from gputrain.config import assemble
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import plan_cards
from gputrain.vocoder.config import PlanVocoder, TrainVocoder
from gputrain.vocoder.kind import VocoderWork
from gputrain.vocoder.recipe import target
from tests.command import gputrain_here
from tests.vocoder.test_recipe import SMALL

MODEL = {name: value for name, value in SMALL.items() if name != "data_path"}
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "vocoder_memory.py"
OPTIMISED = {
    "upsample_initial_channel": 1024, "crop_mel_frames": 80, "batch_size": 32, "precision": "fp16",
    "discriminator_periods": "2,3,5,7,11,17,23", "generator_optimizer": "muon",
    "discriminator_optimizer": "muon",
}  # fmt: skip


def benchmark():
    spec = importlib.util.spec_from_file_location("vocoder_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_optimised_configuration_takes_half_of_what_one_sum_takes():
    """fp16, batch 32 of 80 frames, 1024 channels: the same layers on both sides, discriminator by discriminator or
    at once."""
    module = benchmark()
    settings = assemble(TrainVocoder, {"data_path": ".", **OPTIMISED})
    plan = module.switches(settings)
    ours, theirs = (
        predict_step(one, plan, micro_batch_size=32) for one in (target(settings), module.at_once(settings))
    )
    assert ours.allocated_gb <= 0.55 * theirs.allocated_gb
    assert 9 < ours.allocated_gb < 12
    assert ours.parts["optimizer"] == pytest.approx(0.27, abs=0.02)  # Muon: one number a weight, of 67 million


@pytest.mark.slow
def test_what_does_not_fit_says_what_would():
    asked = assemble(PlanVocoder, {**MODEL, "upsample_initial_channel": 256, "vram_gb": "1", "memory_budget": 0.02})
    (plan,) = plan_cards(VocoderWork(), asked)
    assert not plan.fit.fits
    assert any(remedy.startswith("--upsample-initial-channel 128 would take") for remedy in plan.remedies)


@pytest.mark.slow
def test_the_command_takes_a_configuration_that_comes_along():
    done = gputrain_here("plan", "train-vocoder", "--config", "base_hifi_gpu.yaml", "--vram-gb", 12, "--json")
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads(done.stdout)
    assert (plan["crop_mel_frames"], plan["batch_size"], plan["precision"]) == (48, 16, "fp32")
    assert plan["fits"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requested", "precision"), [({}, "fp32"), ({"precision": "mixed"}, "fp16"), ({"precision": "bf16"}, "bf16")]
)
def test_a_vocoder_that_names_no_precision_is_planned_in_fp32(requested, precision):
    """On a card that computes bf16 natively."""
    (plan,) = plan_cards(VocoderWork(), assemble(PlanVocoder, {**MODEL, **requested, "gpu": "rtx5090"}))
    assert plan.plan.precision.value == precision
    assert plan.plan.tf32.value
    assert ("openvpi warns against" in plan.plan.precision.reason) == (precision != "bf16")
