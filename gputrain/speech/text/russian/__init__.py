"""Russian text normalisation: numbers, money, dates and abbreviations as words, in the case that the sentence needs."""

import re
import unicodedata

from gputrain.config import read_table
from gputrain.speech.text.language import Language, spell_signs
from gputrain.speech.text.raw import Lexicon
from gputrain.speech.text.russian import dates, quantities
from gputrain.speech.text.russian.abbreviations import (
    ABBREVIATIONS,
    BEFORE_NAMES,
    LATIN,
    STARTS,
    cyrillic,
    expand,
    expand_alone,
    read_addresses,
    spell_capitals,
)
from gputrain.speech.text.russian.numbers import WORDS, cardinal
from gputrain.speech.text.unicode_cleanup import keep_letters, unify_characters

LETTERS = "абвгдежзийклмнопрстуфхцчшщъыьэюяё"
# Stress marks and other accents; not the marks of й and ё.
_ACCENT = re.compile(r"(?<![иИеЕ])[\u0300-\u036f]|[\u0300-\u0305\u0307\u0309-\u036f]")
NAMES = Lexicon(read_table("gputrain.speech.text", "names.yaml")["ru"])


def normalize(text: str) -> str:
    """Returns words of а to я and ё, in lower case; Latin words are transliterated to Cyrillic."""
    text = expand(NAMES(read_addresses(unify_characters(_ACCENT.sub("", unicodedata.normalize("NFD", text))))))
    text = spell_capitals(expand_alone(quantities.rewrite(dates.rewrite(text))))
    return keep_letters(cyrillic(spell_signs(text, WORDS["signs"])), LETTERS)


RUSSIAN = Language(
    "ru",
    normalize,
    LETTERS,
    readings={str(digit): cardinal(digit) + " " for digit in range(10)}
    | {char: LATIN[char] for char in "abcdefghijklmnopqrstuvwxyz"}
    | {char.upper(): LATIN[char] for char in "abcdefghijklmnopqrstuvwxyz"}
    | {"…": "...", "–": "-", "—": "-", "&": "и", "%": " процентов", "(": ",", ")": ",", "№": "номер "},
    abbreviations=frozenset(word[:-1].split()[-1] for word in (*ABBREVIATIONS, *BEFORE_NAMES, *WORDS["before_numbers"])
                            if word.endswith("."))
    - {"д", "п", "др", "пр", "э", "с", "м", "о", "чел", "мин", "сек"},
    starts=STARTS,
)  # fmt: skip
