"""The data of a recogniser's training: prepared speech in buckets, and the sizes and weights of the model."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from gputrain.asr.config import (
    PlannedSpeech,
    TrainAsr,
)
from gputrain.asr.evaluate import HeldOutSpeech
from gputrain.asr.initialise import init_weights, initial_normalizes, recogniser_architecture, save_architecture
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.engine.run_folder import Run
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import TrainingStart
from gputrain.speech.buckets import Buckets, ClipBatch, ClipSize, Speech, buckets_of, open_speech
from gputrain.speech.frames import ENCODER_RATE, STRIDE
from gputrain.speech.training import (
    SpeechTraining,
    size_of_clip,
    synthetic_bucket,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UtteranceFacts:
    """Properties of the speech and the model that memory depends on."""

    clip: ClipSize
    architecture: dict[str, Any]  # fields of transformers' Wav2Vec2Config


def architecture_of(settings: TrainAsr, facts: UtteranceFacts) -> dict[str, Any]:
    """Returns the architecture of settings that a fallback may have changed."""
    if settings.model.init_from:
        return facts.architecture
    return recogniser_architecture(settings, None, facts.architecture["vocab_size"])


def open_training_speech(settings: TrainAsr) -> Speech:
    return open_speech(settings.data.data_path, settings.data.held_out_share, "asr")


def fill_buckets(settings: TrainAsr, speech: Speech) -> Buckets:
    """Returns buckets that contain about the same amount of audio."""
    schedule = settings.schedule
    return buckets_of(speech, settings.data, STRIDE, schedule.batch_size, schedule.seed)


@dataclass
class AsrTraining(SpeechTraining[TrainAsr]):
    """The speech of a recogniser's training."""

    normalizes: bool  # True if waves are normalised before the model reads them.

    @classmethod
    def of(cls, settings: TrainAsr) -> "AsrTraining":
        """Opens the speech of a training. Raises UserError if it cannot be used."""
        speech = open_training_speech(settings)
        vocabulary, buckets = speech.store.format.vocabulary, fill_buckets(settings, speech)
        architecture = recogniser_architecture(settings, vocabulary, len(vocabulary.symbols))
        facts = UtteranceFacts(buckets.largest_average, architecture)
        return cls(speech, buckets, facts, initial_normalizes(settings))

    def facts(self, run: Run) -> dict[str, Any]:
        if run.resumed:  # The model to initialise from may be gone.
            self.normalizes = bool(run.resumed["facts"]["normalizes"])
        return {
            "text": self.speech.store.format.vocabulary.to_json(), "sampling_rate": ENCODER_RATE, "hop_size": STRIDE,
            "architecture": self.sizes.architecture, "normalizes": self.normalizes,
        }  # fmt: skip

    def begin(self, settings: TrainAsr, run: Run, runtime: Runtime) -> TrainingStart[TrainAsr]:
        start = super().begin(settings, run, runtime)
        if run.group.leads:
            save_architecture(run.folder, self.sizes.architecture)
        return start

    def described(self, settings: TrainAsr) -> str:
        return settings.model.init_from or settings.model.preset

    def advise(self, settings: TrainAsr, hours: float) -> None:
        if not settings.model.init_from and settings.model.preset not in ("tiny", "base"):
            log.warning(
                "%s begins with random weights: --init-from its pretrained model, a folder or a name on the Hugging "
                "Face Hub, reaches low error rates with a thousandth of the speech", settings.model.preset,
            )  # fmt: skip

    def recipe(self, settings: TrainAsr, runtime: Runtime) -> RecogniserRecipe:
        sizes, held_out = self.sizes, HeldOutSpeech(self.speech, settings, normalizes=self.normalizes)
        return RecogniserRecipe(settings, sizes.architecture, sizes.clip, runtime, held_out, normalizes=self.normalizes)

    def start(self, recipe: RecogniserRecipe) -> bool:
        if path := recipe.settings.model.init_from:
            init_weights(recipe, path, self.speech.store.format.vocabulary)
        return bool(path)


# ------------------------------------------------------------------------------------------ speech that is not there


def facts_of(settings: TrainAsr, speech: PlannedSpeech, clip_seconds: float) -> UtteranceFacts:
    """Returns the facts of hypothetical speech whose clips have the given length."""
    frames, labels = clip_seconds * ENCODER_RATE / STRIDE, clip_seconds * speech.labels_a_second
    return UtteranceFacts(size_of_clip(frames, labels), recogniser_architecture(settings, None, speech.num_symbols))


def synthetic_batch(settings: TrainAsr, sizes: UtteranceFacts) -> list[ClipBatch]:
    """Returns a bucket of noise."""
    draws, clip = torch.Generator().manual_seed(0), sizes.clip
    wave_BT = 3000 * torch.randn(settings.schedule.global_batch_size, clip.frames * STRIDE, generator=draws)
    return synthetic_bucket(wave_BT, clip, sizes.architecture["vocab_size"], draws)
