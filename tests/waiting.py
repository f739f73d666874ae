"""Time in tests: a clock that a test sets, and waits whose limit only a defect reaches. No result depends on how long
anything takes."""

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HANG_SECONDS = 200.0  # Below pytest's own limit for a test, so that a test that waits in vain says for what.


def wait_until(reached: Callable[[], bool], what: str, is_over: Callable[[], bool] = lambda: False) -> None:
    """Wait for a condition. Fails if what should bring it about `is_over` before."""
    ends = time.monotonic() + HANG_SECONDS
    while not reached():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        assert not is_over() or reached(), f"there is nothing to wait for any more: {what}"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Return True if a process, by its number on Linux, has ended, whether its parent has noticed or not."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # The file goes with its process.
        return True


class Clock:
    """Takes the place of the module `time` in other modules. Its time passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
