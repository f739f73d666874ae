"""English abbreviations, initialisms, Roman numerals and internet addresses."""

import re

from gputrain.speech.text.english.numbers import WORDS, cardinal, ordinal
from gputrain.speech.text.language import ADDRESS, any_of, ends_sentence, final_dot, rewriter, roman, spoken_address

ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
LATIN: dict[str, str] = WORDS["latin"]
_NUMBERED, _STREETS = WORDS["numbered"], WORDS["streets"]
_AFTER, _BEFORE = WORDS["after_names"], WORDS["before_names"]
_ALWAYS = (
    ABBREVIATIONS.keys() - {"no", "st", "dr", "min", "max", *_AFTER, *_BEFORE} - (_NUMBERED.keys() - {"tel", "apt"})
)
STARTS = frozenset(WORDS["sentence_starts"])
# After p.m. a day, a month or a time zone begins no sentence.
_DATES = re.compile(rf" (?:(?i:{any_of(WORDS['days'] + WORDS['months'])})|[A-Z]{{2,4}})\b")
_NAME = r"(?:[A-Z][a-z']+|[0-9]+(?:st|nd|rd|th))"
_WORDS_IN_CAPITALS, _SPELLED = frozenset(WORDS["words_in_capitals"]), frozenset(WORDS["spelled"])
_CAPITALS = re.compile(r"(?<![A-Za-z'])([A-Z]{2,6})('?s)?(?![A-Za-z]|'[A-Za-z])")
_READINGS: dict[str, str] = WORDS["readings"]
_READ = re.compile(rf"\b({any_of(_READINGS)})(s?)\b")
_NOUNS, _RULERS, _TITLES = (frozenset(WORDS[name]) for name in ("numbered_nouns", "rulers", "titles"))


def _ends(found: re.Match[str]) -> str:
    """Returns the dot of an abbreviation that also ends the sentence."""
    closes = found[0].rstrip(".").split(" ")[-1].lower() in WORDS["closing"]
    return final_dot(found, STARTS, closes and not _DATES.match(found.string, found.end()))


def _full(found: re.Match[str]) -> str:
    return ABBREVIATIONS[found[1].lower()] + _ends(found)


def _street(found: re.Match[str]) -> str:
    """Returns Baker St. as street; before another name the abbreviation is a title or a saint, also in The Dr. said."""
    is_before_name = " " not in found[1] and re.match(" ?[A-Z][a-z]", found.string[found.end() : found.end() + 3])
    if found[1] in STARTS or (is_before_name and not ends_sentence(found.string, found.end(), STARTS)):
        return found[0]
    return f"{found[1]} {_STREETS[found[2].lower()]}{_ends(found)}"


def _initial(found: re.Match[str]) -> str:
    """Returns the letter of an initial; not of a numeral or a name (War I., plan B.) at the end of a sentence."""
    before = re.search("([A-Za-z]+) $", found.string[max(0, found.start() - 15) : found.start()])
    if (before and before[1].lower() in _NOUNS) or ends_sentence(found.string, found.start() + 2, STARTS):
        return found[0]
    return f"{found[1].lower()} "


def _label(label: str, is_last: bool) -> str:
    """Returns a part of an address: names of letters if it has no vowel, or is the code of a country."""
    bare = label.lower()
    if not set(bare) & set("aeiouy") or (is_last and len(bare) == 2):
        return " ".join(bare)
    return label


def _roman(found: re.Match[str]) -> str:
    """Returns a Roman numeral by the word before it: Louis XIV, Chapter IV, the XIX century."""
    before, numeral, following = found[1], found[2], found[3] or ""
    value = roman(numeral.upper())
    word = before.strip().split(" ")[-1].lower()
    is_ruler = word in _RULERS or before.strip().split(" ")[0].lower() in _TITLES
    is_numbered = word in _NOUNS
    is_plain = len(numeral) > 1 and set(numeral) <= set("IVX")
    if not value or not (is_ruler or is_numbered or is_plain):
        return found[0]
    if not numeral.isupper() and (not is_numbered or len(numeral) == 1):
        return found[0]
    if numeral == "I" and is_ruler and re.match(" (?!(?:of|and|was|the|who|in|on|is|had|ruled)\\b)[a-z]", following):
        return found[0]
    return f"{before}{'the ' + ordinal(value) if is_ruler and numeral.isupper() else cardinal(value)}{following}"


expand = rewriter(
    (ADDRESS, lambda m: spoken_address(m, WORDS["signs_in_addresses"], _label)),
    # e.g., i.e., p.m., Ph.D.; U.S.A. and initials (J. K. Rowling) become letters.
    (rf"(?<![A-Za-z.])(?i:({any_of(LATIN)}))\.(?![A-Za-z])", lambda m: LATIN[m[1].lower()] + _ends(m)),
    (r"(?<![A-Za-z.])(?:[A-Z]\.){2,}", lambda m: " ".join(m[0].replace(".", "").lower()) + _ends(m)),
    (r"(?<![A-Za-z.'])([A-Z])\. ?(?=[A-Z](?:\.|[a-z]))", _initial),
    # St. and Dr. after a name, and not before one, belong to a street: Baker St., Elm Dr.
    (rf"(?<![0-9A-Za-z'])((?:[0-9][0-9A-Z]* )?{_NAME}) (St|Dr|Ct|Pl|Sq)\.", _street),
    (rf"(?<![0-9A-Za-z'])({_NAME}) (St|Dr)(?![A-Za-z.'])(?! [A-Z])", _street),
    (rf"(?<=[A-Za-z'&] )({any_of(word.capitalize() for word in _AFTER)})\.", _full),
    (rf"(?<=[a-z'] )({any_of(WORDS['after_names_without_dot'])})(?![A-Za-z.'])(?! [A-Z][a-z])", _full),
    (rf"\b([Ss]t|[Dd]r|{any_of(word.capitalize() for word in _BEFORE)})\.(?= ?[A-Z])", _full),
    (rf"(?<![0-9] )\b({any_of(WORDS['titles_without_dot'])})(?= [A-Z](?:[a-z']|\b))", _full),
    # p. 5, pp. 12-15, No. 7, vol. 3, Fig. 2; a Roman numeral may follow, too.
    (
        rf"\b((?i:{any_of(_NUMBERED)}))\. ?(?=[0-9]|[IVXLC]+\b)(?<!No\. (?=I\b))",
        lambda m: _NUMBERED[m[1].lower()] + " ",
    ),
    (rf"\b((?i:{any_of(_ALWAYS)}))\.", _full),
    # Louis XIV, Pope John Paul II, Chapter ix, World War I; XIX century.
    (
        r"\b((?:(?:King|Queen|Pope|Emperor|Empress|Tsar|Prince|Princess|Sultan|Duke) (?:[A-Z][a-z]+ )?)?[A-Z]?[a-z]+ )"
        r"([IVXLC]{1,7}|[ivxl]{2,7}|[IVX][ivx]{1,6})(?!\.?[A-Za-z]|'(?!s\b))( [a-z]+)?",
        _roman,
    ),
)


def spell_capitals(text: str) -> str:
    """Replaces initialisms by their letters: without a vowel always (BBC), others of two or three letters unless they
    are words (IBM, but PIN), longer ones by a list. A text in capitals stays, since its words are no initialisms."""
    if not re.search("[a-z]", text) and len(text.split()) > 2:
        return text
    return _CAPITALS.sub(_letters, _READ.sub(lambda found: _READINGS[found[1]] + "'s" * bool(found[2]), text))


def _letters(found: re.Match[str]) -> str:
    word, ending = found[1], found[2] or ""
    has_vowel = bool(set(word) & set("AEIOUY"))
    is_short = len(word) <= 3 and (word not in _WORDS_IN_CAPITALS or bool(ending and len(word) == 2))
    if has_vowel and word not in _SPELLED and not is_short:
        return found[0]
    return " ".join(word.lower()) + ("'s" if ending else "")
