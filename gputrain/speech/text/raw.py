"""Rules that a raw text goes through before those of its language, equally for all languages: tags of SSML (Speech
Synthesis Markup Language 1.1, W3C 2010) are removed, and the words of a user's lexicon and numbers are written out.

Only elements of SSML are tags, so that `a < b` stays. A break becomes a comma, the end of a paragraph or a sentence a
new line, and <sub alias="..."> its alias; the content of all other elements is read as it is.

Numbers of languages without rules of this package are written by num2words, which is under the LGPL and therefore an
extra: pip install "gputrain[numbers]".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gputrain.errors import UserError, require
from gputrain.speech.text.language import Language
from gputrain.speech.text.lexicon import Lexicon, read_lexicon
from gputrain.speech.text.numerals import NUMBER, parse_number
from gputrain.speech.text.unicode_cleanup import unify_characters, visible

_NAMES = (
    "speak|voice|lang|p|s|break|prosody|emphasis|say-as|sub|phoneme|token|w|mark|audio|desc|lexicon|lookup|meta|metadata"
    r"|par|seq|media|(?:amazon|mstts|google):[a-z-]+"
)
_SUBSTITUTE = re.compile(
    r"<sub\s[^<>]{0,99}?alias\s{0,9}=\s{0,9}([\"'])(?P<alias>[^<>]{0,300}?)\1[^<>]{0,99}>[^<>]*</sub\s*>", re.IGNORECASE
)
_MOST_NESTED = 5  # Tags within tags that are removed, one level at a time.
_TAG = re.compile(
    rf"<!--(?:(?!-->|<!--).)*-->|<[?!][^<>]*>|<(?P<end>/?)(?P<name>{_NAMES})(?:\s[^<>]*)?/?>", re.IGNORECASE | re.DOTALL
)
_ENTITIES = {"&amp;": "&", "&quot;": '"', "&apos;": "'", "&lt;": " ", "&gt;": " "}


def without_tags(text: str) -> str:
    """Returns a text without the tags of SSML, and with its entities as characters; other text stays as it is."""
    for _ in range(_MOST_NESTED):
        if "<" not in text:
            return text
        plain, count = _TAG.subn(_spoken, _SUBSTITUTE.sub(lambda found: found["alias"], text))
        if not count and plain == text:
            return text
        for entity, char in _ENTITIES.items():
            plain = plain.replace(entity, char)
        text = plain
    return text.replace("<", " ")


def _spoken(found: re.Match[str]) -> str:
    name = (found["name"] or "").lower()
    return ", " if name == "break" else "\n" if name in ("p", "s") and found["end"] else ""


@dataclass(frozen=True)
class RawRules:
    """Rules for raw text, apart from the removal of SSML tags: a user's spellings by word, and the language whose
    numbers num2words writes in words ("" for none, or if the rules of the text's language write them)."""

    lexicon: Mapping[str, str] = field(default_factory=dict)
    number_words: str = ""

    def __call__(self, text: str, language: Language) -> str:
        """Returns a text without tags, with the spellings of the lexicon, and with numbers in words."""
        text = without_tags(text)
        if self.lexicon:
            lexicon, unified = self._compiled(language)
            text = lexicon(unified(text))
        return with_number_words(visible(text), self.number_words) if self.number_words else text

    def _compiled(self, language: Language) -> tuple[Lexicon, Callable[[str], str]]:
        """Returns the lexicon for a language, and the function that its words and the text go through: only rules of a
        language may change characters, so that texts of other languages stay as they are."""
        if language.name not in self._by_language:
            unified = unify_characters if language.letters else visible
            words = {unified(word): unified(said) for word, said in self.lexicon.items()}
            self._by_language[language.name] = Lexicon(words, language.endings, language.attach), unified
        return self._by_language[language.name]

    @cached_property
    def _by_language(self) -> dict[str, tuple[Lexicon, Callable[[str], str]]]:
        return {}

    def with_words(self, path: Path | None) -> "RawRules":
        """Returns these rules with the words of a lexicon file, which take precedence."""
        return self if path is None else replace(self, lexicon={**self.lexicon, **read_lexicon(path)})

    def to_json(self) -> dict[str, Any]:
        return {"lexicon": dict(self.lexicon), "number_words": self.number_words}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RawRules":
        """Restores the rules from `to_json`. Raises LookupError, TypeError or ValueError if it is invalid."""
        lexicon, number_words = dict(content["lexicon"]), content["number_words"]
        if not isinstance(number_words, str) or not all(
            isinstance(one, str) for pair in lexicon.items() for one in pair
        ):
            raise TypeError("the lexicon is no mapping of words to spellings")
        return cls(lexicon, number_words)


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
