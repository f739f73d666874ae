"""`gputrain bench train-vocoder`: measures the speed-up of each setting in training steps on synthetic sound."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gputrain.bench.step_bench import GRAPHS, SWITCHES, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.vocoder.commands import BenchVocoder
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe


def title(settings: BenchVocoder, train: TrainVocoder) -> str:
    return (
        f"{train.model.upsample_initial_channel} channels, {', '.join(train.discriminators.discriminators)}, "
        f"{train.schedule.batch_size} crops of {train.crop_seconds:.2f} s a step"
    )


def synthetic_sound(settings: TrainVocoder) -> tuple[Tensor, Tensor]:
    """Returns a batch as the data loader does: notes of two octaves with a little noise."""
    draws = torch.Generator().manual_seed(0)
    items, frames, mel = settings.schedule.whole_batch, settings.data.frames_to_read, settings.spectrogram.mel
    time_T = torch.arange(frames * mel.hop_size) / mel.sampling_rate
    f0_B1 = 110 * 4 ** torch.rand(items, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * f0_B1 * time_T) + 0.01 * torch.randn(items, len(time_T), generator=draws)
    return (wave_BT * 32767).to(torch.int16), f0_B1.repeat(1, frames)


def begin_bench(settings: TrainVocoder, runtime: Runtime, folder: Path) -> StepBench:
    build, seconds = partial(VocoderRecipe, settings), settings.crop_seconds
    return StepBench(build, synthetic_sound(settings), settings, runtime, folder, item_seconds=seconds)


BENCH = BenchSpec("vocoder", TrainVocoder, title, VocoderRecipe.unit, begin_bench, switches=(*SWITCHES, GRAPHS))
