"""Reads files of pretrained weights, with verification of their SHA-256 and without running code."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gputrain.engine.checkpoint import read_foreign
from gputrain.errors import UserError
from gputrain.fetch.catalogue import catalogue, close_names
from gputrain.fetch.files import sha256
from gputrain.fetch.names import find_published, local_path
from gputrain.vae.config import MEASURES

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


def verify_files(paths: Sequence[Path], known: Sequence[str], stated: Sequence[str] = ()) -> None:
    """Verifies that every file is one of those with a short name in `known`, or has a SHA-256 that the user states (64
    hexadecimal digits).

    Raises UserError, naming both hashes, for any other file, and for a stated hash that no file has.
    """
    stated = [digest.lower() for digest in stated]
    for digest in stated:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise UserError(f"{digest!r} is not a SHA-256", hint="use the 64 hexadecimal digits of: sha256sum FILE")
    entries = [catalogue()[name] for name in known]
    wanted = [*stated, *(digest for entry in entries for digest in entry.sha256.values())]
    where = how_to_fetch(known)
    found = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file", hint=where)
        try:
            found.append(sha256(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        if found[-1] not in wanted:
            raise UserError(
                f"{path}: its SHA-256 is {found[-1]}, expected {' or '.join(wanted)}",
                hint=f"{where}. If you trust another file, state its SHA-256",
            )
    for digest in stated:
        if digest not in found:
            raise UserError(
                f"{', '.join(map(str, paths))}: SHA-256 {', '.join(found)}, but you stated {digest}",
                hint="use the file that the hash belongs to, or drop the hash of a known file",
            )


def how_to_fetch(known: Sequence[str]) -> str:
    """Returns the command that loads the files with these short names."""
    files = " and ".join(catalogue()[name].file_name for name in known)
    return f"gputrain fetch {' '.join(known)} loads {files}"


class WeightsFile(NamedTuple):
    """Tensors of a file, the names of all that it holds, and the metadata of a .safetensors file."""

    tensors: dict[str, Tensor]
    names: list[str]
    metadata: Mapping[str, str]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a file as `read_weights_file` does, with the same errors."""
    return read_weights_file(path).tensors


def read_weights_file(path: Path, parts: str = "") -> WeightsFile:
    """Reads the tensors of a .safetensors file, or of a .pth, .pt, .ckpt or .bin of torch, by name, on the CPU.

    Only names that match the regular expression `parts` anywhere are read. Of a training checkpoint, `state_dict` is
    read. Raises UserError if the file is missing or damaged, or cannot be read without running code.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a file of weights, preferably .safetensors")
    if path.suffix == ".safetensors":
        return read_safetensors(path, parts)
    content = {name: tensor for name, tensor in _read_pickle(path).items() if isinstance(tensor, Tensor)}
    return WeightsFile({name: one for name, one in content.items() if re.search(parts, name)}, list(content), {})


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


def _read_pickle(path: Path) -> dict[str, Any]:
    content = read_foreign(path, instead="take the .safetensors of the same weights")
    if isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    return {name: value for name, value in content.items() if isinstance(name, str)}
