"""Maps rows of a pretrained voice's embedding tables to our symbols and speakers, by its configuration file.

Piper tells both in the config.json beside a checkpoint: phoneme_id_map and speaker_id_map. Coqui tells its characters
in the config.json beside a checkpoint, or else in the checkpoint, by rules of
https://github.com/idiap/coqui-ai-TTS (TTS/tts/utils/text/characters.py, TTS/tts/models/vits.py), and its speakers in a
file of their own.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.tts.text.frontend import BOS, EOS, PAD, RESERVED

log = logging.getLogger(__name__)

Rows = dict[str, int]  # of a table, by the names of what they stand for

CONFIG = "config.json"
NOT_ITS_OWN = "put the config.json of this voice there, or take it away: the symbols are then reinitialised"
SPEAKER_FILES = ("speakers.pth", "speakers.json", "speaker_ids.json")  # of Coqui
COQUI_BLANK = "<BLNK>"  # of VitsCharacters, which has no other
LISTED = ("", "BaseCharacters", "Graphemes", "IPAPhonemes")  # Coqui's classes that order characters alike
# What people type for one letter or sign: a voice of another trainer knows one of them, or each for what it is.
APOSTROPHES = "'ʻʼ‘’`"


@dataclass(frozen=True)
class Labels:
    """Facts from a voice's configuration that its tensors lack. Unknown ones are empty or None."""

    symbols: Rows
    speakers: Rows
    sampling_rate: int | None
    hop_size: int | None


def piper_labels(content: Mapping[Any, Any], path: Path, rows: int) -> Labels:
    """Reads the labels of a Piper checkpoint from its content, its path and the number of its symbols. Raises UserError
    where config.json is damaged or another voice's."""
    settings, beside = _section(content, "hyper_parameters"), path.parent / CONFIG
    rate, hop = _number(settings.get("sample_rate")), _number(settings.get("hop_length"))
    told = _read_json(beside)
    if told is None:
        _miss(path)
        return Labels({}, {}, rate, hop)
    ids = told.get("phoneme_id_map")
    if not isinstance(ids, dict):
        raise UserError(f"{beside}: holds no phoneme_id_map, so it is not this voice's", hint=NOT_ITS_OWN)
    symbols = {name: row[0] for name, row in ids.items() if isinstance(row, list) and len(row) == 1}
    for name, row in symbols.items():
        if _number(row) is None or not 0 <= row < rows:
            raise UserError(f"{beside}: {name!r} is symbol {row!r}, and the voice has {rows}", hint=NOT_ITS_OWN)
    return Labels(_with_apostrophes(symbols), _speakers(told.get("speaker_id_map")), rate, hop)


def coqui_labels(content: Mapping[Any, Any], path: Path, rows: int) -> Labels:
    """The same for Coqui. Raises UserError where config.json is damaged or another voice's."""
    source, speakers = path.parent / CONFIG, _coqui_speakers(path.parent)
    told = _read_json(source)
    if told is None:
        source, told = path, _section(content, "config")
    if not told:
        _miss(path)
        return Labels({}, speakers, None, None)
    audio, section = _section(told, "audio"), _section(told, "characters")
    rate, hop = _number(audio.get("sample_rate")), _number(audio.get("hop_length"))
    if not section:
        raise UserError(f"{source}: holds no characters, so it is not this voice's", hint=NOT_ITS_OWN)
    names = _coqui_symbols(section, bool(told.get("use_phonemes")))
    if names is None:
        log.warning("%s: the order of its characters is not known: they are reinitialised", source)
        return Labels({}, speakers, rate, hop)
    if len(names) != rows:
        raise UserError(f"{source}: {len(names)} characters, and the voice has {rows}", hint=NOT_ITS_OWN)
    symbols = _coqui_rows(names, section, blanks=bool(told.get("add_blank", True)))
    return Labels(_with_apostrophes(symbols), speakers, rate, hop)


def _coqui_symbols(section: Mapping[str, Any], phonemes: bool) -> list[str] | None:
    """The characters in the order of their ids; None where the file does not tell it."""
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
    if kind not in LISTED or (unique and not ordered):  # in the order of a set, which is another one in each run
        return None
    told = set(letters) if unique else letters
    return [*filter(None, (pad, eos, bos, blank)), *(sorted(told) if ordered else told), *marks]


def _coqui_rows(names: Sequence[str], section: Mapping[str, Any], *, blanks: bool) -> Rows:
    """By our names: what stands between all symbols is PAD, be it the blank or the padding."""
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
    return _speakers(checkpoint.read_foreign(file, instead="take it away: the speakers are then reinitialised"))


def _with_apostrophes(rows: Rows) -> Rows:
    known = next((rows[sign] for sign in APOSTROPHES if sign in rows), None)
    return rows if known is None else dict.fromkeys(APOSTROPHES, known) | rows


def _speakers(told: object) -> Rows:
    """Names and numbers; what is no number, such as a vector, is left out."""
    told = told if isinstance(told, dict) else {}
    return {str(name): row for name, row in told.items() if _number(row) is not None and row >= 0}


def _section(told: Mapping[Any, Any], name: str) -> dict[Any, Any]:
    inner = told.get(name)
    return inner if isinstance(inner, dict) else {}


def _number(told: object) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file. Raises UserError if it is damaged."""
    try:
        told = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise UserError(f"{path}: damaged: {error}", hint="copy or download it again, or take it away") from None
    if not isinstance(told, dict):
        raise UserError(f"{path}: holds no settings by name", hint=NOT_ITS_OWN)
    return told


def _miss(path: Path) -> None:
    log.warning(
        "%s: no %s lies beside it, so its symbols are not known; put it there, or all symbols are reinitialised",
        path, CONFIG,
    )  # fmt: skip
