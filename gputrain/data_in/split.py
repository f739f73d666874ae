"""Which data are trained on: the held-out split, the digests by which a resumed run notices that data have changed, and
several data folders in one training, with their weights.

A weight says how often each item of a folder is drawn in an epoch, like `num_repeats` of other trainers. What an epoch
draws is a function of its number, so resuming needs no state. Imports no torch.
"""

import errno
import hashlib
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.engine.data import Sample, SampleSource
from gputrain.errors import UserError
from gputrain.formatting import shell_command

log = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST = "manifest.jsonl"
HELD_OUT_SHARE = 0.05
FEW_HELD_OUT, FEW_ITEMS = 4, 20  # Fewer held-out items are too few for figures, if there are so many items in all.
FINGERPRINT_BLOCK = 65536  # bytes
GivenFolders = Path | Sequence[Path]  # Values of --data-path, which may end in =WEIGHT.
HIGHEST = 10_000  # The highest weight of a folder.


def fingerprint(path: Path) -> str:
    """Returns 32 hexadecimal digits of a file's size and its first, middle and last 64 KiB (BLAKE2b).

    Equal content has equal fingerprints; up to 192 KiB the converse holds too. Raises OSError.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")  # Reading a FIFO or a device might never end.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
        last = max(0, size - FINGERPRINT_BLOCK)
        for offset in (0, last // 2, last):
            file.seek(offset)
            digest.update(file.read(FINGERPRINT_BLOCK))
    return digest.hexdigest()


def is_held_out(fingerprint: str, share: float) -> bool:
    """Returns True if the fingerprint, read as a fraction, is below the held-out `share`."""
    return int(fingerprint[:16], 16) < share * 2**64


@dataclass(frozen=True)
class Split(Generic[T]):
    """Training and held-out items. `shared`: there is only one item, which is used as both."""

    train: list[T]
    held_out: list[T]
    shared: bool


def split(items: Sequence[T], share: float, key: Callable[[T], str], count: int = 0) -> Split[T]:
    """Hold out a share of the items, or `count` of them, by their fingerprints, `key(item)`, keeping the order on both
    sides.

    Equal fingerprints never part. Where the share alone would leave a side empty, the item with the lowest
    fingerprint is held out, or the one with the highest is trained on.
    """
    kinds = sorted({key(item) for item in items})
    if len(kinds) < 2:
        return Split(list(items), list(items), shared=True)
    count = min(max(1, count or sum(is_held_out(kind, share) for kind in kinds)), len(kinds) - 1)
    lowest = set(kinds[:count])
    train = [item for item in items if key(item) not in lowest]
    return Split(train, [item for item in items if key(item) in lowest], shared=False)


def few_held_out(held_out: int, items: int, noun: str, remedy: str) -> str:
    """Returns a warning if so few of the items are held out that single ones decide what evaluations tell: fewer than
    four where there are twenty, or one; otherwise "". `noun` is that of an item, in the plural."""
    if held_out >= FEW_HELD_OUT or (held_out > 1 and items < FEW_ITEMS):
        return ""
    are, them = ("is", "it") if held_out == 1 else ("are", "them")
    return (
        f"only {held_out} of {items} {noun} {are} held out: every evaluation, the samples and checkpoint_best.pt "
        f"depend on {them}; {remedy}"
    )


def warn_of_few_held_out(parts: Split[Any], noun: str, remedy: str) -> None:
    """Warns if training items are evaluated, or so few held-out ones that single ones decide."""
    held_out = len(parts.held_out)
    if parts.shared:
        log.warning("all data are of one file, which is used both for training and for evaluation")
    elif few := few_held_out(held_out, held_out + len(parts.train), f"{noun}s", remedy):
        log.warning("%s", few)


def digests(**parts: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Returns the number of items and a digest of their descriptions, in order, for each part of the data."""
    found = {}
    for name, items in parts.items():
        digest, count = hashlib.blake2b(digest_size=16), 0
        for item in items:
            digest.update(repr(item).encode("utf-8", "surrogatepass") + b"\n")
            count += 1
        found[name] = {"items": count, "digest": digest.hexdigest()}
    return found


# ------------------------------------------------------------------------------------------------- several folders


@dataclass(frozen=True)
class DataFolder:
    """A folder of data, and how often each of its items is drawn in an epoch."""

    path: Path
    weight: int = 1


def data_folders(given: GivenFolders) -> tuple[DataFolder, ...]:
    """Returns the folders of --data-path.

    Raises UserError if there is none, if one is given twice, or if a weight is no whole number from 1 on. Whoever opens
    a folder says what is wrong with it.
    """
    folders = tuple(map(_folder, (given,) if isinstance(given, Path) else given))
    if not folders:
        raise UserError("no data folder is given", hint="--data-path FOLDER")
    seen: dict[str, DataFolder] = {}
    for folder in folders:
        place = os.path.realpath(folder.path)
        if place in seen:
            raise UserError(
                f"{folder.path}: the same folder as {seen[place].path}, given twice",
                hint=f"give it once; --data-path {shell_command(folder.path)}=2 draws each of its items twice an epoch",
            )
        seen[place] = folder
    return folders


def format_folders(given: GivenFolders) -> str:
    """Returns the folders of --data-path as they were given, for messages."""
    return str(given) if isinstance(given, Path) else ", ".join(map(str, given))


def _folder(given: Path) -> DataFolder:
    """Parses FOLDER or FOLDER=WEIGHT. A path that exists as it is written is a folder without a weight."""
    name, _, number = str(given).rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return DataFolder(given)
    if not name or given.exists():
        return DataFolder(given)
    if not (1 <= weight <= HIGHEST and weight.is_integer()):
        raise UserError(
            f"{name}: its weight is {number}, expected a whole number from 1 to {HIGHEST}",
            hint="a weight says how often each item is drawn in an epoch: for half of one, give the other folders "
            "twice their weights; leave a folder out to draw none of it",
        )
    return DataFolder(Path(name), int(weight))


@dataclass(frozen=True)
class Mixture:
    """Folders of `counts` items, numbered through from the first folder to the last, with their weights."""

    counts: tuple[int, ...]
    weights: tuple[int, ...]

    def __len__(self) -> int:
        """Returns the number of items of an epoch."""
        return sum(self.draws)

    @cached_property
    def draws(self) -> tuple[int, ...]:
        """The number of items that an epoch has of each folder."""
        return tuple(count * weight for count, weight in zip(self.counts, self.weights, strict=True))

    @property
    def is_plain(self) -> bool:
        """True if an epoch has every item once."""
        return self.draws == self.counts

    def sample(self, drawn: Sample) -> Sample:
        """Returns the item at a place of an epoch. Its epoch counts the draws of the item before: no two samples of a
        training are equal, so that their random numbers differ."""
        epoch, place = drawn
        folder = bisect_right(self._ends, place)
        copy, item = divmod(place - (self._ends[folder] - self.draws[folder]), self.counts[folder])
        return Sample(epoch * self.weights[folder] + copy, sum(self.counts[:folder]) + item)

    @cached_property
    def items(self) -> npt.NDArray[np.int64]:
        """The items of an epoch, by place."""
        first = accumulate(self.counts, initial=0)
        parts = zip(first, self.counts, self.weights, strict=False)
        return np.concatenate([first + np.tile(np.arange(count), weight) for first, count, weight in parts])

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.draws))

    def of(self, dataset: Any) -> Any:
        """Returns a data set whose epochs draw the items of another one by their weights."""
        return dataset if self.is_plain else DrawnItems(dataset, self)


@dataclass(frozen=True)
class DrawnItems:
    """A data set for `gputrain.engine.data.loader`, whose epochs draw from another data set by weights."""

    dataset: SampleSource
    mixture: Mixture

    def __len__(self) -> int:
        return len(self.mixture)

    def __getitem__(self, sample: Sample) -> Any:
        return self.dataset[self.mixture.sample(sample)]

    @property
    def item_bytes(self) -> int:
        return self.dataset.item_bytes


@dataclass(frozen=True)
class FolderItems(Generic[T]):
    """The items of several folders: those to train on, folder after folder, and those held out, which alternate between
    the folders. `counts` are the numbers of training items of each folder."""

    folders: tuple[DataFolder, ...]
    parts: Split[T]
    counts: tuple[int, ...]

    def mixture(self, counts: tuple[int, ...] = ()) -> Mixture:
        """Returns the mixture of the training items, or of other items made from those, such as crops."""
        return Mixture(counts or self.counts, tuple(folder.weight for folder in self.folders))

    def log_shares(self, mixture: Mixture, noun: str) -> None:
        """Logs how much of an epoch comes from each of several folders."""
        if len(self.folders) == 1 and mixture.is_plain:
            return
        for folder, count, draws in zip(self.folders, mixture.counts, mixture.draws, strict=True):
            log.info(
                "%s: %d %s with weight %d: %d of an epoch, %.1f %%",
                folder.path,
                count,
                noun,
                folder.weight,
                draws,
                100 * draws / len(mixture),
            )


def split_folders(
    folders: tuple[DataFolder, ...],
    items: Sequence[Sequence[T]],
    share: float,
    keys: Sequence[Callable[[T], str]],
    count: int = 0,
) -> FolderItems[T]:
    """Holds out a share of the items of each folder, or `count` of each, by their fingerprints, `keys[folder](item)`.

    An item that one folder holds out is not trained on in another. Of a folder whose items are all the same, none is
    held out beside others; `shared`: that holds for all folders, and their items serve as both. Raises UserError if
    nothing is left to train on in a folder.
    """
    own = [split(part, share, key, count) for part, key in zip(items, keys, strict=True)]
    if len(own) == 1:
        return FolderItems(folders, own[0], (len(own[0].train),))
    shared = all(part.shared for part in own)
    held = {key(item) for part in own if not part.shared for item in part.held_out for key in set(keys)}
    train: list[list[T]] = []
    for folder, part in zip(folders, own, strict=True):
        kept = [item for item in part.train if not any(key(item) in held for key in set(keys))]
        if not kept:
            raise UserError(
                f"{folder.path}: nothing is left to train on, as the other folders hold out the same items",
                hint="leave this folder out",
            )
        if left_out := len(part.train) - len(kept):
            log.info("%s: %d items are left out, as another folder holds them out", folder.path, left_out)
        train.append(kept)
    # They alternate between the folders, so that the first few come from all.
    rows = zip_longest(*(part.held_out for part in own if shared or not part.shared))
    held_out = [item for row in rows for item in row if item is not None]
    parts = Split([item for items in train for item in items], held_out, shared)
    return FolderItems(folders, parts, tuple(map(len, train)))
