"""Tests the layout and the colours of the sheet of spectrograms."""

import math

import torch

from gputrain.audio.config import Mel
from gputrain.audio.mel import frequency_ticks, log_mel
from gputrain.drawing import AXIS_PIXELS, BAND_PIXELS, TICK_LENGTH, colour_map
from gputrain.samples import Sheet
from gputrain.vocoder.evaluate import sheet

MEL = Mel(16000, 40, 160, 640, 1024, 40, 8000)
ROW = BAND_PIXELS * 40


def tone(hz: float, frames: int) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz * torch.arange(160 * frames) / 16000)


def first_of(shown: Sheet) -> list[torch.Tensor]:
    """Returns the pictures of the first clip, of 30 frames, without their axes: recording, synthesised, difference."""
    return [row[0].picture_HW3[:ROW, -30:] for row in shown.rows]


def test_the_layout_of_a_sheet():
    """It has three rows and a column for each clip, as wide as its frames."""
    shown = sheet([tone(300, 30), tone(900, 50)], [tone(300, 30), tone(900, 50)], MEL, -6, 1.5)
    assert shown.heads == ("recording", "synthesised", "difference")
    for row in shown.rows:
        narrow, wide = (cell.picture_HW3.shape for cell in row)
        assert wide[1] - narrow[1] == 20
        assert narrow[0] == wide[0] == ROW + AXIS_PIXELS
    real, made, difference = first_of(shown)
    assert real.dtype == torch.uint8
    assert torch.equal(real, made)
    assert not difference.any()  # Equal spectra are black.
    assert [cell.caption for cell in shown.rows[2]] == ["0.0 dB apart", "0.0 dB apart"]


def test_low_frequencies_are_at_the_bottom():
    low, high = (
        first_of(sheet([tone(hz, 30)], [tone(hz, 30)], MEL, -6, 1.5))[0][:, 15].sum(dim=1) for hz in (200, 6000)
    )
    assert int(low.argmax()) > 0.8 * ROW
    assert int(high.argmax()) < 0.2 * ROW


def test_colours_are_magnitudes_between_the_limits():
    real, made = tone(1000, 30), 0.1 * tone(1000, 30)
    shown_real, _, difference = first_of(sheet([real], [made], MEL, -2, 1))
    decades = log_mel(real[None], MEL)[0] / math.log(10)
    index = ((decades.flip(0) + 2) / 3 * 255).clamp(0, 255).round().long()
    assert torch.equal(shown_real[::BAND_PIXELS], torch.from_numpy(colour_map())[index])
    assert torch.equal(shown_real[1::BAND_PIXELS], torch.from_numpy(colour_map())[index])
    # A tenth as loud is a decade away, wherever it is not at the floor: half of what the difference shows.
    place = 2 * int(decades[:, 15].flip(0).argmax())
    assert tuple(difference[place, 15].tolist()) == tuple(colour_map()[128].tolist())
    assert torch.equal(first_of(sheet([made], [real], MEL, -2, 1))[2], difference)  # The sign does not matter.


def test_axes_stand_at_the_frequencies_and_times_that_they_name():
    """A tone of each octave is brightest at its tick, and the ticks of time are as far apart as their seconds."""
    ticks = {text: place for place, text in frequency_ticks(MEL)}
    assert list(ticks) == ["250 Hz", "500 Hz", "1 kHz", "2 kHz", "4 kHz"]  # The band around 8 kHz is above the others.
    for hz, text in ((1000, "1 kHz"), (2000, "2 kHz"), (4000, "4 kHz")):
        picture = sheet([tone(hz, 300)], [tone(hz, 300)], MEL, -6, 1.5).rows[0][0].picture_HW3
        loudest = int(picture[:ROW, -150].sum(dim=1).argmax())
        assert abs(loudest + 0.5 - ROW * (1 - ticks[text])) <= BAND_PIXELS
        left = picture.shape[1] - 300
        dark = (picture[:ROW, left - TICK_LENGTH : left] < 100).all(dim=2).all(dim=1).nonzero()[:, 0]
        assert min(abs(dark - ROW * (1 - ticks[text]))) <= 1
    times = (picture[ROW, left:] < 100).all(dim=1).nonzero()[:, 0]
    assert times.tolist() == [0, 100, 200, 299]  # 3 seconds of 100 frames.
