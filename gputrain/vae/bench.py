"""`gputrain bench train-vae`: what each switch gives on this machine, in real training steps on made-up pictures."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import Report, Row, Settings
from gputrain.config import assemble
from gputrain.hw.runtime import Runtime
from gputrain.vae.config import BenchVae, TrainVae
from gputrain.vae.recipe import VaeRecipe

SWITCHES: tuple[step_bench.Switch, ...] = (
    ("fp32", {"lean": False}, ""),
    ("+ TF32", {"enable_tf32": True}, "tf32"),
    ("+ bf16", {"mixed_precision": True}, "precision"),
    ("+ channels_last", {"channels_last": True}, "channels_last"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
    ("+ lean", {"lean": True}, ""),
)


def bench_vae(settings: BenchVae) -> tuple[Report, list[Path]]:
    """Measure every row, and write JSON and chart. Raises UserError where the folder cannot be written."""
    title = f"train-vae: {settings.preset}, {settings.image_size} px, {settings.batch_size} images a step"
    report = Report(title, VaeRecipe.unit, runner.command_line("gputrain"))
    written = runner.run(
        report,
        rows(settings),
        runner.model_child("vae"),
        minutes=settings.row_minutes,
        folder=settings.output_dir,
        name="bench_vae",
    )
    return report, written


def rows(settings: BenchVae) -> list[Row]:
    """Each with the switches of those before."""
    how = {"warmup_steps": settings.warmup_steps, "steps": settings.steps, "device": settings.device}
    return step_bench.rows(SWITCHES, settings.training() | step_bench.PLAIN, how)


class Trial(step_bench.Trial):
    """A training on made-up pictures."""

    def __init__(self, settings: TrainVae, runtime: Runtime, folder: Path) -> None:
        shape = (settings.schedule.whole_batch, 3, settings.data.image_size, settings.data.image_size)
        pictures = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        pictures_BCHW = pictures.pin_memory() if runtime.device.type == "cuda" else pictures
        super().__init__(VaeRecipe(settings, runtime, held_out=[]), pictures_BCHW, settings, runtime, folder)


def measure_bench_row(settings: Settings) -> dict[str, Any]:
    """In the child: the figures of one row."""
    train = assemble(TrainVae, settings["train"])
    return step_bench.measure_row(settings, train, partial(Trial, train))
