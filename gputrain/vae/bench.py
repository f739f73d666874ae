"""`gputrain bench train-vae`: measures the speed-up of each setting in training steps on synthetic pictures, or in
encoding and decoding them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.bench import timing
from gputrain.bench.inference_bench import Compute, inference_kernels
from gputrain.bench.runner import NotMeasured
from gputrain.bench.step_bench import GRAPHS, BenchSpec, StepBench
from gputrain.hw.runtime import Runtime
from gputrain.planner.fake_runtime import on_fake_tensors
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.roofline import DeviceRates, busy_seconds
from gputrain.planner.session import measured_rates
from gputrain.planner.spec import ModelSpec
from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.config import BenchVae, TrainVae
from gputrain.vae.data import to_u8, to_unit
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.plan import SPEC
from gputrain.vae.recipe import VaeRecipe, build_autoencoder, compile_layers

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
    what = "images encoded and decoded at once" if settings.inference else "images a step"
    return f"{train.model.preset}, {train.data.image_size} px, {train.schedule.batch_size} {what}"


def begin_bench(
    settings: TrainVae, runtime: Runtime, folder: Path, inference: bool = False
) -> "StepBench | ReconstructionBench":
    """Returns a training on synthetic pictures, or their reconstruction without a training."""
    shape = (
        settings.schedule.whole_batch,
        settings.data.image_channels,
        settings.data.image_size,
        settings.data.image_size,
    )
    pictures_BCHW = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if inference:
        if runtime.plan.cuda_graphs.value:
            raise NotMeasured("encoding and decoding are not captured in CUDA graphs")
        return ReconstructionBench(partial(frozen_autoencoder, settings), pictures_BCHW.to(runtime.device), runtime)
    return StepBench(partial(VaeRecipe, settings, held_out=[]), pictures_BCHW, settings, runtime, folder)


def planned_model(settings: TrainVae, inference: bool = False) -> ModelSpec[TrainVae]:
    return SPEC


def frozen_autoencoder(settings: TrainVae, runtime: Runtime) -> AutoencoderKL:
    model = build_autoencoder(settings, runtime).requires_grad_(False)
    compile_layers(model, runtime)
    return model


@dataclass
class ReconstructionBench:
    """Encodes and decodes a batch of pictures on the device, without gradients, as `reconstruct` and `evaluate` do."""

    build: Callable[[Runtime], AutoencoderKL]
    pictures_BCHW: Tensor
    runtime: Runtime
    model: AutoencoderKL = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.build(self.runtime)

    @torch.no_grad()
    def step(self) -> None:
        with self.runtime.autocast():
            images_BCHW = to_unit(self.pictures_BCHW).contiguous(memory_format=self.runtime.memory_format)
            to_u8(self.model.decode(self.model.encode(images_BCHW).mean_BLhw))

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        rates = measured_rates(self.runtime)  # They are measured first, while the device is idle.
        figures: dict[str, Any] = timing.time_steps(self.step, self.runtime.device, warmup=warmup, steps=steps)
        items, side = len(self.pictures_BCHW), self.pictures_BCHW.shape[-1]
        flops = items * reconstruction_flops(self.model.architecture, side)
        figures |= timing.rates(figures["seconds_per_step"], items, flops, self.runtime)
        figures["predicted_seconds_per_step"] = self.predicted_seconds(rates)
        figures["plan"] = {name: setting.value for name, setting in self.runtime.plan.settings.items()}
        return figures

    def predicted_seconds(self, rates: DeviceRates) -> float:
        """Returns the time of a reconstruction by the roofline of its kernels (planner/roofline.py)."""

        def compute_on(runtime: Runtime) -> Compute:
            pictures_BCHW = torch.empty(self.pictures_BCHW.shape, dtype=torch.uint8)
            return ReconstructionBench(self.build, pictures_BCHW, runtime).step

        return busy_seconds(inference_kernels(compute_on, self.runtime.plan), rates)


def reconstruction_flops(architecture: VaeArchitecture, side: int) -> int:
    """Returns the FLOPs of encoding and decoding a picture, by plain layers as in training steps."""
    timeline = MemoryTimeline()
    with on_fake_tensors(), torch.no_grad():
        model = AutoencoderKL(architecture, lean=False)
        with timeline.watching():
            model.decode(model.encode(torch.empty(1, architecture.in_channels, side, side)).mean_BLhw)
    return round(timeline.log.flops)


BENCH = BenchSpec(
    "vae", TrainVae, title, VaeRecipe.unit, begin_bench, planned_model, options=("inference",), switches=SWITCHES
)
