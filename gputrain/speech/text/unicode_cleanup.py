"""Unicode clean-up: unifies equivalent code points and letters that an orthography takes for one, and keeps only the
characters that a language uses.

Sources: Unicode Standard, 7.1 (Romanian comma and cedilla) and 9.2 (Arabic and Persian yeh and kaf, tatweel); Unicode's
confusables.txt (UTS 39).
"""

import re
import unicodedata
from collections.abc import Callable

PUNCTUATION = " !,-.:;?"
# All characters that are typed for an apostrophe; normalisation maps them to the first one.
APOSTROPHES = "'ʻʼ‘’‛`´ʹʽʾʿˈ′‵＇ꞌ"
_APOSTROPHES = str.maketrans(dict.fromkeys(APOSTROPHES, "'"))
_DASHES = str.maketrans({**dict.fromkeys("‐‑‒–−⁃－", "-"), "—": " - ", "―": " - ", "⁄": "/", "∕": "/"})
_FRACTIONS = re.compile(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")
_POWER = re.compile(r"(?<![^\W\d_]{3})(?<=[\w)])[⁺⁻]?(?:[⁰¹²³⁴-⁹]+|ⁿ)")
_SQUARE_UNIT = re.compile(r"(?:^|[0-9/ ])(?:[mcdk]?m|sm|s|ft|in|yd|mi|[мсдк]?м|с)$")
_BRACKETS = str.maketrans(dict.fromkeys("()[]{}", ","))
_PAUSE = re.compile(r"[ !,\-.:;?]+")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")  # Without those that are spaces.
TATWEEL = "ـ"  # It lengthens the line in Arabic script, and is part of no word.
_ZERO_WIDTH_SPACE = "\u200b"
# Ligatures, and Arabic and Hebrew letters by their shape, of PDF files: other code points of letters, unlike the raised
# letters of IPA. The micro sign is a Greek letter.
_SHAPES = re.compile("[µ\ufb00-\ufdff\ufe70-\ufefc]")
JOINERS = "\u200c\u200d"  # Zero-width non-joiner and joiner, parts of the spelling in Persian, Sinhala, Hindi ...
_JOINERS = re.compile(f"[{JOINERS}]+")
# The rhotic hook, tone letters, up- and downstep, and rise and fall: symbols of IPA that Unicode takes for signs.
IPA_SIGNS = frozenset(map(chr, (*range(0x2D2, 0x2D8), 0x2DE, *range(0x2E5, 0x2EA), *range(0xA700, 0xA722)))) | {*"↑↓↗↘"}
_VIRAMA = 9  # The combining class of signs that remove a vowel; a joiner after one shapes the letter before it.


def visible(text: str) -> str:
    """Returns NFC with single spaces, without control and format characters, except for joiners."""
    text = _CONTROLS.sub("", text)
    if not text.isascii():
        spaced = text.replace(_ZERO_WIDTH_SPACE, " ")
        text = "".join(char for char in spaced if char in JOINERS or unicodedata.category(char) != "Cf")
        text = _SHAPES.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
    return unicodedata.normalize("NFC", " ".join(text.split()))


def tidy_joiners(text: str) -> str:
    """Returns a text whose joiners stand between letters or marks, or after a virama."""
    return _JOINERS.sub(_joiner, text)


def _joiner(found: re.Match[str]) -> str:
    before, after = found.string[found.start() - 1 : found.start()], found.string[found.end() : found.end() + 1]
    is_shaping = before and unicodedata.combining(before) == _VIRAMA
    return found[0][0] if joins(before) and (is_shaping or joins(after)) else ""


def joins(char: str) -> bool:
    """Returns True for a letter or a mark, False for other characters and for none."""
    return bool(char) and unicodedata.category(char)[0] in "LM"


def unify_characters(text: str) -> str:
    """Maps apostrophes, dashes, digits, spaces and widths to one code point each, and removes invisible ones."""
    text = unicodedata.normalize("NFC", _CONTROLS.sub("", text))
    if text.isascii():
        return " ".join(text.replace("`", "'").split())
    text = _POWER.sub(_power, text.translate(_APOSTROPHES))
    text = _FRACTIONS.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    # Cf are zero-width characters; NFKC would replace № by No.
    plain = "".join(char if char in "№" else unicodedata.normalize("NFKC", char) for char in text)
    kinds = ((char, unicodedata.category(char)) for char in plain)
    digits = "".join(str(unicodedata.decimal(char)) if kind == "Nd" else char for char, kind in kinds if kind != "Cf")
    return " ".join(unicodedata.normalize("NFC", digits.translate(_APOSTROPHES).translate(_DASHES)).split())


def _power(found: re.Match[str]) -> str:
    """Returns x² as x^2, and m² as the unit m2."""
    is_unit = found[0] in "²³" and _SQUARE_UNIT.search(found.string[max(0, found.start() - 4) : found.start()])
    return ("" if is_unit else "^") + unicodedata.normalize("NFKC", found[0]).replace("−", "-")


def keep_letters(text: str, letters: str) -> str:
    """Returns lower case with only `letters` and PUNCTUATION; adjacent punctuation becomes one pause."""
    text = re.sub(r"(?<!\.)\.(?=[,;:] ?[^\W\d_A-ZА-ЯЁ])", "", text)  # The dot of an abbreviation: 5 lbs., or.
    kept = re.sub(f"[^{re.escape(letters + PUNCTUATION)}]", " ", text.lower().translate(_BRACKETS))
    return _PAUSE.sub(_pause, kept).lstrip(PUNCTUATION).rstrip(" -")


def _pause(found: re.Match[str]) -> str:
    run = found[0]
    if ".." in run:
        return "... "
    for mark in "?!.;:,":
        if mark in run:
            return mark + " "
    if "-" not in run:
        return " "
    return " - " if " " in run else "-"


def is_removed(char: str, normalize: Callable[[str], str]) -> bool:
    """Returns True if a character of a raw text leaves nothing in the normalised one, beside letters and digits."""
    return char != TATWEEL and all(
        normalize(f"{before}{char}{after}") in {normalize(f"{before}{gap}{after}") for gap in ("", " ")}
        for before, after in (("a", "a"), ("5", ""), ("", "5"))
    )


def script_of(char: str) -> str:
    """Returns the script of a letter by its Unicode name, such as Latin; empty for other characters."""
    if len(char) != 1 or unicodedata.category(char) not in ("Lu", "Ll", "Lt", "Lo"):
        return ""
    return unicodedata.name(char, "").split(" ")[0].split("-")[0].capitalize()


# ------------------------------------------------------------------------------------------- letters of an orthography


DOTLESS = {"tr", "az", "crh", "tt-latn"}  # The capital of the dotless ı is I in these languages.
# Latin letters within Cyrillic words, and their twins, also those of Ukrainian, Kazakh and other languages.
_CYRILLIC = str.maketrans("aceopxyihəǝɵABCEHKMOPTXIƏƟ", "асеорхуіһәәөАВСЕНКМОРТХІӘӨ")
_WORD = re.compile(r"[^\W\d_]+")
_HAS_CYRILLIC, _HAS_LATIN = re.compile("[Ѐ-ӿ]"), re.compile("[A-Za-zƏəǝƟɵ]")


def unify_letters(text: str, language: str) -> str:
    """Returns a text whose letters are those of the orthography of a language, given by its code; tatweels are removed
    in all. Latin letters become Cyrillic in words that have Cyrillic ones, if all of them have such a twin. Turkish
    I and İ become lower case."""
    code = language.partition("-")[0].lower()
    if code in DOTLESS or language.lower() in DOTLESS:
        text = unicodedata.normalize("NFC", text).replace("İ", "i").replace("I", "ı")
    if text.isascii():
        return text
    text = text.replace(TATWEEL, "")
    # The rules of Uzbek, which has both alphabets, decide by the most letters of a word, and English has no Cyrillic.
    if code in ("uz", "en") or not _HAS_LATIN.search(text) or not _HAS_CYRILLIC.search(text):
        return text

    def spelled(found: re.Match[str]) -> str:
        word = found[0]
        made = word.translate(_CYRILLIC) if _HAS_CYRILLIC.search(word) else word
        return word if _HAS_LATIN.search(made) else made

    return _WORD.sub(spelled, text)
