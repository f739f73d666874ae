"""English dates, years, decades and times of day (Chicago Manual of Style, 9.29 to 9.40)."""

import re

from gputrain.speech.text.english.numbers import WORDS, cardinal, ordinal, pair, year
from gputrain.speech.text.language import any_of, rewriter

MONTHS: list[str] = WORDS["months"]
_SHORT: dict[str, str] = WORDS["month_abbreviations"]
_MONTH = "(?i:" + any_of([*MONTHS, *_SHORT]) + ")"
_SHORT_DAYS = {day[:length].capitalize(): day for day in WORDS["days"] for length in (3, 4, 5) if length < len(day) - 2}
_ANY = rf"({any_of(_SHORT_DAYS)}|{_MONTH})\.?"
_DATE = rf"(?:{_MONTH}\.? [0-9]{{1,2}}|[0-9]{{1,2}} {_MONTH}\.?)"
_YEAR = r"(?:,? (?P<year>[0-9]{4})(?![0-9]))?"
_START = r"(?<![0-9A-Za-z.,])"
_TH = r"(?:st|nd|rd|th)?"
_END = rf"{_TH}(?![0-9A-Za-z:]|[.,][0-9])"
_DAYS = rf"(?P<day>[0-9]{{1,2}})(?:{_TH} ?- ?(?P<last>[0-9]{{1,2}}))?"
_HALF = r"(?: ?([apAP])\.? ?[mM]\b)"


def _numeric(found: re.Match[str]) -> str:
    day, month = int(found["day"]), int(found["month"])
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    return f"{MONTHS[month - 1]} {ordinal(day)}, {year(int(found['year']))}"


def _named(found: re.Match[str]) -> str:
    """Returns a month and a day in this order, with the year if there is one: May 5, 5 May 2020."""
    name = found["month"].lower()
    if not 1 <= int(found["day"]) <= 31:
        return found[0]
    last = f" to {ordinal(int(found['last']))}" if found["last"] else ""
    said = f"{_SHORT.get(name, name)} {ordinal(int(found['day']))}{last}"
    return f"{said}, {year(int(found['year']))}" if found["year"] else said


def _time(found: re.Match[str]) -> str:
    """Returns 7:00 as seven o'clock, 9:30 am as nine thirty a m, 14:00 as fourteen hundred."""
    hours, minutes, seconds = int(found[1]), int(found[2]), found[3]
    half = _half(found[4])
    said = cardinal(hours) + (" " + pair(minutes) if minutes else "")
    if seconds:
        return f"{said} and {cardinal(int(seconds))} second{'s' * (int(seconds) != 1)}{half}"
    if minutes or half:
        return said + half
    return f"{said} o'clock" if 1 <= hours <= 12 else f"{said} hundred"


def _half(letter: str | None) -> str:
    return f" {letter.lower()} m" if letter else ""


def _decade(words: str) -> str:
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _in(found: re.Match[str]) -> str:
    return f"{found[1]} {year(int(found[2]))}"


rewrite = rewriter(
    # Durations, whose m is a minute: 2h 30m, 5m 30s, 3d 4h.
    (r"(?<![0-9])([0-9]{1,3}) ?d ?(?=[0-9]{1,2} ?h)", lambda m: f"{m[1]} day{'s' * (m[1] != '1')} "),
    (r"(?<=[0-9]) ?m ?([0-9]{1,2}) ?s(?![A-Za-z0-9])", lambda m: f" min {m[1]} sec"),
    (r"(?<=[0-9]) ?h(?:rs?)? ?([0-9]{1,2}) ?m(?:ins?)?(?![A-Za-z0-9])", lambda m: f" h {m[1]} min"),
    # Ranges of days and of months: Mon-Fri, Jan-Mar, May 30 - June 2.
    (rf"\b{_ANY} ?- ?{_ANY}(?![A-Za-z]| ?[0-9]{{1,2}}(?! ?[0-9:ap]))", lambda m: f"{_name(m[1])} to {_name(m[2])}"),
    (rf"\b({_DATE}) ?- ?(?={_DATE}(?![A-Za-z0-9]))", lambda m: f"{m[1]} to "),
    (rf"{_START}(?P<year>[0-9]{{4}})([/-])(?P<month>[0-9]{{1,2}})\2(?P<day>[0-9]{{1,2}})(?![0-9])", _numeric),
    (rf"{_START}(?P<month>[0-9]{{1,2}})/(?P<day>[0-9]{{1,2}})/(?P<year>[0-9]{{4}})(?![0-9])", _numeric),
    (rf"{_START}(?P<day>[0-9]{{1,2}})\.(?P<month>[0-9]{{1,2}})\.(?P<year>[0-9]{{4}})(?![0-9])", _numeric),
    # July 4, 1776; Jan. 1; 5 May 2020; the 1st of April stays in this order.
    (rf"\b(?P<month>{_MONTH})\.? {_DAYS}{_END}{_YEAR}", _named),
    (rf"(?<![A-Za-z])([Tt]he [0-9]{{1,2}}(?:st|nd|rd|th)) (?={_MONTH}\b)", lambda m: f"{m[1]} of "),
    (rf"(?<![Tt]he ){_START}{_DAYS}{_TH} (?P<month>{_MONTH})\b\.?{_YEAR}", _named),
    # Ranges of times and of decades: 2pm-5pm, 9:00 am - 5:00 pm, 1960s-80s.
    (r"(?<=[0-9mM.]) ?- ?(?=[0-9]{1,2}(?::[0-9]{2})? ?[ap]\.?m\b)", lambda _: " to "),
    (r"(?<=:[0-5][0-9]) ?- ?(?=[0-9]{1,2}:[0-9]{2})", lambda _: " to "),
    (r"(?<=[0-9]0s)-(?=[0-9]{2,4}s\b)", lambda _: " to "),
    # 10:30, 10:30:15, 9:30 am, 6 p.m.
    (rf"(?<![0-9:.])([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?(?![0-9:]){_HALF}?", _time),
    (rf"{_START}(1[0-2]|0?[1-9]){_HALF}", lambda m: cardinal(int(m[1])) + _half(m[2])),
    # The 1990s, the '90s, his 20s; back in '68, the class of '05.
    (r"(?<![0-9A-Za-z.,$])(1[0-9]|20)([0-9])0'?s\b", lambda m: _decade(year(int(m[1] + m[2] + "0")))),
    (r"(?<![0-9A-Za-z.,$])'?([2-9]0)'?s\b", lambda m: _decade(cardinal(int(m[1])))),
    (r"(?<![0-9A-Za-z'])'([0-9]{2})(?![0-9A-Za-z']|[.,:%][0-9])", lambda m: pair(int(m[1]))),
    # A year stands alone, or before an era, or in 1066; 1939-1945 is a range.
    (
        r"(?<![0-9A-Za-z.,$€£/-])([12][0-9]{3})-((?:1[0-9]|20)[0-9]{2})(?![0-9-])",
        lambda m: f"{year(int(m[1]))} to {year(int(m[2]))}",
    ),
    (
        r"(?<![0-9A-Za-z.,$€£/-])(1[1-9][0-9]{2}|20[0-9]{2})-([0-9]{2})(?![0-9A-Za-z-]|[.,/:][0-9])",
        lambda m: _short_years(m),
    ),
    (r"\b((?i:in|year|since|by|until|before|after|from|of)) (10[0-9]{2})(?![0-9A-Za-z]|[.,:-][0-9])", _in),
    (r"(?<![0-9A-Za-z.,$€£:/#-])(1[1-9][0-9]{2}|20[0-9]{2})(?![0-9A-Za-z]|[.,:/-][0-9])", lambda m: year(int(m[1]))),
    (rf"\b((?i:{any_of(_SHORT.keys() - {'mar', 'sep'})}))\.(?= ?(?:$|[0-9a-z,]))", lambda m: _name(m[1])),
)


def _short_years(found: re.Match[str]) -> str:
    """Returns 1914-18 as a range of years."""
    if int(found[2]) <= int(found[1]) % 100:
        return found[0]
    return f"{year(int(found[1]))} to {cardinal(int(found[2]))}"


def _name(word: str) -> str:
    return _SHORT_DAYS.get(word) or _SHORT.get(word.lower(), word)
