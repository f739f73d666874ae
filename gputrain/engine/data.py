"""The order of the data, and the loader with its worker processes.

The order is computed, not stored. Sample number k, counted from 0 over the whole run, is item
`permutation(seed, k // n, n)[k % n]` of n, and its random numbers are `item_rng(seed, k // n, item)`. So a run that
resumes at sample k reads exactly what an uninterrupted one would, with any number of workers.

torch is imported when `loader` is called, because preparing data does not need it.
"""

import logging
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.engine.schedule import StepSchedule
from gputrain.engine.workers import (
    LOOK_SECONDS,
    ReceivedFirst,
    received_batches,
    restarting_workers,
    running_workers,
    start_worker,
)
from gputrain.errors import UserError
from gputrain.hw.plan import Plan
from gputrain.hw.ranks import SINGLE, Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")
StartMethod = Literal["fork", "forkserver", "spawn"]


class DataWarning(UserWarning):
    """A flaw in the data that does not stop the training. The loader logs each text once, for all workers."""


class Sample(NamedTuple):
    """The key of one training sample: an item, and the epoch in which it is read."""

    epoch: int
    item: int


@lru_cache(maxsize=1)  # This keeps the current epoch's order.
def permutation(seed: int, epoch: int, item_count: int) -> npt.NDArray[np.int64]:
    """Returns the order of the items 0 .. item_count - 1 in an epoch, read-only.

    It sorts raw 64-bit words, which numpy keeps stable from version to version (NEP 19), unlike
    `Generator.permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(0, epoch))).random_raw(item_count)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def item_rng(seed: int, epoch: int, item: int) -> np.random.Generator:
    """Returns the random generator of one sample: the same in every worker, independent of all other samples."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1, epoch, item))))


def samples(seed: int, item_count: int, start: int, stop: int) -> list[Sample]:
    """Returns samples number start .. stop - 1 (at least one) of the endless sequence of epochs."""
    epochs, positions = np.divmod(np.arange(start, stop), item_count)
    orders = [permutation(seed, epoch, item_count)[positions[epochs == epoch]] for epoch in np.unique(epochs).tolist()]
    return [Sample(*pair) for pair in zip(epochs.tolist(), np.concatenate(orders).tolist(), strict=True)]


@dataclass(frozen=True)
class Stream:
    """The batch sampler of `loader`: batches of the samples start_sample .. stop_sample - 1.

    A batch may span epochs, and no sample is dropped. The last batch is shorter if the sizes do not divide.
    """

    item_count: int
    seed: int
    batch_size: int
    start_sample: int
    stop_sample: int
    ranks: Ranks = SINGLE  # Each rank reads its own part of every batch.

    def __len__(self) -> int:
        """Returns the number of batches."""
        return max(0, -(-(self.stop_sample - self.start_sample) // self.batch_size))

    def __iter__(self) -> Iterator[list[Sample]]:
        for start in range(self.start_sample, self.stop_sample, self.batch_size):
            batch = samples(self.seed, self.item_count, start, min(start + self.batch_size, self.stop_sample))
            yield batch[self.ranks.rows(len(batch))]

    def after(self, batches: int) -> "Stream":
        """Returns the sampler without its first batches."""
        return replace(self, start_sample=min(self.stop_sample, self.start_sample + batches * self.batch_size))

    def epochs(self) -> Iterator["Stream"]:
        """Yields samplers, each with the batches that begin in one epoch."""
        start = self.start_sample
        while start < self.stop_sample:
            left_in_epoch = self.item_count - start % self.item_count
            batches = -(-left_in_epoch // self.batch_size)
            stop = min(start + batches * self.batch_size, self.stop_sample)
            yield replace(self, start_sample=start, stop_sample=stop)
            start = stop


class SampleSource(Protocol):
    """A data set for `loader`: it can be pickled, and raises UserError for problems that a user can solve.

    If torch's `default_collate` cannot collate its items, it has a method `collate(items)`.
    """

    def __getitem__(self, sample: Sample, /) -> Any: ...


class Message(NamedTuple):
    """A worker's message: a batch, or the error in its place, and the texts of warnings."""

    batch: Any
    error: UserError | None
    warnings: list[str]


@dataclass(frozen=True)
class Reader(ReceivedFirst):
    """Reads a batch, in a worker. UserErrors and DataWarnings are sent as data, and the main process reports them."""

    dataset: SampleSource

    def __getitems__(self, keys: list[Sample]) -> Message:
        from torch.utils.data import default_collate

        batch, problem = None, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", DataWarning)
            try:
                collate = getattr(self.dataset, "collate", default_collate)
                batch = collate([self.dataset[key] for key in keys])
            except UserError as error:
                problem = error
        return Message(batch, problem, [str(warning.message) for warning in caught])


def loader(
    dataset: SampleSource,
    stream: Stream,
    *,
    num_workers: int,
    prefetch: int = 2,
    pin_memory: bool = False,
    persistent: bool = True,
    start_method: StartMethod | None = None,
) -> Generator[Any, None, None]:
    """Yields the batches of a stream in order, collated by the data set or by torch's `default_collate`.

    Each of `num_workers` processes prefetches `prefetch` batches; 0 reads in this process. Persistent workers live as
    long as the stream, others are restarted each epoch; a worker that dies is replaced. torch's global random state is
    not changed. Raises UserError if workers die repeatedly, and the UserErrors of the data set.
    """
    reported: set[str] = set()
    for part in [stream] if persistent else stream.epochs():

        def open_from(given: int, part: Stream = part) -> Generator[Message, None, None]:
            return _messages(dataset, part.after(given), num_workers, prefetch, pin_memory, start_method)

        with closing(restarting_workers(open_from)) as messages:
            for message in messages:
                for text in message.warnings:
                    if text not in reported:
                        log.warning("%s", text)
                        reported.add(text)
                if message.error is not None:
                    raise message.error
                yield message.batch


def batches(
    dataset: SampleSource,
    items: int,
    steps: StepSchedule,
    plan: Plan,
    first: int,
    last: int,
    ranks: Ranks = SINGLE,
) -> Generator[Any, None, None]:
    """Yields the batches of the steps `first` to `last` - 1 of a training, with the workers of the plan; of each batch
    the part of this rank."""
    stream = Stream(
        item_count=items,
        seed=steps.schedule.seed,
        batch_size=steps.items_per_step,
        start_sample=steps.items_seen(first),
        stop_sample=steps.items_seen(last),
        ranks=ranks,
    )
    return loader(
        dataset,
        stream,
        num_workers=int(plan.num_workers.value),
        prefetch=int(plan.prefetch_factor.value),
        pin_memory=bool(plan.pinned_memory.value),
        persistent=bool(plan.persistent_workers.value),
    )


def _messages(
    dataset: SampleSource, stream: Stream, num_workers: int, prefetch: int, pin_memory: bool, start_method: str | None
) -> Generator[Message, None, None]:
    import torch
    from torch.utils.data import DataLoader

    reader: Any = Reader(dataset)
    batches: Any = DataLoader(
        reader,
        batch_sampler=stream,
        collate_fn=_identity,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        timeout=LOOK_SECONDS if num_workers else 0,
        worker_init_fn=start_worker,
        multiprocessing_context=start_method if num_workers else None,
        generator=torch.Generator(),  # Otherwise every iterator draws from the global one, and a resumed run differs.
    )
    with running_workers(lambda: iter(batches)) as (iterator, workers):
        yield from received_batches(iterator, workers)


def _identity(message: Any) -> Any:
    return message
