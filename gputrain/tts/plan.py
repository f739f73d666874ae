"""Memory plans of `train-tts`, for the GPU of this machine or for any other GPU."""

import math
from dataclasses import dataclass, replace
from typing import Any, get_args

from gputrain.config import assemble
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.model_planner import CardPlan, ModelPlanner
from gputrain.planner.spec import ModelSpec
from gputrain.planner.step_memory import predict_step
from gputrain.planner.target import target_machines
from gputrain.speech.buckets import Speech, open_speech
from gputrain.speech.prepare_config import HOP_SIZE
from gputrain.speech.validate import SpeechReport
from gputrain.tts.architecture import VoiceArchitecture, VoicePreset, voice_architecture
from gputrain.tts.config import PlannedData, PlannedSpeech, PlanTts, TrainTts
from gputrain.tts.recipe import ClipSize, VoiceRecipe, plan_target


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


def model_spec(speech: SpeechSize) -> ModelSpec[TrainTts]:
    """Returns what the planner knows of a voice that is trained on such speech."""
    return ModelSpec(
        VoiceRecipe.kind,
        "clip",
        lambda settings: plan_target(settings, architecture_for(settings, speech), speech.clip),
        memory_key,
        fallbacks,
        fixed_shapes=False,  # Clips differ in length.
        generator_is_1d=True,
        packages=("scipy", "skimage", "soundfile"),
    )


def memory_key(settings: TrainTts) -> dict[str, Any]:
    model = settings.model
    return {
        "recipe": "voice",
        "preset": model.preset,
        "discriminator_channels": model.discriminator_channels,
        "step_order": settings.losses.step_order,
        "dropout": [model.encoder_dropout > 0, model.duration_dropout > 0],
        "whole_batch": settings.schedule.whole_batch,
        "ema": settings.schedule.ema_decay > 0,
    }


def fallbacks(settings: TrainTts, budget: MemoryBudget, found: Fit) -> dict[str, TrainTts]:
    """Returns changed settings that take less memory, by flag."""
    model = settings.model
    changes = {
        "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
        "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
    }
    if model.preset == "high":
        changes["--preset medium"] = replace(settings, model=replace(model, preset="medium"))
    return changes


def size_of(speech: PlannedSpeech, clip_seconds: float) -> SpeechSize:
    """Returns the size of hypothetical speech whose clips have the given length."""
    frames = math.ceil(clip_seconds * speech.sampling_rate / HOP_SIZE)
    clip = ClipSize(frames, math.ceil(clip_seconds * speech.symbols_a_second))
    return SpeechSize(speech.sampling_rate, speech.num_symbols, speech.num_speakers, clip)


def memory_by_preset(report: SpeechReport, batch_size: int = 32) -> dict[str, float]:
    """Returns by preset the memory in GB that `train-tts` on the validated speech is predicted to take with whole
    batches at once, on a GPU of compute capability 8.0 or higher; nothing if there is no clip."""
    if not report.clips:
        return {}
    seconds = report.hours * 3600 / report.clips
    spoken = PlannedSpeech(
        clip_seconds=seconds, symbols_a_second=report.symbols_a_second.median if report.symbols_a_second else 30.0,
        num_symbols=len(report.symbols) + 3, num_speakers=max(1, len(report.speakers)),
        sampling_rate=report.sampling_rate,
    )  # fmt: skip
    peaks: dict[str, float] = {}
    for preset in get_args(VoicePreset):
        settings = assemble(PlanTts, {"preset": preset, "batch_size": batch_size, "gpu": "a100-40"})
        (requested,) = target_machines(settings.cards)
        spec = model_spec(size_of(spoken, settings.data.batch_room * seconds))
        plan = spec.decide(requested.machine, settings.hardware)
        estimate = predict_step(spec.target(settings), plan, micro_batch_size=batch_size)
        peaks[preset] = round(estimate.allocated_gb, 1)
    return peaks


def plan_cards(settings: PlanTts) -> list[CardPlan]:
    clips = None
    if settings.data.data_dir != PlannedData.data_dir:
        speech = open_speech(settings.data.data_dir, HOP_SIZE, settings.data.held_out_share)
        clips = len(speech.split.mixture())
        settings = replace(settings, speech=facts_of(speech))
    batch_seconds = settings.data.batch_seconds / settings.schedule.batch_size
    seconds = batch_seconds or settings.data.batch_room * settings.speech.clip_seconds
    columns = {"preset": settings.model.preset, "batch_size": settings.schedule.whole_batch}
    planner = ModelPlanner(model_spec(size_of(settings.speech, seconds)))
    return planner.card_plans(settings.cards, [(settings, columns)], clips)


def facts_of(speech: Speech) -> PlannedSpeech:
    """Returns the facts of prepared speech that a plan needs."""
    store, clips = speech.store, speech.parts.train
    reader = store.format.frontend
    seconds = sum(clip.samples for clip in clips) / store.format.sampling_rate
    symbols = sum(len(reader.ids(clip.normalized)) for clip in clips)
    return PlannedSpeech(
        clip_seconds=seconds / len(clips), symbols_a_second=symbols / seconds, num_symbols=len(reader.symbols),
        num_speakers=len(store.format.speakers), sampling_rate=store.format.sampling_rate,
    )  # fmt: skip
