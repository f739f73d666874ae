"""`gputrain bench train-tts`: measures the speed-up of each setting in training steps on synthetic speech."""

import math
from functools import partial
from pathlib import Path

import torch

from gputrain.bench.step_bench import GRAPHS, SWITCHES, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.speech.buckets import ClipBatch
from gputrain.speech.prepare_config import HOP_SIZE
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.plan import SpeechSize, architecture_for, size_of
from gputrain.tts.recipe import VoiceRecipe


def title(settings: BenchTts, train: TrainTts) -> str:
    return f"{train.model.preset}, {train.schedule.batch_size} clips of {settings.clip_seconds:g} s a step"


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


def begin_bench(settings: TrainTts, runtime: Runtime, folder: Path, clip_seconds: float) -> StepBench:
    speech = size_of(PlannedSpeech(), clip_seconds)
    build = partial(VoiceRecipe, settings, architecture_for(settings, speech), speech.clip)
    return StepBench(build, synthetic_speech(settings, speech), settings, runtime, folder, item_seconds=clip_seconds)


BENCH = BenchSpec(
    "tts", TrainTts, title, VoiceRecipe.unit, begin_bench, options=("clip_seconds",), switches=(*SWITCHES, GRAPHS)
)
