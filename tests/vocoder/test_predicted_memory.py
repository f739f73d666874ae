"""Predicted memory of the vocoder against real steps, and what it depends on."""

from functools import partial

import pytest

from gputrain.config import assemble
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine
from gputrain.planner.memory.predict import predict_step
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import target
from tests.planner.memory.measured_steps import measured_peak_gb
from tests.toy import as_on_a_gpu
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
        slow({"precision": "bf16"}, False), slow({"step_order": "alternating", **MINI}, True),
    ],
)  # fmt: skip
def test_a_step_takes_what_was_predicted(changes, checkpointing):
    """Every tensor of a real step on the CPU, watched as it comes and goes, against shapes alone."""
    settings = settings_of(**changes)
    plan = as_on_a_gpu(decide(CPU, settings.hardware), precision=changes.get("precision", "fp32"))
    predicted = predict_step(target(settings), plan, micro_batch_size=2, checkpointing=checkpointing)
    assert predicted.allocated_gb == pytest.approx(measured_peak_gb(target(settings), plan, 2, checkpointing), rel=5e-3)
