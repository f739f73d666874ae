"""Reads files of weights of other programs without running code.

A file is read by its content, whatever its name. Wrappers that trainers and compilers put around a model, as parts of
the names of tensors or as mappings around them, are removed.
"""

import hashlib
import logging
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gputrain.errors import UserError

log = logging.getLogger(__name__)

DAMAGED = "copy or download it again"
DIGEST = "tensors_sha256"  # Key in the metadata of a .safetensors file that gputrain wrote.
# torch.load raises these errors when it interprets damaged bytes as instructions, names and sizes.
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
# Parts of the names of tensors that DistributedDataParallel, torch.compile, FSDP and checkpointing add.
WRAPPERS = re.compile(r"(?<![^.])(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
NESTED = ("state_dict", "model_state_dict", "model", "module")  # Keys under which trainers keep the tensors.
TORCH = (b"PK", b"\x80")  # Beginnings of what torch writes: zip archives, and formerly pickles.


class WeightsFile(NamedTuple):
    """Tensors of a file, the names of all that it holds, and the metadata of a .safetensors file."""

    tensors: dict[str, Tensor]
    names: list[str]
    metadata: Mapping[str, str]


def _head_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(24)
    except OSError:  # Its reader reports it.
        return b""


def is_safetensors(path: Path) -> bool:
    """Returns True if a file begins as those of safetensors do: with the length of a header in JSON, and the header."""
    return _head_of(path)[8:9] == b"{"


def other_file(path: Path, wanted: str) -> UserError | None:
    """Returns the error for a file that does not begin as those of torch; None for one that does, or is empty."""
    head = _head_of(path)
    if not head or head.startswith(TORCH):
        return None
    if is_safetensors(path):
        hint = "--init-from begins a training with them"
        return UserError(f"{path}: weights in safetensors, not {wanted}", hint=hint)
    hint = "name a file of torch or safetensors: unpack archives, run git lfs pull for pointers, download pages anew"
    return UserError(f"{path}: begins with {head[:16]!r}, which is not {wanted}", hint=hint)


def plain_name(name: str) -> str:
    """Returns the name of a tensor without the parts that wrappers have added."""
    return WRAPPERS.sub("", name)


def tensors_of(content: Mapping[Any, Any], source: str | Path, *keys: str) -> dict[str, Tensor]:
    """Returns the tensors of a mapping by their plain names, or of the mapping inside it that holds a model's: under
    one of `keys` or of NESTED, or the only one. What has tensors beside that one is logged as not used."""
    inside = {name: value for name, value in content.items() if _has_tensor(value)}
    known = [name for name in (*keys, *NESTED, *(inside if len(inside) == 1 else ())) if name in inside]
    key = next((name for name in known if isinstance(inside[name], dict)), None)
    if key is not None:
        log_unused(source, (str(name) for name in inside if name != key))
        return tensors_of(inside[key], source)
    return {
        plain_name(name): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }


def _has_tensor(value: object) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, Tensor) or any(map(_has_tensor, inside))


def log_unused(source: str | Path, names: Iterable[str]) -> None:
    """Logs what a file holds and nothing uses."""
    if unused := format_parts(names):
        log.info("%s: not used: %s", source, unused)


def format_parts(names: Iterable[str]) -> str:
    """Returns the numbers of tensors by the first parts of their names: "unet.down (12), loss (1)"."""
    counts = Counter(".".join(name.split(".")[:-1][:2]) or name for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(8))


def read_weights_file(path: Path, parts: str = "") -> WeightsFile:
    """Reads the tensors of a file of safetensors or of torch, by name, on the CPU.

    Only names that match the regular expression `parts` anywhere are read. Raises UserError if the file is missing or
    damaged, or cannot be read without running code.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a file of weights, preferably .safetensors")
    if is_safetensors(path):
        return read_safetensors(path, parts)
    content = read_foreign(path, instead="take the .safetensors of the same weights")
    tensors = tensors_of(content, path)
    return WeightsFile({name: tensor for name, tensor in tensors.items() if re.search(parts, name)}, list(tensors), {})


def read_foreign(path: Path, *, instead: str, plain: Mapping[str, type] | None = None) -> dict[Any, Any]:
    """Returns a mapping that another program has saved with torch, or the tensors of a file of safetensors as the
    state_dict in one, on the CPU.

    Raises UserError if the file is damaged, holds no mapping, or would have to run code; `instead` is the hint. `plain`
    maps full names of further classes that the file may contain to their replacements.
    """
    if is_safetensors(path):
        return {"state_dict": read_safetensors(path).tensors}
    if error := other_file(path, "a file of torch or safetensors"):
        raise error
    try:
        with (
            torch.serialization.safe_globals([(made, name) for name, made in (plain or {}).items()]),
            path.open("rb") as f,
        ):
            content = torch.load(f, map_location="cpu", weights_only=True)  # Of a path, it would read the ending.
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: contains more than tensors, or was not written by torch; reading it could run code",
            hint=instead,
        ) from None
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: truncated or damaged: {reason}", hint=DAMAGED) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: does not contain named tensors", hint=instead)
    return content


def read_safetensors(path: Path, parts: str = "") -> WeightsFile:
    """Reads the tensors whose names match the regular expression `parts` anywhere, on the CPU.

    If all are read and the file has a digest of them, it is verified. Raises UserError if the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
            tensors = {plain_name(name): file.get_tensor(name) for name in names if re.search(parts, plain_name(name))}
    except (OSError, SafetensorError) as error:
        if not is_safetensors(path) and (other := other_file(path, "a file of torch or safetensors")):
            raise other from None
        raise UserError(f"{path}: truncated or damaged: {error}", hint=DAMAGED) from None
    digest = metadata.get(DIGEST)
    if digest and len(tensors) == len(names) and digest != digest_of(tensors):
        raise UserError(f"{path}: damaged: its tensors differ from those that were written", hint=DAMAGED)
    return WeightsFile(tensors, [*map(plain_name, names)], metadata)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the names, types, shapes and bytes of tensors on the CPU, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
