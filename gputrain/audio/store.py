"""Reads files of prepared sound: int16 samples in one file, and a journal of its content."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.errors import UserError

WAVES = "waves.i16"

PREPARE_AGAIN = "delete the folder and prepare it again"
Wave = npt.NDArray[np.int16]
Row = TypeVar("Row")


def read_numbers(path: Path, dtype: str, first: int, count: int) -> npt.NDArray[Any]:
    """Reads `count` numbers of a file, starting at number `first`. Raises UserError if they cannot be read.

    A memory map would be no faster, and a truncated file would end the process with SIGBUS.
    """
    try:
        found = np.fromfile(path, dtype, count, offset=first * np.dtype(dtype).itemsize)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})", hint=PREPARE_AGAIN) from None
    if len(found) < count:
        raise UserError(f"{path}: shorter than its index says", hint=PREPARE_AGAIN)
    return found


def truncate_file(path: Path, size: int, index: str) -> None:
    """Creates or truncates a file to `size` bytes. Raises UserError if it is shorter; `index` names what says so."""
    path.touch()
    if path.stat().st_size < size:
        raise UserError(f"{path}: shorter than its {index} says", hint=PREPARE_AGAIN)
    os.truncate(path, size)


def sync_files(files: Iterable[IO[Any]]) -> None:
    """Writes buffered data of open files to the disk."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def read_journal(path: Path, format: Any, row: type[Row]) -> list[Row]:
    """Reads the rows of a journal whose first line is the format; starts a new journal if there is none.

    An incomplete last line is removed from the file. Raises UserError if the journal is damaged or of another format.
    """
    if not path.exists():
        path.write_text(json.dumps(asdict(format)) + "\n", encoding="ascii")
    try:
        whole = path.read_text(encoding="ascii").rpartition("\n")[0].splitlines()
        head, *rows = map(json.loads, whole)
        earlier, found = type(format)(**head), [row(**one) for one in rows]
    except (ValueError, TypeError):
        raise UserError(f"{path}: damaged", hint=PREPARE_AGAIN) from None
    if earlier != format:
        raise UserError(
            f"{path.parent} was prepared with {_in_words(earlier)}, not {_in_words(format)}",
            hint="prepare into another folder",
        )
    path.write_text("".join(line + "\n" for line in whole), encoding="ascii")
    return found


def _in_words(format: Any) -> str:
    """Returns names and values of a format as text."""
    values = asdict(format).items()
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)
