"""Draws charts and pictures: shapes and texts as SVG or as pixels, fonts, numbers, and the colours of spectrograms.

Shape suffixes: M mel bands, F frames, H x W pixels, 3 colours.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

INK, FAINT, PAPER = "#1b1f24", "#6b7280", "#ffffff"
FONTS = ("DejaVuSans.ttf", "arial.ttf", "Arial.ttf")  # System fonts; Pillow's own has only Latin letters.
TEXT_SIZE = 13

BAND_PIXELS = 2  # Height of a mel band.
AXIS_TEXT_SIZE, TICK_LENGTH = 11, 4
AXIS_PIXELS = TICK_LENGTH + AXIS_TEXT_SIZE + 2  # Height of the axis of time.
TICKS_APART = 60  # Least distance of two times, in pixels.
# The colours are black, violet, red, orange and pale yellow. CIELAB's lightness rises evenly, so that equal steps look
# equal, and the picture is readable in grey too.
ANCHORS_LAB = (
    (0, 0, 0), (12.5, 14, -22), (25, 34, -33), (37.5, 48, -16), (50, 52, 12),
    (62.5, 44, 38), (75, 24, 52), (87.5, 2, 48), (98, -6, 18),
)  # fmt: skip


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle; the title is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""

    def svg(self, page_colour: str) -> Markup:
        place = {name: float(getattr(self, name)) for name in ("x", "y", "width", "height")}
        title = svg_element("title", self.title) if self.title else ""
        return svg_element("rect", title, **place, fill=self.colour)

    def paint(self, canvas: Image.Image, scale: int) -> None:
        left, top = self.x * scale, self.y * scale
        right, bottom = (self.x + self.width) * scale - 1, (self.y + self.height) * scale - 1
        if right >= left and bottom >= top:
            ImageDraw.Draw(canvas).rectangle((left, top, right, bottom), fill=self.colour)


@dataclass(frozen=True)
class Line:
    """A straight line between two points."""

    x: float
    y: float
    to_x: float
    to_y: float
    colour: str
    width: int = 2

    def svg(self, page_colour: str) -> Markup:
        ends = {"x1": float(self.x), "y1": float(self.y), "x2": float(self.to_x), "y2": float(self.to_y)}
        return svg_element("line", **ends, stroke=self.colour, stroke_width=self.width)

    def paint(self, canvas: Image.Image, scale: int) -> None:
        ends = (self.x * scale, self.y * scale, self.to_x * scale, self.to_y * scale)
        ImageDraw.Draw(canvas).line(ends, fill=self.colour, width=self.width * scale)


@dataclass(frozen=True)
class Label:
    """A line of text, placed by the left end of its middle."""

    x: float
    y: float
    text: str
    colour: str = INK
    size: int = TEXT_SIZE

    def svg(self, page_colour: str) -> Markup:
        colour = page_colour if page_colour and self.colour in (INK, FAINT) else self.colour
        baseline = self.y + self.size / 3
        return svg_element("text", self.text, x=float(self.x), y=baseline, font_size=self.size, fill=colour)

    def paint(self, canvas: Image.Image, scale: int) -> None:
        place = (self.x * scale, self.y * scale)
        ImageDraw.Draw(canvas).text(place, self.text, self.colour, font(self.size * scale), "lm")


@dataclass(frozen=True)
class Inset:
    """A picture, placed by its left upper corner."""

    x: int
    y: int
    image: Image.Image

    def svg(self, page_colour: str) -> Markup:
        written = io.BytesIO()
        self.image.save(written, "PNG")
        address = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
        return svg_element("image", x=self.x, y=self.y, width=self.image.width, height=self.image.height, href=address)

    def paint(self, canvas: Image.Image, scale: int) -> None:
        size = (self.image.width * scale, self.image.height * scale)
        canvas.paste(self.image.resize(size), (self.x * scale, self.y * scale))


@dataclass
class Drawing:
    """Shapes on a background, in the order in which they are drawn: as SVG, or as pixels."""

    width: int
    height: int
    background: str = PAPER
    shapes: list[Rectangle | Line | Label | Inset] = field(default_factory=list)

    def svg(self, alt: str, *, page_colour: str = "") -> Markup:
        """Returns the drawing as SVG. With a `page_colour`, such as currentColor, the texts have that colour, and there
        is no background."""
        parts = [shape.svg(page_colour) for shape in self.shapes]
        if not page_colour:
            parts.insert(0, svg_element("rect", width=self.width, height=self.height, fill=self.background))
        return svg_element(
            "svg",
            Markup("").join(parts),
            xmlns="http://www.w3.org/2000/svg",
            font_family="system-ui, sans-serif",
            viewBox=f"0 0 {self.width} {self.height}",
            role="img",
            aria_label=alt,
        )

    def image(self, scale: int = 1) -> Image.Image:
        """Returns the drawing as a picture, `scale` pixels for each unit."""
        canvas = Image.new("RGB", (self.width * scale, self.height * scale), self.background)
        for shape in self.shapes:
            shape.paint(canvas, scale)
        return canvas


def svg_element(name: str, content: str = "", /, **attributes: str | float) -> Markup:
    """Returns an SVG element. Attributes are written with hyphens (`class_` as class), fractions with one digit, and
    whatever is not Markup is escaped."""
    written = [
        f'{key.rstrip("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(value)}"'
        for key, value in attributes.items()
    ]
    start = " ".join([name, *written])
    return Markup(f"<{start}>{escape(content)}</{name}>" if content else f"<{start}/>")


# ------------------------------------------------------------------------------------------------ texts and numbers


@cache
def font(size: int) -> Font:
    """Returns a font with many scripts if the system has one, otherwise Pillow's own."""
    for name in FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def cut_text(text: str, with_font: Font, room: float) -> str:
    """Returns the text on one line, or as much of it as fits into `room` pixels."""
    text = " ".join(text.split())
    if with_font.getlength(text) <= room:
        return text
    while text and with_font.getlength(text + "...") > room:
        text = text[:-1]
    return text + "..."


# ------------------------------------------------------------------------------------------------------- spectrograms


def spectrogram_picture(values_MF: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Returns values as a picture (HW3, uint8) from the darkest colour for `low` to the brightest for `high`.
    H = BAND_PIXELS * M, with the last band at the top."""
    share_MF = (values_MF - low) / (high - low)
    index_MF = (share_MF.clamp(0, 1) * 255).round().long().flip(0).repeat_interleave(BAND_PIXELS, dim=0)
    return torch.from_numpy(colour_map())[index_MF]


def with_axes(
    picture_HW3: Tensor, ticks: Sequence[tuple[float, str]], seconds: float, *, top: int = 0, height: int = 0
) -> Tensor:
    """Returns a picture with an axis to the left of `height` of its pixels from `top` on (0: the whole height), and one
    of the seconds that its width shows below it. The picture itself is at the right upper corner.

    `ticks` are labels with their places, as shares of the height from below, the lowest first.
    """
    tall, wide, _ = picture_HW3.shape
    height = height or tall
    letters = font(AXIS_TEXT_SIZE)
    left = round(max((letters.getlength(text) for _, text in ticks), default=0)) + TICK_LENGTH + 3
    drawing = Drawing(left + wide, tall + AXIS_PIXELS)
    drawing.shapes.append(Inset(left, 0, Image.fromarray(np.ascontiguousarray(picture_HW3.cpu().numpy()))))
    above = math.inf
    for share, text in ticks:
        y = top + height * (1 - share)
        if above - y >= AXIS_TEXT_SIZE:
            drawing.shapes.append(Line(left - TICK_LENGTH, y, left - 1, y, INK, 1))
            x, above = left - TICK_LENGTH - 2 - letters.getlength(text), y
            drawing.shapes.append(Label(x, max(y, AXIS_TEXT_SIZE / 2), text, size=AXIS_TEXT_SIZE))
    steps = (factor * 10**power for power in range(-3, 5) for factor in (1, 2, 5))
    step = next((candidate for candidate in steps if wide * candidate / seconds >= TICKS_APART), seconds)
    for number in range(int(seconds / step * (1 + 1e-9)) + 1):
        x, text = min(left + wide * number * step / seconds, drawing.width - 1), f"{number * step:.3g} s"
        drawing.shapes.append(Line(x, tall, x, tall + TICK_LENGTH, INK, 1))
        room = drawing.width - letters.getlength(text)
        middle = tall + TICK_LENGTH + AXIS_TEXT_SIZE / 2
        drawing.shapes.append(Label(min(x - letters.getlength(text) / 2, room), middle, text, size=AXIS_TEXT_SIZE))
    return torch.from_numpy(np.array(drawing.image()))


@cache
def colour_map() -> NDArray[np.uint8]:
    """Returns 256 colours (256, 3), evenly from dark to light."""
    from skimage.color import lab2rgb

    anchors = np.array(ANCHORS_LAB, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    colours: NDArray[np.uint8] = np.rint(255 * lab2rgb(lab)).astype(np.uint8)
    return colours
