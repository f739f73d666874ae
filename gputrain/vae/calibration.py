"""Calibration of `train-vae`; `python -m gputrain.vae.calibration` is the child that measures."""

import sys
from dataclasses import asdict
from typing import Any

from gputrain import config
from gputrain.bench import runner
from gputrain.bench.runner import Settings
from gputrain.hw.plan import Plan
from gputrain.hw.probe import Machine
from gputrain.planner import calibrate
from gputrain.planner.calibrate import Calibration, try_sizes
from gputrain.planner.microbatch import Fit, MemoryBudget
from gputrain.vae.config import TrainVae
from gputrain.vae.plan import Planner
from gputrain.vae.recipe import plan_target

CHILD = (sys.executable, "-m", "gputrain.vae.calibration")
FILES = ("lpips_weights", "lpips_sha256")  # whose place changes no size


def calibrated(
    settings: TrainVae, plan: Plan, budget: MemoryBudget, planner: Planner, machine: Machine
) -> tuple[Plan, Fit, Calibration]:
    """The plan of a stage with the settings of its batch, chosen by what is measured on this machine."""
    return calibrate.calibrated(settings, plan, budget, planner, machine, child=CHILD, facts=facts(settings))


def facts(settings: TrainVae) -> Settings:
    """What the memory of a step depends on beside the plan; checkpointing is a probe's own."""
    losses = {name: value for name, value in asdict(settings.losses).items() if name not in FILES}
    return {
        "recipe": "vae",
        "architecture": asdict(settings.architecture),
        "lean": settings.model.lean,
        "train_part": settings.model.train_part,
        "losses": losses,
        "image_size": settings.data.image_size,
        "whole_batch": settings.schedule.whole_batch,
        "ema": settings.schedule.ema_decay > 0,
    }


def measure(settings: Settings) -> dict[str, Any]:
    """In the child: what micro-batches of the sizes that are asked for take."""
    return try_sizes(plan_target(config.assemble(TrainVae, settings["train"])), settings)


if __name__ == "__main__":
    runner.answer(measure)
