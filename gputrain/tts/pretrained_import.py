"""Reads pretrained voices of other toolkits: Piper's Lightning checkpoints and those of Coqui's VITS.

Both are VITS; they differ in the names of tensors, and in the files with the names of symbols and speakers:

    Piper  *.ckpt                             `state_dict` with model_g.*, model_d.*
    Coqui  best_model.pth, checkpoint_*.pth   `model` with text_encoder.*, waveform_decoder.*, disc.*, ...

The names are those of https://github.com/OHF-Voice/piper1-gpl (formerly https://github.com/rhasspy/piper) and of
https://github.com/idiap/coqui-ai-TTS. No code in a file is run. Piper has symbols and speakers in the config.json next
to a checkpoint: phoneme_id_map and speaker_id_map. Coqui has its characters in the config.json next to a checkpoint, or
else in the checkpoint, by the rules of TTS/tts/utils/text/characters.py and TTS/tts/models/vits.py, and its speakers in
a separate file.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.config import read_table
from gputrain.errors import UserError
from gputrain.fetch.names import refuse_graph
from gputrain.speech.text.frontend import BOS, EOS, PAD, RESERVED, Frontend
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.model import Voice
from gputrain.weights import log_unused, read_foreign, tensors_of

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]

BEST = "best_model.pth"
INSTEAD = (
    "if you trust it, use the toolkit that wrote it to save only its tensors: a file of {'state_dict': ...} for Piper, "
    "or of {'model': ...} for Coqui"
)
SUFFIXES = (".ckpt", ".pth")
# Settings in Piper's checkpoints contain paths of the system that trained it; pure paths exist on every system.
PATHS = {
    f"{module}.{kind}Path": made
    for module in ("pathlib", "pathlib._local")
    for kind, made in (("Posix", PurePosixPath), ("Windows", PureWindowsPath))
}


# -------------------------------------------------------------------------------------------------------------- symbols


Rows = dict[str, int]  # rows of an embedding table, by the names of their symbols or speakers

CONFIG = "config.json"
NOT_ITS_OWN = "put the config.json of this voice in its place; without one, the symbols are reinitialised"
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
    return _speakers(
        read_foreign(file, instead="name a copy of the checkpoint without this file: the speakers are then new")
    )


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
        raise UserError(f"{path}: damaged: {error}", hint="copy or download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no JSON object", hint=NOT_ITS_OWN)
    return content


def _miss(path: Path) -> None:
    log.warning(
        "%s: its symbols are unknown without the %s in the same folder; put it there, or all symbols are reinitialised",
        path,
        CONFIG,
    )


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Origin:
    """Weights to initialise a training with, by our names, and the meaning of their embedding rows."""

    voice: Tensors
    discriminators: Tensors
    symbols: Rows
    speakers: Rows
    source: str
    front_end: Frontend | None = None  # None: another toolkit's


@dataclass(frozen=True)
class Trainer:
    """Describes how checkpoints of a toolkit are detected and read."""

    marks: frozenset[str]  # tensors that identify its voices
    # Patterns and replacements from Piper's names of the voice's tensors, and from ours of the discriminators'.
    renamed: Callable[[], list[tuple[str, str]]]
    table: str  # name of the symbol embedding
    labels: Callable[[dict[Any, Any], Path, int], Labels]  # arguments: content, path, number of symbols


def file_at(path: Path) -> Path | None:
    """Returns another toolkit's checkpoint at `path`, a file or a folder; None if it is ours, or there is none.

    Raises UserError if the file is missing, or the folder holds several.
    """
    refuse_graph(path)
    if path.suffix in SUFFIXES and not path.is_dir():
        if not path.exists():
            raise UserError(
                f"{path}: no such checkpoint", hint="name a checkpoint of Piper, Coqui or gputrain, or a run"
            )
        return path
    if not path.is_dir() or any(path.glob("checkpoint_*.pt")):
        return None
    files = [file for file in path.iterdir() if not file.name.startswith(".")]
    found = sorted(file for file in files if file.suffix in SUFFIXES and file.name not in SPEAKER_FILES)
    found = [path / BEST] if path / BEST in found else found
    if len(found) > 1:
        raise UserError(f"{path}: holds {', '.join(file.name for file in found)}", hint="name the file itself")
    return found[0] if found else None


def read_imported_voice(path: Path, voice: Voice, discriminators: nn.Module) -> Origin:
    """Reads the tensors of another toolkit's checkpoint that match `voice` and `discriminators`.

    Logs a warning if the names of its symbols are unknown, or if its sampling rate or hop size differs. Raises
    UserError if the file or its configuration is damaged, is of another kind, or cannot be read without running code.
    """
    content = read_foreign(path, instead=INSTEAD, plain=PATHS)
    trainer, theirs = _recognised(content, path)
    labels = trainer.labels(content, path, theirs[trainer.table].shape[0])
    _compare(labels, voice.architecture, path)
    made = _gathered(voice.state_dict(), theirs, lambda name: _named(piper_names(name), trainer))
    names = [*(n for name in voice.state_dict() for n in piper_names(name)), *discriminators.state_dict()]
    used = set(_named(names, trainer))
    log_unused(path, (name for name in theirs if name not in used))
    if "duration_predictor.flow.shift" not in made:  # A predictor without flows is another model with some equal names.
        made = {name: tensor for name, tensor in made.items() if not name.startswith("duration_predictor.")}
    return Origin(
        made,
        _gathered(discriminators.state_dict(), theirs, lambda name: _named([name], trainer)),
        labels.symbols,
        labels.speakers,
        str(path),
    )


def _recognised(content: Mapping[Any, Any], path: Path) -> tuple[Trainer, Tensors]:
    """Detects the toolkit of a checkpoint. Returns it with the tensors by its names, in one spelling of weight norm."""
    found = {_plain(name): tensor for name, tensor in tensors_of(content, path).items()}
    for trainer in (PIPER, COQUI):
        if trainer.marks <= found.keys() and found[trainer.table].ndim == 2:
            return trainer, found
    raise UserError(
        f"{path}: holds no voice of Piper or of Coqui's VITS",
        hint="use a .ckpt of Piper, whose state_dict has names such as model_g.…, a best_model.pth of Coqui's VITS, or "
        "a checkpoint_….pt of gputrain",
    )


def _plain(name: str) -> str:
    """Returns a name with the older spelling of weight norm."""
    plain = name.replace("parametrizations.weight.original0", "weight_g")
    return plain.replace("parametrizations.weight.original1", "weight_v")


def _named(names: list[str], trainer: Trainer) -> list[str]:
    return [_renamed(name, trainer.renamed()) for name in names]


def _gathered(wanted: Mapping[str, Tensor], theirs: Tensors, names_of: Callable[[str], list[str]]) -> Tensors:
    """Returns the tensors by our names. Shapes that differ only in dimensions of 1 are adapted, others are kept."""
    made: Tensors = {}
    for name, tensor in wanted.items():
        pieces = [theirs[there] for there in names_of(name) if there in theirs]
        if len(pieces) == len(names_of(name)) and len({piece.shape for piece in pieces}) == 1:
            whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            made[name] = whole.reshape(tensor.shape) if _solid(whole) == _solid(tensor) else whole
    return made


def _solid(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _compare(labels: Labels, sizes: VoiceArchitecture, path: Path) -> None:
    for what, theirs, ours in (
        ("{} Hz", labels.sampling_rate, sizes.mel.sampling_rate),
        ("frames of {} samples", labels.hop_size, sizes.mel.hop_size),
    ):
        if theirs is not None and theirs != ours:
            learnt, given = what.format(theirs), what.format(ours)
            log.warning("%s: trained with %s, but the data have %s; its weights are used anyway", path, learnt, given)


# Numbers of layers in the names, computed from the number in our name or in Piper's.
NUMBERS: dict[str, Callable[[int], int]] = {
    "{2n}": lambda n: 2 * n, "{2n+1}": lambda n: 2 * n + 1, "{(n+1)/2}": lambda n: (n + 1) // 2
}  # fmt: skip


@functools.cache
def _names(toolkit: str) -> list[tuple[str, str]]:
    """Returns the patterns and replacements from our names to Piper's, or from Piper's to Coqui's."""
    return [(old, new) for old, new in read_table("gputrain.tts", "pretrained_names.yaml")[toolkit]]


def _replacement(new: str, match: re.Match[str]) -> str:
    for token, number in NUMBERS.items():
        if token in new:
            return new.replace(token, str(number(int(match[1]))))
    return match.expand(new)


def piper_names(name: str) -> list[str]:
    """Returns the tensors of Piper's generator that are concatenated in one of our voice's tensors, in order."""
    there = _renamed(name, _names("piper"))
    return [there.replace("?", part) for part in "qkv"] if "?" in there else [there]


def _renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    for old, new in table:
        name = re.sub(old, functools.partial(_replacement, new), name)
    return name


PIPER = Trainer(
    frozenset({"model_g.enc_p.emb.weight", "model_g.dec.conv_pre.weight"}),
    lambda: [(r"^waves\.", "model_d."), (r"^(?!model_d\.)", "model_g.")],
    "model_g.enc_p.emb.weight",
    piper_labels,
)
COQUI = Trainer(
    frozenset({"text_encoder.emb.weight", "waveform_decoder.conv_pre.weight"}),
    functools.partial(_names, "coqui"),
    "text_encoder.emb.weight",
    coqui_labels,
)
