"""Reads files of weights of other programs without running code, and tells by their first bytes what other files are.

A file is read by its content, whatever its name. Wrappers that trainers and compilers put around a model, as parts of
the names of tensors or as mappings around them, are removed.
"""

import contextlib
import hashlib
import logging
import pickle
import re
import zipfile
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
SAFETENSORS = "safetensors"
SAME, UNPACK = "take the .safetensors of the same model", "unpack it, and name the file that is in it"
FORMS = (  # How a file begins, what it is, and what to do with it.
    (rb"GGUF", "weights in GGUF", SAME),
    (rb"\x89HDF", "weights in HDF5, as of Keras", SAME),
    (rb"\x08\x01\x12|\n.{1,3}\n[\x01-\x7f][\w/.:-]+\x12|.{4}TFL3", "a graph of TensorFlow", SAME),
    (rb"\x08[\x03-\x20][\x12\x1a\x22:B]", "a graph of ONNX", "name the run or the weights that it was exported from"),
    (rb"version https://git-lfs", "a pointer of Git LFS", "run git lfs pull there"),
    (rb"(?i)\s*<(!doctype|html)", "a web page", "download the file itself"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!|.{257}ustar", "an archive", UNPACK),
    (rb"\x80[\x02-\x05](?!.{0,14}\x8a\nl\xfc\x9cF)", "a pickle that torch did not write", "torch.save its tensors"),
)


class WeightsFile(NamedTuple):
    """Tensors of a file, the names of all that it holds, and the metadata of a .safetensors file."""

    tensors: dict[str, Tensor]
    names: list[str]
    metadata: Mapping[str, str]


def form_of(path: Path) -> tuple[str, str]:
    """Returns what a file is by its first bytes, and what to do with it. Both are empty for a file of torch and for
    what is not recognised or cannot be opened; of SAFETENSORS, the second is empty."""
    names = ["data.pkl"]
    try:
        with path.open("rb") as file:
            head = file.read(300)
    except OSError:  # Its reader reports it.
        return "", ""
    if not head:
        return "an empty file", DAMAGED
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return SAFETENSORS, ""
    if head.startswith(b"PK"):
        with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:  # Damaged headers can cause any error.
            names = archive.namelist()
    if any(name.endswith("/constants.pkl") for name in names):
        return "a program of TorchScript", SAME
    if not any(name.endswith("data.pkl") for name in names):
        return f"a zip archive of {', '.join(names[:3])}{' and others' * (len(names) > 3)}", UNPACK
    return next(((what, hint) for form, what, hint in FORMS if re.match(form, head, re.DOTALL)), ("", ""))


def other_file(path: Path, wanted: str) -> UserError | None:
    """Returns the error for a whole file of another kind than the `wanted` one; None for what is not recognised."""
    what, hint = form_of(path)
    if what == SAFETENSORS:
        what, hint = "weights in safetensors", f"gputrain train-vae --init-from {path} begins with them, if of a VAE"
    return UserError(f"{path}: {what}, not {wanted}", hint=hint) if what else None


def plain_name(name: str) -> str:
    """Returns the name of a tensor without the parts that wrappers have added."""
    return WRAPPERS.sub("", name)


def tensors_of(content: Mapping[Any, Any], source: str | Path, *keys: str) -> dict[str, Tensor]:
    """Returns the tensors of a mapping by their plain names, or of the mapping inside it that holds a model's: under
    one of `keys` or of NESTED, or the only one. What has tensors beside that one is logged as not used."""
    inside = {name: one for name, one in content.items() if _has_tensor(one)}
    known = [name for name in (*keys, *NESTED, *(inside if len(inside) == 1 else ())) if name in inside]
    key = next((name for name in known if isinstance(inside[name], dict)), None)
    if key is not None:
        log_unused(source, (str(name) for name in inside if name != key))
        return tensors_of(inside[key], source)
    return {plain_name(name): one for name, one in content.items() if isinstance(name, str) and isinstance(one, Tensor)}


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
    if form_of(path)[0] == SAFETENSORS:
        return read_safetensors(path, parts)
    content = read_foreign(path, instead="take the .safetensors of the same weights")
    tensors = tensors_of(content, path)
    return WeightsFile({name: one for name, one in tensors.items() if re.search(parts, name)}, list(tensors), {})


def read_foreign(path: Path, *, instead: str, plain: Mapping[str, type] | None = None) -> dict[Any, Any]:
    """Returns a mapping that another program has saved with torch, or the tensors of a file of safetensors as the
    state_dict in one, on the CPU.

    Raises UserError if the file is damaged, holds no mapping, or would have to run code; `instead` is the hint. `plain`
    maps full names of further classes that the file may contain to their replacements.
    """
    form = form_of(path)[0] if path.is_file() else ""
    if form == SAFETENSORS:
        return {"state_dict": read_safetensors(path).tensors}
    if form and (error := other_file(path, "a file of torch or safetensors")):
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
        if form_of(path)[0] != SAFETENSORS and (other := other_file(path, "a file of torch or safetensors")):
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
