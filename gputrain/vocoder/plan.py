"""Plans of `train-vocoder`: for the card at hand, and for any other from the options alone."""

from dataclasses import replace

from gputrain.hw.plan import Plan
from gputrain.planner import planning
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.planning import CardPlan, PlanTarget
from gputrain.vocoder.commands import PlanVocoder
from gputrain.vocoder.config import FP32_BECAUSE, TrainVocoder
from gputrain.vocoder.recipe import target


class Planner(planning.Planner[TrainVocoder]):
    item, generator_is_1d, fp32_because = "crop", True, FP32_BECAUSE

    def target(self, settings: TrainVocoder) -> PlanTarget:
        return target(settings)

    def key(self, settings: TrainVocoder) -> object:
        parts = (settings.model, settings.spectrogram, settings.discriminators, settings.losses, settings.schedule)
        return parts, settings.data.crop_mel_frames, settings.data.frames_to_read

    def remedies(self, settings: TrainVocoder, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        model, frames = settings.model, settings.data.crop_mel_frames
        shorter = frames // 2
        fast = replace(settings.discriminators, discriminators=("fast_mrd", "fast_mpd"))
        changes = {
            "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
            "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
            "--discriminators fast_mrd,fast_mpd": replace(settings, discriminators=fast),
        }
        if shorter >= 16:
            changes[f"--crop-mel-frames {shorter}"] = replace(
                settings, data=replace(settings.data, crop_mel_frames=shorter)
            )
        if model.upsample_initial_channel % 64 == 0:
            narrower = model.upsample_initial_channel // 2
            changes[f"--upsample-initial-channel {narrower}"] = replace(
                settings, model=replace(model, upsample_initial_channel=narrower)
            )
        return self.told(changes, settings, plan, budget, found)


def plan_cards(settings: PlanVocoder) -> list[CardPlan]:
    """The training, for every card asked for."""
    told = {"crop_mel_frames": settings.data.crop_mel_frames, "batch_size": settings.schedule.whole_batch}
    return Planner().card_plans(settings.cards, [(settings, told)])
