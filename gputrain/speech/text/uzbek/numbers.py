"""Uzbek numbers in words."""

import re

from gputrain.speech.text.numerals import NUMBER, is_spoken_whole, parse_number
from gputrain.speech.text.uzbek.letters import WORDS

UNITS, TENS, SCALES, PARTS = (list[str](WORDS[name]) for name in ("units", "tens", "scales", "decimal_parts"))

# Suffixes that are part of the number's word: 5ta, 10-dan, 100ga, 3-chi, 2talik.
SUFFIX = (
    r"(?:(?:i?nchi|chi)(?:si)?(?:lar)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|ta(?:si|lik|cha|dan)?(?:lar)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|l(?:ar|ik|ab|i)(?:i)?(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|si(?:ni(?:ng)?|ga(?:cha)?|da(?:n|gi)?)?"
    r"|ni(?:ng|ki)?|[gkq]a(?:cha)?|da(?:n|gi|y|k)?|dek|cha|mi)"
)
# 5, -5, 5-10, -5...-7; a dash before a space (Narxi - 500) or after another sign (5%-10%) is no minus.
AMOUNT = rf"(?<![0-9A-Za-z.,])(?:(?<![^\s(«=])[+-])?{NUMBER}(?:(?:-| - |\.{{2,3}}){NUMBER}|\.{{2,3}}[+-]{NUMBER})?"


def cardinal(number: int) -> str:
    """Returns a number below 10^21 in words.

    `bir` is also said before yuz and ming, unless nothing else follows: bir yuz bir, but yuz, ming and yuz ming.
    """
    if number == 0:
        return UNITS[0]
    words: list[str] = []
    for power in reversed(range(len(SCALES))):
        count = number // 1000**power % 1000
        if count:
            words += [*_below_thousand(count), SCALES[power]]
    said = " ".join(word for word in words if word)
    first, _, rest = said.partition(" ")
    bare = set(rest.split()) <= set(SCALES) | {"yuz"} and rest.startswith(("yuz", "ming"))
    return rest if first == UNITS[1] and bare else said


def _below_thousand(count: int) -> list[str]:
    hundreds, tens, units = count // 100, count // 10 % 10, count % 10
    words = [UNITS[hundreds], "yuz"] if hundreds else []
    return words + [TENS[tens]] * (tens > 0) + [UNITS[units]] * (units > 0)


def digit_by_digit(digits: str) -> str:
    return " ".join(UNITS[int(digit)] for digit in digits)


def whole(digits: str) -> str:
    """Returns digits as one number, or digit by digit if they begin with 0 or exceed the largest scale."""
    return cardinal(int(digits)) if is_spoken_whole(digits, SCALES) else digit_by_digit(digits)


def ordinal(digits: str) -> str:
    return ordinal_of(whole(digits))


def ordinal_of(words: str) -> str:
    """Adds -nchi after a vowel and -inchi after a consonant: ikkinchi, beshinchi."""
    return words + ("nchi" if words.endswith(("a", "i")) else "inchi")


def decimal(whole_words: str, fraction: str) -> str:
    """Returns a decimal number with `butun` and tenths to millionths; beyond these, digit by digit."""
    if len(fraction) >= len(PARTS):
        return f"{whole_words} butun {digit_by_digit(fraction)}"
    return f"{whole_words} butun {PARTS[len(fraction)]}dan {cardinal(int(fraction))}"


def number(written: str) -> str:
    """Returns a match of NUMBER in words."""
    parsed = parse_number(written, ",")
    return decimal(whole(parsed.whole), parsed.fraction) if parsed.fraction else whole(parsed.whole)


def amount(written: str) -> str:
    """Returns a match of AMOUNT in words: a number with or without a sign, or a range of two."""
    first, _, last = re.sub(r"(?<=[0-9]) ?(?:-|\.{2,3}) ?(?=[0-9+-])", "|", written, count=1).partition("|")
    return joined(_signed(first), _signed(last)) if last else _signed(first)


def _signed(written: str) -> str:
    sign = {"-": "minus ", "+": "plyus "}.get(written[0], "")
    return sign + number(written.lstrip("+- ").strip())


def joined(first: str, last: str) -> str:
    """Joins the ends of a range: besh-oʻn; with a pause if an end has several words."""
    return f"{first} - {last}" if " " in first + last else f"{first}-{last}"


def attached(words: str, suffix: str) -> str:
    """Adds a suffix to number words by the rules of spelling: ellik + ga is ellikka, qirq + ga is qirqqa."""
    suffix = re.sub(r"^[kq]a", "ga", suffix.lower())
    for ending in ("inchi", "nchi", "chi"):
        if suffix.startswith(ending):
            return ordinal_of(words) + suffix.removeprefix(ending)
    if suffix.startswith("ta") and words.endswith("bir"):
        return words[:-1] + "t" + suffix  # bitta, oʻn bitta
    if suffix.startswith("si"):
        return ordinal_of(words) + suffix
    if suffix.startswith("ga") and words.endswith(("k", "q")):
        return words + words[-1] + suffix[1:]
    return words + suffix
