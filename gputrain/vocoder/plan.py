"""Memory plans of `train-vocoder`, for the GPU of this machine or for any other GPU."""

from dataclasses import asdict, replace
from typing import Any

from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.model_planner import CardPlan, ModelPlanner
from gputrain.planner.spec import ModelSpec
from gputrain.vocoder.commands import PlannedData, PlanVocoder
from gputrain.vocoder.config import FP32_BECAUSE, TrainVocoder
from gputrain.vocoder.recipe import VocoderRecipe, target
from gputrain.vocoder.store import SoundCrops, open_sounds

LEAST_FRAMES = 16  # Shortest crop that is proposed.


def memory_key(settings: TrainVocoder) -> dict[str, Any]:
    return {
        "recipe": "vocoder",
        "architecture": asdict(settings.architecture),
        "discriminators": asdict(settings.discriminators),
        "losses": asdict(settings.losses),
        "frames": [settings.data.crop_mel_frames, settings.data.frames_to_read],
        "whole_batch": settings.schedule.whole_batch,
        "optimizers": [settings.schedule.generator_optimizer, settings.schedule.discriminator_optimizer],
        "ema": settings.schedule.ema_decay > 0,
        **({"frozen": list(settings.model.frozen_params)} if settings.model.frozen_params else {}),
    }


def fallbacks(settings: TrainVocoder, budget: MemoryBudget, found: Fit) -> dict[str, TrainVocoder]:
    """Returns changed settings that take less memory, by flag."""
    model, shorter = settings.model, settings.data.crop_mel_frames // 2
    fast = replace(settings.discriminators, discriminators=("fast_mrd", "fast_mpd"))
    changes = {
        "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
        "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
        "--discriminators fast_mrd,fast_mpd": replace(settings, discriminators=fast),
    }
    if shorter >= LEAST_FRAMES:
        data = replace(settings.data, crop_mel_frames=shorter)
        changes[f"--crop-mel-frames {shorter}"] = replace(settings, data=data)
    if model.upsample_initial_channel % 64 == 0:
        narrower = model.upsample_initial_channel // 2
        narrow = replace(model, upsample_initial_channel=narrower)
        changes[f"--upsample-initial-channel {narrower}"] = replace(settings, model=narrow)
    return changes


SPEC = ModelSpec(
    VocoderRecipe.kind, "crop", target, memory_key, fallbacks,
    generator_is_1d=True, fp32_because=FP32_BECAUSE, packages=("skimage", "soundfile"),
)  # fmt: skip


def plan_cards(settings: PlanVocoder) -> list[CardPlan]:
    columns = {"crop_mel_frames": settings.data.crop_mel_frames, "batch_size": settings.schedule.whole_batch}
    return ModelPlanner(SPEC).card_plans(settings.cards, [(settings, columns)], _crops(settings))


def _crops(settings: PlanVocoder) -> int | None:
    """Returns the number of crops of an epoch; None if no data are named."""
    data = settings.data
    if data.data_path == PlannedData.data_path:
        return None
    sounds = open_sounds(data.data_path, data.held_out_share)
    crops = SoundCrops(sounds.store, sounds.parts.train, data.frames_to_read, settings.schedule.seed)
    return len(sounds.mixture(crops))
