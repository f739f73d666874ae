"""Language models of words: n-grams of transcripts by interpolated Kneser-Ney smoothing, or read from an ARPA file."""

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gputrain.errors import UserError
from gputrain.speech.text.lines import read_text

log = logging.getLogger(__name__)

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
LONGEST_NGRAM = 10
LEAST_DISCOUNT, MOST_DISCOUNT = 0.1, 0.9  # A discount of zero would leave nothing for words that were never seen.
UNKNOWN_LOG10 = -7.0  # The probability of unknown words for ARPA files that give none.
LM_HINT = "--lm takes an ARPA file, a text, or a prepared folder"
NGRAM_COUNT = re.compile(r"ngram (\d{1,2})\s*=\s*(\d{1,12})")  # A line at the head of an ARPA file.
Ngram = tuple[str, ...]


@dataclass(frozen=True)
class NgramModel:
    """Natural logarithms of probabilities and of back-off weights, by n-gram and by context."""

    order: int
    log_probs: dict[Ngram, float]
    backoffs: dict[Ngram, float]
    known: dict[tuple[Ngram, str], float] = field(default_factory=dict, repr=False, compare=False)  # scores looked up

    @property
    def words(self) -> int:
        return sum(len(ngram) == 1 for ngram in self.log_probs) - sum(
            (name,) in self.log_probs for name in (BEGIN, END, UNKNOWN)
        )

    def score(self, context: Ngram, word: str) -> float:
        """Returns the log-probability of a word, or of END, behind the words of a context, which begins with BEGIN."""
        key = (context, word)
        if key not in self.known:
            self.known[key] = self._score(context, word if (word,) in self.log_probs else UNKNOWN)
        return self.known[key]

    def after(self, context: Ngram, word: str) -> Ngram:
        """Returns the context behind a word, no longer than the model needs."""
        return (*context, word)[-(self.order - 1) :] if self.order > 1 else ()

    def _score(self, context: Ngram, word: str) -> float:
        weight = 0.0
        for first in range(len(context) + 1):
            shorter = context[first:]
            found = self.log_probs.get((*shorter, word))
            if found is not None:
                return weight + found
            weight += self.backoffs.get(shorter, 0.0)
        return weight + UNKNOWN_LOG10 * math.log(10)


def estimate_ngrams(sentences: Iterable[str], order: int = 3) -> NgramModel:
    """Estimates an n-gram model from normalised sentences, whose words are separated by spaces.

    Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, "An empirical study of smoothing techniques for
    language modeling", equations 21 to 23) with one discount for each order, n1 / (n1 + 2 n2).
    """
    counts = [Counter[Ngram]() for _ in range(order + 1)]  # Their index is the length of the n-grams.
    for sentence in sentences:
        words = (BEGIN, *sentence.split(), END)
        counts[order].update(words[at : at + order] for at in range(len(words) - order + 1))
        for length in range(1, order):  # Nothing precedes these, so that no longer n-gram counts them.
            counts[length].update([words[:length]] if len(words) >= length else [])
    for length in range(order - 1, 0, -1):
        counts[length].update(ngram[1:] for ngram in counts[length + 1])
    counts[1].pop((BEGIN,), None)
    vocabulary = len(counts[1].keys() | {(END,)}) + 1  # UNKNOWN is one of them.
    log_probs: dict[Ngram, float] = {(UNKNOWN,): -math.log(vocabulary), (END,): -math.log(vocabulary)}
    backoffs: dict[Ngram, float] = {}
    for length in range(1, order + 1):
        _add_order(counts[length], log_probs, backoffs, vocabulary)
    return NgramModel(order, log_probs, backoffs)


def _add_order(
    counts: Counter[Ngram], log_probs: dict[Ngram, float], backoffs: dict[Ngram, float], vocabulary: int
) -> None:
    """Adds the probabilities of the n-grams of one length; those of shorter ones are there."""
    once, twice = (sum(count == number for count in counts.values()) for number in (1, 2))
    discount = min(max(once / (once + 2 * twice) if once else 0.0, LEAST_DISCOUNT), MOST_DISCOUNT)
    totals, kinds = defaultdict[Ngram, int](int), Counter[Ngram]()
    for ngram, count in counts.items():
        totals[ngram[:-1]] += count
        kinds[ngram[:-1]] += 1
    shorter = NgramModel(0, dict(log_probs), dict(backoffs))
    weights = {context: discount * kinds[context] / total for context, total in totals.items()}
    for ngram, count in counts.items():
        context = ngram[:-1]
        lower = 1 / vocabulary if not context else math.exp(shorter.score(context[1:], ngram[-1]))
        log_probs[ngram] = math.log((count - discount) / totals[context] + weights[context] * lower)
    if () in weights:
        log_probs[UNKNOWN,] = math.log(weights[()] / vocabulary)
        if (END,) not in counts:
            log_probs[END,] = log_probs[UNKNOWN,]
    backoffs |= {context: math.log(weight) for context, weight in weights.items() if context}


def read_arpa(path: Path) -> NgramModel:
    """Reads a model in the ARPA format, as KenLM and SRILM write it. Raises UserError if it is damaged."""
    log_probs: dict[Ngram, float] = {}
    backoffs: dict[Ngram, float] = {}
    stated: dict[int, int] = {}  # How many n-grams of each length the file says that it has.
    length = order = 0
    for number, line in enumerate(map(str.strip, read_text(path, LM_HINT).split("\n")), start=1):
        if not order and (count := NGRAM_COUNT.fullmatch(line)):
            stated[int(count[1])] = int(count[2])
        elif line.startswith("\\"):
            name = line.strip("\\: ").removesuffix("-grams")
            length = int(name) if name.isdecimal() and int(name) <= LONGEST_NGRAM else 0
            order = max(order, length)
        elif length and line:
            cells = line.split()
            try:
                if not length < len(cells) <= length + 2:
                    raise ValueError
                ngram = tuple(cells[1 : length + 1])
                log_probs[ngram] = float(cells[0]) * math.log(10)
                if len(cells) > length + 1:
                    backoffs[ngram] = float(cells[-1]) * math.log(10)
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: not a line of {length}-grams: {line[:60]!r}",
                    hint="expected log10 probability, words, back-off weight",
                ) from None
    if not log_probs:
        raise UserError(f"{path}: no n-grams in it", hint="expected an ARPA file, or a text with a sentence a line")
    read = Counter(map(len, log_probs))
    for length, number in stated.items():
        if read[length] < number:
            raise UserError(
                f"{path}: {read[length]} of {number} {length}-grams are in it",
                hint="it is cut off: copy or make it again",
            )
    log_probs.setdefault((UNKNOWN,), UNKNOWN_LOG10 * math.log(10))
    return NgramModel(order, log_probs, backoffs)


def read_sentences(path: Path) -> Sequence[str]:
    """Returns the lines of a text that are not empty. Raises UserError if it cannot be read."""
    return [line.strip() for line in read_text(path, LM_HINT).split("\n") if line.strip()]
