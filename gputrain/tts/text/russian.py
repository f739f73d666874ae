"""Russian text normalisation: numbers, money, dates and abbreviations as words, in the nominative by default."""

import re
from collections.abc import Callable

from gputrain.tts.text.language import Language
from gputrain.tts.text.numerals import NUMBER, parse_number, roman
from gputrain.tts.text.russian_numbers import cardinal, counted, digit_by_digit, number, ordinal, whole
from gputrain.tts.text.unicode_cleanup import settled, unified

LETTERS = "абвгдежзийклмнопрстуфхцчшщъыьэюяё"
MONTHS = (
    "января", "февраля", "марта", "апреля", "мая", "июня", "июля", "августа", "сентября", "октября", "ноября",
    "декабря",
)  # fmt: skip
ABBREVIATIONS = {
    "т. е.": "то есть", "т. д.": "так далее", "т. п.": "тому подобное", "т. к.": "так как", "н. э.": "нашей эры",
    "др.": "другие", "пр.": "прочее", "г.": "год", "гг.": "годы", "руб.": "рублей", "коп.": "копеек",
    "млн": "миллионов", "млрд": "миллиардов", "тыс.": "тысяч", "см.": "смотри", "ул.": "улица", "им.": "имени",
    "проф.": "профессор", "акад.": "академик", "напр.": "например", "стр.": "страница", "тел.": "телефон",
    "гр.": "гражданин",
}  # fmt: skip
_NAMES = (
    "бэ", "вэ", "гэ", "дэ", "жэ", "зэ", "йот", "ка", "эль", "эм", "эн", "пэ", "эр", "эс", "тэ", "эф", "ха", "цэ", "че",
    "ша", "ща",
)  # fmt: skip
LETTER_NAMES = dict(zip("бвгджзйклмнпрстфхцчшщ", _NAMES, strict=True))
_MONEY = {
    "$": ("доллар", "доллара", "долларов"), "€": ("евро", "евро", "евро"), "₽": ("рубль", "рубля", "рублей"),
    "£": ("фунт", "фунта", "фунтов"), "руб.": ("рубль", "рубля", "рублей"), "руб": ("рубль", "рубля", "рублей"),
}  # fmt: skip
_UNITS = {
    "км": ("километр", "километра", "километров"), "м": ("метр", "метра", "метров"),
    "см": ("сантиметр", "сантиметра", "сантиметров"), "мм": ("миллиметр", "миллиметра", "миллиметров"),
    "кг": ("килограмм", "килограмма", "килограммов"), "г": ("грамм", "грамма", "граммов"),
    "мг": ("миллиграмм", "миллиграмма", "миллиграммов"), "л": ("литр", "литра", "литров"),
    "мл": ("миллилитр", "миллилитра", "миллилитров"),
    "км/ч": ("километр в час", "километра в час", "километров в час"), "%": ("процент", "процента", "процентов"),
    "°C": ("градус", "градуса", "градусов"), "°": ("градус", "градуса", "градусов"),
    "мин": ("минута", "минуты", "минут"), "млн": ("миллион", "миллиона", "миллионов"),
    "млрд": ("миллиард", "миллиарда", "миллиардов"), "тыс.": ("тысяча", "тысячи", "тысяч"),
}  # fmt: skip
_FEMININE = {"минута", "тысяча"}
_ENDINGS = {
    "го": "genitive", "ого": "genitive", "его": "genitive", "м": "prepositional", "ом": "prepositional",
    "я": "feminine",
    "ая": "feminine", "й": "nominative", "ый": "nominative", "ой": "nominative", "ий": "nominative", "е": "neuter",
    "ое": "neuter", "му": "dative", "ому": "dative", "х": "plural genitive", "ых": "plural genitive",
}  # fmt: skip
_YEARS = {"год": "nominative", "года": "genitive", "году": "prepositional", "годом": "instrumental", "г.": "nominative"}
_NUMBERED = {"век": "nominative", "века": "genitive", "веке": "prepositional", "в.": "nominative"}
_LATIN = {
    "sh": "ш", "ch": "ч", "zh": "ж", "kh": "х", "ya": "я", "yu": "ю", "th": "т", "ph": "ф", "oo": "у", "ee": "и",
    **dict(zip("abcdefghijklmnopqrstuvwxyz", "абкдефгхижклмнопкрстуввхиз", strict=True)), "x": "кс",
}  # fmt: skip
_LATIN_LETTERS = re.compile("|".join(sorted(_LATIN, key=len, reverse=True)))
_SAID = {"&": "и", "+": "плюс", "=": "равно", "№": "номер", "%": "процентов", "@": "собака", "§": "параграф"}
_START = r"(?<![0-9А-Яа-яЁёA-Za-z.,])"
_STOP = r"(?![А-Яа-яЁёA-Za-z])"


def _longest_first(words: dict[str, tuple[str, str, str]]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def _date(found: re.Match[str]) -> str:
    day, month = int(found["day"]), int(found["month"])
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    return f"{ordinal(day, 'neuter')} {MONTHS[month - 1]} {ordinal(int(found['year']), 'genitive')} года"


def _counted(found: re.Match[str], forms: tuple[str, str, str]) -> str:
    sign = {"-": "минус ", "+": "плюс "}.get(found[1][0], "")
    bare = found[1].lstrip("+- ")
    parsed = parse_number(bare, ",")
    if parsed.fraction:
        return f"{sign}{number(bare)} {forms[1]}"
    gender = "feminine" if forms[0] in _FEMININE else "masculine"
    return sign + counted(whole(parsed.whole, gender), parsed.whole, forms)


def _month(found: re.Match[str]) -> str:
    return f"{ordinal(int(found[1]), 'neuter')} {found[2]}"


def _year(found: re.Match[str]) -> str:
    return f"{ordinal(int(found[1]), _YEARS[found[2]])} {'год' if found[2] == 'г.' else found[2]}"


def _century(found: re.Match[str]) -> str:
    value = roman(found[1])
    said = "век" if found[2] == "в." else found[2]
    return f"{ordinal(value, _NUMBERED[found[2]])} {said}" if value else found[0]


def _time(found: re.Match[str]) -> str:
    minutes = int(found[2])
    rest = f" {digit_by_digit(found[2]) if minutes < 10 else cardinal(minutes)}" if minutes else " ноль ноль"
    return cardinal(int(found[1])) + rest


def _cyrillic(word: str) -> str:
    return _LATIN_LETTERS.sub(lambda found: _LATIN[found[0]], word.lower())


_RULES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        rf"{_START}(?P<day>[0-9]{{1,2}})([./])(?P<month>[0-9]{{1,2}})\2(?P<year>[0-9]{{4}})(?![0-9])"
        rf"(?: ?г(?:\.|ода)?{_STOP})?",
        _date,
    ),
    (rf"{_START}(?P<year>[0-9]{{4}})-(?P<month>[0-9]{{2}})-(?P<day>[0-9]{{2}})(?![0-9])", _date),
    (r"(?<![0-9:])([01]?[0-9]|2[0-4]):([0-5][0-9])(?![0-9:])", _time),
    (rf"{_START}([0-9]{{1,2}}) ({'|'.join(MONTHS)}){_STOP}", _month),
    (rf"{_START}([0-9]{{4}}) ?(года|году|годом|год|г\.){_STOP}", _year),
    (rf"(?<![A-Za-zА-я])([IVX]{{1,6}}) (веке|века|век|в\.){_STOP}", _century),
    (
        rf"{_START}([0-9]{{1,15}})-({'|'.join(sorted(_ENDINGS, key=len, reverse=True))}){_STOP}",
        lambda m: ordinal(int(m[1]), "plural" if m[2] == "е" and m[1].endswith("0") else _ENDINGS[m[2]]),
    ),
    (rf"([$€£₽]) ?({NUMBER})", lambda m: f"{m[2]} {m[1]}"),
    (rf"{_START}([+-]?{NUMBER}) ?({_longest_first(_MONEY)}){_STOP}", lambda m: _counted(m, _MONEY[m[2]])),
    (rf"{_START}([+-]?{NUMBER}) ?({_longest_first(_UNITS)}){_STOP}", lambda m: _counted(m, _UNITS[m[2]])),
    (
        r"(?<![0-9/.,])([0-9]{1,3})/([0-9]{1,3})(?![0-9/])",
        lambda m: (
            f"{cardinal(int(m[1]), 'feminine')} {ordinal(int(m[2]), 'feminine' if m[1] == '1' else 'plural genitive')}"
        ),
    ),
    (r"(?<=[0-9])-(?=[0-9])", lambda m: " - "),
    (rf"(?<![0-9A-Za-zА-я])([+-]?{NUMBER})", lambda m: number(m[1]) + " "),
    (r"[0-9]+", lambda m: f" {whole(m[0])} "),
    (r"[A-Za-z]+", lambda m: _cyrillic(m[0])),
    (
        rf"(?<![А-Яа-яЁё])([БВГДЖЗКЛМНПРСТФХЦЧШЩ]{{2,6}}){_STOP}",
        lambda m: " ".join(LETTER_NAMES[char] for char in m[1].lower()),
    ),
)
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)


# This pattern is for settled text, which has a space after every dot.
_ABBREVIATION = re.compile(
    rf"(?<![а-яё.-])(?:{'|'.join(re.escape(one) for one in sorted(ABBREVIATIONS, key=len, reverse=True))})(?![а-яё-])"
)


def _in_full(found: re.Match[str]) -> str:
    """Returns an abbreviation in words; its dot is kept at the end of the text."""
    ends = found[0].endswith(".") and not found.string[found.end() :].strip()
    return ABBREVIATIONS[found[0]] + "." * ends


def normalize(text: str) -> str:
    """Returns words of а to я and ё, in lower case; Latin words are transliterated to Cyrillic."""
    text = unified(text)
    for pattern, rule in _COMPILED:
        text = pattern.sub(rule, text)
    text = re.sub(f"[{re.escape(''.join(_SAID))}]", lambda found: f" {_SAID[found[0]]} ", text)
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
