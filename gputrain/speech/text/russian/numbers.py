"""Russian numbers in words: cardinals and ordinals by case and gender, counted nouns, fractions.

Cases and genders have the names of OpenCorpora: nomn, gent, datv, accs, ablt, loct; masc, femn, neut, plur.
"""

from collections.abc import Sequence

from gputrain.config import read_table
from gputrain.speech.text.language import is_spoken_whole, parse_number

WORDS = read_table("gputrain.speech.text", "russian.yaml")
SMALL, TENS, HUNDREDS = (list[str](WORDS[name]) for name in ("small", "tens", "hundreds"))
CASES = ("nomn", "gent", "datv", "accs", "ablt", "loct")
_SCALES: list[list[str]] = WORDS["scales"]
_STEMS, _BEFORE_SCALE, _PARTS = WORDS["ordinal_stems"], WORDS["before_scale"], WORDS["decimal_stems"]
_DECLINED: dict[str, list[str]] = WORDS["declined"]
_OBLIQUE = ("gent", "datv", "ablt", "loct")


def form(digits: str, forms: Sequence[str]) -> str:
    """Returns the form of a noun for a count: рубль for 1, рубля for 2 to 4, рублей for others."""
    if len(digits) > 1 and digits[-2] == "1":
        return forms[2]
    return forms[0] if digits[-1] == "1" else forms[1] if digits[-1] in "234" else forms[2]


def cardinal(number: int, gender: str = "masc", case: str = "nomn") -> str:
    """Returns a number below 10^21 in words; 1000 to 1999 begin without `одна`."""
    if number == 0:
        return _declined(SMALL[0], case)
    words: list[str] = []
    for power in reversed(range(len(_SCALES))):
        count = number // 1000**power % 1000
        if not count:
            continue
        words += [
            _declined(word, case)
            for word in _below_thousand(count, ("femn" if power == 1 else "masc") if power else gender)
        ]
        if power:
            words.append(_scale(count, power, case))
    if number // 1000 == 1:
        del words[0]
    return " ".join(words)


def _below_thousand(count: int, gender: str) -> list[str]:
    words = [HUNDREDS[count // 100]] if count >= 100 else []
    rest = count % 100
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    if rest:
        by_gender = {(1, "femn"): "одна", (1, "neut"): "одно", (2, "femn"): "две"}
        words.append(by_gender.get((rest, gender), SMALL[rest]))
    return words


def _scale(count: int, power: int, case: str) -> str:
    """Returns тысяча, миллион, ... for a count in a case."""
    if case not in _OBLIQUE:
        said = form(str(count), _SCALES[power])
        return "тысячу" if case == "accs" and said == "тысяча" else said
    place, is_plural = _OBLIQUE.index(case), form(str(count), ("one", "few", "many")) != "one"
    if power == 1:
        return str(WORDS["thousand_cases"][is_plural][place])
    return _SCALES[power][0] + str(WORDS["million_endings"][is_plural][place])


def _declined(word: str, case: str) -> str:
    """Returns a word of a cardinal in a case: пять, пяти, пятью; пятьдесят, пятидесяти; пятьсот, пятистам."""
    if case not in _OBLIQUE:
        return "одну" if case == "accs" and word == "одна" else word
    place = _OBLIQUE.index(case)
    if word in _DECLINED:
        return _DECLINED[word][place]
    if word.endswith("сот"):
        return _declined(word.removesuffix("сот"), case) + ("сот", "стам", "стами", "стах")[place]
    if word.endswith("десят"):
        return _declined(word.removesuffix("десят"), case) + ("десяти", "десяти", "десятью", "десяти")[place]
    return word.removesuffix("ь") + ("и", "и", "ью", "и")[place]


def ordinal(number: int, gender: str = "masc", case: str = "nomn") -> str:
    """Returns an ordinal: only its last word is declined."""
    for power in range(len(_SCALES) - 1, 0, -1):
        if number and number % 1000**power == 0:
            return _ordinal_scale(number, power, WORDS["ordinal_endings"][gender][CASES.index(case)])
    *head, last = cardinal(number).split()
    if last == "три":
        return " ".join([*head, _STEMS[last] + WORDS["ordinal_endings_of_third"][gender][CASES.index(case)]])
    stem = _STEMS.get(last) or last.removesuffix("ь")
    ending = WORDS["ordinal_endings"][gender][CASES.index(case)]
    is_stressed = stem in WORDS["stressed_stems"] and ending == "ый"
    return " ".join([*head, stem + ("ой" if is_stressed else ending)])


def _ordinal_scale(number: int, power: int, ending: str) -> str:
    """Returns an ordinal such as `two thousandth`: the count, in the genitive, and its scale form one word."""
    count = number // 1000**power % 1000
    above = number - count * 1000**power
    words = _below_thousand(count, "masc")
    if not set(words) <= _BEFORE_SCALE.keys():
        return cardinal(number)
    grown = (
        "".join(_BEFORE_SCALE[word] for word in words) + ("тысячн" if power == 1 else _SCALES[power][0] + "н") + ending
    )
    return f"{cardinal(above)} {grown}" if above else grown


def compound(number: int) -> str:
    """Returns the first part of a compound: двадцатипяти in двадцатипятилетний, сто in столетие."""
    parts = cardinal(number, case="gent").split()
    return "".join(WORDS["compound_parts"].get(part, part) for part in parts)


def digit_by_digit(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)


def whole(digits: str, gender: str = "masc", case: str = "nomn") -> str:
    """Returns digits as one number, or digit by digit if they begin with 0 or exceed the largest scale."""
    return cardinal(int(digits), gender, case) if is_spoken_whole(digits, _SCALES) else digit_by_digit(digits)


def number(written: str, gender: str = "masc", case: str = "nomn") -> str:
    """Returns a number with its sign; decimals have целых and десятых, сотых and so on, all in the case."""
    sign = {"-": "минус ", "+": "плюс "}.get(written[0], "")
    parsed = parse_number(written.lstrip("+- "), ",")
    if not parsed.fraction:
        return sign + whole(parsed.whole, gender, case)
    words = f"{sign}{whole(parsed.whole, 'femn', case)} цел{_part_ending(parsed.whole, case)} "
    if len(parsed.fraction) >= len(_PARTS):
        return words + digit_by_digit(parsed.fraction)
    part = _PARTS[len(parsed.fraction)] + _part_ending(parsed.fraction, case)
    return f"{words}{cardinal(int(parsed.fraction), 'femn', case)} {part}"


def _part_ending(digits: str, case: str) -> str:
    """Returns the ending of целая, целых, десятых, ...: singular after one, else the genitive for the nominative."""
    if _ends_in_one(digits):
        return str(WORDS["ordinal_endings"]["femn"][CASES.index(case)])
    return str(WORDS["ordinal_endings"]["plur"][CASES.index("gent" if case in ("nomn", "accs") else case)])


def fraction(above: int, below: int) -> str:
    """Returns одна вторая, три четвёртых, двадцать одна сотая."""
    part = ordinal(below, "femn") if _ends_in_one(str(above)) else ordinal(below, "plur", "gent")
    return f"{cardinal(above, 'femn')} {part}"


def _ends_in_one(digits: str) -> bool:
    return form(digits, ("one", "few", "many")) == "one"
