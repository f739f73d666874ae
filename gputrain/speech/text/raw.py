"""Rules that a raw text goes through before those of its language, equally for all languages."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gputrain.speech.text.language import Language
from gputrain.speech.text.lexicon import Lexicon, read_lexicon
from gputrain.speech.text.number_words import with_number_words
from gputrain.speech.text.ssml import without_tags
from gputrain.speech.text.unicode_cleanup import unified


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
            text = self._compiled(language)(unified(text))
        return with_number_words(unified(text), self.number_words) if self.number_words else text

    def _compiled(self, language: Language) -> Lexicon:
        if language.name not in self._by_language:
            self._by_language[language.name] = Lexicon(self.lexicon, language.endings, language.attach)
        return self._by_language[language.name]

    @cached_property
    def _by_language(self) -> dict[str, Lexicon]:
        return {}

    def with_words(self, path: Path | None) -> "RawRules":
        """Returns these rules with the words of a lexicon file, which take precedence."""
        return self if path is None else replace(self, lexicon={**self.lexicon, **read_lexicon(path)})

    def to_json(self) -> dict[str, Any]:
        """Returns the rules that differ from the defaults, so that texts without any are stored as they always were."""
        found = {"lexicon": dict(self.lexicon), "number_words": self.number_words}
        return {name: value for name, value in found.items() if value}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RawRules":
        """Restores the rules from `to_json`. Raises TypeError or ValueError if the content is invalid."""
        lexicon, number_words = dict(content.get("lexicon", {})), content.get("number_words", "")
        if not isinstance(number_words, str) or not all(
            isinstance(one, str) for pair in lexicon.items() for one in pair
        ):
            raise TypeError("the lexicon is no mapping of words to spellings")
        return cls(lexicon, number_words)
