"""Data handling that all models share: order, loader, worker processes, held-out split, manifests.

The order is computed, not stored. Sample number k, counted from 0 over the whole run, is item
`permutation(seed, k // n, n)[k % n]` of n, and its random numbers are `item_rng(seed, k // n, item)`. So a run that
resumes at sample k reads exactly what an uninterrupted one would, with any number of workers.

torch is imported when `loader` is called, because preparing data does not need it.
"""

import errno
import hashlib
import json
import logging
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

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
from gputrain.stored import unreadable

log = logging.getLogger(__name__)

T = TypeVar("T")
StartMethod = Literal["fork", "forkserver", "spawn"]
Progress = Callable[[float, int], None]  # Arguments: items done, parts of one included, and items in all.

MANIFEST = "manifest.jsonl"
HELD_OUT_SHARE = 0.05
FEW_HELD_OUT, FEW_ITEMS = 4, 20  # Fewer held-out items are too few for figures, if there are so many items in all.
FINGERPRINT_BLOCK = 65536  # bytes
FULL_SCALE = 32768  # Magnitude of the largest 16-bit sample.


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


def share_that_holds_out(fingerprints: Iterable[str], command: str = "") -> str:
    """Returns as advice the option, of a train `command` if it is another one, that holds out four of the items of
    these fingerprints, or a quarter of fewer."""
    kinds = sorted(set(fingerprints))
    wanted = min(FEW_HELD_OUT, len(kinds) // 4)
    if wanted < 2:
        return "more of them make evaluations reliable"
    share = math.ceil(100 * (int(kinds[wanted - 1][:16], 16) + 1) / 2**64) / 100
    count = sum(is_held_out(kind, share) for kind in kinds)
    return f"{command} --held-out-share {share:g} holds out {count}".strip()


def read_rows(path: Path, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file, one per line. Raises UserError if a line is invalid or lacks a key."""
    keys = set(keys)
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not keys <= row.keys():
            raise unreadable(f"{path}, line {number}", "run gputrain prepare-data again to rebuild it")
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write JSON objects, one per line, atomically; a file that contains them already is not touched.

    Raises UserError if the folder cannot be written to.
    """
    # ASCII preserves file names that are not valid Unicode.
    content = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    with writing(path):
        if path.is_file() and path.read_bytes() == content:
            return
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn OSErrors of writing to `path` into a UserError."""
    try:
        yield
    except OSError as error:
        is_forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        hint = "choose a folder that you may write to" if is_forbidden else "free some space, or choose another folder"
        raise UserError(f"{path}: cannot be written ({error.strerror or error})", hint=hint) from None


def check_report(path: Path | None, keys: Sequence[str]) -> None:
    """Raises UserError if a file is there that is no earlier report, a JSON object or list of objects with one of the
    keys: a picture or a table of the user is not written over."""
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        content = None
    rows = content if isinstance(content, list) else [content]
    if not all(isinstance(row, dict) and any(key in row for key in keys) for row in rows):
        raise UserError(f"{path}: holds something else than a report", hint="name a new file for the report")


def output_names(names: Sequence[Path], stem_of: Callable[[Path], Path]) -> list[Path]:
    """Returns the name, without an ending, of what is made of each file: its stem, or all of its name where the stem is
    also that of another file, in any case, or another file's name."""
    stems = [stem_of(name) for name in names]
    keys = [str(stem).casefold() for stem in stems]
    times, whole = Counter(keys), {str(name).casefold() for name in names}
    return [
        stem if times[key] == 1 and key not in whole else name
        for name, stem, key in zip(names, stems, keys, strict=True)
    ]


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder whose files are moved to `folder` when the block is left without an error, each one
    complete on the disk. Raises UserError if the folder cannot be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".partial-") as name:
            yield Path(name)
            paths = sorted(Path(name).iterdir())
            for path in paths:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            for path in paths:
                os.replace(path, folder / path.name)


# ------------------------------------------------------------------------------------------------- progress and digests


def no_progress(done: float, total: int) -> None:
    """Reports no progress."""


@dataclass
class StepProgress:
    """Reports the progress of work in steps, the first of them at once: `next()` is called after each."""

    progress: Progress
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.progress(0, self.total)

    def next(self) -> None:
        self.done += 1
        self.progress(self.done, self.total)


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


# ------------------------------------------------------------------------------------------------- wav files of 16 bits


def to_int16(wave_T: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """16-bit samples of a wave in [-1, 1]; what lies beyond is clipped. Raises ValueError on NaN."""
    if np.isnan(wave_T).any():
        raise ValueError("a wave with NaN has no 16-bit samples")
    samples_T: npt.NDArray[np.int16] = np.rint(wave_T * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE - 1).astype(np.int16)
    return samples_T


def write_wav(path: Path, wave_T: npt.NDArray[Any], rate_hz: int) -> None:
    """Write one channel as 16-bit wav. Raises UserError if the file cannot be written, ValueError on NaN."""
    import soundfile  # A training of pictures does without it.

    samples_T = to_int16(wave_T)
    try:
        soundfile.write(path, samples_T, rate_hz, subtype="PCM_16", format="WAV")
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be written: {error.error_string}") from None
