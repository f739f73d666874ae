"""Russian dates, years, centuries, other Roman numerals, ordinals with their endings, and times."""

import re

from gputrain.speech.text.language import CLOCK, any_of, final_dot, rewriter, roman, with_colons
from gputrain.speech.text.russian import grammar
from gputrain.speech.text.russian.abbreviations import STARTS
from gputrain.speech.text.russian.grammar import agreed_case, following_noun, governed, noun
from gputrain.speech.text.russian.numbers import WORDS, cardinal, compound, ordinal

MONTHS: list[str] = WORDS["months"]
_SHORT_MONTHS = {month[:length]: month for month in MONTHS for length in (3, 4) if length < len(month)}
_ENDINGS: dict[str, list[str]] = WORDS["written_endings"]
_CARDINAL_ENDINGS: dict[str, str] = WORDS["cardinal_endings"]
START = r"(?<![0-9А-Яа-яЁёA-Za-z.,])"
STOP = r"(?![А-Яа-яЁёA-Za-z])"
_ROMAN = r"[IVXLC]{1,8}"
_YEAR_WORDS = {"год": "nomn", "года": "gent", "году": "loct", "годом": "ablt", "годы": "nomn", "годов": "gent",
               "годам": "datv", "годах": "loct", "годами": "ablt"}  # fmt: skip
_CENTURY_WORDS = {"век": "nomn", "века": "gent", "веке": "loct", "веку": "datv", "веком": "ablt", "веков": "gent",
                  "веках": "loct", "веками": "ablt", "векам": "datv"}  # fmt: skip
_YEAR_FORMS = {"nomn": "год", "accs": "год", "gent": "года", "loct": "году", "datv": "году", "ablt": "годом"}
_YEARS_FORMS = {"nomn": "годы", "accs": "годы", "gent": "годов", "loct": "годах", "datv": "годам", "ablt": "годами"}
# What follows a number with a dot that is no time.
_NO_TIME = r"(?! ?(?:раз|руб|км|кг|м|см|мм|г|т|л|тыс|млн|млрд|балл|процент|градус|[%$€°])(?![а-яё]{4})|[0-9])"
_NUMBERED = frozenset(WORDS["numbered_nouns"])
_NOTHING_OR_DASH = re.compile(r"\W*$| [—-]")
_BEFORE_DATE = re.compile(r"([А-Яа-яЁё]+)[ —-]*$")


def _day_case(found: re.Match[str]) -> str:
    """Returns the case of a date: by its preposition; the nominative if it is named (сегодня 9 мая; 9 мая — праздник),
    otherwise the genitive, as an answer to the question when."""
    allowed = governed(found.string, found.start())
    if allowed:
        return "gent" if allowed[0] == "gent" else "accs" if "accs" in allowed else allowed[0]
    before = _BEFORE_DATE.search(found.string, max(0, found.start() - 30), found.start())
    is_bare = not found.string[: found.start()].strip() and _NOTHING_OR_DASH.match(found.string, found.end())
    has_year = "year" in found.groupdict() and found["year"]
    if (before and before[1].lower() in WORDS["date_is"]) or (is_bare and not has_year):
        return "nomn"
    return "gent"


def _dot(found: re.Match[str]) -> str:
    """Returns the dot of г. or в. if it also ends the sentence, which has a verb before if any capital follows."""
    return final_dot(found, STARTS, found[0].endswith(".") and grammar.has_verb(found.string, found.start()))


def _date(found: re.Match[str]) -> str:
    day, month = int(found["day"]), int(found["month"])
    if not (1 <= day <= 31 and 1 <= month <= 12):
        return found[0]
    year = ordinal(int(found["year"]), "masc", "gent")
    return f"{ordinal(day, 'neut', _day_case(found))} {MONTHS[month - 1]} {year} года{_dot(found)}"


def _named_date(found: re.Match[str]) -> str:
    """Returns 21 мая 2024 г., с 1 по 10 мая, 1-10 мая in words."""
    case = _day_case(found)
    said = f"{ordinal(int(found['day']), 'neut', case)} {found['month']}"
    if found["first"]:
        first = "gent" if found["link"] == " по " or case == "gent" else case
        link = " - " if "-" in found["link"] else found["link"]
        last = ordinal(int(found["day"]), "neut", "accs" if found["link"] == " по " else first)
        said = f"{ordinal(int(found['first']), 'neut', first)}{link}{last} {found['month']}"
    return f"{said} {ordinal(int(found['year']), 'masc', 'gent')} года{_dot(found)}" if found["year"] else said


def _year(found: re.Match[str]) -> str:
    """Returns 1941-1945 гг., в 2024 г., 1991 год in words."""
    first, last, word = found[1], found[2], found[3]
    forms = _YEARS_FORMS if last else _YEAR_FORMS
    allowed = governed(found.string, found.start())
    if word in ("г.", "гг."):
        case = (
            "loct" if "loct" in allowed and allowed[0] == "accs" and not _is_motion(found) else (allowed or ["nomn"])[0]
        )
        if not allowed and _depends(found):
            case = "gent"
        word = forms[case] + _dot(found)
        if not last and (int(first) < 1000 or case == "nomn") and _is_weight(found):
            return found[0].replace("г.", "г")
    else:
        case = _YEAR_WORDS[word]
        if word == "году" and allowed[:1] == ["datv"]:
            case = "datv"
    said = [ordinal(int(year), "masc", case) for year in (first, last) if year]
    return f"{' - '.join(said)} {word}"


def _is_weight(found: re.Match[str]) -> bool:
    """Returns True before a noun in the genitive that has a weight: 500 г. муки, but 988 г. рождения."""
    after = re.match(" ([а-яё]+)", found.string[found.end() : found.end() + 30])
    if after is None or after[1] in WORDS["of_a_year"] or not grammar.is_noun(after[1]):
        return False
    weighed = noun(after[1])
    return weighed is not None and "gent" in weighed.singular | weighed.plural


def _depends(found: re.Match[str]) -> bool:
    """Returns True after a noun, on which the date depends: в конце XIX в., летом 1990 г."""
    before = re.search(r"([А-ЯЁа-яё]+) $", found.string[max(0, found.start() - 30) : found.start()])
    return before is not None and (grammar.is_noun(before[1].lower()) or before[1].lower() == "зимой")


def _from_year(found: re.Match[str]) -> str:
    word = "годы" if found[4] in ("годы", "гг.") else "год"
    return f"{found[1]} {ordinal(int(found[2]), 'masc', 'gent')} по {ordinal(int(found[3]))} {word}{_dot(found)}"


def _is_motion(found: re.Match[str]) -> bool:
    """Returns True for на 2024 г., which is an accusative, unlike в 2024 г."""
    return re.search(r"(?:^|[^А-Яа-яё])[Нн]а $", found.string[max(0, found.start() - 5) : found.start()]) is not None


def _decade(found: re.Match[str]) -> str:
    """Returns 1990-х гг., 90-е годы in words."""
    case = {"е": "nomn", "х": "gent", "ых": "gent", "ые": "nomn", "м": "datv", "ми": "ablt"}[found[2]]
    allowed = governed(found.string, found.start())
    in_years = case == "gent" and "loct" in allowed
    word = _YEARS_FORMS["loct" if in_years else case] if found[3] == "гг." else found[3]
    return f"{ordinal(int(found[1]), 'plur', case)} {word}{_dot(found)}"


def _case_of_century(found: re.Match[str]) -> str:
    allowed = governed(found.string, found.start())
    return "loct" if "loct" in allowed else (allowed or ["gent" if _depends(found) else "nomn"])[0]


def _century(found: re.Match[str]) -> str:
    """Returns XIX в., в XVI-XVII вв., конец XVIII века, 21 век in words."""
    numbers = [
        roman(numeral) or (int(numeral) if numeral.isdigit() else 0) for numeral in (found[1], found[2]) if numeral
    ]
    if not all(numbers) or (found[1].isdigit() and len(numbers) == 1 and found[3] in ("веков", "веками", "веках")):
        return found[0]  # 2 веков is a count.
    word = found[3]
    if word in ("в.", "вв."):
        case = _case_of_century(found)
        word = grammar.inflected("век", case, "plur" if len(numbers) > 1 else "sing")
        word += _dot(found)
    else:
        case = _CENTURY_WORDS[word]
        if word == "века" and len(numbers) > 1:
            case = "nomn"
    return f"{' - '.join(ordinal(number, 'masc', case) for number in numbers)} {word}"


def _after_name(found: re.Match[str]) -> str:
    """Returns a Roman numeral after a noun, with which it agrees: Людовик XIV, при Николае II, часть II."""
    value, before = roman(found[2]), noun(found[1].lower())
    is_name = found[1][0].isupper()
    if not value or before is None or before.gender == "plur" or (len(found[2]) == 1 and not is_name):
        known = before is not None and before.gender != "plur" and value and found[1].lower() in _NUMBERED
        if not known:
            return found[0]
    assert before is not None
    case = agreed_case(found.string, found.start(), before.singular)
    return f"{found[1]} {ordinal(value, before.gender, case)}"


def _before_noun(found: re.Match[str]) -> str:
    """Returns a Roman numeral before a noun, with which it agrees: II Мировая война, в I квартале."""
    value, after = roman(found[1]), following_noun(found.string, found.end())
    if not value or after is None:
        return ordinal(value) if value and len(found[1]) > 1 and set(found[1]) <= set("IVX") else found[0]
    if after.singular:
        return ordinal(value, after.gender, agreed_case(found.string, found.start(), after.singular))
    return ordinal(value, "plur", agreed_case(found.string, found.start(), after.plural))


def _with_ending(found: re.Match[str]) -> str:
    """Returns a number with its written ending: 5-го, 3-й улицы, 2-х, 5-ти, 10-ю."""
    number, ending = int(found[1]), found[2]
    after = following_noun(found.string, found.end())
    allowed = governed(found.string, found.start())
    if ending in ("х", "ух", "ёх", "рёх", "рех") and 2 <= number <= 4:
        return cardinal(number, "masc", "loct" if allowed and "loct" in allowed else "gent")
    if ending in _CARDINAL_ENDINGS:
        return cardinal(number, "masc", _CARDINAL_ENDINGS[ending])
    if ending == "ю" and (allowed[:1] == ["gent"] or (number >= 5 and not allowed)):
        return cardinal(number, "masc", "ablt")
    gender, case = _ENDINGS[ending]
    if ending in ("й", "ой") and after and after.gender == "femn" and "nomn" not in after.singular - {"accs"}:
        return ordinal(number, "femn", agreed_case(found.string, found.start(), after.singular - {"accs", "nomn"}))
    if ending == "м" and "ablt" in allowed and "loct" not in allowed:
        case = "ablt"
    if ending == "е" and ((number % 10 == 0 and number > 10) or (after and not after.singular)):
        gender = "plur"
    if ending in ("х", "ых") and "loct" in allowed:
        case = "loct"
    return ordinal(number, gender, case)


def _compound(found: re.Match[str]) -> str:
    """Returns 20-летний, 2-комнатная, 100-летие as one word."""
    return compound(int(found[1])) + found[2]


def _percent_adjective(found: re.Match[str]) -> str:
    endings = {"й": "ый", "го": "ого", "му": "ому", "м": "ом", "я": "ая", "е": "ое", "ю": "ую", "х": "ых", "ми": "ыми"}
    return f"{compound(int(found[1]))}процентн{endings[found[2]]}"


def _time(found: re.Match[str]) -> str:
    """Returns 14:05 as четырнадцать ноль пять, in the case of its preposition."""
    hours, minutes = int(found[1]), found[2]
    case = (governed(found.string, found.start()) or ["nomn"])[0]
    if minutes == "00":
        return f"{cardinal(hours, 'masc', case)} ноль ноль"
    zero = "ноль " if minutes[0] == "0" else ""
    return f"{cardinal(hours, 'masc', case)} {zero}{cardinal(int(minutes), 'masc', case)}"


_MONTH = "|".join(MONTHS)
rewrite = rewriter(
    (rf"(?<=[0-9] )({any_of(_SHORT_MONTHS)})\.", lambda m: _SHORT_MONTHS[m[1]] + final_dot(m, STARTS)),
    (r"(?<=-[йя] )пол\.(?= [XVI])", lambda m: "половине" if m.string[m.start() - 2] == "й" else "половина"),
    # Times with a dot: в 18.30, с 9.00 до 18.00.
    (rf"(?<![А-Яа-яЁё])(?i:в|во|с|до|к|около|после|на) {CLOCK}(?<!\.0[1-46-9]){_NO_TIME}", with_colons),
    (
        rf"{START}(?P<day>[0-9]{{1,2}})([./])(?P<month>[0-9]{{1,2}})\2(?P<year>[0-9]{{4}})(?![0-9])"
        rf"(?: ?г(?:\.|ода)?{STOP})?",
        _date,
    ),
    (rf"{START}(?P<year>[0-9]{{4}})-(?P<month>[0-9]{{2}})-(?P<day>[0-9]{{2}})(?![0-9])", _date),
    (
        rf"{START}(?:(?P<first>[0-9]{{1,2}})(?P<link> ?- ?| по | и ))?(?P<day>[0-9]{{1,2}}) (?P<month>{_MONTH}){STOP}"
        rf"(?: (?P<year>[0-9]{{4}})(?: ?(?:года|г\.?){STOP}| ?(?=[,;)]|$)))?",
        _named_date,
    ),
    (rf"{START}([0-9]{{1,3}})%-(й|го|му|м|я|е|ю|х|ми){STOP}", _percent_adjective),
    # С 2010 по 2020 год: the first year is in the genitive, the second in the accusative.
    (rf"(?<![А-Яа-яЁё])([Сс]) ([0-9]{{4}}) по ([0-9]{{4}}) (год|годы|г\.|гг\.){STOP}", _from_year),
    # Years: 1941-1945 гг., в 2024 г., 2024 год, в 44 г. до н. э.
    (rf"{START}([0-9]{{3,4}})(?: ?- ?([0-9]{{3,4}}))? ?({any_of(_YEAR_WORDS)}|гг?\.){STOP}", _year),
    (rf"{START}([0-9]{{1,2}})(?: ?- ?([0-9]{{1,2}}))? ?(гг?\.)(?= (?:до )?нашей эры)", _year),
    (rf"{START}([0-9]{{2,4}})-(е|ые|х|ых|м|ми) (гг\.|год[а-я]*){STOP}", _decade),
    # Centuries and other Roman numerals: с XV по XVII в., в конце XIX - начале XX в.
    (
        rf"(?<![A-Za-zА-яё-])({_ROMAN})(?= (?:- [а-яё]+|по|и|или|до) {_ROMAN} вв?\.)",
        lambda m: ordinal(roman(m[1]), "masc", _case_of_century(m)) if roman(m[1]) else m[0],
    ),
    (
        rf"(?<![A-Za-zА-яё])({_ROMAN}|[0-9]{{1,2}})(?: ?- ?({_ROMAN}|[0-9]{{1,2}}))? "
        rf"({any_of(_CENTURY_WORDS)}|вв?\.){STOP}",
        _century,
    ),
    (rf"(?<![А-ЯЁа-яё])([А-ЯЁа-яё][а-яё]+) ({_ROMAN})(?!\.?[A-Za-zА-яё])(?! [а-яёА-Я]+(?:ая|ий|ый|ое) )", _after_name),
    (rf"(?<![A-Za-zА-яё-])({_ROMAN})(?=[ -][А-Яа-яё])", _before_noun),
    # 3-й улицы, 2-х, 5-ти; 20-летний.
    (rf"{START}([0-9]{{1,15}})-({any_of([*_ENDINGS, *_CARDINAL_ENDINGS])}){STOP}", _with_ending),
    (rf"{START}([0-9]{{1,6}})-([а-яё]{{4,}})", _compound),
    (r"(?<![0-9:])([01]?[0-9]|2[0-4]):([0-5][0-9])(?![0-9:])", _time),
)
