"""Data set of a voice or a recogniser: batches of clips with similar lengths, from a store of prepared speech.

An item of the data set is a bucket, a whole batch. The number of buckets and their numbers of clips are fixed;
the clips of each are a function of (seed, epoch). So the engine counts, shuffles and resumes buckets like any other
items, while clips are regrouped in each epoch.

Shape suffixes: N clips of the store, K buckets; B clips of a bucket or of this rank's part of it, S symbols, T samples.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gputrain.data_in.split import (
    HELD_OUT_SHARE,
    FolderItems,
    GivenFolders,
    Mixture,
    Split,
    data_folders,
    split_folders,
)
from gputrain.engine.data import Sample
from gputrain.errors import UserError
from gputrain.hw.ranks import SINGLE, Ranks
from gputrain.kinds import how_to_prepare
from gputrain.speech.config import ENCODER_RATE, POLICIES, STRIDE, SpeechData, SpeechKind, encoder_frames
from gputrain.speech.packing import Integers, cut, random_words, shape_borders, shuffled_by_length
from gputrain.speech.store import SpeechClip, SpeechStore, frame_count, joined

log = logging.getLogger(__name__)

FEW_SOURCES = 20  # Below this number of recordings, a recogniser's held-out clips are parts of recordings.
MAX_PADDING = 0.02  # share of the frames of an epoch
SHUFFLED = 0.25  # minimum share of that padding reserved for regrouping the clips
KEPT_ORDERS = 2  # Epochs whose order is kept.


@dataclass(frozen=True)
class Speech:
    """A store with its clips in two parts; `parts.shared`: single recordings serve as both."""

    store: SpeechStore
    split: FolderItems[SpeechClip]

    @property
    def parts(self) -> Split[SpeechClip]:
        return self.split.parts


def open_speech(given: GivenFolders, held_out_share: float = HELD_OUT_SHARE, kind: SpeechKind = "tts") -> Speech:
    """Opens prepared speech; which clips are held out depends only on the content of their sources.

    Clips of one source are held out together, except those of a recogniser's few long recordings, of which a single one
    could be most of the data. Raises UserError, also if the speech was prepared for another kind of model.
    """
    folders = data_folders(given)
    stores = tuple(SpeechStore.open(folder.path, kind) for folder in folders)
    for store in stores:
        check_kind(store, kind)
        if kind == "asr":
            check_texts(store)
    whole = joined(stores)
    rest, clips = iter(whole.clips), list[Sequence[SpeechClip]]()
    for folder, store in zip(folders, stores, strict=True):
        own = list(islice(rest, len(store.clips)))
        # Sorted by length, the clips that an epoch draws of a folder have the lengths of the whole folder.
        clips.append(sorted(own, key=lambda clip: clip.samples) if folder.weight % 1 else own)
    keys = [_key_of(store.clips, kind) for store in stores]
    return Speech(whole, split_folders(folders, clips, held_out_share, keys))


def _key_of(clips: Sequence[SpeechClip], kind: SpeechKind) -> Callable[[SpeechClip], str]:
    """Returns the fingerprint by which clips of a folder are held out: that of their source, or of a part of it."""

    def part_of_source(clip: SpeechClip) -> str:
        part = f"{clip.fingerprint} {clip.crc32} {clip.samples} {clip.normalized}"
        return hashlib.blake2b(part.encode(), digest_size=16).hexdigest()

    sources = {clip.fingerprint for clip in clips}
    few = kind == "asr" and len(sources) < min(FEW_SOURCES, len(clips))
    return part_of_source if few else attrgetter("fingerprint")


def check_kind(store: SpeechStore, kind: SpeechKind) -> None:
    """Raises UserError if a store was prepared for another kind of model, or with other frames than a recogniser's."""
    format = store.format
    if format.kind != kind:
        raise UserError(
            f"{store.folder}: prepared for {POLICIES[format.kind].name} (--kind {format.kind}), not for "
            f"{POLICIES[kind].name}",
            hint=how_to_prepare(kind),
        )
    if kind == "asr" and (format.sampling_rate, format.hop_size) != (ENCODER_RATE, STRIDE):
        raise UserError(
            f"{store.folder}: prepared at {format.sampling_rate} Hz with {format.hop_size} samples a frame; a "
            f"recogniser reads {ENCODER_RATE} Hz with {STRIDE}",
            hint=how_to_prepare("asr"),
        )


def check_texts(store: SpeechStore) -> None:
    """Raises UserError if a recogniser's clip has no text in its vocabulary, or fewer frames than CTC needs for it."""
    vocabulary = store.format.vocabulary
    for clip in store.clips:
        letters = set(clip.normalized) - {" "} - set(vocabulary.unknown(clip.normalized))
        needed, frames = vocabulary.frames_needed(clip.normalized), encoder_frames(clip.samples)
        if not letters or frames < needed:
            found = f"{frames} frames for {needed} labels" if letters else "no letter of the vocabulary in its text"
            raise UserError(
                f"{store.folder}: {clip.path}: {found}", hint="run gputrain prepare-data again to rebuild it"
            )


@dataclass(frozen=True)
class ClipSize:
    """The average size of a clip in the largest batches."""

    frames: int  # Counted as by the data set, with the incomplete last one.
    symbols: int


NOT_SHARED = torch.empty(0, dtype=torch.int64)  # Means that this process trains alone.


class ClipBatch(NamedTuple):
    """A bucket of B clips. Beyond the end of a shorter clip, ids are 0 (PAD) and samples are silence."""

    ids_BS: Tensor  # int64, as returned by Frontend.ids or Vocabulary.ids
    symbols_B: Tensor  # int64, number of ids of each clip
    wave_BT: Tensor  # int16; T is a multiple of the hop
    samples_B: Tensor  # int64
    frames_B: Tensor  # int64; the last frame of a clip may be incomplete
    speakers_B: Tensor  # int64
    clips_B: Tensor  # int64, indices into the list of clips
    # Of a bucket that ranks share: symbols_B and frames_B of all its A clips, and the range (first, stop) of them that
    # this rank has. An empty range means that the one clip here only fills a place, and counts nothing.
    all_symbols_A: Tensor = NOT_SHARED
    all_frames_A: Tensor = NOT_SHARED
    range_2: Tensor = NOT_SHARED

    @property
    def of_clips(self) -> tuple[Tensor, ...]:
        """The tensors of the B clips, without those that describe what ranks share."""
        return self[: self._fields.index("all_symbols_A")]


def even_bucket(ids_BS: Tensor, wave_BT: Tensor, frames: int) -> list[ClipBatch]:
    """Returns a bucket of clips of one length, as the loader does, for plans and benchmarks. Recipes read the lengths,
    so that these have values among fake tensors too."""
    (clips, symbols), samples = ids_BS.shape, wave_BT.shape[1]
    with unset_fake_temporarily():
        each = torch.ones(clips, dtype=torch.int64)
        counts = {"symbols_B": each * symbols, "samples_B": each * samples, "frames_B": each * frames}
    numbers_B = torch.arange(clips)
    return [ClipBatch(ids_BS, wave_BT=wave_BT.to(torch.int16), speakers_B=numbers_B * 0, clips_B=numbers_B, **counts)]


@dataclass(frozen=True)
class Buckets:
    """The data set of `gputrain.engine.data.loader`: item k of an epoch is a bucket of at most `batch_size` clips.

    No bucket takes more than `batch_frames` frames with its padding, unless a single clip exceeds the limit;
    0 sets no such limit. An epoch's padding is at most the share `max_padding` of its frames. Every clip is in
    exactly one bucket of every epoch, unless a `mixture` draws it more or less often.

    To guarantee these limits, buckets are ranges of the clips sorted by length, cut so that a bucket whose clips
    are longer by the factor `stretch` still fits. An epoch sorts the clips by length times a random factor between 1
    and `stretch`, and cuts at the same indices: the n-th product is at most `stretch` times the n-th length. Of a few
    hundred clips most stay grouped together, as the padding limit allows no other grouping; only the order of buckets
    changes.

    With `shapes`, buckets have at most so many shapes, for CUDA graphs, and a smaller one with what is left of the
    shortest clips. Those of a shape have equally many clips, padded to the longest of all, and an epoch regroups them
    freely; `max_padding` has no effect.
    """

    store: SpeechStore
    clips: Sequence[SpeechClip]
    hop_size: int
    batch_size: int
    seed: int
    batch_frames: int = 0
    max_padding: float = MAX_PADDING
    ranks: Ranks = SINGLE  # Each rank reads its part of every bucket.
    mixture: Mixture | None = None  # Weights of the folders that the clips come from; None: every clip once.
    shapes: int = 0  # The most shapes that buckets have; 0: any.

    def __len__(self) -> int:
        return len(self.ends_K)

    def __getitem__(self, sample: Sample) -> ClipBatch:
        """Reads bucket `sample.item` of epoch `sample.epoch`, or the part of it that belongs to this rank.

        Nothing depends on what was read before: which clips a bucket has follows from the seed and the epoch, and its
        place in the epoch from the step. So a resumed run goes on with the same batches, without a sampler's state, and
        any number of workers reads them.
        """
        members_A = self.members(sample)
        room = self.room_K[sample.item] if self.shapes else None
        if self.ranks.count == 1:
            return self.collated(members_A, room)
        part = self.ranks.rows(len(members_A))
        read = part if part.stop > part.start else slice(0, 1)  # One clip fills the place of none.
        return self.collated(members_A[read], room)._replace(
            all_symbols_A=torch.from_numpy(self.symbols_N[members_A]),
            all_frames_A=torch.from_numpy(self.frames_N[members_A]),
            range_2=torch.tensor([part.start, part.stop]),
        )

    def members(self, sample: Sample) -> Integers:
        """Returns the indices of the clips of a bucket, approximately from the shortest to the longest."""
        epoch, number = sample
        begin = self.ends_K[number - 1] if number else 0
        return self._order(epoch)[begin : self.ends_K[number]]

    def _order(self, epoch: int) -> Integers:
        """Returns the M clips of an epoch in the order of its buckets, a function of the seed and the epoch. Sorting
        them takes longer than reading a bucket, so that the orders of the last two epochs are kept: reading ahead
        alternates between them."""
        if epoch not in self._orders:
            items_M = np.arange(len(self.clips)) if self.mixture is None else self.mixture.items
            places_M = shuffled_by_length(self.frames_N[items_M], self.stretch, self.seed, epoch)
            if self.shapes:  # Within a shape, where all clips are padded to one length, they are shuffled freely.
                shape_M = np.searchsorted(self.borders_C, np.arange(len(places_M)), side="right")
                places_M = places_M[np.lexsort((random_words(self.seed, epoch, len(places_M)), shape_M))]
            while len(self._orders) >= KEPT_ORDERS:
                self._orders.pop(next(iter(self._orders)))
            self._orders[epoch] = items_M[places_M]
        return self._orders[epoch]

    @cached_property
    def _orders(self) -> dict[int, Integers]:
        return {}

    def collated(self, members_B: Sequence[int] | Integers, room: ClipSize | None = None) -> ClipBatch:
        """Collates clips, given by their indices in the list, into a batch; also used for held-out clips. They are
        padded to the longest, or to a larger `room` of a clip."""
        clips = [self.clips[member] for member in members_B]
        waves = [self.store.wave(clip) for clip in clips]
        reader = self.store.format.frontend
        ids = [reader.ids(clip.normalized) for clip in clips]
        frames = [frame_count(len(wave_T), self.hop_size) for wave_T in waves]
        room = room or ClipSize(max(frames), max(map(len, ids)))
        ids_BS = np.zeros((len(clips), room.symbols), dtype=np.int64)
        wave_BT = np.zeros((len(clips), room.frames * self.hop_size), dtype=np.int16)
        for row, wave_T in enumerate(waves):
            ids_BS[row, : len(ids[row])] = ids[row]
            wave_BT[row, : len(wave_T)] = wave_T
        return ClipBatch(
            ids_BS=torch.from_numpy(ids_BS),
            symbols_B=torch.tensor([len(numbers) for numbers in ids]),
            wave_BT=torch.from_numpy(wave_BT),
            samples_B=torch.tensor([len(wave_T) for wave_T in waves]),
            frames_B=torch.tensor(frames),
            speakers_B=torch.tensor([clip.speaker for clip in clips]),
            clips_B=torch.tensor([int(member) for member in members_B]),
        )

    def collate(self, batches: list[ClipBatch]) -> list[ClipBatch]:
        """Returns the buckets of one step unchanged: they differ in size and cannot be stacked."""
        return batches

    @cached_property
    def frames_N(self) -> Integers:
        samples_N = np.array([clip.samples for clip in self.clips], dtype=np.int64)
        return -(-samples_N // self.hop_size)

    @cached_property
    def longest_M(self) -> Integers:
        """The frames of the clips of an epoch, sorted."""
        return np.sort(self.frames_N if self.mixture is None else self.frames_N[self.mixture.items])

    @cached_property
    def symbols_N(self) -> Integers:
        reader = self.store.format.frontend
        return np.array([len(reader.ids(clip.normalized)) for clip in self.clips], dtype=np.int64)

    @cached_property
    def stretch(self) -> float:
        """The largest factor of a length in an epoch's order. It uses the padding that the buckets leave."""
        return 1.0 if self.shapes else max(1.0, (1 - self.padding) / (1 - self.max_padding))

    @property
    def item_bytes(self) -> int:
        """Bytes of the int16 samples of the largest bucket; the ids are negligible."""
        frames_K = self.padded_K * np.diff(self.ends_K, prepend=0)
        return math.ceil(self.stretch * int(frames_K.max())) * self.hop_size * 2

    @property
    def largest_average(self) -> ClipSize:
        """The average size of a clip in a batch that reaches both the limit of frames and that of clips."""
        frames = self.batch_frames / self.batch_size
        symbols = int(self.symbols_N.sum())
        return ClipSize(math.ceil(frames), math.ceil(frames * symbols / float(self.frames_N.sum())))

    @property
    def padding(self) -> float:
        """Share of padding in the frames of an epoch, without the padding that regrouping adds."""
        return 1 - int(self.longest_M.sum()) / int((self.padded_K * np.diff(self.ends_K, prepend=0)).sum())

    @cached_property
    def ends_K(self) -> Integers:
        """Cumulative number of clips up to the end of each bucket."""
        if self.shapes:
            begins_C = np.concatenate([[0], self.borders_C[:-1]])
            counts_C = [self._count(end) for end in self.borders_C]
            ends = [
                np.arange(*range_of) for range_of in zip(self.borders_C, begins_C, -np.array(counts_C), strict=True)
            ]
            return np.sort(np.concatenate(ends))
        limit = max(1, math.floor(self.batch_frames * (1 - self.max_padding))) if self.batch_frames else 0
        return cut(self.longest_M, self.batch_size, limit, (1 - SHUFFLED) * self.max_padding)

    @cached_property
    def borders_C(self) -> Integers:
        """Cumulative number of clips up to the end of each shape."""
        return shape_borders(self.longest_M, self.shapes, self._count)

    def _count(self, end: int) -> int:
        """Returns the clips of a bucket whose longest is the one before `end`."""
        most = int(self.batch_frames) // int(self.longest_M[end - 1]) if self.batch_frames else self.batch_size
        return max(1, min(self.batch_size, most))

    @cached_property
    def padded_K(self) -> Integers:
        """The frames that the clips of each bucket are padded to, without those that regrouping adds."""
        if not self.shapes:
            return self.longest_M[self.ends_K - 1]
        return self.longest_M[self.borders_C[np.searchsorted(self.borders_C, self.ends_K)] - 1]

    @cached_property
    def room_K(self) -> list[ClipSize]:
        """The size that the clips of each bucket are padded to, if they have `shapes`."""
        return [ClipSize(int(frames), int(self.symbols_N[self.frames_N <= frames].max())) for frames in self.padded_K]


def buckets_of(speech: Speech, data: SpeechData, hop_size: int, batch_size: int, seed: int, shapes: int = 0) -> Buckets:
    """Returns the training clips in buckets that contain about the same amount of audio."""
    mixture = speech.split.mixture()
    clips = Buckets(
        speech.store, speech.parts.train, hop_size, batch_size, seed, max_padding=data.max_padding,
        mixture=None if mixture.is_plain else mixture, shapes=shapes,
    )  # fmt: skip
    frames = data.max_batch_audio_ratio * batch_size * float(np.mean(clips.longest_M))
    return replace(clips, batch_frames=math.ceil(frames))


class StepClips(NamedTuple):
    """The clips of a step on this rank, and the sizes of all clips of the step."""

    buckets: list[ClipBatch]
    symbols: list[int]
    frames: list[int]
    rows: tuple[slice, ...]  # Places of this rank's clips among all.
    is_idle: bool  # True if this rank has no clip of the step; its one clip only fills a place.

    # The counts of the whole step, by which terms are divided. Divided by infinity, the terms of a clip that only fills
    # a place are zero, and so are its gradients.

    @property
    def global_clips(self) -> float:
        return math.inf if self.is_idle else len(self.frames)

    @property
    def global_frames(self) -> float:
        return math.inf if self.is_idle else sum(self.frames)

    @property
    def global_symbols(self) -> float:
        return math.inf if self.is_idle else sum(self.symbols)


def clips_of_step(loaded: list[ClipBatch]) -> StepClips:
    """Returns the clips of the buckets of one step, which one process or several ranks have read."""
    alone = not len(loaded[0].range_2)
    symbols = [number for bucket in loaded for number in (bucket.symbols_B if alone else bucket.all_symbols_A).tolist()]
    frames = [number for bucket in loaded for number in (bucket.frames_B if alone else bucket.all_frames_A).tolist()]
    if alone:
        return StepClips(loaded, symbols, frames, (slice(0, len(frames)),), is_idle=False)
    buckets, rows, begin = [], [], 0
    for bucket in loaded:
        first, stop = bucket.range_2.tolist()
        if stop > first:
            buckets.append(bucket)
            rows.append(slice(begin + first, begin + stop))
        begin += len(bucket.all_frames_A)
    if not buckets:
        return StepClips(loaded[:1], symbols, frames, (slice(0, 1),), is_idle=True)
    return StepClips(buckets, symbols, frames, tuple(rows), is_idle=False)
