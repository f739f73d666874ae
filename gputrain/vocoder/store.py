"""Prepared sound as a crop wants to read it: all waves in one int16 file, all pitches in another, and an index.

    waves.i16       mono, little-endian, clip after clip
    f0.f32          Hz by frame, 0 where unvoiced, clip after clip
    manifest.jsonl  a clip a line: its source, where it begins, how long it is

A crop is a short read: a tenth of a millisecond, where decoding a song takes the better part of a second. What is read
is compared with checksums in the manifest, one for each stretch of 128 frames. A clip is added once both of its files
hold it, so that a preparation that was cut off goes on behind the last whole one.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Method
from gputrain.engine.data import MANIFEST, read_rows
from gputrain.errors import UserError

WAVES, PITCHES, JOURNAL = "waves.i16", "f0.f32", "journal.jsonl"
PREPARE_AGAIN = "delete the folder and prepare it again"
CHECKED_FRAMES = 128  # that one checksum is of

Wave = npt.NDArray[np.int16]
Pitch = npt.NDArray[np.float32]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Clip:
    """A clip of the store. `frames * hop_size` samples and `frames` pitches, from `first_frame` of the files on."""

    path: str  # of its source, relative to the folder it came from
    fingerprint: str
    first_frame: int
    frames: int
    samples: int  # of sound; what the last frame lacks is silence
    checksums: tuple[int, ...] = ()  # CRC-32 of every CHECKED_FRAMES; older stores have none

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksums", tuple(self.checksums))  # JSON has lists


@dataclass(frozen=True)
class Format:
    """What all clips share. Raises nothing: a store of another format is another store."""

    sampling_rate: int  # Hz
    hop_size: int  # samples a frame
    f0_method: Method
    f0_min: float = FLOOR_HZ  # lowest and highest pitch that was looked for, in Hz
    f0_max: float = CEILING_HZ


class Writer:
    """Fills a store, clip by clip; made again on the same folder, it goes on where it was."""

    def __init__(self, folder: Path, format: Format) -> None:
        """Raises UserError where the folder holds a preparation of another format, or cannot be written."""
        self.folder, self.format = folder, format
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.clips = self._known()
            self._cut_to(sum(clip.frames for clip in self.clips))
            self._journal = (folder / JOURNAL).open("a", encoding="ascii")
            self._waves, self._pitches = ((folder / name).open("ab") for name in (WAVES, PITCHES))
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}", hint="name a folder that can be written") from None

    def _known(self) -> list[Clip]:
        """The clips of an earlier preparation."""
        path = self.folder / JOURNAL
        if not path.exists() and (self.folder / MANIFEST).exists():  # a finished store, to which more is added
            os.replace(self.folder / MANIFEST, path)
        return known(path, self.format, Clip)

    def _cut_to(self, frames: int) -> None:
        """Drop what was written of a clip that is not in the journal. Raises UserError where the files hold less."""
        for name, bytes_a_frame in ((WAVES, 2 * self.format.hop_size), (PITCHES, 4)):
            path = self.folder / name
            path.touch()
            if path.stat().st_size < frames * bytes_a_frame:
                raise UserError(f"{path}: shorter than its journal says", hint=PREPARE_AGAIN)
            os.truncate(path, frames * bytes_a_frame)

    def add(self, path: str, fingerprint: str, wave_T: Wave, f0_F: Pitch) -> Clip:
        """Add a clip: F frames of pitch, and at most F hops of sound, of which the last may be short."""
        hop, frames = self.format.hop_size, len(f0_F)
        if not frames * hop - hop < len(wave_T) <= frames * hop:
            raise ValueError(f"{len(wave_T)} samples are not {frames} frames of {hop}")
        first = self.clips[-1].first_frame + self.clips[-1].frames if self.clips else 0
        padded, f0_F = np.zeros(frames * hop, dtype="<i2"), f0_F.astype("<f4")
        padded[: len(wave_T)] = wave_T
        clip = Clip(path, fingerprint, first, frames, len(wave_T), checksums(padded, f0_F))
        for file, values in ((self._waves, padded), (self._pitches, f0_F)):
            file.write(values.tobytes())
            file.flush()
        self._journal.write(json.dumps(asdict(clip)) + "\n")  # last: what it names is there
        self._journal.flush()
        self.clips.append(clip)
        return clip

    def close(self) -> None:
        for file in (self._waves, self._pitches, self._journal):
            file.close()

    def finish(self) -> None:
        """Close the files, and make the store one that can be opened."""
        for file in (self._waves, self._pitches, self._journal):
            file.flush()
            os.fsync(file.fileno())
        self.close()
        os.replace(self.folder / JOURNAL, self.folder / MANIFEST)


@dataclass(frozen=True)
class Store:
    """Prepared sound, open for reading. It may be sent to other processes, which read its files themselves."""

    folder: Path
    format: Format
    clips: list[Clip]

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Raises UserError where there is no finished store, or a damaged one."""
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = (folder / JOURNAL).is_file()
            what = "its preparation was not finished" if unfinished else "no prepared sound"
            raise UserError(f"{folder}: {what}", hint="run gputrain prepare-data --kind vocoder")
        head, *rows = read_rows(path, ())
        try:
            store = cls(folder, Format(**head), [Clip(**row) for row in rows])
        except TypeError:
            raise UserError(f"{path}: damaged", hint=PREPARE_AGAIN) from None
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see what gputrain prepare-data refused")
        frames = store.clips[-1].first_frame + store.clips[-1].frames
        for name, bytes_a_frame in ((WAVES, 2 * store.format.hop_size), (PITCHES, 4)):
            held = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if held != frames * bytes_a_frame:
                raise UserError(
                    f"{folder / name}: {held} bytes, where its index asks for {frames * bytes_a_frame}",
                    hint=PREPARE_AGAIN,
                )
        return store

    def crop(self, clip: Clip, first_frame: int, frames: int) -> tuple[Wave, Pitch]:
        """`frames` hops of sound and as many pitches, from `first_frame` of a clip on; silence beyond its end.

        Raises UserError if they cannot be read, or are not what was written.
        """
        hop = self.format.hop_size
        held = max(0, min(frames, clip.frames - first_frame))
        wave_T, f0_F = np.zeros(frames * hop, dtype=np.int16), np.zeros(frames, dtype=np.float32)
        if held:
            # The whole stretches that the crop touches, as only these can be checked.
            begin = first_frame // CHECKED_FRAMES * CHECKED_FRAMES
            end = min(-(-(first_frame + held) // CHECKED_FRAMES) * CHECKED_FRAMES, clip.frames)
            read_T = read_numbers(self.folder / WAVES, "<i2", (clip.first_frame + begin) * hop, (end - begin) * hop)
            read_F = read_numbers(self.folder / PITCHES, "<f4", clip.first_frame + begin, end - begin)
            known = clip.checksums[begin // CHECKED_FRAMES :][: -(-(end - begin) // CHECKED_FRAMES)]
            if known and known != checksums(read_T, read_F):
                raise UserError(f"{self.folder}: the sound or pitch of {clip.path} is damaged", hint=PREPARE_AGAIN)
            wave_T[: held * hop] = read_T[(first_frame - begin) * hop :][: held * hop]
            f0_F[:held] = read_F[first_frame - begin :][:held]
        return wave_T, f0_F

    def pitches(self) -> Pitch:
        """The pitches of all clips, clip after clip. Raises UserError."""
        return read_numbers(self.folder / PITCHES, "<f4", 0, sum(clip.frames for clip in self.clips))

    def __iter__(self) -> Iterator[tuple[Clip, Wave, Pitch]]:
        for clip in self.clips:
            yield clip, *self.crop(clip, 0, clip.frames)


def checksums(wave_T: Wave, f0_F: Pitch) -> tuple[int, ...]:
    """CRC-32 of every CHECKED_FRAMES frames: of their samples, then of their pitches."""
    hop, sums = len(wave_T) // max(1, len(f0_F)), []
    for at in range(0, len(f0_F), CHECKED_FRAMES):
        of_sound = zlib.crc32(wave_T[at * hop : (at + CHECKED_FRAMES) * hop].tobytes())
        sums.append(zlib.crc32(f0_F[at : at + CHECKED_FRAMES].tobytes(), of_sound))
    return tuple(sums)


def read_numbers(path: Path, dtype: str, first: int, count: int) -> npt.NDArray[Any]:
    """`count` numbers of a file, from number `first` on. Raises UserError if they cannot be read.

    A memory map would be no faster, and of a file that is cut short it ends the process with SIGBUS.
    """
    try:
        found = np.fromfile(path, dtype, count, offset=first * np.dtype(dtype).itemsize)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})", hint=PREPARE_AGAIN) from None
    if len(found) < count:
        raise UserError(f"{path}: shorter than its index says", hint=PREPARE_AGAIN)
    return found


def known(path: Path, format: Any, row: type[Row]) -> list[Row]:
    """The rows of a journal whose first line is the format; a journal that is not there is begun.

    A line that was cut off ends the list, and is dropped from the file. Raises UserError where the journal is damaged
    or of another format.
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
    values = asdict(format).items()
    return ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)
