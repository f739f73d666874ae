"""Uzbek abbreviations, letter names, internet addresses, and signs as words."""

import re

from gputrain.speech.text.language import ADDRESS, any_of, ends_sentence, final_dot, rewriter, spoken_address
from gputrain.speech.text.uzbek.letters import WORDS
from gputrain.speech.text.uzbek.numbers import SUFFIX

ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
_CAPITALS = re.compile(rf"(?<![A-Za-zʻʼ])((?:[A-Z]ʻ?|(?<=[A-Z])[hʻ]){{2,8}})(?:-?({SUFFIX}))?(?![A-Za-zʻʼ])")
_LONE = re.compile(r"(?<![A-Za-zʻʼ])(?<![A-Za-zʻʼ]-)([b-df-hj-np-tvxyz])(?![A-Za-zʻʼ])")
STARTS = frozenset(WORDS["sentence_starts"])
# Abbreviations whose dot ends a sentence before any capital; after a million it may go on (50 mlrd. AQSH dollari).
_CLOSING = frozenset({"va hokazo", "va boshqalar", "yil", "yillar", "hokazo"})
_LETTER = re.compile(r"[og]ʻ|[sc]h|[a-z]")


def _label(label: str, is_last: bool) -> str:
    return "ve ve ve" if re.fullmatch("[wvWV]{3}", label) else label


def _full(found: re.Match[str]) -> str:
    """Expands an abbreviation; a dot that also ends the sentence is kept."""
    if re.search("[a-z][A-Z]", found[0]):
        return found[0]  # A unit, mAh, rather than mah.
    words = ABBREVIATIONS[found[0].lower()]
    return words + final_dot(found, STARTS, words in _CLOSING)


def _initial(found: re.Match[str]) -> str:
    """Returns the letter of an initial; not of a ruler's number (Pyotr I.) or at the end of a sentence."""
    before = re.search(r"(\w+) $", found.string[max(0, found.start() - 15) : found.start()])
    is_number = before and before[1] in WORDS["rulers"] and found[1] in ("I", "V", "X")
    if is_number or ends_sentence(found.string, found.start() + len(found[1]) + 1, STARTS):
        return found[0]
    return (found[1].lower() if found[1] in ("Yo", "Yu", "Ya", "Ye") else names(found[1])) + " "


def spelled(text: str) -> str:
    """Replaces abbreviations in capitals by the names of their letters, unless the whole text is in capitals."""
    if re.search("[a-z]{2}", text) or len(text.split()) < 3:
        text = _CAPITALS.sub(_capitals, text)
    return re.sub(r"(?<![A-Za-zʻʼ])[Cc](?![A-Za-zʻʼ])", WORDS["letter_names"]["c"], text)


def alone(text: str) -> str:
    """Replaces single lower-case consonants by their names."""
    return _LONE.sub(lambda found: names(found[1]), text)


def names(letters: str) -> str:
    return " ".join(WORDS["letter_names"].get(letter, letter) for letter in _LETTER.findall(letters.lower()))


def _capitals(found: re.Match[str]) -> str:
    word = found[1].upper()
    if word in WORDS["spelled"] or not set(word) & set("AEIOU"):
        return names(found[1]) + (found[2] or "")
    return found[0]


# Addresses come first, so that names in them are found afterwards.
read_addresses = rewriter((ADDRESS, lambda m: spoken_address(m, WORDS["signs_in_addresses"], _label)))
# Initials (A. Navoiy, Sh. Rashidov), which become names of letters, and abbreviations.
in_full = rewriter(
    (r"(?<![A-Za-zʻʼ])([A-Z]ʻ?|[SC]h|Y[aeou])\.(?= ?[A-Z])", _initial),
    (rf"(?i:(?<![A-Za-z0-9ʻʼ.])(?<![A-Za-zʻʼ]-)(?:{any_of(ABBREVIATIONS)})(?![A-Za-zʻʼ]))", _full),
)


def readable_dots() -> frozenset[str]:
    """Returns words, without their final dot, after which a dot does not end a sentence."""
    ends = {"va h.k.", "va b.", "va b.q.", "va boshq.", "h.k.", "va h. k.", "y.", "yy."}
    return frozenset(word[:-1].split()[-1] for word in ABBREVIATIONS.keys() - ends if word.endswith("."))
