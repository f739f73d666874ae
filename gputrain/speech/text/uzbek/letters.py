"""Uzbek letters: the standard Latin alphabet of 1995, other spellings of its letters, and Cyrillic letters.

Cyrillic letters by context: е becomes ye at the beginning of a word, after a vowel and after ъ and ь, otherwise e; ц
becomes ts after a vowel, otherwise s; ъ becomes tutuq belgisi, but is dropped between a consonant and е, ё, ю, я; ь is
dropped.
"""

import re
import unicodedata

from gputrain.config import read_table

OKINA, TUTUQ = "ʻ", "ʼ"  # U+02BB of oʻ and gʻ, U+02BC of tutuq belgisi
LETTERS = "abcdefghijklmnopqrstuvxyz" + OKINA + TUTUQ

WORDS = read_table("gputrain.speech.text", "uzbek.yaml")
_FOREIGN: dict[str, str] = WORDS["foreign_letters"]
FOREIGN = _FOREIGN | {
    char.upper(): letters.capitalize() for char, letters in _FOREIGN.items() if len(char.upper()) == 1 and char != "ı"
}
_FOREIGN_LETTER = re.compile(f"[{''.join(FOREIGN)}]")
_W = re.compile(r"(?<=[0-9])( ?[kMGTm]?Wh?)(?![A-Za-z0-9])|[wW]")  # Watts stay as they are.
# A quotation in single quotes: its marks are outside of words; marks within words are apostrophes.
_QUOTED = re.compile(r"(?<![\w'])'(?=\w)((?:[^']|(?<=\w)'(?=\w)){1,200})(?<=[\w.,!?])'(?![\w'])")
_PLAIN: dict[str, str] = WORDS["cyrillic"]
# Stems whose Latin spelling does not follow their letters, by the stem in Cyrillic.
_STEMS = {"сентябр": "sentabr", "октябр": "oktabr"}
_CYRILLIC = re.compile(r"[А-яЁёЎўҚқҒғҲҳ]")
_WORD = re.compile(r"[A-Za-zА-яЁёЎўҚқҒғҲҳ']+")
_LOOKALIKES = ("асеорхукмтвнАСЕОРХУКМТВН", "aceopxykmtbhACEOPXYKMTBH")
_TO_LATIN_LOOKS = str.maketrans(*_LOOKALIKES)
_TO_CYRILLIC_LOOKS = str.maketrans(_LOOKALIKES[1], _LOOKALIKES[0])
_VOWELS = "аеёиоуўэюяы"
_LETTER = re.compile(r"[og]ʻ|[sc]h|[a-z]")


def latin(text: str) -> str:
    """Replaces letters of other Latin alphabets by standard ones, and drops accents."""
    text = _W.sub(lambda found: found[1] or "vV"[found[0] == "W"], text)
    if text.isascii():
        return text
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


def romanized(text: str) -> str:
    """Transliterates Cyrillic words, with `'` for each apostrophe; capitals stay capitals."""
    return _WORD.sub(lambda found: _word(found[0]), text) if _CYRILLIC.search(text) else text


def _word(word: str) -> str:
    """Transliterates a word. In a mixed word, letters that look alike in both alphabets are converted to the alphabet
    of most others."""
    count = len(_CYRILLIC.findall(word))
    if not count:
        return word
    others = re.findall(r"[A-Za-z]", word)
    if count > len(others) and set(others) <= set(_LOOKALIKES[1]):
        word = word.translate(_TO_CYRILLIC_LOOKS)
    elif len(others) > count and set(_CYRILLIC.findall(word)) <= set(_LOOKALIKES[0]):
        return word.translate(_TO_LATIN_LOOKS)
    for stem, latin in _STEMS.items():
        if word.lower().startswith(stem):
            return (latin.capitalize() if word[0].isupper() else latin) + _word(word[len(stem) :])
    return "".join(_letter(word, place) for place in range(len(word)))


def _letter(word: str, place: int) -> str:
    letter = word[place].lower()
    before = word[place - 1].lower() if place else ""
    after = word[place + 1].lower() if place + 1 < len(word) else ""
    if letter == "е" and (not before or before in _VOWELS + "ъь"):
        latin = "ye"
    elif letter == "ц" and before and before in _VOWELS:
        latin = "ts"
    elif before + letter == "цц" or (letter == "ъ" and after and after in "еёюя" and before not in _VOWELS):
        latin = ""
    elif letter == "ь" and after == "о":
        latin = "y"
    elif letter == "с" and after == "ҳ":
        latin = "s'"
    else:
        latin = _PLAIN.get(letter, letter)
    return latin.capitalize() if word[place].isupper() else latin


def names(letters: str) -> str:
    """Returns the names of letters: be, ve, ge."""
    return " ".join(WORDS["letter_names"].get(letter, letter) for letter in _LETTER.findall(letters.lower()))
