"""The picture of an alignment: positions and colours."""

import math

import numpy as np
import torch

from gputrain.drawing import colour_map, spectrogram_picture
from gputrain.tts import evaluate
from gputrain.tts.evaluate import FRAME_PIXELS, STAIRS_PIXELS, VMAX, VMIN, alignment

MEL_MF = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))


def picture_of(durations: list[int]) -> torch.Tensor:
    return alignment(MEL_MF, torch.tensor(durations))


def test_the_spectrogram_lies_below_the_stairs_a_frame_under_its_own():
    picture = picture_of([5, 5, 10])
    assert picture.dtype == torch.uint8
    assert picture.shape == (STAIRS_PIXELS + 80, 20 * FRAME_PIXELS, 3)
    mel = spectrogram_picture(MEL_MF / math.log(10), VMIN, VMAX)
    for column in range(FRAME_PIXELS):
        assert torch.equal(picture[STAIRS_PIXELS:, column::FRAME_PIXELS], mel)


def test_each_frame_shows_its_symbol_and_the_text_goes_up():
    durations = [5, 0, 1, 4, 8]  # Two more frames follow.
    picture = picture_of(durations)
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
    picture = alignment(torch.zeros(40, 900), torch.ones(900, dtype=torch.int64))
    is_path = (picture[:STAIRS_PIXELS] == torch.from_numpy(colour_map()[evaluate.PATH])).all(dim=2)
    assert is_path.any(dim=0).all()
