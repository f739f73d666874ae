"""The data of a voice's training: prepared speech in buckets, its sizes, and the weights that it begins with."""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gputrain.audio.discriminators import vits_discriminators
from gputrain.engine.run_folder import Run
from gputrain.engine.stop import format_duration
from gputrain.hw.plan import MOST_GRAPHED_SHAPES
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import TrainingStart
from gputrain.session import log_start
from gputrain.speech.buckets import Buckets, ClipBatch, ClipSize, Speech, buckets_of, open_speech
from gputrain.speech.config import HOP_SIZE
from gputrain.speech.store import SpeechFormat
from gputrain.speech.training import SpeechTraining, size_of_clip, speaking_rate, synthetic_bucket
from gputrain.tts.architecture import VoiceArchitecture, voice_architecture
from gputrain.tts.config import PlannedSpeech, TrainTts
from gputrain.tts.evaluate import HeldOutClips
from gputrain.tts.load import read_origin, start_from
from gputrain.tts.model import Voice
from gputrain.tts.pretrained_import import Origin
from gputrain.tts.recipe import VoiceRecipe

log = logging.getLogger(__name__)

FEW_HOURS = 0.5


@dataclass(frozen=True)
class SpeechSize:
    """Properties of the speech data that memory depends on; `clip` as in ClipSize."""

    sampling_rate: int  # Hz
    num_symbols: int
    num_speakers: int
    clip: ClipSize


def architecture_for(settings: TrainTts, speech: SpeechSize) -> VoiceArchitecture:
    return voice_architecture(
        settings.model.preset,
        num_symbols=speech.num_symbols,
        num_speakers=speech.num_speakers,
        sampling_rate=speech.sampling_rate,
        encoder_dropout=settings.model.encoder_dropout,
        duration_dropout=settings.model.duration_dropout,
    )


def open_training_speech(settings: TrainTts) -> Speech:
    return open_speech(settings.data.data_path, settings.data.held_out_share, "tts")


def fill_buckets(settings: TrainTts, speech: Speech) -> Buckets:
    """Returns buckets that contain about the same amount of audio."""
    schedule, shapes = settings.schedule, bucket_shapes(settings)
    return buckets_of(speech, settings.data, HOP_SIZE, schedule.batch_size, schedule.seed, shapes=shapes)


def bucket_shapes(settings: TrainTts) -> int:
    """Returns the most shapes that buckets have; 0: any. Those that CUDA graphs may hold have few, whether the plan has
    graphs in the end or not."""
    captured = settings.hardware.use_cuda_graphs and settings.schedule.accumulation_steps == 1
    return MOST_GRAPHED_SHAPES if captured and not settings.model.gradient_checkpointing else 0


@dataclass
class TtsTraining(SpeechTraining[TrainTts]):
    """The speech of a voice's training."""

    fixed_facts = ("text", "sampling_rate", "hop_size", "speakers")
    origin: Origin | None = None  # What the training begins with, until it begins.

    @classmethod
    def of(cls, settings: TrainTts) -> "TtsTraining":
        """Opens the speech of a training. Raises UserError if it cannot be used."""
        speech = open_training_speech(settings)
        format, buckets = speech.store.format, fill_buckets(settings, speech)
        symbols, speakers = len(format.frontend.symbols), len(format.speakers)
        size = SpeechSize(format.sampling_rate, symbols, speakers, buckets.largest_average)
        return cls(speech, buckets, size)

    def facts(self, run: Run) -> dict[str, Any]:
        format = self.speech.store.format
        return {
            "text": format.frontend.to_json(),
            "sampling_rate": format.sampling_rate,
            "hop_size": HOP_SIZE,
            "speakers": list(format.speakers),
        }

    def described(self, settings: TrainTts) -> str:
        return f"{settings.model.preset} voice at {self.speech.store.format.sampling_rate} Hz"

    def advise(self, settings: TrainTts, hours: float) -> None:
        if hours < FEW_HOURS:
            log.warning(
                "%s of speech is little: --init-from a voice of any language helps most", format_duration(3600 * hours)
            )

    def recipe(self, settings: TrainTts, runtime: Runtime) -> VoiceRecipe:
        held_out = HeldOutClips(self.speech, settings)
        return VoiceRecipe(settings, architecture_for(settings, self.sizes), self.sizes.clip, runtime, held_out)

    def begin(self, settings: TrainTts, run: Run, runtime: Runtime) -> TrainingStart[TrainTts]:
        model = settings.model
        if model.init_from and run.resumed is None:
            self.origin = self._read_origin(settings, model.init_from)
        start = super().begin(settings, run, runtime)
        if model.init_from and self.origin:
            log_start(model.init_from)
        return start

    def _read_origin(self, settings: TrainTts, name: str) -> Origin:
        with torch.device("meta"):
            voice = Voice(architecture_for(settings, self.sizes))
            discriminators = nn.ModuleDict({"waves": vits_discriminators(settings.model.discriminator_channels)})
        return read_origin(name, voice, discriminators)

    def _spoken(self) -> set[str]:
        front_end = self.speech.store.format.front_end
        ids = {number for clip in self.speech.store.clips for number in front_end.ids(clip.normalized)}
        return {front_end.symbols[number] for number in ids}

    def start(self, recipe: VoiceRecipe) -> bool:
        if not self.origin:
            return False
        init_from(recipe, self.origin, self.speech.store.format, self._spoken())
        self.origin = None
        return True


def init_from(recipe: VoiceRecipe, origin: Origin, format: SpeechFormat, spoken: Collection[str]) -> None:
    reinitialised = start_from(origin, recipe.voice, recipe.discriminators, format.front_end, format.speakers, spoken)
    if reinitialised:
        log.warning("%s: reinitialised: %s", origin.source, "; ".join(reinitialised))
    if recipe.settings.schedule.ema_decay:
        recipe.ema.restart(recipe.voice)


# ------------------------------------------------------------------------------------------ speech that is not there


def size_of(speech: PlannedSpeech, clip_seconds: float) -> SpeechSize:
    """Returns the size of hypothetical speech whose clips have the given length."""
    frames = clip_seconds * speech.sampling_rate / HOP_SIZE
    clip = size_of_clip(frames, clip_seconds * speech.symbols_a_second)
    return SpeechSize(speech.sampling_rate, speech.num_symbols, speech.num_speakers, clip)


def facts_of(speech: Speech) -> PlannedSpeech:
    """Returns the facts of prepared speech that a plan needs."""
    format, (clip_seconds, symbols_a_second) = speech.store.format, speaking_rate(speech)
    return PlannedSpeech(
        clip_seconds=clip_seconds,
        symbols_a_second=symbols_a_second,
        num_symbols=len(format.frontend.symbols),
        num_speakers=len(format.speakers),
        sampling_rate=format.sampling_rate,
    )


def synthetic_batch(settings: TrainTts, sizes: SpeechSize) -> list[ClipBatch]:
    """Returns a bucket of humming clips."""
    draws, clips, clip = torch.Generator().manual_seed(0), settings.schedule.global_batch_size, sizes.clip
    samples = clip.frames * HOP_SIZE
    time_T = torch.arange(samples) / sizes.sampling_rate
    hz_B1 = 80 * 4 ** torch.rand(clips, 1, generator=draws)
    wave_BT = 0.3 * torch.sin(2 * math.pi * hz_B1 * time_T) + 0.01 * torch.randn(clips, samples, generator=draws)
    return synthetic_bucket(wave_BT * 32767, clip, sizes.num_symbols, draws)
