"""Russian money, units, fractions, telephone numbers, ratios and other numbers, in the case that the sentence needs."""

import re
from collections.abc import Sequence

from gputrain.speech.text.language import NUMBER, any_of, parse_number, rewriter, with_prefixes
from gputrain.speech.text.russian import grammar
from gputrain.speech.text.russian.dates import START, STOP
from gputrain.speech.text.russian.numbers import WORDS, form, fraction, number, ordinal, whole

_MONEY, _MAGNITUDES = WORDS["money"], WORDS["magnitudes"]
_POWERS = {f"{unit}{power}": f"{adjective} {WORDS['units'][unit]}"
           for unit in ("мм", "см", "дм", "м", "км") for power, adjective in WORDS["powers"].items()}  # fmt: skip
_UNITS = with_prefixes(WORDS["metric"], WORDS["prefixes"]) | WORDS["units"] | _POWERS
# "5 с" is seconds, and "5 с половиной" or "5 с друзьями" a preposition, as in "глава 5 об этом".
_UNIT = any_of(_UNITS.keys() - {*"БбНс", "об"}) + r"|с(?! [а-яё]*(?:[оеёыи]м|[оеё][йю]|ью|ми)\b)|об(?! [а-яё])"
_FEMININE = frozenset(WORDS["feminine_nouns"])
_AMOUNT = rf"(?P<first>(?:(?<![^\s(«=])[+-])?{NUMBER})(?: ?- ?(?P<last>{NUMBER}))?"
_SCALE = rf"(?: ?(?P<scale>{any_of(_MAGNITUDES)})\.?(?![А-Яа-яЁё]))?"
# The dot of an abbreviation, unless it ends the sentence; and what the amount is divided by.
_DOT = r"(?:\.(?= ?[а-яё0-9,;:)/]| [А-ЯЁ]{2}))?"
_PER = rf"(?![А-Яа-яЁёA-Za-z0-9]){_DOT}(?:/(?P<per>{any_of(WORDS['per'])})(?![А-Яа-яЁёA-Za-z0-9]){_DOT})?"
_SCALED = re.compile("(?i:соотно|отноше|пропорц|масштаб)[а-яё]* $")
_AWAY = re.compile(r" (?:от|к|южнее|севернее|западнее|восточнее)\b")


def _numbers(found: re.Match[str], gender: str, case: str) -> str:
    """Returns one number, or the ends of a range, in words."""
    ends = [end for end in (found["first"], found["last"]) if end]
    return " - ".join(number(end, gender, case) for end in ends)


def _quantity(found: re.Match[str], name: str | Sequence[str], allowed: Sequence[str]) -> str:
    """Returns an amount with its unit: the last number decides the form of the unit, a fraction has the genitive."""
    case = allowed[0] if allowed else "nomn"
    last = parse_number((found["last"] or found["first"]).lstrip("+-"), ",")
    forms = grammar.forms_of(name)
    scale = grammar.forms_of(_MAGNITUDES[found["scale"]]) if found["scale"] else None
    gender = "femn" if (scale or forms)[0] in _FEMININE else "masc"
    words = _numbers(found, gender, case)
    unit = _part_of(scale or forms) if last.fraction else grammar.counted(last.whole, scale or forms, case)
    per = found.groupdict().get("per")
    return f"{words} {unit}{' ' + forms[2] if scale else ''}{' ' + WORDS['per'][per] if per else ''}"


def _part_of(forms: Sequence[str]) -> str:
    """Returns a unit after a fraction, of which it is the genitive singular: половина литра, столовой ложки."""
    return grammar.inflected(forms[0], "gent", "sing") if " " in forms[0] else forms[1]


def _money(found: re.Match[str]) -> str:
    return _quantity(found, _MONEY[found["sign"]], grammar.governed(found.string, found.start()))


def _measure(found: re.Match[str]) -> str:
    allowed = grammar.governed(found.string, found.start())
    if allowed == ["accs", "loct"] and found["unit"] in ("км", "м") and _AWAY.match(found.string, found.end()):
        allowed = ["loct"]  # в 5 км от города
    return _quantity(found, _UNITS[found["unit"]], allowed)


def _magnitude(found: re.Match[str]) -> str:
    """Returns 5 млн жителей, до 50 тыс. человек in words."""
    return _quantity(found, _MAGNITUDES[found["unit"]], grammar.governed(found.string, found.start()))


def _telephone(found: re.Match[str]) -> str:
    groups = re.findall("[0-9]+", found[0])
    if len("".join(groups)) > 9 and len(groups) < 4:  # Without spaces between the groups: 8(495)1234567.
        groups = [group for group in re.split(r"^(998|3[78][05]|[78])?(...?)(...)(..)(..)$", "".join(groups)) if group]
    said = ["ноль " + whole(group[1:]) if len(group) == 2 and group[0] == "0" else whole(group) for group in groups]
    return ("плюс " if found[0].startswith("+") else "") + " ".join(said)


def _ratio(found: re.Match[str]) -> str:
    """Returns a ratio or a scale with `к`, a score without: в соотношении 1:3, со счётом 3:2."""
    if _SCALED.search(found.string, max(0, found.start() - 30), found.start()):
        return f"{whole(found[1])} к {whole(found[2], 'masc', 'datv')}"
    return f"{whole(found[1])} {whole(found[2])}"


def _fraction(found: re.Match[str]) -> str:
    mixed, said = found["mixed"], fraction(int(found["above"]), int(found["below"]))
    if found["unit"]:
        said += " " + _part_of(grammar.forms_of(_UNITS[found["unit"]]))
    return f"{whole(mixed, 'femn')} {form(mixed, ('целая', 'целых', 'целых'))} {said}" if mixed else said


def _power(found: re.Match[str]) -> str:
    if found[1] in ("2", "3"):
        return " в квадрате " if found[1] == "2" else " в кубе "
    sign = "минус " if found[1].startswith("-") else ""
    return f" в {sign}{ordinal(abs(int(found[1])), 'femn', 'loct')} степени "


def _sections(found: re.Match[str]) -> str:
    return " точка ".join(map(whole, found[0].split(".")))


def _number(found: re.Match[str]) -> str:
    """Returns a number in the case of its preposition and the gender of its noun."""
    if found["last"]:
        case = (grammar.governed(found.string, found.start()) or ["nomn"])[0]
        case = "nomn" if case == "accs" else case
    else:
        bare = parse_number(found["first"].lstrip("+-"), ",")
        case = grammar.case_of_number(found.string, found.start(), found.end(), "" if bare.fraction else bare.whole)
        if not bare.fraction and (said := _numbered(found, bare.whole)):
            return said
        if case == "accs" and not bare.fraction and not bare.whole.endswith(("1", "000")):
            case = "nomn"
    gender = "masc"
    if (found["last"] or found["first"])[-1] in "12":
        after = grammar.following_noun(found.string, found.end())
        gender = after.gender if after and after.gender != "plur" else "masc"
    return _numbers(found, gender, case) + " " * found.string[found.end() : found.end() + 1].isalpha()


def _numbered(found: re.Match[str], digits: str) -> str:
    """Returns an ordinal before a noun in the singular that no cardinal counts: на 3 этаже, 5 класс; else ""."""
    after = grammar.following_noun(found.string, found.end())
    is_counted = form(digits, ("one", "few", "many")) == "one"
    if after is None or is_counted or after.plural or not after.singular or "gent" in after.singular or len(digits) > 3:
        return ""
    return ordinal(int(digits), after.gender, grammar.agreed_case(found.string, found.start(), after.singular))


_SECTION = re.compile(
    r"(?i:разделы?|раздела|разделе|таблиц[аеуы]|рисун[а-я]+|пункт[а-я]*|глав[аеуы]|верси[ияею]|параграф[а-я]*) $"
)
rewrite = rewriter(
    # Powers: x^2, 10^6.
    (r"\^\(?(-?[0-9]{1,9})\)?", _power),
    # Telephone numbers: +7 (495) 123-45-67, 8 800 555-35-35, 123-45-67.
    (r"(?<![0-9.,A-Za-z])\+?(?:(?:998|3[78][05])[0-9]{9}|[78] ?\(?[0-9]{3}\)? ?[0-9]{7})(?![0-9])", _telephone),
    (r"\+[0-9]{1,3}(?:[ -]?\(?[0-9]{2,5}\)?){2,6}(?![0-9])", _telephone),
    (r"(?<![0-9.,+-])(?:8[ -]\(?[0-9]{3,4}\)?[ -])?[0-9]{2,3}-[0-9]{2}-[0-9]{2}(?![0-9-])", _telephone),
    # Sections and versions: таблица 4.2.1, раздел 3.1.
    (
        r"(?<![0-9.,])[0-9]{1,9}(?:\.[0-9]{1,9}){2,}(?![0-9])",
        lambda m: m[0] if re.fullmatch(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+", m[0]) else _sections(m),
    ),
    (
        r"(?<=[а-я] )(?<![0-9])[0-9]{1,3}\.[0-9]{1,3}(?![0-9])",
        lambda m: _sections(m) if _SECTION.search(m.string, max(0, m.start() - 20), m.start()) else m[0],
    ),
    # Arithmetic: 10:2=5, 7-3=4.
    (r"(?<=[0-9]) ?: ?(?=[0-9]+ ?=)", lambda _: " разделить на "),
    (r"(?<=[0-9]) ?- ?(?=[0-9]+ ?=)", lambda _: " минус "),
    (r"(?<![0-9:])([0-9]{1,4}):([0-9]{1,4})(?![0-9:])", _ratio),
    # Money, also with its sign before: $3 млрд; units; 5 млн.
    (
        rf"([$€£₽¥]) ?({NUMBER}(?: ?- ?{NUMBER})?(?: ?(?:{any_of(_MAGNITUDES)})\.?(?![А-Яа-яЁё]))?)",
        lambda m: f"{m[2]} {m[1]}",
    ),
    (
        r"(?<![0-9/.,])(?:(?P<mixed>[0-9]{1,3}) )?(?P<above>[0-9]{1,3})/(?P<below>[0-9]{1,3})(?![0-9/])"
        rf"(?: ?(?P<unit>{_UNIT})(?![А-Яа-яЁёA-Za-z0-9/]){_DOT})?",
        _fraction,
    ),
    (rf"{START}{_AMOUNT}{_SCALE} ?(?P<sign>{any_of(_MONEY)}){_PER}", _money),
    (rf"{START}{_AMOUNT}{_SCALE} ?(?P<unit>{_UNIT}){_PER}(?! (?:класс|групп))", _measure),
    (rf"{START}{_AMOUNT} ?(?P<unit>{any_of(_MAGNITUDES)})(?P<scale>){STOP}{_DOT}", _magnitude),
    (rf"(?<![0-9A-Za-zА-я]){_AMOUNT}(?!-?[0-9])", _number),
    (r"[0-9]+", lambda m: f" {whole(m[0])} "),
)
