"""Verifies files by their size and SHA-256, and copies them without replacing others."""

import filecmp
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gputrain.errors import UserError
from gputrain.figures import format_bytes

NOT_REPLACED = "it is not replaced: name another --output-dir"


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fault_of(path: Path, size: int | None = None, digest: str = "") -> str:
    """Returns how a file differs from its stated size and SHA-256, of which either may be unknown; nothing if it does
    not. Raises OSError."""
    found = path.stat().st_size
    if size is not None and found != size:
        return f"has {found:,} bytes, expected {size:,}"
    if digest and (actual := sha256(path)) != digest:
        return f"its SHA-256 is {actual}, expected {digest}"
    return ""


def files_below(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder tree by their names below it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into a folder, under the names that are their keys; each appears when it is complete.

    A file that is there already stays. Raises UserError before anything is copied if one of them is another file, or if
    there is too little space; OSError for the disk.
    """
    lacking = {}
    for name, source in files.items():
        target = folder / name
        if not target.exists():
            lacking[target] = source
        elif not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
            raise UserError(f"{target}: is there already, and is another file", hint=NOT_REPLACED)
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(source.stat().st_size for source in lacking.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: has {format_bytes(free)} free, and {format_bytes(needed)} are copied there",
            hint="free the space, or name another --output-dir",
        )
    for target, source in lacking.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f"{target.name}.partial")
        shutil.copyfile(source, aside)
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(aside, target)
