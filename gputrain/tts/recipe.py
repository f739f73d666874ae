"""The voice as the engine trains it: VITS, and the discriminators of segments of its waves.

Shapes: B items (clips), S symbols, N frequencies, C channels, T frames, L samples, F frames of a segment; 1 channel.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio.config import Resolution
from gputrain.audio.discriminators import DiscriminatorGroup, multi_resolution, vits_discriminators
from gputrain.audio.losses import (
    DiscriminatorPasses,
    adversarial_terms,
    discriminator_terms,
    generator_terms,
    mel_term,
)
from gputrain.audio.mel import log_mel, magnitudes
from gputrain.audio.weight_norm import shared_weights
from gputrain.engine.gan import at_least_fp32
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import ChainGradients, Phase, StepGroup, Term, Yielded
from gputrain.hw.runtime import Runtime
from gputrain.planner.kind_work import PlanTarget
from gputrain.speech.buckets import ClipBatch, ClipSize, empty_bucket
from gputrain.speech.training import BucketRecipe
from gputrain.tts.align import alignment_scores, position_prior, search
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import SEGMENT_FRAMES, Model, TrainTts
from gputrain.tts.encoder import EncodedText
from gputrain.tts.evaluate import HeldOutClips
from gputrain.tts.latents import kl_loss
from gputrain.tts.model import Voice, frame_prior, length_mask, segment_starts, segments

# Of UnivNet (Jang et al. 2021, section 2.2), and of Piper's use_mrd.
RESOLUTIONS = (Resolution(1024, 120, 600), Resolution(2048, 240, 1200), Resolution(512, 50, 240))
SPEAKER_RATE = 50.0  # Learning rate of an embedding that trains alone, relative to that of all weights.


@dataclass(frozen=True)
class VoiceBatch:
    """Clips of a step, or a part of them; tensors are zero beyond the end of a clip."""

    ids_BS: Tensor
    symbols_B: Tensor
    spectrogram_BNT: Tensor
    wave_B1L: Tensor
    frames_B: Tensor
    speakers_B: Tensor
    noise_BCT: Tensor  # noise of the latents
    duration_noise_B2S: Tensor
    places_B: Tensor  # positions of the segments, uniform in [0, 1)
    # symbols_B and frames_B as host integers, to avoid device syncs; the padded sizes if steps are CUDA graphs, for
    # which they are the same in every batch of a shape
    symbols: tuple[int, ...]
    frames: tuple[int, ...]
    whole_frames: Tensor  # sum over the whole batch, as the next two; () on the device, as it differs from step to step
    whole_symbols: Tensor
    whole_clips: float
    pace_weight: Tensor  # weight of the prior of positions at this step, ()

    @property
    def padded_frames(self) -> int:
        return len(self.frames) * max(self.frames)

    def padded(self, symbols: int, frames: int, hop_size: int) -> "VoiceBatch":
        """Returns all items with zeros up to so many symbols and frames, which no part loses."""
        sizes = {"ids_BS": symbols, "duration_noise_B2S": symbols, "spectrogram_BNT": frames, "noise_BCT": frames}
        sizes["wave_B1L"] = frames * hop_size
        tensors: dict[str, Any] = {name: _of_length(getattr(self, name), size) for name, size in sizes.items()}
        clips = len(self.frames)
        return replace(self, **tensors, symbols=(symbols,) * clips, frames=(frames,) * clips)

    def part(self, first: int, stop: int) -> "VoiceBatch":
        """Returns items `first` to `stop` - 1, with the padding cropped to the longest of them."""
        items, symbols, frames = slice(first, stop), self.symbols[first:stop], self.frames[first:stop]
        most_symbols, most_frames = max(symbols), max(frames)
        hop_size = self.wave_B1L.shape[2] // self.spectrogram_BNT.shape[2]
        return replace(
            self,
            ids_BS=self.ids_BS[items, :most_symbols],
            spectrogram_BNT=self.spectrogram_BNT[items, :, :most_frames],
            wave_B1L=self.wave_B1L[items, :, : most_frames * hop_size],
            noise_BCT=self.noise_BCT[items, :, :most_frames],
            duration_noise_B2S=self.duration_noise_B2S[items, :, :most_symbols],
            symbols=symbols,
            frames=frames,
            **{name: getattr(self, name)[items] for name in ("symbols_B", "frames_B", "speakers_B", "places_B")},
        )


class VoiceRecipe(BucketRecipe):
    """Phases: the voice and the discriminators. Both are updated from the same generated waves in one pass, or, with
    alternating steps, in a step group each."""

    kind, unit = "tts", "clips"
    settings: TrainTts

    def __init__(
        self,
        settings: TrainTts,
        architecture: VoiceArchitecture,
        clip: ClipSize,
        runtime: Runtime,
        held_out: HeldOutClips | None = None,
    ) -> None:
        self.settings, self.losses, self.runtime, self.held_out = settings, settings.losses, runtime, held_out
        self.architecture, self.mel, self.clip = architecture, architecture.mel, clip
        schedule = settings.schedule
        torch.manual_seed(schedule.seed)
        self.voice = build_voice(settings, architecture, runtime)
        self.by_kind = discriminators_of(settings.model)
        self.discriminators = runtime.place(nn.ModuleDict(self.by_kind))
        self.modules: dict[str, nn.Module] = {"voice": self.voice, "discriminators": self.discriminators}
        if schedule.ema_decay:
            average = build_voice(settings, architecture, runtime)
            self.ema = Ema(self.voice, average, schedule.ema_decay)
            self.modules["ema"] = self.ema
        optimizer = functools.partial(
            adamw, learning_rate=schedule.learning_rate, weight_decay=schedule.weight_decay, eps=schedule.eps
        )
        learning, rate = self._learning()
        of_voice = optimizer(learning.parameters(), betas=schedule.betas)
        if learning is not self.voice:
            of_voice.param_groups[0]["weight_decay"] = 0.0
        generator = Phase("generator", (learning,), of_voice, lr_scale=rate)
        discriminator = Phase(
            "discriminator",
            (self.discriminators,),
            optimizer(self.discriminators.parameters(), betas=schedule.discriminator_betas),
            lr_scale=schedule.discriminator_rate,
        )
        weights_once = functools.partial(
            shared_weights, dtype=runtime.dtype, without_autocast=self.voice.computing_in_fp32(),
            stacked=runtime.kernel_device == "cuda",
        )  # fmt: skip
        both = functools.partial(weights_once, self.voice, self.discriminators)
        # A graph holds one bucket of clips; layers that run again repeat their dropout, which no graph can.
        captured = schedule.accumulation_steps == 1 and not settings.model.gradient_checkpointing
        fixed = self._prefers_even_pace if captured else None
        group = StepGroup((generator, discriminator), self.loss, both, fixed)
        self.step_groups = [group]
        if self.losses.step_order == "alternating":
            parts = (self.voice.posterior_encoder, self.voice.decoder, self.discriminators)
            first = replace(group, phases=(discriminator,), loss=self.discriminator_loss,
                            step_context=functools.partial(weights_once, *parts))  # fmt: skip
            self.step_groups = [first, replace(group, phases=(generator,))]
        self._compile()

    def _learning(self) -> tuple[nn.Module, float]:
        """Returns the part of the voice that trains, and its learning rate relative to that of the schedule.

        Of an embedding alone, the rows of other speakers have gradients of exactly zero, and rows are not decayed, so
        that they keep every bit. As nothing else can, the embedding also learns from the durations.
        """
        if self.settings.model.train_part == "all":
            return self.voice, 1.0
        self.voice.duration_predictor.trains_speaker = True
        return self.voice.speakers, SPEAKER_RATE

    def _compile(self) -> None:
        """Compiles the layers of the voice for any length of text and clips, and the decoder and the discriminators for
        the length of a segment. Layers of one kind share their code, so that compiling takes no longer for many."""
        compile = self.runtime.compile
        self.runtime.compile_modules(self.voice.compiled_parts(), any_shape=True)
        if self.runtime.plan.compile.value and self.runtime.kernel_device == "cuda":
            self.voice.duration_predictor.compute_by_rows()
        for coupling in self.voice.duration_predictor.spline_couplings():
            coupling.transform = compile(coupling.transform, any_shape=True)
        self.divergence = compile(divergence_from_prior, any_shape=True)
        self.decode = compile(self.voice.decoder.forward, any_count=True)
        self.passes = DiscriminatorPasses.compiled(functools.partial(compile, any_count=True))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights: fp32, or fp64 in tests that must exclude rounding."""
        return self.voice.text_encoder.embedding.weight.dtype

    def prepare(self, loaded: list[ClipBatch], step: int) -> VoiceBatch:
        device, (clips, draws) = self.runtime.device, self.clips_and_draws(loaded, step)
        symbols = tuple(count for bucket in clips.buckets for count in bucket.symbols_B.tolist())
        frames = tuple(count for bucket in clips.buckets for count in bucket.frames_B.tolist())
        fields = zip(*(bucket.of_clips for bucket in clips.buckets), strict=True)
        tensors = (_joined(tensors).to(device, non_blocking=True) for tensors in fields)
        bucket = ClipBatch(*tensors)
        # The last frames of the longest clip mirror its end, so that it is the longest of all ranks that decides.
        hop = self.mel.hop_size
        widest = max(clips.frames) * hop
        wave_BL = _of_length(bucket.wave_BT[:, :widest], widest).to(self.dtype) / 32768
        noise_BCT = draws.normal(self.architecture.latent_channels, max(clips.frames), dtype=self.dtype)
        duration_noise_B2S = draws.normal(2, max(clips.symbols), dtype=self.dtype)

        def on_device(number: float, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.full((), number, dtype=dtype, device=device)

        batch = VoiceBatch(
            ids_BS=bucket.ids_BS[:, : max(symbols)],
            symbols_B=bucket.symbols_B,
            spectrogram_BNT=magnitudes(wave_BL, self.mel)[:, :, : max(frames)],
            wave_B1L=wave_BL[:, None, : max(frames) * hop],
            frames_B=bucket.frames_B,
            speakers_B=bucket.speakers_B,
            noise_BCT=noise_BCT[:, :, : max(frames)],
            duration_noise_B2S=duration_noise_B2S[:, :, : max(symbols)],
            places_B=draws.uniform(),
            symbols=symbols,
            frames=frames,
            whole_frames=on_device(clips.whole_frames),
            whole_symbols=on_device(clips.whole_symbols),
            whole_clips=clips.whole_clips,
            pace_weight=on_device(self._pace_weight(step), torch.float64),
        )
        if not (self.runtime.plan.cuda_graphs.value and self.step_groups[0].graph_key):
            return batch
        return batch.padded(bucket.ids_BS.shape[1], bucket.wave_BT.shape[1] // hop, hop)

    def plan_target(self) -> PlanTarget:
        return plan_target(self.settings, self.architecture, self.clip)

    def loss(self, batch: VoiceBatch, step: int) -> Iterator[Yielded]:
        """Yields the losses in an order that limits peak memory.

        The losses of whole clips are back-propagated first, onto detached copies of text and latents, before the
        decoder runs, on segments of one length; last, the gradients of the copies are propagated through the encoders.
        """
        voice, mask_B1T = self.voice, length_mask(batch.frames_B, max(batch.frames))
        speaker_BG1 = voice.speaker(batch.speakers_B)
        speaker = None if speaker_BG1 is None else leaf(speaker_BG1)
        text = voice.encode_text(batch.ids_BS, batch.symbols_B)
        posterior = voice.posterior_encoder(batch.spectrogram_BNT, mask_B1T, batch.noise_BCT, speaker)
        prior = EncodedText(
            text.hidden_BCS.detach(), leaf(text.mean_BCS), leaf(text.log_scale_BCS), text.mask_B1S
        )  # fmt: skip
        latent_BCT, log_scale_BCT = leaf(posterior.latent_BCT), leaf(posterior.log_scale_BCT)

        prior_latent_BCT = voice.flow(latent_BCT, mask_B1T, speaker)
        scores_BTS = alignment_scores(prior_latent_BCT, prior.mean_BCS, prior.log_scale_BCS)
        self._prefer_even_pace(scores_BTS, batch, step)
        durations_BS = search(scores_BTS, batch.symbols_B, batch.frames_B)
        del scores_BTS
        divergence = self.divergence(prior_latent_BCT, log_scale_BCT, prior, durations_BS, mask_B1T)
        divergence = divergence / batch.whole_frames
        del prior_latent_BCT
        yield Term("kl", divergence, self.losses.kl_weight)
        duration = voice.duration_loss(prior, durations_BS, batch.duration_noise_B2S, speaker).sum()
        yield Term("duration", duration / batch.whole_symbols, self.losses.duration_weight)
        if text.mean_BCS.requires_grad:  # False if only a speaker trains.
            yield chain_gradients((text.mean_BCS, prior.mean_BCS), (text.log_scale_BCS, prior.log_scale_BCS))
        del text, prior, divergence, duration

        yield from self.segment_loss(*self._segments(latent_BCT, batch), speaker, batch.whole_clips)
        yield chain_gradients((posterior.latent_BCT, latent_BCT), (posterior.log_scale_BCT, log_scale_BCT))
        if speaker_BG1 is not None and speaker is not None:
            yield chain_gradients((speaker_BG1, speaker))

    def _pace_weight(self, step: int) -> float:
        """Returns the weight of the prior of positions, which falls to 0 in the first steps: a text encoder that knows
        nothing yet learns from alignments that are roughly right."""
        return max(0.0, 1 - step / self.settings.prior_steps) if self.settings.prior_steps else 0.0

    def _prefers_even_pace(self, step: int) -> bool:
        """Returns whether alignments have the prior of positions: all that the losses take from the step."""
        return self._pace_weight(step) > 0

    def _prefer_even_pace(self, scores_BTS: Tensor, batch: VoiceBatch, step: int) -> None:
        """Adds the prior of positions to the scores of alignments."""
        if self._prefers_even_pace(step):
            frames, symbols = scores_BTS.shape[1:]
            prior_BTS = position_prior(batch.symbols_B, batch.frames_B, symbols, frames)
            scores_BTS.add_(prior_BTS.mul_(batch.pace_weight))

    def discriminator_loss(self, batch: VoiceBatch, step: int) -> Iterator[Yielded]:
        """Yields the terms of the discriminators alone. The voice's group generates their waves again, with a graph."""
        voice, mask_B1T = self.voice, length_mask(batch.frames_B, max(batch.frames))
        with torch.no_grad():
            speaker = voice.speaker(batch.speakers_B)
            posterior = voice.posterior_encoder(batch.spectrogram_BNT, mask_B1T, batch.noise_BCT, speaker)
            latent_BCF, real_B1L = self._segments(posterior.latent_BCT, batch)
            made_B1L = at_least_fp32(self.decode(latent_BCF, speaker))
        counts = (batch.whole_clips, batch.whole_clips)
        yield from discriminator_terms(self.by_kind, real_B1L, made_B1L, *counts, passes=self._used_passes)

    def _segments(self, latent_BCT: Tensor, batch: VoiceBatch) -> tuple[Tensor, Tensor]:
        """Returns segments of one length, of the latents and of the recordings: BCF and B1L."""
        starts_B = segment_starts(batch.places_B, batch.frames_B, SEGMENT_FRAMES)
        hop = self.mel.hop_size
        real_B1L = segments(batch.wave_B1L, starts_B * hop, SEGMENT_FRAMES * hop)
        return segments(latent_BCT, starts_B, SEGMENT_FRAMES), real_B1L

    def segment_loss(
        self, latent_BCF: Tensor, real_B1L: Tensor, speaker: Tensor | None, whole_clips: float
    ) -> Iterator[Yielded]:
        """Yields the losses of segments of waves, which train the decoder and, unless they step alone, the
        discriminators."""
        waves_B1L = self.decode(latent_BCF, speaker)
        made_B1L = leaf(at_least_fp32(waves_B1L))
        target_BMF = log_mel(real_B1L.squeeze(1), self.mel)
        yield mel_term(self.mel, made_B1L, target_BMF, whole_clips, self.losses.mel_weight)
        terms = generator_terms if self.losses.step_order == "alternating" else adversarial_terms
        counts = (whole_clips, whole_clips)
        yield from terms(self.by_kind, real_B1L, made_B1L, *counts, passes=self._used_passes)
        yield chain_gradients((waves_B1L, made_B1L))

    @property
    def _used_passes(self) -> DiscriminatorPasses | None:
        return self.passes if self.runtime.plan.compile.value else None

    def average(self, step: int) -> None:
        if self.settings.schedule.ema_decay:
            self.ema.update(self.voice, step)

    @property
    def best_model(self) -> Voice:
        """The EMA of the voice, or the voice itself if the EMA is off."""
        return self.ema.average if self.settings.schedule.ema_decay else self.voice


def divergence_from_prior(
    prior_latent_BCT: Tensor, log_scale_BCT: Tensor, text: EncodedText, durations_BS: Tensor, mask_B1T: Tensor
) -> Tensor:
    """Returns the KL divergence of the posterior from the prior of the aligned text in nats, summed over all frames."""
    prior = frame_prior(text, durations_BS, mask_B1T.shape[2])
    return kl_loss(prior_latent_BCT, log_scale_BCT, *prior, mask_B1T).sum()


def leaf(tensor: Tensor) -> Tensor:
    """Returns a detached copy that accumulates its own gradient."""
    return tensor.detach().requires_grad_()


def chain_gradients(*pairs: tuple[Tensor, Tensor]) -> ChainGradients:
    """Back-propagates the gradients of detached copies through the tensors that they were copied from."""
    gradients = []
    for tensor, gathered in pairs:
        assert gathered.grad is not None
        gradients.append(gathered.grad.to(tensor.dtype))
    return ChainGradients(tuple(tensor for tensor, _ in pairs), tuple(gradients))


def _joined(tensors: tuple[Tensor, ...]) -> Tensor:
    """Concatenates along the first dimension, zero-padded to one length."""
    if len(tensors) == 1:
        return tensors[0]
    longest = max(tensor.shape[-1] for tensor in tensors)
    return torch.cat(tensors if tensors[0].ndim == 1 else [_of_length(one, longest) for one in tensors])


def _of_length(x: Tensor, size: int) -> Tensor:
    """Returns a contiguous tensor whose last dimension is zero-padded to `size` elements."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x.contiguous()


def discriminators_of(model: Model) -> dict[str, DiscriminatorGroup]:
    """Returns the discriminators by kind. Those of waves begin as they do alone, because they are drawn first."""
    made = {"waves": vits_discriminators(model.discriminator_channels)}
    if model.use_mrd:
        made["mrd"] = multi_resolution(RESOLUTIONS, model.discriminator_channels)
    return made


def build_voice(settings: TrainTts, architecture: VoiceArchitecture, runtime: Runtime) -> Voice:
    voice = Voice(architecture, checkpointing=bool(settings.model.gradient_checkpointing))
    runtime.place(voice)
    return voice


def plan_target(settings: TrainTts, architecture: VoiceArchitecture, clip: ClipSize) -> PlanTarget:
    """Returns the training in the form that the memory planner takes."""

    def build(runtime: Runtime, checkpointing: bool) -> VoiceRecipe:
        model = replace(settings.model, gradient_checkpointing=checkpointing)
        return VoiceRecipe(replace(settings, model=model), architecture, clip, runtime)

    def load(items: int = settings.schedule.global_batch_size) -> list[ClipBatch]:
        return empty_bucket(items, clip, clip.frames * architecture.mel.hop_size)

    return PlanTarget(
        build, load, is_proportional=lambda items: True, global_batch_size=settings.schedule.global_batch_size
    )
