"""Aligns a text with a recording: the most probable CTC path of its labels (Graves et al. 2006), by Viterbi's search.

The path is exact for recordings of any length: rows of the trellis are kept every BLOCK frames only, and the frames
between two of them are computed again when the path is traced back through them.

Shape suffixes: F frames, V symbols of the recogniser, L labels, S states (a blank, then each label and a blank).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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
