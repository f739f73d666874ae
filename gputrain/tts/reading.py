"""Inference of a voice in training: synthesises texts, and encodes recordings with their texts. Each text has its own
random numbers, so the result does not depend on the batch, and the global random state of torch is unchanged.

Shape suffixes: B items, S symbols, C channels, T frames, L samples, 1 and 2 so many channels.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.audio.io import Samples, from_int16
from gputrain.audio.mel import log_mel, magnitudes
from gputrain.audio.weight_norm import cached_weights
from gputrain.engine.recipe import at_least_fp32
from gputrain.files import FULL_SCALE, to_int16
from gputrain.speech.buckets import ClipBatch
from gputrain.speech.store import SpeechClip
from gputrain.tts.align import alignment_scores, search
from gputrain.tts.latents import kl_loss
from gputrain.tts.model import Voice, frame_prior, length_mask

NOISE_SCALE, NOISE_W = 0.667, 0.8  # default noise scales of latents and durations at inference


@contextmanager
def eval_mode(voice: Voice) -> Iterator[None]:
    """Context in which the voice is in eval mode, without gradients and with cached weights; restored on exit."""
    trained = voice.training
    voice.eval()
    try:
        with torch.no_grad(), cached_weights(voice):
            yield
    finally:
        voice.train(trained)


@dataclass(frozen=True)
class Text:
    """Symbols to synthesise, with speaker and seed."""

    ids: list[int]
    speaker: int
    seed: int
    longest: int  # maximum number of frames; longer output is cut off
    words: str = ""  # the text as it is written
    clip: SpeechClip | None = None  # the recording of the text, if there is one

    @property
    def draws(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def clip_seed(clip: SpeechClip) -> int:
    """Returns the seed of a clip's noise, which does not depend on its batch."""
    return seed_of(f"{clip.fingerprint} {clip.first_sample}")


@dataclass(frozen=True)
class SynthesisedSpeech:
    wave_L: Samples  # quantised to 16 bits
    durations_S: Tensor  # int64, frames of each symbol


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def synthesise(voice: Voice, texts: Sequence[Text], device: torch.device) -> list[SynthesisedSpeech]:
    """Synthesises all texts in one batch with length scale 1. Non-finite output becomes silence."""
    hop, dtype = voice.architecture.mel.hop_size, _dtype(voice)
    ids_BS = _stacked([torch.tensor(text.ids) for text in texts]).to(device)
    symbols_B = torch.tensor([len(text.ids) for text in texts], device=device)
    longest_B = torch.tensor([text.longest for text in texts], device=device)
    speaker_BG1 = voice.speaker(torch.tensor([text.speaker for text in texts], device=device))
    draws = [text.draws for text in texts]
    noise_B2S = _drawn(draws, 2, [len(text.ids) for text in texts]).to(device, dtype)
    noise_BCT = _drawn(draws, voice.architecture.latent_channels, [text.longest for text in texts])
    encoded = voice.encode_text(ids_BS, symbols_B)
    durations_BS = voice.predict_durations(encoded, speaker_BG1, noise_w=NOISE_W, noise_B2S=noise_B2S)
    durations_BS = _cut_off(durations_BS, longest_B)
    frames = durations_BS.sum(dim=1).clamp(min=1).long().tolist()
    noise_BCT = noise_BCT[..., : max(frames)].to(device, dtype)
    latent_BCT = voice.speak(encoded, durations_BS, speaker_BG1, noise_scale=NOISE_SCALE, noise_BCT=noise_BCT)
    waves_BL = np.nan_to_num(at_least_fp32(voice.decoder(latent_BCT, speaker_BG1)[:, 0]).cpu().numpy())
    return [
        SynthesisedSpeech(from_int16(to_int16(wave_L[: count * hop])), durations_S[: len(text.ids)].long().cpu())
        for wave_L, count, durations_S, text in zip(waves_BL, frames, durations_BS, texts, strict=True)
    ]


def _cut_off(durations_BS: Tensor, longest_B: Tensor) -> Tensor:
    """Crops durations to the maximum number of frames; non-finite durations count as 0."""
    ends_BS = durations_BS.nan_to_num(nan=0.0).cumsum(dim=1).clamp(max=longest_B[:, None])
    return ends_BS.diff(dim=1, prepend=torch.zeros_like(ends_BS[:, :1]))


@dataclass(frozen=True)
class EncodedClips:
    """Alignment and losses of recordings with their texts, as in training; sums over each clip."""

    durations_BS: Tensor  # int64, durations of the alignment
    scores_BTS: Tensor  # see align.alignment_scores
    divergence_B: Tensor  # nats
    duration_loss_B: Tensor  # nats
    mel_distance_B: Tensor  # log-mel L1 distance of the reconstruction; mean over bands, sum over frames


def encode_recordings(voice: Voice, batch: ClipBatch, seeds: Sequence[int], device: torch.device) -> EncodedClips:
    """Encodes recordings and computes their losses; `seeds` has one seed for each clip. Whole clips are reconstructed,
    whereas training decodes segments."""
    batch = ClipBatch(*(tensor.to(device) for tensor in batch))
    mel, dtype = voice.architecture.mel, _dtype(voice)
    wave_BL = batch.wave_BT.to(dtype) / FULL_SCALE
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    noise_B2S = _drawn(draws, 2, batch.symbols_B.tolist()).to(device, dtype)
    noise_BCT = _drawn(draws, voice.architecture.latent_channels, batch.frames_B.tolist()).to(device, dtype)
    speaker_BG1 = voice.speaker(batch.speakers_B)
    text = voice.encode_text(batch.ids_BS, batch.symbols_B)
    posterior, prior_latent_BCT = voice.encode_sound(magnitudes(wave_BL, mel), batch.frames_B, noise_BCT, speaker_BG1)
    scores_BTS = alignment_scores(prior_latent_BCT, text.mean_BCS, text.log_scale_BCS)
    durations_BS = search(scores_BTS, batch.symbols_B, batch.frames_B)
    prior = frame_prior(text, durations_BS, prior_latent_BCT.shape[2])
    made_BL = at_least_fp32(voice.decoder(posterior.latent_BCT, speaker_BG1)[:, 0])
    made_BL = made_BL * length_mask(batch.frames_B * mel.hop_size, made_BL.shape[1])[:, 0]
    distance_BT = (log_mel(made_BL, mel) - log_mel(wave_BL, mel)).abs().mean(dim=1)
    return EncodedClips(
        durations_BS,
        scores_BTS,
        kl_loss(prior_latent_BCT, posterior.log_scale_BCT, *prior, posterior.mask_B1T),
        voice.duration_loss(text, durations_BS, noise_B2S, speaker_BG1),
        (distance_BT * length_mask(batch.frames_B, distance_BT.shape[1])[:, 0]).sum(dim=1),
    )


def _dtype(voice: Voice) -> torch.dtype:
    return voice.text_encoder.embedding.weight.dtype


def _drawn(draws: Sequence[torch.Generator], channels: int, lengths: Sequence[int]) -> Tensor:
    """Returns normal noise (B, channels, longest), zero beyond the length of an item."""
    noise = [torch.randn(channels, length, generator=drawn) for drawn, length in zip(draws, lengths, strict=True)]
    return _stacked(noise)


def _stacked(items: Sequence[Tensor]) -> Tensor:
    """Stacks tensors, zero-padded to one length."""
    longest = max(item.shape[-1] for item in items)
    return torch.stack([F.pad(item, (0, longest - item.shape[-1])) for item in items])
