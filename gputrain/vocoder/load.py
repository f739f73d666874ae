"""Loads a trained vocoder from a run folder, a checkpoint, or openvpi's model.ckpt and config.json."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gputrain.config import assemble, convert, leaves
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.vocoder.architecture import SAME_OPTIONS, NsfHifiganArchitecture
from gputrain.vocoder.config import Model, Spectrogram, TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.pretrained import Weights, generator_of_run, is_ours, read_weights, weights_file

CONFIG = "config.json"
# openvpi's keys of config.json, and our options for them.
SPECTROGRAM = {
    "sampling_rate": "audio_sample_rate", "num_mels": "audio_num_mel_bins", "hop_size": "hop_size",
    "n_fft": "fft_size", "win_size": "win_size", "fmin": "fmin", "fmax": "fmax",
}  # fmt: skip
DILATIONS = "resblock_dilation_sizes"
LATER = {"mini_nsf": False, "noise_sigma": 0.0, "pc_aug": False}  # Keys that older models lack, with their behaviour.


@dataclass(frozen=True)
class LoadedVocoder:
    """A trained vocoder, ready for inference."""

    generator: Generator  # In eval mode, without gradients; EMA weights, if the run has them.
    training: TrainVocoder | None  # Settings of the run; None for a model of openvpi.
    source: str  # File that was read.


def load_vocoder(path: Path, device: torch.device) -> LoadedVocoder:
    """Loads a model. Raises UserError if there is none, it is damaged or of another kind, or its tensors do not fit."""
    file = weights_file(path)
    if not is_ours(file):
        architecture = read_architecture(file.with_name(CONFIG))
        return LoadedVocoder(_ready(architecture, read_weights(file), device), None, str(file))
    found = checkpoint.find(str(file), file, kind="vocoder")
    assert found is not None  # Only `auto` may find nothing.
    source, content = found
    training = assemble(TrainVocoder, content["config"], source=str(source))
    weights = Weights(generator_of_run(content), {}, str(source))
    return LoadedVocoder(_ready(training.architecture, weights, device), training, str(source))


def read_architecture(path: Path) -> NsfHifiganArchitecture:
    """Reads the sizes of a generator from a config.json of openvpi; keys of its training are ignored.

    Raises UserError if it is missing or damaged, lacks a key, or has an invalid value.
    """
    values = _read_json(path)
    values |= {key: value for key, value in LATER.items() if values.get(key) is None}
    for key in (*SPECTROGRAM, *SAME_OPTIONS, DILATIONS):
        if key not in values:
            raise UserError(f"{path}: {key} is missing", hint=f"{CONFIG} is written next to model.ckpt; copy both")
    if values["fmax"] is None and isinstance(values["sampling_rate"], int):
        values["fmax"] = values["sampling_rate"] / 2
    try:
        spectrogram = {ours: _value(Spectrogram, ours, theirs, values) for theirs, ours in SPECTROGRAM.items()}
        built = {key: _value(Model, key, key, values) for key in SAME_OPTIONS}
        dilations = _dilations(values[DILATIONS])
        return NsfHifiganArchitecture(
            Spectrogram(**spectrogram).mel, resblock_dilation_sizes=dilations, pc_aug=bool(values["pc_aug"]), **built
        )
    except UserError as error:
        raise UserError(f"{path}: {error.message}", hint=error.hint) from None


def _value(owner: type, ours: str, theirs: str, values: dict[str, Any]) -> Any:
    """Converts a value as our option would; errors name openvpi's key."""
    return convert(replace(leaves(owner)[ours], name=theirs), values[theirs])


def _dilations(rows: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        made: tuple[tuple[int, ...], ...] = tuple(map(tuple, rows))
        if all(type(number) is int and number > 0 for row in made for number in row):
            return made
    raise UserError(f"{DILATIONS} is {rows!r}, expected a list of lists of whole numbers")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; it describes the model of the weights next to it",
            hint="copy it from where the model came from; --init-from reads weights without it",
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}", hint="copy or download it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of keys to values", hint="copy or download it again")
    return values


def _ready(architecture: NsfHifiganArchitecture, weights: Weights, device: torch.device) -> Generator:
    with torch.device("meta"):
        generator = Generator(architecture)
    generator = generator.to_empty(device="cpu")
    weights.fit("generator", generator, hint="the settings next to the weights belong to another model")
    return generator.to(device).eval().requires_grad_(False)
