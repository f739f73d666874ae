"""Draws the parts of a training's memory as a stacked bar."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from gputrain.drawing import TEXT_SIZE, svg_element

# Colours of the parts, from the bottom of the memory to its top. They differ in lightness too.
PART_COLOURS = {
    "parameters": "#1b4f72", "gradients": "#2e86c1", "optimizer": "#85c1e9", "activations": "#e59866",
    "workspace": "#ba4a00",
}  # fmt: skip
OTHER_COLOUR = "#909497"
BUDGET_COLOUR, MEASURED_COLOUR = "#c0392b", "#1e8449"

FAR = 3.0  # A limit of more than so many times the peak is only named.

# Sizes in pixels.
WIDTH, MARGIN, BAR, LEGEND = 720, 4, 22, 20  # LEGEND is the height of a line of the legend.
COLUMNS = 4  # Of the legend.


@dataclass(frozen=True)
class MemoryBar:
    """The predicted memory of a training: GB by part at the peak, what may be used, and what was measured."""

    parts: Mapping[str, float]
    budget_gb: float | None = None
    measured_gb: float | None = None
    on_cpu: bool = False  # There the measurement contains the program and its libraries.
    ratio: float | None = None  # Measured / predicted, of a step on a GPU.

    @property
    def shown_budget_gb(self) -> float | None:
        """The limit, unless it is so far away that the bar could not be seen."""
        near = self.budget_gb is not None and self.budget_gb <= FAR * max(self.total_gb, self.measured_gb or 0)
        return self.budget_gb if near else None

    @property
    def total_gb(self) -> float:
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """The figures of the bar as text."""
        texts = [f"predicted peak {self.total_gb:.2f} GB"]
        more = " of the whole process" if self.on_cpu else ""
        more += f" ({self.ratio:.3f} of the prediction)" if self.ratio is not None else ""
        texts += [f"measured peak {self.measured_gb:.2f} GB{more}"] if self.measured_gb is not None else []
        texts += [f"of {self.budget_gb:.1f} GB that may be used"] if self.budget_gb is not None else []
        return ", ".join(texts)


def memory_chart(bar: MemoryBar) -> Markup:
    """Draws the parts as a stacked bar in SVG: a red line is the limit, a green one what was measured."""
    texts: dict[str, str | float] = {"font_size": TEXT_SIZE, "fill": "currentColor"}
    largest = max(bar.total_gb, bar.shown_budget_gb or 0, bar.measured_gb or 0) or 1.0
    room = WIDTH - 2 * MARGIN
    limits = [("limit", bar.shown_budget_gb, BUDGET_COLOUR), ("measured", bar.measured_gb, MEASURED_COLOUR)]
    lines = [(name, gb, colour) for name, gb, colour in limits if gb is not None]
    stacked = [(name, gb, PART_COLOURS.get(name, OTHER_COLOUR)) for name, gb in bar.parts.items()]
    parts, top = list[Markup](), MARGIN
    for number, (name, gb, colour) in enumerate([*stacked, *lines]):
        left, top = MARGIN + room * (number % COLUMNS) / COLUMNS, MARGIN + LEGEND * (number // COLUMNS)
        parts.append(svg_element("rect", x=left, y=top, width=10, height=10, fill=colour))
        parts.append(svg_element("text", f"{name} {gb:.3g} GB", x=left + 15, y=top + 10, **texts))
    parts.append(svg_element("text", bar.words, x=MARGIN, y=top + LEGEND + 14, **texts))
    left, top = float(MARGIN), top + LEGEND + 26
    for name, gb, colour in stacked:
        width, title = room * gb / largest, svg_element("title", f"{name}: {gb:.3g} GB")
        parts.append(svg_element("rect", title, x=left, y=top, width=width, height=BAR, fill=colour))
        left += width
    for _, gb, colour in lines:
        x = min(MARGIN + room * gb / largest, WIDTH - MARGIN)
        ends = {"x1": x, "x2": x, "y1": top - 4, "y2": top + BAR + 4}
        parts.append(svg_element("line", **ends, stroke=colour, stroke_width=2))
    return svg_element(
        "svg", Markup("").join(parts), xmlns="http://www.w3.org/2000/svg", font_family="system-ui, sans-serif",
        viewBox=f"0 0 {WIDTH} {top + BAR + 4 + MARGIN}", role="img", aria_label=bar.words,
    )  # fmt: skip


def memory_bar(plan: Mapping[str, Any]) -> MemoryBar | None:
    """Returns the bar of the content of a plan.json; None if it predicts nothing."""
    prediction, measured = plan.get("prediction"), plan.get("measured")
    parts = prediction.get("parts") if isinstance(prediction, dict) else None
    if not isinstance(parts, dict) or not parts or any(_size(gb) is None for gb in parts.values()):
        return None
    peak, ratio = (measured.get(name) if isinstance(measured, dict) else None for name in ("peak_gb", "ratio"))
    budget = prediction.get("budget_gb") if isinstance(prediction, dict) else None
    named = {str(name): float(gb) for name, gb in parts.items()}
    settings = plan.get("settings")
    device = settings.get("device") if isinstance(settings, dict) else None
    on_cpu = isinstance(device, dict) and device.get("value") == "cpu"
    return MemoryBar(named, _size(budget), _size(peak), on_cpu, _size(ratio))


def _size(value: object) -> float | None:
    """Returns a number of plan.json, None if it is not a valid one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < 1e6 else None
