"""Draws curves as SVG: several runs on common axes, linear and logarithmic, plain and smoothed.

Both scales are in the page, and a switch shows one of them, so that curves need no script. A script adds the values
under the pointer, which it reads from the data of the figure. Titles and units of metrics stand here too.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from gputrain.drawing import svg_element
from gputrain.formatting import format_number
from gputrain.report.metrics_file import Points

# Sizes in the units of the drawing, which a screen scales.
WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 10, 30
MOST_POINTS = 220  # Points of a curve that are drawn.
FEW_POINTS = 40  # Up to so many points are marked, and not smoothed.
SMOOTHING_SHARE = 0.05  # Width of the moving average, as a share of the curve.
COLOURS = 6  # Number of colours for runs; further runs begin again, with wider lines.

Columns = NDArray[np.float64]  # Points as rows: a step and a value.
Number = TypeVar("Number", float, NDArray[np.float64])


@dataclass(frozen=True)
class Curve:
    """The values of a metric of one run; `run` is the index of the run, by which it is coloured. On a chart of held-out
    data, a curve of the training is dotted."""

    label: str
    run: int
    points: Points
    is_training: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of one metric. `levels` are horizontal lines with a label, `marks` are steps with a vertical line, and
    `reach` is the last step of the axis. On a page that `has_many` runs, curves differ in dashes and letters too."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    better: str = ""
    levels: Sequence[tuple[str, float]] = ()
    marks: Sequence[int] = ()
    reach: int = 0
    has_many: bool = False

    @property
    def summary(self) -> str:
        """The chart in words, for those who cannot see it."""
        parts = []
        for curve in self.curves:
            (first_step, first), (last_step, last) = curve.points[0], curve.points[-1]
            best = (max if self.better == "higher" else min)(map(itemgetter(1), curve.points))
            words = f"{format_value(first, self.unit)} at step {first_step}, {format_value(last, self.unit)} at step "
            words += f"{last_step}" + (f", best {format_value(best, self.unit)}" if self.better else "")
            parts.append(f"{curve.label}: {words}" if self.has_many or len(self.curves) > 1 else words)
        return f"{self.title}: {'; '.join(parts)}"


@dataclass
class Axes:
    """Maps steps and values to places in the drawing."""

    reach: int
    low: float
    high: float
    logarithmic: bool = False
    ticks: list[float] = field(default_factory=list)

    def x(self, step: Number) -> Number:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, self.reach)

    def y(self, value: Number) -> Number:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), np.log10(np.maximum(value, 1e-300))
        share: Number = np.clip((value - low) / (high - low), -0.05, 1.05)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def draw(chart: Chart) -> Markup:
    """Returns a chart with its title and its data as HTML. Every curve needs a point."""
    points = [np.array(curve.points, dtype=np.float64) for curve in chart.curves]
    values = np.concatenate([*(columns[:, 1] for columns in points), [level for _, level in chart.levels]])
    low, high = float(values.min()), float(values.max())
    reach = max(chart.reach, *(curve.points[-1][0] for curve in chart.curves))
    scales = [("lin", linear_axes(low, high, reach, is_share=chart.unit == "%"))]
    if low > 0 and high > 1.5 * low:
        scales.append(("log", logarithmic_axes(low, high, reach)))
    lines = [_lines(curve, of_curve) for curve, of_curve in zip(chart.curves, points, strict=True)]
    layers = Markup("").join(_layer(chart, lines, axes, name if len(scales) > 1 else "both") for name, axes in scales)
    data = {
        "reach": reach, "unit": chart.unit, "left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH,
        "curves": [
            {"label": curve.label, "run": curve.run, "letter": letter_of(curve.run) if chart.has_many else "",
             "points": _rounded(thinned(columns))} for curve, columns in zip(chart.curves, points, strict=True)
        ],
    }  # fmt: skip
    arrow = {"higher": "↑ higher is better", "lower": "↓ lower is better"}.get(chart.better, "")
    arrow += "; dotted: training" if any(curve.is_training for curve in chart.curves) else ""
    unit = f" ({chart.unit})" if chart.unit else ""
    return Markup(
        '<figure class="chart" tabindex="0" data-chart="{data}">'
        "<figcaption><b>{title}{unit}</b> <span>{arrow}</span></figcaption>"
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}">{layers}'
        '<line class="rule" y1="{top}" y2="{bottom}" x1="-9" x2="-9"/></svg>'
        '<div class="tip" aria-live="polite" hidden></div></figure>'
    ).format(
        data=json.dumps(data, separators=(",", ":")), title=chart.title, unit=unit, arrow=arrow, summary=chart.summary,
        width=WIDTH, height=HEIGHT, layers=layers, top=TOP, bottom=HEIGHT - BOTTOM,
    )  # fmt: skip


def _layer(chart: Chart, lines: Sequence[dict[str, Columns]], axes: Axes, name: str) -> Markup:
    across, upright = {"x1": LEFT, "x2": WIDTH - RIGHT}, {"y1": TOP, "y2": HEIGHT - BOTTOM}
    parts: list[Markup] = []
    for value in axes.ticks:
        y = axes.y(value)
        parts.append(svg_element("line", class_="grid", **across, y1=y, y2=y))
        shown = tick_label(100 * value if chart.unit == "%" else value)
        parts.append(svg_element("text", shown, x=LEFT - 6, y=y + 4, text_anchor="end"))
    for step in step_ticks(axes.reach):
        anchor = "end" if axes.x(step) > WIDTH - RIGHT - 24 else "middle"
        parts.append(svg_element("text", _step(step), x=axes.x(step), y=HEIGHT - 10, text_anchor=anchor))
    for step in chart.marks:
        parts.append(svg_element("line", class_="mark", x1=axes.x(step), x2=axes.x(step), **upright))
    for label, level in chart.levels:
        y = axes.y(level)
        parts.append(svg_element("line", class_="level", **across, y1=y, y2=y))
        parts.append(svg_element("text", label, class_="level", x=WIDTH - RIGHT - 2, y=y - 4, text_anchor="end"))
    parts += [
        _curve(curve, of_curve, axes, has_many=chart.has_many)
        for curve, of_curve in zip(chart.curves, lines, strict=True)
    ]
    return svg_element("g", Markup("").join(parts), class_=name)


def tick_label(value: float) -> str:
    """Returns all digits of a round value: 0.9375, 12.5; large and tiny ones as `format_number` does."""
    return f"{value:.10g}" if value == 0 or 1e-3 <= abs(value) < 1000 else format_number(value)


def letter_of(run: int) -> str:
    """Returns the letter that marks a run for those who do not see colours."""
    return chr(ord("A") + run % 26)


def _lines(curve: Curve, points: Columns) -> dict[str, Columns]:
    """Returns the lines of a curve on any scale, by their class."""
    if curve.is_training:
        return {"": thinned(smoothed(points))}
    if len(points) <= FEW_POINTS:
        return {"": points}
    return {"raw": extremes(points), "smooth": thinned(smoothed(points))}


def _curve(curve: Curve, lines: Mapping[str, Columns], axes: Axes, *, has_many: bool) -> Markup:
    style = f"run r{curve.run} c{curve.run % COLOURS}" + (" wide" if curve.run >= COLOURS else "")
    parts = []
    for name, points in lines.items():
        named = {"class_": name} if name else {}
        parts.append(svg_element("path", **named, d=_path(axes.x(points[:, 0]), axes.y(points[:, 1]))))
    if curve.is_training:
        style += " training"
    elif len(curve.points) <= FEW_POINTS:
        parts += [svg_element("circle", cx=axes.x(step), cy=axes.y(value), r=2.6) for step, value in curve.points]
    if has_many and not curve.is_training:
        style += " many"
        step, value = curve.points[-1]
        place = {"x": min(axes.x(step) + 3, WIDTH - RIGHT - 2), "y": axes.y(value) - 4}
        parts.append(svg_element("text", letter_of(curve.run), class_="letter", **place))
    return svg_element("g", Markup("").join(parts), class_=style)


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    form = "M" + "L".join(["%.1f %.1f"] * len(x))
    return form % tuple(np.stack([x, y], axis=1).ravel().tolist())


def _rounded(points: Columns) -> list[list[float]]:
    return [[int(step), float(f"{value:.4g}")] for step, value in points.tolist()]


def _step(step: int) -> str:
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if step >= 10 * size or (step >= size and step % (size // 10) == 0):
            return f"{step / size:g}{letter}"
    return str(step)


# ------------------------------------------------------------------------------------------------------------ points


def buckets(points: Columns) -> NDArray[np.int64]:
    """Returns where each of at most MOST_POINTS parts of about equal length begins."""
    parts = min(len(points), MOST_POINTS)
    return np.arange(parts) * len(points) // max(1, parts)


def thinned(points: Columns) -> Columns:
    """Returns the middle step and the mean value of each bucket."""
    first = buckets(points)
    counts = np.diff(first, append=len(points))
    means = np.add.reduceat(points[:, 1], first) / counts
    return np.stack([points[first + counts // 2, 0], means], axis=1)


def extremes(points: Columns) -> Columns:
    """Returns the smallest and the largest value of each bucket, so that peaks of long curves stay visible."""
    first, counts, places = buckets(points), np.diff(buckets(points), append=len(points)), []
    for values in (points[:, 1], -points[:, 1]):
        places_of_least = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, first), counts))
        places.append(places_of_least[np.searchsorted(places_of_least, first)])  # The first one of each bucket.
    found: Columns = points[np.unique(places)]
    return found


def smoothed(points: Columns) -> Columns:
    """Returns a centred moving average over SMOOTHING_SHARE of the curve; at the ends, over as much as there is."""
    count = len(points)
    places = np.arange(count)
    near = np.minimum(np.minimum(places, count - 1 - places), max(1, round(SMOOTHING_SHARE * count / 2)))
    sums = np.append(0.0, np.cumsum(points[:, 1]))
    means = (sums[places + near + 1] - sums[places - near]) / (2 * near + 1)
    return np.stack([points[:, 0], means], axis=1)


# -------------------------------------------------------------------------------------------------------------- axes


def linear_axes(low: float, high: float, reach: int, *, is_share: bool = False) -> Axes:
    """Returns axes with about five round ticks, from zero if the values come near it."""
    if high == low:
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (-1.0, 1.0)
    if 0 < low < 0.35 * high:
        low = 0.0
    size = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(size))
    spacing = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= size * 0.95)
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    if is_share and last * spacing > 1 >= high and first >= 0:
        last = round(1 / spacing)
    ticks = [round(spacing * index, 12) for index in range(first, last + 1)]
    return Axes(reach, min(low, ticks[0]), max(high, ticks[-1]), ticks=ticks)


def logarithmic_axes(low: float, high: float, reach: int) -> Axes:
    """Returns logarithmic axes with ticks at powers of ten, or at 1, 2 and 5 times these for a small range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    factors = (1, 2, 5) if math.log10(high / low) < 2.2 else (1,)
    around = [factor * 10.0**power for power in range(first - 1, last + 1, every) for factor in factors]
    below = max((tick for tick in around if tick <= low), default=low)
    above = min((tick for tick in around if tick >= high), default=high)
    return Axes(reach, below, above, logarithmic=True, ticks=[tick for tick in around if below <= tick <= above])


def step_ticks(reach: int) -> list[int]:
    """Returns about five round steps, from 0."""
    size = max(1.0, reach / 5)
    unit = 10 ** math.floor(math.log10(size))
    spacing = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= size)
    return [spacing * index for index in range(int(reach // spacing) + 1)]


Better = Literal["higher", "lower", ""]


class MetricStyle(NamedTuple):
    """The title of a metric, its unit ("%": a share of 1), and which direction is better."""

    title: str
    unit: str = ""
    better: Better = ""


# The metrics on held-out data that are also training losses.
TRAINING_LOSSES = {
    "eval/l1": "loss/autoencoder/l1",
    "eval/structural": "loss/autoencoder/structural",
    "eval/mel_distance": "loss/generator/mel",
    "eval/kl": "loss/generator/kl",
    "eval/duration": "loss/generator/duration",
}

STYLES = {
    "score": MetricStyle("score", "", "higher"),
    "psnr_db": MetricStyle("PSNR", "dB", "higher"),
    "ssim": MetricStyle("SSIM", "", "higher"),
    "ms_ssim": MetricStyle("MS-SSIM", "", "higher"),
    "structural": MetricStyle("structural distance", "", "lower"),
    "l1": MetricStyle("L1 distance", "", "lower"),
    "rfid": MetricStyle("rFID", "", "lower"),
    "m_stft": MetricStyle("M-STFT distance", "", "lower"),
    "mel_distance": MetricStyle("mel distance", "", "lower"),
    "mcd_db": MetricStyle("mel-cepstral distortion", "dB", "lower"),
    "mcd_sl_db": MetricStyle("mel-cepstral distortion with length", "dB", "lower"),
    "f0_rmse_cents": MetricStyle("error of the pitch", "cents", "lower"),
    "vuv_f1": MetricStyle("voicing F1", "", "higher"),
    "length_mismatch": MetricStyle("length mismatch", "", "lower"),
    "alignment_gain": MetricStyle("alignment gain", "nats a frame", "higher"),
    "pesq": MetricStyle("PESQ", "", "higher"),
    "rtf": MetricStyle("real-time factor", "", "lower"),
    "cer": MetricStyle("character error rate", "%", "lower"),
    "wer": MetricStyle("word error rate", "%", "lower"),
    "blank_share": MetricStyle("share of blanks", "%"),
    "wait_share": MetricStyle("waiting for data", "%", "lower"),
    "peak_share": MetricStyle("share of the device's peak rate", "%", "higher"),
    "tflops": MetricStyle("arithmetic", "TFLOPS", "higher"),
    "seconds_per_step": MetricStyle("time of a step", "s", "lower"),
    "peak_gb": MetricStyle("peak memory of the training", "GB", "lower"),
    "ram_gb": MetricStyle("RAM in use by all programs", "GB"),
    "device_gb": MetricStyle("GPU memory in use by all programs", "GB"),
    "allocated_gb": MetricStyle("memory allocated by torch", "GB"),
    "reserved_gb": MetricStyle("memory reserved by torch", "GB"),
    "free_gb": MetricStyle("free disk space", "GB"),
    "checkpoint_gb": MetricStyle("size of a checkpoint", "GB"),
    "utilisation": MetricStyle("GPU utilisation", "%", "higher"),
    "power_w": MetricStyle("GPU power", "W"),
    "temperature_c": MetricStyle("GPU temperature", "°C"),
    "thermal_throttling": MetricStyle("slowed down by heat", "%", "lower"),
    "learning_rate": MetricStyle("learning rate"),
}


def style_of(name: str) -> MetricStyle:
    """Returns the style of a metric such as eval/psnr_db or loss/generator/mel."""
    group, _, rest = name.partition("/")
    if group in ("loss", "gradient_norm", "statistics", "nonfinite") and rest:
        return MetricStyle(rest.replace("/", ": ").replace("_", " "), "", "lower" if group == "loss" else "")
    last = name.split("/")[-1]
    speakers, _, figure = last.partition("_")
    if speakers in ("new", "old") and figure in STYLES:  # Of a voice with a new speaker.
        style = STYLES[figure]
        return style._replace(title=f"{style.title} of {speakers} speakers")
    if last in STYLES:
        return STYLES[last]
    if last.endswith("_per_second"):
        return MetricStyle(f"{last.removesuffix('_per_second')} a second", "", "higher")
    return MetricStyle(last.replace("_", " "))


def format_value(value: float, unit: str = "") -> str:
    """Returns a value with about three digits and its unit; shares of 1 in percent."""
    if unit == "%":
        return f"{format_number(100 * value)} %"
    return f"{format_number(value)} {unit}".rstrip()
