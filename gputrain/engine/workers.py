"""Worker processes that read batches: they outlive signals to the process group, and are replaced when they die.

SIGINT, SIGTERM and SIGHUP often reach every process of a group at once (Ctrl-C, scancel, systemd, containers). The main
process alone decides what they mean, and needs its workers until its checkpoint is saved. A worker that dies is
replaced by reading on from the first batch that it owes: which samples a batch has depends on its number alone.
"""

import atexit
import functools
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, TypeVar

from gputrain.errors import UserError
from gputrain.hw.exit_codes import describe, remedy

Batch = TypeVar("Batch")
log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between two looks at the workers while a batch is awaited
HANG_SECONDS = 60.0  # without a batch, after which a warning says so
LEAVING_SECONDS = 2.0  # that workers may take to end by themselves
DEATHS, WITHIN_BATCHES = 3, 100  # so many deaths within so many batches end the run

# Windows has no SIGHUP.
GROUP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class WorkerDied(Exception):
    """A worker process ended before the stream did, with this exit code. The message says how."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a data worker process died ({describe(code)})")
        self.code = code


def replacing_the_dead(open_from: Callable[[int], Generator[Batch, None, None]]) -> Generator[Batch, None, None]:
    """Batches in order. `open_from(count)` starts workers and gives those that follow the first `count`; it is called
    again whenever it raises WorkerDied.

    Raises UserError when workers die again and again.
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
            problem, advice = str(death), remedy(death.code)
        deaths.append(given)
        if len(deaths) == DEATHS and given - deaths[0] < WITHIN_BATCHES:
            raise UserError(
                f"data worker processes die again and again: {problem}",
                hint=advice,
            )
        log.warning("%s; new workers read on from the batch that it owes", problem)


def awaited(iterator: Iterator[Batch], workers: Sequence[BaseProcess]) -> Iterator[Batch]:
    """The batches of torch's iterator, made with a timeout of LOOK_SECONDS. Raises WorkerDied."""
    since = time.monotonic()
    warn_after = HANG_SECONDS
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            if "in DataLoader worker process" in str(error):  # which is how torch hands on what a data set raises
                raise
            too_slow = "DataLoader timed out" in str(error)
            if workers and not too_slow:  # a worker has died, and its exit code may come a moment later
                wait([worker.sentinel for worker in workers], timeout=LOOK_SECONDS)
            code = failed_code(workers)
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
                "no batch for %.0f s: the data workers (processes %s) hang, or the disk that they read from does",
                time.monotonic() - since, ", ".join(str(worker.pid) for worker in workers),
            )  # fmt: skip


def failed_code(workers: Iterable[BaseProcess]) -> int:
    """The exit code of the first worker that failed; 0 while all are well."""
    return next((worker.exitcode for worker in workers if worker.exitcode), 0)


@contextmanager
def started(start: Callable[[], Any]) -> Iterator[tuple[Any, list[BaseProcess]]]:
    """Torch's iterator and its worker processes, which `start` starts. All have ended at the exit of the context."""
    before = set(multiprocessing.active_children())
    with ExitStack() as ending:
        with _sigchld_handler_kept(), held(GROUP_SIGNALS):  # which may raise at its end, and then workers run already
            iterator = start()
            workers = [child for child in multiprocessing.active_children() if child not in before]
            if workers:
                kill = functools.partial(_kill, workers)
                # At the program's end multiprocessing would send them SIGTERM, which they ignore, and wait for ever.
                atexit.register(kill)
                ending.callback(atexit.unregister, kill)
                ending.callback(_end, iterator, kill)
        yield iterator, workers


def _end(iterator: Any, kill: Callable[[], None]) -> None:
    """Have the workers end by themselves, or else kill them."""
    patience = threading.Timer(LEAVING_SECONDS, kill)
    patience.daemon = True
    patience.start()
    iterator._shutdown_workers()  # else garbage collection does it, at a time of its own choice
    patience.cancel()


def _kill(workers: Iterable[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def start_worker(worker: int) -> None:
    """Prepare a worker process: it ignores signals to the group, and the main process may stop reading at any time."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _ignore_closed_connections


def _ignore_closed_connections(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an exception, except when it says that the main process has closed its connection.

    A signal can interrupt the main process while it fetches the shared memory of a batch. The thread of
    multiprocessing.resource_sharer that serves it here passes such errors to sys.excepthook, and goes on.
    """
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, traceback)


@contextmanager
def held(signals: Iterable[int]) -> Iterator[None]:
    """Processes that start meanwhile are deaf to the signals before they can ignore them; this one hears them
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
def _sigchld_handler_kept() -> Iterator[None]:
    """Keep torch from raising a worker's death in whatever line the training step stands: the next batch tells it."""
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
