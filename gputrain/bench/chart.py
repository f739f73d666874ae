"""Draws a bar chart with Pillow: groups of bars side by side, with a label for each row."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from gputrain.engine.samples import FAINT, INK, PAPER, Font, cut

# Sizes are in pixels.
WIDTH = 1200
MARGIN = 40
GAP = 28  # between labels and bars, and between groups
ROW = 44
BAR = 26
TITLE_SIZE, TEXT_SIZE = 26, 19

COLOURS = ("#2f6f9f", "#c98a2b")  # One for each group of bars.


@dataclass(frozen=True)
class Bars:
    """A group of bars: its head and a value for each row; None: no bar."""

    head: str
    values: Sequence[float | None]


def draw(title: str, subtitle: str, labels: Sequence[str], groups: Sequence[Bars], notes: Sequence[str]) -> Image.Image:
    """Returns a chart of one or two groups over the same rows. A row's note, if it has one, replaces its bars."""
    large, font = ImageFont.load_default(TITLE_SIZE), ImageFont.load_default(TEXT_SIZE)
    heading = [(line, large, INK) for line in _wrapped(title, large)]
    heading += [(line, font, FAINT) for line in _wrapped(subtitle, font)]
    top = MARGIN + sum(_height(with_font) for _, with_font, _ in heading) + GAP
    canvas = Image.new("RGB", (WIDTH, top + ROW * (len(labels) + 1) + MARGIN), PAPER)
    pen = ImageDraw.Draw(canvas)
    y = MARGIN
    for line, with_font, colour in heading:
        pen.text((MARGIN, y), line, fill=colour, font=with_font)
        y += _height(with_font)

    left = MARGIN + int(max(font.getlength(label) for label in labels)) + GAP
    head, *middles = (top + ROW * row + ROW // 2 for row in range(len(labels) + 1))
    for label, y in zip(labels, middles, strict=True):
        pen.text((MARGIN, y), label, fill=INK, font=font, anchor="lm")
    room = (WIDTH - MARGIN - left - GAP * (len(groups) - 1)) // len(groups)
    for index, (bars, colour) in enumerate(zip(groups, COLOURS, strict=False)):
        at = left + index * (room + GAP)
        pen.text((at, head), cut(bars.head, font, room), fill=FAINT, font=font, anchor="lm")
        _draw_bars(pen, bars, at, room, middles, colour, font)
    for note, y in zip(notes, middles, strict=True):
        if note:
            pen.text((left, y), cut(note, font, WIDTH - MARGIN - left), fill=FAINT, font=font, anchor="lm")
    return canvas


def _draw_bars(
    pen: ImageDraw.ImageDraw, bars: Bars, left: int, room: int, middles: Sequence[int], colour: str, font: Font
) -> None:
    """Draws a bar for each row, with its value at its end; the longest bar and its value fill `room` pixels."""
    texts = ["" if value is None else number(value) for value in bars.values]
    longest = room - int(max(font.getlength(text) for text in texts)) - 10
    largest = max((value for value in bars.values if value is not None), default=0.0)
    for value, text, y in zip(bars.values, texts, middles, strict=True):
        if value is not None:
            length = round(longest * value / largest) if largest else 0
            pen.rectangle((left, y - BAR // 2, left + max(1, length), y + BAR // 2), fill=colour)
            pen.text((left + length + 10, y), text, fill=INK, font=font, anchor="lm")


def number(value: float) -> str:
    """Returns a number with three significant digits, or all digits before the point: 0.0123, 1.2, 123, 12,346."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _wrapped(text: str, font: Font) -> list[str]:
    """Returns lines that fit the width, by the width of the whole text: characters differ little in width."""
    room, width = WIDTH - 2 * MARGIN, font.getlength(text)
    return textwrap.wrap(text, len(text) if width <= room else int(0.9 * len(text) * room / width)) or [""]


def _height(font: Font) -> int:
    return int(font.getbbox("Ag")[3] * 1.5)
