"""The picture of an alignment: positions and colours."""

import math

import numpy as np
import torch

from gputrain.drawing import colour_map, spectrogram_picture
from gputrain.tts import evaluate
from gputrain.tts.evaluate import (
    FRAME_PIXELS,
    GAP_PIXELS,
    LABEL_PIXELS,
    LABEL_ROWS,
    STAIRS_PIXELS,
    TICK_PIXELS,
    alignment,
)

MEL_MF = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
TOP = STAIRS_PIXELS + GAP_PIXELS


def picture_of(durations: list[int], labels: list[str]) -> torch.Tensor:
    return alignment(MEL_MF, torch.tensor(durations), labels, -1, 1)


def test_the_spectrogram_lies_below_the_stairs_a_frame_under_its_own():
    picture = picture_of([5, 5, 10], ["a", "b", "c"])
    assert picture.dtype == torch.uint8
    assert picture.shape == (TOP + 80 + TICK_PIXELS + LABEL_PIXELS * LABEL_ROWS, 20 * FRAME_PIXELS, 3)
    mel = spectrogram_picture(MEL_MF / math.log(10), -1, 1)
    for column in range(FRAME_PIXELS):
        assert torch.equal(picture[TOP : TOP + 80, column::FRAME_PIXELS], mel)


def test_each_frame_shows_its_symbol_and_the_text_goes_up():
    durations = [5, 0, 1, 4, 8]  # Two more frames follow.
    picture = picture_of(durations, list("abcde"))
    path = torch.from_numpy(colour_map()[evaluate.PATH])
    is_path = (picture[:STAIRS_PIXELS] == path).all(dim=2)
    owners = [*np.repeat(np.arange(5), durations), None, None]
    for frame, owner in enumerate(owners):
        rows = is_path[:, frame * FRAME_PIXELS].nonzero()[:, 0]
        if owner is None:
            assert not len(rows)
        else:
            middle = STAIRS_PIXELS * (1 - (owner + 0.5) / 5)
            assert abs(float(rows.float().mean()) - middle) < 2
            assert abs(len(rows) - STAIRS_PIXELS / 5) <= 1


def test_every_symbol_is_seen_however_many_there_are():
    picture = alignment(torch.zeros(40, 900), torch.ones(900, dtype=torch.int64), [""] * 900, -1, 1)
    is_path = (picture[:STAIRS_PIXELS] == torch.from_numpy(colour_map()[evaluate.PATH])).all(dim=2)
    assert is_path.any(dim=0).all()


def test_a_tick_stands_where_a_labelled_symbol_begins_and_its_letter_between_ticks():
    picture = picture_of([4, 6, 3, 7], ["", "m", "", "m"])
    ticks = (picture[TOP + 80] < 128).all(dim=1).nonzero()[:, 0].tolist()
    assert ticks == [4 * FRAME_PIXELS, 13 * FRAME_PIXELS]
    ink = (picture[TOP + 80 + TICK_PIXELS :] < 128).all(dim=2).any(dim=0).nonzero()[:, 0]
    for start, end in ((4, 13), (13, 20)):
        within = ink[(ink >= start * FRAME_PIXELS) & (ink < end * FRAME_PIXELS)].float()
        assert abs(float(within.mean()) - (start + end) / 2 * FRAME_PIXELS) < 2


def test_labels_that_would_touch_stand_in_rows_or_are_left_out():
    picture = picture_of([1] * 20, ["W"] * 20)
    rows = picture[TOP + 80 + TICK_PIXELS :].reshape(LABEL_ROWS, LABEL_PIXELS, -1, 3)
    inked = (rows < 128).all(dim=3).any(dim=1)
    assert inked.any(dim=1).all()  # Every row is used.
    for row in inked:  # There is white between any two letters, which are narrower than 20 pixels.
        runs = np.diff(np.flatnonzero(np.diff(np.pad(row.numpy().astype(int), 1))))[::2]
        assert runs.max() < 20
        assert len(runs) >= 3
