"""Reads trained and pretrained vocoders and loads their weights into a model.

Supported are runs and checkpoints of our own; openvpi's `model.ckpt`, which is a generator, with its config.json; and
openvpi's training checkpoints, which have the discriminators too. Files are read without executing code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gputrain.config import convert, leaves, read_file
from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_weights, trained_weights
from gputrain.errors import UserError
from gputrain.fetch.names import local_path, refuse_graph
from gputrain.vocoder.config import PUBLISHED, SAME_OPTIONS, Model, NsfHifiganArchitecture, Spectrogram, TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.weights import log_unused, read_foreign, tensors_of

CONFIG = "config.json"
# openvpi's keys of config.json, and our options for them.
SPECTROGRAM = {
    "sampling_rate": "audio_sample_rate", "num_mels": "audio_num_mel_bins", "hop_size": "hop_size",
    "n_fft": "fft_size", "win_size": "win_size", "fmin": "fmin", "fmax": "fmax",
}  # fmt: skip
DILATIONS = "resblock_dilation_sizes"
LATER = {"mini_nsf": False, "noise_sigma": 0.0, "pc_aug": False}  # Keys that older models lack, with their behaviour.
MODEL = "model.ckpt"
FIRST_MODEL = "model"  # The name of the same file in openvpi's release of 2022.
GENERATOR, DISCRIMINATOR = "generator.", "discriminator."
DIFFERENT = "give the options that it was trained with, or --no-finetune-strict-shapes to reinitialise these tensors"
# Substitutions from other spellings to the names of our tensors, in this order.
RENAMED = (
    (r"\bparametrizations\.weight\.original0$", "weight_g"),  # The newer weight norm of torch.
    (r"\bparametrizations\.weight\.original1$", "weight_v"),
    (r"\bparametrizations\.weight\.original$", "weight_orig"),  # The newer spectral norm of torch.
    (r"\bparametrizations\.weight\.0\._([uv])$", r"weight_\1"),
)
# Substitutions from openvpi's names of the layers of UnivNet's discriminators to ours.
UNIVNET = (
    (r"^(discriminators\.\d+)\.discriminators\.", r"\1.convs."),
    (r"^(discriminators\.\d+)\.out\.", r"\1.conv_post."),
)
# Parts of tensor names that identify a kind, because openvpi's tasks give several kinds the same name.
MARKS = ((".residual_layers.", "fast_mpd"), (".layers.", "fast_mrd"), (".weight_orig", "msd"))


@dataclass(frozen=True)
class Weights:
    """Tensors by name, in fp32 on the CPU. `discriminators` are by kind; empty if the file has none."""

    generator: dict[str, Tensor]
    discriminators: dict[str, dict[str, Tensor]]
    source: str  # File they come from.
    ignored: tuple[str, ...] = ()  # Prefixes of the names of tensors to skip.

    def fit(self, part: str, wanted: nn.Module, *, strict_shapes: bool = True, hint: str = DIFFERENT) -> list[str]:
        """Loads `part`, "generator" or a kind of discriminators, into a module. Returns the names of unchanged tensors.

        Those are the ignored ones and, unless `strict_shapes`, those that the file lacks or has in another shape.
        Raises UserError, with a list of the differences, if tensors differ that must not or nothing fits, and if a
        number is not finite.
        """
        given = self.generator if part == "generator" else self.discriminators[part]
        return load_weights(
            wanted,
            given,
            f"{self.source}: its {part}",
            hint=hint,
            strict=strict_shapes,
            left_out=lambda name: any(full.startswith(self.ignored) for full in names_of(part, name)),
        )


@dataclass(frozen=True)
class LoadedVocoder:
    generator: Generator  # In eval mode, without gradients; EMA weights, if the run has them.
    training: TrainVocoder | None  # Settings of the run; None for a model of openvpi.
    source: str  # File that was read.


def load_vocoder(path: Path, device: torch.device) -> LoadedVocoder:
    """Loads a model. Raises UserError if there is none, it is damaged or of another kind, or its tensors do not fit."""
    file = weights_file(path)
    if not is_ours(file):
        architecture = read_architecture(file.with_name(CONFIG))
        return LoadedVocoder(_ready(architecture, read_weights(file), device), None, str(file))
    source, content = checkpoint.find_named(file, "vocoder", ["generator"])
    training = checkpoint.saved_settings(TrainVocoder, content, source)
    weights = Weights(trained_weights(content, "generator"), {}, str(source))
    return LoadedVocoder(_ready(training.architecture, weights, device), training, str(source))


def read_architecture(path: Path) -> NsfHifiganArchitecture:
    """Reads the sizes of a generator from a config.json of openvpi; keys of its training are ignored.

    Raises UserError if it is missing or damaged, lacks a key, or has an invalid value.
    """
    if not path.exists():
        raise UserError(
            f"{path}: no such file; it describes the model of the weights next to it",
            hint="copy it from where the model came from; --init-from reads weights without it",
        )
    try:
        values: dict[str, Any] = dict(read_file(path))
    except UserError as error:
        raise UserError(error.message, hint="copy or download it again") from None
    values |= {key: value for key, value in LATER.items() if values.get(key) is None}
    for key in (*SPECTROGRAM, *SAME_OPTIONS, DILATIONS, "resblock"):
        if key not in values:
            raise UserError(f"{path}: {key} is missing", hint=f"{CONFIG} is written next to model.ckpt; copy both")
    if values["resblock"] != "1":
        raise UserError(
            f"{path}: resblock is {values['resblock']!r}", hint='only HiFi-GAN\'s residual blocks "1" are supported'
        )
    if values["fmax"] is None and isinstance(values["sampling_rate"], int):
        values["fmax"] = values["sampling_rate"] / 2
    try:
        spectrogram = {ours: _value(Spectrogram, ours, theirs, values) for theirs, ours in SPECTROGRAM.items()}
        built = {key: _value(Model, key, key, values) for key in SAME_OPTIONS}
        rows = values[DILATIONS]
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            rows = [[0]]
        dilations = tuple(map(tuple, rows))
        if not all(type(number) is int and number > 0 for row in dilations for number in row):
            raise UserError(f"{DILATIONS} is {values[DILATIONS]!r}, expected a list of lists of whole numbers")
        return NsfHifiganArchitecture(
            Spectrogram(**spectrogram).mel, resblock_dilation_sizes=dilations, pc_aug=bool(values["pc_aug"]), **built
        )
    except UserError as error:
        raise UserError(f"{path}: {error.message}", hint=error.hint) from None


def _value(owner: type, ours: str, theirs: str, values: dict[str, Any]) -> Any:
    """Converts a value as our option would; errors name openvpi's key."""
    return convert(replace(leaves(owner)[ours], name=theirs), values[theirs])


def _ready(architecture: NsfHifiganArchitecture, weights: Weights, device: torch.device) -> Generator:
    with torch.device("meta"):
        generator = Generator(architecture)
    generator = generator.to_empty(device="cpu")
    weights.fit("generator", generator, hint="the settings next to the weights belong to another model")
    return generator.to(device).eval().requires_grad_(False)


def names_of(part: str, name: str) -> list[str]:
    """Returns the whole names of a tensor of the generator or of a kind of discriminators: ours and openvpi's, where
    fast kinds have plain names."""
    if part == "generator":
        return [f"generator.{name}"]
    return [f"discriminator.{kind}.{name}" for kind in {part, part.removeprefix("fast_")}]


def frozen_parameters(beginnings: Sequence[str], parts: Mapping[str, nn.Module]) -> tuple[nn.Parameter, ...]:
    """Returns the parameters of the generator, or of the discriminators by kind, whose names begin so.

    Raises UserError if a beginning names none, or nothing is left to train.
    """
    side = "generator" if "generator" in parts else "discriminator"
    named = [
        (names_of(part, name), parameter)
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
    ]
    for start in beginnings:
        known = not start.startswith(side) or any(name.startswith(start) for names, _ in named for name in names)
        if not (known and start.startswith(("generator", "discriminator"))):
            some = sorted({".".join(name.split(".")[:2]) for names, _ in named for name in names})
            raise UserError(f"frozen_params: no tensor begins with {start!r}", hint=f"such as {', '.join(some[:6])}")
    frozen = [parameter for names, parameter in named if any(name.startswith(tuple(beginnings)) for name in names)]
    if frozen and len(frozen) == len(named):
        raise UserError(f"frozen_params leaves nothing of the {side} to train", hint="freeze a part of it")
    return tuple(frozen)


def read_weights(name: str | Path, ignored: Sequence[str] = ()) -> Weights:
    """Reads the weights of a file, of a folder with model.ckpt or with checkpoints of a run, or of a published model.

    `ignored` are prefixes of names, such as "generator.ups" or "discriminator.mpd" (openvpi's finetune_ignored_params).
    Raises UserError if there are none, or the file is damaged or would have to run code.
    """
    file = weights_file(local_path(name, PUBLISHED))
    generator, discriminators = _read_run(file) if is_ours(file) else _read_openvpi(file)
    return Weights(generator, discriminators, str(name), tuple(ignored))


def weights_file(path: Path) -> Path:
    """Returns the file of weights at `path`; for a run, its folder. Raises UserError if there is none."""
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder", hint="name a run folder, a checkpoint, or the model.ckpt of openvpi"
        )
    refuse_graph(path)
    if path.is_file() or is_ours(path):
        return path
    named = [path / name for name in (MODEL, FIRST_MODEL) if (path / name).is_file()]
    found = named[:1] or sorted(path.glob("[!.]*.ckpt"))
    if len(found) == 1:
        return found[0]
    what = f"holds {', '.join(file.name for file in found)}" if found else f"holds neither {MODEL} nor a checkpoint"
    raise UserError(
        f"{path}: {what}", hint="name the file itself" if found else "name a run folder or an openvpi model"
    )


def is_ours(path: Path) -> bool:
    """Returns True if a path is a checkpoint or run of ours according to its name."""
    return any(path.glob("checkpoint_*.pt")) if path.is_dir() else path.suffix == ".pt"


def _read_run(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    _, content = checkpoint.find_named(path, "vocoder", ["generator", "discriminators"])
    return trained_weights(content, "generator"), _grouped(content["modules"]["discriminators"])


def _read_openvpi(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    content = read_foreign(path, instead="take openvpi's model.ckpt, or save its tensors alone")
    if isinstance(content.get("generator"), dict):
        return _renamed_tensors(content, path, "generator"), {}
    trained = _renamed_tensors(content, path)
    generator = {name.removeprefix(GENERATOR): tensor for name, tensor in trained.items() if name.startswith(GENERATOR)}
    if not generator:
        raise UserError(
            f"{path}: holds no generator of a vocoder",
            hint="take openvpi's model.ckpt, or a checkpoint of its trainer, whose state_dict has generator.… in it",
        )
    log_unused(path, (name for name in trained if not name.startswith((GENERATOR, DISCRIMINATOR))))
    found = {
        name.removeprefix(DISCRIMINATOR): tensor for name, tensor in trained.items() if name.startswith(DISCRIMINATOR)
    }
    return generator, dict(_known(group, tensors) for group, tensors in _grouped(found).items())


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns tensors by the first part of their names, a group, and by the rest."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = tensor
    return groups


def _known(group: str, tensors: dict[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Returns the kind of a group of openvpi's discriminators, and its tensors by our names."""
    kind = next((kind for mark, kind in MARKS if any(mark in name for name in tensors)), group)
    if kind == "mrd":
        tensors = {_renamed(name, UNIVNET): tensor for name, tensor in tensors.items() if not name.endswith(".window")}
    return kind, tensors


def _renamed_tensors(content: Mapping[str, Any], path: Path, *keys: str) -> dict[str, Tensor]:
    """Returns the tensors of a mapping by our names; floating-point ones in fp32."""
    return {
        _renamed(name, RENAMED): value.float() if value.is_floating_point() else value
        for name, value in tensors_of(content, path, *keys).items()
    }


def _renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    for old, new in table:
        name = re.sub(old, new, name)
    return name
