"""`gputrain bench train-vocoder`: what each switch gives on this machine, in real training steps on made-up sound."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import Report, Row, Settings
from gputrain.config import assemble
from gputrain.hw.runtime import Runtime
from gputrain.vocoder.commands import BenchVocoder
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe

SWITCHES: tuple[step_bench.Switch, ...] = (
    ("fp32", {}, ""),
    ("+ TF32", {"enable_tf32": True}, "tf32"),
    ("+ bf16", {"mixed_precision": True}, "precision"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
)


def bench_vocoder(settings: BenchVocoder) -> tuple[Report, list[Path]]:
    """Measure every row, and write JSON and chart. Raises UserError where the folder cannot be written."""
    train = assemble(TrainVocoder, settings.training())
    title = (
        f"train-vocoder: {settings.upsample_initial_channel} channels, {', '.join(settings.discriminators)}, "
        f"{settings.batch_size} crops of {train.crop_seconds:.2f} s a step"
    )
    report = Report(title, VocoderRecipe.unit, runner.command_line("gputrain"))
    written = runner.run(
        report,
        rows(settings),
        runner.model_child("vocoder"),
        minutes=settings.row_minutes,
        folder=settings.output_dir,
        name="bench_vocoder",
    )
    return report, written


def rows(settings: BenchVocoder) -> list[Row]:
    """Each with the switches of those before."""
    how = {"warmup_steps": settings.warmup_steps, "steps": settings.steps, "device": settings.device}
    return step_bench.rows(SWITCHES, settings.training() | step_bench.PLAIN, how)


def made_up_sound(settings: TrainVocoder) -> tuple[Tensor, Tensor]:
    """A batch as the loader gives it: notes of two octaves, in some noise."""
    draws = torch.Generator().manual_seed(0)
    items, frames, mel = settings.schedule.whole_batch, settings.data.frames_to_read, settings.spectrogram.mel
    time_T = torch.arange(frames * mel.hop_size) / mel.sampling_rate
    f0_B1 = 110 * 4 ** torch.rand(items, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * f0_B1 * time_T) + 0.01 * torch.randn(items, len(time_T), generator=draws)
    return (wave_BT * 32767).to(torch.int16), f0_B1.repeat(1, frames)


class Trial(step_bench.Trial):
    """A training on made-up sound."""

    def __init__(self, settings: TrainVocoder, runtime: Runtime, folder: Path) -> None:
        sound = made_up_sound(settings)
        loaded = tuple(part.pin_memory() for part in sound) if runtime.device.type == "cuda" else sound
        super().__init__(VocoderRecipe(settings, runtime), loaded, settings, runtime, folder)

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        figures = super().measure(warmup=warmup, steps=steps)
        settings: Any = self.settings
        return figures | {"audio_seconds_per_second": settings.crop_seconds * figures["items_per_second"]}


def measure_bench_row(settings: Settings) -> dict[str, Any]:
    """In the child: the figures of one row."""
    train = assemble(TrainVocoder, settings["train"])
    return step_bench.measure_row(settings, train, partial(Trial, train))
