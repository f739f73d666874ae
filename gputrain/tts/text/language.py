"""Definition of a language: its text normalisation and the symbols that remain after it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PUNCTUATION = " !,-.:;?"


@dataclass(frozen=True)
class Language:
    """A language of the voice.

    `normalize` gives text of `letters` and PUNCTUATION alone, and leaves its own output as it is. `alphabet` are the
    letters, digraphs among them, that a table may spell otherwise. `readings` says what a reader without a normaliser
    (stock Piper) is to make of a raw code point: capitals, digits, letters of another alphabet. `same` names code
    points of normalised text that share another's symbol. `abbreviations` are words, in lower case and without their
    final dot, after which a dot ends no sentence.
    """

    name: str
    normalize: Callable[[str], str]
    letters: str
    alphabet: tuple[str, ...] = ()
    readings: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    abbreviations: frozenset[str] = frozenset()
