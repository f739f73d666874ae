"""Calibration of `train-vocoder`; `python -m gputrain.vocoder.calibration` is the child that measures."""

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
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.plan import Planner
from gputrain.vocoder.recipe import target

CHILD = (sys.executable, "-m", "gputrain.vocoder.calibration")


def calibrated(
    settings: TrainVocoder, plan: Plan, budget: MemoryBudget, planner: Planner, machine: Machine
) -> tuple[Plan, Fit, Calibration]:
    """The plan of a training with the settings of its batch, chosen by what is measured on this machine."""
    return calibrate.calibrated(settings, plan, budget, planner, machine, child=CHILD, facts=facts(settings))


def facts(settings: TrainVocoder) -> Settings:
    """What the memory of a step depends on beside the plan; checkpointing is a probe's own."""
    return {
        "recipe": "vocoder",
        "architecture": asdict(settings.architecture),
        "discriminators": asdict(settings.discriminators),
        "losses": asdict(settings.losses),
        "frames": [settings.data.crop_mel_frames, settings.data.frames_to_read],
        "whole_batch": settings.schedule.whole_batch,
        "optimizers": [settings.schedule.generator_optimizer, settings.schedule.discriminator_optimizer],
        "ema": settings.schedule.ema_decay > 0,
    }


def measure(settings: Settings) -> dict[str, Any]:
    """In the child: what micro-batches of the sizes that are asked for take."""
    return try_sizes(target(config.assemble(TrainVocoder, settings["train"])), settings)


if __name__ == "__main__":
    runner.answer(measure)
