"""Definition of a language: its text normalisation and the symbols that remain after it."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gputrain.errors import UserError

PUNCTUATION = " !,-.:;?"
CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*", re.IGNORECASE)  # The code of a language: kk, pt-BR, uz-Cyrl.
Rule = tuple[str, Callable[[re.Match[str]], str]]  # A pattern, and the function that replaces its matches.


@dataclass(frozen=True)
class Language:
    """A language of the front end.

    `normalize` returns text of `letters` and PUNCTUATION only, and does not change its own output. `alphabet` has the
    letters, including digraphs, for which a table may have another spelling. `readings` maps raw code points (capitals,
    digits, letters of another alphabet) to normalised text, for a reader without a normaliser (stock Piper). `same`
    maps code points of normalised text to others with which they share a symbol. `abbreviations` are words, in lower
    case and without their final dot, after which a dot does not end a sentence. `endings` is a pattern of those that
    may follow a foreign word, and `attach` adds one.
    """

    name: str
    normalize: Callable[[str], str]
    letters: str
    alphabet: tuple[str, ...] = ()
    readings: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    abbreviations: frozenset[str] = frozenset()
    endings: str = ""
    attach: Callable[[str, str], str] = str.__add__


def rewriter(*rules: Rule) -> Callable[[str], str]:
    """Returns a function that applies rules to a text, one after the other."""
    compiled = [(re.compile(pattern), rule) for pattern, rule in rules]

    def rewrite(text: str) -> str:
        for pattern, rule in compiled:
            text = pattern.sub(rule, text)
        return text

    return rewrite


def any_of(words: Iterable[str]) -> str:
    """Returns a pattern of words, which prefers longer ones."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def spell_signs(text: str, names: Mapping[str, str]) -> str:
    return re.sub(f"[{re.escape(''.join(names))}]", lambda found: f" {names[found[0]]} ", text)


def normalize_characters(text: str) -> str:
    """Returns NFC in lower case, without control characters, emoji and repeated spaces."""
    # PAD, BOS and EOS cannot be characters of a text.
    text = unicodedata.normalize("NFC", re.sub("[_^$]", " ", text))
    kept = (" " if unicodedata.category(char).startswith(("C", "So", "Sk")) else char for char in text)
    return unicodedata.normalize("NFC", " ".join("".join(kept).lower().split()))


# Any language by characters, without rules of normalisation.
CHARACTERS = Language("characters", normalize_characters, "")


def check_language(code: str) -> None:
    """Raises UserError if it is not the code of a language."""
    if not CODE.fullmatch(code):
        raise UserError(
            f"language {code!r} is not the code of a language",
            hint="use uz, ru or en, or the code of any other language, such as kk, tr or pt-BR",
        )
