"""Vocabulary of a recogniser by CTC: the symbols that it writes, and the text rules that lead to them.

Words are in lower case without punctuation, for any language. It is the counterpart of `Frontend`. Symbols are single
code points after NFC, because a tokenizer of transformers and sherpa-onnx read them so.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from gputrain.errors import UserError
from gputrain.serialization import unreadable
from gputrain.speech.text.frontend import LANGUAGES
from gputrain.speech.text.language import CHARACTERS, split_sentences
from gputrain.speech.text.raw import RawRules
from gputrain.speech.text.unicode_cleanup import (
    APOSTROPHES,
    IPA_SIGNS,
    JOINERS,
    joins,
    tidy_joiners,
    unify_letters,
    visible,
)

BLANK, UNKNOWN, DELIMITER = "<pad>", "<unk>", "|"
SPECIAL = (BLANK, UNKNOWN, DELIMITER)
ABSENT = -1
UNDETERMINED = "und"  # The code of ISO 639-2 for a language that is not known.
HYPHENS = "-‐‑－"
_REGION = re.compile(r"(?P<language>[a-z]{2,3})-([a-z]{2}|[0-9]{3})", re.IGNORECASE)
_VARIATION = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # Variants of characters, such as coloured emoji.
# Apostrophes that are letters of some alphabets, such as ʻ, stay as they are; all others become the first one.
_APOSTROPHES = frozenset(mark for mark in APOSTROPHES if unicodedata.category(mark) != "Lm")
# Marks that belong to a word between its letters: col·legi in Catalan, geresh and gershayim in Hebrew.
WITHIN_WORDS = "·׳״"
_EMPHASIS = re.compile("[՚-՟]")  # Armenian marks of stress, question and exclamation, which stand above a letter.
# Compounds are written with and without a hyphen, and stock English vocabularies have none.
_WITHOUT_HYPHENS = {"en"}
PLACES = ("blank", "unknown_id", "delimiter")  # Fields of a vocabulary that are ids.


def rules_of(code: str) -> str:
    """Returns the language whose rules apply, `en` for `en-US`; empty if only the rules of Unicode do."""
    region = _REGION.fullmatch(code)
    name = (region["language"] if region else code).lower()
    return name if name in LANGUAGES and name != CHARACTERS.name else ""


def plain_words(text: str, language: str, raw: RawRules | None = None) -> str:
    """Returns the words of a text in lower case and NFC, with single spaces between them. It does not change its own
    output.

    Uzbek, Russian and English have the rules of a voice, which write numbers and signs as words. In other languages
    digits stay, and signs are removed. `raw` are rules before those of the language. Apostrophes and hyphens within
    words stay, except for hyphens in English.
    """
    rules = rules_of(language)
    text = unify_letters((raw or RawRules())(text, LANGUAGES[rules or CHARACTERS.name]), language)
    # Python would add a combining dot to the lower case of this İ.
    text = LANGUAGES[rules].normalize(text) if rules else visible(text).replace("İ", "i").lower()
    if rules in _WITHOUT_HYPHENS:
        text = text.replace("-", " ")
    text = _EMPHASIS.sub("", _VARIATION.sub("", text))
    kept = "".join(_kept(text, place) for place in range(len(text)))
    return tidy_joiners(unicodedata.normalize("NFC", " ".join(kept.split())))


def _kept(text: str, place: int) -> str:
    """Returns a letter, mark or digit, and what joins letters to words; a space for other characters."""
    char = text[place]
    if char in _APOSTROPHES or char in HYPHENS or char in WITHIN_WORDS:
        is_within = place and joins(text[place - 1]) and joins(text[place + 1 : place + 2])
        return " " if not is_within else "-" if char in HYPHENS else char if char in WITHIN_WORDS else "'"
    kind = unicodedata.category(char)
    if kind[0] in "LN" or kind in ("Mn", "Mc") or char in JOINERS or char in IPA_SIGNS:
        return char
    return "" if kind == "Me" else " "


@dataclass(frozen=True)
class Vocabulary:
    """Symbols of a recogniser by id, and the language whose rules normalise its texts.

    `blank` is the id of CTC's blank, `delimiter` that of the symbol between words, `unknown_id` that of characters
    without a symbol; the last two are ABSENT in some vocabularies of other programs, and spaces and unknown characters
    then have no label. With `upper` the symbols are capitals; normalised texts are in lower case nevertheless.
    """

    language: str
    symbols: tuple[str, ...]
    blank: int = 0
    unknown_id: int = 1
    delimiter: int = 2
    upper: bool = False
    raw: RawRules = field(default_factory=RawRules)

    def normalize(self, text: str) -> str:
        """Returns the words of a text in lower case, with single spaces and without punctuation; "" if none is left.

        Hyphens and apostrophes without a symbol become a space and an apostrophe that has one; joiners and other marks
        within words that have none are left out. Normalised text does not change.
        """
        words = plain_words(text, self.language, self.raw)
        if "-" not in self._ids:
            words = words.replace("-", " ")
        own = next((mark for mark in APOSTROPHES if mark in self._ids), "")
        for mark in {*APOSTROPHES} - self._ids.keys():
            words = words.replace(mark, own)
        for mark in {*JOINERS, *WITHIN_WORDS} - self._ids.keys():
            words = words.replace(mark, "")
        return words

    def unknown(self, normalized: str) -> list[str]:
        """Returns the characters of a normalised text without a symbol, sorted."""
        return sorted(set(normalized) - self._ids.keys() - {" "})

    def ids(self, normalized: str) -> list[int]:
        """Returns the labels of a normalised text: its characters, and the delimiter for a space."""
        found = (self._ids.get(char, self.unknown_id) for char in normalized)
        return [number for number in found if number != ABSENT]

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of labels whose repeats and blanks are removed already."""
        written = "".join(" " if number == self.delimiter else self.symbols[number] for number in ids)
        return " ".join((written.lower() if self.upper else written).split())

    def frames_needed(self, normalized: str) -> int:
        """Returns the smallest number of frames whose CTC loss is finite: one for each label, and one for the blank
        between two equal ones (Graves et al. 2006, section 3.1)."""
        ids = self.ids(normalized)
        return len(ids) + sum(label == following for label, following in pairwise(ids))

    def spoken(self, normalized: str) -> int:
        """Returns the number of spoken symbols, by which speaking rates are compared."""
        return len(normalized)

    def sentences(self, text: str) -> list[str]:
        """Splits a raw text into sentences."""
        return split_sentences(text, LANGUAGES[rules_of(self.language) or CHARACTERS.name])

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("language", *PLACES, "upper")}
        return {**own, "symbols": list(self.symbols), **self.raw.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Vocabulary":
        """Restores a vocabulary from `to_json`. Raises UserError if the content is invalid."""
        try:
            symbols = tuple(content["symbols"])
            own = {name: content[name] for name in (*PLACES, "upper")}
            made = cls(content["language"], symbols, **own, raw=RawRules.from_json(content))
            places = [getattr(made, name) for name in PLACES]
            whole = all(isinstance(symbol, str) for symbol in symbols) and len(set(symbols)) == len(symbols)
            whole &= all(isinstance(place, int) and ABSENT <= place < len(symbols) for place in places)
            whole &= made.blank != ABSENT and isinstance(made.language, str) and isinstance(made.upper, bool)
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise unreadable("the recogniser's vocabulary", "prepare the data again", "invalid")
        return made

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Ids of the characters of normalised text."""
        own = {symbol: number for number, symbol in enumerate(self.symbols) if len(symbol) == 1}
        if self.upper:
            own = {symbol.lower(): number for symbol, number in own.items()}
        own.pop(self.symbols[self.delimiter] if self.delimiter != ABSENT else "", None)
        return own if self.delimiter == ABSENT else {**own, " ": self.delimiter}


def vocabulary_of(language: str, normalized: Iterable[str], raw: RawRules | None = None) -> Vocabulary:
    """Returns the vocabulary of texts that `plain_words` made: the special symbols, then their characters, sorted.

    Raises UserError if the texts have no character.
    """
    characters = {char for text in normalized for char in text} - {" "}
    if not characters:
        raise UserError(
            "the vocabulary is empty: no transcript has a letter", hint="check the transcripts and their columns"
        )
    return Vocabulary(language, (*SPECIAL, *sorted(characters)), raw=raw or RawRules())


class SymbolMatch(NamedTuple):
    """For each symbol of a new vocabulary its id in the old one, or ABSENT; and the symbols that are new."""

    old_ids: tuple[int, ...]
    added: tuple[str, ...]


def match_symbols(old: Vocabulary, new: Vocabulary) -> SymbolMatch:
    """Matches two vocabularies by symbol in any case; blank, unknown symbol and delimiter by what they stand for."""
    known = {_folded(symbol): number for number, symbol in reversed(list(enumerate(old.symbols)))}
    own, theirs = ((vocabulary.blank, vocabulary.unknown_id, vocabulary.delimiter) for vocabulary in (new, old))
    special = {number: old_number for number, old_number in zip(own, theirs, strict=True) if number != ABSENT}
    ids = tuple(
        special[number] if number in special else known.get(_folded(symbol), ABSENT)
        for number, symbol in enumerate(new.symbols)
    )
    return SymbolMatch(ids, tuple(symbol for symbol, old_id in zip(new.symbols, ids, strict=True) if old_id == ABSENT))


def _folded(symbol: str) -> str:
    return unicodedata.normalize("NFC", symbol.lower())
