"""Signals that end a training: the first one between two steps, with everything saved, the second one at once.

The limit of --max-time, which is counted from the start of the command, requests the same end as a first signal, early
enough to save before it. Before and after the steps, when there is nothing to save, a signal interrupts the command.
"""

import _thread
import contextlib
import logging
import os
import re
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import FrameType
from typing import Any

from gputrain.errors import Stopped, UserError
from gputrain.hw.ranks import SINGLE, Ranks

log = logging.getLogger(__name__)

# The signals that end a training, and what they mean. Batch systems send SIGUSR1 some time before they end a job.
CAUSES = {
    "SIGINT": "interrupted",
    "SIGTERM": "asked to terminate",
    "SIGBREAK": "asked to terminate",  # On Windows: Ctrl-Break, and what a program can send to another one.
    "SIGHUP": "the terminal was closed",
    "SIGUSR1": "asked to stop by SIGUSR1",
}
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # Seconds of each unit, from the largest to the smallest.
CLOCK_TIME = re.compile(r"\d?\d:\d\d", re.ASCII)
DURATION = re.compile("".join(rf"(?:(\d{{1,6}}){unit})?" for unit in UNITS), re.ASCII)  # At most some thousand years.
RECENT_STEPS = 20
PACE_STEPS = 500  # Steps over which the pace is averaged that tells how many are left until --finish-by.
SAVE_MARGIN = 1.5  # A save may take this many times as long as the last one.
EXIT_SECONDS = 2.0  # Time to end workers and the process.
REPORT_SECONDS = 3.0  # Time of a command to write a report at the end of its run.
WATCH_SECONDS = 0.1  # Interval at which a wait for data is compared with the limit.
# Estimate of a save's duration before the first one: a slow disk, and the time to open files on a network drive.
SLOW_BYTES_PER_SECOND, SLOW_START_SECONDS = 100e6, 3.0


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Call a handler at each of the signals that end a training. Returns the handlers before.

    Signals that were ignored before, such as SIGHUP under nohup, stay ignored.
    """
    before: dict[int, Any] = {}
    for name in CAUSES:
        number = getattr(signal, name, None)  # Windows has neither SIGHUP nor SIGUSR1, and others have no SIGBREAK.
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

    def __init__(self, ranks: Ranks = SINGLE) -> None:
        """Several ranks must stop after the same step, which they `agree` on."""
        self.ranks = ranks
        self.requested = ""
        self.agreed = ranks.count == 1
        self.before: dict[int, Any] = {}
        self._is_signalled = False  # True after the first signal.
        self._held = 0  # Number of blocks of `second_signal_delayed` that are open.
        self._interrupts = self._waits = False
        self._interrupts_wait = False  # True if the next signal is that of `interrupt_wait`.

    @contextlib.contextmanager
    def handled(self, how_to_resume: Callable[[], str]) -> Iterator[None]:
        """Handle the signals while the block runs. Raises Stopped when a second signal interrupts it."""
        self.before = handle_signals(self._request)
        try:
            yield
        except KeyboardInterrupt:
            raise Stopped(
                f"{self.requested}, twice: stopped at once; steps since the last checkpoint are lost",
                hint=how_to_resume(),
            ) from None
        finally:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def agree(self) -> None:
        """Every rank stops after the step that it has just completed."""
        self.requested = self.requested or "another rank was asked to stop"
        self.agreed = True

    def request(self, cause: str) -> None:
        """Request a stop after the present step, unless one is requested already."""
        self.requested = self.requested or cause

    def interrupt_wait(self, cause: str) -> None:
        """Request a stop from another thread than the main one, and end the wait for a batch that may never arrive."""
        self.request(cause)
        if not self._waits or not self.before:
            return
        self._interrupts_wait, number = True, next(iter(self.before))
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:  # Windows
            _thread.interrupt_main(number)

    @contextlib.contextmanager
    def interruptible_wait(self) -> Iterator[None]:
        """Let a request raise StopRequested in the block at once, because the awaited batch may never arrive."""
        self._waits = True
        try:
            if self.requested and self.agreed:
                raise StopRequested
            yield
        finally:
            self._waits = False

    @contextlib.contextmanager
    def second_signal_delayed(self) -> Iterator[None]:
        """Delay a second signal until the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self._interrupts and not self._held:
            raise KeyboardInterrupt

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts_wait:
            self._interrupts_wait = False
            if self._waits:
                raise StopRequested
            return
        if self.requested and self.ranks.under_torchrun:  # It passes on a signal that the whole group has got already.
            return
        if self._is_signalled and self._held:
            self._interrupts = True
            log.warning("stopping as soon as the checkpoint is saved")
            return
        if self._is_signalled:
            raise KeyboardInterrupt
        self._is_signalled = True
        self.request(CAUSES[signal.Signals(number).name])
        log.warning("%s: finishing the step and saving; a second signal stops at once", self.requested)
        if self._waits and self.agreed:
            raise StopRequested


# ---------------------------------------------------------------------------------------------- --max-time, --finish-by


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 45m, 3h50m or 1d2h. Raises UserError for any other text."""
    seconds = duration_seconds(text)
    if seconds is None:
        raise UserError(
            f"max_time is {text!r}, expected a duration such as 90s, 45m, 3h50m or 1d2h",
            hint="leave --max-time out for no limit",
        )
    return seconds


def duration_seconds(text: str) -> float | None:
    """Returns the seconds of a duration such as 3h50m; None for any other text."""
    match = DURATION.fullmatch(text)
    counts = [int(count) if count else None for count in match.groups()] if match else []
    given = [(count, unit) for count, unit in zip(counts, UNITS, strict=False) if count is not None]
    # A part that follows a larger one is less than one of the larger: 1h90m is more likely a mistake than 2h30m.
    largest = {"h": 24, "m": 60, "s": 60}
    overflows = any(count >= largest[unit] for count, unit in given[1:])
    seconds = float(sum(count * UNITS[unit] for count, unit in given))
    return None if not seconds or overflows else seconds


def seconds_to_finish(text: str) -> float:
    """Returns the seconds from the start of the command to the time of --finish-by: a duration such as 6h, the next
    18:30, or a date and time such as 2027-01-31T18:30, for which they are negative if it is past. Raises UserError for
    any other text."""
    seconds = duration_seconds(text)
    if seconds is not None:
        return seconds
    elapsed = 0.0 if COMMAND_CLOCK.began is None else time.monotonic() - COMMAND_CLOCK.began
    began = datetime.now() - timedelta(seconds=elapsed)
    try:
        if CLOCK_TIME.fullmatch(text):
            hours, minutes = map(int, text.split(":"))
            finish = began.replace(hour=hours, minute=minutes, second=0, microsecond=0)
            finish += timedelta(days=finish <= began)
        elif ":" in text:
            finish = datetime.fromisoformat(text)
        else:
            raise ValueError
    except ValueError:
        raise UserError(
            f"finish_by is {text!r}, expected a duration such as 6h or 3h50m, or a time such as 18:30 or "
            f"{began:%Y-%m-%d}T18:30",
            hint="leave --finish-by out to train for --num-epochs",
        ) from None
    return finish.timestamp() - began.timestamp()


def finish_moment(text: str, stored: str = "") -> str:
    """Returns the time of --finish-by with its date and zone, such as 2027-01-31T18:30:00+01:00, whenever it is read.

    `stored` is the moment of the run that is resumed: the same time of day means the same day, also after it, since a
    script that restarts its command means the end that it has named before.
    """
    if CLOCK_TIME.fullmatch(text) and stored:
        with contextlib.suppress(ValueError):
            if datetime.fromisoformat(stored).astimezone().strftime("%H:%M") == text.rjust(5, "0"):
                return stored
    moment = datetime.now().astimezone() + timedelta(seconds=seconds_until(text) + 0.5)  # Rounded to seconds.
    return moment.astimezone().replace(microsecond=0).isoformat()


def seconds_until(finish_by: str) -> float:
    """Returns the seconds from now to the time of --finish-by; negative if it is past."""
    elapsed = 0.0 if COMMAND_CLOCK.began is None else time.monotonic() - COMMAND_CLOCK.began
    return seconds_to_finish(finish_by) - elapsed


def format_duration(seconds: float) -> str:
    """Returns a duration in its two largest units, from ten minutes on without seconds: "3 d 4 h", "3 h 12 min",
    "12 min", "1 min 40 s"."""
    minutes, seconds = divmod(round(seconds) if seconds < 600 else 60 * round(seconds / 60), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count) or "0 s"


@dataclass
class CommandClock:
    """The start of the command, which the command line sets before it loads anything."""

    began: float | None = None

    def start(self) -> None:
        self.began = time.monotonic()


COMMAND_CLOCK = CommandClock()


def cpu_seconds() -> float:
    """Returns the CPU-seconds of this process, all threads together, and of its children that have ended."""
    return sum(os.times()[:4])


@contextlib.contextmanager
def timed_part(name: str) -> Iterator[None]:
    """Log the seconds of a part of a training's start and its CPU-seconds, for --verbose."""
    began, cpu_began = time.monotonic(), cpu_seconds()
    try:
        yield
    finally:
        log.debug("start, %s: %.1f s, %.1f CPU-s", name, time.monotonic() - began, cpu_seconds() - cpu_began)


def log_start_until(what: str) -> None:
    """Log how long the command has taken until now, for --verbose."""
    seconds = 0.0 if COMMAND_CLOCK.began is None else time.monotonic() - COMMAND_CLOCK.began
    log.debug("start, from the command to %s: %.1f s, %.1f CPU-s", what, seconds, cpu_seconds())


@contextlib.contextmanager
def repeated(
    work: Callable[[], bool], seconds: float, name: str, patience: float | None = None
) -> Iterator[threading.Thread]:
    """Call `work` in a thread, at intervals of so many seconds, until it returns True or the block ends. The end of the
    block waits for the thread, for at most `patience` seconds."""
    left = threading.Event()

    def repeat() -> None:
        while not left.is_set() and not work():
            left.wait(seconds)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        left.set()
        thread.join(patience)


@dataclass
class Deadline:
    """Decides after each step whether a run must stop now to have saved at `limit_seconds`, given how long its steps,
    its saves and its reports (samples and evaluations) have taken, and how many steps are left until the training is to
    finish at `finish_seconds`. A limit of 0 is none."""

    limit_seconds: float = 0.0
    began: float = 0.0  # Start of the command on the clock of time.monotonic.
    save_bytes: int = 0  # Size of a checkpoint, for an estimate before the first save.
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    report_seconds: dict[str, float] = field(default_factory=dict)  # Longest duration of each kind of report.
    finish_seconds: float = 0.0
    ended_at: deque[float] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 1))  # When the last steps ended.
    _stepped_at: float = 0.0  # When the last step ended; 0 before the first one.
    _left_out: float = 0.0  # Seconds since then that belong to no step.

    @classmethod
    def of(cls, max_time: str, finish_by: str = "") -> "Deadline":
        """Return the deadline of --max-time and --finish-by, which are counted from the start of the command, or from
        now on if another program calls gputrain. A time that was past then is none: a cool-down goes on to its end."""
        now = time.monotonic()
        return cls(
            parse_duration(max_time) if max_time else 0.0,
            COMMAND_CLOCK.began or now,
            finish_seconds=max(0.0, seconds_to_finish(finish_by)) if finish_by else 0.0,
        )

    @property
    def is_set(self) -> bool:
        return bool(self.limit_seconds or self.finish_seconds)

    @property
    def last_seconds(self) -> float:
        """The time at which the run must have ended in any case."""
        return min(limit for limit in (self.limit_seconds, self.finish_seconds) if limit)

    @contextlib.contextmanager
    def not_counted(self, report: str = "") -> Iterator[None]:
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
        self.ended_at.append(now)

    def steps_left(self, now: float, reserve_seconds: float) -> int | None:
        """Return the number of steps until `finish_seconds`, less a reserve, at the pace of the last steps with the
        saves and reports among them, or that of the last few if they have become slower. Returns None while it is
        unknown: the pace of the first steps, which compile and read for the first time, counts only if less time is
        left than they have taken."""
        count = len(self.ended_at) - 1
        left = self.began + self.finish_seconds - now - reserve_seconds
        if left <= 0:
            return 0
        taken = now - self.ended_at[0]
        if count < 1 or (count <= RECENT_STEPS and left > taken):
            return None
        return int(left / max(taken / count, statistics.fmean(self.step_seconds)))

    def saving_seconds(self, save_seconds: float, saves: int, *, hangs: bool = False) -> float:
        """Return the time that `saves` and the end of the process may take, and the end of data workers that hang."""
        save = save_seconds or SLOW_START_SECONDS + self.save_bytes / SLOW_BYTES_PER_SECOND
        return SAVE_MARGIN * saves * save + EXIT_SECONDS * (2 if hangs else 1)

    def reserve_seconds(self, save_seconds: float, *, saves: int, reports: list[str]) -> float:
        """Return the time that a further step, its `reports`, `saves` and the end of the process may take.
        `save_seconds` is the duration of the last save; 0 before the first one. A kind of report that has not been made
        yet is expected to take as long as the other."""
        longest = max(self.report_seconds.values(), default=0.0)
        reported = sum(self.report_seconds.get(kind, longest) for kind in reports)
        return max(self.step_seconds, default=0.0) + reported + self.saving_seconds(save_seconds, saves)

    @contextlib.contextmanager
    def watched(self, seconds_to_leave: Callable[[], float], interrupt_wait: Callable[[], None]) -> Iterator[None]:
        """Call `interrupt_wait` in a thread as soon as the limit is only `seconds_to_leave` away, because a wait for
        data in the block may last for ever."""

        def watch() -> bool:
            is_over = self.last_seconds <= time.monotonic() - self.began + seconds_to_leave()
            if is_over:
                interrupt_wait()
            return is_over

        with repeated(watch, WATCH_SECONDS, "max-time"):
            yield

    def is_reached(self, now: float, reserve_seconds: float) -> bool:
        return 0 < self.limit_seconds <= now - self.began + reserve_seconds
