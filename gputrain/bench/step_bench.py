"""Benchmarks of the train commands: each row adds a setting, measured in real training steps on synthetic data.

`python -m gputrain.bench.step_bench KIND --row REQUEST` is the child process that measures a row.
"""

import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gputrain.bench import runner
from gputrain.bench.options import data_options, measured_training
from gputrain.bench.runner import BenchReport, BenchRow, NotMeasured, Settings
from gputrain.config import assemble
from gputrain.engine.cuda_graph import replay_gradients_if_planned
from gputrain.engine.recipe import Recipe
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Saving
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.hw.plan import Plan
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply, memory_gb, synchronize
from gputrain.kinds import ModelKind, kinds
from gputrain.planner.kind_work import KindWork, PlanTarget, S, TrainSettings
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.model_planner import measured_rates
from gputrain.planner.time.roofline import DeviceRates, StepCost

log = logging.getLogger(__name__)

PLAIN: Settings = {
    "precision": "fp32",
    "channels_last": False,
    "use_torch_compile": False,
    "use_cuda_graphs": False,
}


def bench_rows(work: KindWork[Any], settings: Any) -> list[BenchRow]:
    """Returns the rows; each adds a setting to those of the row before."""
    options, train = settings.bench, kinds()[work.kind].train
    shared = {
        "untimed_steps": options.untimed_steps, "steps": options.steps, "device": settings.hardware.device,
        "options": data_options(settings, train),
    }  # fmt: skip
    values, rows = measured_training(settings, train) | PLAIN, []
    for label, added, switch in work.switches:
        values = values | added
        rows.append(BenchRow(label, {**shared, "switch": switch, "train": values}))
    return rows


def run_bench(work: KindWork[Any], settings: Any) -> tuple[BenchReport, Path]:
    """Measures every row of a model's benchmark, and writes JSON. Returns the report and its path.

    Raises UserError for the same values as the train command, and if the folder cannot be written.
    """
    measured = kinds()[work.kind].train
    train: Any = assemble(measured, measured_training(settings, measured))
    title = f"train-{work.kind}: {work.synthetic(train, **data_options(settings, measured)).title} a step"
    report = BenchReport(title, f"{work.item}s", runner.command_line("gputrain"))
    written = runner.run_rows(
        report,
        bench_rows(work, settings),
        (sys.executable, "-m", "gputrain.bench.step_bench", work.kind),
        minutes=settings.bench.row_minutes,
        folder=settings.saving.output_dir,
        name=f"bench_{work.kind}",
    )
    return report, written


class StepBench:
    """A training on synthetic data, step by step, with everything that a real one does between loading and logging."""

    def __init__(
        self,
        build: Callable[[Runtime], Recipe],
        loaded: Any,
        settings: TrainSettings,
        runtime: Runtime,
        folder: Path,
        item_seconds: float = 0.0,
    ) -> None:
        """`build` makes the recipe; `loaded` is the batch of every step, as the data loader gives it; `item_seconds` is
        the audio of an item."""
        self.build, self.settings, self.runtime = build, settings, runtime
        self.recipe = build(runtime)
        self.loaded, self.item_seconds = loaded, item_seconds
        if runtime.device.type == "cuda":
            self.loaded = tree_map_only(Tensor, Tensor.pin_memory, loaded)
        run = Run(folder, Saving(output_dir=folder), {}, "")
        self.state = TrainState.begin(self.recipe, settings.schedule, runtime, run)
        replay_gradients_if_planned(self.state)
        self.steps = 0

    def step(self) -> None:
        batch = self.recipe.prepare(self.loaded, self.steps)
        update(self.state, batch, self.steps, self.settings.schedule.learning_rate)
        self.recipe.average(self.steps)
        self.steps += 1

    def measure(self, *, warmup: int, steps: int) -> dict[str, Any]:
        rates = measured_rates(self.runtime)  # They are measured first, while the device is idle.
        figures: dict[str, Any] = time_steps(self.step, self.runtime.device, warmup=warmup, steps=steps)
        batch = self.recipe.prepare(self.loaded, self.steps)
        flops, items = self.recipe.flops(batch, self.steps), self.recipe.size(batch)
        figures |= rates_of(figures["seconds_per_step"], items, flops, self.runtime)
        figures["micro_batch_size"] = min(items, *self.state.micro_batch.values())
        figures["predicted_seconds_per_step"] = self.predicted_seconds(rates)
        figures["plan"] = {name: setting.value for name, setting in self.runtime.plan.settings.items()}
        if self.item_seconds:
            figures["audio_seconds_per_second"] = self.item_seconds * figures["items_per_second"]
        return figures

    def predicted_seconds(self, rates: DeviceRates) -> float:
        """Returns the time of a step by the roofline of its kernels (planner/time/roofline.py)."""
        items = self.settings.schedule.global_batch_size
        micro_batch = min(items, *self.state.micro_batch.values())
        target = PlanTarget(lambda runtime, _: self.build(runtime), lambda: self.loaded)
        predicted = predict_step(target, self.runtime.plan, micro_batch_size=micro_batch)
        cost = StepCost(predicted.micro_batch, predicted.micro_batch, micro_batch, predicted.update)
        return cost.seconds(rates, micro_batch, math.ceil(items / micro_batch))


def begin_bench(work: KindWork[S], settings: S, runtime: Runtime, folder: Path, **options: Any) -> StepBench:
    """Returns a training on synthetic data, by the options of a benchmark."""
    settings = work.completed(settings)
    made = work.synthetic(settings, **options)
    return StepBench(made.recipe, made.batch(), settings, runtime, folder, item_seconds=made.seconds)


def measure_bench_row(kind: ModelKind, request: Settings) -> dict[str, Any]:
    """Runs in the child: returns the figures of a row. Raises NotMeasured if its switch is off on this machine."""
    switch, work = request["switch"], kind.work()
    train: TrainSettings = assemble(kind.train, request["train"])
    plan = work.decide(probe(), train.hardware)
    check_switch(plan, switch)
    runtime = apply(plan)
    with tempfile.TemporaryDirectory() as folder:
        bench = begin_bench(work, train, runtime, Path(folder), **request["options"])
        figures: dict[str, Any] = bench.measure(warmup=request["untimed_steps"], steps=request["steps"])
    check_switch(bench.runtime.plan, switch)  # A switch that failed in use is off by now.
    if switch == "precision":
        figures["label"] = f"+ {plan.precision.value}"
    return figures


class Laps:
    """Times between marks: on CUDA by the device's clock, without waiting for the device; otherwise wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.cpu_marks: list[float] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
            self.cpu_marks.append(time.process_time())

    def seconds(self) -> list[float]:
        """Returns the seconds of each lap. Waits for the device."""
        if self.device.type != "cuda":
            return _differences(self.marks)
        synchronize(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.marks)]

    def cpu_seconds(self) -> list[float]:
        """Returns the CPU seconds of each lap, over all threads of this process; none on CUDA."""
        return _differences(self.cpu_marks)


def _differences(marks: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(marks)]


def time_steps(step: Callable[[], object], device: torch.device, *, warmup: int, steps: int) -> dict[str, float]:
    """Returns the seconds of a step (the median of `steps` after `warmup`) and of the first one, which compiles, and
    the peak memory.

    On CUDA the peaks are those of the timed steps, on the CPU the peak of the process so far.
    """
    began = time.perf_counter()
    for done in range(max(1, warmup)):
        log.info("warm-up step %d", done + 1)
        step()
        synchronize(device)
        if done == 0:
            first = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    laps = Laps(device)
    log.info("timing %d steps", steps)
    laps.mark()
    for _ in range(steps):
        step()
        laps.mark()
    figures = {"seconds_per_step": statistics.median(laps.seconds()), "first_step_seconds": first}
    if laps.cpu_seconds():
        figures["cpu_seconds_per_step"] = statistics.median(laps.cpu_seconds())
    return figures | {name.removeprefix("memory/"): value for name, value in memory_gb(device).items()}


def rates_of(seconds: float, items: int, flops: float, runtime: Runtime) -> dict[str, float]:
    """Returns items a second, TFLOPS, and on a GPU their share of the FLOPS of a matrix product."""
    found = {"items_per_second": items / seconds, "tflops": flops / seconds / 1e12}
    share = runtime.peak_share(flops / seconds)
    return found if share is None else {
        **found, "product_tflops": runtime.product_rate / 1e12, "share_of_product": share
    }  # fmt: skip


def check_switch(plan: Plan, switch: str) -> None:
    """Raises NotMeasured if a setting of the plan is off."""
    if switch:
        setting = getattr(plan, switch)
        if setting.value in (False, "fp32"):
            raise NotMeasured(setting.reason)


if __name__ == "__main__":
    runner.answer(lambda request: measure_bench_row(kinds()[sys.argv[1]], request))
