"""English text normalisation: numbers, money, dates, times and abbreviations as words."""

import re
import unicodedata

from gputrain.config import read_table
from gputrain.speech.text.language import Language, any_of, rewriter, spell_signs
from gputrain.speech.text.numerals import NUMBER, is_spoken_whole, parse_number, roman
from gputrain.speech.text.unicode_cleanup import APOSTROPHES, settled, unified

LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_WORDS = read_table("gputrain.speech.text", "english.yaml")
SMALL, TENS, SCALES, MONTHS = (list[str](_WORDS[name]) for name in ("small", "tens", "scales", "months"))
ABBREVIATIONS: dict[str, str] = _WORDS["abbreviations"]


def cardinal(number: int) -> str:
    """Returns a number below 10^21 in words, without "and"."""
    if number < 20:
        return SMALL[number]
    words = []
    for power in reversed(range(len(SCALES))):
        count = number // 1000**power % 1000
        if count:
            words.append(f"{_below_thousand(count)} {SCALES[power]}".strip())
    return " ".join(words)


def _below_thousand(count: int) -> str:
    hundreds, rest = divmod(count, 100)
    words = [SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10] + ("-" + SMALL[rest % 10] if rest % 10 else ""))
    elif rest:
        words.append(SMALL[rest])
    return " ".join(words)


def ordinal(number: int) -> str:
    words = cardinal(number)
    last = re.split("[ -]", words)[-1]
    changed = _WORDS["ordinals"].get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return words[: len(words) - len(last)] + changed


def year(number: int) -> str:
    """Returns a year in words: nineteen eighty-four, nineteen oh five, two thousand four."""
    century, rest = divmod(number, 100)
    if not 1000 <= number < 10000 or (century % 10 == 0 and rest < 10):
        return cardinal(number)
    if not rest:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' * (rest < 10)}{cardinal(rest)}"


def whole(digits: str) -> str:
    return cardinal(int(digits)) if is_spoken_whole(digits, SCALES) else " ".join(SMALL[int(digit)] for digit in digits)


def number(written: str) -> str:
    sign = {"-": "minus ", "+": "plus "}.get(written[0], "")
    parsed = parse_number(written.lstrip("+- "), ".")
    point = " point " + " ".join(SMALL[int(digit)] for digit in parsed.fraction) if parsed.fraction else ""
    return sign + whole(parsed.whole) + point


def _plural(name: str, words: str) -> str:
    if words == "one" or name.endswith("hertz"):
        return name
    if name == "foot":
        return "feet"
    head, *rest = name.split(" ")
    return " ".join([{"penny": "pence"}.get(head, head + "s"), *rest])


def _money(found: re.Match[str]) -> str:
    name, coin = _WORDS["money"][found[1]]
    whole_part, _, cents = found[2].partition(".")
    if len(cents) == 2 and not found[3]:
        words = number(whole_part)
        said = f"{words} {_plural(name, words)}"
        coins = cardinal(int(cents))
        return said if coins == "zero" else f"{said} {coins} {_plural(coin, coins)}"
    words = number(found[2]) + (" " + found[3].strip() if found[3] else "")
    return f"{words} {_plural(name, words)}"


def _measure(found: re.Match[str]) -> str:
    words = number(found[1])
    return f"{words} {_plural(_WORDS['units'][found[2]], words)}"


def _time(found: re.Match[str]) -> str:
    minutes = int(found[2])
    said = "" if not minutes else " oh " + cardinal(minutes) if minutes < 10 else " " + cardinal(minutes)
    half = {"a": " a m", "p": " p m", "": "" if minutes else " o'clock"}[(found[3] or "").lower()]
    return cardinal(int(found[1])) + said + half


def _date(found: re.Match[str]) -> str:
    day, month = int(found["day"]), int(found["month"])
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    return f"{MONTHS[month - 1]} {ordinal(day)}, {year(int(found['year']))}"


def _abbreviation(found: re.Match[str]) -> str:
    word = found[1].lower()
    return ABBREVIATIONS[word] + ("." if word == "etc" and not found.string[found.end() :].strip() else "")


_MONTH = "|".join(MONTHS)
_START = r"(?<![0-9A-Za-z.,])"
_rewrite = rewriter(
    (rf"\b((?i:{'|'.join(set(ABBREVIATIONS) - {'no'})}))\.", _abbreviation),
    (r"\b([Nn]o)\.(?= ?[0-9])", _abbreviation),
    (rf"{_START}(?P<year>[0-9]{{4}})-(?P<month>[0-9]{{2}})-(?P<day>[0-9]{{2}})(?![0-9])", _date),
    (rf"{_START}(?P<month>[0-9]{{1,2}})/(?P<day>[0-9]{{1,2}})/(?P<year>[0-9]{{4}})(?![0-9])", _date),
    (r"(?<![0-9:])([01]?[0-9]|2[0-3]):([0-5][0-9])(?![0-9:])(?: ?([apAP])\.?[mM]\b\.?)?", _time),
    (r"(?<![0-9-])([0-9]{1,4})-([0-9]{1,4})(?![0-9-])", lambda m: f"{m[1]} to {m[2]}"),
    (rf"([$€£₽]) ?({NUMBER})( (?:thousand|million|billion|trillion))?", _money),
    (rf"(?<![0-9A-Za-z.,])((?:[+-])?{NUMBER}) ?({any_of(_WORDS['units'])})(?![A-Za-z])", _measure),
    (rf"\b((?i:{_MONTH})) ([0-9]{{1,2}})(?:st|nd|rd|th)?(?![0-9:])", lambda m: f"{m[1]} {ordinal(int(m[2]))}"),
    (r"(?<![0-9A-Za-z.,])([0-9]{1,9})(?:st|nd|rd|th)\b", lambda m: ordinal(int(m[1]))),
    (r"(?<![0-9A-Za-z.,$])(1[0-9]|20)([0-9])0(?:'?s)\b", lambda m: _decade(int(m[1]), int(m[2]))),
    (r"(?<![0-9A-Za-z.,$])(1[1-9][0-9]{2}|20[0-9]{2})(?![0-9A-Za-z]|[.,][0-9])", lambda m: year(int(m[1]))),
    (r"(?<=[A-Z][a-z] |[a-z]{2} )([IVX]{2,6})(?![A-Za-z])", lambda m: cardinal(roman(m[1])) if roman(m[1]) else m[0]),
    (r"(?<![0-9/.,])([0-9]{1,3})/([0-9]{1,3})(?![0-9/])", lambda m: f"{whole(m[1])} over {whole(m[2])}"),
    (r"(?<=[0-9])-(?=[0-9])", lambda m: " - "),
    (rf"(?<![0-9A-Za-z])([+-]?{NUMBER})", lambda m: number(m[1]) + " "),
    (r"[0-9]+", lambda m: f" {whole(m[0])} "),
    (r"(?<![A-Za-z'])(?!I\b)([B-DF-HJ-NP-TV-Z]{2,6})(?![A-Za-z'])", lambda m: " ".join(m[1])),
)


def _decade(century: int, tens: int) -> str:
    words = year(century * 100 + tens * 10)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def normalize(text: str) -> str:
    """Returns words of a to z and the apostrophe, in lower case, without accents."""
    text = unified(text)
    for mark in APOSTROPHES[1:]:
        text = text.replace(mark, "'")
    text = "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))
    text = spell_signs(_rewrite(text), _WORDS["signs"])
    return settled(re.sub(r"(?<![A-Za-z])'|'(?![A-Za-z])", " ", text), LETTERS)


ENGLISH = Language(
    "en",
    normalize,
    LETTERS,
    readings=dict.fromkeys(APOSTROPHES, "'")
    | {str(digit): word + " " for digit, word in enumerate(SMALL[:10])}
    | {"…": "...", "–": "-", "—": "-", "&": "and", "%": " percent", "(": ",", ")": ","},
    abbreviations=frozenset(ABBREVIATIONS) - {"etc", "no"} | {"a.m", "p.m", "e.g", "i.e"},
)
