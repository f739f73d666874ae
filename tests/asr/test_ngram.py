"""N-gram models: probabilities that sum to 1, figures by hand, and ARPA files."""

import math
import random

import pytest

from gputrain.asr.ngram import BEGIN, END, UNKNOWN, NgramModel, estimate_ngrams, read_arpa
from tests.tables import each_row

SENTENCES = ["a b a", "a b", "b a b c", "c", "a b c a b"]


@each_row(1, 2, 3, 4)
def test_probabilities_of_all_words_sum_to_1(order):
    model = estimate_ngrams(SENTENCES, order)
    contexts = {(), (BEGIN,), ("a",), ("b",), (BEGIN, "a"), ("a", "b"), ("c", "c"), ("never",), ("a", "b", "c")}
    for context in contexts:
        total = sum(
            math.exp(model.score(context[-(order - 1) :] if order > 1 else (), word)) for word in [*"abc", END, UNKNOWN]
        )
        assert total == pytest.approx(1, abs=1e-12), context
    assert model.words == 3


def test_unigrams_by_hand():
    """b twice, a and </s> once: the discount is 2 / (2 + 2 * 1) = 0.5; three kinds, and four words with <unk>."""
    model = estimate_ngrams(["b a b"], 1)
    share = 3 * 0.5 / 4 / 4
    assert math.exp(model.score((), "b")) == pytest.approx(1.5 / 4 + share)
    assert math.exp(model.score((), "a")) == pytest.approx(0.5 / 4 + share)
    assert math.exp(model.score((), "zebra")) == pytest.approx(share)


def test_lower_orders_count_different_predecessors():
    """ "francisco" is frequent, but only behind "san", so that it is less probable elsewhere than "dog"."""
    model = estimate_ngrams(["san francisco"] * 9 + ["a dog", "the dog", "my dog"], 2)
    assert model.score(("elsewhere",), "dog") > model.score(("elsewhere",), "francisco")
    assert model.score(("san",), "francisco") > math.log(0.9)


def arpa(model: NgramModel) -> str:
    head, body = ["\\data\\"], []
    for length in range(1, model.order + 1):
        ngrams = {ngram: value for ngram, value in model.log_probs.items() if len(ngram) == length}
        if length == 1 and (BEGIN,) in model.backoffs:
            ngrams[BEGIN,] = -99 * math.log(10)
        head.append(f"ngram {length}={len(ngrams)}")
        body += ["", f"\\{length}-grams:"]
        for ngram, value in ngrams.items():
            row = [f"{value / math.log(10):.9f}", " ".join(ngram)]
            row += [f"{model.backoffs[ngram] / math.log(10):.9f}"] if ngram in model.backoffs else []
            body.append("\t".join(row))
    return "\n".join([*head, *body, "", "\\end\\", ""])


def test_an_arpa_file_gives_the_same_scores(tmp_path):
    model = estimate_ngrams(SENTENCES, 3)
    (tmp_path / "lm.arpa").write_text(arpa(model))
    read = read_arpa(tmp_path / "lm.arpa")
    words = random.Random(0).choices(["a", "b", "c", "other"], k=60)
    context = (BEGIN,)
    for word in [*words, END]:
        assert read.score(context, word) == pytest.approx(model.score(context, word), abs=1e-7)
        context = model.after(context, word)
    assert (read.order, read.words) == (3, 3)
