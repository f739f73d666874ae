"""The results of sampling and evaluation: numbers, texts, sounds, pictures and sheets of pictures with labels."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from gputrain.drawing import INK, PAPER, cut_text, font

# Sizes are in pixels.
TITLE_SIZE, CAPTION_SIZE = 14, 12
TITLE_LINE, CAPTION_LINE = 24, 17
GAP = 6
NARROWEST = 84  # Room for the caption of a small picture.
LEAST_WIDTH = 420  # Room for a title.
LONGEST_CAPTION = 500  # Characters of a caption that a report reads.


class SheetCell(NamedTuple):
    """A picture (uint8, HW3) and the caption below it."""

    picture_HW3: Tensor
    caption: str = ""


class DrawnSheet(NamedTuple):
    """A sheet as one picture, and where its parts are, as a JSON value: `heads` of the rows, and for each row a list of
    `box` (left, top, right, bottom) and `caption`."""

    image: Image.Image
    layout: dict[str, Any]


@dataclass(frozen=True)
class Sheet:
    """Pictures in rows. `heads` are the labels of the rows; the n-th pictures of all rows are below each other."""

    heads: Sequence[str]
    rows: Sequence[Sequence[SheetCell]]
    title: str = ""

    def draw(self, title: str = "") -> DrawnSheet:
        """Returns the sheet with `title` before its own title, such as "step 500"."""
        title, letters, large = " · ".join(filter(None, (title, self.title))), font(CAPTION_SIZE), font(TITLE_SIZE)
        left = GAP + max((round(font(CAPTION_SIZE).getlength(head)) + GAP for head in self.heads if head), default=0)
        columns = zip(*self.rows, strict=True)
        widths = [max(NARROWEST, *(cell.picture_HW3.shape[1] for cell in column)) for column in columns]
        heights = [max((cell.picture_HW3.shape[0] for cell in row), default=0) for row in self.rows]
        captions = [any(cell.caption for cell in row) for row in self.rows]
        width = max(left + sum(widths) + GAP * len(widths), LEAST_WIDTH if title else 0)
        lines = textwrap.wrap(title, max(1, int(len(title) * (width - 2 * GAP) / max(1, large.getlength(title)))))
        width = max(width, *(math.ceil(large.getlength(line)) + 2 * GAP for line in lines), 0)
        top, parts = len(lines) * TITLE_LINE or GAP, []
        height = top + sum(heights) + sum(CAPTION_LINE if has else GAP for has in captions)
        canvas = Image.new("RGB", (width, height), PAPER)
        draw = ImageDraw.Draw(canvas)
        for number, line in enumerate(lines):
            draw.text((GAP, (number + 0.5) * TITLE_LINE), line, INK, large, "lm")
        for head, row, tallest, has_captions in zip(self.heads, self.rows, heights, captions, strict=True):
            draw.text((GAP, top + tallest / 2), head, INK, letters, "lm")
            at, boxes = left, []
            for cell, room in zip(row, widths, strict=True):
                picture = Image.fromarray(np.ascontiguousarray(cell.picture_HW3.cpu().numpy()))
                canvas.paste(picture, (at, top))
                caption = cut_text(cell.caption, letters, room)
                draw.text((at, top + tallest + CAPTION_LINE / 2), caption, INK, letters, "lm")
                box = [at, top, at + picture.width, top + picture.height]
                boxes.append({"box": box, "caption": cell.caption})
                at += room + GAP
            parts.append(boxes)
            top += tallest + (CAPTION_LINE if has_captions else GAP)
        return DrawnSheet(canvas, {"title": self.title, "heads": list(self.heads), "rows": parts})


class SoundSample(NamedTuple):
    """A sound: T samples in [-1, 1], and their rate in Hz; what it is, such as the spoken text; and the recording that
    it should sound like, if there is one."""

    wave_T: Tensor
    rate_hz: int
    caption: str = ""
    reference_T: Tensor | None = None


def clip_caption(clip: str, text: str) -> str:
    """Returns the caption of the recording of a transcript, by which a report finds it."""
    return f"{clip}: {text}"[:LONGEST_CAPTION]


@dataclass
class Report:
    """The result of sampling or evaluation: numbers, pictures (uint8, HxWx3) and sheets of them, sounds, texts, and
    recordings that belong to texts and are the same at every step."""

    scalars: dict[str, float] = field(default_factory=dict)
    pictures: dict[str, Tensor | Sheet] = field(default_factory=dict)
    sounds: dict[str, SoundSample] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    recordings: dict[str, SoundSample] = field(default_factory=dict)
    headline: tuple[str, ...] = ()  # Names of the numbers, shares of 1, that the progress line shows.
