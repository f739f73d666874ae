"""One thread that writes checkpoints while the training goes on."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gputrain.engine.snapshot import HostSnapshot

W = TypeVar("W")


class BackgroundWriter(Generic[W]):
    """Runs one job at a time in a thread, with the memory for the copies that it writes.

    Signals interrupt the main thread only, so that nothing stops a job between two of its steps but the end of the
    process.
    """

    def __init__(self) -> None:
        self.snapshot = HostSnapshot()
        self._thread: threading.Thread | None = None
        self._result: W | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_result(self) -> bool:
        """True if a job has ended whose result has not been fetched yet."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, job: Callable[[], W]) -> None:
        """Start a job. The result of the one before must have been fetched."""
        assert self._thread is None

        def run() -> None:
            try:
                self._result = job()
            except BaseException as error:  # The main thread raises it in `finish`.
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint writer")
        self._thread.start()

    def finish(self) -> W | None:
        """Wait for the job and return its result, or None if there is none. Raises the error of the job."""
        if self._thread is None:
            return None
        self._thread.join()
        result, error = self._result, self._error
        self._thread = self._result = self._error = None
        if error is not None:
            raise error
        return result
