"""Memory plans of `train-asr`, for the GPU of this machine or for any other GPU."""

import math
from dataclasses import dataclass, replace
from typing import Any

from gputrain.asr.config import PlanAsr, PlannedData, PlannedSpeech, TrainAsr
from gputrain.asr.initialise import recogniser_architecture
from gputrain.asr.recipe import RecogniserRecipe, UtteranceSize, plan_target
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.model_planner import CardPlan, ModelPlanner
from gputrain.planner.spec import ModelSpec
from gputrain.speech.buckets import open_speech
from gputrain.speech.frames import ENCODER_RATE, STRIDE

EAGER_BECAUSE = "clips differ in length, and compiled layers of any length were not measured; ask for it to try"


@dataclass(frozen=True)
class UtteranceFacts:
    """Properties of the speech and the model that memory depends on."""

    clip: UtteranceSize
    architecture: dict[str, Any]  # fields of transformers' Wav2Vec2Config


def model_spec(facts: UtteranceFacts) -> ModelSpec[TrainAsr]:
    """Returns what the planner knows of a recogniser that is trained on such speech."""
    return ModelSpec(
        RecogniserRecipe.kind,
        "clip",
        lambda settings: plan_target(settings, architecture_of(settings, facts), facts.clip),
        memory_key,
        fallbacks,
        fixed_shapes=False,  # Clips differ in length.
        is_1d=True,
        eager_because=EAGER_BECAUSE,
        packages=("rapidfuzz", "soundfile"),
    )


def architecture_of(settings: TrainAsr, facts: UtteranceFacts) -> dict[str, Any]:
    """Returns the architecture of settings that a fallback may have changed."""
    if settings.model.init_from:
        return facts.architecture
    return recogniser_architecture(settings, None, facts.architecture["vocab_size"])


def memory_key(settings: TrainAsr) -> dict[str, Any]:
    model = settings.model
    return {
        "recipe": "recogniser",
        "model": model.init_from or model.preset,
        "adapters": [model.adapters, model.lora_rank],
        "trains_features": model.trains_features,
        "freeze_encoder_steps": model.freeze_encoder_steps,
        "layer_drop": model.layer_drop,
        "dropout": [model.hidden_dropout > 0, model.attention_dropout > 0, model.final_dropout > 0],
        "masks": [settings.masking.mask_time_prob > 0, settings.masking.mask_feature_prob > 0],
        "whole_batch": settings.schedule.whole_batch,
        "ema": settings.schedule.ema_decay > 0,
    }


def fallbacks(settings: TrainAsr, budget: MemoryBudget, found: Fit) -> dict[str, TrainAsr]:
    """Returns changed settings that take less memory, by flag."""
    model, schedule = settings.model, settings.schedule
    changes = {
        "--micro-batch-size 0": replace(settings, schedule=replace(schedule, micro_batch_size=0)),
        "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
        "--ema-decay 0": replace(settings, schedule=replace(schedule, ema_decay=0.0)),
    }
    if model.trains_features:
        changes["--freeze-feature-encoder"] = replace(settings, model=replace(model, freeze_feature_encoder=True))
    if model.adapters == "none":
        frozen = replace(model, adapters="lora", freeze_feature_encoder=None)
        changes["--adapters lora"] = replace(settings, model=frozen)
    if not model.init_from and model.preset == "xls-r-1b":
        changes["--preset xls-r-300m"] = replace(settings, model=replace(model, preset="xls-r-300m"))
    return changes


def facts_of(settings: TrainAsr, speech: PlannedSpeech, clip_seconds: float) -> UtteranceFacts:
    """Returns the facts of hypothetical speech whose clips have the given length."""
    frames, labels = clip_seconds * ENCODER_RATE / STRIDE, clip_seconds * speech.labels_a_second
    clip = UtteranceSize(math.ceil(frames), math.ceil(labels))
    return UtteranceFacts(clip, recogniser_architecture(settings, None, speech.num_symbols))


def plan_cards(settings: PlanAsr) -> list[CardPlan]:
    clips = None
    if settings.data.data_dir != PlannedData.data_dir:
        speech = open_speech(settings.data.data_dir, STRIDE, settings.data.held_out_share, kind="asr")
        clips = len(speech.split.mixture())
        vocabulary = speech.store.format.vocabulary
        seconds = sum(clip.samples for clip in speech.parts.train) / speech.store.format.sampling_rate
        labels = sum(len(vocabulary.ids(clip.normalized)) for clip in speech.parts.train)
        mean_seconds = seconds / len(speech.parts.train)
        facts = PlannedSpeech(
            clip_seconds=mean_seconds, labels_a_second=labels / seconds, num_symbols=len(vocabulary.symbols)
        )  # fmt: skip
        settings = replace(settings, speech=facts)
    batch_seconds = settings.data.batch_seconds / settings.schedule.batch_size
    seconds = batch_seconds or settings.data.batch_room * settings.speech.clip_seconds
    model = settings.model
    columns = {"model": model.init_from or model.preset, "adapters": model.adapters, "seconds": round(seconds, 1),
               "batch_size": settings.schedule.whole_batch}  # fmt: skip
    planner = ModelPlanner(model_spec(facts_of(settings, settings.speech, seconds)))
    return planner.card_plans(settings.cards, [(settings, columns)], clips)
