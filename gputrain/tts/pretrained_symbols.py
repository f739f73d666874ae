"""Maps rows of a pretrained voice's embedding tables to our symbols and speakers, by its configuration file.

Piper has both in the config.json next to a checkpoint: phoneme_id_map and speaker_id_map. Coqui has its characters
in the config.json next to a checkpoint, or else in the checkpoint, by the rules of
https://github.com/idiap/coqui-ai-TTS (TTS/tts/utils/text/characters.py, TTS/tts/models/vits.py), and its speakers in a
separate file.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.speech.text.frontend import BOS, EOS, PAD, RESERVED

log = logging.getLogger(__name__)

Rows = dict[str, int]  # rows of an embedding table, by the names of their symbols or speakers

CONFIG = "config.json"
NOT_ITS_OWN = "replace it by the config.json of this voice, or remove it: the symbols are then reinitialised"
SPEAKER_FILES = ("speakers.pth", "speakers.json", "speaker_ids.json")  # names of Coqui's files
COQUI_BLANK = "<BLNK>"  # the only blank of VitsCharacters
LISTED = ("", "BaseCharacters", "Graphemes", "IPAPhonemes")  # Coqui's classes with the same order of characters
# Characters typed for an apostrophe: another toolkit's voice has a symbol for one of them, or for each.
APOSTROPHES = "'ʻʼ‘’`"


@dataclass(frozen=True)
class Labels:
    """Values from a voice's configuration that its tensors lack. Unknown ones are empty or None."""

    symbols: Rows
    speakers: Rows
    sampling_rate: int | None
    hop_size: int | None


def piper_labels(content: Mapping[Any, Any], path: Path, rows: int) -> Labels:
    """Reads the labels of a Piper checkpoint from its content, its path and the number of its symbols. Raises UserError
    if config.json is damaged or belongs to another voice."""
    settings, config_file = _section(content, "hyper_parameters"), path.parent / CONFIG
    rate, hop = _number(settings.get("sample_rate")), _number(settings.get("hop_length"))
    config = _read_json(config_file)
    if config is None:
        _miss(path)
        return Labels({}, {}, rate, hop)
    ids = config.get("phoneme_id_map")
    if not isinstance(ids, dict):
        raise UserError(f"{config_file}: holds no phoneme_id_map, so it is not this voice's", hint=NOT_ITS_OWN)
    symbols = {name: row[0] for name, row in ids.items() if isinstance(row, list) and len(row) == 1}
    for name, row in symbols.items():
        if _number(row) is None or not 0 <= row < rows:
            raise UserError(f"{config_file}: {name!r} is symbol {row!r}, and the voice has {rows}", hint=NOT_ITS_OWN)
    return Labels(_with_apostrophes(symbols), _speakers(config.get("speaker_id_map")), rate, hop)


def coqui_labels(content: Mapping[Any, Any], path: Path, rows: int) -> Labels:
    """Reads the labels of a Coqui checkpoint, with the arguments and errors of `piper_labels`."""
    source, speakers = path.parent / CONFIG, _coqui_speakers(path.parent)
    config = _read_json(source)
    if config is None:
        source, config = path, _section(content, "config")
    if not config:
        _miss(path)
        return Labels({}, speakers, None, None)
    audio, section = _section(config, "audio"), _section(config, "characters")
    rate, hop = _number(audio.get("sample_rate")), _number(audio.get("hop_length"))
    if not section:
        raise UserError(f"{source}: holds no characters, so it is not this voice's", hint=NOT_ITS_OWN)
    names = _coqui_symbols(section, bool(config.get("use_phonemes")))
    if names is None:
        log.warning("%s: the order of its characters is not known: they are reinitialised", source)
        return Labels({}, speakers, rate, hop)
    if len(names) != rows:
        raise UserError(f"{source}: {len(names)} characters, and the voice has {rows}", hint=NOT_ITS_OWN)
    symbols = _coqui_rows(names, section, blanks=bool(config.get("add_blank", True)))
    return Labels(_with_apostrophes(symbols), speakers, rate, hop)


def _coqui_symbols(section: Mapping[str, Any], phonemes: bool) -> list[str] | None:
    """Returns the characters in the order of their ids; None if the file does not specify it."""
    kind = str(section.get("characters_class") or "").rpartition(".")[2]
    listed = section.get("vocab_dict")
    if kind == "BaseVocabulary" and isinstance(listed, list):
        return [str(name) for name in listed]
    pad, eos, bos, blank, marks, letters, sounds = (
        str(section.get(name) or "")
        for name in ("pad", "eos", "bos", "blank", "punctuations", "characters", "phonemes")
    )
    if kind == "VitsCharacters":
        return [pad, *marks, *letters, *sounds, COQUI_BLANK]
    if sounds and (kind == "IPAPhonemes" or (not kind and phonemes)):
        letters = sounds
    unique, ordered = section.get("is_unique"), section.get("is_sorted", True)
    if kind not in LISTED or (unique and not ordered):  # The order is that of a set, which differs between runs.
        return None
    letter_list = set(letters) if unique else letters
    return [*filter(None, (pad, eos, bos, blank)), *(sorted(letter_list) if ordered else letter_list), *marks]


def _coqui_rows(names: Sequence[str], section: Mapping[str, Any], *, blanks: bool) -> Rows:
    """Returns the rows by our names: PAD is the symbol between all others, which is Coqui's blank or its padding."""
    rows = {name: row for row, name in enumerate(names)}
    pad, eos, bos, blank = (str(section.get(name) or "") for name in ("pad", "eos", "bos", "blank"))
    blank = COQUI_BLANK if COQUI_BLANK in rows else blank
    roles = {PAD: blank if blanks and blank else pad, BOS: bos, EOS: eos}
    plain = {name: row for name, row in rows.items() if name not in RESERVED}
    return plain | {ours: rows[name] for ours, name in roles.items() if name in rows}


def _coqui_speakers(folder: Path) -> Rows:
    file = next((folder / name for name in SPEAKER_FILES if (folder / name).is_file()), None)
    if file is None:
        return {}
    if file.suffix == ".json":
        return _speakers(_read_json(file))
    return _speakers(checkpoint.read_foreign(file, instead="remove it: the speakers are then reinitialised"))


def _with_apostrophes(rows: Rows) -> Rows:
    known = next((rows[sign] for sign in APOSTROPHES if sign in rows), None)
    return rows if known is None else dict.fromkeys(APOSTROPHES, known) | rows


def _speakers(content: object) -> Rows:
    """Returns speaker ids by name; values of other types, such as vectors, are ignored."""
    content = content if isinstance(content, dict) else {}
    return {str(name): row for name, row in content.items() if _number(row) is not None and row >= 0}


def _section(mapping: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    inner = mapping.get(name)
    return inner if isinstance(inner, dict) else {}


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads a file; None if it does not exist. Raises UserError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path}: damaged: {error}", hint="copy or download it again, or remove it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object", hint=NOT_ITS_OWN)
    return content


def _miss(path: Path) -> None:
    log.warning(
        "%s: its symbols are unknown without the %s in the same folder; put it there, or all symbols are reinitialised",
        path, CONFIG,
    )  # fmt: skip
