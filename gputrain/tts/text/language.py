"""Definition of a language: its text normalisation and the symbols that remain after it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PUNCTUATION = " !,-.:;?"


@dataclass(frozen=True)
class Language:
    """A language of the front end.

    `normalize` returns text of `letters` and PUNCTUATION only, and does not change its own output. `alphabet` has the
    letters, including digraphs, for which a table may have another spelling. `readings` maps raw code points (capitals,
    digits, letters of another alphabet) to normalised text, for a reader without a normaliser (stock Piper). `same`
    maps code points of normalised text to others with which they share a symbol. `abbreviations` are words, in lower
    case and without their final dot, after which a dot does not end a sentence.
    """

    name: str
    normalize: Callable[[str], str]
    letters: str
    alphabet: tuple[str, ...] = ()
    readings: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    abbreviations: frozenset[str] = frozenset()
