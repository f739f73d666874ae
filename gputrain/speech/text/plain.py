"""Text rules of a recogniser: words in lower case without punctuation, for any language."""

import re
import unicodedata

from gputrain.speech.text.frontend import LANGUAGES
from gputrain.speech.text.language import CHARACTERS
from gputrain.speech.text.lookalikes import unify_letters
from gputrain.speech.text.raw import RawRules
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, IPA_SIGNS, JOINERS, joins, tidy_joiners, visible

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
    text = (
        LANGUAGES[rules].normalize(text) if rules else visible(text).replace("İ", "i").lower()
    )  # Python would add a combining dot to this i.
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
