"""Loads trained voices from run folders and checkpoints, for inference or to initialise another voice.

Shape suffixes: R rows of a table, one for each symbol or speaker; C channels.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_weights, refuse_nonfinite, trained_weights
from gputrain.fetch.names import local_path
from gputrain.speech.text.frontend import Frontend
from gputrain.tts import pretrained_import
from gputrain.tts.architecture import VoiceArchitecture, voice_architecture
from gputrain.tts.config import PUBLISHED, TrainTts
from gputrain.tts.model import Voice, inference_copy
from gputrain.tts.pretrained_import import Origin, Tensors

SYMBOLS, SPEAKERS = "text_encoder.embedding.weight", "speakers.weight"  # embedding tables


@dataclass(frozen=True)
class LoadedVoice:
    voice: Voice  # a speaking copy; of the EMA weights if the run has them
    frontend: Frontend
    settings: TrainTts
    speakers: tuple[str, ...]  # ordered by id
    source: str  # the file that was read


@dataclass(frozen=True)
class TrainedVoice:
    """The content of a voice's checkpoint, on the CPU."""

    voice: Tensors  # the EMA weights if the run has them
    discriminators: Tensors
    frontend: Frontend
    settings: TrainTts
    speakers: tuple[str, ...]
    architecture: VoiceArchitecture
    source: str


def architecture_of(settings: TrainTts, facts: Mapping[str, Any]) -> VoiceArchitecture:
    """Returns the architecture of a run's voice from its settings and the `facts` of its checkpoints:
    `text` (a front end's JSON), `sampling_rate` in Hz, `hop_size`, and `speakers` by name."""
    return voice_architecture(
        settings.model.preset,
        num_symbols=len(Frontend.from_json(facts["text"]).symbols),
        num_speakers=max(1, len(facts["speakers"])),
        sampling_rate=facts["sampling_rate"],
        hop_size=facts["hop_size"],
        encoder_dropout=settings.model.encoder_dropout,
        duration_dropout=settings.model.duration_dropout,
    )


def load_voice(path: Path, device: torch.device) -> LoadedVoice:
    """Loads a voice for inference. Raises UserError if it doesn't exist, is damaged or is of another kind."""
    trained = read_trained(path)
    voice = Voice(trained.architecture)
    load_weights(voice, trained.voice, f"{trained.source}: the checkpoint's voice")
    speaking = inference_copy(voice).to(device)
    return LoadedVoice(speaking, trained.frontend, trained.settings, trained.speakers, trained.source)


def read_trained(path: Path, *further: str) -> TrainedVoice:
    """Reads the checkpoint of a voice, and of its further modules the `discriminators` if they are named. Raises
    UserError if there is none at `path` or it is damaged."""
    source, content = checkpoint.find_named(path, "tts", ["voice", *further])
    settings = checkpoint.saved_settings(TrainTts, content, source)
    facts, states = content["facts"], content["modules"]
    voice = trained_weights(content, "voice")
    frontend, shape = Frontend.from_json(facts["text"]), architecture_of(settings, facts)
    return TrainedVoice(
        voice, states.get("discriminators", {}), frontend, settings, tuple(facts["speakers"]), shape, str(source)
    )


def read_origin(name: str | Path, voice: Voice, discriminators: nn.Module) -> Origin:
    """Reads a voice to initialise a training from: a run or checkpoint, of any language and preset, or a checkpoint of
    Piper or Coqui, whose tensors get the names and shapes of `voice` and `discriminators`, which may be on the meta
    device; it may be a published one. Raises UserError if there is no such voice, or one of its weights is not finite.
    """
    path = local_path(name, PUBLISHED)
    if file := pretrained_import.file_at(path):
        origin = pretrained_import.read_imported_voice(file, voice, discriminators)
    else:
        trained = read_trained(path, "discriminators")
        symbols, speakers = (
            {name: row for row, name in enumerate(names)} for names in (trained.frontend.symbols, trained.speakers)
        )
        origin = Origin(trained.voice, trained.discriminators, symbols, speakers, trained.source, trained.frontend)
    if path != Path(name):  # The user knows a published voice by its name, and not by its place.
        origin = replace(origin, source=str(name))
    refuse_nonfinite({**origin.voice, **origin.discriminators}, origin.source)
    return origin


def start_from(
    origin: Origin,
    voice: Voice,
    discriminators: nn.Module,
    frontend: Frontend,
    speakers: Sequence[str],
    spoken: Collection[str],
) -> list[str]:
    """Initialises a training from a voice that `read_origin` has read.

    Copies every layer whose tensors all have the same shapes there, and the embedding rows of symbols and speakers
    that both voices have by name. `voice` has symbols and speakers in the order of `frontend.symbols` and
    `speakers`; the caller must set the EMA of its weights. Returns descriptions of the reinitialised parts. Symbols
    that are not `spoken` in the data, as most of IPA is not in any language, are left out of them.
    """
    of_kinds = _take_layers(discriminators, origin.discriminators)
    taken = _take_layers(voice, origin.voice) | {f"discriminators.{kind}": fits for kind, fits in of_kinds.items()}
    reinitialised = [
        f"{part}: {fits.count(False)} of {len(fits)} layers" for part, fits in taken.items() if not all(fits)
    ]
    tables = [("symbols", SYMBOLS, frontend.symbols, origin.symbols)]
    if voice.architecture.num_speakers > 1:
        tables.append(("speakers", SPEAKERS, tuple(speakers), origin.speakers))
    for part, name, wanted, known in tables:
        new = _take_rows(voice.state_dict()[name], wanted, origin.voice.get(name), known)
        new = [name for name in new if part != "symbols" or name in spoken]
        reinitialised += [f"{part}: {' '.join(new)}"] if new else []
    return reinitialised


def _take_layers(module: nn.Module, given: Tensors) -> dict[str, list[bool]]:
    """Copies the layers whose shapes match. Returns for each submodule a list that tells which layers were copied."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in module.state_dict().items():
        if name not in (SYMBOLS, SPEAKERS):
            layers.setdefault(name.rpartition(".")[0], {})[name] = tensor
    taken: dict[str, list[bool]] = {}
    fitting: set[str] = set()
    for layer, tensors in layers.items():
        fits = all(name in given and given[name].shape == tensor.shape for name, tensor in tensors.items())
        taken.setdefault(layer.partition(".")[0], []).append(fits)
        fitting.update(tensors if fits else ())
    if fitting:
        load_weights(module, given, "", left_out=lambda name: name not in fitting)
    return taken


@torch.no_grad()
def _take_rows(table_RC: Tensor, wanted: Sequence[str], given_RC: Tensor | None, known: Mapping[str, int]) -> list[str]:
    """Copies the rows of names that `known` maps to rows of the given table. Returns the names of the others."""
    if given_RC is None or given_RC.shape[1:] != table_RC.shape[1:]:
        return list(wanted)
    shared = [name for name in wanted if known.get(name, len(given_RC)) < len(given_RC)]
    for row, name in enumerate(wanted):
        if name in shared:
            table_RC[row] = given_RC[known[name]]
    return [name for name in wanted if name not in shared]
