"""Datasets of clips under a limit of their length: decoded items, their pieces, and batches of similar lengths.

    config, manager = create_optimal_config(dataset=train, model=model)
    clips = manager.prepare(train, config)        # Clips over config.max_duration_seconds are cut or left out.
    for batch in manager.sampler(clips, config):  # Each batch has clips of similar lengths.

Shape suffix: T samples.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from gputrain.autoconfig.dataset import Sound, labels_of, sound_of, with_sound
from gputrain.autoconfig.lengths import OverLong, Seconds, checked, piece_count
from gputrain.engine.data import permutation
from gputrain.errors import UserError
from gputrain.hw.ranks import SINGLE, Ranks
from gputrain.speech.packing import shuffled_by_length

log = logging.getLogger(__name__)

LENGTH_FACTOR = 1.25  # Clips whose lengths differ by less than this factor may stand in any order.


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
                if labels := labels_of(dataset[number] if item is None else item):
                    raise UserError(
                        f"item {number} lasts {seconds:.1f} s and must be cut, but {labels} belongs to all of it",
                        hint='over_long="refuse" leaves such items out; or cut them with what belongs to them before',
                    )
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


class LengthSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices of clips of similar lengths, for the `batch_sampler` of a DataLoader.

    Every clip occurs once in an epoch; only the very last batch may be smaller, and is left out if a rank would get
    fewer than `least_items`. The order is a function of (seed, epoch); `set_epoch` chooses the epoch.

    Several `ranks` share each batch: this process gets an equal part, with every n-th clip by length, so that parts
    need about the same memory. If a batch cannot be divided, as the last one, its longest clips are repeated.
    """

    def __init__(
        self, seconds: Sequence[float], batch_size: int, seed: int = 0, ranks: Ranks = SINGLE, least_items: int = 1
    ) -> None:
        self._seconds_N: Seconds = np.asarray(seconds, dtype=np.float64)
        self.batch_size, self.seed, self.epoch, self.ranks = batch_size, seed, 0, ranks
        self._least = 1 if least_items == 1 else least_items * ranks.count  # Clips that the last batch has at least.

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self._seconds_N), self.batch_size)
        return whole + (rest >= self._least or (rest > 0 and not whole))

    def __iter__(self) -> Iterator[list[int]]:
        order = shuffled_by_length(self._seconds_N, LENGTH_FACTOR, self.seed, self.epoch).tolist()
        whole, rest = divmod(len(order), self.batch_size)
        *others, smaller = permutation(self.seed, self.epoch, whole + 1)  # Any place of the lengths may be cut short.
        sizes = [self.batch_size] * smaller + [rest] + [self.batch_size] * (whole - smaller)
        ends = list(itertools.accumulate(sizes))
        for place in [*others, smaller][: len(self)]:
            yield self._part(order[ends[place] - sizes[place] : ends[place]])

    def _part(self, batch: list[int]) -> list[int]:
        """Returns this rank's part, sorted by length, so that its micro-batches need little padding."""
        ordered = sorted(batch, key=lambda number: -self._seconds_N[number])
        missing = -len(ordered) % self.ranks.count
        repeated = [ordered[place % len(ordered)] for place in range(missing)]
        return [*repeated, *ordered][self.ranks.index :: self.ranks.count]


# ------------------------------------------------------------------------------------------- transformers' Trainer


@contextlib.contextmanager
def batched_by_length(trainer: Any, sampler: LengthSampler) -> Iterator[None]:
    """Has the trainer read the whole batches of the sampler.

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

    def load() -> Any:
        workers = arguments.dataloader_num_workers
        loader: DataLoader[Any] = EpochLoader(
            trainer.train_dataset,
            batch_sampler=sampler,
            collate_fn=trainer._get_collator_with_removed_columns(trainer.data_collator, description="training"),
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
