"""Draws the parts of a training's memory as stacked bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gputrain.drawing import FAINT, INK, PAPER, TEXT_SIZE, Drawing, Label, Line, Rectangle, font

# Colours of the parts, from the bottom of the memory to its top. They differ in lightness too.
PART_COLOURS = {
    "parameters": "#1b4f72", "gradients": "#2e86c1", "optimizer": "#85c1e9", "activations": "#e59866",
    "workspace": "#ba4a00",
}  # fmt: skip
OTHER_COLOUR = "#909497"
ON_LIGHT = "#000000"
LIGHT = frozenset({"#85c1e9", "#e59866", OTHER_COLOUR})  # On these, black is read more easily than white.
BUDGET_COLOUR, MEASURED_COLOUR = "#c0392b", "#1e8449"

FAR = 3.0  # A limit of more than so many times the peak is only named.

# Sizes in pixels.
WIDTH, MARGIN, ROW, BAR, LEGEND = 720, 4, 62, 22, 26


@dataclass(frozen=True)
class MemoryBar:
    """The predicted memory of a training: GB by part at the peak, what may be used, and what was measured."""

    label: str
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


def memory_bars(bars: Sequence[MemoryBar]) -> Drawing:
    """Draws a stacked bar for each training, on a common scale: a red line is the limit, a green one what was
    measured."""
    largest = max(max(bar.total_gb, bar.shown_budget_gb or 0, bar.measured_gb or 0) for bar in bars) or 1.0
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    drawing = Drawing(WIDTH, LEGEND + MARGIN + ROW * len(bars))
    at = float(MARGIN)
    legend = [(name, PART_COLOURS.get(name, OTHER_COLOUR)) for name in names]
    legend += [("limit", BUDGET_COLOUR)] if any(bar.shown_budget_gb for bar in bars) else []
    legend += [("measured", MEASURED_COLOUR)] if any(bar.measured_gb is not None for bar in bars) else []
    for name, colour in legend:
        drawing.shapes.append(Rectangle(at, LEGEND / 2 - 5, 10, 10, colour, name))
        drawing.shapes.append(Label(at + 15, LEGEND / 2, name, FAINT))
        at += 15 + font(TEXT_SIZE).getlength(name) + 16
    room = WIDTH - 2 * MARGIN
    for number, bar in enumerate(bars):
        top = LEGEND + ROW * number
        words = f"{bar.label}: {bar.words}" if bar.label else bar.words
        drawing.shapes.append(Label(MARGIN, top + 10, words, INK))
        left = float(MARGIN)
        for name, gb in bar.parts.items():
            width = room * gb / largest
            colour = PART_COLOURS.get(name, OTHER_COLOUR)
            drawing.shapes.append(Rectangle(left, top + 22, width, BAR, colour, f"{name}: {gb:.3g} GB"))
            size = f"{gb:.2g}"
            if font(TEXT_SIZE).getlength(size) + 8 < width:
                ink = ON_LIGHT if colour in LIGHT else PAPER
                drawing.shapes.append(Label(left + 4, top + 22 + BAR / 2, size, ink))
            left += width
        for value, colour in ((bar.shown_budget_gb, BUDGET_COLOUR), (bar.measured_gb, MEASURED_COLOUR)):
            if value is not None:
                x = min(MARGIN + room * value / largest, WIDTH - MARGIN)
                drawing.shapes.append(Line(x, top + 18, x, top + 26 + BAR, colour))
    return drawing


def memory_bar(label: str, plan: Mapping[str, Any]) -> MemoryBar | None:
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
    return MemoryBar(label, named, _size(budget), _size(peak), on_cpu, _size(ratio))


def _size(value: object) -> float | None:
    """Returns a number of plan.json, None if it is not a valid one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < 1e6 else None
