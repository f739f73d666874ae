"""Words with a spelling of their own: the package's names of products, and a user's lexicon (`Facebook: feysbuk`)."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gputrain.config import read_file
from gputrain.errors import UserError
from gputrain.speech.text.lines import read_text
from gputrain.speech.text.unicode_cleanup import JOINERS, visible


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
        return {word.lower(): spelling for word, spelling in self.words.items() if not _is_capitals(word)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # A look at the first letter is faster than a try of all words.
        first = "".join(sorted({char for word in self.words for char in (word[0].lower(), word[0].upper())}))
        words = "|".join(re.escape(word) for word in sorted(self.words, key=len, reverse=True))
        ending = rf"(?:['-]?(?P<suffix>{self.suffix}))?" if self.suffix else ""
        # A word within an address (info@gmail.com) is left to its rule.
        before, after = r"(?<![\w'@])(?<!\w[-.])", r"(?![\w@])(?!\.[A-Za-z])"
        return re.compile(rf"{before}(?=[{re.escape(first)}])(?P<word>(?i:{words})){ending}{after}")


def _is_capitals(word: str) -> bool:
    return word == word.upper() and word != word.lower()


def read_lexicon(path: Path) -> dict[str, str]:
    """Reads spellings by word from a YAML or JSON mapping, or from a table with a tab between word and spelling.

    Raises UserError if it is neither, a word or a spelling is empty, or a spelling contains a word of the file.
    """
    found = _read_table(path) if path.suffix.lower() in (".tsv", ".txt") else read_file(path)
    words: dict[str, str] = {}
    for word, spelling in found.items():
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


def _read_table(path: Path) -> dict[str, str]:
    lines = read_text(path, "--lexicon takes a YAML, JSON or TSV file").split("\n")
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    for number, row in rows:
        if len(row) != 2:
            raise UserError(f"{path}: line {number} has {len(row)} columns, expected a word, a tab and its spelling")
    return {word.strip(): spelling.strip() for _, (word, spelling) in rows}
