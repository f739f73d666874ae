"""The store of a vocoder's sound: frames of a wave with their pitch, clip after clip, and random crops of them.

    waves.i16, f0.f32   as `gputrain.audio.store` describes them
    manifest.jsonl      a clip a line: its source, its position, its length, a checksum for each 128 frames

Augmentation and spectrograms are computed on the device.
"""

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from operator import attrgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gputrain.audio.f0 import CEILING_HZ, FLOOR_HZ, Method, interpolated
from gputrain.audio.store import (
    PITCHES,
    PREPARE_AGAIN,
    WAVES,
    Pitch,
    Place,
    SoundStore,
    SoundWriter,
    StoredFile,
    Wave,
    begins_of,
    bytes_in,
    check_finished,
    end_of,
    format_of,
    moved,
    read_numbers,
    read_units,
    stored_files,
)
from gputrain.data_in.split import (
    HELD_OUT_SHARE,
    MANIFEST,
    FolderItems,
    GivenFolders,
    Split,
    data_folders,
    split_folders,
)
from gputrain.engine.data import Sample, item_rng
from gputrain.errors import UserError
from gputrain.files import read_rows, writing
from gputrain.kinds import prepared_for
from gputrain.serialization import from_row, is_fingerprint, unreadable

JOURNAL = "journal.jsonl"
CHECKED_FRAMES = 128  # Frames per checksum.
# Frames in which a voiced one is looked for on either side of a crop: 24 s at the usual 44100 / 512.
NEAR_FRAMES = 2048


@dataclass(frozen=True)
class VocoderClip:
    """A clip of the store: `frames * hop_size` samples and `frames` pitches, starting at `first_frame` of the files."""

    path: str  # Path of its source, relative to the input folder.
    fingerprint: str
    first_frame: int
    frames: int
    samples: int  # Samples of sound; the last frame is padded with silence.
    checksums: tuple[int, ...] = ()  # CRC-32 of every CHECKED_FRAMES frames, once they are in the store.

    @property
    def place(self) -> Place:
        return Place(self.first_frame, self.frames, self.checksums, CHECKED_FRAMES)

    def at_place(self, first: int, sums: tuple[int, ...]) -> "VocoderClip":
        return replace(self, first_frame=first, checksums=sums)


@dataclass(frozen=True)
class VocoderFormat:
    """Settings that all clips of a store share."""

    sampling_rate: int  # Hz
    hop_size: int  # Samples per frame.
    f0_method: Method
    f0_min: float = FLOOR_HZ  # Lowest and highest tracked pitch, in Hz.
    f0_max: float = CEILING_HZ

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return stored_files(self.hop_size)


class VocoderStoreWriter(SoundWriter[VocoderClip]):
    """Writes a vocoder's store clip by clip. A complete store is extended: until it is finished again, its manifest is
    the journal."""

    def __init__(self, folder: Path, format: VocoderFormat) -> None:
        with writing(folder):
            if "vocoder" in prepared_for(folder) and not (folder / JOURNAL).exists() and (folder / MANIFEST).exists():
                os.replace(folder / MANIFEST, folder / JOURNAL)
        super().__init__(folder, JOURNAL, format, VocoderClip, format.files)

    def add(self, path: str, fingerprint: str, wave_T: Wave, f0_F: Pitch) -> VocoderClip:
        """Appends a clip: F frames of pitch, and at most F hops of sound; the last hop may be incomplete."""
        hop, frames = self.format.hop_size, len(f0_F)
        if not frames * hop - hop < len(wave_T) <= frames * hop:
            raise ValueError(f"{len(wave_T)} samples are not {frames} frames of {hop}")
        padded_T = np.pad(wave_T, (0, frames * hop - len(wave_T)))
        return self.append(VocoderClip(path, fingerprint, 0, frames, len(wave_T)), padded_T, f0_F)

    def finish(self) -> None:
        """Completes the store, so that it can be opened."""
        self.sync()
        with writing(self.folder):
            os.replace(self.folder / JOURNAL, self.folder / MANIFEST)


@dataclass(frozen=True)
class VocoderStore(SoundStore[VocoderClip]):
    format: VocoderFormat

    @classmethod
    def open(cls, folder: Path) -> "VocoderStore":
        """Opens a store. Raises UserError if there is no complete store, or it is damaged."""
        path = folder / MANIFEST
        # Without its head, a manifest beside recordings may be one of another program.
        names = (MANIFEST,) if "vocoder" in prepared_for(folder) else (MANIFEST, WAVES)
        check_finished(folder, names, JOURNAL, "vocoder")
        try:
            head, *rows = read_rows(path, ())
            store = cls(folder, from_row(VocoderFormat, head), [from_row(VocoderClip, row) for row in rows])
            if not store.is_whole:
                raise ValueError
        except ValueError:
            raise unreadable(path, PREPARE_AGAIN) from None
        if not store.clips:
            raise UserError(f"{folder}: a store without a clip", hint="see what gputrain prepare-data left out")
        for file in store.format.files:
            held, expected = bytes_in(folder / file.name), end_of(store.clips) * file.bytes_per_unit
            if held != expected:
                raise UserError(f"{folder / file.name}: {held} bytes, expected {expected}", hint=PREPARE_AGAIN)
        return store

    @classmethod
    def joined(cls, stores: Sequence["VocoderStore"]) -> "VocoderStore":
        """Returns stores as one. Raises UserError if they were prepared with different settings."""
        for other in stores[1:]:
            if other.format != stores[0].format:
                raise UserError(
                    f"{other.folder} was prepared with {format_of(other.format)}; {stores[0].folder} with "
                    f"{format_of(stores[0].format)}",
                    hint="prepare both with the same settings",
                )
        if len(stores) == 1:
            return stores[0]
        begins = zip(begins_of(stores), stores, strict=True)
        clips = [moved(clip, begin) for begin, store in begins for clip in store.clips]
        return cls(stores[0].folder, stores[0].format, clips, tuple(stores))

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
            folder, own = self.place_of(clip)
            wave_T[: held * hop], f0_F[:held] = read_units(folder, self.format.files, own, first_frame, held)
        return wave_T, f0_F

    def sounding(self, clip: VocoderClip) -> list[tuple[int, int]]:
        """Returns the first frame and the number of frames of the parts of a clip between blocks of digital silence,
        which are known by their checksums; the whole clip if it holds no sound."""
        bytes_a_frame = sum(file.bytes_per_unit for file in self.format.files)
        ends = [*range(CHECKED_FRAMES, clip.frames, CHECKED_FRAMES), clip.frames]
        parts: list[tuple[int, int]] = []
        for number, (end, crc) in enumerate(zip(ends, clip.checksums, strict=False)):
            first = CHECKED_FRAMES * number
            if crc == _checksum_of_zeros((end - first) * bytes_a_frame):
                continue
            begin, held = parts.pop() if parts and sum(parts[-1]) == first else (first, 0)
            parts.append((begin, held + end - first))
        return parts or [(0, clip.frames)]

    def source_pitch(self, clip: VocoderClip, first_frame: int, frames: int) -> Pitch:
        """Reads the pitch of a crop as the source of a generator takes it, without gaps: `audio.f0.interpolated`, from
        voiced frames of the clip that are in the crop or NEAR_FRAMES around it. Without one, the pitch is 0. Behind the
        clip, the last value is held.

        Raises UserError if it cannot be read. Checksums, which cover the sound as well, are not compared.
        """
        folder, own = self.place_of(clip)
        begin, end = max(0, first_frame - NEAR_FRAMES), min(clip.frames, first_frame + frames + NEAR_FRAMES)
        near_F = interpolated(read_numbers(folder / PITCHES, "<f4", own.first_frame + begin, end - begin))
        held_F = near_F[first_frame - begin :][:frames]
        return np.pad(held_F, (0, frames - len(held_F)), mode="edge")

    def pitches(self) -> Pitch:
        """Reads the pitches of all clips in order. Raises UserError."""
        return np.concatenate(
            [read_numbers(part.folder / PITCHES, "<f4", 0, end_of(part.clips)) for part in self.parts]
        )

    def __iter__(self) -> Iterator[tuple[VocoderClip, Wave, Pitch]]:
        for clip in self.clips:
            yield clip, *self.crop(clip, 0, clip.frames)


@cache
def _checksum_of_zeros(count: int) -> int:
    return zlib.crc32(bytes(count))


@dataclass(frozen=True)
class VocoderData:
    """A store and its clips split into training and held-out ones; `parts.shared`: single clips serve as both."""

    store: VocoderStore
    split: FolderItems[VocoderClip]

    @property
    def parts(self) -> Split[VocoderClip]:
        return self.split.parts

    @property
    def evaluated(self) -> list[VocoderClip]:
        """The held-out clips in the order in which they are evaluated, by which each gets its noise: that of their
        fingerprints, in which the first ones come from many recordings."""
        return sorted(self.parts.held_out, key=attrgetter("fingerprint"))

    @property
    def voiced_share(self) -> float:
        return float((self.store.pitches() > 0).mean())


def open_sounds(given: GivenFolders, held_out_share: float = HELD_OUT_SHARE, held_out: int = 0) -> VocoderData:
    """Opens prepared sound; what is held out depends only on the content of the files. Raises UserError."""
    folders = data_folders(given)
    stores = tuple(VocoderStore.open(folder.path) for folder in folders)
    store = VocoderStore.joined(stores)
    rest = iter(store.clips)
    clips = [list(islice(rest, len(part.clips))) for part in stores]
    keys = [attrgetter("fingerprint")] * len(folders)
    return VocoderData(store, split_folders(folders, clips, held_out_share, keys, held_out))


@dataclass(frozen=True)
class SoundCrops:
    """Random crops of `frames` hops, the data set of `gputrain.engine.data.loader`.

    An epoch has one crop for each `frames` hops of a clip, and one for a shorter clip, which is padded with silence: so
    an hour has the same weight in one file or in a thousand. Digital silence, of which nothing is learned, divides a
    clip into parts that count as clips. Each crop of a clip lies in a segment of its own; its position there is a
    function of (seed, epoch, item).
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
        clip, begin, held = self._parts[number]
        places = max(0, held - self.frames) + 1
        crops = self._crops_of(held)
        segment = item - (int(self._ends[number]) - crops)
        first = begin + int((segment + item_rng(self.seed, epoch, item).random()) / crops * places)
        wave_T, _ = self.store.crop(clip, first, self.frames)
        return torch.from_numpy(wave_T), torch.from_numpy(self.store.source_pitch(clip, first, self.frames))

    def counts_of(self, clips: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of crops of consecutive groups of clips, given the number of clips of each."""
        parts_K = np.cumsum([0, *(len(self.store.sounding(clip)) for clip in self.clips)])
        ends_K = np.concatenate([[0], self._ends])[parts_K[np.cumsum([0, *clips])]]
        return tuple(np.diff(ends_K).tolist())

    @property
    def silent_share(self) -> float:
        """Returns the share of the clips that is digital silence, from which no crops are drawn."""
        return 1 - sum(held for _, _, held in self._parts) / sum(clip.frames for clip in self.clips)

    def _crops_of(self, frames: int) -> int:
        return max(1, frames // self.frames)

    @cached_property
    def _parts(self) -> list[tuple[VocoderClip, int, int]]:
        return [(clip, *part) for clip in self.clips for part in self.store.sounding(clip)]

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Returns the cumulative number of crops of the parts."""
        return np.cumsum([self._crops_of(held) for _, _, held in self._parts])
