"""What the benchmarks of the train commands share: rows that add one switch each, measured in real training steps."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gputrain.bench import timing
from gputrain.bench.runner import NotMeasured, Row, Settings
from gputrain.engine.recipe import Recipe
from gputrain.engine.run_dir import Run
from gputrain.engine.schedule import Saving
from gputrain.engine.state import TrainState
from gputrain.engine.train import update
from gputrain.hw.plan import Plan, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply
from gputrain.planner.spec import TrainSettings

PLAIN: Settings = {
    "enable_tf32": False,
    "mixed_precision": False,
    "channels_last": False,
    "use_torch_compile": False,
}
# Label, what it adds to the settings of the row before, and the setting of the plan that has to follow.
Switch = tuple[str, Settings, str]


def rows(switches: Sequence[Switch], values: Settings, how: Settings) -> list[Row]:
    """Each with the switches of those before; `how` it is timed."""
    made = []
    for label, added, switch in switches:
        values = values | added
        made.append(Row(label, {**how, "switch": switch, "train": values}))
    return made


class Trial:
    """A training on made-up data, step by step: all that a real one does between loading a batch and logging."""

    def __init__(self, recipe: Recipe, loaded: Any, settings: TrainSettings, runtime: Runtime, folder: Path) -> None:
        """`loaded` is a batch as the data loader gives it, again and again."""
        self.recipe, self.loaded, self.settings, self.runtime = recipe, loaded, settings, runtime
        run = Run(folder, Saving(output_dir=folder), {}, "")
        self.state = TrainState.begin(recipe, settings.schedule, runtime, run)
        self.steps = 0

    def step(self) -> None:
        batch = self.recipe.prepare(self.loaded, self.steps)
        update(self.state, batch, self.steps, self.settings.schedule.learning_rate)
        self.recipe.average(self.steps)
        self.steps += 1

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        """Time, rates, memory, and what the step came down to."""
        product_rate = self.runtime.product_rate  # before there is anything else that could be at work
        figures: dict[str, Any] = timing.time_steps(self.step, self.runtime.device, warmup=warmup, steps=steps)
        batch = self.recipe.prepare(self.loaded, self.steps)
        flops = self.recipe.flops(batch, self.steps)
        items = self.recipe.size(batch)
        figures |= timing.rates(figures["seconds_per_step"], items, flops, product_rate)
        figures["micro_batch_size"] = min(items, *self.state.micro_batch.values())
        return figures | {"plan": {name: setting.value for name, setting in self.runtime.plan.settings.items()}}


def measure_row(settings: Settings, train: TrainSettings, begin: Callable[[Runtime, Path], Trial]) -> dict[str, Any]:
    """In the child: the figures of one row. Raises NotMeasured where the machine does not turn its switch on."""
    switch = settings["switch"]
    plan = decide(probe(), train.hardware)
    check_switch(plan, switch)
    with tempfile.TemporaryDirectory() as folder:
        trial = begin(apply(plan), Path(folder))
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
