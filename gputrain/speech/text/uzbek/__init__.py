"""Uzbek text normalisation: both alphabets, all spellings of the apostrophes, numbers and signs as words, abbreviations
and internet addresses."""

import re

from gputrain.config import read_table
from gputrain.speech.text.language import (
    ADDRESS,
    Language,
    any_of,
    ends_sentence,
    final_dot,
    rewriter,
    spell_signs,
    spoken_address,
)
from gputrain.speech.text.raw import Lexicon
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, keep_letters, unify_characters
from gputrain.speech.text.uzbek import dates, numbers
from gputrain.speech.text.uzbek.letters import (
    LETTERS,
    OKINA,
    TUTUQ,
    WORDS,
    apostrophes,
    latin,
    names,
    romanized,
    without_c,
)
from gputrain.speech.text.uzbek.numbers import SUFFIX, UNITS, attached

# Endings of nouns, which follow foreign names with and without an apostrophe or a hyphen: YouTubega, iPhone'ni.
ENDINGS = "(?:lar)?(?:i?ning|i?ni|i?ga(?:cha)?|i?da(?:n|gi)?|dek|cha|mi|i)?(?<=[a-z])"
NAMES = Lexicon(read_table("gputrain.speech.text", "names.yaml")["uz"], ENDINGS, attached)
ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
_CAPITALS = re.compile(rf"(?<![A-Za-zʻʼ])((?:[A-Z]ʻ?|(?<=[A-Z])[hʻ]){{2,8}})(?:-?({SUFFIX}))?(?![A-Za-zʻʼ])")
_LONE = re.compile(r"(?<![A-Za-zʻʼ])(?<![A-Za-zʻʼ]-)([b-df-hj-np-tvxyz])(?![A-Za-zʻʼ])")
STARTS = frozenset(WORDS["sentence_starts"])
# Abbreviations whose dot ends a sentence before any capital; after a million it may go on (50 mlrd. AQSH dollari).
_CLOSING = frozenset({"va hokazo", "va boshqalar", "yil", "yillar", "hokazo"})


def _label(label: str, is_last: bool) -> str:
    return "ve ve ve" if re.fullmatch("[wvWV]{3}", label) else label


def _full(found: re.Match[str]) -> str:
    """Expands an abbreviation; a dot that also ends the sentence is kept."""
    if re.search("[a-z][A-Z]", found[0]):
        return found[0]  # A unit, mAh, rather than mah.
    words = ABBREVIATIONS[found[0].lower()]
    return words + final_dot(found, STARTS, words in _CLOSING)


def _initial(found: re.Match[str]) -> str:
    """Returns the letter of an initial; not of a ruler's number (Pyotr I.) or at the end of a sentence."""
    before = re.search(r"(\w+) $", found.string[max(0, found.start() - 15) : found.start()])
    is_number = before and before[1] in WORDS["rulers"] and found[1] in ("I", "V", "X")
    if is_number or ends_sentence(found.string, found.start() + len(found[1]) + 1, STARTS):
        return found[0]
    return (found[1].lower() if found[1] in ("Yo", "Yu", "Ya", "Ye") else names(found[1])) + " "


def spelled(text: str) -> str:
    """Replaces abbreviations in capitals by the names of their letters, unless the whole text is in capitals."""
    if re.search("[a-z]{2}", text) or len(text.split()) < 3:
        text = _CAPITALS.sub(_capitals, text)
    return re.sub(r"(?<![A-Za-zʻʼ])[Cc](?![A-Za-zʻʼ])", WORDS["letter_names"]["c"], text)


def alone(text: str) -> str:
    """Replaces single lower-case consonants by their names."""
    return _LONE.sub(lambda found: names(found[1]), text)


def _capitals(found: re.Match[str]) -> str:
    word = found[1].upper()
    if word in WORDS["spelled"] or not set(word) & set("AEIOU"):
        return names(found[1]) + (found[2] or "")
    return found[0]


# Addresses come first, so that names in them are found afterwards.
read_addresses = rewriter((ADDRESS, lambda m: spoken_address(m, WORDS["signs_in_addresses"], _label)))
# Initials (A. Navoiy, Sh. Rashidov), which become names of letters, and abbreviations.
in_full = rewriter(
    (r"(?<![A-Za-zʻʼ])([A-Z]ʻ?|[SC]h|Y[aeou])\.(?= ?[A-Z])", _initial),
    (rf"(?i:(?<![A-Za-z0-9ʻʼ.])(?<![A-Za-zʻʼ]-)(?:{any_of(ABBREVIATIONS)})(?![A-Za-zʻʼ]))", _full),
)


def readable_dots() -> frozenset[str]:
    """Returns words, without their final dot, after which a dot does not end a sentence."""
    ends = {"va h.k.", "va b.", "va b.q.", "va boshq.", "h.k.", "va h. k.", "y.", "yy."}
    return frozenset(word[:-1].split()[-1] for word in ABBREVIATIONS.keys() - ends if word.endswith("."))


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
