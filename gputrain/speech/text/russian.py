"""Russian text normalisation: numbers, money, dates and abbreviations as words, in the nominative by default."""

import re
from collections.abc import Sequence

from gputrain.speech.text.language import Language, any_of, rewriter, spell_signs
from gputrain.speech.text.numerals import NUMBER, parse_number, roman
from gputrain.speech.text.russian_numbers import WORDS, cardinal, digit_by_digit, form, number, ordinal, whole
from gputrain.speech.text.unicode_cleanup import settled, unified

LETTERS = "абвгдежзийклмнопрстуфхцчшщъыьэюяё"
MONTHS, ABBREVIATIONS, _LATIN = WORDS["months"], WORDS["abbreviations"], WORDS["latin"]
_MONEY, _UNITS, _ENDINGS = WORDS["money"], WORDS["units"], WORDS["written_endings"]
_LATIN_LETTERS = re.compile(any_of(_LATIN))
_START = r"(?<![0-9А-Яа-яЁёA-Za-z.,])"
_STOP = r"(?![А-Яа-яЁёA-Za-z])"


def _date(found: re.Match[str]) -> str:
    day, month = int(found["day"]), int(found["month"])
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    return f"{ordinal(day, 'neuter')} {MONTHS[month - 1]} {ordinal(int(found['year']), 'genitive')} года"


def _counted(found: re.Match[str], forms: Sequence[str]) -> str:
    sign = {"-": "минус ", "+": "плюс "}.get(found[1][0], "")
    bare = found[1].lstrip("+- ")
    parsed = parse_number(bare, ",")
    if parsed.fraction:
        return f"{sign}{number(bare)} {forms[1]}"
    gender = "feminine" if forms[0] in WORDS["feminine_nouns"] else "masculine"
    return f"{sign}{whole(parsed.whole, gender)} {form(parsed.whole, forms)}"


def _year(found: re.Match[str]) -> str:
    return f"{ordinal(int(found[1]), WORDS['years'][found[2]])} {'год' if found[2] == 'г.' else found[2]}"


def _century(found: re.Match[str]) -> str:
    value = roman(found[1])
    said = "век" if found[2] == "в." else found[2]
    return f"{ordinal(value, WORDS['centuries'][found[2]])} {said}" if value else found[0]


def _time(found: re.Match[str]) -> str:
    minutes = int(found[2])
    rest = f" {digit_by_digit(found[2]) if minutes < 10 else cardinal(minutes)}" if minutes else " ноль ноль"
    return cardinal(int(found[1])) + rest


def _cyrillic(found: re.Match[str]) -> str:
    return _LATIN_LETTERS.sub(lambda letters: _LATIN[letters[0]], found[0].lower())


_rewrite = rewriter(
    (
        rf"{_START}(?P<day>[0-9]{{1,2}})([./])(?P<month>[0-9]{{1,2}})\2(?P<year>[0-9]{{4}})(?![0-9])"
        rf"(?: ?г(?:\.|ода)?{_STOP})?",
        _date,
    ),
    (rf"{_START}(?P<year>[0-9]{{4}})-(?P<month>[0-9]{{2}})-(?P<day>[0-9]{{2}})(?![0-9])", _date),
    (r"(?<![0-9:])([01]?[0-9]|2[0-4]):([0-5][0-9])(?![0-9:])", _time),
    (rf"{_START}([0-9]{{1,2}}) ({'|'.join(MONTHS)}){_STOP}", lambda m: f"{ordinal(int(m[1]), 'neuter')} {m[2]}"),
    (rf"{_START}([0-9]{{4}}) ?(года|году|годом|год|г\.){_STOP}", _year),
    (rf"(?<![A-Za-zА-я])([IVX]{{1,6}}) (веке|века|век|в\.){_STOP}", _century),
    (
        rf"{_START}([0-9]{{1,15}})-({any_of(_ENDINGS)}){_STOP}",
        lambda m: ordinal(int(m[1]), "plural" if m[2] == "е" and m[1].endswith("0") else _ENDINGS[m[2]]),
    ),
    (rf"([$€£₽]) ?({NUMBER})", lambda m: f"{m[2]} {m[1]}"),
    (rf"{_START}([+-]?{NUMBER}) ?({any_of(_MONEY)}){_STOP}", lambda m: _counted(m, _MONEY[m[2]])),
    (rf"{_START}([+-]?{NUMBER}) ?({any_of(_UNITS)}){_STOP}", lambda m: _counted(m, _UNITS[m[2]])),
    (
        r"(?<![0-9/.,])([0-9]{1,3})/([0-9]{1,3})(?![0-9/])",
        lambda m: (
            f"{cardinal(int(m[1]), 'feminine')} {ordinal(int(m[2]), 'feminine' if m[1] == '1' else 'plural genitive')}"
        ),
    ),
    (r"(?<=[0-9])-(?=[0-9])", lambda m: " - "),
    (rf"(?<![0-9A-Za-zА-я])([+-]?{NUMBER})", lambda m: number(m[1]) + " "),
    (r"[0-9]+", lambda m: f" {whole(m[0])} "),
    (r"[A-Za-z]+", _cyrillic),
    (
        rf"(?<![А-Яа-яЁё])([БВГДЖЗКЛМНПРСТФХЦЧШЩ]{{2,6}}){_STOP}",
        lambda m: " ".join(WORDS["letter_names"][char] for char in m[1].lower()),
    ),
)
# This pattern is for settled text, which has a space after every dot.
_ABBREVIATION = re.compile(rf"(?<![а-яё.-])(?:{any_of(ABBREVIATIONS)})(?![а-яё-])")


def _in_full(found: re.Match[str]) -> str:
    """Returns an abbreviation in words; its dot is kept at the end of the text."""
    ends = found[0].endswith(".") and not found.string[found.end() :].strip()
    return str(ABBREVIATIONS[found[0]] + "." * ends)


def normalize(text: str) -> str:
    """Returns words of а to я and ё, in lower case; Latin words are transliterated to Cyrillic."""
    text = spell_signs(_rewrite(unified(text)), WORDS["signs"])
    return _ABBREVIATION.sub(_in_full, settled(text, LETTERS))


RUSSIAN = Language(
    "ru",
    normalize,
    LETTERS,
    readings={str(digit): cardinal(digit) + " " for digit in range(10)}
    | {char: _LATIN[char] for char in "abcdefghijklmnopqrstuvwxyz"}
    | {char.upper(): _LATIN[char] for char in "abcdefghijklmnopqrstuvwxyz"}
    | {"…": "...", "–": "-", "—": "-", "&": "и", "%": " процентов", "(": ",", ")": ",", "№": "номер "},
    abbreviations=frozenset(one[:-1].split()[-1] for one in ABBREVIATIONS if one.endswith("."))
    - {"д", "п", "др", "пр", "э"},
)
