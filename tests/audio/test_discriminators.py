"""Tests padding and folding of waves for discriminators."""

import torch

from gputrain.audio import discriminators


def test_waves_are_reflected_at_their_end():
    ramp = torch.arange(7.0).view(1, 1, -1)
    assert discriminators.fold(ramp, 5).tolist() == [[[[0, 1, 2, 3, 4], [5, 6, 5, 4, 3]]]]
    assert discriminators.pad_to_multiple(ramp[..., :3], 8).flatten().tolist() == [0, 1, 2, 1, 0, 1, 2, 1]
