"""Calibration of `train-tts`; `python -m gputrain.tts.calibration` is the child that measures."""

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
from gputrain.tts.config import TrainTts
from gputrain.tts.plan import Planner, SpeechSize
from gputrain.tts.recipe import ClipSize

CHILD = (sys.executable, "-m", "gputrain.tts.calibration")


def calibrated(
    settings: TrainTts, plan: Plan, budget: MemoryBudget, planner: Planner, machine: Machine
) -> tuple[Plan, Fit, Calibration]:
    """Returns the plan, its fit and the calibrate, with the batch options chosen by measurements on this machine."""
    speech = {"speech": asdict(planner.speech)}
    how: dict[str, Any] = {"child": CHILD, "facts": facts(settings) | speech, "further": speech}
    return calibrate.calibrated(settings, plan, budget, planner, machine, **how)


def facts(settings: TrainTts) -> Settings:
    """Returns the settings that memory depends on besides the plan and the speech; each probe sets checkpointing."""
    model = settings.model
    return {
        "recipe": "voice",
        "preset": model.preset,
        "discriminator_channels": model.discriminator_channels,
        "dropout": [model.encoder_dropout > 0, model.duration_dropout > 0],
        "whole_batch": settings.schedule.whole_batch,
        "ema": settings.schedule.ema_decay > 0,
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Runs in the child process: measures the memory of micro-batches of the requested sizes."""
    told = dict(settings["speech"])
    speech = SpeechSize(clip=ClipSize(**told.pop("clip")), **told)
    target = Planner(speech=speech).target(config.assemble(TrainTts, settings["train"]))
    return try_sizes(target, settings)


if __name__ == "__main__":
    runner.answer(measure)
