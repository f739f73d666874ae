"""Reads pretrained weights and loads them into a model.

Supported are openvpi's `model.ckpt`, which is a generator; openvpi's training checkpoints, which have the
discriminators too; and runs and checkpoints of our own. Files are read without executing code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gputrain.engine import checkpoint
from gputrain.errors import UserError

MODEL = "model.ckpt"
GENERATOR, DISCRIMINATOR = "generator.", "discriminator."
SHOWN = 6  # Number of items shown of a longer list.
DIFFERENT = "give the options that it was trained with, or --no-finetune-strict-shapes to reinitialise these tensors"
# Substitutions from other spellings to the names of our tensors, in this order.
RENAMED = (
    (r"\b_orig_mod\.", ""),  # Prefix of a compiled module.
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
        mine = wanted.state_dict()
        given = self.generator if part == "generator" else self.discriminators[part]
        given = {name: tensor for name, tensor in given.items() if not self._is_ignored(part, name)}
        asked = {name: tensor for name, tensor in mine.items() if not self._is_ignored(part, name)}
        apart = differences(asked, given)
        fitting = {name for name in asked.keys() & given.keys() if asked[name].shape == given[name].shape}
        if apart and (strict_shapes or not fitting):
            count = f"{len(apart)} tensor{'s' * (len(apart) != 1)}"
            raise UserError(f"{self.source}: its {part} differs in {count}: {shortened(apart)}", hint=hint)
        for name in fitting:
            if not given[name].isfinite().all():
                raise UserError(f"{self.source}: {name}: not all weights are finite", hint="take another checkpoint")
        with torch.no_grad():
            for name in fitting:
                mine[name].copy_(given[name])
        return [name for name in mine if name not in fitting]

    def _is_ignored(self, part: str, name: str) -> bool:
        """Returns True if a tensor's name by openvpi, where fast kinds have the names of plain ones, or by us is
        ignored."""
        names = (
            {part} if part == "generator" else {f"discriminator.{kind}" for kind in (part, part.removeprefix("fast_"))}
        )
        return any(f"{module}.{name}".startswith(beginning) for module in names for beginning in self.ignored)


def read_weights(path: Path, ignored: Sequence[str] = ()) -> Weights:
    """Reads the weights at `path`: a file, or a folder with model.ckpt or with checkpoints of a run.

    `ignored` are prefixes of names, such as "generator.ups" or "discriminator.mpd" (openvpi's finetune_ignored_params).
    Raises UserError if there are none, or the file is damaged or would have to run code.
    """
    file = weights_file(path)
    generator, discriminators = _read_run(file) if is_ours(file) else _read_openvpi(file)
    return Weights(generator, discriminators, str(path), tuple(ignored))


def weights_file(path: Path) -> Path:
    """Returns the file of weights at `path`; for a run, its folder. Raises UserError if there is none."""
    if not path.exists():
        raise UserError(
            f"{path}: no such file or folder", hint="name a run folder, a checkpoint, or the model.ckpt of openvpi"
        )
    if path.is_file() or is_ours(path):
        return path
    found = [path / MODEL] if (path / MODEL).is_file() else sorted(path.glob("*.ckpt"))
    if len(found) == 1:
        return found[0]
    what = f"holds {', '.join(file.name for file in found)}" if found else f"holds neither {MODEL} nor a checkpoint"
    raise UserError(
        f"{path}: {what}", hint="name the file itself" if found else "name a run folder or an openvpi model"
    )


def is_ours(path: Path) -> bool:
    """Returns True if a path is a checkpoint or run of ours according to its name."""
    return any(path.glob("checkpoint_*.pt")) if path.is_dir() else path.suffix == ".pt"


def generator_of_run(content: checkpoint.Content) -> dict[str, Tensor]:
    """Returns the generator of a checkpoint of ours; its EMA, if the run has one."""
    states = content["modules"]
    if "ema" not in states:
        return dict(states["generator"])
    return {name.removeprefix("average."): tensor for name, tensor in states["ema"].items()}


def differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Returns the differences that prevent loading, each as text."""
    found = []
    for name, tensor in wanted.items():
        if name not in given:
            found.append(f"{name} is missing")
        elif given[name].shape != tensor.shape:
            found.append(f"{name} is {_shape(given[name])}, expected {_shape(tensor)}")
    return found + [f"{name} {_shape(given[name])} is not in this model" for name in given if name not in wanted]


def shortened(names: Sequence[str]) -> str:
    """Joins the first SHOWN names, and counts the rest."""
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _read_run(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    found = checkpoint.find(str(path), path, kind="vocoder")
    assert found is not None  # Only `auto` may find nothing.
    _, content = found
    discriminators: dict[str, dict[str, Tensor]] = {}
    for name, tensor in content["modules"].get("discriminators", {}).items():
        kind, _, rest = name.partition(".")
        discriminators.setdefault(kind, {})[rest] = tensor
    return generator_of_run(content), discriminators


def _read_openvpi(path: Path) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    content = checkpoint.read_foreign(path, instead="take openvpi's model.ckpt, or save its tensors alone")
    if isinstance(content.get("generator"), dict):
        return _tensors(content["generator"]), {}
    trained = _tensors(content.get("state_dict"))
    generator = {name.removeprefix(GENERATOR): tensor for name, tensor in trained.items() if name.startswith(GENERATOR)}
    if not generator:
        raise UserError(
            f"{path}: holds no generator of a vocoder",
            hint="take openvpi's model.ckpt, or a checkpoint of its trainer, whose state_dict has generator.… in it",
        )
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in trained.items():
        if name.startswith(DISCRIMINATOR):
            group, _, rest = name.removeprefix(DISCRIMINATOR).partition(".")
            groups.setdefault(group, {})[rest] = tensor
    return generator, dict(_known(group, tensors) for group, tensors in groups.items())


def _known(group: str, tensors: dict[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
    """Returns the kind of a group of openvpi's discriminators, and its tensors by our names."""
    kind = next((kind for mark, kind in MARKS if any(mark in name for name in tensors)), group)
    if kind == "mrd":
        tensors = {_renamed(name, UNIVNET): tensor for name, tensor in tensors.items() if not name.endswith(".window")}
    return kind, tensors


def _tensors(content: object) -> dict[str, Tensor]:
    """Returns the tensors of a mapping by our names; floating-point ones in fp32."""
    if not isinstance(content, dict):
        return {}
    return {
        _renamed(name, RENAMED): value.float() if value.is_floating_point() else value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def _renamed(name: str, table: Sequence[tuple[str, str]]) -> str:
    for old, new in table:
        name = re.sub(old, new, name)
    return name


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
