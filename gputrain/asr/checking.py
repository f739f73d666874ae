"""A recogniser that aligns texts with recordings and checks transcripts, for the preparation and evaluation of voices.

A text is aligned by the most probable CTC path of its labels (Graves et al. 2006), by Viterbi's search. The path is
exact for recordings of any length: rows of the trellis are kept every BLOCK frames only, and the frames between two of
them are computed again when the path is traced back through them.

Shapes: F frames, V symbols, T samples, L labels, S states (a blank, then each label and a blank).
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gputrain.asr.load import Recogniser, comparable, greedy_text, load_recogniser
from gputrain.asr.transcribe import CHUNK_SECONDS, OVERLAP_SECONDS, ChunkLengths, long_log_probs
from gputrain.audio.io import Samples, resample
from gputrain.errors import UserError
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import runtime_on
from gputrain.speech.checker import NotRecognised, SentenceTimes, TranscriptCheck
from gputrain.speech.config import STRIDE
from gputrain.speech.error_rates import character_error_rate
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
        return greedy_text(self.log_probs(wave_T, rate_hz), self.recogniser.vocabulary)

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
        if not greedy_text(log_probs_FV, self.recogniser.vocabulary):
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
        vocabulary = self.recogniser.vocabulary
        read = greedy_text(log_probs_FV, vocabulary)
        cer = character_error_rate(vocabulary.normalize(text), comparable(read, vocabulary))
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


Floats: TypeAlias = NDArray[np.floating]
Integers: TypeAlias = NDArray[np.int64]
BLOCK = 1024  # frames between two rows that are kept


@dataclass(frozen=True)
class CtcAlignment:
    """The most probable path of L labels. Times are frames."""

    begin_L: Integers  # first frame of each label
    end_L: Integers  # frame after the last of each label
    log_prob_F: NDArray[np.float64]  # log-probability of the path's symbol in each frame
    log_prob: float  # log-probability of the path, blanks included


def frames_needed(labels: Sequence[int]) -> int:
    """Returns the smallest number of frames that labels fit into: equal neighbours need a blank between them."""
    return len(labels) + sum(first == second for first, second in pairwise(labels))


def align_ctc(log_probs_FV: Floats, labels: Sequence[int], blank: int = 0, *, block: int = BLOCK) -> CtcAlignment:
    """Returns the most probable path of the labels through the log-probabilities of all frames.

    Memory is F / block rows of 2 L + 1 numbers, and block^2. Raises ValueError if there are no labels, or fewer frames
    than they need.
    """
    frames = len(log_probs_FV)
    if not len(labels) or frames < frames_needed(labels):
        raise ValueError(f"{frames} frames for {len(labels)} labels, which need {frames_needed(labels)}")
    trellis = _Trellis(log_probs_FV, labels, blank)
    kept = {0: trellis.first_row()}  # rows by frame
    row_S = kept[0]
    for frame in range(1, frames):
        row_S = trellis.next_row(row_S, frame)
        if frame % block == 0:
            kept[frame] = row_S
    state = trellis.states - 1 if row_S[-1] >= row_S[-2] else trellis.states - 2
    log_prob, path_F = float(row_S[state]), np.empty(frames, np.int64)
    last = frames - 1
    for first in sorted(kept, reverse=True):
        state = trellis.trace(kept.pop(first), first, last, state, path_F)
        last = first
    return _alignment(trellis, len(labels), path_F, log_prob)


class _Trellis:
    def __init__(self, log_probs_FV: Floats, labels: Sequence[int], blank: int) -> None:
        self.states = 2 * len(labels) + 1
        self.symbol_S = np.full(self.states, blank, np.int64)
        self.symbol_S[1::2] = labels
        # A blank between two labels may be left out unless they are equal.
        leap_S = np.zeros(self.states, bool)
        leap_S[2:] = (self.symbol_S[2:] != blank) & (self.symbol_S[2:] != self.symbol_S[:-2])
        self.no_leap_S = np.where(leap_S, 0.0, -np.inf)
        self.log_probs_FV = log_probs_FV

    def first_row(self) -> Floats:
        row_S = np.full(self.states, -np.inf)
        row_S[:2] = self.log_probs_FV[0, self.symbol_S[:2]]
        return row_S

    def next_row(self, row_S: Floats, frame: int, low: int = 0) -> Floats:
        """Returns the log-probabilities of the best paths to the states from `low` on, as many as in `row_S`."""
        states = slice(low, low + len(row_S))
        best_S: Floats = row_S.copy()
        np.maximum(best_S[1:], row_S[:-1], out=best_S[1:])
        np.maximum(best_S[2:], row_S[:-2] + self.no_leap_S[states][2:], out=best_S[2:])
        best_S += self.log_probs_FV[frame].astype(np.float64)[self.symbol_S[states]]
        return best_S

    def trace(self, row_S: Floats, first: int, last: int, state: int, path_F: Integers) -> int:
        """Writes the path from frame `last`, where it is in `state`, back to frame `first`, whose row is given. Returns
        its state there. A path moves by at most two states a frame, so few states are computed again."""
        low = max(0, state - 2 * (last - first) - 2)  # Two more, since the lowest rows lack their predecessors.
        rows = [row_S[low : state + 1]]
        for frame in range(first + 1, last):
            rows.append(self.next_row(rows[-1], frame, low))
        path_F[last] = state
        for frame in range(last - 1, first - 1, -1):
            row_R = rows[frame - first]
            here = state - low
            before = [row_R[here], row_R[here - 1] if here > 0 else -np.inf]
            before.append(row_R[here - 2] + self.no_leap_S[state] if here > 1 else -np.inf)
            state -= int(np.argmax(before))
            path_F[frame] = state
        return state


def _alignment(trellis: _Trellis, labels: int, path_F: Integers, log_prob: float) -> CtcAlignment:
    voiced_F = np.flatnonzero(path_F % 2)
    label_F = path_F[voiced_F] // 2
    begin_L = voiced_F[np.searchsorted(label_F, np.arange(labels), side="left")]
    end_L = voiced_F[np.searchsorted(label_F, np.arange(labels), side="right") - 1] + 1
    log_prob_F = trellis.log_probs_FV[np.arange(len(path_F)), trellis.symbol_S[path_F]].astype(np.float64)
    return CtcAlignment(begin_L, end_L, log_prob_F, log_prob)
