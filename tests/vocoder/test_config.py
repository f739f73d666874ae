"""Tests that invalid architectures are refused with a remedy."""

import pytest

from gputrain.audio.config import Mel
from gputrain.errors import UserError
from gputrain.vocoder.config import NsfHifiganArchitecture
from tests.tables import each_row


@each_row(
    ({"upsample_rates": (8, 8, 2, 2)}, "differ in length"),
    ({"resblock_kernel_sizes": (3, 7)}, "differ in length"),
    ({"mel": Mel(hop_size=256)}, "make 512 samples of a frame, and hop_size is 256"),
    ({"upsample_initial_channel": 48}, "48 is not a multiple of 32"),
    ({"upsample_kernel_sizes": (16, 16, 4, 4, 1)}, "upsample kernel of 1 for a rate of 2 leaves gaps"),
    ({"resblock_kernel_sizes": (3, 7, 10)}, "an even kernel"),
    ({"upsample_rates": (512,), "upsample_kernel_sizes": (1024,), "mini_nsf": True}, "two upsampling stages"),
)
def test_architectures_that_are_none(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        NsfHifiganArchitecture(**changes)
    assert raised.value.hint


def test_the_common_ones():
    assert NsfHifiganArchitecture().upsample_initial_channel == 512
    NsfHifiganArchitecture(upsample_initial_channel=1024, noise_sigma=0.1, mini_nsf=True)
    NsfHifiganArchitecture(mel=Mel(hop_size=256), upsample_rates=(8, 8, 2, 2), upsample_kernel_sizes=(16, 16, 4, 4))
