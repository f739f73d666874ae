"""Prepared speech: all waves in one int16 file, an index of them, and what of them is trained on.

    waves.i16       mono, little-endian, recording after recording
    sounds.jsonl    how sound was prepared, then a recording a line: its source, and where its samples are
    manifest.jsonl  a clip a line: a stretch of a recording, its text, its speaker
    text.json       the front end that reads the texts, the sampling rate, the speakers in the order of their ids

Sound is dear to prepare and text is cheap: with another language or other limits the waves stay, and the manifest is
written anew. A recording is indexed once its samples are written, so a preparation that was cut off goes on there.
"""

import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gputrain.data import MANIFEST, read_rows, write_rows, writing
from gputrain.errors import UserError
from gputrain.tts.text.frontend import Frontend
from gputrain.vocoder.store import PREPARE_AGAIN, WAVES, Wave, known, read_numbers

SOUNDS, TEXT = "sounds.jsonl", "text.json"
SAMPLE_BYTES = 2


@dataclass(frozen=True)
class SoundFormat:
    """How all recordings of a store were prepared."""

    sampling_rate: int  # Hz
    trim_db: float
    loudness_db: float


@dataclass(frozen=True)
class Recording:
    """A source whose sound is in the store, or would be, from `first_sample` of the file on."""

    path: str  # of its source, relative to the folder it came from
    fingerprint: str
    first_sample: int
    samples: int
    source_hz: int  # rate of its source
    clipped_share: float  # of the source's samples, at full scale
    pauses: list[list[int]]  # first sample and the one behind the last, counted from first_sample
    crc32: int | None = None  # of its samples; older stores have none


@dataclass(frozen=True)
class Clip:
    """What is trained on: `samples` from `first_sample` of the file on, and what is said there."""

    path: str
    fingerprint: str  # of the whole source, so that clips of one source are held out together
    first_sample: int
    samples: int
    text: str  # as it was written down
    normalized: str  # as the model sees it
    speaker: int  # its place in the list of speakers
    crc32: int | None = None  # of its samples; older stores have none

    @property
    def is_whole(self) -> bool:
        """Whether each of its fields can be one, as far as the clip alone can tell."""
        texts = (self.path, self.fingerprint, self.text, self.normalized)
        numbers = (self.first_sample, self.samples - 1, self.speaker)
        return all(isinstance(text, str) for text in texts) and min(numbers) >= 0


@dataclass(frozen=True)
class Format:
    """What all clips share."""

    frontend: Frontend
    sampling_rate: int  # Hz
    hop_size: int  # samples of the frames of which every clip has one for each of its symbols
    speakers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "language": self.frontend.language,
            "sampling_rate": self.sampling_rate,
            "hop_size": self.hop_size,
            "speakers": list(self.speakers),
            "frontend": self.frontend.to_json(),
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Format":
        """Raises LookupError, TypeError, ValueError or UserError where it is none."""
        frontend = Frontend.from_json(told["frontend"])
        return cls(frontend, int(told["sampling_rate"]), int(told["hop_size"]), tuple(told["speakers"]))


def frames_of(samples: int, hop_size: int) -> int:
    """The frames of a wave; the last may be short."""
    return -(-samples // hop_size)


class Writer:
    """Fills a store, recording by recording; made again on the same folder, it goes on where it was."""

    def __init__(self, folder: Path, format: SoundFormat) -> None:
        """Raises UserError where the folder holds a preparation of another format, or cannot be written."""
        self.folder, self.format = folder, format
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.recordings = known(folder / SOUNDS, format, Recording)
            self._end = max((one.first_sample + one.samples for one in self.recordings), default=0)
            self._cut_to(self._end)
            self._index = (folder / SOUNDS).open("a", encoding="ascii")
            self._waves = (folder / WAVES).open("ab")

    def _cut_to(self, samples: int) -> None:
        """Drop what was written of a recording that is not in the index."""
        path = self.folder / WAVES
        path.touch()
        if path.stat().st_size < samples * SAMPLE_BYTES:
            raise UserError(f"{path}: shorter than its index says", hint=PREPARE_AGAIN)
        os.truncate(path, samples * SAMPLE_BYTES)

    def add(self, recording: Recording, wave_T: Wave) -> Recording:
        """Append a recording; its place in the file is decided here. Raises UserError where the disk is full."""
        samples = wave_T.astype("<i2", copy=False).tobytes()
        placed = replace(recording, first_sample=self._end, crc32=zlib.crc32(samples))
        with writing(self.folder / WAVES):
            self._waves.write(samples)
            self._waves.flush()
            self._index.write(json.dumps(asdict(placed)) + "\n")  # last: what it names is there
            self._index.flush()
        self._end += len(wave_T)
        self.recordings.append(placed)
        return placed

    def close(self) -> None:
        self._waves.close()
        self._index.close()

    def finish(self, format: Format, clips: Sequence[Clip]) -> None:
        """Close the files, and make the store one that can be opened: these clips are trained on.

        Raises UserError where the sound of one is not what was written.
        """
        with writing(self.folder):
            for file in (self._waves, self._index):
                file.flush()
                os.fsync(file.fileno())
            self.close()
            if (self.folder / TEXT).exists() and _told(self.folder / TEXT) != format.to_json():
                (self.folder / MANIFEST).unlink(missing_ok=True)  # its texts are not of this front end
        write_rows(self.folder / TEXT, [format.to_json()])
        write_rows(self.folder / MANIFEST, map(asdict, self._summed(clips)))

    def _summed(self, clips: Iterable[Clip]) -> Iterator[Clip]:
        """The clips with checksums of their samples, which are those of their recordings or are read for it."""
        firsts = [one.first_sample for one in self.recordings]
        read: tuple[Recording, Wave] | None = None  # clips of one recording stand together
        for clip in clips:
            whole = self.recordings[bisect_right(firsts, clip.first_sample) - 1]
            begin = clip.first_sample - whole.first_sample
            if (begin, clip.samples) == (0, whole.samples) and whole.crc32 is not None:
                yield replace(clip, crc32=whole.crc32)
                continue
            if read is None or read[0] is not whole:
                read = whole, read_wave(self.folder, whole)
            yield replace(clip, crc32=zlib.crc32(read[1][begin : begin + clip.samples].tobytes()))


def _told(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None


@dataclass(frozen=True)
class Store:
    """Prepared speech, open for reading. It may be sent to other processes, which read its file themselves."""

    folder: Path
    format: Format
    clips: list[Clip]

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Raises UserError where there is no finished store, or a damaged one."""
        path = folder / MANIFEST
        if not path.is_file() or not (folder / TEXT).is_file():
            what = "its preparation was not finished" if (folder / SOUNDS).is_file() else "no prepared speech"
            raise UserError(f"{folder}: {what}", hint="run gputrain prepare-data --kind voice")
        told, rows = read_rows(folder / TEXT, ()), read_rows(path, ())
        try:
            store = cls(folder, Format.from_json(told[0]), [Clip(**row) for row in rows])
            whole = all(clip.is_whole for clip in store.clips)
        except (LookupError, TypeError, ValueError, UserError):
            whole = False
        if not whole:
            raise UserError(f"{folder}: its {MANIFEST} or {TEXT} is damaged", hint=PREPARE_AGAIN)
        end = max((clip.first_sample + clip.samples for clip in store.clips), default=0)
        speakers = max((clip.speaker for clip in store.clips), default=-1) + 1
        held = (folder / WAVES).stat().st_size if (folder / WAVES).is_file() else 0
        if held < end * SAMPLE_BYTES or speakers > len(store.format.speakers):
            raise UserError(f"{folder}: {MANIFEST} names sound or speakers that are not there", hint=PREPARE_AGAIN)
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see what gputrain prepare-data refused")
        return store

    def wave(self, clip: Clip) -> Wave:
        """The samples (T,) of a clip. Raises UserError if they cannot be read, or are not what was written."""
        return read_wave(self.folder, clip)


def read_wave(folder: Path, one: Recording | Clip) -> Wave:
    """The samples (T,) of a recording or clip. Raises UserError if they cannot be read, or are not what was written."""
    wave_T: Wave = read_numbers(folder / WAVES, "<i2", one.first_sample, one.samples)
    if one.crc32 is not None and one.crc32 != zlib.crc32(wave_T.tobytes()):
        raise UserError(f"{folder / WAVES}: the sound of {one.path} is damaged", hint=PREPARE_AGAIN)
    return wave_T
