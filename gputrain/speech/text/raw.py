"""Rules that a raw text goes through before those of its language, equally for all languages: the words of a user's
lexicon and numbers are written out.

Numbers of languages without rules of this package are written by num2words, which is under the LGPL and therefore not
a dependency: pip install num2words.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gputrain.config import read_file
from gputrain.errors import UserError, require
from gputrain.speech.text.language import NUMBER, Language, parse_number
from gputrain.speech.text.unicode_cleanup import JOINERS, unify_characters, visible


@dataclass(frozen=True)
class Lexicon:
    """Spellings by word, for text whose characters are unified as those of the words are.

    Whole words match. A word in capitals (IT) matches only capitals, any other (Facebook, iPhone) matches in every
    case. `suffix` is a pattern of endings that may follow a word, also after an apostrophe or a hyphen, and `attach`
    adds one to a spelling.
    """

    words: Mapping[str, str]
    suffix: str = ""
    attach: Callable[[str, str], str] = str.__add__

    def __call__(self, text: str) -> str:
        """Returns the text with its words replaced."""
        return self._pattern.sub(self._spelling, text) if self.words else text

    def _spelling(self, found: re.Match[str]) -> str:
        text, start, end = found.string, found.start(), found.end()
        neighbours = text[max(0, start - 1) : start] + text[end : end + 1]
        if any(char in JOINERS or unicodedata.category(char)[0] == "M" for char in neighbours):
            return found[0]  # A vowel sign is part of the word, though no letter.
        word, suffix = found["word"], found["suffix"] if self.suffix else None
        spelling = self.words.get(word) or self._in_any_case.get(word.lower())
        if spelling is None:
            return found[0]
        return self.attach(spelling, suffix) if suffix else spelling

    @cached_property
    def _in_any_case(self) -> dict[str, str]:
        return {word.lower(): spelling for word, spelling in self.words.items() if not word.isupper()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # A look at the first letter is faster than a try of all words.
        first = "".join(sorted({char for word in self.words for char in (word[0].lower(), word[0].upper())}))
        words = "|".join(re.escape(word) for word in sorted(self.words, key=len, reverse=True))
        ending = rf"(?:['-]?(?P<suffix>{self.suffix}))?" if self.suffix else ""
        # A word within an address (info@gmail.com) is left to its rule.
        before, after = r"(?<![\w'@])(?<!\w[-.])", r"(?![\w@])(?!\.[A-Za-z])"
        return re.compile(rf"{before}(?=[{re.escape(first)}])(?P<word>(?i:{words})){ending}{after}")


def read_lexicon(path: Path) -> dict[str, str]:
    """Reads spellings by word from a YAML or JSON mapping.

    Raises UserError if it is none, a word or a spelling is empty, or a spelling contains a word of the file.
    """
    words: dict[str, str] = {}
    for word, spelling in read_file(path).items():
        key, said = map(visible, (str(word), spelling if isinstance(spelling, str) else ""))
        if not key or not said or not any(char.isalnum() for char in key):
            raise UserError(
                f"{path}: {word!r} is spelled {spelling!r}, expected a word and its spelling",
                hint="write `Facebook: feysbuk`; in quotes if YAML reads the word as another type, such as 'NO': no",
            )
        words[key] = said
    lexicon = Lexicon(words)
    for word, said in words.items():
        if lexicon(said) != said:
            raise UserError(f"{path}: the spelling of {word}, {said}, contains a word of the lexicon itself")
    return words


@dataclass(frozen=True)
class RawRules:
    """Rules for raw text: a user's spellings by word, and the language whose numbers num2words writes in words ("" for
    none, or if the rules of the text's language write them)."""

    lexicon: Mapping[str, str] = field(default_factory=dict)
    number_words: str = ""

    def __call__(self, text: str, language: Language) -> str:
        """Returns a text with the spellings of the lexicon, and with numbers in words."""
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
        texts = [number_words, *lexicon, *lexicon.values()]
        if not all(isinstance(text, str) for text in texts):
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


def raw_rules(language: str, has_rules: bool, lexicon: Path | None, number_words: str) -> RawRules:
    """Returns rules with the words of a lexicon file and the language of numbers in words. Raises UserError if the
    lexicon is invalid, `language` has rules that write its numbers, or num2words lacks the one that was asked for."""
    if number_words and has_rules:
        raise UserError(f"the rules of {language} write numbers in words", hint="drop --number-words")
    if number_words and not converter_of(number_words):
        from num2words import CONVERTER_CLASSES

        raise UserError(
            f"num2words has no numbers of the language {number_words!r}",
            hint=f"it has {', '.join(sorted(CONVERTER_CLASSES))}",
        )
    return RawRules(number_words=number_words).with_words(lexicon)


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
