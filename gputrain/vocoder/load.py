"""A trained vocoder from wherever it lies: a run folder, a checkpoint, or openvpi's model.ckpt and config.json."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gputrain.config import assemble, convert, leaves
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.vocoder.architecture import Architecture
from gputrain.vocoder.config import Model, Spectrogram, TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.pretrained import Weights, is_ours, of_run, read_weights, weights_file

CONFIG = "config.json"
# openvpi's keys of config.json, and ours for the same.
SPECTROGRAM = {
    "sampling_rate": "audio_sample_rate",
    "num_mels": "audio_num_mel_bins",
    "hop_size": "hop_size",
    "n_fft": "fft_size",
    "win_size": "win_size",
    "fmin": "fmin",
    "fmax": "fmax",
}
MODEL = (
    "upsample_rates",
    "upsample_kernel_sizes",
    "upsample_initial_channel",
    "resblock",
    "resblock_kernel_sizes",
    "mini_nsf",
    "noise_sigma",
)
DILATIONS = "resblock_dilation_sizes"
LATER = {"mini_nsf": False, "noise_sigma": 0.0, "pc_aug": False}  # what older models lack, and what they did


@dataclass(frozen=True)
class Loaded:
    generator: Generator  # in eval mode, without gradients; the averaged weights, if the run averaged
    training: TrainVocoder | None  # the settings of the run; None for a model of openvpi
    source: str  # the file that was read


def load(path: Path, device: torch.device) -> Loaded:
    """Raises UserError if there is no such model, it is damaged or of another kind, or its tensors do not fit."""
    file = weights_file(path)
    if not is_ours(file):
        architecture = read_architecture(file.with_name(CONFIG))
        return Loaded(_ready(architecture, read_weights(file), device), None, str(file))
    found = checkpoint.find(str(file), file, kind="vocoder")
    assert found is not None  # only `auto` may find nothing
    source, content = found
    training = assemble(TrainVocoder, content["config"], source=str(source))
    weights = Weights(of_run(content), {}, str(source))
    return Loaded(_ready(training.architecture, weights, device), training, str(source))


def read_architecture(path: Path) -> Architecture:
    """The shape that a config.json of openvpi describes; keys that concern its training are passed over.

    Raises UserError if it is missing or damaged, or lacks a key, or if a value is none that can be built.
    """
    told = _read_json(path)
    told |= {key: value for key, value in LATER.items() if told.get(key) is None}
    for key in (*SPECTROGRAM, *MODEL, DILATIONS):
        if key not in told:
            raise UserError(f"{path}: {key} is missing", hint=f"{CONFIG} is written beside model.ckpt; copy both")
    if told["fmax"] is None and isinstance(told["sampling_rate"], int):
        told["fmax"] = told["sampling_rate"] / 2
    try:
        heard = {ours: _value(Spectrogram, ours, theirs, told) for theirs, ours in SPECTROGRAM.items()}
        built = {key: _value(Model, key, key, told) for key in MODEL}
        dilations = _dilations(told[DILATIONS])
        return Architecture(
            Spectrogram(**heard).mel, resblock_dilation_sizes=dilations, pc_aug=bool(told["pc_aug"]), **built
        )
    except UserError as error:
        raise UserError(f"{path}: {error.message}", hint=error.hint) from None


def _value(owner: type, ours: str, theirs: str, told: dict[str, Any]) -> Any:
    """A value as an option of ours would take it, and by openvpi's name where it does not."""
    return convert(replace(leaves(owner)[ours], name=theirs), told[theirs])


def _dilations(rows: object) -> tuple[tuple[int, ...], ...]:
    if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        made: tuple[tuple[int, ...], ...] = tuple(map(tuple, rows))
        if all(type(number) is int and number > 0 for row in made for number in row):
            return made
    raise UserError(f"{DILATIONS} is {rows!r}, expected lists of whole numbers in a list")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file, which says what the weights beside it are of",
            hint="copy it from where the model came from; --init-from reads weights without it",
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}", hint="copy or download it again") from None
    if not isinstance(told, dict):
        raise UserError(f"{path}: expected a mapping of keys to values", hint="copy or download it again")
    return told


def _ready(architecture: Architecture, weights: Weights, device: torch.device) -> Generator:
    with torch.device("meta"):
        generator = Generator(architecture)
    generator = generator.to_empty(device="cpu")
    weights.fit("generator", generator, hint="the settings beside the weights are another model's")
    return generator.to(device).eval().requires_grad_(False)
