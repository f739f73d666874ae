"""Memory plans of `train-vae`, for the GPU of this machine or for any other GPU."""

import math
from dataclasses import asdict, replace
from typing import Any

from gputrain.hw.plan import Plan, Setting
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.planner.model_planner import CardPlan, ModelPlanner
from gputrain.planner.spec import ModelSpec, Variant
from gputrain.vae.config import PlannedData, PlanVae, TrainVae
from gputrain.vae.data import open_pictures
from gputrain.vae.recipe import VaeRecipe, plan_target

SIZE_STEP = 64  # Pixels between the image sizes that are proposed.
FILES = ("lpips_weights", "lpips_sha256")  # Options without an effect on memory.


def memory_key(settings: TrainVae) -> dict[str, Any]:
    losses = {name: value for name, value in asdict(settings.losses).items() if name not in FILES}
    return {
        "recipe": "vae",
        "architecture": asdict(settings.architecture),
        "lean": settings.model.lean is not False,
        "train_part": settings.model.train_part,
        "losses": losses,
        "image_size": settings.data.image_size,
        "whole_batch": settings.schedule.whole_batch,
        "ema": settings.schedule.ema_decay > 0,
    }


def fallbacks(settings: TrainVae, budget: MemoryBudget, found: Fit) -> dict[str, TrainVae]:
    model = settings.model
    return {
        "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
        "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
        "--lean": replace(settings, model=replace(model, lean=True)),
        **{
            f"--image-size {size}": replace(settings, data=replace(settings.data, image_size=size))
            for size in _smaller_sizes(settings, budget, found)
        },
        "--preset lite": replace(settings, model=replace(model, preset="lite", channels=())),
        "--preset fast": replace(settings, model=replace(model, preset="fast", channels=())),
    }


def variants(settings: TrainVae, plan: Plan) -> list[Variant[TrainVae]]:
    """Returns the settings with memory-efficient layers and, if nothing is compiled on a GPU, those with plain layers.
    Without a compiler, recomputing norms and activations takes more launches than storing them, which can cost more
    time than the memory traffic that it saves."""
    model = settings.model

    def variant(lean: bool, reason: str) -> Variant[TrainVae]:
        return Variant(replace(settings, model=replace(model, lean=lean)), {"lean": Setting(lean, reason)})

    if model.lean is not None:
        return [variant(model.lean, "asked for" if model.lean else "switched off")]
    if plan.compile.value or plan.device.value != "cuda":
        return [variant(True, "norms and activations are recomputed, which takes less memory")]
    return [
        variant(True, "storing norms and activations does not fit, or is predicted to be no faster"),
        variant(False, "nothing is compiled: storing norms and activations fits and is predicted to be faster"),
    ]


def _smaller_sizes(settings: TrainVae, budget: MemoryBudget, found: Fit) -> list[int]:
    """Returns three image sizes, the largest first. Activations and workspace grow at least in proportion to the
    area."""
    grows = {"activations", "workspace", "cached"}
    growing_gb = sum(gb for kind, gb in found.parts.items() if kind in grows) / found.micro_batch_size
    left_gb = budget.budget_gb / budget.margin - sum(gb for kind, gb in found.parts.items() if kind not in grows)
    step = math.lcm(SIZE_STEP, settings.architecture.downsampling)
    largest = int(settings.data.image_size * max(0.0, left_gb / growing_gb) ** 0.5) // step * step
    return [size for size in (largest, largest - step, largest - 2 * step) if size > 0]


SPEC = ModelSpec(VaeRecipe.kind, "picture", plan_target, memory_key, fallbacks, variants)


def plan_cards(settings: PlanVae) -> list[CardPlan]:
    stages: list[tuple[TrainVae, dict[str, object]]] = [
        (stage, {"image_size": stage.data.image_size, "batch_size": stage.schedule.whole_batch})
        for stage in settings.stages
    ]
    data = settings.data
    named = data.data_path != PlannedData.data_path
    items = len(open_pictures(data.data_path, held_out_share=data.held_out_share).mixture) if named else None
    return ModelPlanner(SPEC).card_plans(settings.cards, stages, items)
