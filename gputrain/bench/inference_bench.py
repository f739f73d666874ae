"""Benchmark rows of inference: what each setting gives where a model computes sound without gradients."""

from collections.abc import Callable
from typing import Any

import torch

from gputrain.bench import timing
from gputrain.bench.step_bench import SWITCHES
from gputrain.hw.plan import Plan
from gputrain.hw.runtime import Runtime
from gputrain.planner.memory.fake_runtime import FakeRuntime, on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.time.fusion import kernel_costs
from gputrain.planner.time.roofline import KernelCost, busy_seconds
from gputrain.planner.work import Switch
from gputrain.session import measured_rates

# One-dimensional convolutions have no channels_last, and the commands for trained models no CUDA graphs. The 16-bit row
# comes last, because these commands compute in fp32.
_BY_NAME = {switch[2]: switch for switch in SWITCHES}
SOUND_SWITCHES: tuple[Switch, ...] = tuple(_BY_NAME[name] for name in ("", "tf32", "compile", "precision"))
Compute = Callable[[], object]


class InferenceBench:
    """Computes the same items again and again, as the commands that use a trained model do."""

    def __init__(
        self,
        build: Callable[[Runtime], Compute],
        runtime: Runtime,
        items: int,
        item_seconds: float = 0.0,
        flops: float | None = None,
    ) -> None:
        """`build` makes a model with random weights and its inputs on the runtime's device, and returns a function that
        computes `items` items of `item_seconds` of sound from them. `flops` are those of all items; None: those of the
        kernels."""
        self.build, self.runtime, self.items, self.item_seconds = build, runtime, items, item_seconds
        self.flops = flops
        self.compute = build(runtime)

    @torch.no_grad()
    def step(self) -> None:
        with self.runtime.autocast():
            self.compute()

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        rates = measured_rates(self.runtime)  # They are measured first, while the device is idle.
        figures: dict[str, Any] = timing.time_steps(self.step, self.runtime.device, warmup=warmup, steps=steps)
        seconds, kernels = figures["seconds_per_step"], inference_kernels(self.build, self.runtime.plan)
        flops = sum(kernel.flops for kernel in kernels) if self.flops is None else self.flops
        figures |= timing.rates(seconds, self.items, flops, self.runtime)
        figures["predicted_seconds_per_step"] = busy_seconds(kernels, rates)
        if self.item_seconds:
            figures["real_time_factor"] = seconds / (self.items * self.item_seconds)
            figures["audio_seconds_per_second"] = 1 / figures["real_time_factor"]
        figures["plan"] = {name: setting.value for name, setting in self.runtime.plan.settings.items()}
        return figures


def inference_kernels(build: Callable[[Runtime], Compute], plan: Plan) -> tuple[KernelCost, ...]:
    """Returns the kernels of what `build` returns, by shapes alone, for any device of the plan."""
    timeline = MemoryTimeline.on(str(plan.device.value))
    with on_fake_tensors(), torch.no_grad():
        runtime = FakeRuntime(plan, timeline)
        compute = build(runtime)
        with timeline.watching(), runtime.autocast():
            compute()
    return kernel_costs(timeline.log.operators)


def sound_title(described: str, inference: bool, items: str) -> str:
    return f"{described}, {items} {'at once, without gradients' if inference else 'a step'}"
