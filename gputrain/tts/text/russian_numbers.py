"""Russian numbers in words: cardinals by gender, ordinals by case, and nouns that are counted."""

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
# Stem of an ordinal by the last word of the cardinal; the ending of most is -ый, of those in -о́й it is -ой.
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
    """The noun for a count: рубль for 1, рубля for 2 to 4, рублей for the rest."""
    if len(digits) > 1 and digits[-2] == "1":
        return forms[2]
    return forms[0] if digits[-1] == "1" else forms[1] if digits[-1] in "234" else forms[2]


def counted(words: str, digits: str, forms: tuple[str, str, str]) -> str:
    return f"{words} {form(digits, forms)}"


def cardinal(number: int, gender: str = "masculine") -> str:
    """The number in words in the nominative, below 10^21; a thousand and what follows it is said without `одна`."""
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
    """Ordinal in the masculine singular in a case, or `feminine`, `neuter` in the nominative, or `plural genitive`."""
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
    """Two thousandth: the count, in the genitive, grows into one word with its scale."""
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
    """Digits as one number, or one by one where they begin with 0 or are more than there are words for."""
    if len(digits) > 3 * len(_SCALES) or (len(digits) > 1 and digits.startswith("0")):
        return digit_by_digit(digits)
    return cardinal(int(digits), gender)


def number(written: str) -> str:
    """A number with its sign; decimals as целых, and десятых, сотых ..."""
    sign = {"-": "минус ", "+": "плюс "}.get(written[0], "")
    told = parse_number(written.lstrip("+- "), ",")
    if not told.fraction:
        return sign + whole(told.whole)
    words = f"{sign}{whole(told.whole, 'feminine')} {'целая' if _ends_in_one(told.whole) else 'целых'} "
    if len(told.fraction) >= len(_PARTS):
        return words + digit_by_digit(told.fraction)
    ending = "ая" if _ends_in_one(told.fraction) else "ых"
    return f"{words}{cardinal(int(told.fraction), 'feminine')} {_PARTS[len(told.fraction)]}{ending}"


def _ends_in_one(digits: str) -> bool:
    return form(digits, ("one", "few", "many")) == "one"
