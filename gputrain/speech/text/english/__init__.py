"""English text normalisation: numbers, money, dates, times and abbreviations as words."""

import re
import unicodedata

from gputrain.speech.text.english import dates, quantities
from gputrain.speech.text.english.abbreviations import ABBREVIATIONS, LATIN, STARTS, expand, spell_capitals
from gputrain.speech.text.english.numbers import SMALL, WORDS
from gputrain.speech.text.language import Language, any_of, spell_signs
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, keep_letters, unify_characters

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_LOWER: dict[str, str] = WORDS["foreign_letters"]
_FOREIGN = _LOWER | {char.upper(): letters.capitalize() for char, letters in _LOWER.items() if char not in "ıß"}
_FOREIGN_LETTER = re.compile(any_of(_FOREIGN))


def normalize(text: str) -> str:
    """Returns words of a to z and the apostrophe, in lower case, without accents."""
    text = unify_characters(text)
    for mark in APOSTROPHES[1:]:
        text = text.replace(mark, "'")
    text = _plain_letters(text)
    text = spell_capitals(quantities.rewrite(dates.rewrite(expand(text))))
    # A slash is spoken between letters (a/b), and is a space between words (and/or).
    text = spell_signs(re.sub(r"(?<=[A-Za-z0-9]{2})/|/(?=[A-Za-z0-9]{2})", " ", text), WORDS["signs"])
    return keep_letters(re.sub(r"(?<![A-Za-z])'|'(?![A-Za-z])", " ", text), LETTERS)


def _plain_letters(text: str) -> str:
    """Returns a text without accents, and with letters of other alphabets as English writes them: Łódź as Lodz."""
    if text.isascii():
        return text
    text = _FOREIGN_LETTER.sub(lambda found: _FOREIGN[found[0]], text)
    return "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))


ENGLISH = Language(
    "en",
    normalize,
    LETTERS,
    readings=dict.fromkeys(APOSTROPHES, "'")
    | {str(digit): word + " " for digit, word in enumerate(SMALL[:10])}
    | {"…": "...", "–": "-", "—": "-", "&": "and", "%": " percent", "(": ",", ")": ","},
    abbreviations=frozenset(ABBREVIATIONS) - {"no", "min", "max", "est", "sen", "rep", *WORDS["closing"]}
    | LATIN.keys(),
    starts=STARTS,
)
