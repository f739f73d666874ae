"""Reads files of prepared sound: int16 samples in one file, and a journal of its content."""

import json
import os
from collections.abc import Mapping
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


class JournaledFiles:
    """Files of a store that grow row by row. A row of the journal is written after its data, so that an interrupted
    preparation continues behind the last complete row."""

    def __init__(self, journal: Path, sizes: Mapping[Path, int]) -> None:
        """Opens the journal, and files that hold at least so many bytes; what is behind these is removed. Raises
        UserError if one is shorter."""
        for path, size in sizes.items():
            path.touch()
            if path.stat().st_size < size:
                raise UserError(f"{path}: shorter than its {journal.stem} says", hint=PREPARE_AGAIN)
            os.truncate(path, size)
        self.files: list[IO[Any]] = [*(path.open("ab") for path in sizes), journal.open("a", encoding="ascii")]

    def append(self, row: Any, *contents: bytes) -> None:
        """Appends a row: the bytes for each file, then a line of the journal."""
        for file, content in zip(self.files, (*contents, json.dumps(asdict(row)) + "\n"), strict=True):
            file.write(content)
            file.flush()

    def sync(self) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self.files:
            file.close()


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
            f"{path.parent} was prepared with {in_words(earlier)}, not {in_words(format)}",
            hint="prepare into another folder",
        )
    path.write_text("".join(line + "\n" for line in whole), encoding="ascii")
    return found


def in_words(format: Any) -> str:
    """Returns names and values of a format as text."""
    values = asdict(format).items()
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)
