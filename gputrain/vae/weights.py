"""Reads files of pretrained weights without running code."""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gputrain.engine.checkpoint import read_foreign
from gputrain.errors import UserError
from gputrain.fetch.catalogue import catalogue, close_names
from gputrain.fetch.files import sha256
from gputrain.fetch.names import find_published, local_path
from gputrain.vae.config import MEASURES

log = logging.getLogger(__name__)

DAMAGED = "copy or download it again"
DIGEST = "tensors_sha256"  # key in the metadata of a .safetensors file that gputrain wrote


def named_files(names: Sequence[str | Path], known: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files of paths and published names, of which `known` are those with a short name that fit.

    Raises UserError, before anything is downloaded, if one of them is neither a file nor a name.
    """
    for name in names:
        if not Path(name).exists() and find_published(name) is None:
            close = close_names(str(name))
            hint = f"short names like it: {', '.join(close)}" if close else how_to_fetch(known)
            raise UserError(f"{name}: no such file", hint=hint)
    return tuple(local_path(name, MEASURES) for name in names)


def read_published(path: Path, known: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of a file, with a warning if it is none of those with a short name in `known`: figures of
    other weights are not comparable with published ones. Raises UserError as `read_weights_file` does."""
    tensors = read_weights_file(path).tensors
    published = {digest for name in known for digest in catalogue()[name].sha256.values()}
    if (found := sha256(path)) not in published:
        log.warning(
            "%s: not the published weights (its SHA-256 is %s, theirs %s): figures of it compare with no others; %s",
            path, found, " or ".join(sorted(published)), how_to_fetch(known),
        )  # fmt: skip
    return tensors


def how_to_fetch(known: Sequence[str]) -> str:
    """Returns the command that loads the files with these short names."""
    files = " and ".join(catalogue()[name].file_name for name in known)
    return f"gputrain fetch {' '.join(known)} loads {files}"


class WeightsFile(NamedTuple):
    """Tensors of a file, the names of all that it holds, and the metadata of a .safetensors file."""

    tensors: dict[str, Tensor]
    names: list[str]
    metadata: Mapping[str, str]


def read_weights_file(path: Path, parts: str = "") -> WeightsFile:
    """Reads the tensors of a .safetensors file, or of a .pth, .pt, .ckpt or .bin of torch, by name, on the CPU.

    Only names that match the regular expression `parts` anywhere are read. Of a training checkpoint, `state_dict` is
    read. Raises UserError if the file is missing or damaged, or cannot be read without running code.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a file of weights, preferably .safetensors")
    if path.suffix == ".safetensors":
        return read_safetensors(path, parts)
    content = read_foreign(path, instead="take the .safetensors of the same weights")
    if isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    tensors = {name: one for name, one in content.items() if isinstance(name, str) and isinstance(one, Tensor)}
    return WeightsFile({name: one for name, one in tensors.items() if re.search(parts, name)}, list(tensors), {})


def read_safetensors(path: Path, parts: str = "") -> WeightsFile:
    """Reads the tensors whose names match the regular expression `parts` anywhere, on the CPU.

    If all are read and the file has a digest of them, it is verified. Raises UserError if the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in names if re.search(parts, name)}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: truncated or damaged: {error}", hint=DAMAGED) from None
    digest = metadata.get(DIGEST)
    if digest and len(tensors) == len(names) and digest != digest_of(tensors):
        raise UserError(f"{path}: damaged: its tensors differ from those that were written", hint=DAMAGED)
    return WeightsFile(tensors, names, metadata)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the names, types, shapes and bytes of tensors on the CPU, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
