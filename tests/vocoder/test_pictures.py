"""Tests the layout and the colours of the sheet of spectrograms."""

import math

import torch

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.audio.pictures import BAND_PIXELS, GAP_PIXELS, colour_map
from gputrain.vocoder.samples import sheet

MEL = Mel(16000, 40, 160, 640, 1024, 40, 8000)
ROW = BAND_PIXELS * 40


def tone(hz: float, frames: int) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz * torch.arange(160 * frames) / 16000)


def rows_of(picture: torch.Tensor) -> list[torch.Tensor]:
    return [picture[at : at + ROW] for at in (0, ROW + GAP_PIXELS, 2 * (ROW + GAP_PIXELS))]


def test_the_layout_of_a_sheet():
    """It has three rows and a column for each clip, as wide as its frames, with white gaps."""
    picture = sheet([tone(300, 30), tone(900, 50)], [tone(300, 30), tone(900, 50)], MEL, -6, 1.5)
    assert picture.dtype == torch.uint8
    assert picture.shape == (3 * ROW + 2 * GAP_PIXELS, 30 + GAP_PIXELS + 50, 3)
    real, made, difference = rows_of(picture)
    assert torch.equal(real, made)
    assert (picture[:, 30 : 30 + GAP_PIXELS] == 255).all()
    assert (picture[ROW : ROW + GAP_PIXELS] == 255).all()
    assert not difference[:, :30].any()  # Equal spectra are black.


def test_low_frequencies_are_at_the_bottom():
    low, high = (sheet([tone(hz, 30)], [tone(hz, 30)], MEL, -6, 1.5)[:ROW, 15].sum(dim=1) for hz in (200, 6000))
    assert int(low.argmax()) > 0.8 * ROW
    assert int(high.argmax()) < 0.2 * ROW


def test_colours_are_magnitudes_between_the_limits():
    real, made = tone(1000, 30), 0.1 * tone(1000, 30)
    picture = sheet([real], [made], MEL, -2, 1)
    decades = log_mel(real[None], MEL)[0] / math.log(10)
    index = ((decades.flip(0) + 2) / 3 * 255).clamp(0, 255).round().long()
    assert torch.equal(rows_of(picture)[0][::BAND_PIXELS], torch.from_numpy(colour_map())[index])
    assert torch.equal(rows_of(picture)[0][1::BAND_PIXELS], torch.from_numpy(colour_map())[index])
    # A tenth as loud is a decade away, wherever it is not at the floor: half of what the difference shows.
    place = 2 * int(decades[:, 15].flip(0).argmax())
    assert tuple(rows_of(picture)[2][place, 15].tolist()) == tuple(colour_map()[128].tolist())
    assert torch.equal(rows_of(sheet([made], [real], MEL, -2, 1))[2], rows_of(picture)[2])  # The sign does not matter.


def test_the_picture_is_made_of_sound_of_any_precision_and_reach():
    made = tone(440, 30).to(torch.float16)
    assert sheet([tone(440, 30)], [made], MEL, -6, 1.5).shape == (3 * ROW + 2 * GAP_PIXELS, 30, 3)
