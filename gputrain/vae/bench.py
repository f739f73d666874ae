"""`gputrain bench train-vae`: measures the speed-up of each setting in training steps on synthetic pictures."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from gputrain.bench import step_bench
from gputrain.bench.runner import BenchReport, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
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


def bench_vae(settings: BenchVae) -> tuple[BenchReport, list[Path]]:
    """Measures every row, and writes JSON and chart. Raises UserError if the folder cannot be written."""
    title = f"train-vae: {settings.preset}, {settings.image_size} px, {settings.batch_size} images a step"
    return step_bench.run_bench("vae", title, VaeRecipe.unit, rows(settings), settings.bench)


def rows(settings: BenchVae) -> list[BenchRow]:
    return step_bench.bench_rows(SWITCHES, settings.training(), settings.bench)


def begin_bench(settings: TrainVae, runtime: Runtime, folder: Path) -> StepBench:
    """Returns a training on synthetic pictures."""
    shape = (settings.schedule.whole_batch, 3, settings.data.image_size, settings.data.image_size)
    pictures_BCHW = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return StepBench(VaeRecipe(settings, runtime, held_out=[]), pictures_BCHW, settings, runtime, folder)


def measure_bench_row(request: Settings) -> dict[str, Any]:
    """Runs in the child process: returns the figures of a row."""
    train = assemble(TrainVae, request["train"])
    return step_bench.measure_switch(request, train, partial(begin_bench, train))
