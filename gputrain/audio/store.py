"""The store of prepared sound: all waves in one file, their pitch in another if they have one, and an index.

    waves.i16   mono, little-endian, sound after sound
    f0.f32      Hz by frame, 0 where unvoiced, sound after sound; only a vocoder's store has it

The files are counted in units: samples, or frames of `hop_size` samples with a pitch each. Reading a part takes a tenth
of a millisecond; decoding a song takes most of a second. What is read is compared with checksums in the index. A sound
is added to the index after the files hold it, so that an interrupted preparation continues behind the last whole one.
"""

import os
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.data_in.preparation import GO_ON, QUARANTINE, Journal
from gputrain.data_in.sources import hub_name, is_there, may_hold
from gputrain.data_in.split import MANIFEST
from gputrain.errors import UserError
from gputrain.files import writing
from gputrain.kinds import how_to_prepare, refuse_other_data
from gputrain.serialization import from_row, unreadable

SHOWN = 4  # Sorts of files that are named of a folder that is not prepared.
WAVES, PITCHES = "waves.i16", "f0.f32"

PREPARE_AGAIN = "prepare the recordings again, into another folder, with gputrain prepare-data"
ELSEWHERE = "prepare into another folder: --output-dir NEW_FOLDER"
Wave = npt.NDArray[np.int16]
Pitch = npt.NDArray[np.float32]
StoredNumbers = npt.NDArray[Any]


class StoredFile(NamedTuple):
    """A file of a store: numbers of one type, the same count of them for each unit."""

    name: str
    dtype: str
    numbers_a_unit: int

    @property
    def bytes_per_unit(self) -> int:
        return self.numbers_a_unit * np.dtype(self.dtype).itemsize


def stored_files(hop_size: int = 0) -> tuple[StoredFile, ...]:
    """Returns the files of a store: samples, or hops of samples with their pitch."""
    if not hop_size:
        return (StoredFile(WAVES, "<i2", 1),)
    return StoredFile(WAVES, "<i2", hop_size), StoredFile(PITCHES, "<f4", 1)


class Place(NamedTuple):
    """A sound's place in the files of a store, and CRC-32 checksums of every so many units."""

    first: int
    units: int
    sums: tuple[int, ...]
    units_a_sum: int


class StoredSound(Protocol):
    """A sound of a store, or a part of one."""

    @property
    def path(self) -> str: ...

    @property
    def place(self) -> Place: ...

    def at_place(self, first: int, sums: tuple[int, ...]) -> Any: ...  # Returns it at another place.


Row = TypeVar("Row", bound=StoredSound)
Store = TypeVar("Store", bound="SoundStore[Any]")


def end_of(sounds: Iterable[StoredSound]) -> int:
    """Returns the first unit behind all sounds."""
    return max((sound.place.first + sound.place.units for sound in sounds), default=0)


def checksums(numbers: Sequence[StoredNumbers], units: int, units_a_sum: int) -> tuple[int, ...]:
    """Returns the CRC-32 of every `units_a_sum` units, computed over the numbers of one file after the other."""
    sums = []
    for begin in range(0, units, units_a_sum):
        crc = 0
        for values in numbers:
            a_unit = len(values) // units
            crc = zlib.crc32(values[begin * a_unit : (begin + units_a_sum) * a_unit].tobytes(), crc)
        sums.append(crc)
    return tuple(sums)


# ------------------------------------------------------------------------------------------------------ reading


def read_numbers(path: Path, dtype: str, first: int, count: int) -> StoredNumbers:
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


def read_units(
    folder: Path, files: Sequence[StoredFile], sound: StoredSound, first: int, count: int
) -> tuple[StoredNumbers, ...]:
    """Reads the numbers of each file for `count` units, starting at unit `first` of a sound.

    All checksummed blocks that these units touch are read. Raises UserError if they cannot be, or have changed.
    """
    place, block = sound.place, sound.place.units_a_sum
    begin, end = first // block * block, min(-(-(first + count) // block) * block, place.units)
    read = [
        read_numbers(
            folder / file.name, file.dtype, (place.first + begin) * file.numbers_a_unit,
            (end - begin) * file.numbers_a_unit,
        )
        for file in files
    ]  # fmt: skip
    known = place.sums[begin // block :][: -(-(end - begin) // block)]
    if known != checksums(read, end - begin, block):
        names = " or ".join(file.name for file in files)
        raise UserError(f"{folder}: {sound.path} is damaged in {names}", hint=PREPARE_AGAIN)
    return tuple(
        values[(first - begin) * file.numbers_a_unit :][: count * file.numbers_a_unit]
        for file, values in zip(files, read, strict=True)
    )


@dataclass(frozen=True)
class SoundStore(Generic[Row]):
    """Prepared sound opened for reading: the store of a folder, or several `stores` as one, whose units and clips are
    numbered through. It can be pickled; worker processes read the files themselves."""

    folder: Path  # That of the first store.
    format: Any
    clips: list[Row]
    stores: tuple[Any, ...] = ()

    @property
    def parts(self: Store) -> tuple[Store, ...]:
        """The stores of single folders."""
        return self.stores or (self,)

    @property
    def folders(self) -> str:
        """The folders for messages."""
        return ", ".join(str(part.folder) for part in self.parts)

    def place_of(self, clip: Row) -> tuple[Path, Row]:
        """Returns the folder of a clip, and the clip as that folder numbers it."""
        if not self.stores:
            return self.folder, clip
        number = bisect_right(self._begins, clip.place.first) - 1
        return self.stores[number].folder, moved(clip, -self._begins[number])

    @cached_property
    def _begins(self) -> list[int]:
        return begins_of(self.stores)


def begins_of(stores: Sequence[SoundStore[Any]]) -> list[int]:
    """Returns the first unit of each store among the units of all."""
    return [0, *accumulate(end_of(store.clips) for store in stores[:-1])]


def moved(clip: Row, by: int) -> Row:
    made: Row = clip.at_place(clip.place.first + by, clip.place.sums)
    return made


def check_finished(folder: Path, names: Sequence[str], journal: str, *wanted: str) -> None:
    """Raises UserError if a folder lacks one of the files that a finished preparation for the kinds of model that are
    `wanted` writes, or is prepared for another one."""
    if folder.is_dir():
        refuse_other_data(folder, *wanted)
        if all((folder / name).is_file() for name in names):
            return
        if (folder / journal).is_file():
            raise UserError(f"{folder}: its preparation was not finished", hint=GO_ON)
        fault = f"not prepared for {' or '.join(wanted)} (found {summary_of(folder)})"
    else:
        fault = "is no prepared folder" if is_there(folder) else "no such folder"
    source = hub_name(folder) or folder
    hint = how_to_prepare(*wanted, source=source if may_hold(folder, "audio") else "FOLDER")
    raise UserError(f"{source}: {fault}", hint=hint)


def summary_of(folder: Path) -> str:
    """Returns what a folder holds, without its subfolders' content: "60 .wav, 1 .csv"."""
    counts = Counter("folder" if path.is_dir() else path.suffix or path.name for path in folder.iterdir())
    return ", ".join(f"{count} {name}" for name, count in counts.most_common(SHOWN)) or "nothing"


def bytes_in(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


# ------------------------------------------------------------------------------------------------------ writing


def check_format(folder: Path, journal: str, format: Any) -> None:
    """Raises UserError if a folder holds sounds of another format. It only reads; a damaged journal is left to the
    writer."""
    with suppress(ValueError):
        if (head := Journal(folder / journal).head) is not None:
            _refuse_other_format(folder, from_row(type(format), head), format)


def _refuse_other_format(folder: Path, earlier: Any, format: Any) -> None:
    if earlier != format:
        raise UserError(f"{folder} was prepared with {format_of(earlier)}, not {format_of(format)}", hint=ELSEWHERE)


class SoundWriter(Generic[Row]):
    """Writes a store sound by sound; opened again on the same folder, it continues."""

    further_files: ClassVar[tuple[str, ...]] = (MANIFEST, QUARANTINE)  # Those that a preparation writes beside them.

    def __init__(self, folder: Path, journal: str, format: Any, row: type[Row], files: Sequence[StoredFile]) -> None:
        """Opens the journal, and removes what the files hold behind its last sound. `format` is a dataclass.

        Raises UserError if the folder holds a preparation of another format or a damaged one, or cannot be written.
        """
        self.folder, self.format, self._files = folder, format, files
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._journal = Journal(folder / journal)
            self._refuse_to_replace(journal)
            self.sounds = self._known(row)
            self._end = end_of(self.sounds)
            for file in files:
                path, size = folder / file.name, self._end * file.bytes_per_unit
                path.touch()
                if path.stat().st_size < size:
                    raise UserError(f"{path}: shorter than its {Path(journal).stem} says", hint=PREPARE_AGAIN)
                os.truncate(path, size)

    def _refuse_to_replace(self, journal: str) -> None:
        """Raises UserError if the folder has files without a journal that the preparation would replace."""
        written = (*self.further_files, *(file.name for file in self._files))
        strangers = [name for name in written if name != journal and (self.folder / name).exists()]
        if self._journal.head is None and strangers:
            raise UserError(
                f"{self.folder}: holds {', '.join(strangers)} of another origin, which would be replaced",
                hint=ELSEWHERE,
            )

    def _known(self, row: type[Row]) -> list[Row]:
        """Returns the sounds of an earlier preparation."""
        journal = self._journal
        if journal.head is None:
            journal.head = asdict(self.format)
        try:
            earlier = from_row(type(self.format), journal.head)
            found = [from_row(row, stored) for stored in journal.rows]
            if journal.is_damaged:
                raise ValueError
        except ValueError:
            raise unreadable(journal.path, PREPARE_AGAIN) from None
        _refuse_other_format(self.folder, earlier, self.format)
        journal.rewrite(journal.rows)
        return found

    def append(self, sound: Row, *numbers: StoredNumbers) -> Row:
        """Appends a sound, with the numbers for each file, and returns it with its place and checksums.

        Raises UserError if the disk is full.
        """
        stored = [values.astype(file.dtype, copy=False) for file, values in zip(self._files, numbers, strict=True)]
        row: Row = sound.at_place(self._end, checksums(stored, sound.place.units, sound.place.units_a_sum))
        for file, values in zip(self._files, stored, strict=True):
            path = self.folder / file.name
            with writing(path), path.open("ab") as to:
                to.write(values.tobytes())
        self._journal.append(asdict(row))  # type: ignore[call-overload]
        self._end += row.place.units
        self.sounds.append(row)
        return row

    def sync(self) -> None:
        """Waits until the disk holds all files."""
        with writing(self.folder):
            for path in (*(self.folder / file.name for file in self._files), self._journal.path):
                with path.open("ab") as file:
                    os.fsync(file.fileno())


def format_of(format: Any) -> str:
    """Returns names and values of a format as text."""
    values = asdict(format).items()
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)
