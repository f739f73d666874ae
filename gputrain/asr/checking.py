"""A recogniser that aligns texts with recordings and checks transcripts, for the preparation and evaluation of voices.

Shapes: F frames, V symbols, T samples.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gputrain.asr.decode import GreedyDecoder, comparable, words_of
from gputrain.asr.load import Recogniser, load_recogniser
from gputrain.asr.long_audio import CHUNK_SECONDS, OVERLAP_SECONDS, ChunkLengths, long_log_probs
from gputrain.audio.io import Samples, resample
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.speech.alignment import align_ctc, frames_needed
from gputrain.speech.checker import NotRecognised, SentenceTimes, TranscriptCheck
from gputrain.speech.error_rates import character_error_rate
from gputrain.speech.frames import STRIDE
from gputrain.speech.text.frontend import shortened
from gputrain.speech.text.vocabulary import ABSENT

MOST_LOSS = 6.0  # Sentences for which a path loses more, in nats per letter, are not said.
ATTEMPTS = 8  # A recording is aligned so many times, while there are sentences that are not said.
Autocast = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class CtcChecker:
    """See `gputrain.speech.checker.SpeechChecker`."""

    recogniser: Recogniser
    autocast: Autocast = contextlib.nullcontext

    def log_probs(self, wave_T: Samples, rate_hz: int) -> NDArray[np.float32]:
        """Returns the log-probabilities (F, V) of a wave of any length and rate."""
        own_hz = self.recogniser.sampling_rate
        lengths = ChunkLengths.of_seconds(CHUNK_SECONDS, OVERLAP_SECONDS, own_hz)
        with self.autocast():
            return long_log_probs(self.recogniser, resample(wave_T, rate_hz, own_hz), lengths)

    def read(self, wave_T: Samples, rate_hz: int) -> str:
        """Transcribes a wave."""
        return self._text_of(self.log_probs(wave_T, rate_hz))

    def _text_of(self, log_probs_FV: NDArray[np.float32]) -> str:
        decoder = GreedyDecoder(self.recogniser.vocabulary)
        decoder.feed(log_probs_FV)
        return " ".join(word.word for word in words_of(decoder.finish(), self.recogniser.vocabulary, 1.0))

    def labels(self, text: str) -> list[int]:
        """Returns the labels of a raw text, without letters that the recogniser does not have."""
        vocabulary = self.recogniser.vocabulary
        return [number for number in vocabulary.ids(vocabulary.normalize(text)) if number != vocabulary.unknown_id]

    def align(self, wave_T: Samples, rate_hz: int, sentences: Sequence[str]) -> list[SentenceTimes | None]:
        labels = [self.labels(sentence) for sentence in sentences]
        log_probs_FV = self.log_probs(wave_T, rate_hz)
        kept = {place for place, own in enumerate(labels) if own}
        if not kept:
            raise NotRecognised(f"the recogniser has no symbol for a letter of {shortened(sentences[0])!r}")
        if not self._text_of(log_probs_FV):
            raise NotRecognised(f"the recogniser writes nothing for a recording of {len(wave_T) / rate_hz:.1f} seconds")
        if len(log_probs_FV) < frames_needed(self._joined([labels[place] for place in sorted(kept)])):
            raise UserError(
                f"{sum(map(len, labels))} letters in {len(wave_T) / rate_hz:.1f} seconds: the text does not fit the "
                "recording",
                hint="look for another transcript",
            )
        times: dict[int, SentenceTimes] = {}
        for attempt in range(ATTEMPTS):
            places = sorted(kept)
            times = dict(zip(places, self._times(log_probs_FV, [labels[place] for place in places]), strict=True))
            losses = [times[place].loss for place in places]
            # A sentence that is not said takes sound from its neighbours, so that the worst ones are left out first.
            around, is_last = [0.0, *losses, 0.0], attempt == ATTEMPTS - 1
            misfits = {
                place
                for at, place in enumerate(places)
                if losses[at] > MOST_LOSS and (is_last or losses[at] >= max(around[at], around[at + 2]))
            }
            kept -= misfits
            if not misfits:
                break
        return [times[place] if place in kept else None for place in range(len(sentences))]

    def _joined(self, labels: Sequence[list[int]]) -> list[int]:
        """Returns the labels of sentences with delimiters between them."""
        delimiter = self.recogniser.vocabulary.delimiter
        between = [] if delimiter == ABSENT else [delimiter]
        return [label for place, own in enumerate(labels) for label in ([*between, *own] if place else own)]

    def _times(self, log_probs_FV: NDArray[np.float32], labels: Sequence[list[int]]) -> list[SentenceTimes]:
        if not labels:
            return []
        vocabulary = self.recogniser.vocabulary
        found = align_ctc(log_probs_FV, self._joined(labels), vocabulary.blank)
        second, gap = STRIDE / self.recogniser.sampling_rate, int(vocabulary.delimiter != ABSENT)
        lost_F = log_probs_FV.max(axis=1) - found.log_prob_F
        made, first = [], 0
        for own in labels:
            last = first + len(own) - 1
            begin, end = int(found.begin_L[first]), int(found.end_L[last])
            made.append(SentenceTimes(begin * second, end * second, float(lost_F[begin:end].sum()) / len(own)))
            first = last + 1 + gap
        return made

    def check(self, wave_T: Samples, rate_hz: int, text: str, other: str = "") -> TranscriptCheck:
        return self.check_log_probs(self.log_probs(wave_T, rate_hz), text, other)

    def check_log_probs(self, log_probs_FV: NDArray[np.float32], text: str, other: str = "") -> TranscriptCheck:
        """Does the same for the log-probabilities (F, V) of a recording."""
        read, reference = self._text_of(log_probs_FV), self.recogniser.vocabulary.normalize(text)
        cer = character_error_rate(reference, comparable(read, self.recogniser.vocabulary))
        return TranscriptCheck(self._loss(log_probs_FV, text), cer, read, self._loss(log_probs_FV, other))

    def _loss(self, log_probs_FV: NDArray[np.float32], text: str) -> float:
        """Returns what the best path loses by being bound to a text, in nats per letter; infinite if it can't fit."""
        labels = self.labels(text)
        if not labels or len(log_probs_FV) < frames_needed(labels):
            return math.inf
        free = float(log_probs_FV.max(axis=1).sum(dtype=np.float64))
        bound = align_ctc(log_probs_FV, labels, self.recogniser.vocabulary.blank)
        return (free - bound.log_prob) / len(labels)


def load_checker(model: str | Path, device: DeviceName = "auto") -> CtcChecker:
    """Loads a recogniser that checks speech. Raises UserError if there is none."""
    runtime = runtime_on(device)
    return CtcChecker(load_recogniser(model, runtime.device), runtime.autocast)
