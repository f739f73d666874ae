"""Decodes the output of a recogniser to words with times: greedily, or by beam search with a language model of words.

Decoders take the log-probabilities piece by piece, so that a recording of any length needs little memory.

Shape suffixes: F frames, V symbols.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gputrain.asr.ngram import BEGIN, END, Ngram, NgramModel
from gputrain.speech.subtitles import TimedWord
from gputrain.speech.text.plain import UNDETERMINED
from gputrain.speech.text.vocabulary import Vocabulary

LEAST_LOG_PROB = -5.0  # Symbols that are less probable in a frame are ignored in it, except for the most probable.
FAR_BEHIND = 15.0  # Prefixes whose score is so far below the best are dropped.


@dataclass(frozen=True)
class Spelled:
    """A symbol that was recognised, in the frames from `begin` to before `end`."""

    symbol: int
    begin: int
    end: int


class CtcDecoder(Protocol):
    def feed(self, log_probs_FV: NDArray[np.floating]) -> None:
        """Takes the next frames."""

    def finish(self) -> list[Spelled]:
        """Returns the symbols of all frames."""


def words_of(symbols: Sequence[Spelled], vocabulary: Vocabulary, frame_seconds: float) -> list[TimedWord]:
    """Returns the words between delimiters, with times."""
    words = []
    for between, group in groupby(symbols, key=lambda one: one.symbol == vocabulary.delimiter):
        letters = list(group)
        word = "" if between else vocabulary.text_of([one.symbol for one in letters]).strip()
        if word:
            words.append(TimedWord(word, letters[0].begin * frame_seconds, letters[-1].end * frame_seconds))
    return words


def comparable(read: str, vocabulary: Vocabulary) -> str:
    """Returns what was read as normalised texts are written. Recognisers of other programs may write capitals and
    punctuation; the others write nothing but normalised text."""
    return vocabulary.normalize(read) if vocabulary.language == UNDETERMINED else read


class GreedyDecoder:
    """Takes the most probable symbol of every frame."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.blank = vocabulary.blank
        self.best: list[NDArray[np.int64]] = []

    def feed(self, log_probs_FV: NDArray[np.floating]) -> None:
        self.best.append(log_probs_FV.argmax(axis=1))

    def finish(self) -> list[Spelled]:
        best_F = np.concatenate([np.empty(0, np.int64), *self.best])
        edges = [0, *(np.flatnonzero(np.diff(best_F)) + 1).tolist(), len(best_F)]
        return [
            Spelled(int(best_F[begin]), begin, end)
            for begin, end in pairwise(edges)
            if begin < end and best_F[begin] != self.blank
        ]


@dataclass(frozen=True)
class BeamOptions:
    """Options of beam search; the score of a text is log p_ctc + weight * log p_lm + word_score * number of words."""

    width: int = 50
    lm_weight: float = 0.5
    word_score: float = 1.0


@dataclass
class _Prefix:
    """A beginning of the text. `key` is a hash of its symbols."""

    key: int
    symbol: int
    parent: "_Prefix | None"
    letters: tuple[int, ...]  # symbols of the unfinished word
    context: Ngram
    bonus: float  # weighted score of the finished words
    peak: float  # largest log-probability of the last symbol when it was added
    begin: int
    end: int


@dataclass
class _Mass:
    """Log-probabilities of the paths of a prefix that end with a blank, and with its last symbol."""

    prefix: _Prefix
    blank: float = -math.inf
    symbol: float = -math.inf

    @property
    def total(self) -> float:
        return _add(self.blank, self.symbol)

    @property
    def score(self) -> float:
        return self.total + self.prefix.bonus


def _add(first: float, second: float) -> float:
    """Returns log(exp(first) + exp(second))."""
    low, high = (first, second) if first < second else (second, first)
    return high + math.log1p(math.exp(low - high)) if low > -math.inf else high


@dataclass
class BeamDecoder:
    """Prefix beam search (Hannun et al. 2014, arXiv:1408.2873), with a word model scored where a word ends."""

    vocabulary: Vocabulary
    model: NgramModel | None = None
    options: BeamOptions = BeamOptions()
    least_log_prob: float = LEAST_LOG_PROB
    far_behind: float = FAR_BEHIND
    frame: int = 0
    beams: dict[int, _Mass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The beginning behaves as if it followed a delimiter, so that further delimiters change nothing.
        context = (BEGIN,) if self.model and self.model.order > 1 else ()
        root = _Prefix(0, self.vocabulary.delimiter, None, (), context, 0.0, 0.0, 0, 0)
        self.beams = {root.key: _Mass(root, blank=0.0)}

    def feed(self, log_probs_FV: NDArray[np.floating]) -> None:
        for row_V in log_probs_FV:
            kept = np.flatnonzero(row_V >= min(self.least_log_prob, float(row_V.max())))
            self._step({int(symbol): float(row_V[symbol]) for symbol in kept})
            self.frame += 1

    def _step(self, log_probs: dict[int, float]) -> None:
        after: dict[int, _Mass] = {}
        likely = max(log_probs, key=lambda symbol: log_probs[symbol])
        for mass in self.beams.values():
            prefix, total = mass.prefix, mass.total
            for symbol, log_prob in log_probs.items():
                if symbol == self.vocabulary.unknown_id:
                    continue
                same = after.get(prefix.key)
                if symbol == self.vocabulary.blank:
                    same = same or after.setdefault(prefix.key, _Mass(prefix))
                    same.blank = _add(same.blank, total + log_prob)
                    continue
                reached = total + log_prob
                if symbol == prefix.symbol:
                    # A repeated symbol is the same one; without a letter since, so is a further delimiter.
                    same = same or after.setdefault(prefix.key, _Mass(prefix))
                    same.symbol = _add(same.symbol, mass.symbol + log_prob if prefix.letters else reached)
                    if symbol == likely and mass.symbol > mass.blank:
                        prefix.end = self.frame + 1
                    if not prefix.letters:
                        continue
                    reached = mass.blank + log_prob
                if reached > -math.inf:
                    self._extend(after, prefix, symbol, log_prob, reached)
        best = sorted(after.values(), key=lambda mass: -mass.score)[: self.options.width]
        lowest = best[0].score - self.far_behind if best else 0.0
        self.beams = {mass.prefix.key: mass for mass in best if mass.score >= lowest}

    def _extend(self, after: dict[int, _Mass], prefix: _Prefix, symbol: int, log_prob: float, reached: float) -> None:
        key = hash((prefix.key, symbol))
        if key in after:
            longer = after[key]
        elif key in self.beams:
            longer = after[key] = _Mass(self.beams[key].prefix)
        else:
            letters, context, bonus = (*prefix.letters, symbol), prefix.context, prefix.bonus
            if symbol == self.vocabulary.delimiter:
                letters, context, bonus = (), *self._finished(prefix)
            made = _Prefix(key, symbol, prefix, letters, context, bonus, log_prob, self.frame, self.frame + 1)
            longer = after[key] = _Mass(made)
        if log_prob > longer.prefix.peak:
            longer.prefix.peak, longer.prefix.begin, longer.prefix.end = log_prob, self.frame, self.frame + 1
        longer.symbol = _add(longer.symbol, reached)

    def _finished(self, prefix: _Prefix) -> tuple[Ngram, float]:
        """Returns context and bonus behind the word that a prefix ends with."""
        if not prefix.letters:
            return prefix.context, prefix.bonus
        bonus = prefix.bonus + self.options.word_score
        if self.model is None:
            return prefix.context, bonus
        word = self.vocabulary.text_of(list(prefix.letters))
        bonus += self.options.lm_weight * self.model.score(prefix.context, word)
        return self.model.after(prefix.context, word), bonus

    def finish(self) -> list[Spelled]:
        """Returns the symbols of the best text."""
        texts: dict[int, _Mass] = {}  # A delimiter at the end changes no text.
        for mass in sorted(self.beams.values(), key=lambda mass: -mass.total):
            prefix = mass.prefix
            key = prefix.key if prefix.letters or prefix.parent is None else prefix.parent.key
            merged = texts.setdefault(key, _Mass(prefix))
            merged.blank = _add(merged.blank, mass.total)

        def complete(mass: _Mass) -> float:
            context, bonus = self._finished(mass.prefix)
            end = self.options.lm_weight * self.model.score(context, END) if self.model else 0.0
            return mass.total + bonus + end

        at: _Prefix | None = max(texts.values(), key=complete).prefix
        spelled = []
        while at is not None and at.parent is not None:
            spelled.append(Spelled(at.symbol, at.begin, at.end))
            at = at.parent
        return spelled[::-1]
