"""Signals that end a training: the first one between two steps, with everything saved, the second one at once.

The limit of --max-time requests the same end as a first signal.
"""

import contextlib
import logging
import signal
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


class StopRequested(BaseException):
    """A signal requests a stop while no step or save is in progress."""


class StopSignal:
    """Turns Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a flag, and into StopRequested at the next wait for a
    batch.

    A second signal interrupts at once, or after a save that is in progress. Signals that were ignored before, such as
    SIGHUP under nohup, stay ignored.
    """

    def __init__(self, how_to_resume: Callable[[], str], ranks: Ranks = SINGLE) -> None:
        """Several ranks must stop after the same step, which they `agree` on."""
        self.how_to_resume, self.ranks = how_to_resume, ranks
        self.requested = ""
        self.agreed = ranks.count == 1
        self.before: dict[int, Any] = {}
        self._held = 0  # Number of blocks of `held` that are open.
        self._interrupts = self._waits = False

    def __enter__(self) -> "StopSignal":
        for name in CAUSES:
            number = getattr(signal, name, None)  # Windows has neither SIGHUP nor SIGUSR1.
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._request)
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
