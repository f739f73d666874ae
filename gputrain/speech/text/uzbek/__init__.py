"""Uzbek text normalisation: both alphabets, all spellings of the apostrophes, and numbers and signs as words."""

from gputrain.config import read_table
from gputrain.speech.text.language import Language, spell_signs
from gputrain.speech.text.raw import Lexicon
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, keep_letters, unify_characters
from gputrain.speech.text.uzbek import dates, numbers
from gputrain.speech.text.uzbek.abbreviations import STARTS, alone, in_full, read_addresses, readable_dots, spelled
from gputrain.speech.text.uzbek.letters import (
    LETTERS,
    OKINA,
    TUTUQ,
    WORDS,
    apostrophes,
    latin,
    romanized,
    without_c,
)
from gputrain.speech.text.uzbek.numbers import UNITS, attached

# Endings of nouns, which follow foreign names with and without an apostrophe or a hyphen: YouTubega, iPhone'ni.
ENDINGS = "(?:lar)?(?:i?ning|i?ni|i?ga(?:cha)?|i?da(?:n|gi)?|dek|cha|mi|i)?(?<=[a-z])"
NAMES = Lexicon(read_table("gputrain.speech.text", "names.yaml")["uz"], ENDINGS, attached)


def normalize(text: str) -> str:
    """Returns a text as words in the standard Latin alphabet, in lower case."""
    text = in_full(apostrophes(latin(romanized(NAMES(read_addresses(unify_characters(text)))))))
    text = numbers.rewrite(dates.rewrite(text))
    return alone(without_c(keep_letters(spell_signs(spelled(text), WORDS["signs"]), LETTERS)))


def _readings() -> dict[str, str]:
    """Returns spellings of code points that normalised text lacks, for stock Piper, which does not normalise."""
    letters = "абвгджзийклмнопрстуфхцчшщъыэюяёқғҳ"
    readings = {letter: romanized(letter).replace("'", TUTUQ) for letter in letters} | {"е": "e", "w": "v"}
    readings |= {letter.upper(): latin_letters for letter, latin_letters in readings.items()}
    readings |= {str(digit): word + " " for digit, word in enumerate(UNITS)}
    readings |= dict.fromkeys(APOSTROPHES, OKINA)
    return readings | {"…": "...", "–": "-", "—": "-", "(": ",", ")": ",", "%": " foiz"}


UZBEK = Language(
    name="uz",
    letters=LETTERS,
    normalize=normalize,
    readings=_readings(),
    same={TUTUQ: OKINA},
    abbreviations=readable_dots(),
    starts=STARTS,
    endings=ENDINGS,
    attach=attached,
)
