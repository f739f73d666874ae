"""Uzbek abbreviations, letter names, internet addresses, and signs as words."""

import re

from gputrain.speech.text.language import any_of, rewriter
from gputrain.speech.text.uzbek.letters import WORDS
from gputrain.speech.text.uzbek.numbers import SUFFIX

ABBREVIATIONS: dict[str, str] = WORDS["abbreviations"]
_CAPITALS = re.compile(rf"(?<![A-Za-zʻʼ])((?:[A-Z]ʻ?|(?<=[A-Z])[hʻ]){{2,8}})(?:-?({SUFFIX}))?(?![A-Za-zʻʼ])")
_LONE = re.compile(r"(?<![A-Za-zʻʼ])(?<![A-Za-zʻʼ]-)([b-df-hj-np-tvxyz])(?![A-Za-zʻʼ])")
_LETTER = re.compile(r"[og]ʻ|[sc]h|[a-z]")


def _address(found: re.Match[str]) -> str:
    """Replaces the signs of an e-mail or internet address by words."""
    bare = re.sub(r"^https?://", "", found[0])
    ending = re.search(r"[.,:'/)]*$", bare)
    bare, ending_marks = bare[: ending.start()] if ending else bare, ending[0].replace("/", "") if ending else ""
    bare = re.sub(r"^[wv]{3}\.", "ve ve ve.", bare)
    return re.sub(r"[./@_:-]", lambda found: f" {WORDS['signs_in_addresses'][found[0]]} ", bare) + ending_marks


def _full(found: re.Match[str]) -> str:
    """Expands an abbreviation; a dot that also ends the sentence is kept."""
    following = found.string[found.end() : found.end() + 3]
    ends_sentence = found[0].endswith(".") and re.match(r"$| +[A-ZʻʼА-Я]", following)
    words = ABBREVIATIONS[found[0].lower()]
    ends = ends_sentence and words in ("va hokazo", "va boshqalar", "yil", "yillar", "million", "milliard", "hokazo")
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


# Internet addresses, initials (A. Navoiy, Sh. Rashidov), which become names of letters, and abbreviations.
in_full = rewriter(
    (
        r"(?:https?://|[wv]{3}\.)[^\s,;!?<>\"]{1,300}"
        r"|[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
        r"|(?<![A-Za-z0-9.@-])[A-Za-z0-9-]{2,63}(?:\.[A-Za-z0-9-]{1,63}){0,3}\.(?:uz|com|ru|org|net|info|edu|gov|io)"
        r"(?:/[^\s,;!?]{0,200})?(?![A-Za-z0-9])",
        _address,
    ),
    (r"(?<![A-Za-zʻʼ])([A-Z]ʻ?|Sh|Ch|Yo|Yu|Ya)\.(?= ?[A-Z])", lambda m: names(m[1]) + " "),
    (rf"(?i:(?<![A-Za-z0-9ʻʼ.])(?<![A-Za-zʻʼ]-)(?:{any_of(ABBREVIATIONS)})(?![A-Za-zʻʼ]))", _full),
)


def readable_dots() -> frozenset[str]:
    """Returns words, without their final dot, after which a dot does not end a sentence."""
    ends = {"va h.k.", "va b.", "va b.q.", "va boshq.", "h.k.", "va h. k.", "mln.", "mlrd.", "trln.", "y.", "yy."}
    return frozenset(word[:-1].split()[-1] for word in ABBREVIATIONS.keys() - ends if word.endswith("."))
