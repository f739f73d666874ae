"""Tests that invalid architectures are refused with a remedy."""

from functools import partial

import pytest

from gputrain.audio.config import Mel
from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.kinds import read_defaults
from gputrain.vocoder.config import NsfHifiganArchitecture, TrainVocoder
from gputrain.vocoder.openvpi import PROFILES, translate
from gputrain.vocoder.recipe import VocoderRecipe
from tests.tables import each_row
from tests.toy import cpu_runtime


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


def test_the_tiny_one_has_tiny_discriminators_too():
    """The weights of generator, discriminators and average: those of the large ones are nearly all of a narrow one."""
    made = read_defaults(PROFILES / "tiny.yaml", TrainVocoder, partial(translate, of="train"))
    narrow = {"upsample_initial_channel": made["upsample_initial_channel"]}
    counts = []
    for values in (made, narrow):
        modules = VocoderRecipe(assemble(TrainVocoder, {"data_path": "data", **values}), cpu_runtime()).modules
        counts.append([sum(weight.numel() for weight in module.parameters()) for module in modules.values()])
    assert counts == [[621_212, 233_588, 621_212], [982_796, 8_332_648, 982_796]]
