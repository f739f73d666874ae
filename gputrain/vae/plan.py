"""The plan of `train-vae`: what a step of it takes, for the card at hand or any other."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from gputrain.hw.fit import BUDGET_SHARE, Fit, Footprint, Room
from gputrain.hw.gpus import smallest_gpu
from gputrain.hw.plan import Plan, decide
from gputrain.hw.runtime import Runtime
from gputrain.hw.seats import seats
from gputrain.planning import CardPlan, Subject, arithmetic, footprints, least_gb, plan_step, room
from gputrain.vae.config import PlanVae, TrainVae
from gputrain.vae.lpips import Lpips
from gputrain.vae.recipe import VaeRecipe

SIZE_STEP = 64  # pixels between the sizes that are proposed


def subject(settings: TrainVae) -> Subject:
    """A training at one size."""

    def build(runtime: Runtime, checkpointing: bool) -> VaeRecipe:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        lpips = Lpips.without_values() if settings.losses.sees else None
        return VaeRecipe(replace(settings, model=model), runtime, [], lpips)

    def load(items: int = settings.schedule.whole_batch) -> torch.Tensor:
        size = settings.data.image_size
        return torch.zeros(items, 3, size, size, dtype=torch.uint8)

    return Subject(build, load)


@dataclass
class Planner:
    """Plans stages of a training, for any card. Cards that compute alike share what was predicted."""

    known: dict[object, Callable[[bool], Footprint]] = field(default_factory=dict)

    def footprint(self, settings: TrainVae, plan: Plan) -> Callable[[bool], Footprint]:
        key = (settings.model, settings.losses, settings.data.image_size, settings.schedule, arithmetic(plan))
        if key not in self.known:
            self.known[key] = footprints(subject(settings), plan)
        return self.known[key]

    def plan(self, settings: TrainVae, plan: Plan, room: Room) -> tuple[Plan, Fit]:
        """The plan of one stage with the settings of its batch, and what they come to."""
        footprint = self.footprint(settings, plan)
        return plan_step(plan, room, settings.schedule, footprint, settings.model.gradient_checkpointing)

    def remedies(self, settings: TrainVae, plan: Plan, room: Room, found: Fit) -> list[str]:
        """What would make a training fit that does not as it was `found`, the least loss first."""
        model = settings.model
        changes = {
            "--micro-batch-size 0": replace(settings, schedule=replace(settings.schedule, micro_batch_size=0)),
            "--gradient-checkpointing": replace(settings, model=replace(model, gradient_checkpointing=None)),
            "--lean": replace(settings, model=replace(model, lean=True)),
            **{f"--image-size {size}": _at_size(settings, size) for size in _smaller_sizes(settings, room, found)},
            "--preset lite": replace(settings, model=replace(model, preset="lite", channels=())),
            "--preset fast": replace(settings, model=replace(model, preset="fast", channels=())),
        }
        told: dict[str, str] = {}
        for flag, changed in changes.items():
            option = flag.split()[0]
            if changed != settings and option not in told:
                need_gb = least_gb(subject(changed), plan, changed.model.gradient_checkpointing is not False)
                if need_gb * room.margin <= room.budget_gb:
                    told[option] = f"{flag} would take {need_gb:.1f} GB at the least"
        card = smallest_gpu(found.predicted_peak_gb * room.margin / BUDGET_SHARE)
        larger = [f"a card of {card.memory_gb:g} GB, such as {card.key}, would do"] if card else []
        return [*told.values(), *larger]


def _at_size(settings: TrainVae, size: int) -> TrainVae:
    return replace(settings, data=replace(settings.data, image_size=size))


def _smaller_sizes(settings: TrainVae, room: Room, found: Fit) -> list[int]:
    """Sizes to look at, the largest first: activations and workspace go with the area, or a little faster."""
    grows = {"activations", "workspace", "cached"}
    growing_gb = sum(gb for kind, gb in found.parts.items() if kind in grows) / found.micro_batch_size
    left_gb = room.budget_gb / room.margin - sum(gb for kind, gb in found.parts.items() if kind not in grows)
    step = math.lcm(SIZE_STEP, settings.architecture.downsampling)
    largest = int(settings.data.image_size * max(0.0, left_gb / growing_gb) ** 0.5) // step * step
    return [size for size in (largest, largest - step, largest - 2 * step) if size > 0]


def planned(settings: TrainVae, plan: Plan) -> TrainVae:
    """The settings with what the plan has chosen."""
    if not (plan.micro_batch_size and plan.gradient_checkpointing):
        return settings
    return replace(
        settings,
        model=replace(settings.model, gradient_checkpointing=bool(plan.gradient_checkpointing.value)),
        schedule=replace(settings.schedule, micro_batch_size=int(plan.micro_batch_size.value)),
    )


def plan_cards(settings: PlanVae) -> list[CardPlan]:
    """Every stage of a training, for every card asked for."""
    planner = Planner()
    made = []
    for seat in seats(settings.cards):
        switches = decide(seat.machine, settings.hardware)
        for stage in settings.stages:
            space = room(seat.machine, switches, settings.hardware, seat.flops_per_second(switches))
            plan, found = planner.plan(stage, switches, space)
            remedies = [] if found.fits else planner.remedies(stage, switches, space, found)
            told = {"image_size": stage.data.image_size, "batch_size": stage.schedule.whole_batch}
            memory_gb = seat.machine.gpu_memory_gb if switches.device.value == "cuda" else seat.machine.ram_gb
            made.append(CardPlan(seat.name, memory_gb, told, plan, found, remedies))
    return made
