"""Predicted memory of the vocoder against real steps, and what it depends on."""

import json
from functools import partial

import pytest

from gputrain.config import assemble
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.hw.runtime import apply
from gputrain.planner.resident import ResidentStep
from gputrain.planner.step_memory import predict_step
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import target
from gputrain.vocoder.work import VocoderWork
from tests.planner.measured_steps import measured_peak_gb
from tests.vocoder.conftest import TINY

CPU = Machine(system="Linux", cpu_cores=2, torch="2.13")
MINI = {
    "mini_nsf": True, "pc_aug": True, "pc_aug_rate": 1.0, "upsample_rates": [4, 4, 4],
    "upsample_kernel_sizes": [8, 8, 8],
}  # fmt: skip
STFT = {"loss_fft_sizes": [128, 64], "loss_hop_sizes": [25, 12], "loss_win_lengths": [100, 60]}
MUON = {"generator_optimizer": "muon", "discriminator_optimizer": "muon"}
slow = partial(pytest.param, marks=pytest.mark.slow)


def settings_of(**changes: object) -> TrainVocoder:
    return assemble(TrainVocoder, {"data_path": ".", **TINY, **changes})


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        slow({"upsample_initial_channel": 128}, False), (MUON, True),
        slow({"discriminators": "msd,mpd"}, False), slow(MINI, False), slow({"use_stftloss": True, **STFT}, False),
        slow({"key_aug": True, "ema_decay": 0}, False), slow({"discriminator_warmup_steps": 5}, False),
        slow({"use_bf16": True}, False), slow({"step_order": "alternating", **MINI}, True),
    ],
)  # fmt: skip
def test_a_step_takes_what_was_predicted(changes, checkpointing):
    """Every tensor of a real step on the CPU, watched as it comes and goes, against shapes alone."""
    settings = settings_of(**changes)
    plan = decide(CPU, settings.hardware)
    resident = ResidentStep.of(target(settings), apply(plan), checkpointing)
    predicted = predict_step(target(settings), plan, micro_batch_size=2, checkpointing=checkpointing)
    assert predicted.allocated_gb == pytest.approx(measured_peak_gb(resident, 2), rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"data_path": "elsewhere", "learning_rate": 1.0, "num_steps": 3, "seed": 5, "val_num": 3}, True),
        ({"gradient_checkpointing": True, "micro_batch_size": 2, "memory_budget": 1.0}, True),
        ({"volume_aug": False, "save_samples_freq": 3, "init_from": "model.ckpt"}, True),
        ({"upsample_initial_channel": 64}, False), (MINI, False), ({"noise_sigma": 0.1}, False),
        ({"discriminators": "msd"}, False), ({"discriminator_periods": [3, 5]}, False), ({"mpd_channels": 3}, False),
        ({"use_stftloss": True, **STFT}, False), ({"discriminator_start": 10}, False),
        ({"step_order": "alternating"}, False), ({"fmax_for_loss": 4000}, False),
        ({"crop_mel_frames": 32}, False), ({"key_aug": True}, False), ({"aug_max": 2.0}, True),
        ({"batch_size": 8}, False), ({"accumulation_steps": 2}, False), ({"audio_num_mel_bins": 20}, False),
        ({"generator_optimizer": "muon"}, False), ({"discriminator_optimizer": "muon"}, False),
        ({"ema_decay": 0}, False), ({"ema_decay": 0.5}, True),
    ],
)  # fmt: skip
def test_what_a_prediction_depends_on(changes, same):
    assert (
        json.dumps(VocoderWork().memory_key(settings_of(**changes)))
        == json.dumps(VocoderWork().memory_key(settings_of()))
    ) is same
