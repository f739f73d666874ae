"""A training step of VITS (Kim, Kong and Son 2021, arXiv:2106.06103): phases and losses in the order of the paper.

Shapes: B clips, S symbols, N frequencies, C channels, G channels of a speaker, T frames, L samples, F frames of a
segment, M mel bands; 1 and 2 so many channels.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.audio.discriminators import vits_discriminators
from gputrain.audio.losses import DiscriminatorPasses, adversarial_terms, mel_term
from gputrain.audio.mel import log_mel, magnitudes
from gputrain.audio.weight_norm import shared_weights
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import ChainGradients, Phase, StepGroup, Term, Yielded, at_least_fp32
from gputrain.hw.runtime import Runtime
from gputrain.speech.buckets import ClipBatch, ClipSize
from gputrain.speech.training import BucketRecipe, fit_length
from gputrain.tts.align import alignment_scores, position_prior, search
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.config import SEGMENT_FRAMES, TrainTts
from gputrain.tts.encoder import EncodedText
from gputrain.tts.evaluate import HeldOutClips
from gputrain.tts.latents import kl_loss
from gputrain.tts.model import Voice, frame_prior, length_mask, segment_starts, segments


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
    # Sums over the global batch, whatever part of it this is: the divisors of the losses. The first two are tensors ()
    # on the device, because a CUDA graph would keep a number that differs from step to step.
    global_frames: Tensor
    global_symbols: Tensor
    global_clips: float
    prior_weight: Tensor  # weight of the prior of alignments at this step, ()

    @property
    def padded_frames(self) -> int:
        return len(self.frames) * max(self.frames)

    def padded(self, symbols: int, frames: int, hop_size: int) -> "VoiceBatch":
        """Returns all items with zeros up to so many symbols and frames, which no part loses."""
        sizes = {"ids_BS": symbols, "duration_noise_B2S": symbols, "spectrogram_BNT": frames, "noise_BCT": frames}
        sizes["wave_B1L"] = frames * hop_size
        tensors: dict[str, Any] = {name: fit_length(getattr(self, name), size) for name, size in sizes.items()}
        clips = len(self.frames)
        return replace(self, **tensors, symbols=(symbols,) * clips, frames=(frames,) * clips)

    def part(self, first: int, stop: int) -> "VoiceBatch":
        """Returns items `first` to `stop` - 1, with the padding cropped to the longest of them."""
        items, symbols, frames = slice(first, stop), self.symbols[first:stop], self.frames[first:stop]
        most_symbols, most_frames = max(symbols), max(frames)
        hop_size = self.wave_B1L.shape[2] // self.spectrogram_BNT.shape[2]
        # The divisors and the noise stay those of the global batch, so that the losses of the parts sum up to its own.
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
    """Phases: the voice and the discriminators. Both are updated from the same generated waves, in one step group."""

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
        self.hop_size = self.mel.hop_size
        schedule = settings.schedule
        torch.manual_seed(schedule.seed)
        # The order in which models are built is that of the draws of their weights: a run with this seed depends on it.
        self.model = self.voice = self._build_voice()
        self.by_kind = {"waves": vits_discriminators(settings.model.discriminator_channels)}
        self.discriminators = runtime.place(nn.ModuleDict(self.by_kind))
        self.modules: dict[str, nn.Module] = {"voice": self.voice, "discriminators": self.discriminators}
        if schedule.ema_decay:
            self.ema = Ema(self.voice, self._build_voice(), schedule.ema_decay)
            self.modules["ema"] = self.ema
        optimizer = functools.partial(
            adamw, learning_rate=schedule.learning_rate, weight_decay=schedule.weight_decay, eps=schedule.eps
        )
        # As in VITS and HiFi-GAN, two optimizers: each phase steps by the gradients of its own losses alone.
        generator = Phase("generator", (self.voice,), optimizer(self.voice.parameters(), betas=schedule.betas))
        discriminator = Phase(
            "discriminator",
            (self.discriminators,),
            optimizer(self.discriminators.parameters(), betas=schedule.discriminator_betas),
            lr_scale=schedule.discriminator_rate,
        )
        # Weight norm is computed once a step, for all micro-batches and for both passes through the discriminators.
        weights_once = functools.partial(
            shared_weights,
            self.voice,
            self.discriminators,
            dtype=runtime.dtype,
            without_autocast=self.voice.computing_in_fp32(),
        )
        # A graph holds one bucket of clips; layers that run again repeat their dropout, which no graph can.
        captured = schedule.accumulation_steps == 1 and not settings.model.gradient_checkpointing
        graph_key = self._has_alignment_prior if captured else None
        self.step_groups = [StepGroup((generator, discriminator), self.loss, weights_once, graph_key)]
        self._compile()

    def _build_voice(self) -> Voice:
        voice = Voice(self.architecture, checkpointing=bool(self.settings.model.gradient_checkpointing))
        self.runtime.place(voice)
        return voice

    def _compile(self) -> None:
        """Compiles the layers of the voice for any length of text and clips, and the decoder and the discriminators for
        the length of a segment. Layers of one kind share their code, so that compiling takes no longer for many."""
        compile = self.runtime.compile
        self.runtime.compile_modules(self.voice.compiled_parts(), any_shape=True)
        for coupling in self.voice.duration_predictor.spline_couplings():
            coupling.transform = compile(coupling.transform, any_shape=True)
        self.divergence = compile(divergence_from_prior, any_shape=True)
        self.decode = compile(self.voice.decoder.forward, any_count=True)
        self.passes: DiscriminatorPasses | None = None
        if self.runtime.plan.compile.value:
            self.passes = DiscriminatorPasses.compiled(functools.partial(compile, any_count=True))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights: fp32, or fp64 in tests that must exclude rounding."""
        return self.voice.text_encoder.embedding.weight.dtype

    # ----------------------------------------------------------------------------------------------------- the batch

    def prepare(self, loaded: list[ClipBatch], step: int) -> VoiceBatch:
        device, (clips, draws) = self.runtime.device, self.clips_and_draws(loaded, step)
        symbols = tuple(count for bucket in clips.buckets for count in bucket.symbols_B.tolist())
        frames = tuple(count for bucket in clips.buckets for count in bucket.frames_B.tolist())
        # With gradient accumulation, a step has several buckets, which are padded to the longest clip of all.
        fields = zip(*(bucket.of_clips for bucket in clips.buckets), strict=True)
        bucket = ClipBatch(*(_concatenated(tensors).to(device, non_blocking=True) for tensors in fields))
        # The last frames of the longest clip mirror its end, so that it is the longest of all ranks that decides.
        wave_BL = fit_length(bucket.wave_BT, max(clips.frames) * self.hop_size).to(self.dtype) / 32768
        # Noise is drawn for the global batch and then cropped, so that it does not depend on how the batch is split.
        noise_BCT = draws.normal(self.architecture.latent_channels, max(clips.frames), dtype=self.dtype)
        duration_noise_B2S = draws.normal(2, max(clips.symbols), dtype=self.dtype)

        def on_device(number: float, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.full((), number, dtype=dtype, device=device)

        batch = VoiceBatch(
            ids_BS=bucket.ids_BS[:, : max(symbols)],
            symbols_B=bucket.symbols_B,
            spectrogram_BNT=magnitudes(wave_BL, self.mel)[:, :, : max(frames)],
            wave_B1L=wave_BL[:, None, : max(frames) * self.hop_size],
            frames_B=bucket.frames_B,
            speakers_B=bucket.speakers_B,
            noise_BCT=noise_BCT[:, :, : max(frames)],
            duration_noise_B2S=duration_noise_B2S[:, :, : max(symbols)],
            places_B=draws.uniform(),
            symbols=symbols,
            frames=frames,
            global_frames=on_device(clips.global_frames),
            global_symbols=on_device(clips.global_symbols),
            global_clips=clips.global_clips,
            prior_weight=on_device(self._prior_weight(step), torch.float64),
        )
        if not (self.runtime.plan.cuda_graphs.value and self.step_groups[0].graph_key):
            return batch
        return batch.padded(bucket.ids_BS.shape[1], bucket.wave_BT.shape[1] // self.hop_size, self.hop_size)

    # ------------------------------------------------------------------------------------------------------ the step

    def loss(self, batch: VoiceBatch, step: int) -> Iterator[Yielded]:
        """Yields the losses of VITS (section 2.4) in an order that limits peak memory.

        Each term is back-propagated as it is yielded. The graphs of the encoders are held until the end, and their
        outputs are replaced by detached copies, `*_leaf`, on which the gradients of all terms are summed. So the
        graphs of the flow, of the duration predictor and of the decoder are never in memory together, and each encoder
        is back-propagated once.
        """
        voice, mask_B1T = self.voice, length_mask(batch.frames_B, max(batch.frames))
        speaker_BG1 = voice.speaker(batch.speakers_B)
        speaker_leaf = None if speaker_BG1 is None else leaf(speaker_BG1)
        # The text knows no recording, and the posterior no text: the alignment and the divergence below tie them.
        text = voice.encode_text(batch.ids_BS, batch.symbols_B)
        posterior = voice.posterior_encoder(batch.spectrogram_BNT, mask_B1T, batch.noise_BCT, speaker_leaf)
        # The duration predictor learns from the text without teaching its encoder (section 2.2.2): no gradient.
        text_leaf = EncodedText(text.hidden_BCS.detach(), leaf(text.mean_BCS), leaf(text.log_scale_BCS), text.mask_B1S)
        latent_leaf, log_scale_leaf = leaf(posterior.latent_BCT), leaf(posterior.log_scale_BCT)

        # Prior: the flow maps latents to the space in which symbols have normal distributions. All frames of a clip
        # pass it, as the alignment needs whole sentences; only the decoder, which costs most, sees segments.
        prior_latent_BCT = voice.flow(latent_leaf, mask_B1T, speaker_leaf)
        durations_BS = self._align(prior_latent_BCT, text_leaf, batch, step)
        # Divided by the frames of the global batch: a mean over frames that no split into micro-batches changes.
        divergence = self.divergence(prior_latent_BCT, log_scale_leaf, text_leaf, durations_BS, mask_B1T)
        divergence = divergence / batch.global_frames
        del prior_latent_BCT
        yield Term("kl", divergence, self.losses.kl_weight)
        # Divided by the symbols of the global batch, each of which has one duration.
        # The durations are those of this step's alignment, and integers: they are a target, and carry no gradient.
        duration = voice.duration_loss(text_leaf, durations_BS, batch.duration_noise_B2S, speaker_leaf).sum()
        yield Term("duration", duration / batch.global_symbols, self.losses.duration_weight)
        # From here on, no loss reads the text: its encoder is back-propagated, and its graph is gone before the decoder
        # has one.
        yield chain_gradients((text.mean_BCS, text_leaf.mean_BCS), (text.log_scale_BCS, text_leaf.log_scale_BCS))
        del text, text_leaf, divergence, duration

        yield from self._gan_loss(latent_leaf, speaker_leaf, batch)
        # The posterior encoder learns from both sides: from the divergence what the text can tell, and from the decoder
        # what the sound needs. The speaker's embedding gathers the gradients of all parts, and so comes last.
        yield chain_gradients((posterior.latent_BCT, latent_leaf), (posterior.log_scale_BCT, log_scale_leaf))
        if speaker_BG1 is not None and speaker_leaf is not None:
            yield chain_gradients((speaker_BG1, speaker_leaf))

    def _align(self, prior_latent_BCT: Tensor, text: EncodedText, batch: VoiceBatch, step: int) -> Tensor:
        """Returns the frames of each symbol, BS, in the most likely monotonic alignment (section 2.2.1).

        There is no gradient: the best path is a discrete choice, and given the path the KL divergence alone teaches
        both sides. The scores are detached for the same reason, so that no graph of (T, S) cells is ever held.
        """
        # The alignment is that of this step's weights: text, flow and durations learn together, and none is given.
        scores_BTS = alignment_scores(prior_latent_BCT, text.mean_BCS, text.log_scale_BCS)
        if self._has_alignment_prior(step):
            # A text encoder that knows nothing yet gives all symbols the same scores, and the best path is then
            # arbitrary. The prior prefers an even pace, so that it learns from alignments that are roughly right.
            frames, symbols = scores_BTS.shape[1:]
            prior_BTS = position_prior(batch.symbols_B, batch.frames_B, symbols, frames)
            scores_BTS.add_(prior_BTS.mul_(batch.prior_weight))
        return search(scores_BTS, batch.symbols_B, batch.frames_B)

    def _gan_loss(self, latent_BCT: Tensor, speaker_BG1: Tensor | None, batch: VoiceBatch) -> Iterator[Yielded]:
        """Yields the losses of random segments of one length (sections 2.1.2 and 2.3), which train the decoder, and
        through the latents the posterior encoder: reconstruction, adversarial loss, feature matching; and the
        discriminators'.

        Each is divided by the clips of the global batch, as every clip has one segment.
        """
        # Segments are cut out of the posterior's latents at the frames of the recording's, so that each is compared to
        # the samples that it was encoded from. The flow is no part of this path: the decoder reads latents of sound.
        # The encoder has seen the whole clip, so that a segment's ends are no ends of a sound to it.
        starts_B = segment_starts(batch.places_B, batch.frames_B, SEGMENT_FRAMES)
        real_B1L = segments(batch.wave_B1L, starts_B * self.hop_size, SEGMENT_FRAMES * self.hop_size)
        waves_B1L = self.decode(segments(latent_BCT, starts_B, SEGMENT_FRAMES), speaker_BG1)
        # The mel, adversarial and feature losses gather their gradients on the waves, and pass the decoder once.
        made_leaf = leaf(at_least_fp32(waves_B1L))
        target_BMF = log_mel(real_B1L.squeeze(1), self.mel)
        # A further loss of the waves would be one more term on `made_leaf`, before its gradient is chained.
        yield mel_term(self.mel, made_leaf, target_BMF, batch.global_clips, self.losses.mel_weight)
        # The first count divides the losses of real segments, the second those of generated ones, which are as many.
        counts = (batch.global_clips, batch.global_clips)
        yield from adversarial_terms(self.by_kind, real_B1L, made_leaf, *counts, passes=self.passes)
        yield chain_gradients((waves_B1L, made_leaf))

    def _prior_weight(self, step: int) -> float:
        """Returns the weight of the alignment prior, which falls linearly to 0 in the first steps."""
        return max(0.0, 1 - step / self.settings.prior_steps) if self.settings.prior_steps else 0.0

    def _has_alignment_prior(self, step: int) -> bool:
        """Returns whether the step has the alignment prior. It decides with the shapes of a batch which kernels a step
        has, and so it is the key of its CUDA graph."""
        return self._prior_weight(step) > 0


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


def _concatenated(tensors: tuple[Tensor, ...]) -> Tensor:
    """Concatenates along the first dimension, zero-padded to one length."""
    if len(tensors) == 1:  # Nothing is copied.
        return tensors[0]
    longest = max(tensor.shape[-1] for tensor in tensors)
    return torch.cat(tensors if tensors[0].ndim == 1 else [fit_length(tensor, longest) for tensor in tensors])
