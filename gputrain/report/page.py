"""Composes a report: figures, curves, samples, settings, history and commands of runs, as one HTML file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from gputrain import __version__
from gputrain.engine.stop import format_duration
from gputrain.kinds import kinds
from gputrain.report import memory_chart, next_commands, settings_table
from gputrain.report.curves import COLOURS, Chart, Curve, draw
from gputrain.report.media import MediaBudget
from gputrain.report.metric_names import TRAINING_LOSSES, format_value, style_of
from gputrain.report.records import RunRecord, now
from gputrain.report.sections import SampleSection, sample_section
from gputrain.report.selection import Selector, selectors_of

MOST_CHARTS = 60  # Charts of a section.
MACHINE = ("speed", "data", "memory", "gpu")


@dataclass(frozen=True)
class Headline:
    """The figure at the head of a run: its best value, and from which it came."""

    title: str
    value: str
    detail: str


@dataclass
class RunView:
    """The parts of a page about one run; `style` names its colour."""

    record: RunRecord
    index: int
    headline: Headline | None
    facts: list[tuple[str, str]]
    memory: Markup
    selectors: list[Selector]
    samples: SampleSection
    events: list[tuple[str, str]]
    parts: list[settings_table.RunPart]
    commands: list[next_commands.NextCommand]

    @property
    def style(self) -> str:
        return f"c{self.index % COLOURS}"


@dataclass
class ChartGroup:
    """Charts below one heading; those of a group that `is_folded` are shown on demand."""

    title: str
    charts: list[Markup] = field(default_factory=list)
    is_folded: bool = False


def make_page(records: Sequence[RunRecord], budget: MediaBudget) -> str:
    """Returns the report of runs as HTML."""
    views = [_view(record, index, budget) for index, record in enumerate(records)]
    groups = [group for group in chart_groups(records) if group.charts]
    return _template().render(
        title=", ".join(record.name for record in records), views=views, groups=groups,
        comparison=comparison(records) if len(records) > 1 else [],
        table=settings_table.settings_table(records), plan=settings_table.plan_table(records),
        budget=budget, version=__version__, time=now(), style=Markup(_file("report.css")),
        script=Markup(_file("report.js")), has_many=len(records) > 1,
    )  # fmt: skip


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_file("report.html"))


@cache
def _file(name: str) -> str:
    return files("gputrain.report").joinpath(name).read_text(encoding="utf-8")


def _view(record: RunRecord, index: int, budget: MediaBudget) -> RunView:
    bar = memory_chart.memory_bar("", record.plan)
    memory = Markup("")
    if bar:
        memory = memory_chart.memory_bars([bar]).svg(bar.words, page_colour="currentColor")
    return RunView(
        record, index, headline_of(record), facts_of(record), memory, selectors_of(record),
        sample_section(record, budget),
        settings_table.plan_events(record), settings_table.run_parts(record), next_commands.next_commands(record),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- figures


def headlines_of(record: RunRecord) -> tuple[str, ...]:
    """Returns the figures on held-out data that matter most for the kind of a run; none if the kind is unknown."""
    kind = kinds().get(record.kind)
    return kind.headlines if kind else ()


def headline_metric(record: RunRecord) -> str:
    """Returns the name of the most important metric that a run has; "" if it has none."""
    for name in (*(f"eval/{name}" for name in headlines_of(record)), "eval/score"):
        if name in record.names:
            return name
    return next((name for name in record.names if name.startswith("loss/")), "")


def headline_of(record: RunRecord) -> Headline | None:
    name = headline_metric(record)
    if not name:
        return None
    style, points = style_of(name), record.series(name)
    best_step, best = (max if style.better == "higher" else min)(points, key=lambda point: point[1])
    (first_step, first), (last_step, last) = points[0], points[-1]
    words = [f"at step {best_step:,}" if len(points) > 1 else f"at step {best_step:,}, the only evaluation"]
    if best_step != first_step:
        words.append(f"{format_value(first, style.unit)} at step {first_step:,}")
    if best_step != last_step:
        words.append(f"{format_value(last, style.unit)} at step {last_step:,}, the last")
    where = "best " if len(points) > 1 else ""
    where += style.title + (" on held-out data" if name.startswith("eval/") else " (training)")
    return Headline(where, format_value(best, style.unit), " · ".join(words))


def facts_of(record: RunRecord) -> list[tuple[str, str]]:
    """Returns names and values of what matters next: steps, time, speed, memory, device."""
    steps = f"{record.last_step:,}"
    if record.planned_steps > record.last_step:
        steps += f" of {record.planned_steps:,}"
    facts = [("steps", steps)]
    if epochs := record.series("epoch"):
        facts.append(("epochs", f"{epochs[-1][1]:,.0f}"))
    if record.names:
        facts.append(("time", format_duration(record.seconds)))
    for name in record.names:
        if name.startswith("speed/") and name.endswith("_per_second"):
            values = sorted(value for _, value in record.series(name))
            facts.append(("speed", f"{format_value(values[len(values) // 2])} {style_of(name).title}"))
    if peak := record.series("memory/peak_gb"):
        facts.append(("peak memory", format_value(max(value for _, value in peak), "GB")))
    if record.starts:
        machine = record.starts[-1].get("machine")
        if isinstance(machine, dict) and machine.get("device"):
            facts.append(("device", str(machine["device"])))
    return facts


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of several runs: the best value of each, and which run is best (-1: none)."""

    title: str
    values: list[str]
    best: int


def comparison(records: Sequence[RunRecord]) -> list[ComparedMetric]:
    """Returns the best values of the metrics on held-out data that at least two runs have."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record.names):
        style = style_of(name)
        if not name.startswith("eval/") or not style.better or name.endswith(("/score", "_low", "_high")):
            continue
        choose = max if style.better == "higher" else min
        bests = [choose((value for _, value in record.series(name)), default=None) for record in records]
        present = [value for value in bests if value is not None]
        if len(present) > 1:
            best = bests.index(choose(present)) if len(set(present)) > 1 else -1
            values = [settings_table.MISSING if one is None else format_value(one, style.unit) for one in bests]
            rows.append(ComparedMetric(style.title, values, best))
    return rows


# ------------------------------------------------------------------------------------------------------------ curves


def chart_groups(records: Sequence[RunRecord]) -> list[ChartGroup]:
    names = list(dict.fromkeys(name for record in records for name in record.names))
    first = {name: rank for rank, name in enumerate(dict.fromkeys(_leading(records)))}
    held_out = [name for name in names if name.startswith("eval/") and not name.endswith(("_low", "_high"))]
    compared = [name for name in held_out if style_of(name).better and name != "eval/score"]
    held_out = sorted(compared or held_out, key=lambda name: first.get(name, len(first)))
    groups = [
        ("On held-out data", held_out, False),
        ("Training losses", [name for name in names if name.startswith("loss/")], False),
        ("Speed, memory and device", [name for name in names if name.split("/")[0] in MACHINE], False),
        ("Gradients, learning rate and everything else", [
            name for name in names
            if name.startswith(("gradient_norm/", "statistics/", "disk/")) or name == "learning_rate"
            or (name.startswith("eval/") and name not in held_out)
            or (name.startswith("nonfinite/") and any(value for record in records for _, value in record.series(name)))
        ], True),
    ]  # fmt: skip
    reach = max((record.last_step for record in records), default=0)
    return [
        ChartGroup(title, [draw(chart) for chart in _charts(records, chosen[:MOST_CHARTS], reach)], is_folded)
        for title, chosen, is_folded in groups
    ]


def _leading(records: Sequence[RunRecord]) -> Iterator[str]:
    for record in records:
        yield from (f"eval/{name}" for name in headlines_of(record))


def _charts(records: Sequence[RunRecord], names: Sequence[str], reach: int) -> Iterator[Chart]:
    for name in names:
        found = [(index, record, record.series(name)) for index, record in enumerate(records)]
        curves = [Curve(record.name, index, points) for index, record, points in found if points]
        for index, record, points in found:
            if points and (trained := record.series(TRAINING_LOSSES.get(name, ""))):
                curves.append(Curve(f"{record.name}, training", index, trained, is_training=True))
        style = style_of(name)
        levels, marks = [], []
        if len(records) == 1:
            marks = [part.first_step for part in settings_table.run_parts(records[0])[1:] if part.first_step]
            bar = memory_chart.memory_bar("", records[0].plan) if name == "memory/peak_gb" else None
            levels = [("predicted", bar.total_gb)] if bar else []
        yield Chart(style.title, curves, style.unit, style.better, levels, marks, reach)


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns short names of run folders: the last part of the path, or as many as distinguish them."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(set(resolved)):
            break
    return names
