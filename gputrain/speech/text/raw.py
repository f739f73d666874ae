"""Rules that a raw text goes through before those of its language, equally for all languages: tags of SSML (Speech
Synthesis Markup Language 1.1, W3C 2010) are removed, and the words of a user's lexicon and numbers are written out.

Only elements of SSML are tags, so that `a < b` stays. A break becomes a comma, the end of a paragraph or a sentence a
new line, and <sub alias="..."> its alias; the content of all other elements is read as it is.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gputrain.speech.text.language import Language
from gputrain.speech.text.lexicon import Lexicon, read_lexicon
from gputrain.speech.text.number_words import with_number_words
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
