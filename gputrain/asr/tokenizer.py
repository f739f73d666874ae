"""Reads the vocabularies of tokenizers of transformers, as their CTC models were saved with."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.errors import UserError
from gputrain.speech.text.vocabulary import ABSENT, BLANK, DELIMITER, UNDETERMINED, UNKNOWN, Vocabulary

log = logging.getLogger(__name__)

VOCABULARY, FAST = "vocab.json", "tokenizer.json"
SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = (VOCABULARY, FAST, SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS)
COPY_AGAIN = "copy the model's folder again"
MOST_LISTED = 8  # Number of names in a message.
MOST_UNNAMED = 4  # So many rows of a head are for special tokens that no file names.

Symbols = Mapping[str, int]  # Ids by symbol.


@dataclass(frozen=True)
class StockTokenizer:
    """The tokenizer of a CTC model: of one language, or as that of MMS of many, each with symbols of its own."""

    path: Path  # the file with the symbols
    symbols: Symbols | None  # None if each language has its own
    of_language: Mapping[str, Symbols]
    settings: Mapping[str, Any]  # those of tokenizer_config.json
    added: Symbols  # symbols that were added to those of the file

    @property
    def target_language(self) -> str | None:
        """The language that the tokenizer is set to; the only one, if there is but one."""
        named = self.settings.get("target_lang")
        if isinstance(named, str) and named:
            return named
        return next(iter(self.of_language)) if len(self.of_language) == 1 else None

    def rows_of(self, language: str | None) -> int:
        """Returns the number of rows of the head that the symbols of a language are written with."""
        return max(self._own(language).values(), default=-1) + 1

    def fits(self, language: str | None, rows: int) -> bool:
        """Returns True if a head of so many rows writes the symbols of a language, and perhaps special tokens that were
        added to them."""
        return 0 <= rows - self.rows_of(language) <= MOST_UNNAMED

    def vocabulary(self, language: str | None, rows: int, blank: int | None) -> Vocabulary:
        """Returns the vocabulary of a head with so many rows.

        Ids beyond the head, which it never writes, are left out, and a row without a symbol gets a name of its own.
        `blank` is the row of CTC's blank by the model's configuration, for a tokenizer that does not name one. Raises
        UserError if the symbols are damaged or those of another model, or none of them is the blank.
        """
        own = self._own(language)
        added = {number: symbol for symbol, number in self.added.items() if symbol not in own}
        named = added | {number: symbol for symbol, number in own.items()}
        if not any(number < rows for number in named):
            raise UserError(f"{self.path}: names no symbol of the model's head", hint=COPY_AGAIN)
        letters = [symbol for symbol, number in own.items() if number >= rows and len(symbol) == 1]
        if letters:
            beyond = (
                f"{self.path}: {len(letters)} of its symbols, such as {letters[0]}, are beyond the {rows} rows of the "
                "model's head"
            )
            if len(letters) > MOST_UNNAMED:
                raise UserError(f"{beyond}: it is the vocabulary of another model", hint=COPY_AGAIN)
            log.warning("%s and are never written", beyond)
        unnamed = sum(number not in named for number in range(rows))
        if unnamed > MOST_UNNAMED:
            log.warning(
                "%s: names %d of the %d rows of the model's head; it may be that of another model",
                self.path, rows - unnamed, rows,
            )  # fmt: skip
        symbols = tuple(named.get(number, f"<unused {number}>") for number in range(rows))
        found = {symbol: number for number, symbol in enumerate(symbols)}
        blank_symbol = _token(self.settings, "pad_token", (BLANK, "[PAD]"), found)
        at = found[blank_symbol] if blank_symbol is not None else blank
        if at is None or not 0 <= at < rows:
            raise UserError(f"{self.path}: no symbol of the blank", hint=f"{SETTINGS} names it as pad_token")
        unknown = _token(self.settings, "unk_token", (UNKNOWN, "[UNK]"), found)
        delimiter = _token(self.settings, "word_delimiter_token", (DELIMITER, " "), found)
        return Vocabulary(
            UNDETERMINED, symbols, at, ABSENT if unknown is None else found[unknown],
            ABSENT if delimiter is None else found[delimiter],
            upper=bool(self.settings.get("do_lower_case")) or _are_capitals(symbols),
        )  # fmt: skip

    def _own(self, language: str | None) -> Symbols:
        if self.symbols is not None:
            return self.symbols
        if language is None:
            raise UserError(
                f"{self.path}: vocabularies of {len(self.of_language)} languages, and {SETTINGS} names none of them as "
                "target_lang",
                hint=f"write one of {format_languages(self.of_language)} there, or name the file of its adapter",
            )
        if language not in self.of_language:
            raise UserError(
                f"{self.path}: no vocabulary of {language}",
                hint=f"it has {format_languages(self.of_language, like=language)}",
            )
        return self.of_language[language]


def read_tokenizer(folder: Path) -> StockTokenizer | None:
    """Returns the tokenizer of a folder, None if it has none. Raises UserError if it is damaged."""
    settings = {**_settings(folder / SPECIAL_TOKENS), **_settings(folder / SETTINGS)}
    path, added = folder / VOCABULARY, _added(folder, settings)
    found: Any
    if path.is_file():
        found = read_json(path)
    elif (folder / FAST).is_file():
        path, content = folder / FAST, read_json(folder / FAST)
        model, decoder = content.get("model"), content.get("decoder")
        found = model.get("vocab") if isinstance(model, dict) else None
        if not isinstance(found, dict):
            raise UserError(f"{path}: no mapping of symbols to ids", hint=f"add the {VOCABULARY} of the model")
        rows = content.get("added_tokens")
        added = {**added, **_ids_of(row for row in rows or () if isinstance(row, dict))}
        settings = {**(decoder if isinstance(decoder, dict) else {}), **settings}
    else:
        return None
    nested = bool(found) and all(isinstance(inner, dict) for inner in found.values())
    for symbols in found.values() if nested else (found,):
        _check_ids(path, symbols)
    return StockTokenizer(path, None if nested else found, found if nested else {}, settings, added)


def format_languages(languages: Iterable[str], like: str = "") -> str:
    """Returns the first of some languages, those that resemble one before the others, and how many more there are."""
    known = sorted(languages, key=lambda language: (language[:3] != like[:3], language))
    named = ", ".join(known[:MOST_LISTED])
    return f"{named} and {len(known) - MOST_LISTED} more" if len(known) > MOST_LISTED else named


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises UserError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint=COPY_AGAIN) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON", hint=COPY_AGAIN) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping", hint=COPY_AGAIN)
    return content


def _settings(path: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json(path).items() if value is not None} if path.is_file() else {}


def _added(folder: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of added symbols: those of added_tokens.json, and those that tokenizer_config.json has instead
    since transformers 4.34."""
    added: dict[str, int] = read_json(folder / ADDED_TOKENS) if (folder / ADDED_TOKENS).is_file() else {}
    _check_ids(folder / ADDED_TOKENS, added)
    listed = settings.get("added_tokens_decoder")
    rows = listed.items() if isinstance(listed, dict) else ()
    return added | _ids_of({**row, "id": int(at)} for at, row in rows if isinstance(row, dict) and at.isdecimal())


def _ids_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return {
        row["content"]: row["id"]
        for row in rows
        if isinstance(row.get("content"), str) and type(row.get("id")) is int and row["id"] >= 0
    }


def _check_ids(path: Path, symbols: Mapping[str, Any]) -> None:
    numbers = list(symbols.values())
    if not all(type(number) is int and 0 <= number < 100_000 for number in numbers) or len(set(numbers)) < len(numbers):
        raise UserError(f"{path}: its ids are not whole numbers from 0 on, each once", hint=COPY_AGAIN)


def _token(settings: Mapping[str, Any], name: str, usual: Iterable[str], found: Symbols) -> str | None:
    """Returns the symbol that the settings name for a purpose, or a usual one; None if the vocabulary lacks them."""
    given = settings.get(name)
    given = given.get("content") if isinstance(given, dict) else given
    return next((one for one in (given, *usual) if isinstance(one, str) and one in found), None)


def _are_capitals(symbols: Sequence[str]) -> bool:
    """Returns True if letters are capitals. A small one without a capital of one letter, such as the German sharp s,
    may stand among them."""
    letters = [symbol for symbol in symbols if len(symbol) == 1 and symbol.lower() != symbol.upper()]
    small = [letter for letter in letters if letter.islower() and len(letter.upper()) == 1]
    return bool(letters) and len(small) == 0 and any(letter.isupper() for letter in letters)
