"""Storage of prepared speech: all waves in one int16 file, their index, and the list of training clips.

    waves.i16       mono, little-endian, recording after recording
    sounds.jsonl    settings of audio preprocessing, then a recording per line: source and position of its samples
    manifest.jsonl  a clip per line: a part of a recording, its text and its speaker
    text.json       the kind of model, its text front end or vocabulary, the sampling rate, the speakers by id

Audio preprocessing is expensive and text processing is cheap: with another language or other limits the waves are kept,
and only the manifest is replaced. A recording is indexed after its samples are written, so an interrupted preparation
continues there.
"""

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gputrain.audio.store import PREPARE_AGAIN, WAVES, JournaledFiles, Wave, read_journal, read_numbers
from gputrain.engine.data import MANIFEST, read_rows, write_rows, writing
from gputrain.errors import UserError
from gputrain.speech.frames import encoder_frames
from gputrain.speech.prepare_config import SpeechKind
from gputrain.speech.text.frontend import Frontend
from gputrain.speech.text.vocabulary import Vocabulary
from gputrain.stored import from_json, is_fingerprint

READERS: Mapping[str, type[Frontend] | type[Vocabulary]] = {"tts": Frontend, "asr": Vocabulary}
SOUNDS, TEXT = "sounds.jsonl", "text.json"
SAMPLE_BYTES = 2


@dataclass(frozen=True)
class SoundFormat:
    """Preparation settings that all recordings of a store share."""

    sampling_rate: int  # Hz
    trim_db: float
    loudness_db: float


@dataclass(frozen=True)
class Recording:
    """A source whose samples are in the store, or would be, from `first_sample` of the file on."""

    path: str  # path of the source, relative to its folder
    fingerprint: str
    first_sample: int
    samples: int
    source_hz: int  # sampling rate of the source
    clipped_share: float  # share of the source's samples at full scale
    pauses: list[list[int]]  # [start, end) in samples, relative to first_sample
    crc32: int | None = None  # checksum of the samples; older stores have none


@dataclass(frozen=True)
class SpeechClip:
    """A training clip: `samples` samples from `first_sample` of the file on, with their text."""

    path: str
    fingerprint: str  # fingerprint of the source: clips of one source are held out together
    first_sample: int
    samples: int
    text: str  # raw transcript
    normalized: str  # text after normalisation
    speaker: int  # index into the list of speakers
    crc32: int | None = None  # checksum of the samples; older stores have none

    @property
    def is_whole(self) -> bool:
        """Returns True if all fields have valid values."""
        return min(self.first_sample, self.samples - 1, self.speaker) >= 0 and is_fingerprint(self.fingerprint)


@dataclass(frozen=True)
class SpeechFormat:
    """Properties of all clips of a store. Every clip has as many frames as its `frontend` needs for its text: those of
    `hop_size` samples for a voice (`tts`), those of the encoder for a recogniser (`asr`)."""

    frontend: Frontend | Vocabulary
    sampling_rate: int  # Hz
    hop_size: int  # samples from one frame to the next
    speakers: tuple[str, ...]
    kind: SpeechKind = "tts"

    @property
    def front_end(self) -> Frontend:
        """The text front end of a voice's store, which `open_speech` has checked."""
        assert isinstance(self.frontend, Frontend)
        return self.frontend

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of a recogniser's store, which `open_speech` has checked."""
        assert isinstance(self.frontend, Vocabulary)
        return self.frontend

    @property
    def is_whole(self) -> bool:
        """Returns True if all fields have valid values."""
        names = all(isinstance(speaker, str) for speaker in self.speakers)
        return names and min(self.sampling_rate, self.hop_size) > 0

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "language": self.frontend.language,
            "sampling_rate": self.sampling_rate,
            "hop_size": self.hop_size,
            "speakers": list(self.speakers),
            "frontend": self.frontend.to_json(),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SpeechFormat":
        """Parses a format. Raises LookupError, TypeError, ValueError or UserError if it is invalid."""
        kind = content.get("kind", "tts")  # Stores of earlier versions are those of voices.
        frontend = READERS[kind].from_json(content["frontend"])
        rate_hz, hop_size = int(content["sampling_rate"]), int(content["hop_size"])
        return cls(frontend, rate_hz, hop_size, tuple(content["speakers"]), kind)

    def frames(self, samples: int) -> int:
        """Returns the number of frames of a clip."""
        return encoder_frames(samples) if self.kind == "asr" else frame_count(samples, self.hop_size)


def frame_count(samples: int, hop_size: int) -> int:
    """Returns the number of frames of a wave; the last may be incomplete."""
    return -(-samples // hop_size)


class SpeechWriter:
    """Writes a store recording by recording; opened again on the same folder, it continues."""

    def __init__(self, folder: Path, format: SoundFormat) -> None:
        """Raises UserError if the folder holds a preparation of another format, or cannot be written."""
        self.folder, self.format = folder, format
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.recordings = read_journal(folder / SOUNDS, format, Recording)
            self._end = max((one.first_sample + one.samples for one in self.recordings), default=0)
            self._files = JournaledFiles(folder / SOUNDS, {folder / WAVES: self._end * SAMPLE_BYTES})

    def add(self, recording: Recording, wave_T: Wave) -> Recording:
        """Appends a recording and returns it with its position in the file. Raises UserError if the disk is full."""
        samples = wave_T.astype("<i2", copy=False).tobytes()
        placed = replace(recording, first_sample=self._end, crc32=zlib.crc32(samples))
        with writing(self.folder / WAVES):
            self._files.append(placed, samples)
        self._end += len(wave_T)
        self.recordings.append(placed)
        return placed

    def close(self) -> None:
        self._files.close()

    def finish(self, format: SpeechFormat, clips: Sequence[SpeechClip]) -> None:
        """Closes the files and completes the store with these training clips.

        Raises UserError if the samples of a clip differ from those that were written.
        """
        with writing(self.folder):
            self._files.sync()
            self.close()
            if (self.folder / TEXT).exists() and _parsed(self.folder / TEXT) != format.to_json():
                (self.folder / MANIFEST).unlink(missing_ok=True)  # Its texts come from another front end.
        write_rows(self.folder / TEXT, [format.to_json()])
        write_rows(self.folder / MANIFEST, map(asdict, self._summed(clips)))

    def _summed(self, clips: Iterable[SpeechClip]) -> Iterator[SpeechClip]:
        """Yields the clips with checksums of their samples, copied from whole recordings or computed."""
        firsts = [one.first_sample for one in self.recordings]
        read: tuple[Recording, Wave] | None = None  # Clips of one recording are consecutive.
        for clip in clips:
            whole = self.recordings[bisect_right(firsts, clip.first_sample) - 1]
            begin = clip.first_sample - whole.first_sample
            if (begin, clip.samples) == (0, whole.samples) and whole.crc32 is not None:
                yield replace(clip, crc32=whole.crc32)
                continue
            if read is None or read[0] is not whole:
                read = whole, read_wave(self.folder, whole)
            yield replace(clip, crc32=zlib.crc32(read[1][begin : begin + clip.samples].tobytes()))


def stored_kind(folder: Path) -> object:
    """Returns the kind of model that a folder's speech is prepared for; None if it holds no finished preparation."""
    content = _parsed(folder / TEXT) if (folder / TEXT).is_file() else None
    return content.get("kind", "tts") if isinstance(content, dict) else None


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None


@dataclass(frozen=True)
class SpeechStore:
    """Prepared speech opened for reading. It can be pickled; worker processes read the file themselves."""

    folder: Path
    format: SpeechFormat
    clips: list[SpeechClip]

    @classmethod
    def open(cls, folder: Path) -> "SpeechStore":
        """Opens a store. Raises UserError if there is no complete store, or it is damaged."""
        path = folder / MANIFEST
        if not path.is_file() or not (folder / TEXT).is_file():
            what = "its preparation was not finished" if (folder / SOUNDS).is_file() else "no prepared speech"
            raise UserError(f"{folder}: {what}", hint="run gputrain prepare-data --kind tts or --kind asr")
        formats, rows = read_rows(folder / TEXT, ()), read_rows(path, ())
        try:
            store = cls(folder, SpeechFormat.from_json(formats[0]), [from_json(SpeechClip, row) for row in rows])
            whole = all(clip.is_whole for clip in store.clips) and store.format.is_whole
        except (LookupError, TypeError, ValueError, UserError):
            whole = False
        if not whole:
            raise UserError(f"{folder}: its {MANIFEST} or {TEXT} is damaged", hint=PREPARE_AGAIN)
        end = max((clip.first_sample + clip.samples for clip in store.clips), default=0)
        speakers = max((clip.speaker for clip in store.clips), default=-1) + 1
        held = (folder / WAVES).stat().st_size if (folder / WAVES).is_file() else 0
        if held < end * SAMPLE_BYTES or speakers > len(store.format.speakers):
            raise UserError(f"{folder}: {MANIFEST} refers to missing samples or speakers", hint=PREPARE_AGAIN)
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see which clips gputrain prepare-data left out")
        return store

    @property
    def parts(self) -> "tuple[SpeechStore, ...]":
        """The stores of single folders."""
        return (self,)

    def wave(self, clip: SpeechClip) -> Wave:
        """Returns the samples (T,) of a clip. Raises UserError if they cannot be read, or have changed."""
        return read_wave(self.folder, clip)


def read_wave(folder: Path, one: Recording | SpeechClip) -> Wave:
    """Returns the samples (T,) of a recording or clip. Raises UserError if they cannot be read, or have changed."""
    wave_T: Wave = read_numbers(folder / WAVES, "<i2", one.first_sample, one.samples)
    if one.crc32 is not None and one.crc32 != zlib.crc32(wave_T.tobytes()):
        raise UserError(f"{folder / WAVES}: the samples of {one.path} are damaged", hint=PREPARE_AGAIN)
    return wave_T


def folders_in_words(stores: Iterable[SpeechStore]) -> str:
    """Returns the folders of stores for messages: those of the parts of joined ones."""
    return ", ".join(str(part.folder) for store in stores for part in store.parts)
