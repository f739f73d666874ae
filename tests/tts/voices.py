"""Small voices of each kind, and the input of a training step.

Shape suffixes: B items, S symbols, N frequencies, C channels, T frames, L samples, 1 and 2 so many channels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gputrain.audio.weight_norm import WeightNormed
from gputrain.speech.text.frontend import Frontend
from gputrain.tts.architecture import VoiceArchitecture, VoicePreset, voice_architecture
from gputrain.tts.latents import kl_loss
from gputrain.tts.load import read_origin, start_from
from gputrain.tts.model import Voice, frame_prior, segments

SEGMENT = 4  # number of decoded frames


def small(preset: VoicePreset = "high", num_speakers: int = 1, **sizes: int | float) -> VoiceArchitecture:
    """Returns a narrow and shallow architecture without dropout."""
    narrow = {
        "hidden_channels": 16, "latent_channels": 8, "speaker_channels": 6, "encoder_layers": 2,
        "encoder_filter_channels": 24, "posterior_layers": 3, "flow_layers": 2, "flow_couplings": 2,
        "duration_flows": 2, "upsample_initial_channel": 32, "encoder_dropout": 0.0, "duration_dropout": 0.0,
    }  # fmt: skip
    return voice_architecture(preset, num_symbols=12, num_speakers=num_speakers, **{**narrow, **sizes})


def build(sizes: VoiceArchitecture, *, checkpointing: bool = False) -> Voice:
    """Builds a voice whose flows are not the identity, and whose waves are not silent."""
    torch.manual_seed(0)
    voice = Voice(sizes, checkpointing=checkpointing)
    with torch.no_grad():
        for name, parameter in voice.named_parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.3 if "project" in name else 0.1)
        voice.duration_predictor.flow.shift -= 1.5  # about five frames per symbol
        for layer in voice.decoder.modules():
            if isinstance(layer, WeightNormed):
                layer.weight_g *= 1.7
    return voice


class Batch(NamedTuple):
    """All tensors have the items as their first dimension."""

    ids_BS: Tensor
    symbols_B: Tensor
    spectrogram_BNT: Tensor
    frames_B: Tensor
    durations_BS: Tensor
    speaker_B: Tensor
    latent_noise_BCT: Tensor
    duration_noise_B2S: Tensor
    starts_B: Tensor

    def items(self, part: slice) -> "Batch":
        return Batch(*(tensor[part] for tensor in self))

    def to(self, dtype: torch.dtype) -> "Batch":
        return Batch(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in self))


def some_batch(sizes: VoiceArchitecture) -> Batch:
    """Returns three items of 7, 4 and 5 symbols, with twice as many frames plus one."""
    random = torch.Generator().manual_seed(3)
    symbols_B = torch.tensor([7, 4, 5])
    durations_BS = 2 * (torch.arange(7) < symbols_B[:, None])
    durations_BS[:, 1] += 1
    return Batch(
        torch.randint(0, 12, (3, 7), generator=random),
        symbols_B,
        torch.rand(3, sizes.spectrogram_bins, 15, generator=random),
        2 * symbols_B + 1,
        durations_BS,
        torch.arange(3) % sizes.num_speakers,
        torch.randn(3, sizes.latent_channels, 15, generator=random),
        torch.randn(3, 2, 7, generator=random),
        torch.tensor([9, 2, 6]),
    )


class Losses(NamedTuple):
    """Results of training on a batch: losses (B,) and waves (B, 1, SEGMENT * hop_size)."""

    duration_B: Tensor
    kl_B: Tensor
    wave_B1L: Tensor

    def total(self) -> Tensor:
        """Returns a scalar that depends on all results."""
        weight_L = torch.linspace(-1, 1, self.wave_B1L.shape[2], dtype=self.wave_B1L.dtype)
        return self.duration_B.sum() + self.kl_B.sum() + (self.wave_B1L * weight_L + self.wave_B1L**2).sum()


def training(voice: Voice, batch: Batch) -> Losses:
    """Runs the forward pass of a training step with a given alignment."""
    speaker_BG1 = voice.speaker(batch.speaker_B)
    text = voice.encode_text(batch.ids_BS, batch.symbols_B)
    posterior, prior_BCT = voice.encode_sound(
        batch.spectrogram_BNT, batch.frames_B, batch.latent_noise_BCT, speaker_BG1
    )
    mean_BCT, log_scale_BCT = frame_prior(text, batch.durations_BS, prior_BCT.shape[2])
    return Losses(
        voice.duration_loss(text, batch.durations_BS, batch.duration_noise_B2S, speaker_BG1),
        kl_loss(prior_BCT, posterior.log_scale_BCT, mean_BCT, log_scale_BCT, posterior.mask_B1T),
        voice.decoder(segments(posterior.latent_BCT, batch.starts_B, SEGMENT), speaker_BG1),
    )


def begun_from(
    path: Path, voice: Voice, discriminators: nn.Module, reading: Frontend, speakers: Sequence[str]
) -> list[str]:
    """Initialises a voice from a checkpoint, as a training does. Returns the parts that are reinitialised."""
    origin = read_origin(path, voice, discriminators)
    return start_from(origin, voice, discriminators, reading, speakers, reading.symbols)
