"""Russian abbreviations, names of letters, internet addresses and words in Latin letters."""

import re
from collections.abc import Mapping

from gputrain.speech.text.language import ADDRESS, any_of, ends_sentence, final_dot, rewriter, spoken_address
from gputrain.speech.text.russian.grammar import agreed_case, inflected, noun
from gputrain.speech.text.russian.numbers import CASES, WORDS

ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
BEFORE_NUMBERS: dict[str, str] = WORDS["before_numbers"]
BEFORE_NAMES: dict[str, str] = WORDS["before_names"]
LATIN: dict[str, str] = WORDS["latin"]
_LETTERS, _LATIN_NAMES = WORDS["letter_names"], WORDS["latin_names"]
_READINGS: dict[str, str] = WORDS["readings"]
_WORDS_IN_CAPITALS = frozenset(WORDS["words_in_capitals"] + WORDS["words_for_emphasis"])
STARTS = frozenset(WORDS["sentence_starts"])
_UNIT_FOLLOWS = re.compile(r"[0-9]{1,3} ?(?:мин|м|сек|с|кг|г|см|мм|ц)(?![А-Яа-яЁё])")
_VARIABLES = {"x": "икс", "y": "игрек", "z": "зет"}
_LATIN_LETTERS = re.compile(any_of(LATIN))
_CAPITALS = re.compile(r"(?<![А-Яа-яЁё])([А-ЯЁ]{2,6})(?![А-Яа-яЁё])")
_VOWELS = frozenset("АЕЁИОУЫЭЮЯ")
_START = r"(?<![А-Яа-яЁёA-Za-z0-9.-])"
_STOP = r"(?![А-Яа-яЁё-])"


def _pattern(words: "dict[str, str]") -> str:
    """Returns a pattern of abbreviations; the blank within one may be missing (т.е.)."""
    return any_of(words).replace(r"\ ", " ?")


_ALONE: dict[str, str] = WORDS["without_number"]
_BY_LETTERS = {word.replace(" ", ""): said for word, said in (ABBREVIATIONS | _ALONE).items()}


def _follows_number(text: str, place: int) -> bool:
    return re.search("[0-9] ?$", text[max(0, place - 2) : place]) is not None


def _full(found: re.Match[str]) -> str:
    """Returns an abbreviation in words; its dot is kept if it also ends the sentence."""
    if found[0][:-1] in WORDS["units"] and _follows_number(found.string, found.start()):
        return found[0]  # 180 см. is a length, см. рис. 5 a reference.
    said = _BY_LETTERS[found[0].lower().replace(" ", "")]
    return said + final_dot(found, STARTS, said in WORDS["closing"])


def _initials(found: re.Match[str]) -> str:
    """Returns the letters of initials: В.В. Путин; not of a name at the end of a sentence (группа А. Она)."""
    letters = re.findall("[А-ЯЁ]", found[0])
    if len(letters) == 1 and ends_sentence(found.string, found.start() + 2, STARTS):
        return found[0]
    return " ".join(_LETTERS[letter.lower()] for letter in letters) + " "


def _saint(found: re.Match[str]) -> str:
    """Returns св. in the gender and case of its name: храм св. Николая."""
    name = noun(found["name"].lower())
    if name is None or not name.singular:
        return f"святой {found['name']}"
    case = agreed_case(found.string, found.start(), name.singular - ({"accs"} if "gent" in name.singular else set()))
    ending = WORDS["ordinal_endings"]["femn" if name.gender == "femn" else "masc"][CASES.index(case)]
    return f"свят{'ой' if ending == 'ый' else ending} {found['name']}"


def _with_preposition(found: re.Match[str], words: Mapping[str, str]) -> str:
    """Returns город, страница, ... in the case of its preposition: в г. Москве, на стр. 5."""
    word, before = words[found["short"].lower()], (found["before"] or "").lower()
    if _UNIT_FOLLOWS.match(found.string, found.end()) and _follows_number(found.string, found.start("short")):
        return found[0]  # 19 ч. 38 мин. is a time.
    case = WORDS["place_cases"].get(before)
    said = inflected(word, case, "sing") if case else word
    return f"{found['before'] + ' ' if found['before'] else ''}{said} "


def _label(label: str, is_last: bool) -> str:
    """Returns a part of an address; www by the names of its letters."""
    return " ".join(["вэ"] * 3) if label.lower() == "www" else label


# Addresses come first, so that names in them are found afterwards.
read_addresses = rewriter((ADDRESS, lambda m: spoken_address(m, WORDS["signs_in_addresses"], _label)))
expand = rewriter(
    (
        r"(?:(?<![А-Яа-яЁё])(?P<before>[А-Яа-яЁё]{1,6}) )?(?<![А-Яа-яЁё0-9.-])"
        rf"(?i:(?P<short>{any_of(BEFORE_NUMBERS)})) ?(?=[0-9+(]|[IVX]+\b)",
        lambda m: _with_preposition(m, BEFORE_NUMBERS),
    ),
    (rf"{_START}(?i:{_pattern(ABBREVIATIONS)}){_STOP}", _full),
    (
        r"(?:(?<![А-Яа-яЁё])(?P<before>[А-Яа-яЁё]{1,6}) )?(?<![А-Яа-яЁё0-9.-])(?<![0-9] )"
        rf"(?P<short>{any_of(BEFORE_NAMES)}|(?i:{any_of(word for word in BEFORE_NAMES if len(word) > 2)})) ?(?=[А-ЯЁ])",
        lambda m: _with_preposition(m, BEFORE_NAMES),
    ),
    (r"(?<![А-Яа-яЁё.])(?:[А-ЯЁ]\. ?){1,3}(?=[А-ЯЁ][а-яё])|(?<=[а-яё] )(?:[А-ЯЁ]\. ?){2}(?![А-Яа-яЁё])", _initials),
    (r"(?<![А-Яа-яЁё])[Сс]в\. ?(?P<name>[А-ЯЁ][а-яё]+)", _saint),
    (r"(?<![А-Яа-яЁё])([БГДЖЗЛМНПРТФХЦЧШЩ])(?![А-Яа-яЁё.-])", lambda m: _LETTERS[m[1].lower()]),
)


# For abbreviations of units that no number has used.
expand_alone = rewriter((rf"{_START}(?i:{any_of(_ALONE)}){_STOP}", _full))


def spell_capitals(text: str) -> str:
    """Replaces abbreviations in capitals by the names of their letters, unless they are words or all is in capitals.

    Without a vowel they are letters, and with one if they are short or can't be pronounced: two consonants at either
    end (МГУ, ИНН), vowels only (ООО).
    """
    if not re.search("[а-яё]", text) and len(text.split()) > 2:
        return text
    return _CAPITALS.sub(_letters, text)


def _letters(found: re.Match[str]) -> str:
    word = found[1]
    if word in _READINGS:
        return _READINGS[word]
    vowels = [char in _VOWELS for char in word]
    is_word = len(word) > 2 and any(vowels) and not all(vowels) and any(vowels[:2]) and any(vowels[-2:])
    if word in _WORDS_IN_CAPITALS or (is_word and not word.startswith(("АЭ", "ЭВ"))):
        return found[0]
    return " ".join(_LETTERS[char] for char in word.lower())


def cyrillic(text: str) -> str:
    """Returns Latin words in Cyrillic letters: abbreviations by the English names of their letters, others by sound."""
    text = re.sub(r"(?<![A-Za-z])([xyzXYZ])(?![A-Za-z])", lambda m: _VARIABLES[m[1].lower()], text)
    text = re.sub(r"(?<![A-Za-z])([A-Z]{1,6})(?![A-Za-z])", _latin_letters, text)
    return re.sub("[A-Za-z]+", lambda m: _LATIN_LETTERS.sub(lambda letter: LATIN[letter[0]], m[0].lower()), text)


def _latin_letters(found: re.Match[str]) -> str:
    word = found[1]
    if len(word) > 3 and set(word) & set("AEIOUY"):
        return found[0]
    return " ".join(_LATIN_NAMES[char] for char in word.lower())
