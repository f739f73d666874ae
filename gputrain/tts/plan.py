"""Memory plans of `train-tts`, for the GPU of this machine or for any other GPU."""

import math
from dataclasses import dataclass, field, replace
from typing import get_args

from gputrain.config import assemble
from gputrain.hw.plan import Plan
from gputrain.planner import planning
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.planning import CardPlan, PlanTarget, predict_step
from gputrain.planner.target import target_machines
from gputrain.tts.architecture import VoiceArchitecture, VoicePreset, voice_architecture
from gputrain.tts.config import PlannedSpeech, PlanTts, TrainTts
from gputrain.tts.prepare_config import HOP_SIZE
from gputrain.tts.recipe import ClipSize, plan_target
from gputrain.tts.validate import VoiceReport


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


@dataclass
class Planner(planning.Planner[TrainTts]):
    item, fixed_shapes, generator_is_1d = "clip", False, True  # clips differ in length
    speech: SpeechSize = field(kw_only=True)

    def target(self, settings: TrainTts) -> PlanTarget:
        return plan_target(settings, architecture_for(settings, self.speech), self.speech.clip)

    def key(self, settings: TrainTts) -> object:
        return settings.model, settings.losses, settings.schedule, self.speech

    def remedies(self, settings: TrainTts, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        model = settings.model
        changes = {
            "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
            "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
        }
        if model.preset == "high":
            changes["--preset medium"] = replace(settings, model=replace(model, preset="medium"))
        return self.told(changes, settings, plan, budget, found)


def size_of(speech: PlannedSpeech, clip_seconds: float) -> SpeechSize:
    """Returns the size of hypothetical speech whose clips have the given length."""
    frames = math.ceil(clip_seconds * speech.sampling_rate / HOP_SIZE)
    clip = ClipSize(frames, math.ceil(clip_seconds * speech.symbols_a_second))
    return SpeechSize(speech.sampling_rate, speech.num_symbols, speech.num_speakers, clip)


def memory_by_preset(report: VoiceReport, batch_size: int = 32) -> dict[str, float]:
    """What `train-tts` on such speech is predicted to take on a GPU of compute capability 8.0 on, in GB, whole batches
    at once. Nothing where there is no clip."""
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
        (machine_target,) = target_machines(settings.cards)
        size = size_of(spoken, settings.data.batch_room * seconds)
        target = Planner(speech=size).target(settings)
        plan = Planner.decide(machine_target.machine, settings.hardware)
        peaks[preset] = round(predict_step(target, plan, micro_batch_size=batch_size).allocated_gb, 1)
    return peaks


def plan_cards(settings: PlanTts) -> list[CardPlan]:
    """Returns the plans of the training for all requested GPUs."""
    batch_seconds = settings.data.batch_seconds / settings.schedule.batch_size
    seconds = batch_seconds or settings.data.batch_room * settings.speech.clip_seconds
    told = {"preset": settings.model.preset, "batch_size": settings.schedule.whole_batch}
    return Planner(speech=size_of(settings.speech, seconds)).card_plans(settings.cards, [(settings, told)])
