"""Signals that end a training: the first one between two steps, with everything saved, the second one at once.

The limit of --max-time requests the same end as a first signal. Before and after the steps, when there is nothing to
save, a signal interrupts the command.
"""

import _thread
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from gputrain.errors import Stopped
from gputrain.hw.ranks import SINGLE, Ranks

log = logging.getLogger(__name__)

# The signals that end a training, and what they mean. Batch systems send SIGUSR1 some time before they end a job.
CAUSES = {
    "SIGINT": "interrupted",
    "SIGTERM": "asked to terminate",
    "SIGHUP": "the terminal was closed",
    "SIGUSR1": "asked to stop by SIGUSR1",
}


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Call a handler at each of the signals that end a training. Returns the handlers before.

    Signals that were ignored before, such as SIGHUP under nohup, stay ignored.
    """
    before: dict[int, Any] = {}
    for name in CAUSES:
        number = getattr(signal, name, None)  # Windows has neither SIGHUP nor SIGUSR1.
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before


def interrupt_at_signals(code: int) -> None:
    """Have a signal raise KeyboardInterrupt with its cause, and a second one end the process at once with this exit
    code."""
    cause = ""

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal cause
        if not cause:
            cause = CAUSES[signal.Signals(number).name]
            raise KeyboardInterrupt(cause)
        os._exit(code)

    if threading.current_thread() is threading.main_thread():
        handle_signals(interrupt)


def leave_at_signals(code: int) -> None:
    """Have a signal end the process at once with its exit code, now that its work is done."""
    if threading.current_thread() is threading.main_thread():
        handle_signals(lambda number, frame: os._exit(code))


class StopRequested(BaseException):
    """A signal requests a stop while no step or save is in progress."""


class StopSignal:
    """Turns Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a flag, and into StopRequested at the next wait for a
    batch.

    A second signal interrupts at once, or after a save that is in progress.
    """

    def __init__(self, how_to_resume: Callable[[], str], ranks: Ranks = SINGLE) -> None:
        """Several ranks must stop after the same step, which they `agree` on."""
        self.how_to_resume, self.ranks = how_to_resume, ranks
        self.requested = ""
        self.agreed = ranks.count == 1
        self.before: dict[int, Any] = {}
        self._held = 0  # Number of blocks of `held` that are open.
        self._interrupts = self._waits = False
        self._ends_wait = False  # True if the next signal is that of `end_wait`.

    def __enter__(self) -> "StopSignal":
        self.before = handle_signals(self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if kind is KeyboardInterrupt:
            raise Stopped(
                f"{self.requested}, twice: stopped at once; steps since the last checkpoint are lost",
                hint=self.how_to_resume(),
            ) from None

    def agree(self) -> None:
        """Every rank stops after the step that it has just completed."""
        self.requested = self.requested or "another rank was asked to stop"
        self.agreed = True

    def request(self, cause: str) -> None:
        """Request a stop after the present step, unless one is requested already."""
        self.requested = self.requested or cause

    def end_wait(self, cause: str) -> None:
        """Request a stop from another thread than the main one, and end the wait for a batch that may never arrive."""
        self.request(cause)
        if not self._waits or not self.before:
            return
        self._ends_wait, number = True, next(iter(self.before))
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:  # Windows
            _thread.interrupt_main(number)

    @contextlib.contextmanager
    def ends_waiting(self) -> Iterator[None]:
        """Let a request raise StopRequested in the block at once, because the awaited batch may never arrive."""
        self._waits = True
        try:
            if self.requested and self.agreed:
                raise StopRequested
            yield
        finally:
            self._waits = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay a second signal until the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._interrupts and not self._held:
            raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._ends_wait:
            self._ends_wait = False
            if self._waits:
                raise StopRequested
            return
        if self.requested and self.ranks.under_torchrun:  # It passes on a signal that the whole group has got already.
            return
        if self.requested and self._held:
            self._interrupts = True
            log.warning("stopping as soon as the checkpoint is saved")
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested = CAUSES[signal.Signals(number).name]
        log.warning("%s: finishing the step and saving; a second signal stops at once", self.requested)
        if self._waits and self.agreed:
            raise StopRequested
