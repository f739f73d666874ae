"""Predicted memory of the steps of every kind of model against real steps, and what a prediction depends on."""

from dataclasses import replace
from typing import Any

import pytest

from gputrain.asr.config import PlannedSpeech, TrainAsr
from gputrain.asr.data import facts_of
from gputrain.asr.kind import AsrWork
from gputrain.config import assemble
from gputrain.hw.plan import Setting, decide
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import ModelPlanner
from gputrain.speech.buckets import ClipSize
from gputrain.tts.config import TrainTts
from gputrain.tts.data import SpeechSize
from gputrain.tts.kind import TtsWork
from gputrain.vae.config import TrainVae
from gputrain.vae.kind import VaeWork
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.kind import VocoderWork
from tests.asr.models import small_preset
from tests.machines import CPU
from tests.planner.memory.measured_steps import measured_peak_gb
from tests.speech.speech import RATE_HZ
from tests.tables import slow
from tests.toy import as_on_a_gpu
from tests.tts.test_train import TINY as TINY_VOICE
from tests.tts.test_train import small_presets
from tests.vocoder.conftest import TINY as TINY_VOCODER

TINY_VAE = {
    "data_path": ".", "preset": "fast", "channels": [32, 32], "image_size": 64, "batch_size": 8, "device": "cpu",
}  # fmt: skip
PLAIN_LAYERS = {"recompute_norms": False}
ADVERSARY = {"adversarial_weight": 0.5, "discriminator_channels": 16, "lecam_weight": 0.1}
REAL = {"channels": [], "image_size": 128}
MINI = {
    "mini_nsf": True, "pc_aug": True, "pc_aug_rate": 1.0, "upsample_rates": [4, 4, 4],
    "upsample_kernel_sizes": [8, 8, 8],
}  # fmt: skip
STFT = {"loss_fft_sizes": [128, 64], "loss_hop_sizes": [25, 12], "loss_win_lengths": [100, 60]}
MUON = {"generator_optimizer": "muon", "discriminator_optimizer": "muon"}
CLIP = ClipSize(frames=60, symbols=20)


def vae(**changes: Any) -> TrainVae:
    return assemble(TrainVae, {**TINY_VAE, **changes})


def planned(kind: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the work of a kind and the settings of a small training, for speech of a second."""
    if kind == "vae":
        return VaeWork(), vae(**changes)
    if kind == "vocoder":
        return VocoderWork(), assemble(TrainVocoder, {"data_path": ".", **TINY_VOCODER, **changes})
    if kind == "tts":
        speakers = changes.pop("speakers", 1)
        settings = assemble(TrainTts, {**TINY_VOICE, "data_path": ".", "batch_size": 4, "plan": True, **changes})
        return TtsWork(SpeechSize(RATE_HZ, 40, speakers, CLIP)), settings
    values = {"data_path": ".", "preset": "tiny", "batch_size": 4, "learning_rate": 1e-3, **changes}
    settings = assemble(TrainAsr, values)
    return AsrWork(replace(facts_of(settings, PlannedSpeech(), 1.0), clip=CLIP)), settings


@pytest.mark.parametrize(
    ("kind", "changes", "checkpointing"),
    [
        ("vae", ADVERSARY, True), slow("vae", PLAIN_LAYERS, False),
        slow("vae", {"train_part": "decoder"}, False),
        slow("vae", {}, False), slow("vae", {}, True), slow("vae", ADVERSARY, False),
        slow("vae", PLAIN_LAYERS, True),
        slow("vae", {"precision": "bf16"}, False), slow("vae", {"channels_last": True}, False),
        slow("vae", {"ema_decay": 0, "perceptual_weight": 0}, False),
        slow("vae", {**REAL, **ADVERSARY}, False), slow("vae", {**REAL, "preset": "lite"}, True),
        slow("vae", {**REAL, "preset": "sd", **ADVERSARY}, False), slow("vae", {**REAL, "preset": "flux"}, True),
        ("vocoder", MUON, True), slow("vocoder", {"upsample_initial_channel": 128}, False),
        slow("vocoder", {"discriminators": "msd,mpd"}, False), slow("vocoder", MINI, False),
        slow("vocoder", {"use_stftloss": True, **STFT}, False),
        slow("vocoder", {"key_aug": True, "ema_decay": 0}, False),
        slow("vocoder", {"discriminator_warmup_steps": 5}, False),
        slow("vocoder", {"precision": "bf16"}, False), slow("vocoder", MINI, True),
        slow("tts", {}, False), slow("tts", {"preset": "medium", "speakers": 2}, True),
        slow("tts", {"preset": "high", "ema_decay": 0}, False), slow("tts", {"preset": "high"}, True),
        slow("tts", {"encoder_dropout": 0, "duration_dropout": 0}, False),
        slow("tts", {"precision": "bf16", "speakers": 2}, False),
        ("asr", {}, False), ("asr", {"adapters": "lora"}, False),
        ("asr", {"adapters": "lora", "hidden_dropout": 0.1}, True),
        slow("asr", {"ema_decay": 0.9, "layer_drop": 0.3}, True),
        slow("asr", {"adapters": "attention"}, True),
        slow("asr", {"freeze_encoder_steps": 5, "freeze_feature_encoder": True, "hidden_dropout": 0.1}, False),
    ],
)  # fmt: skip
def test_a_step_takes_what_was_predicted(kind, changes, checkpointing):
    """Compares the tensors of a real step on the CPU, tracked through their lifetimes, with fake tensors."""
    with small_presets(), small_preset():
        work, settings = planned(kind, changes)
        target = work.target(settings)
        plan = as_on_a_gpu(decide(CPU, settings.hardware), precision=changes.get("precision", "fp32"))
        items, rel = {"vae": (2, 2e-3), "vocoder": (2, 5e-3), "tts": (3, 0.02), "asr": (3, 0.02)}[kind]
        predicted = predict_step(target, plan, micro_batch_size=items, checkpointing=checkpointing)
        assert predicted.allocated_gb == pytest.approx(measured_peak_gb(target, plan, items, checkpointing), rel=rel)


def test_plans_share_a_prediction_unless_its_step_differs():
    planner, plan = ModelPlanner(VaeWork()), decide(CPU, vae().hardware)
    first = planner.memory_model(vae(), plan)
    for same in ({"memory_budget": 1.0}, {"keep_checkpoints": 7}, {"prefetch_factor": 9}):
        assert planner.memory_model(vae(**same), plan) is first, same
    for other in (
        {"preset": "lite"},
        {"image_size": 32},
        {"batch_size": 4},
        {"recompute_norms": False},
        {"ema_decay": 0},
    ):
        assert planner.memory_model(vae(**other), plan) is not first, other
    assert planner.memory_model(vae(), replace(plan, precision=Setting("bf16", ""))) is not first
