"""What the learning races share: runs that stop the clock to be evaluated, their resumption, the summary and the chart.

A race trains a peer's own training step and ours on the same data with the same architecture, on one thread, for equal
CPU seconds (or `--steps`), and evaluates both on held-out data with code of neither side. The clock is
`time.process_time()`: it counts everything from building the model on (a start that is fitted to the data included),
and stands still while a side is evaluated and while data are prepared. Each run of a side and a seed is a process of
its own; its result is a file in `--work-dir`, so that an interrupted race goes on where it was, and races of other
sides or seeds add to the same summary.

A side is "peer", "ours", or one of them with changed options: "ours+learning_rate=3e-4,warmup_steps=0".
"""

import argparse
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image, ImageDraw

from gputrain.bench import runner
from gputrain.bench.runner import BenchRow, Settings
from gputrain.config import assemble
from gputrain.drawing import INK, PAPER, font
from gputrain.engine.data import Stream, loader
from gputrain.engine.recipe import Recipe
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Saving, StepSchedule, begin
from gputrain.engine.state import TrainState
from gputrain.engine.step import update
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import Runtime, apply

# 97.5 % quantile of Student's t distribution, by degrees of freedom.
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
SHARES = (0.0, 0.25, 0.5, 1.0)  # Points of time at which a side is evaluated.
ENDLESS = 10**9
COLOURS = ("#c98a2b", "#2f6f9f", "#5b8c5a", "#a05195", "#7a7a7a", "#d45087")
FAINT = "#6b7280"
PANEL, GAP, TOP, BOTTOM = (420, 280), 70, 110, 50  # Sizes of the chart, in pixels.

Figures = dict[str, float]
log = logging.getLogger("gputrain.benchmark")


class Trainee(Protocol):
    """A side of a race in training."""

    steps: int

    def step(self) -> None:
        """Makes a training step, from reading the data on."""


@dataclass(frozen=True)
class Metric:
    key: str
    title: str
    better: str  # "higher" or "lower"


@dataclass(frozen=True)
class Race:
    """A race of one kind of model. `measure` runs in a child process and returns `{"points": ..., **facts}`."""

    name: str
    program: str
    metrics: Sequence[Metric]
    measure: Callable[[Settings], dict[str, Any]]
    conditions: str  # Data, architecture and step, in a sentence.
    sides: tuple[str, ...] = ("peer", "ours")


# ------------------------------------------------------------------------------------------------------------- a run


def train_and_evaluate(
    begin_training: Callable[[], Trainee],
    evaluate: Callable[[Any], Figures],
    marks: Sequence[float],
    *,
    by_steps: bool = False,
) -> list[dict[str, Any]]:
    """Trains until the process has used each of these CPU seconds (`by_steps`: has made each of these steps), and
    evaluates there with the clock stopped."""
    began = time.process_time()
    trainee = begin_training()
    used, points = time.process_time() - began, []
    for mark in marks:
        began = time.process_time() - used
        while (trainee.steps if by_steps else time.process_time() - began) < mark:
            trainee.step()
        used = time.process_time() - began
        points.append({"cpu_seconds": used, "steps": trainee.steps, **evaluate(trainee)})
        log.info("%s", json.dumps(points[-1]))
    return points


class OurTraining:
    """Trains a recipe as `engine.train` does, without run folder and logs, and reads the data in this process."""

    def __init__(self, recipe: Recipe, settings: Any, runtime: Runtime, dataset: Any, step_items: int = 0) -> None:
        self.recipe, schedule = recipe, settings.schedule
        run = Run(Path(), Saving(), {}, "")
        self.state = TrainState.begin(recipe, schedule, runtime, run)
        self.schedule = StepSchedule(schedule, begin(None, len(dataset), new_stage=False), step_items)
        self.batches = batches_of(dataset, self.schedule.items_per_step, schedule.seed)
        self.steps = 0

    def step(self) -> None:
        batch = self.recipe.prepare(next(self.batches), self.steps)
        self.state.rank_group.reseed(self.schedule.schedule.seed, self.steps)
        update(self.state, batch, self.steps, self.schedule.learning_rate(self.steps))
        self.recipe.average(self.steps)
        self.steps += 1


def batches_of(dataset: Any, batch_size: int, seed: int) -> Iterator[Any]:
    """Yields the batches that our training of this seed reads, without end. Both sides of a race take them."""
    return loader(dataset, Stream(len(dataset), seed, batch_size, 0, ENDLESS), num_workers=0)


def assemble_for_cpu(kind: type, side: str, **options: Any) -> tuple[Any, Runtime]:
    """Returns the settings of our side, with the changes that its name contains, and their runtime."""
    settings = assemble(kind, {"device": "cpu", **options, **changes_of(side)})
    return settings, apply(decide(probe(), settings.hardware))


def changes_of(side: str) -> dict[str, Any]:
    """Returns the options in the name of a side: "ours+lr=1e-3,seed=3" has two."""
    _, _, listed = side.partition("+")
    pairs = (pair.split("=", 1) for pair in listed.split(",") if pair)
    return {name: json.loads(value) if is_json(value) else value for name, value in pairs}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- all the runs


def main(race: Race, parser: argparse.ArgumentParser, smoke: Settings) -> None:
    """Runs what is missing of a race, and writes the summary and the chart of all runs of these settings."""
    if runner.answer(race.measure):
        return
    options = parse(race, parser, smoke)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for folder in (options.output_dir, options.work_dir):
        runner.open_folder(folder)
    shared = settings_of(options)
    for seed in options.seeds:
        for side in options.sides:
            path = run_path(options.work_dir, race, side, options.seconds, seed)
            if not options.report_only and stored_run(path, shared) is None:
                run_once(race, BenchRow(f"{side}, seed {seed}", {**shared, "side": side, "seed": seed}), path)
    report(race, options, shared)


def parse(race: Race, parser: argparse.ArgumentParser, smoke: Settings) -> argparse.Namespace:
    parser.add_argument("--seconds", type=float, default=200.0, help="CPU seconds of a run")
    parser.add_argument("--steps", type=int, help="steps of a run, in place of CPU seconds: for a machine under load")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sides", nargs="+", default=list(race.sides), help='such as "ours+learning_rate=3e-4"')
    parser.add_argument("--clips", type=int, default=8, help="held-out items that are evaluated")
    parser.add_argument("--work-dir", type=Path, default=Path("race_runs"), help="folder of the single runs")
    parser.add_argument("--report-only", action="store_true", help="run nothing; summarise the stored runs")
    parser.add_argument("--smoke", action="store_true", help="tiny models for a moment, to test the script")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update({"seconds": 4.0, "steps": None, "seeds": [1], "clips": 2, **smoke})
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """Returns the settings that all runs of a summary share."""
    left_out = {"seeds", "sides", "work_dir", "output_dir", "report_only"}
    shared = {name: value for name, value in vars(options).items() if name not in left_out}
    return {"device": "cpu", **{name: str(v) if isinstance(v, Path) else v for name, v in shared.items()}}


def marks_of(settings: Settings) -> dict[str, Any]:
    """Returns the arguments of `train_and_evaluate` that say when to evaluate."""
    length = settings["steps"] or settings["seconds"]
    return {"marks": [share * length for share in SHARES], "by_steps": bool(settings["steps"])}


def run_path(folder: Path, race: Race, side: str, seconds: float, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() or letter in "+-=.,_" else "_" for letter in side)
    return folder / f"{race.name}_{name}_{seconds:g}s_{seed}.json"


def stored_run(path: Path, shared: Settings) -> dict[str, Any] | None:
    """Returns the stored result of a run with these settings."""
    if not path.is_file():
        return None
    stored: dict[str, Any] = json.loads(path.read_text())
    known = {name: value for name, value in stored["settings"].items() if name not in ("side", "seed")}
    return stored if known == shared else None


def run_once(race: Race, row: BenchRow, path: Path) -> None:
    child = (sys.executable, "-W", "ignore", race.program)
    # A core that other programs share takes a few times the CPU seconds, and evaluations are not counted.
    (result,) = runner.measure_rows([row], child, minutes=60 + 4 * row.settings["seconds"] / 60)
    if not result.figures:
        sys.exit(f"{row.label}: {result.reason}")
    machine = {**result.machine, "threads": 1}
    runner.write_json(path, {"settings": row.settings, "machine": machine, **result.figures})
    last = result.figures["points"][-1]
    print(f"{row.label}: " + ", ".join(f"{name} {value:.4g}" for name, value in last.items()), flush=True)


def report(race: Race, options: argparse.Namespace, shared: Settings) -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(options.work_dir.glob(f"{race.name}_*.json")):
        stored = stored_run(path, shared)
        if stored:
            runs.setdefault(stored["settings"]["side"], []).append(stored)
    if not runs:
        sys.exit("no run of these settings is stored")
    first = next(iter(runs.values()))[0]
    length = f"{shared['steps']}_steps" if shared.get("steps") else f"{shared['seconds']:g}s"
    length = "smoke" if options.smoke else length
    name = f"race_{race.name}_{length}"
    path = runner.result_path(options.output_dir, name, str(first["machine"]["device"]))
    order = sorted(runs, key=lambda side: (not side.startswith("peer"), len(side), side))
    sides = {side: summary(race, runs[side]) for side in order}
    content = {
        **first["machine"], "command": runner.command_line(f"python benchmarks/race_{race.name}.py"),
        "conditions": race.conditions, "facts": first.get("facts", {}),
        "interval": "95 % by Student's t distribution over the seeds, +-",
        "metrics": {one.key: f"{one.title}; {one.better} is better" for one in race.metrics},
        "seconds": shared["seconds"], "sides": sides,
    }  # fmt: skip
    runner.write_json(path, content)
    draw(race, sides, f"{first['machine']['device']}, one thread; mean, smallest and largest of the seeds").save(
        path.with_suffix(".png"), optimize=True
    )
    show(race, sides)
    print(path)


def summary(race: Race, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean, interval and values of every metric at each point of time."""
    points = []
    for at in zip(*(run["points"] for run in runs), strict=True):
        found: dict[str, Any] = {
            "cpu_seconds": statistics.fmean(one["cpu_seconds"] for one in at),
            "steps": statistics.fmean(one["steps"] for one in at),
        }
        for metric in race.metrics:
            values = [one[metric.key] for one in at if one.get(metric.key) is not None]
            if values:
                found[metric.key] = {"mean": statistics.fmean(values), "interval": interval(values), "values": values}
        points.append(found)
    return {"seeds": [run["settings"]["seed"] for run in runs], "points": points}


def interval(values: Sequence[float]) -> float | None:
    """Returns half of the 95 % confidence interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return QUANTILES[min(9, len(values) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


def show(race: Race, sides: dict[str, Any]) -> None:
    """Prints a table: a row for each side and point of time."""
    print("| side | CPU-s | steps | " + " | ".join(metric.title for metric in race.metrics) + " |")
    print("|---|---|---|" + "---|" * len(race.metrics))
    for side, found in sides.items():
        for point in found["points"]:
            cells = [cell(point.get(metric.key)) for metric in race.metrics]
            print(f"| {side} | {point['cpu_seconds']:.0f} | {point['steps']:.0f} | {' | '.join(cells)} |")


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    half = found["interval"]
    return f"{found['mean']:.4g}" + ("" if half is None else f" ± {half:.2g}")


# ------------------------------------------------------------------------------------------------------------ chart


def draw(race: Race, sides: dict[str, Any], subtitle: str) -> Image.Image:
    """Returns a chart with a panel for each metric: the mean over seeds, and a band from the smallest to the largest
    value."""
    width, height = PANEL
    shown = [one for one in race.metrics if any(one.key in p for side in sides.values() for p in side["points"])]
    canvas = Image.new("RGB", (GAP + len(shown) * (width + GAP), TOP + height + BOTTOM), PAPER)
    pen = ImageDraw.Draw(canvas, "RGBA")
    pen.text((GAP, 14), f"{race.name}: {race.conditions}", fill=INK, font=font(15))
    pen.text((GAP, 38), subtitle, fill=FAINT, font=font(13))
    at = GAP
    for index, side in enumerate(sides):
        pen.line((at, 72, at + 24, 72), fill=COLOURS[index % len(COLOURS)], width=3)
        pen.text((at + 30, 72), side, fill=INK, font=font(13), anchor="lm")
        at += 60 + int(font(13).getlength(side))
    for number, metric in enumerate(shown):
        _draw_panel(pen, metric, sides, GAP + number * (width + GAP))
    return canvas


def _draw_panel(pen: ImageDraw.ImageDraw, metric: Metric, sides: dict[str, Any], left: int) -> None:
    width, height = PANEL
    curves = {side: [p for p in found["points"] if metric.key in p] for side, found in sides.items()}
    values = [value for points in curves.values() for p in points for value in p[metric.key]["values"]]
    longest = max(p["cpu_seconds"] for points in curves.values() for p in points)
    low, high = min(values), max(values)
    room = (high - low) or 1.0
    text = font(12)

    def place(seconds: float, value: float) -> tuple[float, float]:
        return left + width * seconds / longest, TOP + height - height * (0.05 + 0.9 * (value - low) / room)

    pen.text((left, TOP - 16), f"{metric.title} ({metric.better} is better)", fill=INK, font=text, anchor="lm")
    for value in (low, (low + high) / 2, high):
        _, y = place(0, value)
        pen.line((left, y, left + width, y), fill="#e5e7eb")
        pen.text((left - 6, y), f"{value:.3g}", fill=FAINT, font=text, anchor="rm")
    for seconds in (0, longest / 2, longest):
        pen.text((place(seconds, low)[0], TOP + height + 14), f"{seconds:.0f}", fill=FAINT, font=text, anchor="mm")
    pen.text((left + width / 2, TOP + height + 34), "CPU seconds", fill=FAINT, font=text, anchor="mm")
    for index, points in enumerate(curves.values()):
        colour = COLOURS[index % len(COLOURS)]
        below = [place(p["cpu_seconds"], min(p[metric.key]["values"])) for p in points]
        above = [place(p["cpu_seconds"], max(p[metric.key]["values"])) for p in points]
        if len(points) > 1:
            pen.polygon([*below, *reversed(above)], fill=f"{colour}30")
            pen.line([place(p["cpu_seconds"], p[metric.key]["mean"]) for p in points], fill=colour, width=3)


def one_thread() -> None:
    torch.set_num_threads(1)
