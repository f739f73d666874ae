"""Uzbek letters: the standard Latin alphabet of 1995, and other spellings of its letters."""

import re
import unicodedata

from gputrain.tts.text.language import read_words

OKINA, TUTUQ = "ʻ", "ʼ"  # U+02BB of oʻ and gʻ, U+02BC of tutuq belgisi
DIGRAPHS = ("oʻ", "gʻ", "sh", "ch", "ng")
ALPHABET = (*"abdefghijklmnopqrstuvxyz", *DIGRAPHS, TUTUQ)
LETTERS = "abcdefghijklmnopqrstuvxyz" + OKINA + TUTUQ

WORDS = read_words("uzbek")
_FOREIGN: dict[str, str] = WORDS["foreign_letters"]
FOREIGN = _FOREIGN | {
    char.upper(): letters.capitalize() for char, letters in _FOREIGN.items() if len(char.upper()) == 1 and char != "ı"
}
_FOREIGN_LETTER = re.compile(f"[{''.join(FOREIGN)}]")
# A quotation in single quotes: its marks are outside of words; marks within words are apostrophes.
_QUOTED = re.compile(r"(?<![\w'])'(?=\w)((?:[^']|(?<=\w)'(?=\w)){1,200})(?<=[\w.,!?])'(?![\w'])")


def latin(text: str) -> str:
    """Replaces letters of other Latin alphabets by standard ones, and drops accents."""
    if text.isascii():
        return text.replace("w", "v").replace("W", "V")
    text = _FOREIGN_LETTER.sub(lambda found: FOREIGN[found[0]], text)
    parts = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", "".join(char for char in parts if not unicodedata.combining(char)))


def apostrophes(text: str) -> str:
    """Replaces `'` by context: part of oʻ or gʻ after o or g, tutuq belgisi between letters, else a quotation mark.

    After o or g at the end of a word it is part of the letter (bogʻ), unless it closes a quotation.
    """
    text = _QUOTED.sub(r" \1 ", re.sub(r"['ʻʼ]+", "'", text))
    text = re.sub(r"(?<=[oOgG])'", OKINA, text)
    text = re.sub(r"(?<=[A-Za-z])'(?=[A-Za-z])", TUTUQ, text)
    return text.replace("'", " ")


def without_c(text: str) -> str:
    """Replaces c outside ch, as in foreign words: by s before e, i, y, by k before other letters."""
    return re.sub(r"c(?!h)", "k", re.sub(r"c(?=[eiy])", "s", re.sub(r"ck", "k", text)))
