"""`gputrain bench train-vae`: what each switch gives on this machine, in real training steps on made-up pictures.

`python -m gputrain.vae.bench` is the child that measures one row.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gputrain import bench, timing
from gputrain.bench import NotMeasured, Report, Row, Settings
from gputrain.config import assemble
from gputrain.hw.plan import Plan, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.run import Run, Training
from gputrain.train import update
from gputrain.vae.config import BenchVae, TrainVae
from gputrain.vae.recipe import VaeRecipe

CHILD = (sys.executable, "-m", "gputrain.vae.bench")

PLAIN = {
    "enable_tf32": False,
    "mixed_precision": False,
    "channels_last": False,
    "use_torch_compile": False,
    "lean": False,
}
# Label, what it adds to the settings of the row before, and the setting of the plan that has to follow.
SWITCHES: tuple[tuple[str, Settings, str], ...] = (
    ("fp32", {}, ""),
    ("+ TF32", {"enable_tf32": True}, "tf32"),
    ("+ bf16", {"mixed_precision": True}, "precision"),
    ("+ channels_last", {"channels_last": True}, "channels_last"),
    ("+ compile", {"use_torch_compile": True}, "compile"),
    ("+ lean", {"lean": True}, ""),
)


def bench_vae(settings: BenchVae) -> tuple[Report, list[Path]]:
    """Measure every row, and write JSON and chart. Raises UserError where the folder cannot be written."""
    title = f"train-vae: {settings.preset}, {settings.image_size} px, {settings.batch_size} images a step"
    report = Report(title, VaeRecipe.unit, bench.command_line("gputrain"))
    written = bench.run(
        report, rows(settings), CHILD, minutes=settings.row_minutes, folder=settings.output_dir, name="bench_vae"
    )
    return report, written


def rows(settings: BenchVae) -> list[Row]:
    """Each with the switches of those before."""
    steps = {"warmup_steps": settings.warmup_steps, "steps": settings.steps, "device": settings.device}
    values = settings.training() | PLAIN
    made = []
    for label, added, switch in SWITCHES:
        values = values | added
        made.append(Row(label, {**steps, "switch": switch, "train": values}))
    return made


class Trial:
    """A training on made-up pictures, step by step: all that a real one does between loading a batch and logging."""

    def __init__(self, settings: TrainVae, runtime: Runtime, folder: Path) -> None:
        self.settings, self.runtime = settings, runtime
        self.recipe = VaeRecipe(settings, runtime, held_out=[])
        run = Run(folder, settings.saving, {}, "")
        self.training = Training.begin(self.recipe, settings.schedule, runtime, run)
        shape = (settings.schedule.whole_batch, 3, settings.data.image_size, settings.data.image_size)
        pictures = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.pictures_BCHW = pictures.pin_memory() if runtime.device.type == "cuda" else pictures
        self.steps = 0

    def step(self) -> None:
        batch = self.recipe.prepare(self.pictures_BCHW, self.steps)
        update(self.training, batch, self.steps, self.settings.schedule.learning_rate)
        self.recipe.average(self.steps)
        self.steps += 1

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        """Time, rates, memory, and what the step came down to."""
        product_rate = self.runtime.product_rate  # before there is anything else that could be at work
        figures: dict[str, Any] = timing.time_steps(self.step, self.runtime.device, warmup=warmup, steps=steps)
        batch = self.recipe.prepare(self.pictures_BCHW, self.steps)
        flops = self.recipe.flops(batch, self.steps)
        items = self.recipe.size(batch)
        figures |= timing.rates(figures["seconds_per_step"], items, flops, product_rate)
        figures["micro_batch_size"] = min(items, *self.training.micro_batch.values())
        return figures | {"plan": {name: setting.value for name, setting in self.runtime.plan.settings.items()}}


def measure(settings: Settings) -> dict[str, Any]:
    """In the child: the figures of one row. Raises NotMeasured where the machine does not turn its switch on."""
    train = assemble(TrainVae, settings["train"])
    switch = settings["switch"]
    plan = decide(probe(), train.hardware)
    check_switch(plan, switch)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(train, apply(plan), Path(folder))
        figures = trial.measure(warmup=settings["warmup_steps"], steps=settings["steps"])
    check_switch(trial.runtime.plan, switch)  # what failed in use is off by now
    if switch == "precision":
        figures["label"] = f"+ {plan.precision.value}"
    return figures


def check_switch(plan: Plan, switch: str) -> None:
    if switch:
        setting = getattr(plan, switch)
        if setting.value in (False, "fp32"):
            raise NotMeasured(setting.reason)


if __name__ == "__main__":
    bench.answer(measure)
