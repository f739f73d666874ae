"""Models of transformers: their folders, and what is read from them.

A published name becomes a folder first, which has the same files. Models of many languages, as those of MMS, have one
vocabulary a language, and the weights of its adapters and of its head in `adapter.LANGUAGE.safetensors`. The main
weights have those of one language, English unless they were saved anew.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from gputrain.asr import model as networks
from gputrain.asr.architecture import MODEL_TYPE, check_frames, check_model_type
from gputrain.asr.config import PUBLISHED
from gputrain.engine import checkpoint
from gputrain.errors import UserError, first_line
from gputrain.speech.config import ENCODER_RATE
from gputrain.speech.text.vocabulary import ABSENT, BLANK, DELIMITER, UNDETERMINED, UNKNOWN, Vocabulary
from gputrain.weights import is_safetensors, log_unused, other_file, read_weights_file

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------------------------------------- tokenizers

VOCABULARY = "vocab.json"
SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
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
                self.path,
                rows - unnamed,
                rows,
            )
        symbols = tuple(named.get(number, f"<unused {number}>") for number in range(rows))
        found = {symbol: number for number, symbol in enumerate(symbols)}
        blank_symbol = _token(self.settings, "pad_token", (BLANK, "[PAD]"), found)
        at = found[blank_symbol] if blank_symbol is not None else blank
        if at is None or not 0 <= at < rows:
            raise UserError(f"{self.path}: no symbol of the blank", hint=f"{SETTINGS} names it as pad_token")
        unknown = _token(self.settings, "unk_token", (UNKNOWN, "[UNK]"), found)
        delimiter = _token(self.settings, "word_delimiter_token", (DELIMITER, " "), found)
        return Vocabulary(
            UNDETERMINED,
            symbols,
            at,
            ABSENT if unknown is None else found[unknown],
            ABSENT if delimiter is None else found[delimiter],
            upper=bool(self.settings.get("do_lower_case")) or _are_capitals(symbols),
        )

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
    if not path.is_file():
        return None
    found = read_json(path)
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
    return next((symbol for symbol in (given, *usual) if isinstance(symbol, str) and symbol in found), None)


def _are_capitals(symbols: Sequence[str]) -> bool:
    """Returns True if letters are capitals. A small one without a capital of one letter, such as the German sharp s,
    may stand among them."""
    letters = [symbol for symbol in symbols if len(symbol) == 1 and symbol.lower() != symbol.upper()]
    small = [letter for letter in letters if letter.islower() and len(letter.upper()) == 1]
    return bool(letters) and len(small) == 0 and any(letter.isupper() for letter in letters)


# --------------------------------------------------------------------------------------------------------------- models

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
ADAPTER = re.compile(r"adapter\.([\w.-]+)\.(?:safetensors|bin)")
MAIN_LANGUAGE = "eng"  # That of the main weights of MMS, as transformers' Wav2Vec2ForCTC takes them.


@dataclass(frozen=True)
class StockRecogniser:
    """A model of transformers, of which everything but the weights has been read."""

    name: str  # the one that the user gave
    folder: Path
    architecture: dict[str, Any]  # the fields of its configuration
    vocabulary: Vocabulary | None  # None if it has no tokenizer, as one that was never fine-tuned
    language: str | None  # the one whose adapter is loaded
    normalizes: bool  # True: it reads waves of zero mean and unit variance.

    def check_weights(self) -> None:
        """Raises UserError if there are no weights, or a file of another kind stands in their place."""
        files = [self.folder / file for file in PUBLISHED.whole if (self.folder / file).is_file()]
        if not files:
            raise UserError(f"{self.name}: no weights in it", hint="copy model.safetensors or pytorch_model.bin there")
        for file in files:
            is_index = file.suffix == ".json"  # It names the files of weights that were split.
            if not (is_index or is_safetensors(file)) and (error := other_file(file, "weights of transformers")):
                raise error

    def load(self) -> tuple[Any, list[str]]:
        """Returns its model on the CPU in fp32, and the tensors that the files lack, which are random. Raises
        UserError if weights are missing or damaged."""
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        self.check_weights()
        try:
            with networks.quiet_transformers():
                config = Wav2Vec2Config.from_pretrained(str(self.folder))
                model, found = Wav2Vec2ForCTC.from_pretrained(
                    str(self.folder),
                    config=config,
                    attn_implementation="sdpa",
                    dtype=torch.float32,
                    output_loading_info=True,
                )
                missing = list(found["missing_keys"])
                log_unused(self.name, found["unexpected_keys"])
                if self.language is not None:
                    model.load_adapter(self.language)
                    log.info("%s: with the adapter and the head of %s", self.name, self.language)
                    missing = [name for name in missing if "adapter_layer" not in name and "lm_head" not in name]
        except Exception as error:  # Damaged files raise errors of many kinds.
            if "ignore_mismatched_sizes" in str(error):
                raise UserError(
                    f"{self.name}: its weights have other shapes than {CONFIG} says",
                    hint=f"copy {CONFIG} and the weights from one model",
                ) from None
            no_file = isinstance(error, UnpicklingError) or "Unable to load weights" in str(error)
            why = "no file of torch.save" if no_file else first_line(error)
            raise UserError(
                f"{self.name}: its weights cannot be read: {why}", hint="copy or download them again"
            ) from None
        return model.float().train(), [name for name in missing if "masked_spec_embed" not in name]


def is_pretrained(path: Path) -> bool:
    """Returns True if a path leads to a model of transformers, and not to a run or a checkpoint of train-asr: to a
    folder with a configuration, or a file in it."""
    path = _folder_of_file(path)
    if path.is_dir():
        return (path / CONFIG).is_file() and not checkpoint.newest_first(path)
    return ADAPTER.fullmatch(path.name) is not None


def _folder_of_file(path: Path) -> Path:
    """Returns the folder of a file of transformers, such as the weights, which is named instead; other paths as they
    are."""
    named = path.suffix in (".safetensors", ".bin", ".json") and path.is_file() and (path.parent / CONFIG).is_file()
    return path.parent if named else path


def open_pretrained(path: Path, name: str = "") -> StockRecogniser:
    """Reads all of a model of transformers but its weights. `name` is the one that messages give it.

    Raises UserError if there is none, it is of another type, or its language cannot be told.
    """
    from transformers import Wav2Vec2Config

    folder, language = _located(path)
    name = name or str(path)
    content = read_json(folder / CONFIG)
    check_model_type(content.get("model_type", "unknown"), name)
    try:
        architecture = Wav2Vec2Config.from_pretrained(str(folder)).to_dict()
    except Exception as error:  # The configuration of transformers raises errors of many kinds.
        raise UserError(
            f"{folder / CONFIG}: not a configuration of {MODEL_TYPE}: {first_line(error)}", hint="copy it again"
        ) from None
    check_frames(architecture, name)
    tokenizer = read_tokenizer(folder)
    normalizes = _normalizes(name, folder, fine_tuned=tokenizer is not None)
    vocabulary = None
    if tokenizer is not None:
        language = _language_of(name, folder, tokenizer, language, architecture)
        rows = architecture["vocab_size"] if language is None else _rows_of_adapter(folder, language)
        at = language or tokenizer.target_language
        if language is not None and not tokenizer.fits(at, rows):
            raise UserError(
                f"{name}: the adapter of {language} writes {rows} symbols, and {tokenizer.path.name} has "
                f"{tokenizer.rows_of(at)} of that language",
                hint="copy both from one model",
            )
        vocabulary = tokenizer.vocabulary(at, rows, architecture.get("pad_token_id"))
    elif language is not None:
        raise UserError(f"{name}: the folder has no vocab.json", hint="copy the tokenizer's files there, too")
    return StockRecogniser(name, folder, architecture, vocabulary, language, normalizes)


def _located(path: Path) -> tuple[Path, str | None]:
    """Returns the folder of a model, and the language whose adapter is named."""
    language = None
    if not path.is_dir() and (adapter := ADAPTER.fullmatch(path.name)):
        path, language = path.parent, adapter[1]
    path = _folder_of_file(path)
    if not (path / CONFIG).is_file():
        raise UserError(
            f"{path} holds neither a run of train-asr nor a {CONFIG} of transformers",
            hint="name a run folder, or a folder with config.json and model.safetensors",
        )
    return path, language


def _normalizes(name: str, folder: Path, *, fine_tuned: bool) -> bool:
    """Returns True if the model reads waves of zero mean and unit variance, the default of transformers. Raises
    UserError if the settings of its feature extractor are damaged, or it reads another sampling rate."""
    processor = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    # Since version 5 of transformers, the settings are a part of processor_config.json, which then comes first.
    found = processor.get("feature_extractor", processor.get("audio_processor"))
    if not isinstance(found, dict):
        if not (folder / PREPROCESSOR).is_file():
            if fine_tuned:
                log.warning("%s: no %s: waves are normalised, as is usual", name, PREPROCESSOR)
            return True
        found = read_json(folder / PREPROCESSOR)
    if (rate := found.get("sampling_rate", ENCODER_RATE)) != ENCODER_RATE:
        raise UserError(f"{name} reads {rate} samples a second", hint=f"use a model for {ENCODER_RATE} Hz")
    return bool(found.get("do_normalize", True))


# ---------------------------------------------------------------------------------------- models of many languages


def _adapters(folder: Path) -> dict[str, Path]:
    """Returns the files with the weights of each language; transformers prefers safetensors."""
    return {
        match[1]: path
        for ending in ("bin", "safetensors")
        for path in folder.glob(f"adapter.*.{ending}")
        if (match := ADAPTER.fullmatch(path.name))
    }


def _language_of(
    name: str, folder: Path, tokenizer: StockTokenizer, named: str | None, architecture: dict[str, Any]
) -> str | None:
    """Returns the language whose adapter is to be loaded, None if the main weights are those to use. Raises UserError
    if neither is right."""
    wanted = named or tokenizer.target_language
    own = tokenizer.rows_of(wanted)  # Raises UserError if no language is chosen.
    if wanted is None:
        return None
    present = _adapters(folder)
    if wanted in present:
        if not architecture.get("adapter_attn_dim"):
            raise UserError(f"{name}: {CONFIG} has no adapter_attn_dim, so that no adapter fits", hint="copy it again")
        return wanted
    if named is None:
        head, languages = architecture["vocab_size"], len(tokenizer.of_language)
        is_english = wanted == MAIN_LANGUAGE and own == head
        if languages == 0 or is_english or (languages == 1 and tokenizer.fits(wanted, head)):
            return None
    have = f"it has those of {format_languages(present, like=wanted)}" if present else "it has none"
    raise UserError(
        f"{name}: no adapter of {wanted}, and the head of the main weights may be that of another language",
        hint=f"copy adapter.{wanted}.safetensors there ({have}), or leave only the head's language in vocab.json",
    )


def _rows_of_adapter(folder: Path, language: str) -> int:
    """Returns the number of symbols that an adapter's head writes. Raises UserError if it cannot be read."""
    path = _adapters(folder)[language]
    try:
        weights = read_weights_file(path).tensors
        return len(weights["lm_head.weight"])
    except Exception as error:  # Damaged files raise errors of many kinds.
        raise UserError(
            f"{path}: not the adapter of a language: {first_line(error)}", hint="copy or download it again"
        ) from None


log = logging.getLogger(__name__)
