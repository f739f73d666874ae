"""English money, units, percentages, fractions, telephone numbers, ranges, ratios and other numbers."""

import re

from gputrain.speech.text.english.abbreviations import STARTS
from gputrain.speech.text.english.numbers import (
    WORDS,
    cardinal,
    digit_by_digit,
    fraction,
    number,
    ordinal,
    plural,
    whole,
)
from gputrain.speech.text.language import NUMBER, any_of, final_dot, rewriter, with_prefixes

_SIGNS = {sign: names for sign, names in WORDS["money"].items() if not sign[0].isalpha() or sign == "US$"}
_CODES = {sign: names for sign, names in WORDS["money"].items() if sign not in _SIGNS}
_SCALE_WORDS = "thousand|million|billion|trillion"
_MAGNITUDE = rf"(?:(?P<short>{any_of(WORDS['magnitudes'])})(?![A-Za-z])| (?P<long>{_SCALE_WORDS})\b)?"
_POWERS: dict[str, str] = {
    pattern.replace("_", unit): f"{power} {WORDS['units'][unit]}"
    for unit in ("km", "m", "cm", "mm", "ft", "mi", "in.", "yd")
    for power, patterns in WORDS["powers"].items()
    for pattern in patterns
}
_UNITS: dict[str, str] = with_prefixes(WORDS["metric"], WORDS["prefixes"]) | WORDS["units"] | _POWERS
_BEFORE_NOUN = re.compile(r"\b(?i:an?|the|this|that|each|every|another|my|your|his|her|its|our|their) $")
_PER: dict[str, str] = WORDS["per"]
_SUFFIX = re.compile("-[a-z]")
_DESCRIBED = re.compile(rf" (?:{any_of(WORDS['described'])})s?\b")
_NOUN = re.compile(rf"[ -](?!(?i:{any_of(WORDS['after_units'])})\b)[A-Za-z]{{2}}")
# A, B and N alone are rather letters than units.
_UNIT = rf"(?P<unit>{any_of(_UNITS.keys() - {*'ABNb'})})(?:/(?P<per>{any_of(_PER)}))?(?![A-Za-z0-9])"
_LINK = r" ?- ?"  # Between the ends of a range; a dash of any length is a hyphen by now.
_FREE = r"(?<![0-9A-Za-z.,])"
_GROUPS = r"(?:\(?[0-9]{3}\)?[ -]?)?[0-9]{3}-[0-9]{4}"


def _plural(found: re.Match[str], name: str, words: str) -> str:
    """Returns the name of a unit after its number, in the singular before a noun: a ten-mile run, a $5 bill."""
    text, start, end = found.string, found.start(), found.end()
    is_joined = found.groupdict().get("link") == "-" or _DESCRIBED.match(text, end)
    if is_joined or (_BEFORE_NOUN.search(text, max(0, start - 10), start) and _NOUN.match(text, end)):
        return name
    return plural(name, words)


def _money(found: re.Match[str]) -> str:
    """Returns $1.99, $5-10, $40-$50, £5m, €2.5bn in words."""
    name, coin = _SIGNS[found["sign"]]
    scale = WORDS["magnitudes"].get(found["short"] or "", found["long"] or "")
    last = _sum(found, found["amount"], name, coin, scale)
    if not found["low"]:
        return last
    return f"{_sum(found, found['low'], name, coin, '') if found['again'] else number(found['low'])} to {last}"


def _sum(found: re.Match[str], amount: str, name: str, coin: str, scale: str) -> str:
    bare, _, cents = amount.partition(".")
    if scale or len(cents) != 2 or not bare:
        words = number(amount) + (f" {scale}" if scale else "")
        return f"{words} {_plural(found, name, words)}"
    counts = [(number(bare), name), (cardinal(int(cents)), coin)]
    said = [f"{words} {_plural(found, unit, words)}" for words, unit in counts if words != "zero"]
    return " ".join(said) or f"zero {plural(name, 'zero')}"


def _coded(found: re.Match[str]) -> str:
    name, coin = _CODES[found["code"]]
    scale = WORDS["magnitudes"].get(found["short"] or "", found["long"] or "")
    return _sum(found, found["amount"], name, coin, scale)


def _measure(found: re.Match[str]) -> str:
    """Returns 5 km/h, 20-25 °C, 100 m² in words; the unit is in the plural unless the last number is one."""
    words = number(found["amount"])
    first = f"{number(found['low'])} to " if found["low"] else ""
    scale = f" {found['long']}" if found["long"] else ""
    name = _UNITS[found["unit"]] + (f" per {_PER[found['per']]}" if found["per"] else "")
    return f"{first}{words}{scale} {_plural(found, name, words + scale)}{final_dot(found, STARTS, True)}"


def _telephone(found: re.Match[str]) -> str:
    """Returns a telephone number digit by digit, with a pause after each group."""
    groups = [digit_by_digit(digits) for digits in re.findall("[0-9]+", found[0])]
    return ("plus " if found[0].startswith("+") else "") + ", ".join(groups)


def _fraction(found: re.Match[str]) -> str:
    """Returns 3/4 as three quarters, 1 1/2 as one and a half."""
    above, below = int(found["above"]), int(found["below"])
    part, name = fraction(above, below), _UNITS.get(found["unit"] or "", "")
    if not found["mixed"]:
        return f"{part} {name}".rstrip()
    part = part.replace("one ", "a ", 1) if below in (2, 4) and above == 1 else part
    return f"{whole(found['mixed'])} and {part} {plural(name, part) if name else ''}".rstrip()


def _ordinal(found: re.Match[str]) -> str:
    return ordinal(int(found[1].replace(",", "")))


def _power(found: re.Match[str]) -> str:
    return {"2": " squared ", "3": " cubed "}.get(found[1], f" to the power of {found[1]} ")


def _hashtag(found: re.Match[str]) -> str:
    """Returns #MeToo as hashtag Me Too."""
    return "hashtag " + re.sub("(?<=[a-z])(?=[A-Z0-9])|_", " ", found[1])


rewrite = rewriter(
    # Powers, hashtags, and names of notes and programming languages: x^2, #MeToo, C#.
    (r"\^ ?\(?(-?[0-9]{1,9}|[a-z]\b)\)?", _power),
    (r"\b([A-Ga-gJ])#(?![A-Za-z0-9])", lambda m: f"{m[1]} sharp"),
    (r"(?<![A-Za-z0-9&])#([A-Za-z][A-Za-z0-9_]*)", _hashtag),
    # Ranges whose ends both have a sign: 5%-10%, 20°C-25°C.
    (r"(?:(?<=[%°])|(?<=°[CF])) ?- ?(?=[0-9])", lambda _: " to "),
    (rf"(?<![0-9/])(?:{any_of(WORDS['slashed'])})(?![0-9/])", lambda m: str(WORDS["slashed"][m[0]])),
    # Telephone numbers: +44 20 7946 0958, 1-800-555-0199, (212) 555-0123, 123-4567, call 911.
    (r"(?<![0-9A-Za-z])\+[0-9]{1,3}(?:[ -]?\(?[0-9]{2,4}\)?){2,5}(?![0-9])", _telephone),
    (rf"(?<![0-9A-Za-z.,$€£-])(?:1[ -])?{_GROUPS}(?![0-9-])", _telephone),
    (r"(?<=\b[Cc]all )[0-9]{3}\b|(?<=\b[Dd]ial )[0-9]{3}\b", _telephone),
    (r"(?<![0-9A-Za-z.,-])[0-9]{3}(?:-[0-9]{2}-[0-9]{4}|\.[0-9]{3}\.[0-9]{4})(?![0-9-])", _telephone),
    # Prices for a time: $20/mo.
    (rf"(?:(?<=[0-9])|(?<=[0-9][kKmMbB]))/({any_of(_PER)})(?![A-Za-z0-9])", lambda m: f" per {_PER[m[1]]}"),
    # Money: US$20, $5-10, $40-$50, £5m, €2.5bn, 20 USD.
    (
        rf"(?P<sign>{any_of(_SIGNS)}) ?(?:(?P<low>{NUMBER}){_LINK}(?P<again>(?P=sign))?(?=[0-9]))?"
        rf"(?P<amount>{NUMBER}){_MAGNITUDE}",
        _money,
    ),
    (rf"{_FREE}(?P<amount>{NUMBER}){_MAGNITUDE} ?(?P<code>{any_of(_CODES)})(?![A-Za-z])", _coded),
    # Fractions: 3/4, 1 1/2, 1/2 tsp.
    (
        r"(?<![0-9/.,])(?:(?P<mixed>[0-9]{1,3}) )?(?P<above>[0-9]{1,3})/(?P<below>[0-9]{1,4})(?![0-9/])"
        rf"(?: ?{_UNIT})?",
        _fraction,
    ),
    # Units, also after a range: 5'11", 20-25 °C, -5 °C, 3 million km.
    (
        r"(?<![0-9A-Za-z])([0-9])'([0-9]{1,2})(?:\"|'')",
        lambda m: f"{whole(m[1])} feet {whole(m[2])} {plural('inch', whole(m[2]))}",
    ),
    (
        rf"{_FREE}(?:(?P<low>[+-]?{NUMBER}){_LINK}(?=[0-9]))?(?P<amount>(?:(?<![0-9])[+-])?{NUMBER})"
        rf"(?: (?P<long>{_SCALE_WORDS}))?(?P<link>[ -]?){_UNIT}",
        _measure,
    ),
    (r"(?<![0-9A-Za-z.])([0-9]{1,3}(?:,[0-9]{3}){1,5}|[0-9]{1,9})(?i:st|nd|rd|th)\b", _ordinal),
    # Sections and versions: 4.2.1.
    (r"(?<![0-9.,])[0-9]{1,9}(?:\.[0-9]{1,9}){2,}(?![0-9])", lambda m: " point ".join(map(whole, m[0].split(".")))),
    # Division and subtraction before an equals sign, and sizes: 10:2=5, 10 - 4 = 6, 5x5.
    (r"(?<=[0-9]) ?: ?(?=[0-9]+ ?=)", lambda _: " divided by "),
    (r"(?<=[0-9]) ?- ?(?=[0-9]+ ?=)", lambda _: " minus "),
    (r"(?<=[0-9]) ?[xX] ?(?=[0-9])", lambda _: " by "),
    # Ranges, scores and ratios: 5-10, 5 - 7 days, 3-2, 16:9.
    (rf"(?<![0-9A-Za-z.,-])({NUMBER}){_LINK}({NUMBER})(?![0-9]|-[0-9])", lambda m: f"{number(m[1])} to {number(m[2])}"),
    (r"(?<![0-9:])([0-9]{1,4}):([0-9]{1,4})(?![0-9:])", lambda m: f"{whole(m[1])} to {whole(m[2])}"),
    (r"(?<![0-9A-Za-z.])\.([0-9]+)", lambda m: f"point {digit_by_digit(m[1])}"),
    # Capitals before digits are letters (MP3, H2O, A4), so they are set apart.
    (r"(?<![A-Za-z])([A-Z]{1,4})-?(?=[0-9])", lambda m: " ".join(m[1]).lower() + " " if len(m[1]) < 4 else m[0]),
    (r"(?<=[0-9])[xX](?![A-Za-z0-9])", lambda _: " times"),
    (rf"(?<![0-9A-Za-z])([+-]?{NUMBER})", lambda m: number(m[1]) + " " * (not _SUFFIX.match(m.string, m.end()))),
    (r"[0-9]+", lambda m: f" {whole(m[0])} "),
)
