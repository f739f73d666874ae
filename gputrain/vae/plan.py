"""Plans of `train-vae`: for the card at hand, and for any other from the options alone."""

import math
from dataclasses import replace

from gputrain.hw.plan import Plan
from gputrain.planner import planning
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.planning import CardPlan, PlanTarget
from gputrain.vae.config import PlanVae, TrainVae
from gputrain.vae.recipe import plan_target

SIZE_STEP = 64  # pixels between the sizes that are proposed


class Planner(planning.Planner[TrainVae]):
    """Plans stages of a training, for any card."""

    item = "picture"

    def target(self, settings: TrainVae) -> PlanTarget:
        return plan_target(settings)

    def key(self, settings: TrainVae) -> object:
        return settings.model, settings.losses, settings.data.image_size, settings.schedule

    def remedies(self, settings: TrainVae, plan: Plan, budget: MemoryBudget, found: Fit) -> list[str]:
        model = settings.model
        changes = {
            "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
            "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
            "--lean": replace(settings, model=replace(model, lean=True)),
            **{f"--image-size {size}": _at_size(settings, size) for size in _smaller_sizes(settings, budget, found)},
            "--preset lite": replace(settings, model=replace(model, preset="lite", channels=())),
            "--preset fast": replace(settings, model=replace(model, preset="fast", channels=())),
        }
        return self.told(changes, settings, plan, budget, found)


def _at_size(settings: TrainVae, size: int) -> TrainVae:
    return replace(settings, data=replace(settings.data, image_size=size))


def _smaller_sizes(settings: TrainVae, budget: MemoryBudget, found: Fit) -> list[int]:
    """Sizes to look at, the largest first: activations and workspace go with the area, or a little faster."""
    grows = {"activations", "workspace", "cached"}
    growing_gb = sum(gb for kind, gb in found.parts.items() if kind in grows) / found.micro_batch_size
    left_gb = budget.budget_gb / budget.margin - sum(gb for kind, gb in found.parts.items() if kind not in grows)
    step = math.lcm(SIZE_STEP, settings.architecture.downsampling)
    largest = int(settings.data.image_size * max(0.0, left_gb / growing_gb) ** 0.5) // step * step
    return [size for size in (largest, largest - step, largest - 2 * step) if size > 0]


def plan_cards(settings: PlanVae) -> list[CardPlan]:
    """Every stage of a training, for every card asked for."""
    stages: list[tuple[TrainVae, dict[str, object]]] = [
        (stage, {"image_size": stage.data.image_size, "batch_size": stage.schedule.whole_batch})
        for stage in settings.stages
    ]
    return Planner().card_plans(settings.cards, stages)
