"""Uzbek abbreviations, letter names, internet addresses, and signs as words."""

import re

from gputrain.speech.text.language import ADDRESS, any_of, rewriter, spoken_address
from gputrain.speech.text.uzbek.letters import WORDS
from gputrain.speech.text.uzbek.numbers import SUFFIX

ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
_CAPITALS = re.compile(rf"(?<![A-Za-zʻʼ])((?:[A-Z]ʻ?|(?<=[A-Z])[hʻ]){{2,8}})(?:-?({SUFFIX}))?(?![A-Za-zʻʼ])")
_LONE = re.compile(r"(?<![A-Za-zʻʼ])(?<![A-Za-zʻʼ]-)([b-df-hj-np-tvxyz])(?![A-Za-zʻʼ])")
# Abbreviations that may end a sentence; after a million the sentence goes on (50 mlrd. AQSH dollari).
_CLOSING = frozenset({"va hokazo", "va boshqalar", "yil", "yillar", "hokazo", "million", "milliard", "trillion"})
_LETTER = re.compile(r"[og]ʻ|[sc]h|[a-z]")


def _label(label: str, is_last: bool) -> str:
    return "ve ve ve" if re.fullmatch("[wvWV]{3}", label) else label


def _full(found: re.Match[str]) -> str:
    """Expands an abbreviation; a dot that also ends the sentence is kept."""
    following = found.string[found.end() : found.end() + 3]
    words = ABBREVIATIONS[found[0].lower()]
    closes = r"$| +[A-ZʻʼА-Я]" if words in ("va hokazo", "va boshqalar", "yil", "yillar", "hokazo") else "$"
    ends = found[0].endswith(".") and words in _CLOSING and re.match(closes, following)
    return words + ("." if ends else "")


def spelled(text: str) -> str:
    """Replaces abbreviations in capitals by the names of their letters, unless the whole text is in capitals."""
    if re.search("[a-z]{2}", text) or len(text.split()) < 3:
        text = _CAPITALS.sub(_capitals, text)
    return text


def alone(text: str) -> str:
    """Replaces single lower-case consonants by their names."""
    return _LONE.sub(lambda found: names(found[1]), text)


def names(letters: str) -> str:
    return " ".join(WORDS["letter_names"].get(one, one) for one in _LETTER.findall(letters.lower()))


def _capitals(found: re.Match[str]) -> str:
    word = found[1].upper()
    if word in WORDS["spelled"] or not set(word) & set("AEIOU"):
        return names(found[1]) + (found[2] or "")
    return found[0]


# Addresses come first, so that names in them are found afterwards.
read_addresses = rewriter((ADDRESS, lambda m: spoken_address(m, WORDS["signs_in_addresses"], _label)))
# Initials (A. Navoiy, Sh. Rashidov), which become names of letters, and abbreviations.
in_full = rewriter(
    (r"(?<![A-Za-zʻʼ])([A-Z]ʻ?|Sh|Ch|Yo|Yu|Ya)\.(?= ?[A-Z])", lambda m: names(m[1]) + " "),
    (rf"(?i:(?<![A-Za-z0-9ʻʼ.])(?<![A-Za-zʻʼ]-)(?:{any_of(ABBREVIATIONS)})(?![A-Za-zʻʼ]))", _full),
)


def readable_dots() -> frozenset[str]:
    """Returns words, without their final dot, after which a dot does not end a sentence."""
    ends = {"va h.k.", "va b.", "va b.q.", "va boshq.", "h.k.", "va h. k.", "y.", "yy."}
    return frozenset(word[:-1].split()[-1] for word in ABBREVIATIONS.keys() - ends if word.endswith("."))
