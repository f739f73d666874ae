"""A training step of wav2vec 2.0 (Baevski et al. 2020, arXiv:2006.11477, section 3.3 on fine-tuning): an encoder of
transformers with the CTC loss of Graves et al. 2006.

The masks of SpecAugment and the layers that a step drops are drawn for the global batch from (seed, step). transformers
draws them inside the forward pass from the global random state, so that they would depend on how a batch is split.

Shapes: B items (clips), L samples, T frames, C channels, S labels, V symbols, N positions.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.asr import model as networks
from gputrain.asr.config import TrainAsr
from gputrain.asr.evaluate import HeldOutSpeech
from gputrain.engine.distributed import BatchDraws
from gputrain.engine.optim import Ema, adamw
from gputrain.engine.recipe import BatchStat, Phase, StepGroup, Term, Yielded
from gputrain.hw.runtime import Runtime
from gputrain.speech.buckets import ClipBatch, ClipSize
from gputrain.speech.config import STRIDE, encoder_frames
from gputrain.speech.training import BucketRecipe, fit_length

PEAK_SEARCH = 10_000  # Steps in which the one that leaves out the fewest layers is looked for.


@dataclass(frozen=True)
class UtteranceBatch:
    """Clips of a step, or a part of them; waves are zero beyond the end of a clip."""

    wave_BL: Tensor
    frames_B: Tensor
    labels_BS: Tensor
    mask_BT: Tensor | None  # frames that SpecAugment replaces
    frames: tuple[int, ...]  # frames_B and the numbers of labels as host integers, to avoid device syncs
    labels: tuple[int, ...]
    dropped_layers: frozenset[int]
    # Sums over the global batch, whatever part of it this is: the divisors of the loss and of the statistics.
    global_labels: float
    global_clips: float
    keeps_length: bool  # True: parts keep the padding, because the model's features depend on it.

    @property
    def most_frames(self) -> int:
        """Number of frames of the waves with their padding."""
        return encoder_frames(self.wave_BL.shape[1])

    @property
    def padded_frames(self) -> int:
        return len(self.frames) * (self.most_frames + 1)  # The data set counts about one frame more.

    def part(self, first: int, stop: int) -> "UtteranceBatch":
        """Returns items `first` to `stop` - 1, with the padding cropped to the longest of them."""
        items, frames, labels = slice(first, stop), self.frames[first:stop], self.labels[first:stop]
        # The divisors stay those of the global batch, so that the losses of the parts sum up to its own.
        most = self.most_frames if self.keeps_length else max(frames)
        return replace(
            self,
            wave_BL=self.wave_BL[items] if self.keeps_length else networks.cropped(self.wave_BL[items], most),
            frames_B=self.frames_B[items],
            labels_BS=self.labels_BS[items, : max(labels)],
            mask_BT=None if self.mask_BT is None else self.mask_BT[items, :most],
            frames=frames,
            labels=labels,
        )


class RecogniserRecipe(BucketRecipe):
    """One phase: the recogniser, or the parts of it that train."""

    kind, unit = "asr", "clips"
    settings: TrainAsr

    def __init__(
        self,
        settings: TrainAsr,
        architecture: Mapping[str, Any],
        clip: ClipSize,
        runtime: Runtime,
        held_out: HeldOutSpeech | None = None,
        *,
        normalizes: bool = True,
    ) -> None:
        self.settings, self.runtime, self.held_out = settings, runtime, held_out
        self.architecture, self.clip, self.hop_size, self.normalizes = architecture, clip, STRIDE, normalizes
        schedule = settings.schedule
        torch.manual_seed(schedule.seed)
        self.model = self._model_on_device()
        self.modules: dict[str, nn.Module] = {"recogniser": self.model}
        if schedule.ema_decay:
            self.ema = Ema(self.model, self._model_on_device(), schedule.ema_decay)
            self.modules["ema"] = self.ema
        # Without a mask, features of a clip change with its padding, and parts of a batch must not crop it.
        self.uses_mask = networks.uses_attention_mask(self.model)
        self.blank = int(self.model.config.pad_token_id)
        trained = trained_parameters(self.model, settings)
        optimizer = adamw(
            trained,
            learning_rate=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            betas=(schedule.beta1, schedule.beta2),
        )
        # The phase's module holds the parameters that train, and not those that are frozen.
        self.phase = Phase("recogniser", (nn.ParameterList(trained),), optimizer)
        # The positional convolution is weight-normed: its weight is made once a step, not in each micro-batch.
        once = functools.partial(networks.cached_position_weights, self.model)
        self.step_groups = [StepGroup((self.phase,), self.loss, once)]
        runtime.compile_modules(self.model.wav2vec2.encoder.layers, any_shape=True)

    def _model_on_device(self) -> Any:
        model = networks.build_recogniser(self.architecture)
        # Pretrained weights are copied in later by their names, which the adapters leave as they are.
        if self.settings.model.adapters == "lora":
            networks.add_lora(model, self.settings.model.lora_rank)
        return self.runtime.place(model)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights: fp32, or fp64 in tests that must exclude rounding."""
        dtype: torch.dtype = self.model.lm_head.weight.dtype
        return dtype

    def prepare(self, loaded: list[ClipBatch], step: int) -> UtteranceBatch:
        device, masking = self.runtime.device, self.settings.masking
        clips, draws = self.clips_and_draws(loaded, step)
        samples = [count for bucket in clips.buckets for count in bucket.samples_B.tolist()]
        frames = tuple(encoder_frames(count) for count in samples)
        labels = tuple(count for bucket in clips.buckets for count in bucket.symbols_B.tolist())
        # Without an attention mask the length of the padding changes the features: it is that of the global batch, and
        # no part is cropped to its own clips.
        longest = 0 if self.uses_mask else max(clips.frames) * STRIDE
        widest = max(longest, *(bucket.wave_BT.shape[1] for bucket in clips.buckets))
        wave_BL = torch.cat([fit_length(bucket.wave_BT, widest) for bucket in clips.buckets])
        wave_BL = wave_BL.to(device, non_blocking=True)
        labels_BS = torch.cat([fit_length(bucket.ids_BS, max(labels)) for bucket in clips.buckets])
        labels_BS = labels_BS.to(device, non_blocking=True)
        wave_BL = wave_BL.to(self.dtype) / 32768
        samples_B = torch.tensor(samples).to(device, non_blocking=True)
        # Over the clip's own samples alone, as the pretraining did: padding would lower the variance.
        if self.normalizes:
            wave_BL = networks.normalized(wave_BL, samples_B)
        # Samples after the last whole frame count for the mean and the variance only.
        wave_BL = wave_BL[:, :longest] if longest else networks.cropped(wave_BL, max(frames))
        frames_B = networks.frame_counts(samples_B)
        # SpecAugment: spans of frames get the model's mask vector. The draws are those of the longest clip of the
        # global batch, and cropped afterwards, so that no split changes them.
        mask_BT = None
        if masking.mask_time_prob:
            most, share = max(clips.frames), masking.mask_time_prob
            mask_BT = masked_spans(draws, frames_B, most, share=share, length=masking.mask_time_length)
            mask_BT = mask_BT[:, : encoder_frames(wave_BL.shape[1])]
        return UtteranceBatch(
            wave_BL=wave_BL,
            frames_B=frames_B,
            labels_BS=labels_BS,
            mask_BT=mask_BT,
            frames=frames,
            labels=labels,
            dropped_layers=self._dropped(step),
            global_labels=clips.global_symbols,
            global_clips=clips.global_clips,
            keeps_length=not self.uses_mask,
        )

    def _dropped(self, step: int) -> frozenset[int]:
        # LayerDrop (Fan et al. 2019): one choice a step. If parts of a batch chose for themselves, the gradient would
        # depend on how it is split, and ranks would wait for gradients of layers that they have not run.
        layers = int(self.model.config.num_hidden_layers)
        return dropped_layers(self.settings.schedule.seed, step, layers, self.settings.model.layer_drop)

    def peak_memory_step(self, step: int) -> int:
        """Returns the first step in which the encoder trains, and of the next ones the one with the most layers."""
        first = max(step, self.settings.model.freeze_encoder_steps)
        if not self.settings.model.layer_drop:
            return first
        return min(range(first, first + PEAK_SEARCH), key=lambda step: (len(self._dropped(step)), step))

    def loss(self, batch: UtteranceBatch, step: int) -> Iterator[Yielded]:
        """Yields the CTC loss: the negative log-likelihoods of the texts, per label of the global batch.

        Divided by labels and not by clips, as the likelihood of a text is a product over its labels: so a long clip
        counts for as much as short ones with as many labels, and no split into micro-batches changes the sum.
        """
        most = batch.most_frames
        options = networks.ForwardOptions(
            mask_BT=batch.mask_BT,
            dropped_layers=batch.dropped_layers,
            checkpoints=bool(self.settings.model.gradient_checkpointing),
            trains_features=self.settings.model.trains_features,
            trains_encoder=step >= self.settings.model.freeze_encoder_steps,
        )
        # Clips of one length need no mask; without one, attention may use its fastest kernels.
        is_padded = self.uses_mask and min(batch.frames) < most
        logits_BTV = networks.logits(self.model, batch.wave_BL, batch.frames_B if is_padded else None, options)
        # In fp32 under any autocast: CTC sums the probabilities of paths over hundreds of frames.
        log_probs_BTV = F.log_softmax(logits_BTV.to(torch.promote_types(self.dtype, torch.float32)), dim=-1)
        # A model without a mask was trained to read its padding, too: all frames of the batch take part in the path.
        frames: Any = batch.frames if self.uses_mask else (most,) * len(batch.frames)
        labels: Any = batch.labels
        # With targets of 64 bits and lengths on the host, torch's own kernels compute it, forward and backward. Both
        # passes copy the lengths and the places of the labels to a GPU, three small tensors, for each of which the host
        # waits: six device syncs a micro-batch.
        # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/LossCTC.cu
        # A clip with fewer frames than CTC needs has no path, and an infinite loss: with zero_infinity it adds nothing
        # to the loss and has no gradient. Its labels stay in the divisor, and "infinite" counts such clips.
        losses_B = F.ctc_loss(
            log_probs_BTV.transpose(0, 1),
            batch.labels_BS,
            frames,
            labels,
            blank=self.blank,
            reduction="none",
            zero_infinity=True,
        )
        yield Term("ctc", losses_B.sum() / batch.global_labels)
        # A recogniser first learns to write nothing at all; the share of blanks tells when it begins to write.
        with torch.no_grad():
            inside_BT = torch.arange(most, device=logits_BTV.device) < batch.frames_B[:, None]
            blanks_BT = (logits_BTV.argmax(dim=-1) == self.blank) & inside_BT
            blanks_B = blanks_BT.sum(dim=1).to(self.dtype) / batch.frames_B
            yield BatchStat("blank_share", blanks_B.sum() / batch.global_clips)
            yield BatchStat("infinite", (losses_B == 0).sum().to(self.dtype) / batch.global_clips)


def trained_parameters(model: Any, settings: TrainAsr) -> list[nn.Parameter]:
    """Returns the parameters that the settings train, in the model's order."""
    base, head = model.wav2vec2, list(model.lm_head.parameters())
    # The head always trains, as its rows of symbols that the pretrained model lacks begin at random.
    if settings.model.adapters == "lora":
        return [*networks.lora_parameters(model), *head]
    if settings.model.adapters == "attention":
        return [*(p for layer in base.encoder.layers for p in layer.adapter_layer.parameters()), *head]
    # Fine-tuning leaves the convolutions that read waves as the pretraining has made them, as in the paper. They have
    # no graph then, which would hold features of every few samples.
    left_out: set[int] = set()
    if not settings.model.trains_features:
        left_out |= {id(parameter) for parameter in base.feature_extractor.parameters()}
    if not settings.masking.mask_time_prob and hasattr(base, "masked_spec_embed"):
        left_out.add(id(base.masked_spec_embed))  # It would never have a gradient.
    return [parameter for parameter in model.parameters() if id(parameter) not in left_out]


def masked_spans(draws: BatchDraws, counts_B: Tensor, most: int, *, share: float, length: int) -> Tensor:
    """Returns which of N = `most` positions lie in a masked span, boolean (items of this rank, N).

    An item of n positions, out of `counts_B` of this rank's items, has `share * n / length` spans at different starts,
    rounded up or down at random, as many as fit; they may overlap (Baevski et al. 2020, arXiv:2006.11477, appendix B).
    """
    starts_B1 = counts_B[:, None] - (length - 1)
    scores_BN = draws.normal(most, dtype=torch.float32)
    position_N = torch.arange(most, device=counts_B.device)
    scores_BN = scores_BN.masked_fill(position_N >= starts_B1, -torch.inf)
    spans_B1 = (share / length * counts_B[:, None] + draws.uniform()[:, None]).floor()
    spans_B1 = torch.minimum(spans_B1, starts_B1).clamp(min=0)
    # The places with the highest scores begin spans; positions behind the last possible start have the score -inf.
    ranks_BN = scores_BN.argsort(dim=1, descending=True, stable=True).argsort(dim=1, stable=True)
    # A position is masked if more spans have begun up to it than have ended before it.
    begun_BN = (ranks_BN < spans_B1).cumsum(dim=1)
    ended_BN = torch.nn.functional.pad(begun_BN, (length, 0))[:, :most]
    return begun_BN > ended_BN


def dropped_layers(seed: int, step: int, layers: int, share: float) -> frozenset[int]:
    """Returns the layers that a step leaves out, each with the probability `share`."""
    if not share:
        return frozenset()
    # numpy guarantees that raw words do not change between versions (NEP 19).
    words = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(3, step))).random_raw(layers)
    return frozenset(np.flatnonzero((words >> np.uint64(11)) * 2.0**-53 < share).tolist())
