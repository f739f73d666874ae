"""Worker processes that read batches. They ignore signals to the process group, and are replaced when they die.

SIGINT, SIGTERM, SIGHUP and SIGUSR1 often reach every process of a group at once (Ctrl-C, scancel, systemd, containers).
Only the main process handles them, and it needs its workers until its checkpoint is saved. After the death of a worker,
reading continues at the first missing batch, because the samples of a batch depend on its number only.
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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gputrain.engine.stop import CAUSES
from gputrain.errors import UserError

AnyBatch = TypeVar("AnyBatch")
log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # Interval at which workers are checked while waiting for a batch.
HANG_SECONDS = 60.0  # Time without a batch after which a warning is logged.
LEAVING_SECONDS = 2.0  # Time for workers to end by themselves.
DEATHS, WITHIN_BATCHES = 3, 100  # The run ends after this many deaths within this many batches.

ACCESS_VIOLATION = 0xC0000005  # Windows' counterpart of SIGSEGV.
# Windows has neither SIGHUP nor SIGUSR1.
GROUP_SIGNALS = tuple(getattr(signal, name) for name in CAUSES if hasattr(signal, name))


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
            code = failed_code(workers)
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


def failed_code(workers: Iterable[BaseProcess]) -> int:
    """Returns the exit code of the first worker that failed, or 0."""
    return next((worker.exitcode for worker in workers if worker.exitcode), 0)


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
