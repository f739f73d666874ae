"""Definition of a language: its text normalisation and the symbols that remain after it; internet addresses, whose
signs every language speaks by their names (kun.uz, info@mail.ru); numbers in digits, grouped or Roman; and splitting
text into sentences for synthesis."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gputrain.errors import UserError
from gputrain.speech.text.unicode_cleanup import IPA_SIGNS, JOINERS, tidy_joiners, visible

CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]{2,8})*", re.IGNORECASE)  # The code of a language: kk, pt-BR, uz-Cyrl.
Rule = tuple[str, Callable[[re.Match[str]], str]]  # A pattern, and the function that replaces its matches.


@dataclass(frozen=True)
class Language:
    """A language of the front end.

    `normalize` returns text of `letters` and PUNCTUATION only, and does not change its own output. `readings` maps raw
    code points (capitals, digits, letters of another alphabet) to normalised text, for a reader without a normaliser
    (stock Piper). `same` maps code points of normalised text to others with which they share a symbol. `abbreviations`
    are words, in lower case and without their final dot, after which a dot does not end a sentence unless one of the
    words in `starts` follows. `endings` is a pattern of those that may follow a foreign word, and `attach` adds one.
    """

    name: str
    normalize: Callable[[str], str]
    letters: str
    readings: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    abbreviations: frozenset[str] = frozenset()
    starts: frozenset[str] = frozenset()
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


def with_colons(found: re.Match[str]) -> str:
    """Returns times with a dot (18.30) as times with a colon."""
    return re.sub(r"(?<=[0-9])\.(?=[0-9])", ":", found[0])


def with_prefixes(units: Mapping[str, Any], prefixes: Mapping[str, str]) -> dict[str, Any]:
    """Returns units, each with its name or a list of its forms, with and without metric prefixes: kW as kilowatt."""
    made = dict(units)
    for prefix, start in prefixes.items():
        for unit, name in units.items():
            made[prefix + unit] = [start + form for form in name] if isinstance(name, list) else start + name
    return made


def any_of(words: Iterable[str]) -> str:
    """Returns a pattern of words, which prefers longer ones."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_NOTHING = re.compile(r"[\s\"»”)]*$")
_NEXT_WORD = re.compile(r"[\s\"»”)]+[\"«“(]?([^\W\d_]+)(['ʻʼ]\w+)?(\.?)")


def ends_sentence(text: str, place: int, starts: frozenset[str]) -> bool:
    """Returns True if a dot before a place of the text ends a sentence, although it belongs to an abbreviation: nothing
    follows, or one of the words in `starts`, which begin sentences and are no names."""
    following = _NEXT_WORD.match(text, place)
    if following is None:
        return _NOTHING.match(text, place) is not None
    word, rest, dot = following.groups()
    is_initial = dot and len(word) == 1
    return not is_initial and (word in starts or word + (rest or "") in starts)


def final_dot(found: re.Match[str], starts: frozenset[str], closes: bool = False) -> str:
    """Returns the dot of an abbreviation if it also ends the sentence; one that `closes` ends it before any capital."""
    text, end = found.string, found.end()
    ends = ends_sentence(text, end, starts) or (closes and re.match(r"\s+[\"«(]?[A-ZА-ЯЁ]", text[end : end + 4]))
    return "." if ends and found[0].endswith(".") else ""


def spell_signs(text: str, names: Mapping[str, str]) -> str:
    return re.sub(f"[{re.escape(''.join(names))}]", lambda found: f" {names[found[0]]} ", text)


def normalize_characters(text: str) -> str:
    """Returns NFC in lower case, without control characters, emoji and repeated spaces; signs of IPA stay."""
    kept_signs = IPA_SIGNS.union(JOINERS)
    # PAD, BOS and EOS cannot be characters of a text.
    text = visible(re.sub("[_^$]", " ", text))
    kept = (
        " " if char not in kept_signs and unicodedata.category(char).startswith(("C", "So", "Sk")) else char
        for char in text
    )
    return tidy_joiners(unicodedata.normalize("NFC", " ".join("".join(kept).lower().split())))


# Any language by characters, without rules of normalisation.
CHARACTERS = Language("characters", normalize_characters, "")


def check_language(code: str) -> None:
    """Raises UserError if it is not the code of a language."""
    if not CODE.fullmatch(code):
        raise UserError(
            f"language {code!r} is not the code of a language",
            hint="use uz, ru or en, or the code of any other language, such as kk, tr or pt-BR",
        )


# ------------------------------------------------------------------------------------------------------------ addresses


_ENDINGS = "uz|com|ru|org|net|info|edu|gov|io|uk|de|fr|kz|рф"
ADDRESS = (
    r"(?:https?://|(?<![A-Za-z0-9.])[wWvV]{3}\.)[^\s,;!?<>\"]{1,300}"
    r"|[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
    r"|(?<![A-Za-zА-яЁё0-9.@-])[A-Za-zа-я0-9-]{2,63}(?:\.[A-Za-z0-9-]{1,63}){0,3}"
    rf"\.(?:{_ENDINGS})(?:/[^\s,;!?]{{0,200}})?(?![A-Za-zА-яЁё0-9])"
)
_LABEL = re.compile(r"[^./@_:?=&%#~+-]+|[./@_:?=&%#~+-]")
_LAST_MARKS = re.compile(r"[.,:'/)]*$")


def spoken_address(found: re.Match[str], signs: Mapping[str, str], spell: Callable[[str, bool], str]) -> str:
    """Returns a match of ADDRESS in words, without its scheme.

    `signs` are the names of the signs. `spell(label, is_last)` returns a part between two signs as it is spoken;
    `is_last` is True for the top-level domain. Marks that end the sentence are kept.
    """
    bare = re.sub(r"^https?://", "", found[0])
    marks = _LAST_MARKS.search(bare)
    bare, ending = (bare[: marks.start()], marks[0].replace("/", "")) if marks else (bare, "")
    host_end = len(re.split("[/?#]", bare, maxsplit=1)[0])
    words = []
    for part in _LABEL.finditer(bare):
        if part[0] in signs:
            words.append(signs[part[0]])
        elif part[0].isalnum():
            words.append(spell(part[0], part.end() == host_end and "." in bare[: part.start()]))
    return " ".join(words) + ending


# ------------------------------------------------------------------------------------------------------------ numerals


# It matches 1 000 000, 1.000.000 and 1,000,000, each with or without decimals, and 1000000 and 3,14.
NUMBER = (
    r"(?:[0-9]{1,3}(?:(?: [0-9]{3}){1,7}|(?:\.[0-9]{3}){1,7}|(?:,[0-9]{3}){1,7})(?![0-9])(?:[.,][0-9]+)?"
    r"|[0-9]+(?:[.,][0-9]+)?)"
)
CLOCK = r"(?<![0-9.,:])(?:[01]?[0-9]|2[0-4])\.[0-5][0-9](?![0-9]|[.,:][0-9])"  # A time with a dot: 18.30.
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_ROMAN = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


@dataclass(frozen=True)
class Written:
    """The digits of a number: `fraction` has those after the decimal sign; empty if there is none."""

    whole: str
    fraction: str = ""


def parse_number(written: str, decimal: str) -> Written:
    """Parses a match of NUMBER; `decimal` is the decimal sign of the language, "," or ".".

    An ambiguous sign, as in 1.234 and 1,234, separates groups unless it is the language's decimal sign; in 1,000 it
    always separates groups.
    """
    ungrouped = written.replace(" ", "")
    signs = [char for char in ungrouped if char in ".,"]
    if not signs:
        return Written(ungrouped)
    head, _, tail = ungrouped.rpartition(signs[-1])
    several_alike = len(signs) > 1 and len(set(signs)) == 1
    alone = len(signs) == 1 and " " not in written and len(tail) == 3 and len(head) <= 3 and head.strip("0")
    if several_alike or (alone and (signs[0] != decimal or tail == "000")):
        return Written(head.replace(signs[-1], "") + tail)
    return Written(re.sub(r"[.,]", "", head), tail)


def roman(numeral: str) -> int:
    """Returns the value of a well-formed Roman numeral; 0 for other text."""
    if not _ROMAN.fullmatch(numeral):
        return 0
    values = [_ROMAN_VALUES[char] for char in numeral]
    return sum(-value if value < after else value for value, after in zip(values, [*values[1:], 0], strict=True))


def is_spoken_whole(digits: str, scales: Sequence[object]) -> bool:
    """Returns False for digits that are read one by one: they begin with 0 or exceed the largest of the scales."""
    return len(digits) <= 3 * len(scales) and (len(digits) == 1 or not digits.startswith("0"))


# ----------------------------------------------------------------------------------------------------------- sentences


LONGEST = 300  # maximum number of characters: about 20 seconds of speech
_END = re.compile(r"[.!?…;؟۔।॥።။]+[\"'»”’)\]]*(?= |$)|[。！？]+[」』”’)]*|\n")
_LAST_WORD = re.compile(r"[^\s(\"'«“]+$")


def split_sentences(text: str, language: Language = CHARACTERS, longest: int = LONGEST) -> list[str]:
    """Returns the sentences of a raw text, none empty or longer than `longest` characters.

    A sentence ends at . ! ? … ; before a space, at a full stop of Chinese or Japanese, and at a new line. A dot after
    an abbreviation (known words, initials) ends it only before a word that begins sentences, and before a lower-case
    letter it does not. Longer sentences are split at commas, then at spaces, then anywhere.
    """
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        if end[0] == "\n" or not _continues_sentence(text, start, end, language):
            found.append(text[start : end.end()])
            start = end.end()
    found.append(text[start:])
    tidy = (" ".join(sentence.split()) for sentence in found)
    return [part for sentence in tidy if sentence for part in _short(sentence, longest)]


def _continues_sentence(text: str, start: int, end: re.Match[str], language: Language) -> bool:
    """Returns True if the dot belongs to an abbreviation, an initial or an ordinal of a list."""
    if end[0] != ".":
        return False
    word = _LAST_WORD.search(text, max(start, end.start() - 40), end.start())
    if word is None:
        return False
    if text[end.end() : end.end() + 2].strip()[:1].islower():
        return True
    is_short = word[0].lower() in language.abbreviations or (len(word[0]) == 1 and word[0].isupper())
    return is_short and not ends_sentence(text, end.end(), language.starts)


def _short(sentence: str, longest: int) -> list[str]:
    parts = []
    while len(sentence) > longest:
        head = sentence[:longest]
        at = max(head.rfind(", "), head.rfind(": ")) + 1
        at = at if at > longest // 4 else head.rfind(" ")
        at = at if at > 0 else longest
        parts.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*parts, sentence] if sentence else parts
