"""Letters that look alike: those that the orthography of a language takes for one are unified, others are named.

Sources: Unicode's confusables.txt (UTS 39), of whose letters the table below has those that alphabets in use share;
Unicode Standard, 7.1 (Romanian comma and cedilla) and 9.2 (Arabic and Persian yeh and kaf, tatweel).
"""

import re
import unicodedata
from collections.abc import Iterable

from gputrain.speech.text.unicode_cleanup import TATWEEL

_ROMANIAN = str.maketrans("şţŞŢ", "șțȘȚ")
_PERSIAN = str.maketrans("يىك", "ییک")
_ARABIC = str.maketrans("یک", "يك")
_UNIFIED: dict[str, dict[int, int]] = {
    "ro": _ROMANIAN,
    "mo": _ROMANIAN,
    "fa": _PERSIAN,
    "pes": _PERSIAN,
    "ur": _PERSIAN,
    "ar": _ARABIC,
}
DOTLESS = {"tr", "az", "crh", "tt-latn"}  # The capital of the dotless ı is I in these languages.
# Latin letters within Cyrillic words: those of all alphabets, and those of some.
_LATIN, _CYRILLIC = "aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ"
_SOME: dict[str, tuple[str, str]] = {
    "be": ("iI", "іІ"), "uk": ("iI", "іІ"), "kk": ("iIhəƏǝɵƟ", "іІһәӘәөӨ"), "tt": ("həƏǝɵƟ", "һәӘәөӨ"),
    "ba": ("həƏǝɵƟ", "һәӘәөӨ"), "ky": ("ɵƟ", "өӨ"), "mn": ("ɵƟ", "өӨ"), "sr": ("jJ", "јЈ"), "mk": ("jJsS", "јЈѕЅ"),
    "ru": ("", ""), "bg": ("", ""), "tg": ("", ""), "cv": ("", ""), "sah": ("ɵƟh", "өӨһ"),
}  # fmt: skip
_OF_CYRILLIC = {code: str.maketrans(_LATIN + latin, _CYRILLIC + cyrillic) for code, (latin, cyrillic) in _SOME.items()}
_WORD = re.compile(r"[^\W\d_]+")
_HAS_CYRILLIC, _HAS_LATIN = re.compile("[Ѐ-ӿ]"), re.compile("[A-Za-zƏəǝƟɵ]")

# Pairs of letters that look alike, some of them in upper case only.
_ALIKE = (
    "aа", "aα", "ɑα", "bв", "cс", "eе", "hн", "hһ", "iі", "iι", "ıι", "jј", "kк", "kκ", "mм", "oо", "oο", "oօ", "pр",
    "pρ", "qԛ", "sѕ", "tт", "tτ", "uυ", "vν", "wԝ", "xх", "yу", "yγ", "əә", "əǝ", "әǝ", "ɵө", "gɡ", "lӏ", "ɛε", "ßβ",
    "şș", "ţț", "ģǵ", "ïї", "ëё", "äӓ", "öӧ", "ÿӱ", "ăӑ", "ңӊ", "қӄ", "یي", "یى", "کك", "ہه", "ۃة", "۴٤", "۵٥", "۶٦",
    "\u0326\u0327", "'ʼ", "’ʼ", "ʻʼ",
)  # fmt: skip


def unified_letters(language: str) -> dict[str, str]:
    """Returns the code points after NFD that the orthography of a language takes for others, with these."""
    pairs = _UNIFIED.get(language.partition("-")[0].lower(), {}).items()
    spelled = [[unicodedata.normalize("NFD", chr(one)) for one in pair] for pair in pairs]
    return {one: other for pair in spelled for one, other in zip(*pair, strict=True) if one != other}


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
    if code in _UNIFIED:
        return text.translate(_UNIFIED[code])
    table = _OF_CYRILLIC.get(code)
    if table is None or not _HAS_LATIN.search(text) or not _HAS_CYRILLIC.search(text):
        return text

    def spelled(found: re.Match[str]) -> str:
        word = found[0]
        made = word.translate(table) if _HAS_CYRILLIC.search(word) else word
        return word if _HAS_LATIN.search(made) else made

    return _WORD.sub(spelled, text)


def lookalikes(symbols: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the pairs of symbols that look alike."""
    known = {*symbols}
    widths = ((unicodedata.normalize("NFKC", char), char) for char in sorted(known) if "！" <= char <= "ￜ")
    return [(pair[0], pair[1]) for pair in (*_ALIKE, *widths) if known.issuperset(pair)]


def named_with_twins(chars: Iterable[str], symbols: Iterable[str]) -> str:
    """Returns characters without a symbol for messages, each with the symbol that looks like it, if there is one."""
    known = {*symbols}
    twins = {char: next((two for one in _ALIKE if char in one for two in one if two in known), "") for char in chars}
    return " ".join(f"{char!r}" + f" (looks like {twin!r})" * bool(twin) for char, twin in twins.items())
