"""The store of prepared sound, laid out for reading crops: all waves in one file, all pitches in another, and an index.

    waves.i16       mono, little-endian, clip after clip
    f0.f32          Hz by frame, 0 where unvoiced, clip after clip
    manifest.jsonl  one clip per line: its source, its position, its length

Reading a crop takes a tenth of a millisecond; decoding a song takes most of a second. Data read are compared with
checksums in the manifest, one for each 128 frames. A clip is added to the index after both files hold it, so that an
interrupted preparation continues behind the last complete clip. Augmentation and spectrograms are computed on the
device.
"""

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Method, interpolated
from gputrain.audio.store import PREPARE_AGAIN, WAVES, JournaledFiles, Wave, in_words, read_journal, read_numbers
from gputrain.engine.data import HELD_OUT_SHARE, MANIFEST, Sample, Split, item_rng, read_rows
from gputrain.engine.mixture import FolderItems, GivenFolders, Mixture, data_folders, split_folders
from gputrain.errors import UserError
from gputrain.stored import from_json, is_fingerprint

PITCHES, JOURNAL = "f0.f32", "journal.jsonl"
CHECKED_FRAMES = 128  # Frames per checksum.
NEAR_FRAMES = (
    2048  # Frames in which a voiced one is looked for on either side of a crop: 24 s at the usual 44100 / 512.
)

Pitch = npt.NDArray[np.float32]


@dataclass(frozen=True)
class VocoderClip:
    """A clip of the store: `frames * hop_size` samples and `frames` pitches, starting at `first_frame` of the files."""

    path: str  # Path of its source, relative to the input folder.
    fingerprint: str
    first_frame: int
    frames: int
    samples: int  # Samples of sound; the last frame is padded with silence.
    checksums: tuple[int, ...] = ()  # CRC-32 of every CHECKED_FRAMES frames; older stores have none.

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksums", tuple(self.checksums))  # JSON has lists.


@dataclass(frozen=True)
class VocoderFormat:
    """Settings that all clips of a store share."""

    sampling_rate: int  # Hz
    hop_size: int  # Samples per frame.
    f0_method: Method
    f0_min: float = FLOOR_HZ  # Lowest and highest tracked pitch, in Hz.
    f0_max: float = CEILING_HZ


class VocoderStoreWriter:
    """Writes a store clip by clip; opened again on the same folder, it continues."""

    def __init__(self, folder: Path, format: VocoderFormat) -> None:
        """Raises UserError where the folder holds a preparation of another format, or cannot be written."""
        self.folder, self.format = folder, format
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.clips = self._known()
            frames = sum(clip.frames for clip in self.clips)
            sizes = {folder / WAVES: frames * 2 * format.hop_size, folder / PITCHES: frames * 4}
            self._files = JournaledFiles(folder / JOURNAL, sizes)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}", hint="name a writable folder") from None

    def _known(self) -> list[VocoderClip]:
        """Returns the clips of an earlier preparation."""
        path = self.folder / JOURNAL
        if not path.exists() and (self.folder / MANIFEST).exists():  # A complete store is extended.
            os.replace(self.folder / MANIFEST, path)
        return read_journal(path, self.format, VocoderClip)

    def add(self, path: str, fingerprint: str, wave_T: Wave, f0_F: Pitch) -> VocoderClip:
        """Appends a clip: F frames of pitch, and at most F hops of sound; the last hop may be incomplete."""
        hop, frames = self.format.hop_size, len(f0_F)
        if not frames * hop - hop < len(wave_T) <= frames * hop:
            raise ValueError(f"{len(wave_T)} samples are not {frames} frames of {hop}")
        first = self.clips[-1].first_frame + self.clips[-1].frames if self.clips else 0
        padded, f0_F = np.zeros(frames * hop, dtype="<i2"), f0_F.astype("<f4")
        padded[: len(wave_T)] = wave_T
        clip = VocoderClip(path, fingerprint, first, frames, len(wave_T), checksums(padded, f0_F))
        self._files.append(clip, padded.tobytes(), f0_F.tobytes())
        self.clips.append(clip)
        return clip

    def close(self) -> None:
        """Closes the files without completing the store."""
        self._files.close()

    def finish(self) -> None:
        """Closes the files and completes the store, so that it can be opened."""
        self._files.sync()
        self.close()
        os.replace(self.folder / JOURNAL, self.folder / MANIFEST)


@dataclass(frozen=True)
class VocoderStore:
    """Prepared sound opened for reading. It can be pickled; worker processes read the files themselves."""

    folder: Path
    format: VocoderFormat
    clips: list[VocoderClip]

    @property
    def folders(self) -> str:
        """The folder, or the folders of joined stores, for messages."""
        return str(self.folder)

    @classmethod
    def open(cls, folder: Path) -> "VocoderStore":
        """Opens a store. Raises UserError if there is no complete store, or it is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = (folder / JOURNAL).is_file()
            what = "its preparation was not finished" if unfinished else "no prepared sound"
            raise UserError(f"{folder}: {what}", hint="run gputrain prepare-data --kind vocoder")
        try:
            head, *rows = read_rows(path, ())
            store = cls(folder, from_json(VocoderFormat, head), [from_json(VocoderClip, row) for row in rows])
            if not store.is_whole:
                raise ValueError
        except ValueError:
            raise UserError(f"{path}: damaged", hint=PREPARE_AGAIN) from None
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see what gputrain prepare-data refused")
        frames = store.clips[-1].first_frame + store.clips[-1].frames
        for name, bytes_a_frame in ((WAVES, 2 * store.format.hop_size), (PITCHES, 4)):
            held = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if held != frames * bytes_a_frame:
                raise UserError(f"{folder / name}: {held} bytes, expected {frames * bytes_a_frame}", hint=PREPARE_AGAIN)
        return store

    @property
    def is_whole(self) -> bool:
        """Returns True if all clips have valid values and follow each other."""
        ends = [0, *(clip.first_frame + clip.frames for clip in self.clips)]
        hop = self.format.hop_size
        return min(hop, self.format.sampling_rate) > 0 and all(
            clip.first_frame == end and 0 < clip.samples <= clip.frames * hop and is_fingerprint(clip.fingerprint)
            for clip, end in zip(self.clips, ends, strict=False)
        )

    def crop(self, clip: VocoderClip, first_frame: int, frames: int) -> tuple[Wave, Pitch]:
        """Reads `frames` hops of sound and as many pitches, starting at `first_frame` of a clip; padded with silence.

        Raises UserError if they cannot be read or the checksums differ.
        """
        hop = self.format.hop_size
        held = max(0, min(frames, clip.frames - first_frame))
        wave_T, f0_F = np.zeros(frames * hop, dtype=np.int16), np.zeros(frames, dtype=np.float32)
        if held:
            # It reads all checksummed blocks that the crop touches.
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

    def source_pitch(self, clip: VocoderClip, first_frame: int, frames: int) -> Pitch:
        """Reads the pitch of a crop as the source of a generator takes it, without gaps: `audio.f0.interpolated`, from
        voiced frames of the clip that are in the crop or NEAR_FRAMES around it. Without one, the pitch is 0. Behind the
        clip, the last value is held.

        Raises UserError if it cannot be read. Checksums, which cover the sound as well, are not compared.
        """
        begin, end = max(0, first_frame - NEAR_FRAMES), min(clip.frames, first_frame + frames + NEAR_FRAMES)
        near_F = interpolated(read_numbers(self.folder / PITCHES, "<f4", clip.first_frame + begin, end - begin))
        held_F = near_F[first_frame - begin :][:frames]
        return np.pad(held_F, (0, frames - len(held_F)), mode="edge")

    def pitches(self) -> Pitch:
        """Reads the pitches of all clips in order. Raises UserError."""
        return read_numbers(self.folder / PITCHES, "<f4", 0, sum(clip.frames for clip in self.clips))

    def __iter__(self) -> Iterator[tuple[VocoderClip, Wave, Pitch]]:
        for clip in self.clips:
            yield clip, *self.crop(clip, 0, clip.frames)


def checksums(wave_T: Wave, f0_F: Pitch) -> tuple[int, ...]:
    """Returns the CRC-32 of every CHECKED_FRAMES frames, computed over their samples, then their pitches."""
    hop, sums = len(wave_T) // max(1, len(f0_F)), []
    for at in range(0, len(f0_F), CHECKED_FRAMES):
        of_sound = zlib.crc32(wave_T[at * hop : (at + CHECKED_FRAMES) * hop].tobytes())
        sums.append(zlib.crc32(f0_F[at : at + CHECKED_FRAMES].tobytes(), of_sound))
    return tuple(sums)


@dataclass(frozen=True)
class JoinedSounds(VocoderStore):
    """Several stores as one, whose clips are numbered through: `first_frame` counts from the first frame of the first
    store. `folder` is that of the first store."""

    stores: tuple[VocoderStore, ...] = ()

    @classmethod
    def of(cls, stores: tuple[VocoderStore, ...]) -> "JoinedSounds":
        """Joins stores. Raises UserError if they were prepared with different settings."""
        for other in stores[1:]:
            if other.format != stores[0].format:
                raise UserError(
                    f"{other.folder} was prepared with {in_words(other.format)}; {stores[0].folder} with "
                    f"{in_words(stores[0].format)}",
                    hint="prepare both with the same settings",
                )
        begins = [0, *accumulate(sum(clip.frames for clip in store.clips) for store in stores)]
        clips = [
            replace(clip, first_frame=begin + clip.first_frame)
            for begin, store in zip(begins, stores, strict=False)
            for clip in store.clips
        ]
        return cls(stores[0].folder, stores[0].format, clips, stores)

    def crop(self, clip: VocoderClip, first_frame: int, frames: int) -> tuple[Wave, Pitch]:
        store, own = self._store_of(clip)
        return store.crop(own, first_frame, frames)

    def source_pitch(self, clip: VocoderClip, first_frame: int, frames: int) -> Pitch:
        store, own = self._store_of(clip)
        return store.source_pitch(own, first_frame, frames)

    @property
    def folders(self) -> str:
        return ", ".join(store.folders for store in self.stores)

    def _store_of(self, clip: VocoderClip) -> tuple[VocoderStore, VocoderClip]:
        """Returns the store of a clip, and the clip as that store numbers it."""
        number = bisect_right(self._begins, clip.first_frame) - 1
        return self.stores[number], replace(clip, first_frame=clip.first_frame - self._begins[number])

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *accumulate(sum(clip.frames for clip in store.clips) for store in self.stores[:-1])]

    def pitches(self) -> Pitch:
        return np.concatenate([store.pitches() for store in self.stores])


@dataclass(frozen=True)
class VocoderData:
    """A store and its clips split into training and held-out ones; `parts.shared`: single clips serve as both."""

    store: VocoderStore
    split: FolderItems[VocoderClip]

    @property
    def parts(self) -> Split[VocoderClip]:
        return self.split.parts

    @property
    def voiced_share(self) -> float:
        return float((self.store.pitches() > 0).mean())

    def mixture(self, crops: "SoundCrops") -> Mixture:
        """Returns how the crops of the training clips are drawn from their folders."""
        return self.split.mixture(crops.counts_of(self.split.counts))


def open_sounds(given: GivenFolders, held_out_share: float = HELD_OUT_SHARE, held_out: int = 0) -> VocoderData:
    """Opens prepared sound; what is held out depends only on the content of the files. Raises UserError."""
    folders = data_folders(given)
    stores = tuple(VocoderStore.open(folder.path) for folder in folders)
    store = stores[0] if len(stores) == 1 else JoinedSounds.of(stores)
    rest = iter(store.clips)
    clips = [list(islice(rest, len(one.clips))) for one in stores]
    return VocoderData(store, split_folders(folders, clips, held_out_share, [_content_of] * len(folders), held_out))


def _content_of(clip: VocoderClip) -> str:
    return clip.fingerprint


@dataclass(frozen=True)
class SoundCrops:
    """Random crops of `frames` hops, the data set of `gputrain.engine.data.loader`.

    An epoch has one crop for each `frames` hops of a clip, and one for a shorter clip, which is padded with silence: so
    an hour has the same weight in one file or in a thousand. Each crop of a clip lies in a segment of its own; its
    position there is a function of (seed, epoch, item).
    """

    store: VocoderStore
    clips: Sequence[VocoderClip]
    frames: int
    seed: int

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def item_bytes(self) -> int:
        """Returns the bytes of a crop: two per sample, four per pitch."""
        return self.frames * (2 * self.store.format.hop_size + 4)

    def __getitem__(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int16 samples (frames * hop_size,) and the pitch of the source in Hz (frames,), without gaps."""
        epoch, item = sample
        number = int(np.searchsorted(self._ends, item, side="right"))
        clip = self.clips[number]
        places = max(0, clip.frames - self.frames) + 1
        stretch = item - (int(self._ends[number - 1]) if number else 0)
        at = (stretch + item_rng(self.seed, epoch, item).random()) / self._crops_of(clip)
        first = int(at * places)
        wave_T, _ = self.store.crop(clip, first, self.frames)
        return torch.from_numpy(wave_T), torch.from_numpy(self.store.source_pitch(clip, first, self.frames))

    def counts_of(self, clips: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of crops of consecutive groups of clips, given the number of clips of each."""
        ends_K = np.concatenate([[0], self._ends])[np.concatenate([[0], np.cumsum(clips)])]
        return tuple(np.diff(ends_K).tolist())

    def _crops_of(self, clip: VocoderClip) -> int:
        return max(1, clip.frames // self.frames)

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Returns the cumulative number of crops of the clips."""
        return np.cumsum([self._crops_of(clip) for clip in self.clips])
