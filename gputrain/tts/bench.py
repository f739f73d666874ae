"""`gputrain bench train-tts`: measures the speed-up of each setting in training steps on synthetic speech, or in
speaking."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gputrain.bench.inference_bench import SOUND_SWITCHES, Compute, InferenceBench, sound_title
from gputrain.bench.step_bench import SWITCHES, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.planner.spec import ModelSpec
from gputrain.speech.buckets import ClipBatch
from gputrain.speech.prepare_config import HOP_SIZE
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.model import Voice, made_to_speak
from gputrain.tts.plan import SpeechSize, architecture_for, model_spec, size_of
from gputrain.tts.recipe import VoiceRecipe


def title(settings: BenchTts, train: TrainTts) -> str:
    items = f"{train.schedule.batch_size} clips of {settings.clip_seconds:g} s"
    return sound_title(train.model.preset, settings.inference, items)


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


def begin_bench(
    settings: TrainTts, runtime: Runtime, folder: Path, clip_seconds: float, inference: bool = False
) -> StepBench | InferenceBench:
    """Returns a training on synthetic speech, or speaking without a training."""
    speech = size_of(PlannedSpeech(), clip_seconds)
    if inference:
        build = partial(speaking, settings, speech)
        return InferenceBench(build, runtime, settings.schedule.whole_batch, clip_seconds)
    recipe = partial(VoiceRecipe, settings, architecture_for(settings, speech), speech.clip)
    return StepBench(recipe, synthetic_speech(settings, speech), settings, runtime, folder, item_seconds=clip_seconds)


def planned_model(settings: TrainTts, clip_seconds: float, inference: bool = False) -> ModelSpec[TrainTts]:
    return model_spec(size_of(PlannedSpeech(), clip_seconds))


def speaking(settings: TrainTts, speech: SpeechSize, runtime: Runtime) -> Compute:
    """Returns a function that speaks clips of random symbols. The durations of an untrained voice say nothing, so that
    all symbols are spoken equally long."""
    voice = made_to_speak(Voice(architecture_for(settings, speech)))
    runtime.place(voice)
    voice.decoder.forward = runtime.compile(voice.decoder.forward)  # type: ignore[method-assign]
    (bucket,), frames = synthetic_speech(settings, speech), speech.clip.frames
    ids_BS, symbols_B = bucket.ids_BS.to(runtime.device), bucket.symbols_B.to(runtime.device)
    durations_BS = torch.full(ids_BS.shape, frames / ids_BS.shape[1], device=runtime.device).cumsum(dim=1).round()
    durations_BS = durations_BS.diff(dim=1, prepend=torch.zeros_like(durations_BS[:, :1]))

    def compute() -> Tensor:
        text = voice.encode_text(ids_BS, symbols_B)
        voice.predict_durations(text)
        wave_B1T: Tensor = voice.decoder(voice.speak(text, durations_BS, most_frames=frames))
        return wave_B1T

    return compute


BENCH = BenchSpec(
    "tts", TrainTts, title, VoiceRecipe.unit, begin_bench, planned_model, options=("clip_seconds", "inference"),
    switches=SWITCHES, inference=SOUND_SWITCHES,
)  # fmt: skip
