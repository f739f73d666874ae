"""Decoding: greedy search, and beam search against the sum over all paths of every short text."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from gputrain.asr.decode import BeamDecoder, BeamOptions, GreedyDecoder, Spelled, words_of
from gputrain.asr.ngram import BEGIN, END, estimate_ngrams
from gputrain.speech.subtitles import TimedWord
from gputrain.speech.text.vocabulary import Vocabulary
from tests.tables import each_row

VOCABULARY = Vocabulary("und", ("<pad>", "<unk>", "|", "a", "b"))
EXACT = {"least_log_prob": -math.inf, "far_behind": math.inf}


def random_log_probs(frames: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(frames, 5)) * 1.5
    scores[:, 1] = -math.inf
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def text_of(path: tuple[int, ...]) -> str:
    return VOCABULARY.text_of([symbol for symbol, _ in itertools.groupby(path) if symbol != 0])


def texts_by_trying_all(log_probs: np.ndarray) -> dict[str, float]:
    """Returns the probability of every text: the sum over its paths."""
    found = defaultdict(float)
    for path in itertools.product((0, 2, 3, 4), repeat=len(log_probs)):
        found[text_of(path)] += math.exp(log_probs[np.arange(len(log_probs)), path].sum())
    return found


def spoken(decoder, log_probs: np.ndarray, pieces: int = 1) -> list[TimedWord]:
    for piece in np.array_split(log_probs, pieces):
        decoder.feed(piece)
    return words_of(decoder.finish(), VOCABULARY, 0.02)


@each_row(*range(12))
def test_beam_search_finds_the_most_probable_text(seed):
    log_probs = random_log_probs(6, seed)
    texts = texts_by_trying_all(log_probs)
    decoder = BeamDecoder(VOCABULARY, None, BeamOptions(width=4**6, word_score=0.0), **EXACT)
    assert " ".join(word.word for word in spoken(decoder, log_probs)) == max(texts, key=texts.__getitem__)


@each_row(*itertools.product(range(12), (1, 3)))
def test_beam_search_weighs_the_language_model(seed, order):
    log_probs = random_log_probs(6, seed)
    model = estimate_ngrams(["a b", "b a b", "ab ba", "ba", "aba b"], order)

    def score(text: str, probability: float) -> float:
        total, context = math.log(probability), (BEGIN,) if order > 1 else ()
        for word in text.split():
            total += 0.8 + 0.7 * model.score(context, word)
            context = model.after(context, word)
        return total + 0.7 * model.score(context, END)

    texts = texts_by_trying_all(log_probs)
    decoder = BeamDecoder(VOCABULARY, model, BeamOptions(4**6, lm_weight=0.7, word_score=0.8), **EXACT)
    found = " ".join(word.word for word in spoken(decoder, log_probs, pieces=3))
    assert found == max(texts, key=lambda text: score(text, texts[text]))


def frames(path: list[int], probability: float = 0.9) -> np.ndarray:
    log_probs = np.full((len(path), 5), math.log((1 - probability) / 4))
    log_probs[np.arange(len(path)), path] = math.log(probability)
    return log_probs


PATH = [0, 0, 2, 3, 3, 0, 3, 4, 0, 2, 2, 0, 4, 4, 4, 0, 2]
WORDS = [TimedWord("aab", 0.06, 0.16), TimedWord("b", 0.24, 0.30)]


@each_row(1, 2, 5, 17)
def test_words_have_the_times_of_their_letters(pieces):
    decoders = [GreedyDecoder(VOCABULARY), BeamDecoder(VOCABULARY), BeamDecoder(VOCABULARY, estimate_ngrams(["aab b"]))]
    for decoder in decoders:
        words = spoken(decoder, frames(PATH), pieces)
        assert [word.word for word in words] == ["aab", "b"]
        for found, expected in zip(words, WORDS, strict=True):
            assert (found.start, found.end) == pytest.approx((expected.start, expected.end))


def test_a_language_model_corrects_a_word():
    log_probs = frames([3, 0, 4, 0, 2, 4, 0, 4], 0.9)
    log_probs[5] = np.log([0.02, 0.01, 0.02, 0.45, 0.5])  # An a that sounds a little more like a b.
    greedy = GreedyDecoder(VOCABULARY)
    guided = BeamDecoder(VOCABULARY, estimate_ngrams(["ab ab ab", "ab ab"]))
    assert [word.word for word in spoken(greedy, log_probs)] == ["ab", "bb"]
    assert [word.word for word in spoken(guided, log_probs)] == ["ab", "ab"]


def test_no_frames_and_only_blanks_give_no_word():
    for decoder in (GreedyDecoder(VOCABULARY), BeamDecoder(VOCABULARY)):
        assert spoken(decoder, np.empty((0, 5))) == []
    assert spoken(GreedyDecoder(VOCABULARY), frames([0, 0])) == []
    assert spoken(BeamDecoder(VOCABULARY), frames([0, 2, 0])) == []


def test_words_join_to_the_text_of_the_symbols():
    symbols = [Spelled(number, at, at + 1) for at, number in enumerate([2, 3, 4, 2, 4, 2])]
    words = words_of(symbols, VOCABULARY, 0.02)
    assert " ".join(word.word for word in words) == VOCABULARY.text_of([one.symbol for one in symbols]) == "ab b"
