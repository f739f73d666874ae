"""Evaluation of a recogniser during training: error rates on held-out clips, with what they mean in words.

Shapes: B clips, T frames, V symbols.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gputrain.asr.config import TrainAsr
from gputrain.asr.load import predict
from gputrain.asr.model import family
from gputrain.files import FULL_SCALE
from gputrain.samples import Report, SoundSample, clip_caption
from gputrain.speech.buckets import Buckets, Speech
from gputrain.speech.error_rates import error_rates
from gputrain.speech.frames import STRIDE, encoder_frames
from gputrain.speech.store import SpeechClip, SpeechStore

log = logging.getLogger(__name__)

ONLY_BLANKS = 0.995  # Above this share of blanks, nothing is written.
SPOKEN = 0.97  # Below this share, the recogniser has begun to write.
PATIENCE_STEPS = 2000  # Steps in which only blanks are normal, when training begins with random weights.


class ReadClip(NamedTuple):
    """The text of a clip, and what the recogniser reads."""

    reference: str
    read: str
    blank_share: float


def transcribe_clips(
    model: Any, store: SpeechStore, clips: Sequence[SpeechClip], device: torch.device, *,
    normalizes: bool, batch_size: int,
) -> list[ReadClip]:  # fmt: skip
    """Returns the transcripts of clips by greedy decoding, in their order."""
    vocabulary = store.format.vocabulary
    buckets = Buckets(store, clips, STRIDE, batch_size=batch_size, seed=0)
    order = sorted(range(len(clips)), key=lambda number: clips[number].samples)
    found: dict[int, ReadClip] = {}
    for first in range(0, len(order), batch_size):
        members = order[first : first + batch_size]
        batch = buckets.collated(members)
        wave_BL = batch.wave_BT.to(device).float() / FULL_SCALE
        samples = batch.samples_B.tolist()
        best_BT = predict(model, wave_BL, samples, normalizes=normalizes).argmax(dim=-1).cpu()
        for row, number in enumerate(members):
            ids = best_BT[row, : encoder_frames(samples[row], family(model).field)].numpy()
            blank_share = float((ids == vocabulary.blank).mean())
            read = vocabulary.text_of(collapsed(ids, vocabulary.blank))
            found[number] = ReadClip(clips[number].normalized, read, blank_share)
    return [found[number] for number in range(len(clips))]


def collapsed(ids_T: npt.NDArray[np.int64], blank: int) -> list[int]:
    """Returns the labels of a path: repeats become one, then blanks are removed (Graves et al. 2006, section 2)."""
    return [label for label, _ in groupby(ids_T.tolist()) if label != blank]


class HeldOutSpeech:
    """Held-out clips of a training, sorted by fingerprint so that they come from many recordings."""

    def __init__(self, speech: Speech, settings: TrainAsr) -> None:
        data = settings.data
        self.store, self.batch_size, self.best_by = speech.store, data.eval_batch_size, settings.saving.best_by
        held_out = sorted(speech.parts.held_out, key=lambda clip: clip.fingerprint)
        self.clips, self.shown = held_out[: data.eval_clips], held_out[: data.num_text_samples]
        self.diagnosis = Diagnosis(from_scratch=not settings.model.init_from)
        self.step = 0  # Number of completed steps, which the recipe sets.

    def sample(self, model: Any, device: torch.device, *, normalizes: bool) -> Report:
        """Returns the transcripts of a few clips as text, each under its reference, and the clips."""
        made = self._transcribe(model, self.shown, device, normalizes)
        lines = [
            f"clip: {clip.path}\ntext: {one.reference}\nread: {one.read}\n"
            for clip, one in zip(self.shown, made, strict=True)
        ]
        return Report(texts={"transcripts": "\n".join(lines)} if lines else {}, recordings=self._recordings(made))

    def _recordings(self, made: Sequence[ReadClip]) -> dict[str, SoundSample]:
        """Returns the sounds of the clips whose transcripts are shown. Their captions begin as their entries do."""
        rate_hz = self.store.format.sampling_rate
        return {
            f"clip_{number}": SoundSample(
                torch.from_numpy(self.store.wave(clip) / FULL_SCALE).float(),
                rate_hz,
                clip_caption(clip.path, one.reference),
            )
            for number, (clip, one) in enumerate(zip(self.shown, made, strict=True), start=1)
        }

    def evaluate(self, model: Any, device: torch.device, *, normalizes: bool) -> Report:
        made = self._transcribe(model, self.clips, device, normalizes)
        rates = error_rates([(clip.reference, clip.read) for clip in made])
        blank_share = sum(one.blank_share for one in made) / len(made)
        scalars = {"score": 1 - rates[self.best_by], "blank_share": blank_share, **rates}
        if self.step and (found := self.diagnosis.of(self.step, blank_share, rates["cer"])):
            log.log(found.level, "step %d: %s", self.step, found.words)
        return Report(scalars=scalars, headline=("cer", "wer"))

    def _transcribe(
        self, model: Any, clips: Sequence[SpeechClip], device: torch.device, normalizes: bool
    ) -> list[ReadClip]:
        return transcribe_clips(
            model, self.store, clips, device, normalizes=normalizes, batch_size=self.batch_size
        )  # fmt: skip


class Remark(NamedTuple):
    """A sentence about an evaluation, and its level in the log."""

    level: int
    words: str


@dataclass
class Diagnosis:
    """Puts into words what the share of blanks means, as it depends on whether the recogniser has written before."""

    from_scratch: bool
    has_written: bool = False
    lowest_cer: float = math.inf
    said_normal: bool = False

    def of(self, step: int, blank_share: float, cer: float) -> "Remark | None":
        """Returns a sentence about an evaluation after `step` steps; None if nothing is to be said. That only blanks
        are normal yet is no warning, and is said once."""
        only_blanks, lowest = blank_share > ONLY_BLANKS, self.lowest_cer
        self.has_written |= blank_share < SPOKEN
        self.lowest_cer = min(lowest, cer)
        normal = PATIENCE_STEPS if self.from_scratch else PATIENCE_STEPS // 2
        if only_blanks and not self.has_written and step < normal:
            said, self.said_normal = self.said_normal, True
            return None if said else Remark(logging.INFO, f"only blanks, which is normal in the first {normal} steps")
        words = ""
        if only_blanks and self.has_written:
            words = (
                f"collapsed: the recogniser writes nothing any more (its best CER was {100 * lowest:.1f} %); go back "
                "to an earlier checkpoint with a lower --learning-rate or a longer --warmup-steps"
            )
        elif only_blanks:
            words = (
                f"only blanks after {step} steps: raise --learning-rate if it is below 1e-4, lower it if the loss does "
                "not fall, and check with gputrain validate that texts belong to their recordings"
            )
        elif cer > 2 * lowest and cer - lowest > 0.1:
            words = f"the CER has risen from {100 * lowest:.1f} to {100 * cer:.1f} %: lower --learning-rate"
        return Remark(logging.WARNING, words) if words else None
