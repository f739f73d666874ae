"""Transliterates Uzbek in Cyrillic letters to the Latin alphabet of 1995.

Rules by context: е becomes ye at the beginning of a word, after a vowel and after ъ and ь, otherwise e; ц becomes ts
after a vowel, otherwise s; ъ becomes tutuq belgisi, but is dropped between a consonant and е, ё, ю, я; ь is dropped.
"""

import re

from gputrain.tts.text.uzbek.letters import WORDS

_PLAIN: dict[str, str] = WORDS["cyrillic"]
# Stems whose Latin spelling does not follow their letters, by the stem in Cyrillic.
_STEMS = {"сентябр": "sentabr", "октябр": "oktabr"}
_CYRILLIC = re.compile(r"[А-яЁёЎўҚқҒғҲҳ]")
_WORD = re.compile(r"[A-Za-zА-яЁёЎўҚқҒғҲҳ']+")
_LOOKALIKES = ("асеорхукмтвнАСЕОРХУКМТВН", "aceopxykmtbhACEOPXYKMTBH")
_TO_LATIN_LOOKS = str.maketrans(*_LOOKALIKES)
_TO_CYRILLIC_LOOKS = str.maketrans(_LOOKALIKES[1], _LOOKALIKES[0])
_VOWELS = "аеёиоуўэюяы"


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
