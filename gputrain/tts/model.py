"""VITS: symbols to a wave, and in training a wave reconstructed from latents that the symbols predict (Kim, Kong and
Son 2021, arXiv:2106.06103).

A training step calls the parts one by one: `encode_text`, `encode_sound`, the search for an alignment of the two
(elsewhere), `duration_loss`, `kl_loss` with `frame_prior`, and `decoder` on `segments` of the latents. No part
couples the items of a batch, and every random number is an argument, dropout aside.

Shape suffixes: B items, S symbols, N frequencies, C channels, G channels of a speaker, T frames, L samples or frames,
1 and 2 so many channels.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.weight_norm import WeightNormed
from gputrain.engine.recipe import at_least_fp32
from gputrain.tts.align import path_from_durations
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.decoder import WaveDecoder
from gputrain.tts.duration import DurationPredictor
from gputrain.tts.encoder import EncodedText, TextEncoder
from gputrain.tts.latents import Flow, GatedLayer, Posterior, PosteriorEncoder


class Voice(nn.Module):
    """The VITS model. With `checkpointing`, gated layers, residual blocks and the stacks of the duration predictor keep
    only their inputs for the backward pass, and run again there."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.architecture, self.checkpointing = architecture, checkpointing
        self.text_encoder = TextEncoder(architecture)
        self.posterior_encoder = PosteriorEncoder(architecture, checkpointing=checkpointing)
        self.flow = Flow(architecture, checkpointing=checkpointing)
        self.duration_predictor = DurationPredictor(architecture, checkpointing=checkpointing)
        self.decoder = WaveDecoder(architecture, checkpointing=checkpointing)
        if architecture.num_speakers > 1:
            self.speakers = nn.Embedding(architecture.num_speakers, architecture.speaker_channels)

    def computing_in_fp32(self) -> list[nn.Module]:
        """Returns the parts that compute in fp32 under autocast too."""
        return [self.duration_predictor, self.decoder.head]

    def compiled_parts(self) -> list[nn.Module]:
        """Returns the parts that are compiled for any length: layers, couplings and stacks that text encoder, flow and
        duration predictor repeat, and the posterior encoder, whose layers are short. Layers that run again in the
        backward pass are compiled one by one."""
        of_sound: list[nn.Module] = [self.posterior_encoder, *self.flow.couplings]
        if self.checkpointing:
            of_sound = [module for module in self.modules() if isinstance(module, GatedLayer)]
        stacks = [self.duration_predictor.text_stack, self.duration_predictor.posterior_stack]
        return [*self.text_encoder.layers, *of_sound, *stacks]

    def speaker(self, speaker_B: Tensor | None) -> Tensor | None:
        """Returns the speaker embedding, (B, G, 1), or None for a single-speaker model. Raises ValueError if there are
        several speakers and none is given."""
        if self.architecture.num_speakers == 1:
            return None
        if speaker_B is None:
            raise ValueError(f"one of {self.architecture.num_speakers} speakers must be named")
        speaker_BG1: Tensor = self.speakers(speaker_B)[..., None]
        return speaker_BG1

    def encode_text(self, ids_BS: Tensor, lengths_B: Tensor) -> EncodedText:
        encoded: EncodedText = self.text_encoder(ids_BS, length_mask(lengths_B, ids_BS.shape[1]))
        return encoded

    def encode_sound(
        self, spectrogram_BNT: Tensor, lengths_B: Tensor, noise_BCT: Tensor, speaker_BG1: Tensor | None = None
    ) -> tuple[Posterior, Tensor]:
        """Returns the posterior of linear magnitudes, sampled with normal noise, and its latents after the flow."""
        mask_B1T = length_mask(lengths_B, spectrogram_BNT.shape[2])
        posterior = self.posterior_encoder(spectrogram_BNT, mask_B1T, noise_BCT, speaker_BG1)
        return posterior, self.flow(posterior.latent_BCT, mask_B1T, speaker_BG1)

    def duration_loss(
        self, text: EncodedText, durations_BS: Tensor, noise_B2S: Tensor, speaker_BG1: Tensor | None = None
    ) -> Tensor:
        """Returns the duration loss in nats, summed over symbols, (B,). It shares no graph with the other losses."""
        loss_B: Tensor = self.duration_predictor(text.hidden_BCS, text.mask_B1S, durations_BS, noise_B2S, speaker_BG1)
        return loss_B

    def predict_durations(
        self,
        text: EncodedText,
        speaker_BG1: Tensor | None = None,
        *,
        length_scale: float | Tensor = 1.0,
        noise_w: float | Tensor = 0.8,
        noise_B2S: Tensor | None = None,
    ) -> Tensor:
        """Returns the frames of each symbol, whole numbers in fp32, BS. Noise that is not given is drawn here."""
        noise_B2S = torch.randn_like(at_least_fp32(text.hidden_BCS[:, :2])) if noise_B2S is None else noise_B2S
        log_B1S = self.duration_predictor.log_durations(
            text.hidden_BCS, text.mask_B1S, noise_B2S * noise_w, speaker_BG1
        )
        return (log_B1S.exp() * text.mask_B1S * length_scale).ceil().squeeze(1)

    def speak(
        self,
        text: EncodedText,
        durations_BS: Tensor,
        speaker_BG1: Tensor | None = None,
        *,
        noise_scale: float | Tensor = 0.667,
        noise_BCT: Tensor | None = None,
        most_frames: int | None = None,
    ) -> Tensor:
        """Returns the latents to decode, BCT, zero beyond the end of an item. If the noise has more than T frames, the
        first are used; noise that is not given is drawn here. T is `most_frames`, or that of the longest item."""
        frames_B = durations_BS.sum(dim=1).clamp(min=1).long()
        mask_B1T = length_mask(frames_B, frames_B.max() if most_frames is None else most_frames)
        mean_BCT, log_scale_BCT = frame_prior(text, durations_BS, mask_B1T.shape[2])
        noise_BCT = torch.randn_like(mean_BCT) if noise_BCT is None else noise_BCT[..., : mean_BCT.shape[2]]
        prior_BCT = mean_BCT + noise_BCT * log_scale_BCT.exp() * noise_scale
        return self.flow.inverse(prior_BCT, mask_B1T, speaker_BG1) * mask_B1T

    def infer(
        self,
        ids_BS: Tensor,
        lengths_B: Tensor,
        speaker_B: Tensor | None = None,
        *,
        noise_scale: float | Tensor = 0.667,
        length_scale: float | Tensor = 1.0,
        noise_w: float | Tensor = 0.8,
        duration_noise_B2S: Tensor | None = None,
        noise_BCT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns waves (B, 1, L), padded to the longest item, and the durations in frames (B, S), whose sum times
        hop_size is the length of each item. The output beyond the end of an item is not exactly silent."""
        speaker_BG1 = self.speaker(speaker_B)
        text = self.encode_text(ids_BS, lengths_B)
        durations_BS = self.predict_durations(
            text, speaker_BG1, length_scale=length_scale, noise_w=noise_w, noise_B2S=duration_noise_B2S
        )
        latent_BCT = self.speak(text, durations_BS, speaker_BG1, noise_scale=noise_scale, noise_BCT=noise_BCT)
        return self.decoder(latent_BCT, speaker_BG1), durations_BS


def length_mask(lengths_B: Tensor, size: int | Tensor) -> Tensor:
    """Returns a mask (B, 1, size) that is True inside each item."""
    place_L = torch.arange(size, device=lengths_B.device)  # type: ignore[arg-type]
    return (place_L < lengths_B[:, None])[:, None]


def frame_prior(text: EncodedText, durations_BS: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Returns the prior of frames in fp32 at least: mean, log standard deviation, BCT, zero beyond an item's end."""
    with torch.autocast(durations_BS.device.type, enabled=False):
        path_BTS = path_from_durations(durations_BS, frames)
        # A matrix product is used because the gradient of indexing is not deterministic on a GPU.
        both = torch.cat([text.mean_BCS, text.log_scale_BCS], dim=1) @ path_BTS.transpose(1, 2).to(text.mean_BCS.dtype)
        mean_BCT, log_scale_BCT = both.chunk(2, dim=1)
        return mean_BCT, log_scale_BCT


def segment_starts(uniform_B: Tensor, lengths_B: Tensor, size: int) -> Tensor:
    """Returns the first frame of a segment of `size` frames in each item, from uniform numbers in [0, 1); 0 for items
    shorter than the segment."""
    return (uniform_B * (lengths_B - size + 1).clamp(min=1)).long()


def segments(x_BCT: Tensor, starts_B: Tensor, size: int) -> Tensor:
    """Returns `size` frames or samples of each item from its start, (B, C, size), zero-padded at the end."""
    x_BCT = F.pad(x_BCT, (0, max(0, size - x_BCT.shape[2])))
    place_BL = starts_B[:, None] + torch.arange(size, device=starts_B.device)
    return x_BCT.gather(2, place_BL[:, None].expand(-1, x_BCT.shape[1], -1))


def inference_copy(voice: Voice) -> Voice:
    """Returns a frozen copy for inference and export, without the modules that only training needs, with weight norm
    folded and without dropout. `infer` gives the same wave."""
    voice = copy.deepcopy(voice).eval().requires_grad_(False)
    del voice.posterior_encoder
    predictor = voice.duration_predictor
    del predictor.posterior_pre, predictor.posterior_stack, predictor.posterior_post, predictor.posterior_flow
    for module in list(voice.modules()):
        for of_training in ("forward", "transform"):  # What is compiled would run the layers of the original.
            vars(module).pop(of_training, None)
        for name, layer in list(module.named_children()):
            if isinstance(layer, WeightNormed):
                setattr(module, name, PlainConvolution(layer))
    return voice


class PlainConvolution(nn.Module):
    """A weight-normed convolution with its weight norm folded."""

    def __init__(self, layer: WeightNormed) -> None:
        super().__init__()
        self.convolve = layer.convolve
        self.weight = nn.Parameter(layer.compute_weight().detach(), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x_BCL: Tensor) -> Tensor:
        out_BCL: Tensor = self.convolve(x_BCL, self.weight, self.bias)
        return out_BCL
