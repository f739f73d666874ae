"""Uzbek abbreviations, letter names, internet addresses, and signs as words."""

import re

from gputrain.tts.text.uzbek.numbers import SUFFIX

LETTER_NAMES = {
    "a": "a", "b": "be", "c": "se", "d": "de", "e": "e", "f": "ef", "g": "ge", "h": "ha", "i": "i", "j": "je",
    "k": "ka", "l": "el", "m": "em", "n": "en", "o": "o", "p": "pe", "q": "qa", "r": "er", "s": "es", "t": "te",
    "u": "u", "v": "ve", "x": "xa", "y": "ye", "z": "ze", "oʻ": "oʻ", "gʻ": "gʻa", "sh": "sha", "ch": "cha",
}  # fmt: skip
# Full forms of abbreviations in lower case; a final dot belongs to the abbreviation.
ABBREVIATIONS = {
    "va h.k.": "va hokazo", "va h.k": "va hokazo", "va hk": "va hokazo", "va h. k.": "va hokazo", "h.k.": "hokazo",
    "va b.": "va boshqalar", "va b.q.": "va boshqalar", "va boshq.": "va boshqalar", "b-n": "bilan", "b-an": "bilan",
    "m-n": "masalan", "mas.": "masalan", "mln": "million", "mln.": "million", "mlrd": "milliard",
    "mlrd.": "milliard", "trln": "trillion", "trln.": "trillion", "prof.": "professor", "akad.": "akademik",
    "dots.": "dotsent", "dok.": "doktor", "t.f.d.": "texnika fanlari doktori", "tel.": "telefon", "koʻch.": "koʻchasi",
    "viloyat.": "viloyat", "vil.": "viloyati", "tum.": "tumani", "mah.": "mahallasi", "sh.": "shahri",
    "t/r": "tartib raqami", "sm.": "santimetr", "q.": "qarang", "y.": "yil", "yy.": "yillar", "hoz.": "hozirgi",
    "mil. avv.": "miloddan avvalgi", "mil.av.": "miloddan avvalgi", "mil.": "milodiy", "p.s.": "pe es",
}  # fmt: skip
# Abbreviations in capitals that are spelled although they have vowels; those without a vowel are always spelled.
SPELLED = {
    "AQSH", "OAV", "IIV", "OTM", "YAIM", "YIM", "AJ", "MAJ", "YI", "BAA", "AES", "IES", "IIB", "OTB", "IT", "USB",
    "EHM", "TIV", "SI", "AI", "ATB", "OTS", "YUK", "TVEM", "FHDYO", "ATM", "YOAJ", "UZS",
}  # fmt: skip
_SAID = {
    "&": "va", "+": "plyus", "=": "teng", "№": "raqam", "@": "kuchukcha", "×": "karra", "§": "paragraf",
    "~": "taxminan",
    "≈": "taxminan", "÷": "boʻlingan", "<": "kichik", ">": "katta", "%": "foiz", "°": "daraja", "$": "dollar",
    "€": "yevro", "₽": "rubl", "£": "funt sterling",
}  # fmt: skip
_IN_ADDRESSES = {".": "nuqta", "@": "kuchukcha", "/": "slesh", "-": "chiziqcha", "_": "tagchiziq", ":": "ikki nuqta"}

_ADDRESS = re.compile(
    r"(?:https?://|[wv]{3}\.)[^\s,;!?<>\"]{1,300}|[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,6}"
    r"|(?<![A-Za-z0-9.@-])[A-Za-z0-9-]{2,63}(?:\.[A-Za-z0-9-]{1,63}){0,3}\.(?:uz|com|ru|org|net|info|edu|gov|io)"
    r"(?:/[^\s,;!?]{0,200})?(?![A-Za-z0-9])"
)
_LONG = "|".join(re.escape(word) for word in sorted(ABBREVIATIONS, key=len, reverse=True))
_ABBREVIATION = re.compile(rf"(?<![A-Za-z0-9ʻʼ.])(?<![A-Za-zʻʼ]-)(?:{_LONG})(?![A-Za-zʻʼ])", re.IGNORECASE)
_INITIAL = re.compile(r"(?<![A-Za-zʻʼ])([A-Z]ʻ?|Sh|Ch|Yo|Yu|Ya)\.(?= ?[A-Z])")
_CAPITALS = re.compile(rf"(?<![A-Za-zʻʼ])((?:[A-Z]ʻ?|(?<=[A-Z])[hʻ]){{2,8}})(?:-?({SUFFIX}))?(?![A-Za-zʻʼ])")
_LONE = re.compile(r"(?<![A-Za-zʻʼ])(?<![A-Za-zʻʼ]-)([b-df-hj-np-tvxyz])(?![A-Za-zʻʼ])")
_LETTER = re.compile(r"[og]ʻ|[sc]h|[a-z]")


def addresses(text: str) -> str:
    """Replaces the signs of e-mail and internet addresses by words."""
    return _ADDRESS.sub(lambda found: _address(found[0]), text)


def _address(written: str) -> str:
    bare = re.sub(r"^https?://", "", written)
    ending = re.search(r"[.,:'/)]*$", bare)
    bare, ending_marks = bare[: ending.start()] if ending else bare, ending[0].replace("/", "") if ending else ""
    bare = re.sub(r"^[wv]{3}\.", "ve ve ve.", bare)
    return re.sub(r"[./@_:-]", lambda found: f" {_IN_ADDRESSES[found[0]]} ", bare) + ending_marks


def expanded(text: str) -> str:
    """Expands abbreviations; a dot that also ends the sentence is kept."""
    return _ABBREVIATION.sub(lambda found: _full(found, text), text)


def _full(found: re.Match[str], text: str) -> str:
    ends_sentence = found[0].endswith(".") and re.match(r"$| +[A-ZʻʼА-Я]", text[found.end() : found.end() + 3])
    words = ABBREVIATIONS[found[0].lower()]
    ends = ends_sentence and words in ("va hokazo", "va boshqalar", "yil", "yillar", "million", "milliard", "hokazo")
    return words + ("." if ends else "")


def initials(text: str) -> str:
    """Replaces initials by the names of their letters, without dots: A. Navoiy, Sh. Rashidov."""
    return _INITIAL.sub(lambda found: names(found[1]) + " ", text)


def spelled(text: str) -> str:
    """Replaces abbreviations in capitals by the names of their letters, unless the whole text is in capitals."""
    if re.search("[a-z]{2}", text) or len(text.split()) < 3:
        text = _CAPITALS.sub(_capitals, text)
    return text


def alone(text: str) -> str:
    """Replaces single lower-case consonants by their names."""
    return _LONE.sub(lambda found: names(found[1]), text)


def names(letters: str) -> str:
    return " ".join(LETTER_NAMES.get(one, one) for one in _LETTER.findall(letters.lower()))


def _capitals(found: re.Match[str]) -> str:
    word = found[1].upper()
    if word in SPELLED or not set(word) & set("AEIOU"):
        return names(found[1]) + (found[2] or "")
    return found[0]


def signs(text: str) -> str:
    """Replaces signs by words."""
    return re.sub(f"[{re.escape(''.join(_SAID))}]", lambda found: f" {_SAID[found[0]]} ", text)


def readable_dots() -> frozenset[str]:
    """Returns words, without their final dot, after which a dot does not end a sentence."""
    ends = {"va h.k.", "va b.", "va b.q.", "va boshq.", "h.k.", "va h. k.", "mln.", "mlrd.", "trln.", "y.", "yy."}
    return frozenset(word[:-1].split()[-1] for word in ABBREVIATIONS.keys() - ends if word.endswith("."))
