"""heartbeat.json of a run folder: what the training in it does now."""

import json
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from gputrain.files import replace_file

log = logging.getLogger(__name__)

HEARTBEAT = "heartbeat.json"
BEAT_SECONDS = 2.0  # Time between two writings.
END_SECONDS = 5.0  # A disk that does not answer keeps the training no longer from its end.


def time_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass
class Heartbeat:
    """Says what a training does now, to its terminal and, in a file, to whoever looks at its folder.

    A thread writes the file, so that it also comes while the training compiles or evaluates for minutes, and no more
    when the process is killed or frozen. `phase` is "step", or what the training does between or before the steps.
    """

    kind: str = ""
    host: str = field(default_factory=platform.node)
    process: int = field(default_factory=os.getpid)
    began: str = field(default_factory=time_now)
    time: str = ""  # When it was written.
    since: str = field(default_factory=time_now)  # When step or phase changed last.
    phase: str = "starting"
    step: int | None = None  # Completed steps; None before the data are read and planned.
    last_step: int | None = None
    ends_at: str = ""  # The moment of --max-time or --finish-by, at which the training has ended in any case.
    seconds_left: float | None = None

    @property
    def text(self) -> str:
        """Returns what the training does, as the terminal and the page say it."""
        text = "" if self.step is None else step_text(self.step, self.last_step)
        return ", ".join(filter(None, [text, self.phase if self.phase != "step" else ""]))

    def note(self, phase: str, step: int | None = None) -> None:
        self.phase, self.since = phase, time_now()
        self.step = self.step if step is None else step

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """Say that the training does this while the block runs."""
        before = self.phase
        self.note(phase)
        try:
            yield
        finally:
            self.note(before)

    @contextmanager
    def beating(self, folder: Path) -> Iterator[None]:
        """Write the file again and again while the block runs, and remove it then: one that is left is that of a
        process that was killed. An error of the disk is one warning."""
        path, left, warned = folder / HEARTBEAT, threading.Event(), set[str]()

        def write() -> None:
            while not left.is_set():
                self.time = time_now()
                try:
                    replace_file(path, [json.dumps(asdict(self)).encode()], is_synced=False)
                except OSError as error:
                    if not warned:
                        log.warning("%s cannot be written (%s); the training goes on", path, error.strerror or error)
                    warned.add(HEARTBEAT)
                left.wait(BEAT_SECONDS)

        thread = threading.Thread(target=write, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join(END_SECONDS)
            with suppress(OSError):
                path.unlink()


def step_text(step: int, last_step: int | None) -> str:
    return f"step {step}" + ("" if last_step is None else f"/{last_step}")
