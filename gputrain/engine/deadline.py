"""--max-time: a run stops early enough to save before a limit that is counted from the start of its command."""

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gputrain.errors import UserError

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # Seconds of each unit, from the largest to the smallest.
DURATION = re.compile("".join(rf"(?:(\d+){unit})?" for unit in UNITS), re.ASCII)
RECENT_STEPS = 20
SAVE_MARGIN = 1.5  # A save may take this many times as long as the last one.
EXIT_SECONDS = 2.0  # Time to end workers and the process.
REPORT_SECONDS = 3.0  # Time of a command to write a report at the end of its run.
WATCH_SECONDS = 0.1  # Interval at which a wait for data is compared with the limit.
# Estimate of a save's duration before the first one: a slow disk, and the time to open files on a network drive.
SLOW_BYTES_PER_SECOND, SLOW_START_SECONDS = 100e6, 3.0


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as 90s, 45m, 3h50m or 1d2h. Raises UserError for any other text."""
    match = DURATION.fullmatch(text)
    counts = [int(count) if count else None for count in match.groups()] if match else []
    given = [(count, unit) for count, unit in zip(counts, UNITS, strict=False) if count is not None]
    # A part that follows a larger one is less than one of the larger: 1h90m is more likely a mistake than 2h30m.
    whole = {"h": 24, "m": 60, "s": 60}
    overflows = any(count >= whole[unit] for count, unit in given[1:])
    seconds = float(sum(count * UNITS[unit] for count, unit in given))
    if not seconds or overflows:
        raise UserError(
            f"max_time is {text!r}, expected a duration such as 90s, 45m, 3h50m or 1d2h",
            hint="leave --max-time out for no limit",
        )
    return seconds


@dataclass
class CommandClock:
    """The start of the command, which the command line sets before it loads anything."""

    began: float | None = None

    def start(self) -> None:
        self.began = time.monotonic()


COMMAND_CLOCK = CommandClock()


@dataclass
class Deadline:
    """Decides after each step whether a run must stop now to have saved at `limit_seconds`, given how long its steps,
    its saves and its reports (samples and evaluations) have taken. A limit of 0 is none."""

    limit_seconds: float = 0.0
    began: float = 0.0  # Start of the command on the clock of time.monotonic.
    save_bytes: int = 0  # Size of a checkpoint, for an estimate before the first save.
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    report_seconds: dict[str, float] = field(default_factory=dict)  # Longest duration of each kind of report.
    _stepped_at: float = 0.0  # When the last step ended; 0 before the first one.
    _left_out: float = 0.0  # Seconds since then that belong to no step.

    @classmethod
    def of(cls, max_time: str) -> "Deadline":
        """Return the deadline of --max-time, which is counted from the start of the command, or from now on if another
        program calls gputrain."""
        now = time.monotonic()
        return cls(seconds_of(max_time) if max_time else 0.0, COMMAND_CLOCK.began or now)

    @contextlib.contextmanager
    def beside_the_steps(self, report: str = "") -> Iterator[None]:
        """Leave the time of the block out of the duration of the step; it is that of a kind of report, if named."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._left_out += seconds
            if report:
                self.report_seconds[report] = max(seconds, self.report_seconds.get(report, 0.0))

    def add_step(self, now: float) -> None:
        """Note that a step has ended. The first one may have compiled, and says nothing about the others."""
        if self._stepped_at:
            self.step_seconds.append(now - self._stepped_at - self._left_out)
        self._stepped_at, self._left_out = now, 0.0

    def saving_seconds(self, save_seconds: float, saves: int, *, hangs: bool = False) -> float:
        """Return the time that `saves` and the end of the process may take, and the end of data workers that hang."""
        save = save_seconds or SLOW_START_SECONDS + self.save_bytes / SLOW_BYTES_PER_SECOND
        return SAVE_MARGIN * saves * save + EXIT_SECONDS * (2 if hangs else 1)

    def reserve_seconds(self, save_seconds: float, *, saves: int, reports: list[str]) -> float:
        """Return the time that a further step, its `reports`, `saves` and the end of the process may take.
        `save_seconds` is the duration of the last save; 0 before the first one."""
        reported = sum(self.report_seconds.get(kind, 0.0) for kind in reports)
        return max(self.step_seconds, default=0.0) + reported + self.saving_seconds(save_seconds, saves)

    @contextlib.contextmanager
    def watched(self, seconds_to_leave: Callable[[], float], end_wait: Callable[[], None]) -> Iterator[None]:
        """Call `end_wait` in a thread as soon as the limit is only `seconds_to_leave` away, because a wait for data in
        the block may last for ever."""
        left = threading.Event()

        def watch() -> None:
            while not left.wait(WATCH_SECONDS):
                if self.is_reached(time.monotonic(), seconds_to_leave()):
                    end_wait()
                    return

        thread = threading.Thread(target=watch, name="max-time", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def is_reached(self, now: float, reserve_seconds: float) -> bool:
        return 0 < self.limit_seconds <= now - self.began + reserve_seconds
