"""Uzbek dates, years, times, centuries and other ordinals."""

import re
from functools import reduce

from gputrain.speech.text.language import CLOCK, any_of, rewriter, roman, with_colons
from gputrain.speech.text.uzbek.letters import WORDS, names
from gputrain.speech.text.uzbek.numbers import SUFFIX, attached, cardinal, joined, ordinal, whole

MONTHS = WORDS["months"]
_CASE = r"(?:ning|ni|gacha|ga|dagi|dan|da|gi)"
_AFTER = rf"(?:[ -]?yil)?(?:[ -]?(?P<case>{_CASE})(?![A-Za-zʻʼ]))?"
_NUMBERED = "asr|bob|qism|jild|sinf|kurs|chorak|boʻlim|tom|jahon|sessiya|kvartal|fasl|bosqich|modda|ilova|band|daraja"
_RULERS = any_of(WORDS["rulers"])
_NO_YEAR = "oldin|avval|muqaddam|davomida|mobaynida|ichida|keyin"


def _date(found: re.Match[str]) -> str:
    day, month, year = int(found["day"]), int(found["month"]), found["year"]
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    return f"{ordinal(year)} yil {ordinal(str(day))} {MONTHS[month - 1]}{found['case'] or ''}"


def _clock(hours: str, minutes: str, seconds: str | None = None) -> str:
    words = cardinal(int(hours))
    for part in (minutes, seconds):
        if part and (int(part) or seconds):
            words += " " + whole(part)
    return words


def _time(found: re.Match[str]) -> str:
    words = _clock(found[1], found[2], found[3])
    return attached(words, found["case"]) if found["case"] else words


def _hours(found: re.Match[str]) -> str:
    """Returns a range of times, such as opening hours: dan ... gacha."""
    return f"{attached(_clock(found[1], found[2]), 'dan')} {attached(_clock(found[3], found[4]), 'gacha')}"


def _romans(found: re.Match[str]) -> str:
    """Converts Roman numerals to ordinals: XX asr, XV-XVI asrlar; single letters only before a numbered noun."""
    first, last, noun = found[1], found[2], found[3]
    lone = len(first) == 1 and not last
    plain = set(first + (last or "")) <= set("IVX")
    if not roman(first) or (last and not roman(last)) or (not noun and (lone or not plain)):
        return found[0]
    words = ordinal(str(roman(first)))
    return joined(words, ordinal(str(roman(last)))) + " " if last else words + " "


def _dotted(found: re.Match[str]) -> str:
    return f"{ordinal(str(roman(found[1])))} " if roman(found[1]) else found[0]


def _numbered(found: re.Match[str]) -> str:
    """Converts numbers with a hyphen: ordinals before a word (5-sinf, 9-10-11-sinflar), cardinals before a suffix."""
    numbers, word = re.findall("[0-9]+", found[1]), found[2]
    if re.fullmatch(SUFFIX, word):
        return attached(reduce(joined, map(whole, numbers)), word)
    return f"{reduce(joined, map(ordinal, numbers))} {word}"


def _power(found: re.Match[str]) -> str:
    power = found[0].strip("^()")
    return {"2": " kvadrat", "3": " kub"}.get(power, f"ning {power}-darajasi")


def _formula(found: re.Match[str]) -> str:
    """Returns a formula with the names of its variables: E = mc^2 - 1 as e teng em se kvadrat minus bir."""
    text = re.sub(r"(?<=[A-Za-z]) ?/ ?| ?/ ?(?=[A-Za-z])", " boʻlingan ", found[0])
    text = re.sub(r"(?<=[A-Za-z0-9]) ?- ?", " minus ", text)
    text = re.sub(_VARIABLES, lambda word: f" {' '.join(map(names, word[0]))}", text)
    return re.sub(_POWER, _power, text)


def _chemical(found: re.Match[str]) -> str:
    parts = re.findall("[A-Z][a-z]?|[0-9]+", found[0])
    return " ".join(names(part) if part.isupper() else part for part in parts)


def _section(found: re.Match[str]) -> str:
    """Returns the number of a section, of which the last part is an ordinal: 4.2.1-bob."""
    *above, last = found[1].split(".")
    if re.fullmatch(SUFFIX, found[2]) or re.fullmatch(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+", found[1]):
        return found[0]
    return f"{' nuqta '.join([*map(whole, above), ordinal(last)])} {found[2]}"


def _year(found: re.Match[str]) -> str:
    """Converts a year without its hyphen to an ordinal; 1000 and 1500 years are durations."""
    if not found[2] and found[1] in ("1000", "1500"):
        return found[0]
    return _ordinals(found[1], found[2]) + " "


def _ordinals(first: str, last: str | None) -> str:
    return joined(ordinal(first), ordinal(last)) if last else ordinal(first)


_POWER = r"\^\(?(?:-?[0-9]{1,3})\)?"
_TERM = rf"(?:[0-9]{{1,9}}(?:[.,][0-9]{{1,9}})?(?:[A-Za-z]{{1,2}})?|[A-Za-z]{{1,2}})(?:{_POWER})?(?![A-Za-zʻʼ^])"
_LEFT = rf"(?<![A-Za-z0-9ʻʼ.,^-])(?<![0-9] )(?:{_TERM} ?[-+*/×÷:] ?){{0,5}}{_TERM}"
_FORMULA = rf"{_LEFT} ?= ?-?{_TERM}(?: ?[-+*/×÷:=] ?{_TERM}){{0,5}}"
_UNIT = any_of(WORDS["lengths"] | WORDS["measures"])
_VARIABLES = rf"(?<![A-Za-zʻʼ])(?!(?<=[0-9])(?:{_UNIT})(?![A-Za-z]))[A-Za-z]{{1,2}}(?![A-Za-zʻʼ])"
_ATOMS = "(?:(?:Na|Ca|Cl|Fe|Mg|Al|Cu|Zn|Ag|Br|Si|Mn|Pb|Ba|Li|[HCNOSPKFIB])[0-9]{0,2}){2,8}"
_CHEMICAL = rf"(?<![A-Za-z0-9ʻʼ])(?=[A-Za-z]{{1,9}}[0-9]){_ATOMS}(?![A-Za-z0-9])"
_MONTH = "|".join((*MONTHS, "sentyabr", "oktyabr"))
_D = r"(?<![0-9.,/-])"
_TIME = "([01]?[0-9]|2[0-4]):([0-5][0-9])"
_NUMERAL = r"[IVXLCDM]{1,9}"
rewrite = rewriter(
    (r"(?<![A-Za-z0-9ʻʼ-])((?:[A-Z]ʻ?){1,6})-([0-9]{1,6})-(?=son)", lambda m: f"{names(m[1])} {ordinal(m[2])} "),
    (_CHEMICAL, _chemical),
    (_FORMULA, _formula),
    (_POWER, _power),
    # Times with a dot: after soat, before da and dan, and 9.00-18.00.
    (rf"(?i:soati?|vaqti):? {CLOCK}(?:(?: ?dan)?(?: ?- ?| ){CLOCK})?", with_colons),
    (rf"{CLOCK}(?<=[05]) ?(?:dan|-) ?{CLOCK}(?<=[05])", with_colons),
    (rf"(?=[0-9]{{2}}){CLOCK}(?<=[05])(?= ?-?(?:da|dan|dagi|gacha)(?![A-Za-zʻʼ]))", with_colons),
    # 12-§ and 1.1-§; 3-"B" sinf; 3-, 7-, 8-sinf; 10:2=5, 7-3=4.
    (r"(?<=[0-9])-§", lambda _: "-paragraf"),
    (r"(?<![0-9A-Za-z.,])([0-9]{1,3})-[\"«»“”„]([A-Z]ʻ?)[\"«»“”]", lambda m: f"{ordinal(m[1])} {m[2]} "),
    (r"(?<![0-9A-Za-z.])([0-9]{1,4})-(?=,| va [0-9]| yoki [0-9])", lambda m: ordinal(m[1])),
    (r"(?<=[0-9]) ?: ?(?=[0-9]+ ?=)", lambda _: " boʻlingan "),
    (r"(?<![0-9.,])([0-9]{1,3}(?:\.[0-9]{1,3})+)-([A-Za-z][A-Za-zʻʼ]*)", _section),
    (rf"{_D}(?P<day>[0-9]{{1,2}})([./-])(?P<month>[0-9]{{1,2}})\2(?P<year>[0-9]{{4}})(?![0-9]){_AFTER}", _date),
    (rf"{_D}(?P<year>[0-9]{{4}})([./-])(?P<month>[0-9]{{1,2}})\2(?P<day>[0-9]{{1,2}})(?![0-9]){_AFTER}", _date),
    (rf"(?<![0-9:]){_TIME} ?- ?{_TIME}(?![0-9:])", _hours),
    (rf"(?<![0-9:]){_TIME}(?::([0-5][0-9]))?(?![0-9:])(?:[ -]?(?P<case>{_CASE})(?![A-Za-zʻʼ]))?", _time),
    (r"(?<![0-9:])([0-9]{1,3}):([0-9]{1,3})(?![0-9:])", lambda m: f"{attached(whole(m[1]), 'ga')} {whole(m[2])}"),
    # Karl V, Pyotr I: one letter after a name; II. Jahon urushi: a dot before a numbered noun.
    (r"(?<=[a-zʻʼ]{3} )(?<!-)([IVX])(?![A-Za-zʻʼ.-]| [A-Z])", lambda m: ordinal(str(roman(m[1])))),
    (rf"\b((?:{_RULERS}|{_NUMBERED}) )([IVX])(?=\.(?![A-Za-z]))", lambda m: m[1] + ordinal(str(roman(m[2])))),
    (rf"(?<![A-Za-zʻʼ0-9-])({_NUMERAL})\. (?=(?i:{_NUMBERED}))", _dotted),
    (
        rf"(?<![A-Za-zʻʼ0-9-])({_NUMERAL})(?: ?- ?({_NUMERAL}))?(?!\.?[A-Za-zʻʼ])"
        rf"(?:[ -](?=({_NUMBERED}))|-(?=[a-z])| |(?=[^A-Za-z]|$))",
        _romans,
    ),
    (r"(?<![0-9A-Za-z.,-])([0-9]+(?: ?- ?[0-9]+){0,9})-([A-Za-z][A-Za-zʻʼ]*)", _numbered),
    (
        r"(?<![0-9A-Za-z.,])([12][0-9]{3})(?:(?: ?- ?|/)([12][0-9]{3}))? "
        rf"(?=(?:oʻquv |moliya )?yil(?:i|lar|lari)?{_CASE}?(?![A-Za-zʻʼ])(?! (?:{_NO_YEAR})))",
        _year,
    ),
    (
        rf"(?<![0-9A-Za-z.,])([0-9]{{1,2}})(?: ?- ?([0-9]{{1,2}}))? "
        rf"((?i:{_MONTH})(?:{_CASE}|i|ida|idan)?)(?![A-Za-zʻʼ])",
        lambda m: f"{_ordinals(m[1], m[2])} {m[3]}",
    ),
)
