"""`gputrain bench train-vocoder`: measures the speed-up of each setting in training steps on synthetic sound."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.bench import step_bench
from gputrain.bench.runner import BenchReport, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.hw.runtime import Runtime
from gputrain.vocoder.commands import BenchVocoder
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe


def bench_vocoder(settings: BenchVocoder) -> tuple[BenchReport, list[Path]]:
    """Measures every row, and writes JSON and chart. Raises UserError if the folder cannot be written."""
    train = assemble(TrainVocoder, settings.training())
    title = (
        f"train-vocoder: {settings.upsample_initial_channel} channels, {', '.join(settings.discriminators)}, "
        f"{settings.batch_size} crops of {train.crop_seconds:.2f} s a step"
    )
    return step_bench.run_bench("vocoder", title, VocoderRecipe.unit, rows(settings), settings.bench)


def rows(settings: BenchVocoder) -> list[BenchRow]:
    return step_bench.bench_rows(step_bench.SWITCHES, settings.training(), settings.bench)


def synthetic_sound(settings: TrainVocoder) -> tuple[Tensor, Tensor]:
    """Returns a batch as the data loader does: notes of two octaves with a little noise."""
    draws = torch.Generator().manual_seed(0)
    items, frames, mel = settings.schedule.whole_batch, settings.data.frames_to_read, settings.spectrogram.mel
    time_T = torch.arange(frames * mel.hop_size) / mel.sampling_rate
    f0_B1 = 110 * 4 ** torch.rand(items, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * f0_B1 * time_T) + 0.01 * torch.randn(items, len(time_T), generator=draws)
    return (wave_BT * 32767).to(torch.int16), f0_B1.repeat(1, frames)


def begin_bench(settings: TrainVocoder, runtime: Runtime, folder: Path) -> StepBench:
    """Returns a training on synthetic sound."""
    recipe, seconds = VocoderRecipe(settings, runtime), settings.crop_seconds
    return StepBench(recipe, synthetic_sound(settings), settings, runtime, folder, item_seconds=seconds)


def measure_bench_row(request: Settings) -> dict[str, Any]:
    """Runs in the child process: returns the figures of a row."""
    train = assemble(TrainVocoder, request["train"])
    return step_bench.measure_switch(request, train, partial(begin_bench, train))
