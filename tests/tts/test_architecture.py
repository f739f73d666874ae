"""Sizes of the presets, and invalid sizes."""

import pytest
import torch
from torch import nn

from gputrain.audio.discriminators import vits_discriminators
from gputrain.errors import UserError
from gputrain.tts.architecture import VoiceArchitecture, VoicePreset, voice_architecture
from gputrain.tts.decoder import WaveDecoder
from gputrain.tts.model import Voice
from tests.tables import each_row


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_fake_tensors(sizes: VoiceArchitecture) -> Voice:
    with torch.device("meta"):
        return Voice(sizes)


@each_row(("high", 14_337_024, 36_336_048), ("medium", 1_664_768, 23_663_792), ("fast", 1_649_360, 23_648_384))
def test_parameters_with_256_symbols(preset: VoicePreset, decoder: int, total: int) -> None:
    """In millions of parameters: 6.34 for text, 7.24, 7.10, 1.32 and the decoder; 36.34 for VITS, 23.66 for medium."""
    voice = on_fake_tensors(voice_architecture(preset, num_symbols=256))
    assert {name: count(part) for name, part in voice.named_children()} == {
        "text_encoder": 6_341_760, "posterior_encoder": 7_238_016, "flow": 7_102_080,
        "duration_predictor": 1_317_168, "decoder": decoder,
    }  # fmt: skip
    assert count(voice) == total


def test_parameters_of_the_discriminators() -> None:
    with torch.device("meta"):
        group = vits_discriminators()
    assert count(group) == 46_747_132
    assert len(group) == 6


def test_speakers_cost_an_embedding_and_conditions() -> None:
    """Speakers have 256 channels in VITS: one row each, and a projection to every part but the text encoder."""
    one, three = (on_fake_tensors(voice_architecture("high", num_symbols=9, num_speakers=count)) for count in (1, 3))
    wavenets = (16 + 4 * 4) * 2 * 192  # channels of all layers; weight norm adds one length each
    conditions = 256 * wavenets + 2 * wavenets + 257 * (192 + 512)
    assert count(three) - count(one) == 3 * 256 + conditions


@each_row(
    (16000, "high", {}),
    (16000, "medium", {"hop_size": 200, "upsample_rates": (5, 8, 5), "upsample_kernel_sizes": (11, 16, 11)}),
    (16000, "fast", {"hop_size": 240, "upsample_rates": (5, 3), "upsample_kernel_sizes": (16, 8)}),
    (44100, "fast", {"hop_size": 512, "upsample_rates": (8, 4), "upsample_kernel_sizes": (16, 16)}),
)
def test_a_hop_of_samples_a_frame(sampling_rate: int, preset: VoicePreset, sizes: dict[str, object]) -> None:
    narrow = {"latent_channels": 4, "upsample_initial_channel": 32}
    made = voice_architecture(preset, num_symbols=9, sampling_rate=sampling_rate, **narrow, **sizes)  # type: ignore[arg-type]
    assert (made.mel.sampling_rate, made.mel.fmax) == (sampling_rate, sampling_rate / 2)
    decoder = WaveDecoder(made)
    for frames in (2, 7):
        assert decoder(torch.randn(2, 4, frames)).shape == (2, 1, frames * made.mel.hop_size)


@each_row(
    ({"hop_size": 200}, "upsample_rates make 256 samples of a frame, and hop_size is 200"),
    ({"hop_size": 300, "preset": "fast"}, "istft_hop_size and subbands make 256 samples"),
    ({"upsample_kernel_sizes": (16, 16)}, "differ in length"),
    ({"upsample_kernel_sizes": (4, 16, 4, 4)}, "a rate of 8 leaves gaps"),
    ({"upsample_initial_channel": 500}, "upsample_initial_channel 500 is not a multiple of 16"),
)
def test_what_makes_no_voice(sizes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        voice_architecture(**{"preset": "high", "num_symbols": 9, **sizes})  # type: ignore[arg-type]
