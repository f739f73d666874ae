"""Numbers as words by num2words, for languages without rules of this package.

The package is under the LGPL, so it is an extra: pip install "gputrain[numbers]".
"""

import re
from typing import Any

from gputrain.errors import UserError, require
from gputrain.speech.text.numerals import NUMBER, parse_number

_CODES = {"kk": "kz", "cmn": "zh", "nb": "no"}  # Codes of ISO 639 that num2words has under another name.
_DECIMAL_POINT = {"en", "zh", "ja", "ko", "th", "he", "hi", "te", "kn", "bn"}
_LONGEST = 100  # The most digits of a number; longer ones are codes.
_WRITTEN = re.compile(rf"(?<![0-9])(?P<sign>(?<![^\s(])[-−])?(?P<number>{NUMBER})")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")


def converter_of(language: str) -> str:
    """Returns num2words' name of a language (`pt-BR` is pt_BR), or "" if it has none. Raises UserError without it."""
    require("num2words", needed_by=f"numbers in words for {language!r}")
    from num2words import CONVERTER_CLASSES

    bare, _, region = language.partition("-")
    code = _CODES.get(bare.lower(), bare.lower())
    names = (f"{code}_{region.upper()}", code)
    return next((name for name in names if name in CONVERTER_CLASSES), "")


def checked_language(language: str) -> str:
    """Returns the code of a language whose numbers can be written. Raises UserError if num2words does not know it."""
    if not converter_of(language):
        from num2words import CONVERTER_CLASSES

        raise UserError(
            f"num2words has no numbers of the language {language!r}",
            hint=f"it has {', '.join(sorted(CONVERTER_CLASSES))}",
        )
    return language


def with_number_words(text: str, language: str) -> str:
    """Returns a text with its numbers in words; numbers that the language can't say are read digit by digit. Digits may
    be those of any script."""
    text = _OTHER_DIGIT.sub(lambda found: str(int(found[0])), text)
    if not re.search("[0-9]", text):
        return text
    name = converter_of(language)
    decimal = "." if name[:2] in _DECIMAL_POINT else ","

    def spoken(found: re.Match[str]) -> str:
        parsed = parse_number(found["number"], decimal)
        is_code = (parsed.whole.startswith("0") and len(parsed.whole) > 1) or len(parsed.whole) > _LONGEST
        value = 0 if is_code else float(f"{parsed.whole}.{parsed.fraction}") if parsed.fraction else int(parsed.whole)
        words = "" if is_code else _words(-value if found["sign"] else value, name)
        return f" {words or ' '.join(_words(int(digit), name) or digit for digit in parsed.whole + parsed.fraction)} "

    return " ".join(_WRITTEN.sub(spoken, text).split())


def _words(value: float, name: str) -> str:
    """Returns a number in words; "" if it is beyond the words of the language."""
    from num2words import num2words

    try:
        said: Any = num2words(value, lang=name)
    except (NotImplementedError, OverflowError, KeyError, IndexError, ValueError, TypeError):
        return ""
    return "" if re.search("[0-9]", str(said)) else str(said)
