"""Signals that end a training: the first between two steps, with everything saved, the second at once."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from gputrain.errors import Stopped

log = logging.getLogger(__name__)


class StopRequested(BaseException):
    """A signal asks to stop, and nothing is under way that has to be finished first."""


class StopSignal:
    """Turns Ctrl-C, SIGTERM and a closed terminal into a flag, and into StopRequested at the next wait for a batch.

    A second signal interrupts at once, or as soon as a save that is under way is done. What was ignored before, as
    SIGHUP is under nohup, stays ignored.
    """

    def __init__(self, how_to_resume: Callable[[], str]) -> None:
        self.how_to_resume = how_to_resume
        self.requested = ""
        self.before: dict[int, Any] = {}
        self._is_held = self._interrupts = self._waits = False

    def __enter__(self) -> "StopSignal":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
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
                f"{self.requested}, and once more: stopped at once; what the last checkpoint does not hold is lost",
                hint=self.how_to_resume(),
            ) from None

    @contextlib.contextmanager
    def ends_waiting(self) -> Iterator[None]:
        """Have a request raise StopRequested inside, at once: what is waited for may never come."""
        self._waits = True
        try:
            if self.requested:
                raise StopRequested
            yield
        finally:
            self._waits = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Finish what is done inside before a second signal interrupts."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._interrupts:
            raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._is_held:
            self._interrupts = True
            log.warning("stopping as soon as the checkpoint is saved")
            return
        if self.requested:
            raise KeyboardInterrupt
        names = {"SIGINT": "interrupted", "SIGTERM": "asked to terminate", "SIGHUP": "the terminal was closed"}
        self.requested = names[signal.Signals(number).name]
        log.warning("%s: finishing the step and saving; once more to stop at once", self.requested)
        if self._waits:
            raise StopRequested
