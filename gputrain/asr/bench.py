"""`gputrain bench train-asr`: measures the speed-up of each setting in training steps on synthetic speech."""

from functools import partial
from pathlib import Path

import torch

from gputrain.asr.config import BenchAsr, PlannedSpeech, TrainAsr
from gputrain.asr.plan import UtteranceFacts, facts_of, model_spec
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.asr.train import with_learning_rate
from gputrain.bench.step_bench import SWITCHES, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.planner.spec import ModelSpec
from gputrain.speech.buckets import ClipBatch

# Without channels_last, as the model has no 2-D convolutions.
SWITCHES_1D = tuple(switch for switch in SWITCHES if switch[2] != "channels_last")


def title(settings: BenchAsr, train: TrainAsr) -> str:
    return f"{train.model.preset}, {train.schedule.batch_size} clips of {settings.clip_seconds:g} s a step"


def synthetic_utterances(settings: TrainAsr, facts: UtteranceFacts) -> list[ClipBatch]:
    """Returns a bucket as the loader does: noise of one length with random labels."""
    draws, clips, clip = torch.Generator().manual_seed(0), settings.schedule.whole_batch, facts.clip
    wave_BT = 3000 * torch.randn(clips, clip.samples, generator=draws)
    each = torch.ones(clips, dtype=torch.int64)
    return [
        ClipBatch(
            ids_BS=torch.randint(3, facts.architecture["vocab_size"], (clips, clip.labels), generator=draws),
            symbols_B=each * clip.labels,
            wave_BT=wave_BT.to(torch.int16),
            samples_B=each * clip.samples,
            frames_B=each * clip.frames,
            speakers_B=each * 0,
            clips_B=torch.arange(clips),
        )
    ]


def begin_bench(settings: TrainAsr, runtime: Runtime, folder: Path, clip_seconds: float) -> StepBench:
    settings = with_learning_rate(settings)
    facts = facts_of(settings, PlannedSpeech(), clip_seconds)
    build = partial(RecogniserRecipe, settings, facts.architecture, facts.clip)
    loaded = synthetic_utterances(settings, facts)
    return StepBench(build, loaded, settings, runtime, folder, item_seconds=clip_seconds)


def planned_model(settings: TrainAsr, clip_seconds: float) -> ModelSpec[TrainAsr]:
    return model_spec(facts_of(with_learning_rate(settings), PlannedSpeech(), clip_seconds))


BENCH = BenchSpec(
    "asr",
    TrainAsr,
    title,
    RecogniserRecipe.unit,
    begin_bench,
    planned_model,
    options=("clip_seconds",),
    switches=SWITCHES_1D,
)
