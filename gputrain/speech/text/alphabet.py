"""Alphabet tables: other spellings of a language's letters, as letter: spelling in a YAML or JSON file.

`sh: ş` writes the digraph as one letter, `sh: ʃ` as the symbol of its sound. Other letters do not change.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from gputrain.config import read_file
from gputrain.errors import UserError
from gputrain.speech.text.language import PUNCTUATION
from gputrain.speech.text.unicode_cleanup import APOSTROPHES

BARRED = PUNCTUATION + "_^$"  # Characters besides digits that no spelling contains.


def read_alphabet(path: Path, letters: tuple[str, ...]) -> dict[str, str]:
    """Reads a table of spellings for `letters`. Raises UserError if it is invalid, or two letters have one spelling."""
    table: dict[str, str] = {}
    known = {_plain(letter): letter for letter in letters}
    for key, spelling in read_file(path).items():
        letter = known.get(_plain(key))
        if letter is None:
            raise UserError(f"{path}: {key!r} is not a letter of the language", hint=f"letters: {' '.join(letters)}")
        is_lower = isinstance(spelling, str) and spelling and spelling == spelling.lower()
        if not is_lower or any(char.isdigit() or char in BARRED for char in str(spelling)):
            raise UserError(
                f"{path}: {key} is spelled {spelling!r}, expected lower-case letters",
                hint="no spaces, digits, punctuation, nor Piper's _ ^ $; in quotes if YAML reads it as another type",
            )
        table[letter] = unicodedata.normalize("NFC", str(spelling))
    owners: dict[str, str] = {}
    for letter in letters:
        spelling = table.get(letter, letter)
        if spelling in owners:
            raise UserError(f"{path}: {owners[spelling]} and {letter} are both spelled {spelling}")
        owners[spelling] = letter
    return table


def _plain(letter: str) -> str:
    return re.sub(f"[{APOSTROPHES}]", "'", unicodedata.normalize("NFC", letter).lower())


def respelled(text: str, table: Mapping[str, str], letters: Iterable[str]) -> str:
    """Converts lower-case text in standard letters to the spellings of a table."""
    return _replaced(text, {letter: table.get(letter, letter) for letter in letters}) if table else text


def standard(text: str, table: Mapping[str, str], letters: Iterable[str]) -> str:
    """Converts text of any case, in the spellings of a table or in standard letters, to standard letters."""
    if not table:
        return text
    back = {form: form for letter in letters for form in (letter, letter.capitalize(), letter.upper())}
    for letter, spelling in table.items():
        back[spelling.upper()] = letter.capitalize()
        back[spelling] = letter
    return _replaced(unicodedata.normalize("NFC", text), back)


def _replaced(text: str, by: Mapping[str, str]) -> str:
    longest_first = sorted(by, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), lambda found: by[found[0]], text)
