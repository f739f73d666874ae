"""Reads pretrained voices of other toolkits: Piper's Lightning checkpoints and those of Coqui's VITS.

Both are VITS; they differ in the names of tensors, and in the files with the names of symbols and speakers
(pretrained_symbols.py):

    Piper  *.ckpt                             `state_dict` with model_g.* and model_d.*
    Coqui  best_model.pth, checkpoint_*.pth   `model` with text_encoder.*, waveform_decoder.*, disc.*, ...

The names are those of https://github.com/OHF-Voice/piper1-gpl (formerly https://github.com/rhasspy/piper) and of
https://github.com/idiap/coqui-ai-TTS. No code in a file is run.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.config import read_table
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.model import Voice
from gputrain.tts.pretrained_symbols import SPEAKER_FILES, Labels, Rows, coqui_labels, piper_labels

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


@dataclass(frozen=True)
class Origin:
    """Weights to initialise a training with, by our names, and the meaning of their embedding rows."""

    voice: Tensors
    discriminators: Tensors
    symbols: Rows
    speakers: Rows
    source: str


@dataclass(frozen=True)
class Trainer:
    """Describes how checkpoints of a toolkit are detected and read."""

    tensors: str  # entry of the checkpoint that holds the tensors
    marks: frozenset[str]  # tensors that identify its voices
    # Patterns and replacements from Piper's names of the voice's tensors, and from ours of the discriminators'.
    renamed: Callable[[], list[tuple[str, str]]]
    table: str  # name of the symbol embedding
    labels: Callable[[dict[Any, Any], Path, int], Labels]  # arguments: content, path, number of symbols


def file_at(path: Path) -> Path | None:
    """Returns another toolkit's checkpoint at `path`, a file or a folder; None if it is ours, or there is none.

    Raises UserError if the file is missing, or the folder holds several.
    """
    if path.suffix in SUFFIXES and not path.is_dir():
        if not path.exists():
            raise UserError(
                f"{path}: no such checkpoint", hint="name a checkpoint of Piper, Coqui or gputrain, or a run"
            )
        return path
    if not path.is_dir() or any(path.glob("checkpoint_*.pt")):
        return None
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.name not in SPEAKER_FILES)
    found = [path / BEST] if path / BEST in found else found
    if len(found) > 1:
        raise UserError(f"{path}: holds {', '.join(file.name for file in found)}", hint="name the file itself")
    return found[0] if found else None


def read_imported_voice(path: Path, voice: Voice, discriminators: nn.Module) -> Origin:
    """Reads the tensors of another toolkit's checkpoint that match `voice` and `discriminators`.

    Logs a warning if the names of its symbols are unknown, or if its sampling rate or hop size differs. Raises
    UserError if the file or its configuration is damaged, is of another kind, or cannot be read without running code.
    """
    content = checkpoint.read_foreign(path, instead=INSTEAD, plain=PATHS)
    trainer, theirs = _recognised(content, path)
    labels = trainer.labels(content, path, theirs[trainer.table].shape[0])
    _compare(labels, voice.architecture, path)
    made = _gathered(voice.state_dict(), theirs, lambda name: _named(piper_names(name), trainer))
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
    for trainer in (PIPER, COQUI):
        entry = content.get(trainer.tensors)
        if isinstance(entry, dict):
            found = {_plain(name): tensor for name, tensor in entry.items() if isinstance(tensor, Tensor)}
            if trainer.marks <= found.keys() and found[trainer.table].ndim == 2:
                return trainer, found
    raise UserError(
        f"{path}: holds no voice of Piper or of Coqui's VITS",
        hint="use a .ckpt of Piper, whose state_dict has names such as model_g.…, a best_model.pth of Coqui's VITS, or "
        "a checkpoint_….pt of gputrain",
    )


def _plain(name: object) -> str:
    """Removes prefixes that wrapping or compiling adds, and uses the older spelling of weight norm."""
    plain = str(name).replace("_orig_mod.", "").removeprefix("module.")
    plain = plain.replace("parametrizations.weight.original0", "weight_g")
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
    "state_dict",
    frozenset({"model_g.enc_p.emb.weight", "model_g.dec.conv_pre.weight"}),
    lambda: [(r"^waves\.", "model_d."), (r"^(?!model_d\.)", "model_g.")],
    "model_g.enc_p.emb.weight",
    piper_labels,
)
COQUI = Trainer(
    "model",
    frozenset({"text_encoder.emb.weight", "waveform_decoder.conv_pre.weight"}),
    functools.partial(_names, "coqui"),
    "text_encoder.emb.weight",
    coqui_labels,
)
