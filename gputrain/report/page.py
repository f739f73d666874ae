"""Composes a report: figures, curves, samples, settings, history and commands of runs, as one HTML file; and writes it,
on request and at the end of a run."""

import base64
import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from gputrain import __version__
from gputrain.engine.checkpoint import BEST
from gputrain.engine.run_folder import CONFIG, history_size
from gputrain.engine.schedule import Saving
from gputrain.engine.stop import COMMAND_CLOCK, EXIT_SECONDS, format_duration, parse_duration
from gputrain.errors import UserError, first_line
from gputrain.files import write_text
from gputrain.formatting import format_rate, shell_command
from gputrain.heartbeat import step_text
from gputrain.hw.ranks import Ranks
from gputrain.kinds import ModelKind, kinds
from gputrain.report import settings_table
from gputrain.report.curves import COLOURS, TRAINING_LOSSES, Chart, Curve, draw, format_value, letter_of, style_of
from gputrain.report.media import MediaBudget
from gputrain.report.memory_chart import memory_bar, memory_chart
from gputrain.report.metrics_file import Points
from gputrain.report.records import RunRecord, RunStatus, now, read_run, short_time
from gputrain.report.sections import PictureItem, SampleSection, sample_section

log = logging.getLogger(__name__)

# Returns what a function makes, or what it made for the same key before, if the version is the same.
Keep = Callable[[Hashable, object, Callable[[], Any]], Any]

MOST_CHARTS = 60  # Charts of a section.
MACHINE = ("speed", "data", "memory", "gpu")
REPORT = "report.html"
MEDIA_SECONDS = 30.0  # Time to read pictures and sounds for a report that a user asks for.
END_SECONDS = 4.0  # The same at the end of a run.
LEAST_SECONDS = 1.5  # With less time before the limit of --max-time, no report is written.


@dataclass(frozen=True)
class Headline:
    """The figure at the head of a run: its best value, and from which it came."""

    title: str
    value: str
    detail: str


@dataclass(frozen=True)
class ShownProgress:
    """The share of a run that is done, None if its end is unknown, and what is done and left, as text."""

    share: float | None
    text: str


def compute(key: Hashable, version: object, make: Callable[[], Any]) -> Any:
    """Makes everything anew, as for a file."""
    return make()


class RunView:
    """The parts of a page about one run, each computed when it is shown. `style` names its colour, and `letter` marks
    it for those who do not see colours."""

    def __init__(self, record: RunRecord, index: int, budget: MediaBudget, keep: Keep = compute, id: str = "") -> None:
        self.record, self.index, self.budget, self.keep, self.id = record, index, budget, keep, id
        self.style, self.letter = f"c{index % COLOURS}", letter_of(index)

    def at(self, *names: str) -> tuple[object, ...]:
        """Returns what a part that is made of some files of the run depends on: it is the same while these are."""
        record = self.record
        return (self.index, record.name, record.kind, *(record.versions.get(name, 0) for name in names))

    @cached_property
    def status(self) -> RunStatus:
        return self.record.status

    @property
    def card_key(self) -> tuple[object, ...]:
        record, files = self.record, ("metrics", "plan", "history", "settings", "notes", "heartbeat", "best")
        return (self.at(*files), self.status, record.notes)

    @cached_property
    def headline(self) -> Headline | None:
        record = self.record
        name = headline_metric(record)
        if not name:
            return None
        style, points = style_of(name), record.metrics.series(name)
        step, value = points[counted_place(record, points)]
        words = [f"at step {step:,}" + (f", in {BEST}" if step == record.best_step else ", the last")]
        for other_step, other in dict((points[0], points[-1])).items():
            if other_step != step:
                is_last = ", the last" * (other_step == points[-1][0])
                words.append(f"{format_value(other, style.unit)} at step {other_step:,}{is_last}")
        return Headline(f"{style.title} on held-out data", format_value(value, style.unit), " · ".join(words))

    @cached_property
    def facts(self) -> list[tuple[str, str]]:
        """Returns names and values of what matters next: steps, time, speed, memory, device."""
        record, metrics = self.record, self.record.metrics
        facts = [("steps", f"{record.last_step:,}")]
        if epochs := metrics.series("epoch"):
            facts.append(("epochs", f"{epochs[-1][1]:,.0f}"))
        if metrics.names:
            facts.append(("time", format_duration(record.seconds)))
        for name in metrics.names:
            if name.startswith("speed/") and name.endswith("_per_second"):
                values = sorted(value for _, value in metrics.series(name))
                unit = name.removeprefix("speed/").removesuffix("_per_second")
                facts.append(("speed", format_rate(values[len(values) // 2], unit)))
        if peak := metrics.series("memory/peak_gb"):
            facts.append(("peak memory", format_value(max(value for _, value in peak), "GB")))
        shown = ("gpu/temperature_c", "gpu/power_w", "gpu/utilisation")
        present = [format_value(metrics.latest[name], style_of(name).unit) for name in shown if name in metrics.latest]
        if present:
            facts.append(("GPU: temperature, power, use", " · ".join(present)))
        if record.starts:
            machine = record.starts[-1].get("machine")
            if isinstance(machine, dict) and machine.get("device"):
                facts.append(("device", str(machine["device"])))
        return facts

    @cached_property
    def progress(self) -> ShownProgress | None:
        """Returns the progress of a run that goes on, or has a known end and has not finished."""
        record, beat = self.record, self.record.beat if self.status.state == "running" else None
        done, planned = record.last_step, record.planned_steps
        if self.status.state == "finished" or not (planned or beat):
            return None
        words = [beat.text if beat else step_text(done, planned)]
        if planned:
            words.append(f"{100 * done / planned:.0f} %")
        if beat and beat.seconds_left is not None:
            words.append(f"{format_duration(beat.seconds_left)} left")
        if beat and beat.ends_at:
            words.append(f"ends by {short_time(beat.ends_at)}")
        return ShownProgress(min(1.0, done / planned) if planned else None, " · ".join(words))

    @cached_property
    def memory(self) -> Markup:
        """The chart of the predicted and the measured memory; nothing if the plan predicts none."""
        bar = memory_bar(self.record.plan)
        return memory_chart(bar) if bar else Markup("")

    @cached_property
    def samples(self) -> SampleSection:
        found: SampleSection = self.keep(
            (self.id, "samples"), self.at("samples"), lambda: sample_section(self.record, self.budget)
        )
        return found

    @cached_property
    def events(self) -> list[tuple[str, str, bool]]:
        return settings_table.plan_events(self.record)

    @cached_property
    def parts(self) -> list[settings_table.RunPart]:
        return settings_table.run_parts(self.record)

    @cached_property
    def commands(self) -> list["NextCommand"]:
        return next_commands(self.record)


class ChartGroup(NamedTuple):
    """Charts below one heading; those of a group that `is_folded` are shown on demand."""

    title: str
    charts: list[Markup]
    is_folded: bool


class Parts:
    """Marks the parts of a live page with the hashes of their names and contents, by which the browser gets only those
    that have changed. A part whose `key` is that of the last time is not rendered again. A file has no marks."""

    def __init__(self, *, is_live: bool) -> None:
        self.is_live = is_live
        self.shown: dict[str, tuple[str, Markup]] = {}  # Hash and content of each part of the last rendering.
        self._kept: dict[str, tuple[object, str, Markup]] = {}

    def __call__(self, name: str, key: object, caller: Callable[[], Markup]) -> Markup:
        if not self.is_live:
            return caller()
        before = self._kept.get(name)
        if before is None or before[0] != key:
            try:
                content = caller()
            except Exception as error:  # A run that is damaged in an unexpected way does not hide the others.
                log.exception("internal error of gputrain, please report it: %s cannot be shown: %s", name, error)
                content = Markup('<p class="notes">This part cannot be shown: the terminal has the reason.</p>')
            digest = hashlib.blake2b(f"{name} {content}".encode("utf-8", "replace"), digest_size=5).hexdigest()
            before = self._kept[name] = (key, digest, content)
        self.shown[name] = before[1:]
        return Markup('<div data-part="{}" data-hash="{}">{}</div>').format(name, *before[1:])

    def render(self, **values: Any) -> str:
        """Returns the page, and notes its parts."""
        self.shown = {}
        page = _template("report.html").render(part=self, version=__version__, time=now(), **values)
        self._kept = {name: self._kept[name] for name in self.shown}
        return page


def make_page(records: Sequence[RunRecord], budget: MediaBudget) -> str:
    """Returns the report of runs as HTML, complete in itself."""
    views = [RunView(record, index, budget) for index, record in enumerate(records)]
    return Parts(is_live=False).render(
        live=None,
        budget=budget,
        **content_of(views, chart_groups(records)),
        **page_assets("data:", "report.js", len(views)),
    )


def content_of(views: Sequence[RunView], groups: Sequence[ChartGroup]) -> dict[str, Any]:
    """Returns what the template shows of runs."""
    records = [view.record for view in views]
    title = f"{len(records)} runs compared" if len(records) > 1 else "".join(record.name for record in records)
    return {
        "title": title, "views": views, "groups": [group for group in groups if group.charts], "overview": False,
        "has_many": len(records) > 1, "comparison": partial(comparison, records),
        "table": partial(settings_table.settings_table, records), "plan": partial(settings_table.plan_table, records),
        "at": lambda *names: tuple(view.at(*names) for view in views),
    }  # fmt: skip


def page_assets(media: str, scripts: str, runs: int, further: str = "") -> dict[str, Any]:
    """Returns the style and the scripts of a page about so many runs, and its content-security policy: nothing else is
    executed, and nothing is loaded but media from `media`. The policy has `further` directives."""
    style = _file("report.css") + "".join(
        f"body:has(#run-{index}:not(:checked)) .r{index} {{ display: none; }}\n" for index in range(runs)
    )
    script = "".join(map(_file, scripts.split()))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (
        f"default-src 'none'; img-src {media}; media-src {media}; style-src 'sha256-{hashes[0]}'; "
        f"script-src 'sha256-{hashes[1]}'{further}"
    )
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_file),
    )  # fmt: skip
    return environment.get_template(name)


@cache
def _file(name: str) -> str:
    return files("gputrain.report").joinpath(name).read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- figures


def headlines_of(record: RunRecord) -> tuple[str, ...]:
    """Returns the figures on held-out data that matter most for the kind of a run; none if the kind is unknown."""
    kind = kinds().get(record.kind)
    return kind.headlines if kind else ()


def headline_metric(record: RunRecord) -> str:
    """Returns the name of the most important metric on held-out data that a run has; "" if it has none."""
    for name in (*(f"eval/{name}" for name in headlines_of(record)), "eval/score"):
        if name in record.metrics.names:
            return name
    return ""


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of several runs: the value that counts of each, and which run is best (-1: none)."""

    title: str
    values: list[str]
    best: int


def comparison(records: Sequence[RunRecord]) -> list[ComparedMetric]:
    """Returns the values that count of the metrics on held-out data that at least two runs have."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record.metrics.names):
        style = style_of(name)
        if not name.startswith("eval/") or not style.better or name.endswith(("/score", "_low", "_high")):
            continue
        series = [(record, record.metrics.series(name)) for record in records]
        found = [points[counted_place(record, points)][1] if points else None for record, points in series]
        present = [value for value in found if value is not None]
        if len(present) > 1:
            best = found.index((max if style.better == "higher" else min)(present))
            others = [value for index, value in enumerate(found) if index != best and value is not None]
            is_best = all(is_apart(records[best], name, other) for other in others)
            values = [settings_table.MISSING if value is None else format_value(value, style.unit) for value in found]
            rows.append(ComparedMetric(style.title, values, best if is_best else -1))
    return rows


def counted_place(record: RunRecord, points: Points) -> int:
    """Returns the place of the evaluation that counts: that of checkpoint_best.pt, which the commands that use a model
    take, or the last one if there is none."""
    return next((place for place, (step, _) in enumerate(points) if step == record.best_step), -1)


def is_apart(record: RunRecord, name: str, other: float) -> bool:
    """Returns True if a run's metric differs from another value by more than the noise of the held-out data: its 95 %
    interval or, without one, how much it has changed from and to the evaluations beside it."""
    points, low, high = (record.metrics.series(f"{name}{end}") for end in ("", "_low", "_high"))
    place = counted_place(record, points) % len(points)
    if len(points) == len(low) == len(high):
        return not low[place][1] <= other <= high[place][1]
    changes = [abs(value - points[place][1]) for _, value in points[max(0, place - 1) : place + 2]]
    return len(points) > 1 and abs(other - points[place][1]) > max(changes)


# ------------------------------------------------------------------------------------------------------------ curves


def chart_groups(records: Sequence[RunRecord]) -> list[ChartGroup]:
    names = list(dict.fromkeys(name for record in records for name in record.metrics.names))
    leading = dict.fromkeys(f"eval/{name}" for record in records for name in headlines_of(record))
    first = {name: rank for rank, name in enumerate(leading)}
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
            or (name.startswith("nonfinite/")
                and any(value for record in records for _, value in record.metrics.series(name)))
        ], True),
    ]  # fmt: skip
    reach = max((record.metrics.last_step for record in records), default=0)
    return [
        ChartGroup(
            title + (f": the first {MOST_CHARTS} of {len(chosen):,}" if len(chosen) > MOST_CHARTS else ""),
            list(_charts(records, chosen[:MOST_CHARTS], reach)), is_folded,
        )
        for title, chosen, is_folded in groups
    ]  # fmt: skip


def _charts(records: Sequence[RunRecord], names: Sequence[str], reach: int) -> Iterator[Markup]:
    for name in names:
        found = [(index, record, record.metrics.series(name)) for index, record in enumerate(records)]
        curves = [Curve(record.name, index, points) for index, record, points in found if points]
        for index, record, points in found:
            if points and (trained := record.metrics.series(TRAINING_LOSSES.get(name, ""))):
                curves.append(Curve(f"{record.name}, training", index, trained, is_training=True))
        style = style_of(name)
        levels, marks = [], []
        if len(records) == 1:
            marks = [part.first_step for part in settings_table.run_parts(records[0])[1:] if part.first_step]
            bar = memory_bar(records[0].plan) if name == "memory/peak_gb" else None
            levels = [("predicted", bar.total_gb)] if bar else []
        yield draw(Chart(style.title, curves, style.unit, style.better, levels, marks, reach, len(records) > 1))


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Returns short names of run folders: the last part of the path, or as many as distinguish them."""
    resolved = [folder.resolve() for folder in folders]
    for parts in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-parts:]) for path in resolved]
        if len(set(names)) == len(set(resolved)):
            break
    return names


# ---------------------------------------------------------------------------------------------------------- commands


class NextCommand(NamedTuple):
    """A command to copy, and what it does."""

    purpose: str
    line: str


def next_commands(run: RunRecord) -> list[NextCommand]:
    """Returns the commands for the kind of the run; for an unknown kind, only that of TensorBoard."""
    folder = run.folder
    board = NextCommand("the curves in TensorBoard", shell_command("tensorboard", "--logdir", folder / "logs"))
    kind = kinds().get(run.kind)
    if kind is None:
        return [board]
    go_on = ["gputrain", kind.command, "--config", folder / CONFIG, "--resume-from", "auto"]
    go_on += ["--output-dir", folder] if _is_elsewhere(run) else []
    return [
        NextCommand("continue, or train longer with a larger --num-epochs or --num-steps", shell_command(*go_on)),
        *model_commands(folder, kind, run.settings),
        NextCommand("watch it live in a browser", shell_command("gputrain", "watch", folder)),
        NextCommand("write this report again", shell_command("gputrain", "report", folder)),
        board,
    ]


def model_commands(run: Path, kind: ModelKind, settings: Mapping[str, Any]) -> list[NextCommand]:
    """Returns the commands that use the model of a run with these settings."""
    named = settings.get("data_path") or "DATA"
    data = [word for folder in (named if isinstance(named, list) else [named]) for word in ("--data-path", folder)]
    purpose, name, *words = kind.use
    return [
        NextCommand("evaluate on held-out data", shell_command("gputrain", "evaluate", "--model", run, *data)),
        NextCommand(purpose, shell_command("gputrain", name, "--model", run, *words)),
        NextCommand("export", shell_command("gputrain", "export", "--model", run, "--output-dir", "EXPORT")),
    ]


def _is_elsewhere(run: RunRecord) -> bool:
    """Returns True if the configuration names another folder, as that of a copied run does."""
    written = run.settings.get("output_dir")
    try:
        return isinstance(written, str) and os.path.realpath(written) != os.path.realpath(run.folder)
    except ValueError:  # No folder can have this name.
        return True


# -------------------------------------------------------------------------------------------------------------- files


def write_report(runs: Sequence[Path], path: Path, seconds: float = MEDIA_SECONDS) -> int:
    """Write the report of runs as one HTML file. `seconds` limit the time for pictures and sounds. Returns the
    size of the file in bytes.

    Raises UserError if a folder holds no run, or if the file cannot be written.
    """
    records = [read_run(run, name) for run, name in zip(runs, unique_names(runs), strict=True)]
    page = make_page(records, MediaBudget.of(seconds))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write_page(path, page)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", hint="--output-file takes a file to write") from None


def write_comparison(path: Path, title: str, remarks: str, pictures: Sequence[PictureItem]) -> None:
    """Write pictures beside their originals as one HTML file, which shows them as a report does. Raises OSError."""
    page = _template("comparison.html").render(
        live=None, version=__version__, time=now(), title=title, remarks=remarks, pictures=pictures,
        **page_assets("data:", "report.js", 0),
    )  # fmt: skip
    _write_page(path, page)


def _write_page(path: Path, page: str) -> int:
    content = page.encode("utf-8", "replace")  # Names of files may contain bytes that are no UTF-8.
    write_text(path, content.decode())
    return len(content)


@contextlib.contextmanager
def report_at_end(saving: Saving) -> Iterator[None]:
    """Write report.html into the run folder when the block has trained, however it ends.

    An error of the report causes a warning, and nothing else: the outcome of the run stays as it is.
    """
    before = history_size(saving.output_dir)
    try:
        yield
    finally:
        if saving.report and Ranks.launched(os.environ).leads and history_size(saving.output_dir) > before:
            _write_at_end(saving)


def seconds_left(saving: Saving) -> float:
    """Returns the seconds until the command must have ended by --max-time; infinitely many without it."""
    if not saving.max_time or COMMAND_CLOCK.began is None:
        return math.inf
    return parse_duration(saving.max_time) - (time.monotonic() - COMMAND_CLOCK.began) - EXIT_SECONDS / 2


def _write_at_end(saving: Saving) -> None:
    left = seconds_left(saving)
    if left < LEAST_SECONDS:
        again = shell_command("gputrain", "report", saving.output_dir)
        log.info("there is no time for a report before the limit: %s writes it", again)
        return
    try:
        write_report([saving.output_dir], saving.output_dir / REPORT, min(END_SECONDS, left - LEAST_SECONDS / 2))
    except KeyboardInterrupt:
        log.warning("interrupted: %s is not written", REPORT)
    except Exception as error:  # Whatever it is, the training is complete.
        log.warning("%s is not written: %s", REPORT, first_line(error))
