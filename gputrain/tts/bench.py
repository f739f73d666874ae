"""`gputrain bench train-tts`: measures the speed-up of each setting in training steps on synthetic speech."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gputrain.bench import step_bench
from gputrain.bench.runner import BenchReport, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.hw.runtime import Runtime
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.data import ClipBatch
from gputrain.tts.plan import SpeechSize, architecture_for, size_of
from gputrain.tts.prepare_config import HOP_SIZE
from gputrain.tts.recipe import VoiceRecipe


def bench_tts(settings: BenchTts) -> tuple[BenchReport, list[Path]]:
    """Measures every row and writes JSON and chart. Raises UserError if the folder cannot be written."""
    title = f"train-tts: {settings.preset}, {settings.batch_size} clips of {settings.clip_seconds:g} s a step"
    return step_bench.run_bench("tts", title, VoiceRecipe.unit, rows(settings), settings.bench)


def rows(settings: BenchTts) -> list[BenchRow]:
    return step_bench.bench_rows(
        step_bench.SWITCHES, settings.training(), settings.bench, clip_seconds=settings.clip_seconds
    )


def synthetic_speech(settings: TrainTts, speech: SpeechSize) -> list[ClipBatch]:
    """Returns a bucket as the loader does: humming clips of one length with random symbols."""
    draws, clips, clip = torch.Generator().manual_seed(0), settings.schedule.whole_batch, speech.clip
    samples = clip.frames * HOP_SIZE
    time_T = torch.arange(samples) / speech.sampling_rate
    hz_B1 = 80 * 4 ** torch.rand(clips, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * hz_B1 * time_T) + 0.01 * torch.randn(clips, samples, generator=draws)
    each = torch.ones(clips, dtype=torch.int64)
    return [
        ClipBatch(
            ids_BS=torch.randint(3, speech.num_symbols, (clips, clip.symbols), generator=draws),
            symbols_B=each * clip.symbols,
            wave_BT=(wave_BT * 32767).to(torch.int16),
            samples_B=each * samples,
            frames_B=each * clip.frames,
            speakers_B=each * 0,
            clips_B=torch.arange(clips),
        )
    ]


def begin_bench(settings: TrainTts, seconds: float, runtime: Runtime, folder: Path) -> StepBench:
    """Returns a training on synthetic clips of the given length."""
    speech = size_of(PlannedSpeech(), seconds)
    recipe = VoiceRecipe(settings, architecture_for(settings, speech), speech.clip, runtime)
    return StepBench(recipe, synthetic_speech(settings, speech), settings, runtime, folder, item_seconds=seconds)


def measure_bench_row(request: Settings) -> dict[str, Any]:
    """Runs in the child process: returns the figures of a row."""
    train = assemble(TrainTts, request["train"])
    return step_bench.measure_switch(request, train, partial(begin_bench, train, request["clip_seconds"]))
