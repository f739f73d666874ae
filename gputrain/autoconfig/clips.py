"""Datasets of clips under a limit of their length: decoded items, their pieces, and batches of similar lengths.

    config, manager = create_optimal_config(dataset=train, model=model)
    clips = manager.prepare(train, config)        # Clips over config.max_duration_seconds are cut or left out.
    for batch in manager.sampler(clips, config):  # Each batch from one of config.buckets.

Shape suffix: T samples.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from gputrain.autoconfig.dataset import Sound, labels_of, sound_of, with_sound
from gputrain.autoconfig.lengths import Bucket, OverLong, Seconds, checked, is_over, piece_count
from gputrain.autoconfig.recovery import MOST_ITEMS
from gputrain.engine.data import permutation
from gputrain.errors import UserError
from gputrain.hw.ranks import SINGLE, Ranks
from gputrain.speech.packing import shuffled_by_length

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    item: int  # Index in the dataset.
    number: int  # Index among the item's pieces.
    of: int  # Number of the item's pieces.


class PreparedClips(Sequence[Any]):
    """The clips of a dataset of at most `limit_seconds`. Longer ones are cut into pieces of equal length or left out.

    `keep_decoded`: items are decoded once and stay in memory, which data workers that are forked share; otherwise each
    is decoded when it is read, and none before if the dataset has a `length_column`. Raises UserError if an item that
    would be cut has labels, and if no clip is left.
    """

    def __init__(
        self,
        dataset: Any,
        limit_seconds: float,
        over_long: OverLong,
        *,
        keep_decoded: bool,
        length_column: str = "",
    ) -> None:
        self._dataset = dataset
        self._kept: list[Any] | None = [] if keep_decoded else None
        self.pieces: list[Piece] = []
        self.seconds: list[float] = []  # Length of each clip.
        self.left_out = 0
        known: Sequence[float] | Seconds = ()
        if length_column and not keep_decoded:
            known = checked(dataset[length_column])
        if not len(known) and not keep_decoded:
            log.info("all %d items are read once, because the dataset has no column of lengths", len(dataset))
        may_cut = False  # True once it is known that the items of a dataset with known lengths have no labels.
        for number in range(len(dataset)):
            item = None if len(known) else dataset[number]
            seconds = sound_of(item).seconds if item is not None else float(known[number])
            count = piece_count(seconds, limit_seconds)
            if count > 1 and over_long == "refuse":
                self.left_out += 1
                count = 0
            elif count > 1 and not may_cut:
                self._check_labels(number, dataset[number] if item is None else item, seconds)
                may_cut = bool(len(known))
            self.pieces += [Piece(number, piece, count) for piece in range(count)]
            self.seconds += [seconds / max(1, count)] * count
            if self._kept is not None:
                self._kept.append(with_sound(item, sound_of(item)) if count else None)
        if not self.pieces:
            raise UserError(
                f"none of {len(dataset)} clips is at most {limit_seconds:g} s long",
                hint='use a larger max_duration_seconds, or over_long="chunk" if the clips have no labels',
            )

    @staticmethod
    def _check_labels(number: int, item: Any, seconds: float) -> None:
        if labels := labels_of(item):
            raise UserError(
                f"item {number} lasts {seconds:.1f} s and must be cut, but {labels} belongs to all of it",
                hint=f'over_long="refuse" leaves such items out; or cut them together with their {labels} before',
            )

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: Any) -> Any:
        piece = self.pieces[number]
        item = self._dataset[piece.item] if self._kept is None else self._kept[piece.item]
        if piece.of == 1:
            return item
        sound = sound_of(item)
        edges = [sound.samples * part // piece.of for part in (piece.number, piece.number + 1)]
        return with_sound(item, Sound(sound.wave_T[..., edges[0] : edges[1]], sound.sampling_rate))


class BucketSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices of clips, for the `batch_sampler` of a DataLoader. Each has clips of one bucket.

    The clips left over in the buckets form the last batches of the epoch, so every clip occurs once in it; only the
    very last batch may be smaller, and is left out if a rank would get fewer than `least_items`. The order is a
    function of (seed, epoch); `set_epoch` chooses the epoch.

    Several `ranks` share each batch: this process gets an equal part, with every n-th clip by length, so that parts
    need about the same memory. If a batch cannot be divided, as the last one, its longest clips are repeated.
    """

    def __init__(
        self,
        seconds: Sequence[float],
        buckets: Sequence[Bucket],
        batch_size: int,
        seed: int = 0,
        ranks: Ranks = SINGLE,
        least_items: int = 1,
    ) -> None:
        """Raises UserError if a clip is longer than the last bucket allows."""
        self._seconds_N: Seconds = np.asarray(seconds, dtype=np.float64)
        self._buckets, self.batch_size, self.seed, self.epoch, self.ranks = tuple(buckets), batch_size, seed, 0, ranks
        self._least = 1 if least_items == 1 else least_items * ranks.count  # Clips that the last batch has at least.
        limits = [bucket.to_seconds for bucket in buckets]
        longest = float(self._seconds_N.max())
        if limits and is_over(longest, limits[-1]):
            raise UserError(
                f"a clip of {longest:.2f} s is longer than the planned {limits[-1]:.2f} s",
                hint="use the clips that manager.prepare returns",
            )
        self._bucket_N = np.searchsorted(limits[:-1], self._seconds_N)  # The bucket of each clip.

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self._seconds_N), self.batch_size)
        return whole + (rest >= self._least or (rest > 0 and not whole))

    def __iter__(self) -> Iterator[list[int]]:
        sizes_K = np.bincount(self._bucket_N)
        # So small a factor makes the order within each bucket random, and keeps the buckets apart.
        order_N = shuffled_by_length(1 + self._bucket_N, 1 + 1 / len(sizes_K), self.seed, self.epoch)
        batches: list[list[int]] = []
        rest: list[int] = []
        for members in np.split(order_N, np.cumsum(sizes_K)[:-1]):  # The shortest clips come first, in the rest too.
            whole = len(members) // self.batch_size * self.batch_size
            batches += members[:whole].reshape(-1, self.batch_size).tolist()
            rest += members[whole:].tolist()
        for number in permutation(self.seed, self.epoch, len(batches)):
            yield self._part(batches[number])
        for start in range(0, (len(self) - len(batches)) * self.batch_size, self.batch_size):
            yield self._part(rest[start : start + self.batch_size])

    def micro_batch_size(self, batch: Sequence[int]) -> int:
        """Returns how many clips of a batch fit into memory at once: as many as of its longest clip."""
        if not self._buckets:
            return len(batch)
        return self._buckets[int(self._bucket_N[list(batch)].max())].micro_batch_size

    def _part(self, batch: list[int]) -> list[int]:
        """Returns this rank's part, sorted by length, so that its micro-batches need little padding."""
        ordered = sorted(batch, key=lambda number: -self._seconds_N[number])
        missing = -len(ordered) % self.ranks.count
        repeated = [ordered[place % len(ordered)] for place in range(missing)]
        return [*repeated, *ordered][self.ranks.index :: self.ranks.count]


# ------------------------------------------------------------------------------------------- transformers' Trainer


@contextlib.contextmanager
def batched_by_length(trainer: Any, sampler: BucketSampler) -> Iterator[None]:
    """Has the trainer read the batches of the sampler, each of which says how many of its clips fit at once.

    Raises UserError if the trainer's arguments are not those for whole batches.
    """
    arguments = trainer.args
    share, several = sampler.batch_size // sampler.ranks.count, sampler.ranks.count > 1
    if (arguments.train_batch_size, arguments.gradient_accumulation_steps) != (share, 1):
        raise UserError(
            f"batches by length have {share} clips{' on each GPU' if several else ''}, and the trainer was made for "
            f"{arguments.train_batch_size} x {arguments.gradient_accumulation_steps}",
            hint="make its TrainingArguments with **config.training_arguments(by_length=True)",
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")

    def load() -> Any:
        workers = arguments.dataloader_num_workers
        loader: DataLoader[Any] = EpochLoader(
            BatchReader(trainer.train_dataset, collate, sampler),
            batch_sampler=sampler,
            collate_fn=_identity,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and arguments.device.type == "cuda",
            persistent_workers=arguments.dataloader_persistent_workers and workers > 0,
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
        )
        # accelerate would divide the batches among the processes once more.
        return loader if several else trainer.accelerator.prepare(loader)

    trainer.get_train_dataloader = load
    try:
        yield
    finally:
        vars(trainer).pop("get_train_dataloader", None)


class EpochLoader(DataLoader[Any]):
    """DataLoader that passes on the epoch to its sampler of batches."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


class BatchReader(torch.utils.data.Dataset[Any]):
    """Reads and collates whole batches, and adds to each how many of its items fit at once."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], sampler: BucketSampler) -> None:
        self._dataset, self._collate, self._sampler = dataset, collate, sampler

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[int]) -> Any:
        batch = self._collate([self._dataset[number] for number in numbers])
        batch[MOST_ITEMS] = self._sampler.micro_batch_size(numbers)
        return batch


def _identity(batch: Any) -> Any:
    return batch
