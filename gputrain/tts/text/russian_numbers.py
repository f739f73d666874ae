"""Russian numbers in words: cardinals by gender, ordinals by case, and counted nouns."""

from gputrain.tts.text.numerals import parse_number

SMALL = (
    "ноль", "один", "два", "три", "четыре", "пять", "шесть", "семь", "восемь", "девять", "десять", "одиннадцать",
    "двенадцать", "тринадцать", "четырнадцать", "пятнадцать", "шестнадцать", "семнадцать", "восемнадцать",
    "девятнадцать",
)  # fmt: skip
TENS = (
    "-", "-", "двадцать", "тридцать", "сорок", "пятьдесят", "шестьдесят", "семьдесят", "восемьдесят", "девяносто",
)  # fmt: skip
HUNDREDS = (
    "-", "сто", "двести", "триста", "четыреста", "пятьсот", "шестьсот", "семьсот", "восемьсот", "девятьсот",
)  # fmt: skip
_SCALES = (
    ("", "", ""),
    ("тысяча", "тысячи", "тысяч"),
    *((name, name + "а", name + "ов") for name in ("миллион", "миллиард", "триллион", "квадриллион", "квинтиллион")),
)
_FEMININE = {"один": "одна", "два": "две"}
# Stem of an ordinal by the last word of the cardinal. Most end in -ый; the stressed ones end in -ой.
_STEMS = {
    "ноль": "нулев", "один": "перв", "два": "втор", "три": "трет", "четыре": "четвёрт", "пять": "пят", "шесть": "шест",
    "семь": "седьм", "восемь": "восьм", "девять": "девят", "сорок": "сороков", "девяносто": "девяност", "сто": "сот",
    "пятьдесят": "пятидесят", "шестьдесят": "шестидесят", "семьдесят": "семидесят", "восемьдесят": "восьмидесят",
    "двести": "двухсот", "триста": "трёхсот", "четыреста": "четырёхсот", "пятьсот": "пятисот", "шестьсот": "шестисот",
    "семьсот": "семисот", "восемьсот": "восьмисот", "девятьсот": "девятисот",
}  # fmt: skip
_STRESSED = {"нулев", "втор", "шест", "седьм", "восьм", "сороков"}
_ENDINGS = {
    "nominative": "ый", "genitive": "ого", "dative": "ому", "prepositional": "ом", "instrumental": "ым",
    "feminine": "ая", "neuter": "ое", "plural": "ые", "plural genitive": "ых",
}  # fmt: skip
_THIRD = {
    "nominative": "ий", "genitive": "ьего", "dative": "ьему", "prepositional": "ьем", "instrumental": "ьим",
    "feminine": "ья", "neuter": "ье", "plural": "ьи", "plural genitive": "ьих",
}  # fmt: skip
_BEFORE_SCALE = {
    "один": "", "два": "двух", "три": "трёх", "четыре": "четырёх", "пять": "пяти", "шесть": "шести", "семь": "семи",
    "восемь": "восьми", "девять": "девяти", "десять": "десяти",
}  # fmt: skip
_PARTS = ("", "десят", "сот", "тысячн", "десятитысячн", "стотысячн", "миллионн")


def form(digits: str, forms: tuple[str, str, str]) -> str:
    """Returns the form of a noun for a count: рубль for 1, рубля for 2 to 4, рублей for others."""
    if len(digits) > 1 and digits[-2] == "1":
        return forms[2]
    return forms[0] if digits[-1] == "1" else forms[1] if digits[-1] in "234" else forms[2]


def counted(words: str, digits: str, forms: tuple[str, str, str]) -> str:
    return f"{words} {form(digits, forms)}"


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
        words.append(_FEMININE.get(SMALL[rest], SMALL[rest]) if feminine else SMALL[rest])
    return words


def ordinal(number: int, case: str = "nominative") -> str:
    """Returns an ordinal: masculine singular in a case, or nominative `feminine`, `neuter` or `plural`, or
    `plural genitive`."""
    for power in range(len(_SCALES) - 1, 0, -1):
        if number and number % 1000**power == 0:
            return _ordinal_scale(number, power, case)
    *head, last = cardinal(number).split()
    if last == "три":
        return " ".join([*head, _STEMS[last] + _THIRD[case]])
    stem = _STEMS.get(last) or last.removesuffix("ь")
    ending = "ой" if stem in _STRESSED and case == "nominative" else _ENDINGS[case]
    return " ".join([*head, stem + ending])


def _ordinal_scale(number: int, power: int, case: str) -> str:
    """Returns an ordinal such as `two thousandth`: the count, in the genitive, and its scale form one word."""
    count = number // 1000**power % 1000
    above = number - count * 1000**power
    stem = ("тысячн" if power == 1 else _SCALES[power][0] + "н") + _ENDINGS[case]
    words = _below_thousand(count, False)
    if not set(words) <= _BEFORE_SCALE.keys():
        return f"{cardinal(number)}"
    grown = "".join(_BEFORE_SCALE[word] for word in words) + stem
    return f"{cardinal(above)} {grown}" if above else grown


def digit_by_digit(digits: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in digits)


def whole(digits: str, gender: str = "masculine") -> str:
    """Returns digits as one number, or digit by digit if they begin with 0 or exceed the largest scale."""
    if len(digits) > 3 * len(_SCALES) or (len(digits) > 1 and digits.startswith("0")):
        return digit_by_digit(digits)
    return cardinal(int(digits), gender)


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
