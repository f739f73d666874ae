"""Greedy decoding."""

import math

import numpy as np
import pytest

from gputrain.asr.load import Spelled, greedy_symbols, greedy_text, words_of
from gputrain.speech.subtitles import TimedWord
from gputrain.speech.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary("und", ("<pad>", "<unk>", "|", "a", "b"))


def spoken(log_probs: np.ndarray) -> list[TimedWord]:
    return words_of(greedy_symbols(log_probs.argmax(axis=1), VOCABULARY.blank), VOCABULARY, 0.02)


def frames(path: list[int], probability: float = 0.9) -> np.ndarray:
    log_probs = np.full((len(path), 5), math.log((1 - probability) / 4))
    log_probs[np.arange(len(path)), path] = math.log(probability)
    return log_probs


PATH = [0, 0, 2, 3, 3, 0, 3, 4, 0, 2, 2, 0, 4, 4, 4, 0, 2]
WORDS = [TimedWord("aab", 0.06, 0.16), TimedWord("b", 0.24, 0.30)]


def test_words_have_the_times_of_their_letters():
    words = spoken(frames(PATH))
    assert [word.word for word in words] == ["aab", "b"]
    for found, expected in zip(words, WORDS, strict=True):
        assert (found.start, found.end) == pytest.approx((expected.start, expected.end))


def test_no_frames_and_only_blanks_give_no_word():
    assert spoken(np.empty((0, 5))) == []
    for path in ([0, 0], [0, 2, 0]):
        assert spoken(frames(path)) == []


def test_repeats_are_one_symbol_and_blanks_none():
    log_probs = frames([0, 3, 3, 0, 3, 4, 4, 0, 0, 2])
    assert [spelled.symbol for spelled in greedy_symbols(log_probs.argmax(axis=1), 0)] == [3, 3, 4, 2]
    assert greedy_text(log_probs, VOCABULARY) == "aab"


def test_words_join_to_the_text_of_the_symbols():
    symbols = [Spelled(number, at, at + 1) for at, number in enumerate([2, 3, 4, 2, 4, 2])]
    words = words_of(symbols, VOCABULARY, 0.02)
    assert " ".join(word.word for word in words) == VOCABULARY.text_of([one.symbol for one in symbols]) == "ab b"
