"""Plans, measures and trains a recogniser."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gputrain.asr.config import (
    FINE_TUNING_RATE,
    FROM_SCRATCH_RATE,
    Model,
    PlanAsr,
    PlannedData,
    PlannedSpeech,
    TrainAsr,
)
from gputrain.asr.evaluate import HeldOutSpeech
from gputrain.asr.initialise import init_weights, initial_normalizes, recogniser_architecture, save_architecture
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.engine.run_folder import Run
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import SWITCHES, PlannedTraining, PlanTarget, StepTraits, SyntheticWork, TrainingStart
from gputrain.planner.memory.fit import Fit, MemoryBudget
from gputrain.speech.augment import ClipAugment, NoiseFolder
from gputrain.speech.buckets import ClipBatch, ClipSize, Speech
from gputrain.speech.frames import ENCODER_RATE, STRIDE
from gputrain.speech.training import (
    PlannedClips,
    SpeechTraining,
    SpeechWork,
    plan_target,
    size_of_clip,
    speaking_rate,
    synthetic_bucket,
)

log = logging.getLogger(__name__)

EAGER_BECAUSE = "clips differ in length, and compiled layers of any length were not measured; ask for it to try"
GRAPHLESS_BECAUSE = "shapes change from step to step, and a graph has one"


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


class AsrWork(SpeechWork[TrainAsr]):
    """The work of planning, measuring and training a recogniser. Its sizes are UtteranceFacts."""

    kind, speech_kind, hop_size = "asr", "asr", STRIDE
    traits = StepTraits(
        fixed_shapes=False, is_1d=True, eager_because=EAGER_BECAUSE, graphless_because=GRAPHLESS_BECAUSE
    )  # fmt: skip
    # Without channels_last, as the model has no 2-D convolutions.
    switches = tuple(switch for switch in SWITCHES if switch[2] != "channels_last")

    def completed(self, settings: TrainAsr) -> TrainAsr:
        """Returns the settings with a learning rate, if it is left to the program. Warns of a preset without effect."""
        model = settings.model
        if model.init_from and model.preset != Model.preset:
            log.warning("preset %s has no effect: the architecture is that of %s", model.preset, model.init_from)
        if settings.schedule.learning_rate:
            return settings
        rate = FINE_TUNING_RATE if settings.model.init_from else FROM_SCRATCH_RATE
        return replace(settings, schedule=replace(settings.schedule, learning_rate=rate))

    def open_data(self, settings: TrainAsr) -> "AsrTraining":
        speech = self.open_speech(settings)
        vocabulary, buckets = speech.store.format.vocabulary, self.fill_buckets(settings, speech)
        architecture = recogniser_architecture(settings, vocabulary, len(vocabulary.symbols))
        facts = UtteranceFacts(buckets.largest_average, architecture)
        return AsrTraining(speech, buckets, facts, initial_normalizes(settings))

    def augment(self, settings: TrainAsr, speech: Speech) -> ClipAugment | None:
        given, noise = settings.augmentation, None
        if given.noise_dir is not None:
            noise = NoiseFolder.open(given.noise_dir, [part.folder for part in speech.store.parts])
        if not given.speed_change and noise is None:
            return None
        return ClipAugment(
            settings.schedule.seed, ENCODER_RATE, given.speed_change, noise, given.noise_probability,
            (given.noise_snr_low, given.noise_snr_high),
        )  # fmt: skip

    def target(self, settings: TrainAsr) -> PlanTarget:
        return plan_target(RecogniserRecipe, settings, architecture_of(settings, self.sizes), self.sizes.clip, STRIDE)

    def fallbacks(self, settings: TrainAsr, budget: MemoryBudget, found: Fit) -> dict[str, TrainAsr]:
        model, schedule = settings.model, settings.schedule
        changes = {
            **super().fallbacks(settings, budget, found),
            "--ema-decay 0": replace(settings, schedule=replace(schedule, ema_decay=0.0)),
        }
        if schedule.optimizer == "adamw":
            changes["--optimizer adamw-8bit"] = replace(settings, schedule=replace(schedule, optimizer="adamw-8bit"))
        if model.trains_features:
            changes["--freeze-feature-encoder"] = replace(settings, model=replace(model, freeze_feature_encoder=True))
        if model.adapters == "none":
            frozen = replace(model, adapters="lora", freeze_feature_encoder=None)
            changes["--adapters lora"] = replace(settings, model=frozen)
        if not model.init_from and model.preset == "xls-r-1b":
            changes["--preset xls-r-300m"] = replace(settings, model=replace(model, preset="xls-r-300m"))
        return changes

    def begins(self, settings: TrainAsr) -> dict[str, int]:
        return {"training of the encoder (freeze_encoder_steps)": settings.model.freeze_encoder_steps}

    def planned(self, settings: PlanAsr) -> PlannedTraining:
        clips = None
        if settings.data.data_path != PlannedData.data_path:
            speech = self.open_speech(settings)
            clips, rate = len(speech.split.mixture()), speaking_rate(speech)
            facts = PlannedSpeech(
                clip_seconds=rate.clip_seconds, labels_a_second=rate.symbols_a_second,
                num_symbols=len(speech.store.format.vocabulary.symbols),
            )  # fmt: skip
            settings = replace(settings, speech=facts)
        slowest = 1 - settings.augmentation.speed_change
        model, planned = settings.model, PlannedClips.of(settings, of_data=clips is not None, slowest=slowest)
        columns = {"model": model.init_from or model.preset, "adapters": model.adapters,
                   "batch_size": settings.schedule.global_batch_size, **planned.columns}  # fmt: skip
        work = replace(self, sizes=facts_of(settings, settings.speech, planned.seconds))
        return PlannedTraining(work, [(settings, columns)], clips)

    def of_clips(self, settings: TrainAsr, clip_seconds: float) -> "AsrWork":
        """Returns this work with the sizes of hypothetical speech."""
        return replace(self, sizes=facts_of(settings, PlannedSpeech(), clip_seconds))

    def synthetic(self, settings: TrainAsr, *, clip_seconds: float = 8.0, **options: Any) -> SyntheticWork:
        work = self.of_clips(settings, clip_seconds)
        return SyntheticWork(
            title=f"{settings.model.preset}, {settings.schedule.batch_size} clips of {clip_seconds:g} s",
            recipe=partial(RecogniserRecipe, settings, work.sizes.architecture, work.sizes.clip),
            batch=partial(work.synthetic_batch, settings),
            seconds=clip_seconds,
        )

    def synthetic_batch(self, settings: TrainAsr) -> list[ClipBatch]:
        """Returns a bucket of noise."""
        draws, clip = torch.Generator().manual_seed(0), self.sizes.clip
        wave_BT = 3000 * torch.randn(settings.schedule.global_batch_size, clip.frames * STRIDE, generator=draws)
        return synthetic_bucket(wave_BT, clip, self.sizes.architecture["vocab_size"], draws)


def facts_of(settings: TrainAsr, speech: PlannedSpeech, clip_seconds: float) -> UtteranceFacts:
    """Returns the facts of hypothetical speech whose clips have the given length."""
    frames, labels = clip_seconds * ENCODER_RATE / STRIDE, clip_seconds * speech.labels_a_second
    return UtteranceFacts(size_of_clip(frames, labels), recogniser_architecture(settings, None, speech.num_symbols))


@dataclass
class AsrTraining(SpeechTraining[TrainAsr]):
    """The speech of a recogniser's training."""

    normalizes: bool  # True if waves are normalised before the model reads them.

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
