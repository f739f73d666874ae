"""Decodes the output of a recogniser to words with times.

Shape suffixes: F frames, V symbols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from gputrain.speech.subtitles import TimedWord
from gputrain.speech.text.vocabulary import UNDETERMINED, Vocabulary


@dataclass(frozen=True)
class Spelled:
    """A symbol that was recognised, in the frames from `begin` to before `end`."""

    symbol: int
    begin: int
    end: int


def words_of(symbols: Sequence[Spelled], vocabulary: Vocabulary, frame_seconds: float) -> list[TimedWord]:
    """Returns the words between delimiters, with times."""
    words = []
    for between, group in groupby(symbols, key=lambda spelled: spelled.symbol == vocabulary.delimiter):
        letters = list(group)
        word = "" if between else vocabulary.text_of([letter.symbol for letter in letters]).strip()
        if word:
            words.append(TimedWord(word, letters[0].begin * frame_seconds, letters[-1].end * frame_seconds))
    return words


def comparable(read: str, vocabulary: Vocabulary) -> str:
    """Returns what was read as normalised texts are written. Recognisers of other programs may write capitals and
    punctuation; the others write nothing but normalised text."""
    return vocabulary.normalize(read) if vocabulary.language == UNDETERMINED else read


class GreedyDecoder:
    """Takes the most probable symbol of every frame, by which repeats are one symbol and blanks none (Graves et al.
    2006, section 2). It gets the log-probabilities piece by piece, so that a recording of any length needs little
    memory."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.blank = vocabulary.blank
        self.best: list[NDArray[np.int64]] = []

    def feed(self, log_probs_FV: NDArray[np.floating]) -> None:
        """Takes the next frames."""
        self.best.append(log_probs_FV.argmax(axis=1))

    def finish(self) -> list[Spelled]:
        """Returns the symbols of all frames."""
        best_F = np.concatenate([np.empty(0, np.int64), *self.best])
        edges = [0, *(np.flatnonzero(np.diff(best_F)) + 1).tolist(), len(best_F)]
        return [
            Spelled(int(best_F[begin]), begin, end)
            for begin, end in pairwise(edges)
            if begin < end and best_F[begin] != self.blank
        ]
