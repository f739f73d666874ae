"""The store of prepared speech: whole recordings, the clips of them that are trained on, and their texts.

    waves.i16       as `gputrain.audio.store` describes it
    sounds.jsonl    settings of audio preprocessing, then a recording per line: source and position of its samples
    manifest.jsonl  a clip per line: a part of a recording, its text and its speaker
    text.json       the kind of model, its text front end or vocabulary, the sampling rate, the speakers by id

Audio preprocessing is expensive and text processing is cheap: with another language or other limits the waves are kept,
and only the manifest is replaced. A recording is indexed after its samples are written, so an interrupted preparation
continues there.
"""

import json
import logging
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gputrain.audio.store import (
    PREPARE_AGAIN,
    Place,
    SoundStore,
    SoundWriter,
    Wave,
    begins_of,
    bytes_in,
    check_finished,
    end_of,
    moved,
    read_units,
    stored_files,
)
from gputrain.data_in.split import MANIFEST
from gputrain.errors import UserError
from gputrain.files import read_rows, write_rows, writing
from gputrain.serialization import from_row, is_fingerprint, unreadable
from gputrain.speech.config import SpeechKind
from gputrain.speech.text.frontend import RESERVED, Frontend
from gputrain.speech.text.unicode_cleanup import PUNCTUATION
from gputrain.speech.text.vocabulary import SPECIAL, Vocabulary

log = logging.getLogger(__name__)

READERS: Mapping[str, type[Frontend] | type[Vocabulary]] = {"tts": Frontend, "asr": Vocabulary}
SOUNDS, TEXT = "sounds.jsonl", "text.json"
FILES = stored_files()


@dataclass(frozen=True)
class SoundFormat:
    """Preparation settings that all recordings of a store share."""

    sampling_rate: int  # Hz
    trim_db: float
    loudness_db: float


class _Samples:
    """A part of the samples of a store, with one checksum."""

    first_sample: int
    samples: int
    crc32: int

    @property
    def place(self) -> Place:
        return Place(self.first_sample, self.samples, (self.crc32,), self.samples)

    def at_place(self, first: int, sums: tuple[int, ...]) -> Any:
        values: Any = self
        return replace(values, first_sample=first, crc32=sums[0])


@dataclass(frozen=True)
class Recording(_Samples):
    """A source whose samples are in the store, or would be, from `first_sample` of the file on."""

    path: str  # path of the source, relative to its folder
    fingerprint: str
    first_sample: int
    samples: int
    source_hz: int  # sampling rate of the source
    clipped_share: float  # share of the source's samples at full scale
    crc32: int = 0  # checksum of the samples, once they are in the store
    remark: str = ""  # What was unusual about its scale or channels, if anything.
    bandwidth_hz: float | None = None  # The recording holds nothing above it; None if it has the treble of its rate.


@dataclass(frozen=True)
class SpeechClip(_Samples):
    """A training clip: `samples` samples from `first_sample` of the file on, with their text."""

    path: str
    fingerprint: str  # fingerprint of the source: clips of one source are held out together
    first_sample: int
    samples: int
    text: str  # raw transcript
    normalized: str  # text after normalisation
    speaker: int  # index into the list of speakers
    crc32: int = 0  # checksum of the samples, once they are in the store

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
        kind = content["kind"]
        frontend = READERS[kind].from_json(content["frontend"])
        rate_hz, hop_size = int(content["sampling_rate"]), int(content["hop_size"])
        return cls(frontend, rate_hz, hop_size, tuple(content["speakers"]), kind)


def frame_count(samples: int, hop_size: int) -> int:
    """Returns the number of frames of a wave; the last may be incomplete."""
    return -(-samples // hop_size)


class SpeechWriter(SoundWriter[Recording]):
    """Writes a store recording by recording; opened again on the same folder, it continues."""

    further_files = (*SoundWriter.further_files, TEXT)

    def __init__(self, folder: Path, format: SoundFormat) -> None:
        super().__init__(folder, SOUNDS, format, Recording, FILES)

    def finish(self, format: SpeechFormat, clips: Sequence[SpeechClip]) -> None:
        """Completes the store with these training clips.

        Raises UserError if the samples of a clip differ from those that were written.
        """
        self.sync()
        with writing(self.folder):
            if (self.folder / TEXT).exists() and _parsed(self.folder / TEXT) != format.to_json():
                (self.folder / MANIFEST).unlink(missing_ok=True)  # Its texts come from another front end.
        write_rows(self.folder / TEXT, [format.to_json()])
        write_rows(self.folder / MANIFEST, map(asdict, self._summed(clips)))

    def _summed(self, clips: Iterable[SpeechClip]) -> Iterator[SpeechClip]:
        """Yields the clips with checksums of their samples, copied from whole recordings or computed."""
        firsts = [sound.first_sample for sound in self.sounds]
        read: tuple[Recording, Wave] | None = None  # Clips of one recording are consecutive.
        for clip in clips:
            whole = self.sounds[bisect_right(firsts, clip.first_sample) - 1]
            begin = clip.first_sample - whole.first_sample
            if (begin, clip.samples) == (0, whole.samples):
                yield replace(clip, crc32=whole.crc32)
                continue
            if read is None or read[0] is not whole:
                read = whole, read_wave(self.folder, whole)
            yield replace(clip, crc32=zlib.crc32(read[1][begin : begin + clip.samples].tobytes()))


def stored_kind(folder: Path) -> object:
    """Returns the kind of model that a folder's speech is prepared for; None if it holds no finished preparation."""
    content = _parsed(folder / TEXT) if (folder / TEXT).is_file() else None
    return content.get("kind") if isinstance(content, dict) else None


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None


@dataclass(frozen=True)
class SpeechStore(SoundStore[SpeechClip]):
    format: SpeechFormat

    @classmethod
    def open(cls, folder: Path, *wanted: str) -> "SpeechStore":
        """Opens a store. Raises UserError if there is no complete store, or it is damaged. `wanted` are the kinds of
        model for messages; default: both."""
        check_finished(folder, (MANIFEST, TEXT), SOUNDS, *(wanted or ("tts", "asr")))
        formats, rows = read_rows(folder / TEXT, ()), read_rows(folder / MANIFEST, ())
        try:
            store = cls(folder, SpeechFormat.from_json(formats[0]), [from_row(SpeechClip, row) for row in rows])
            whole = all(clip.is_whole for clip in store.clips) and store.format.is_whole
        except UserError as error:
            raise UserError(f"{folder}: {error.message}", hint=PREPARE_AGAIN) from None
        except (LookupError, TypeError, ValueError):
            whole = False
        if not whole:
            raise unreadable(folder, PREPARE_AGAIN, f"its {MANIFEST} or {TEXT} is damaged")
        speakers = max((clip.speaker for clip in store.clips), default=-1) + 1
        missing = any(bytes_in(folder / file.name) < end_of(store.clips) * file.bytes_per_unit for file in FILES)
        if missing or speakers > len(store.format.speakers):
            raise UserError(f"{folder}: {MANIFEST} refers to missing samples or speakers", hint=PREPARE_AGAIN)
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see which clips gputrain prepare-data left out")
        return store

    def wave(self, clip: SpeechClip) -> Wave:
        """Returns the samples (T,) of a clip. Raises UserError if they cannot be read, or have changed."""
        return read_wave(*self.place_of(clip))


def read_wave(folder: Path, part: Recording | SpeechClip) -> Wave:
    """Returns the samples (T,) of a recording or clip. Raises UserError if they cannot be read, or have changed."""
    (wave_T,) = read_units(folder, FILES, part, 0, part.samples)
    return wave_T


def format_store_folders(stores: Iterable[SpeechStore]) -> str:
    """Returns the folders of stores for messages: those of the parts of joined ones."""
    return ", ".join(str(part.folder) for store in stores for part in store.parts)


# --------------------------------------------------- several folders


def joined(stores: tuple[SpeechStore, ...]) -> SpeechStore:
    """Returns stores of the same kind as one. Raises UserError if their texts or their sound do not go together, or if
    some have unnamed speakers."""
    if len(stores) == 1:
        return stores[0]
    format = stores[0].format
    for store in stores[1:]:
        format = _joined_format(stores[0], format, store)
    _check_speakers(stores)
    places = {speaker: place for place, speaker in enumerate(format.speakers)}
    clips = [
        replace(moved(clip, begin), speaker=places[store.format.speakers[clip.speaker]])
        for begin, store in zip(begins_of(stores), stores, strict=True)
        for clip in store.clips
    ]
    return SpeechStore(stores[0].folder, format, clips, stores)


def _joined_format(first: SpeechStore, format: SpeechFormat, other: SpeechStore) -> SpeechFormat:
    """Returns the format of stores with the symbols and speakers of another one added."""
    added = other.format
    for name, own, theirs in (
        ("sampling rate", format.sampling_rate, added.sampling_rate),
        ("hop size", format.hop_size, added.hop_size),
        ("language", format.frontend.language, added.frontend.language),
        ("rules of text", _rules(format.frontend), _rules(added.frontend)),
    ):
        if own != theirs:
            values = "" if isinstance(own, tuple) else f": {own} and {theirs}"
            raise UserError(
                f"{first.folder} and {other.folder} were prepared with another {name}{values}",
                hint="run gputrain prepare-data for both with the same options",
            )
    speakers = (*format.speakers, *(speaker for speaker in added.speakers if speaker not in format.speakers))
    return replace(format, frontend=_joined_symbols(format.frontend, added.frontend), speakers=speakers)


def _check_speakers(stores: Sequence[SpeechStore]) -> None:
    """Warns of several folders of a voice whose speaker has no name. Raises UserError if some of a voice's folders name
    speakers and others do not."""
    unnamed = [store for store in stores if store.format.kind == "tts" and "" in store.format.speakers]
    named = [store for store in stores if any(store.format.speakers)]
    if unnamed and named:
        names = ", ".join(sorted({name for store in named for name in store.format.speakers if name}))
        raise UserError(
            f"{format_store_folders(unnamed)}: the speaker has no name, and in {format_store_folders(named)} "
            f"it is {names}",
            hint="prepare it with a column of speakers in its transcripts",
        )
    if len(unnamed) > 1:
        log.warning(
            "%s name no speaker and are trained as one voice; name them in the transcripts if they are several",
            format_store_folders(unnamed),
        )


def _rules(frontend: Frontend | Vocabulary) -> tuple[object, ...]:
    """Returns what decides how a text is read, besides the symbols."""
    if isinstance(frontend, Frontend):
        return (frontend.espeak_voice, frontend.phonemizer, frontend.raw)
    return (frontend.blank, frontend.unknown_id, frontend.delimiter, frontend.upper, frontend.raw)


def _joined_symbols(own: Frontend | Vocabulary, added: Frontend | Vocabulary) -> Frontend | Vocabulary:
    """Returns the front end with the symbols of both, in the order in which one preparation of all would have them."""
    if own.symbols == added.symbols:
        return own
    fixed = (*RESERVED, *PUNCTUATION) if isinstance(own, Frontend) else SPECIAL
    return replace(own, symbols=(*fixed, *sorted({*own.symbols, *added.symbols} - {*fixed})))
