"""The order of the data, and the loader with its worker processes.

The order is computed, not stored. Sample number k, counted from 0 over the whole run, is item
`permutation(seed, k // n, n)[k % n]` of n, and its random numbers are `item_rng(seed, k // n, item)`. So a run that
resumes at sample k reads exactly what an uninterrupted one would, with any number of workers.

torch is imported when `loader` is called, because preparing data does not need it.

Workers ignore signals to the process group. SIGINT, SIGTERM, SIGHUP and SIGUSR1 often reach every process of a group at
once (Ctrl-C, scancel, systemd, containers). Only the main process handles them, and it needs its workers until its
checkpoint is saved. After the death of a worker, reading continues at the first missing batch.
"""

import atexit
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gputrain.engine.schedule import StepSchedule
from gputrain.engine.stop import CAUSES
from gputrain.errors import UserError
from gputrain.hw.plan import Plan
from gputrain.hw.ranks import SINGLE, Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")
AnyBatch = TypeVar("AnyBatch")
StartMethod = Literal["fork", "forkserver", "spawn"]

LOOK_SECONDS = 0.5  # Interval at which workers are checked while waiting for a batch.
HANG_SECONDS = 60.0  # Time without a batch after which a warning is logged.
LEAVING_SECONDS = 2.0  # Time for workers to end by themselves.
DEATHS, WITHIN_BATCHES = 3, 100  # The run ends after this many deaths within this many batches.

ACCESS_VIOLATION = 0xC0000005  # Windows' counterpart of SIGSEGV.
# Windows has neither SIGHUP nor SIGUSR1.
GROUP_SIGNALS = tuple(getattr(signal, name) for name in CAUSES if hasattr(signal, name))


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

    @property
    def item_bytes(self) -> int: ...  # Size of an item in a batch.

    def __len__(self) -> int: ...

    def __getitem__(self, sample: Sample, /) -> Any: ...


# ---------------------------------------------------------------------------------------------------- worker processes


def describe_exit(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit code.

    multiprocessing and subprocess report a signal as a negative number.
    """
    if code == ACCESS_VIOLATION:
        return "access violation"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def remedy_for_exit(code: int) -> str:
    """Return advice on what to try after a worker process ended with this code."""
    if describe_exit(code) == "SIGKILL":
        return "the system kills processes when memory runs out: run it again with a lower --num-workers"
    if describe_exit(code) == "SIGBUS":
        return "shared memory may be full: enlarge a container's /dev/shm (--shm-size), or lower --num-workers"
    return "run it again with --num-workers 0, where the cause is printed"


class WorkerDied(Exception):
    """A worker process ended early, with this exit code; None: it is not known."""

    def __init__(self, code: int | None) -> None:
        how = "the process, or the one that starts it, was killed" if code is None else describe_exit(code)
        super().__init__(f"a data worker process died ({how})")
        self.code = -9 if code is None else code


def restarting_workers(
    open_from: Callable[[int], Generator[AnyBatch, None, None]],
) -> Generator[AnyBatch, None, None]:
    """Yields batches in order. `open_from(count)` starts workers and yields the batches after the first `count`; it is
    called again whenever it raises WorkerDied.

    Raises UserError when workers die repeatedly.
    """
    given, deaths = 0, deque[int](maxlen=DEATHS)
    while True:
        try:
            with closing(open_from(given)) as batches:
                for batch in batches:
                    given += 1
                    yield batch
            return
        except WorkerDied as death:
            problem, advice = str(death), remedy_for_exit(death.code)
        deaths.append(given)
        if len(deaths) == DEATHS and given - deaths[0] < WITHIN_BATCHES:
            raise UserError(
                f"data worker processes die repeatedly: {problem}",
                hint=advice,
            )
        log.warning("%s; new workers continue at the missing batch", problem)
        # A killed process exists for a moment longer: if it is the one that forks workers, multiprocessing would still
        # ask it for new ones, and fail again.
        time.sleep(LOOK_SECONDS)


def received_batches(iterator: Iterator[AnyBatch], workers: Sequence[BaseProcess]) -> Iterator[AnyBatch]:
    """Yields the batches of torch's iterator, which has a timeout of LOOK_SECONDS. Raises WorkerDied."""
    since = time.monotonic()
    warn_after = HANG_SECONDS
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            if "in DataLoader worker process" in str(error):  # An error of the data set, as torch passes it on.
                raise
            too_slow = "DataLoader timed out" in str(error)
            if workers and not too_slow:  # A worker has died; its exit code may arrive a moment later.
                wait([worker.sentinel for worker in workers], timeout=LOOK_SECONDS)
            code = next((worker.exitcode for worker in workers if worker.exitcode), 0)
            lost = isinstance(error, (EOFError, ConnectionError)) or "exited unexpectedly" in str(error)
            if lost and not code:
                raise WorkerDied(None) from None
            if not code and not too_slow:
                raise
        else:
            yield batch
            since, warn_after = time.monotonic(), HANG_SECONDS
            continue
        if code:
            raise WorkerDied(code)
        if time.monotonic() - since > warn_after:
            warn_after *= 2
            log.warning(
                "no batch for %.0f s: the data workers (processes %s) or the disk that they read from hang",
                time.monotonic() - since,
                ", ".join(str(worker.pid) for worker in workers),
            )


@contextmanager
def running_workers(start: Callable[[], Any]) -> Iterator[tuple[Any, list[BaseProcess]]]:
    """Yields torch's iterator and its worker processes, which `start` creates. All have ended at the exit."""
    before = set(multiprocessing.active_children())
    with ExitStack() as ending:
        with (
            _without_torchs_sigchld_handler(),
            signals_blocked(GROUP_SIGNALS),
        ):  # This may raise at its end, when the workers already run.
            try:
                iterator = start()
            except (EOFError, ConnectionError):  # A worker or the process that forks workers has been killed.
                _kill(child for child in multiprocessing.active_children() if child not in before)
                raise WorkerDied(None) from None
            workers = list(getattr(iterator, "_workers", ()))  # Those that have ended already, too.
            if workers:
                kill = functools.partial(_kill, workers)
                # At exit, multiprocessing would send them SIGTERM, which they ignore, and wait for ever.
                atexit.register(kill)
                ending.callback(atexit.unregister, kill)
                ending.callback(_end, iterator, kill)
        yield iterator, workers


def _end(iterator: Any, kill: Callable[[], None]) -> None:
    """Let the workers end by themselves, or kill them."""
    patience = threading.Timer(LEAVING_SECONDS, kill)
    patience.daemon = True
    patience.start()
    iterator._shutdown_workers()  # Otherwise garbage collection does it at an arbitrary time.
    patience.cancel()


def _kill(workers: Iterable[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def start_worker(worker: int) -> None:
    """Prepare a worker process: it ignores signals to the group, and the main process may stop reading or end."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _ignore_closed_connections
    threading.Thread(target=_end_with_main_process, daemon=True).start()


def _end_with_main_process() -> None:
    """Ends this process when the main process has ended, even by SIGKILL. torch's own workers look at their parent
    only, which is not the main process but the one that forks workers, where there is such a one."""
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os._exit(1)


class ReceivedFirst:
    """The first object that a worker receives when it starts without a fork, before its queues. From then on it prints
    nothing about closed connections."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        sys.excepthook = _ignore_closed_connections
        self.__dict__.update(state)


def _ignore_closed_connections(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception, except when it says that the main process has closed its connection.

    A signal can interrupt the main process while it fetches the shared memory of a batch. The thread of
    multiprocessing.resource_sharer that serves it here passes such errors to sys.excepthook, and goes on. The main
    process can also end while a worker starts, whose queues have lost their semaphores then.
    """
    frames = traceback.extract_tb(trace)
    lost_semaphore = kind is FileNotFoundError and frames and Path(frames[-1].filename).name == "synchronize.py"
    if not lost_semaphore and not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


@contextmanager
def signals_blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block the signals in processes that start in the block until they can ignore them; this process receives them
    afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_torchs_sigchld_handler() -> Iterator[None]:
    """Keep torch from raising a worker's death at an arbitrary line of the training step; the next batch raises it. Its
    handler is removed as well where another loader of this process has installed it before."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    torchs = getattr(before, "__module__", "").startswith("torch.")
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if torchs or before is None else before)


# ---------------------------------------------------------------------------------------------------------- the loader


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
