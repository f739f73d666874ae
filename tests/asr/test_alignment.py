"""Forced alignment by CTC against all paths of small cases, and in blocks against one block."""

import itertools

import numpy as np
import pytest

from gputrain.asr.checking import align_ctc, frames_needed
from tests.tables import each_row


def random_log_probs(frames: int, symbols: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(frames, symbols)) * 2
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def collapsed(path: tuple[int, ...], blank: int) -> list[int]:
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != blank]


def best_by_trying_all(log_probs: np.ndarray, labels: list[int], blank: int) -> tuple[float, tuple[int, ...]]:
    frames, symbols = log_probs.shape
    paths = (path for path in itertools.product(range(symbols), repeat=frames) if collapsed(path, blank) == labels)
    return max((float(log_probs[np.arange(frames), path].sum()), path) for path in paths)


@each_row(
    (6, [1, 2], 0), (7, [1, 1, 2], 0), (7, [2, 0, 0], 1), (3, [1, 1], 0), (1, [1], 0), (6, [1, 2, 1, 2, 1, 2], 0)
)  # fmt: skip
def test_the_path_is_the_best_of_all(frames, labels, blank):
    for seed, block in itertools.product(range(6), (1, 2, 3, 100)):
        log_probs = random_log_probs(frames, 3, seed)
        found = align_ctc(log_probs, labels, blank, block=block)
        log_prob, path = best_by_trying_all(log_probs, labels, blank)
        assert found.log_prob == pytest.approx(log_prob, abs=1e-12)
        runs = [(symbol, len(list(run))) for symbol, run in itertools.groupby(path)]
        ends = list(itertools.accumulate(length for _, length in runs))
        voiced = [(end - length, end) for (symbol, length), end in zip(runs, ends, strict=True) if symbol != blank]
        assert list(zip(found.begin_L.tolist(), found.end_L.tolist(), strict=True)) == voiced
        np.testing.assert_allclose(found.log_prob_F, log_probs[np.arange(frames), path], atol=1e-12)


def test_blocks_give_the_path_of_the_whole():
    log_probs = random_log_probs(900, 12, seed=0).astype(np.float32)
    labels = np.random.default_rng(1).integers(1, 12, size=300).tolist()
    whole = align_ctc(log_probs, labels, block=10_000)
    for block in (1, 7, 64, 899, 900):
        pieces = align_ctc(log_probs, labels, block=block)
        np.testing.assert_array_equal(pieces.begin_L, whole.begin_L)
        np.testing.assert_array_equal(pieces.end_L, whole.end_L)
        assert pieces.log_prob == whole.log_prob


def test_known_cuts_are_found():
    """Each label is probable in its own frames only."""
    labels, frames_of_each = [3, 1, 4, 1, 5], [5, 2, 7, 1, 4]
    spoken = np.repeat([0, 3, 0, 1, 4, 0, 1, 0, 5, 0], [3, 5, 2, 2, 7, 6, 1, 2, 4, 9])
    log_probs = np.full((len(spoken), 6), np.log(0.02))
    log_probs[np.arange(len(spoken)), spoken] = np.log(0.9)
    found = align_ctc(log_probs, labels)
    assert (found.end_L - found.begin_L).tolist() == frames_of_each
    assert found.begin_L.tolist() == [3, 10, 12, 25, 28]
    np.testing.assert_allclose(found.log_prob_F, np.log(0.9))


@each_row((3, [1, 1, 2]), (5, []), (2, [1, 2, 3]))
def test_too_few_frames_or_no_labels_are_refused(frames, labels):
    with pytest.raises(ValueError, match="frames for"):
        align_ctc(random_log_probs(frames, 4, 0), labels)


def test_equal_neighbours_need_a_frame_more():
    assert [frames_needed(labels) for labels in ([], [1], [1, 2], [1, 1], [1, 1, 1, 2])] == [0, 1, 2, 3, 6]
