"""Russian grammar around a number: the case that a preposition governs, and the noun that follows.

The dictionary of pymorphy3 (OpenCorpora) gives the gender and the cases of nouns and inflects them. It is loaded with
the first number that needs it. It is an extra, because it is under CC BY-SA 3.0; other rules would read other words, so
that without it a text with such a number is refused.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from gputrain.errors import import_package
from gputrain.speech.text.russian.numbers import WORDS, form

_PREPOSITIONS: dict[str, list[str]] = {
    word: key.split() for key, words in WORDS["prepositions"].items() for word in words
}
_LAST_WORD = re.compile(r"((?:[Ии]з-)?[А-Яа-яЁё]+)[ «\"(]*$")
# от 5 до 10, между 2 и 3, с 9:00: the preposition stands before the first of two numbers.
_SHARED = re.compile(r"([А-Яа-яЁё]+) [+-]?[0-9][0-9.,:]*(?: [А-Яа-яё%°]+)?(?:,| и| или) $")
_NEXT_WORDS = re.compile(r"[ -]*([а-яё]+|[А-ЯЁ][а-яё]+)(?: ([а-яё]+|[А-ЯЁ][а-яё]+))?(?: ([а-яё]+))?")
_SUBJECT = frozenset({"nomn", "accs"})


class Noun(NamedTuple):
    """A noun in the dictionary: its gender (plur if it has none), and its cases in the singular and in the plural."""

    gender: str
    singular: frozenset[str]
    plural: frozenset[str]


@cache
def _dictionary() -> Any:
    # Its dictionary is under CC BY-SA 3.0, therefore it is an extra.
    package = import_package("pymorphy3", needed_by="numbers in Russian texts", otherwise="write numbers in words")
    return package.MorphAnalyzer()


@lru_cache(100_000)
def _readings(word: str) -> Sequence[Any]:
    return tuple(_dictionary().parse(word))


@lru_cache(20_000)
def noun(word: str) -> Noun | None:
    """Returns a noun's gender and cases; None for another part of speech."""
    found = [reading.tag for reading in _readings(word) if reading.score > 0.001]
    if not found or "NOUN" not in {tag.POS for tag in found} or found[0].POS not in ("NOUN", "ADJF", "VERB"):
        return None
    nouns = [tag for tag in found if tag.POS == "NOUN" and "Init" not in tag]
    if nouns and "Name" in nouns[0]:  # Александра is the genitive of a king rather than a queen.
        nouns = [tag for tag in nouns if tag.gender == nouns[0].gender]
    genders = [str(tag.gender) for tag in nouns if tag.gender]
    gender = WORDS["genders"].get(word) or (genders[0] if genders else "plur" if nouns else "")
    cases = {count: frozenset(_case(tag) for tag in nouns if tag.number == count) for count in ("sing", "plur")}
    return Noun(gender, cases["sing"], cases["plur"]) if gender else None


def _case(tag: Any) -> str:
    """Returns the case of a reading; the second genitive, locative and accusative count as the first."""
    name = str(tag.case)
    return {"gen2": "gent", "loc2": "loct", "acc2": "accs", "gen1": "gent"}.get(name, name)


@lru_cache(20_000)
def _is_adjective(word: str) -> bool:
    first = _readings(word)[0].tag
    return first.POS in ("ADJF", "PRTF") or (first.POS == "NPRO" and "Apro" in first)


@lru_cache(20_000)
def _adjective(word: str) -> Noun:
    tags = [reading.tag for reading in _readings(word) if reading.tag.POS in ("ADJF", "PRTF")]
    plural = frozenset(_case(tag) for tag in tags if tag.number == "plur")
    gender = next((str(tag.gender) for tag in tags if tag.gender), "plur")
    return Noun(gender, frozenset(_case(tag) for tag in tags if tag.number == "sing"), plural)


def following_noun(text: str, place: int) -> Noun | None:
    """Returns the noun after a place of the text, past adjectives; None if another word comes first.

    Adjectives without a noun count as one: II Мировая.
    """
    found = _NEXT_WORDS.match(text, place)
    last: Noun | None = None
    for word in found.groups() if found else ():
        if word is None or word.lower() in _PREPOSITIONS:
            break
        lowered = word.lower()
        if _is_adjective(lowered):
            last = _adjective(lowered)
            continue
        found_noun = noun(lowered)
        if found_noun and last:  # The adjective agrees with it: игры is a plural after Олимпийские.
            agreed = Noun(found_noun.gender, found_noun.singular & last.singular, found_noun.plural & last.plural)
            return agreed if agreed.singular or agreed.plural else found_noun
        return found_noun or last
    return last


def governed(text: str, place: int) -> list[str]:
    """Returns the cases after the preposition before a place of the text, the likeliest first; [] without one."""
    found = _LAST_WORD.search(text, max(0, place - 30), place)
    word = found[1].lower() if found else ""
    if word in ("и", "или") or not found:
        shared = _SHARED.search(text, max(0, place - 40), place)
        word = shared[1].lower() if shared else word
    return _PREPOSITIONS.get(word, [])


def case_of_number(text: str, start: int, end: int, digits: str) -> str:
    """Returns the case of a cardinal between two places of a text, by the preposition before and the noun after it;
    that of a fraction, which has no `digits`, by the preposition."""
    allowed, after = governed(text, start), following_noun(text, end)
    if after is None or not digits:
        return allowed[0] if allowed else "nomn"
    counted = form(digits, ("one", "few", "many"))
    cases = after.singular if counted == "one" else after.plural
    if not allowed and counted == "one" and cases and "nomn" not in cases:  # Увидел 1 машину, не было 1 рубля.
        return next(case for case in ("gent", "accs", "datv", "ablt", "loct") if case in cases)
    is_adjective = re.match(r"\W*[а-яё]+[ыи]х\b", text[end : end + 30])
    if not allowed and counted == "few" and "gent" in cases - after.singular and not is_adjective:
        return "gent"  # Хватит 2 верёвок: a noun after two in the nominative is in the singular.
    oblique = [case for case in ("ablt", "datv", "loct") if case in cases and not cases & _SUBJECT]
    # After a number in the nominative, 2 to 4 take the genitive singular, others the genitive plural.
    is_counted = {"one": bool(cases & _SUBJECT), "few": "gent" in after.singular, "many": "gent" in after.plural}[
        counted
    ]
    for case in allowed:
        if case in cases or (case == "accs" and is_counted) or (case == "gent" and "gent" in cases):
            return case
    if not allowed and oblique and not is_counted:
        return oblique[0]
    return allowed[0] if allowed else "nomn"


def is_noun(word: str) -> bool:
    return str(_readings(word)[0].tag.POS) == "NOUN"


def has_verb(text: str, place: int) -> bool:
    """Returns True if the sentence has a verb before a place: родился в 1950 г., but not В 1961 г. Гагарин."""
    words = re.findall("[а-яё]+", text[max(0, place - 200) : place].rpartition(". ")[2].lower())
    return any(_readings(word)[0].tag.POS in ("VERB", "PRTS") for word in words)


def agreed_case(text: str, start: int, cases: frozenset[str]) -> str:
    """Returns the case of an ordinal whose noun may be in `cases`, by the preposition before it."""
    allowed = governed(text, start)
    for case in [*allowed, "nomn", "gent", "loct", "datv", "ablt", "accs"]:
        if case in cases:
            return case
    return allowed[0] if allowed else "nomn"


@lru_cache(5_000)
def inflected(phrase: str, case: str, number: str = "plur") -> str:
    """Returns a noun with the adjectives before it in a case; words after it (в час) stay."""
    head, *rest = re.split("(?= в )", phrase, maxsplit=1)
    words = []
    for word in head.split(" "):
        made = next((made for reading in _readings(word) if (made := reading.inflect({case, number}))), None)
        words.append(str(made.word) if made else word)
    return " ".join(words) + "".join(rest)


def forms_of(name: str | Sequence[str]) -> Sequence[str]:
    """Returns the forms of a unit after 1, after 2 to 4 and after others: квадратный метр, квадратных метра, ..."""
    if not isinstance(name, str):
        return name
    for prefix in WORDS["prefixes"].values():
        if name.removeprefix(prefix) != name and name.removeprefix(prefix) in WORDS["metric"].values():
            return [prefix + form for form in forms_of(name.removeprefix(prefix))]
    adjective, _, head = name.rpartition(" ")
    many = inflected(adjective, "gent") + " " if adjective else ""
    return name, many + inflected(head, "gent", "sing"), many + inflected(head, "gent")


def counted(digits: str, forms: Sequence[str], case: str) -> str:
    """Returns the form of a noun after a number in a case: рублей, рублям."""
    said = form(digits, forms)
    if case in ("nomn", "accs"):
        return inflected(said, "accs", "sing") if case == "accs" and said == forms[0] else said
    if case == "gent":
        return forms[1] if said == forms[0] else forms[2]
    return inflected(forms[0], case, "sing" if said == forms[0] else "plur")
