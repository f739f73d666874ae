"""Sheets of pictures: where their parts are, what is written on them, and their layout in the PNG file."""

import json

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gputrain.drawing import PAPER, cut_text, font
from gputrain.engine.metrics import Metrics
from gputrain.samples import Report, Sheet, SheetCell, SoundSample
from tests.toy import cpu_runtime


def picture(height: int, width: int, value: int) -> torch.Tensor:
    return torch.full((height, width, 3), value, dtype=torch.uint8)


SHEET = Sheet(
    ["original", "made"],
    [[SheetCell(picture(30, 100, 10)), SheetCell(picture(20, 40, 20), "b.png")],
     [SheetCell(picture(30, 100, 30), "31.4 dB"), SheetCell(picture(20, 40, 40))]],
    "two pictures",
)  # fmt: skip


def test_the_layout_names_where_each_picture_is():
    image, layout = SHEET.draw("step 7")
    pixels = np.asarray(image)
    for row, values in zip(layout["rows"], ((10, 20), (30, 40)), strict=True):
        for part, value in zip(row, values, strict=True):
            left, top, right, bottom = part["box"]
            assert (pixels[top:bottom, left:right] == value).all()
            around = pixels[top - 1, left - 1 : right + 1], pixels[top - 1 : bottom, right]
            assert all((edge == 255).all() for edge in around)
    assert layout["heads"] == ["original", "made"]
    assert [[part["caption"] for part in row] for row in layout["rows"]] == [["", "b.png"], ["31.4 dB", ""]]


def test_titles_heads_and_captions_are_drawn():
    """Without each of them, something is missing."""
    image, _ = SHEET.draw("step 7")
    dark = (np.asarray(image.convert("L")) < 128).sum()
    other = np.asarray(SHEET.draw("step 888").image.convert("L"))
    assert not np.array_equal(np.asarray(image.convert("L")), other)
    bare = Sheet(["", ""], [[SheetCell(cell.picture_HW3) for cell in row] for row in SHEET.rows]).draw()
    assert dark > (np.asarray(bare.image.convert("L")) < 128).sum() + 50
    assert bare.image.width < image.width


def test_a_long_title_is_drawn_on_several_lines_and_none_is_cut():
    """The last word of it changes pixels, also if it is a path that is wider than the sheet."""
    for start in ("word " * 60, "/a/path" * 30):
        drawn = [Sheet(SHEET.heads, SHEET.rows, start + end).draw() for end in ("1", "8")]
        first, second = (np.asarray(sheet.image) for sheet in drawn)
        assert first.shape == second.shape
        assert (first != second).any()
        top = drawn[0].layout["rows"][0][0]["box"][1]
        assert top > 3 * 20  # Several lines are above the pictures.
        assert (first[:, -3:] == 255).all()


def test_long_texts_are_cut():
    text = font(12)
    assert cut_text("short", text, 100) == "short"
    shown = cut_text("a\nvery long name of a file.png", text, 60)
    assert shown.startswith("a very")
    assert shown.endswith("...")
    assert text.getlength(shown) <= 60


def test_a_sheet_in_a_report_shows_its_step_and_keeps_its_layout(tmp_path):
    tone = SoundSample(torch.zeros(800), 16000, "what is said", torch.ones(800) / 2)
    with Metrics(tmp_path, Console(quiet=True), cpu_runtime(), unit="items", first_step=0, last_step=9) as metrics:
        for step in (3, 6):
            metrics.report(step, 0, "samples", Report(pictures={"both": SHEET}, sounds={"said": tone}))
    samples = tmp_path / "samples"
    with Image.open(samples / "both_step_00000003.png") as shown:
        assert json.loads(shown.info["gputrain"]) == {"step": 3, **SHEET.draw().layout} | SHEET.draw("step 3").layout
        assert np.array_equal(np.asarray(shown), np.asarray(SHEET.draw("step 3").image))
        assert shown.getpixel((0, 0)) == Image.new("RGB", (1, 1), PAPER).getpixel((0, 0))
    assert json.loads((samples / "captions.json").read_text()) == {"said": "what is said"}
    assert (samples / "said_reference.wav").exists()
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [event.step for event in board.Images("samples/both")] == [3, 6]
    assert [event.step for event in board.Audio("samples/said_reference")] == [3]
