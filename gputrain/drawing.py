"""Elements of SVG, fonts and texts of pictures, and spectrograms with their colours and axes.

Shape suffixes: M mel bands, F frames, H x W pixels, 3 colours.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

INK, PAPER = "#1b1f24", "#ffffff"
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
    canvas = Image.new("RGB", (left + wide, tall + AXIS_PIXELS), PAPER)
    canvas.paste(Image.fromarray(np.ascontiguousarray(picture_HW3.cpu().numpy())), (left, 0))
    draw = ImageDraw.Draw(canvas)
    above = math.inf
    for share, text in ticks:
        y = top + height * (1 - share)
        if above - y >= AXIS_TEXT_SIZE:
            draw.line((left - TICK_LENGTH, y, left - 1, y), INK)
            x, above = left - TICK_LENGTH - 2 - letters.getlength(text), y
            draw.text((x, max(y, AXIS_TEXT_SIZE / 2)), text, INK, letters, "lm")
    steps = (factor * 10**power for power in range(-3, 5) for factor in (1, 2, 5))
    step = next((candidate for candidate in steps if wide * candidate / seconds >= TICKS_APART), seconds)
    for number in range(int(seconds / step * (1 + 1e-9)) + 1):
        x, text = min(left + wide * number * step / seconds, canvas.width - 1), f"{number * step:.3g} s"
        draw.line((x, tall, x, tall + TICK_LENGTH), INK)
        room = canvas.width - letters.getlength(text)
        middle = tall + TICK_LENGTH + AXIS_TEXT_SIZE / 2
        draw.text((min(x - letters.getlength(text) / 2, room), middle), text, INK, letters, "lm")
    return torch.from_numpy(np.array(canvas))


@cache
def colour_map() -> NDArray[np.uint8]:
    """Returns 256 colours (256, 3), evenly from dark to light."""
    from skimage.color import lab2rgb

    anchors = np.array(ANCHORS_LAB, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    colours: NDArray[np.uint8] = np.rint(255 * lab2rgb(lab)).astype(np.uint8)
    return colours
