"""`gputrain bench train-vae`: measures the speed-up of each setting in training steps on synthetic pictures."""

from functools import partial
from pathlib import Path

import torch

from gputrain.bench.step_bench import GRAPHS, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.vae.config import BenchVae, TrainVae
from gputrain.vae.recipe import VaeRecipe

SWITCHES = (
    ("fp32", {"lean": False}, ""),
    ("+ TF32", {"enable_tf32": True}, "tf32"),
    ("+ bf16", {"mixed_precision": True}, "precision"),
    ("+ channels_last", {"channels_last": True}, "channels_last"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
    ("+ lean", {"lean": True}, ""),
    GRAPHS,
)


def title(settings: BenchVae, train: TrainVae) -> str:
    return f"{train.model.preset}, {train.data.image_size} px, {train.schedule.batch_size} images a step"


def begin_bench(settings: TrainVae, runtime: Runtime, folder: Path) -> StepBench:
    """Returns a training on synthetic pictures."""
    shape = (
        settings.schedule.whole_batch,
        settings.data.image_channels,
        settings.data.image_size,
        settings.data.image_size,
    )
    pictures_BCHW = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return StepBench(partial(VaeRecipe, settings, held_out=[]), pictures_BCHW, settings, runtime, folder)


BENCH = BenchSpec("vae", TrainVae, title, VaeRecipe.unit, begin_bench, switches=SWITCHES)
