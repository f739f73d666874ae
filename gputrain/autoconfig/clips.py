"""Datasets of clips under a limit of their length: decoded items, their pieces, and batches of similar lengths.

    config, manager = create_optimal_config(dataset=train, model=model)
    clips = manager.prepare(train, config)        # Clips over config.max_duration_seconds are cut or left out.
    for batch in manager.sampler(clips, config):  # Each batch from one of config.buckets.

Shape suffix: T samples.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gputrain.autoconfig.lengths import ROUNDING, Bucket, OverLong, piece_count
from gputrain.autoconfig.sounds import Sound, labels_of, sound_of, with_sound
from gputrain.errors import UserError
from gputrain.hw.ranks import SINGLE, Ranks


class Piece(NamedTuple):
    item: int  # Index in the dataset.
    number: int  # Index among the item's pieces.
    of: int  # Number of the item's pieces.


class PreparedClips(Sequence[Any]):
    """The clips of a dataset of at most `limit_seconds`. Longer ones are cut into pieces of equal length or left out.

    `keep_decoded`: items are decoded once and stay in memory, in one tensor that data workers share; otherwise each is
    decoded when it is read. Raises UserError if an item that would be cut has labels, and if no clip is left.
    """

    def __init__(self, dataset: Any, limit_seconds: float, over_long: OverLong, *, keep_decoded: bool) -> None:
        self._dataset, self._kept = dataset, _KeptItems() if keep_decoded else None
        self.pieces: list[Piece] = []
        self.seconds: list[float] = []  # Length of each clip.
        self.left_out = 0
        for number in range(len(dataset)):
            item = dataset[number]
            sound = sound_of(item)
            count = piece_count(sound.seconds, limit_seconds, ROUNDING)
            if count > 1 and over_long == "refuse":
                self.left_out += 1
                count = 0
            elif count > 1 and (labels := labels_of(item)):
                raise UserError(
                    f"item {number} lasts {sound.seconds:.1f} s and must be cut, but {labels} belongs to all of it",
                    hint=f'over_long="refuse" leaves such items out; or cut them together with their {labels} before',
                )
            self.pieces += [Piece(number, piece, count) for piece in range(count)]
            self.seconds += [sound.seconds / max(1, count)] * count
            if self._kept is not None:
                self._kept.add(item, sound) if count else self._kept.skip()
        if not self.pieces:
            raise UserError(
                f"none of {len(dataset)} clips is at most {limit_seconds:g} s long",
                hint='use a larger max_duration_seconds, or over_long="chunk" if the clips have no labels',
            )
        if self._kept is not None:
            self._kept.join()

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


class _KeptItems:
    """Decoded items. Their waves are one tensor: data workers share it, where they would copy a list of arrays."""

    def __init__(self) -> None:
        self._items: list[tuple[Any, Sound] | None] = []  # Each item with an empty sound, and this sound.
        self._waves: list[Tensor] = []
        self._shapes: list[tuple[int, ...]] = []
        self._joined = torch.empty(0)

    def add(self, item: Any, sound: Sound) -> None:
        wave_T = torch.as_tensor(sound.wave_T)
        empty = Sound(wave_T[..., :0] if isinstance(sound.wave_T, Tensor) else np.empty(0), sound.sampling_rate)
        self._items.append((with_sound(item, empty), empty))
        self._shapes.append(tuple(wave_T.shape))
        self._waves.append(wave_T.reshape(-1))

    def skip(self) -> None:
        self._items.append(None)
        self._shapes.append((0,))
        self._waves.append(torch.empty(0))

    def join(self) -> None:
        self._starts = np.cumsum([0, *map(len, self._waves)])
        self._joined = torch.cat([wave for wave in self._waves if len(wave)])
        self._waves.clear()

    def __getitem__(self, number: int) -> Any:
        kept = self._items[number]
        assert kept is not None
        item, empty = kept
        wave_T = self._joined[self._starts[number] : self._starts[number + 1]].reshape(self._shapes[number])
        return with_sound(item, empty._replace(wave_T=wave_T if isinstance(empty.wave_T, Tensor) else wave_T.numpy()))


class BucketSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices of clips, for the `batch_sampler` of a DataLoader. Each has clips of one bucket.

    The clips left over in the buckets form the last batches of the epoch, so every clip occurs once in it; only the
    very last batch may be smaller. The order is a function of (seed, epoch); `set_epoch` chooses the epoch.

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
    ) -> None:
        """Raises UserError if a clip is longer than the last bucket allows."""
        self.ranks = ranks
        self._seconds: npt.NDArray[np.float64] = np.asarray(seconds, dtype=np.float64)
        self._buckets, self.batch_size, self.seed, self.epoch = tuple(buckets), batch_size, seed, 0
        self._edges = [bucket.to_seconds for bucket in self._buckets]
        longest = float(self._seconds.max())
        if self._edges and longest > self._edges[-1] * (1 + 1e-6):
            raise UserError(
                f"a clip of {longest:.1f} s is longer than the planned {self._edges[-1]:.1f} s",
                hint="use the clips that manager.prepare returns",
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._seconds) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        draws = np.random.default_rng([self.seed, self.epoch])
        members: list[list[int]] = [[] for _ in self._edges or [0.0]]
        for number in draws.permutation(len(self._seconds)).tolist():
            members[self._bucket(self._seconds[number])].append(number)
        batches, rest = [], []
        for numbers in members:  # The shortest clips come first, so neighbours in the rest are similar, too.
            whole = len(numbers) // self.batch_size * self.batch_size
            batches += [numbers[start : start + self.batch_size] for start in range(0, whole, self.batch_size)]
            rest += numbers[whole:]
        order = draws.permutation(len(batches)).tolist()
        yield from (self._part(batches[number]) for number in order)
        for start in range(0, len(rest), self.batch_size):
            yield self._part(rest[start : start + self.batch_size])

    def micro_batch_size(self, batch: Sequence[int]) -> int:
        """Returns how many clips of a batch fit into memory at once: as many as of its longest clip."""
        if not self._buckets:
            return len(batch)
        return self._buckets[self._bucket(float(self._seconds[list(batch)].max()))].micro_batch_size

    def _bucket(self, seconds: float) -> int:
        return min(bisect_left(self._edges, seconds), max(0, len(self._edges) - 1))

    def _part(self, batch: list[int]) -> list[int]:
        """Returns this rank's part, sorted by length, so that its micro-batches need little padding."""
        ordered = sorted(batch, key=lambda number: -self._seconds[number])
        missing = -len(ordered) % self.ranks.count
        repeated = [ordered[place % len(ordered)] for place in range(missing)]
        return [*repeated, *ordered][self.ranks.index :: self.ranks.count]
