"""Error rates of recognised texts: the fewest characters or words to replace, leave out or add (Levenshtein 1966).

Shapes: N clips of an evaluation, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # Percentiles of the resampled rates.


@dataclass(frozen=True)
class Edits:
    """The edits that lead from a reference to a recognised text. Counts of several texts can be added."""

    length: int = 0  # Characters or words of the reference.
    edits: int = 0

    def __add__(self, other: "Edits") -> "Edits":
        return Edits(self.length + other.length, self.edits + other.edits)

    @property
    def rate(self) -> float | None:
        """The word or character error rate, which may exceed 1. None for an empty reference."""
        return self.edits / self.length if self.length else None


def character_edits(reference: str, recognised: str) -> Edits:
    """Returns the edits of characters, including spaces."""
    return _edits(reference, recognised)


def word_edits(reference: str, recognised: str) -> Edits:
    return _edits(reference.split(), recognised.split())


def _edits(reference: Sequence[str], recognised: Sequence[str]) -> Edits:
    from rapidfuzz.distance import Levenshtein

    return Edits(len(reference), Levenshtein.distance(reference, recognised))


def character_error_rate(reference: str, recognised: str) -> float:
    """Returns the character error rate of one text; that of an empty reference is the number of added characters."""
    edits = character_edits(reference, recognised)
    return edits.edits / max(1, edits.length)


@dataclass(frozen=True)
class ErrorRate:
    """Edits divided by the length of the references, with a 95 % interval by resampling clips (Bisani and Ney 2004,
    "Bootstrap estimates for confidence intervals in ASR performance evaluation")."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, clips: Sequence[Edits]) -> "ErrorRate":
        edits_N, lengths_N = np.array([(clip.edits, clip.length) for clip in clips], dtype=np.int64).T
        draws_RN = np.random.default_rng(0).integers(0, len(edits_N), (RESAMPLES, len(edits_N)))
        rates_R: npt.NDArray[np.float64] = edits_N[draws_RN].sum(1) / np.maximum(1, lengths_N[draws_RN].sum(1))
        low, high = np.percentile(rates_R, INTERVAL).tolist()
        return cls(float(edits_N.sum() / max(1, lengths_N.sum())), low, high)


def error_rates(texts: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Returns the error rates of characters (cer) and of words (wer) of pairs of a reference and a recognised text,
    each with the ends of its 95 % interval (cer_low, cer_high)."""
    scalars: dict[str, float] = {}
    for name, count in (("cer", character_edits), ("wer", word_edits)):
        rate = ErrorRate.of([count(reference, recognised) for reference, recognised in texts])
        scalars |= {name: rate.value, f"{name}_low": rate.low, f"{name}_high": rate.high}
    return scalars
