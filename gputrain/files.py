"""Writing of files that are complete or absent: manifests, reports, outputs and 16-bit wav; progress of such work."""

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from gputrain.errors import UserError
from gputrain.serialization import unreadable

Progress = Callable[[float, int], None]  # Arguments: items done, parts of one included, and items in all.

FULL_SCALE = 32768  # Magnitude of the largest 16-bit sample.


def read_rows(path: Path, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file, one per line. Raises UserError if a line is invalid or lacks a key."""
    keys = set(keys)
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not keys <= row.keys():
            raise unreadable(f"{path}, line {number}", "run gputrain prepare-data again to rebuild it")
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write JSON objects, one per line, atomically; a file that contains them already is not touched.

    Raises UserError if the folder cannot be written to.
    """
    # ASCII preserves file names that are not valid Unicode.
    content = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    with writing(path):
        if path.is_file() and path.read_bytes() == content:
            return
        replace_file(path, [content])


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, also in case of a power failure. Raises OSError."""
    replace_file(path, [text.encode()])


def replace_file(path: Path, content: Iterable[bytes], *, is_synced: bool = True) -> None:
    """Write a file atomically; if it `is_synced`, also in case of a power failure. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # What another process has left there may be a link.
        with partial.open("xb") as file:
            file.writelines(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSErrors of writing to `path` into a UserError."""
    try:
        yield
    except OSError as error:
        is_forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = "choose a folder that you may write to" if is_forbidden else "free some space, or choose another folder"
        raise UserError(f"{path}: cannot be written ({error.strerror or error})", hint=hint) from None


def check_report(path: Path | None, keys: Sequence[str]) -> None:
    """Raises UserError if a file is there that is no earlier report, a JSON object or list of objects with one of the
    keys: a picture or a table of the user is not written over."""
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        content = None
    rows = content if isinstance(content, list) else [content]
    if not all(isinstance(row, dict) and any(key in row for key in keys) for row in rows):
        raise UserError(f"{path}: holds something else than a report", hint="name a new file for the report")


def output_names(names: Sequence[Path], stem_of: Callable[[Path], Path]) -> list[Path]:
    """Returns the name, without an ending, of what is made of each file: its stem, or all of its name where the stem is
    also that of another file, in any case, or another file's name."""
    stems = [stem_of(name) for name in names]
    keys = [str(stem).casefold() for stem in stems]
    times, whole = Counter(keys), {str(name).casefold() for name in names}
    return [
        stem if times[key] == 1 and key not in whole else name
        for name, stem, key in zip(names, stems, keys, strict=True)
    ]


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved to `folder` when the block is left without an error, each one
    complete on the disk. Raises UserError if the folder cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".partial-") as name:
            yield Path(name)
            paths = sorted(Path(name).iterdir())
            for path in paths:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            for path in paths:
                os.replace(path, folder / path.name)


def no_progress(done: float, total: int) -> None:
    """Reports no progress."""


@dataclass
class StepProgress:
    """Reports the progress of work in steps, the first of them at once: `next()` is called after each."""

    progress: Progress
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.progress(0, self.total)

    def next(self) -> None:
        self.done += 1
        self.progress(self.done, self.total)


def to_int16(wave_T: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """16-bit samples of a wave in [-1, 1]; what lies beyond is clipped. Raises ValueError on NaN."""
    if np.isnan(wave_T).any():
        raise ValueError("a wave with NaN has no 16-bit samples")
    samples_T: npt.NDArray[np.int16] = np.rint(wave_T * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
    return samples_T


def write_wav(path: Path, wave_T: npt.NDArray[Any], rate_hz: int) -> None:
    """Write one channel as 16-bit wav. Raises UserError if the file cannot be written, ValueError on NaN."""
    import soundfile  # A training of pictures does without it.

    samples_T = to_int16(wave_T)
    try:
        soundfile.write(path, samples_T, rate_hz, subtype="PCM_16", format="WAV")
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be written: {error.error_string}") from None
