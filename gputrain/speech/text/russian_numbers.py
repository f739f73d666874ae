"""Russian numbers in words: cardinals by gender, ordinals by case, and counted nouns."""

from collections.abc import Sequence

from gputrain.config import read_table
from gputrain.speech.text.numerals import is_spoken_whole, parse_number

WORDS = read_table("gputrain.speech.text", "russian.yaml")
SMALL, TENS, HUNDREDS = (list[str](WORDS[name]) for name in ("small", "tens", "hundreds"))
_SCALES: list[list[str]] = WORDS["scales"]
_STEMS, _BEFORE_SCALE, _PARTS = WORDS["ordinal_stems"], WORDS["before_scale"], WORDS["decimal_stems"]


def form(digits: str, forms: Sequence[str]) -> str:
    """Returns the form of a noun for a count: рубль for 1, рубля for 2 to 4, рублей for others."""
    if len(digits) > 1 and digits[-2] == "1":
        return forms[2]
    return forms[0] if digits[-1] == "1" else forms[1] if digits[-1] in "234" else forms[2]


def cardinal(number: int, gender: str = "masculine") -> str:
    """Returns a number below 10^21 in words, in the nominative; 1000 to 1999 begin without `одна`."""
    if number == 0:
        return SMALL[0]
    words: list[str] = []
    for power in reversed(range(len(_SCALES))):
        count = number // 1000**power % 1000
        if not count:
            continue
        feminine = power == 1 or (power == 0 and gender == "feminine")
        words += _below_thousand(count, feminine)
        if power:
            words.append(form(str(count), _SCALES[power]))
    said = " ".join(words)
    return said.removeprefix("одна ") if number // 1000 == 1 else said


def _below_thousand(count: int, feminine: bool) -> list[str]:
    words = [HUNDREDS[count // 100]] if count >= 100 else []
    rest = count % 100
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    if rest:
        words.append(WORDS["feminine_numbers"].get(SMALL[rest], SMALL[rest]) if feminine else SMALL[rest])
    return words


def ordinal(number: int, case: str = "nominative") -> str:
    """Returns an ordinal: masculine in a case, or `feminine`, `neuter`, `plural`, or `plural genitive`."""
    for power in range(len(_SCALES) - 1, 0, -1):
        if number and number % 1000**power == 0:
            return _ordinal_scale(number, power, case)
    *head, last = cardinal(number).split()
    if last == "три":
        return " ".join([*head, _STEMS[last] + WORDS["ordinal_endings_of_third"][case]])
    stem = _STEMS.get(last) or last.removesuffix("ь")
    is_stressed = stem in WORDS["stressed_stems"] and case == "nominative"
    ending = "ой" if is_stressed else WORDS["ordinal_endings"][case]
    return " ".join([*head, stem + ending])


def _ordinal_scale(number: int, power: int, case: str) -> str:
    """Returns an ordinal such as `two thousandth`: the count, in the genitive, and its scale form one word."""
    count = number // 1000**power % 1000
    above = number - count * 1000**power
    stem = ("тысячн" if power == 1 else _SCALES[power][0] + "н") + WORDS["ordinal_endings"][case]
    words = _below_thousand(count, False)
    if not set(words) <= _BEFORE_SCALE.keys():
        return cardinal(number)
    grown = "".join(_BEFORE_SCALE[word] for word in words) + stem
    return f"{cardinal(above)} {grown}" if above else grown


def digit_by_digit(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)


def whole(digits: str, gender: str = "masculine") -> str:
    """Returns digits as one number, or digit by digit if they begin with 0 or exceed the largest scale."""
    return cardinal(int(digits), gender) if is_spoken_whole(digits, _SCALES) else digit_by_digit(digits)


def number(written: str) -> str:
    """Returns a number with its sign; decimals are said as целых and десятых, сотых and so on."""
    sign = {"-": "минус ", "+": "плюс "}.get(written[0], "")
    parsed = parse_number(written.lstrip("+- "), ",")
    if not parsed.fraction:
        return sign + whole(parsed.whole)
    words = f"{sign}{whole(parsed.whole, 'feminine')} {'целая' if _ends_in_one(parsed.whole) else 'целых'} "
    if len(parsed.fraction) >= len(_PARTS):
        return words + digit_by_digit(parsed.fraction)
    ending = "ая" if _ends_in_one(parsed.fraction) else "ых"
    return f"{words}{cardinal(int(parsed.fraction), 'feminine')} {_PARTS[len(parsed.fraction)]}{ending}"


def _ends_in_one(digits: str) -> bool:
    return form(digits, ("one", "few", "many")) == "one"
