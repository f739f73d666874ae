"""`gputrain bench train-tts`: measures the speed-up of each setting in training steps on synthetic speech."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import Report, Row, Settings
from gputrain.config import assemble
from gputrain.hw.runtime import Runtime
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.data import Batch
from gputrain.tts.plan import SpeechSize, architecture_for, size_of
from gputrain.tts.prepare_config import HOP_SIZE
from gputrain.tts.recipe import VoiceRecipe

SWITCHES: tuple[step_bench.Switch, ...] = (
    ("fp32", {}, ""),
    ("+ TF32", {"enable_tf32": True}, "tf32"),
    ("+ bf16", {"mixed_precision": True}, "precision"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
)


def bench_tts(settings: BenchTts) -> tuple[Report, list[Path]]:
    """Measures every row and writes JSON and chart. Raises UserError if the folder cannot be written."""
    title = f"train-tts: {settings.preset}, {settings.batch_size} clips of {settings.clip_seconds:g} s a step"
    report = Report(title, VoiceRecipe.unit, runner.command_line("gputrain"))
    written = runner.run(
        report,
        rows(settings),
        runner.model_child("tts"),
        minutes=settings.row_minutes,
        folder=settings.output_dir,
        name="bench_tts",
    )
    return report, written


def rows(settings: BenchTts) -> list[Row]:
    """Returns the rows; each adds a setting to those of the row before."""
    how: Settings = {"warmup_steps": settings.warmup_steps, "steps": settings.steps, "device": settings.device}
    how["clip_seconds"] = settings.clip_seconds
    return step_bench.rows(SWITCHES, settings.training() | step_bench.PLAIN, how)


def synthetic_speech(settings: TrainTts, speech: SpeechSize) -> list[Batch]:
    """Returns a bucket as the loader does: humming clips of one length with random symbols."""
    draws, clips, clip = torch.Generator().manual_seed(0), settings.schedule.whole_batch, speech.clip
    samples = clip.frames * HOP_SIZE
    time_T = torch.arange(samples) / speech.sampling_rate
    hz_B1 = 80 * 4 ** torch.rand(clips, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * hz_B1 * time_T) + 0.01 * torch.randn(clips, samples, generator=draws)
    each = torch.ones(clips, dtype=torch.int64)
    return [
        Batch(
            ids_BS=torch.randint(3, speech.num_symbols, (clips, clip.symbols), generator=draws),
            symbols_B=each * clip.symbols,
            wave_BT=(wave_BT * 32767).to(torch.int16),
            samples_B=each * samples,
            frames_B=each * clip.frames,
            speakers_B=each * 0,
            clips_B=torch.arange(clips),
        )
    ]


class Trial(step_bench.Trial):
    """A training on synthetic speech."""

    def __init__(self, settings: TrainTts, seconds: float, runtime: Runtime, folder: Path) -> None:
        self.seconds, speech = seconds, size_of(PlannedSpeech(), seconds)
        loaded = synthetic_speech(settings, speech)
        if runtime.device.type == "cuda":
            loaded = [Batch(*(part.pin_memory() for part in bucket)) for bucket in loaded]
        recipe = VoiceRecipe(settings, architecture_for(settings, speech), speech.clip, runtime)
        super().__init__(recipe, loaded, settings, runtime, folder)

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        figures = super().measure(warmup=warmup, steps=steps)
        return figures | {"audio_seconds_per_second": self.seconds * figures["items_per_second"]}


def measure_bench_row(settings: Settings) -> dict[str, Any]:
    """Runs in the child process: measures one row."""
    train = assemble(TrainTts, settings["train"])
    return step_bench.measure_row(settings, train, partial(Trial, train, settings["clip_seconds"]))
