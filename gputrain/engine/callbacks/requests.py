"""Requests to a training that runs: to save now, to stop, or to cool down.

Whoever asks for something writes request.json into the run folder, also from another machine with the same disk. A
thread of the training looks for it, so that no step waits for the disk. A request is for one start of a training, a
line of history.jsonl, and never reaches a later one.
"""

import contextlib
import json
import logging
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from gputrain.engine.callbacks import StepEnd, StepLoop
from gputrain.engine.run_folder import is_count, open_start
from gputrain.engine.stop import repeated
from gputrain.errors import UserError
from gputrain.files import write_text

log = logging.getLogger(__name__)

REQUEST = "request.json"
ASKED_TO_STOP = "asked to stop from gputrain watch"
Action = Literal["save", "stop", "cooldown"]
Attempt = list[Any]  # Time, host and process of a start, as history.jsonl has them.
MOST_BYTES = 4096
UNREADABLE = (OSError, ValueError, TypeError, RecursionError)
LOOK_SECONDS = 1.0  # Interval at which a training looks for a request.


class Request(NamedTuple):
    """A request; `steps` are those of a cool-down, 0: as many as usual."""

    action: Action
    steps: int
    attempt: Attempt


def send(folder: Path, action: Action, steps: int = 0) -> None:
    """Ask the training in a run folder for an action.

    Raises UserError if no training is known to run there, if it cannot cool down, if an earlier request still waits, or
    if the folder cannot be written to.
    """
    start = open_start(folder)
    if start is None:
        raise UserError(f"{folder}: no training is known to run there", hint="only a training that runs can be asked")
    if not is_count(steps, 0):
        raise UserError(f"a cool-down over {steps} steps", hint="give the number of steps, or 0 for a fifth of all")
    request = Request(action, steps, _attempt_of(start))
    with contextlib.suppress(*UNREADABLE):
        waiting = _read(folder / REQUEST)
        if waiting.attempt == request.attempt and action not in ("stop", waiting.action):
            raise UserError(f"{folder}: the training has not seen {waiting.action} yet", hint="try again in a moment")
    try:
        write_text(folder / REQUEST, json.dumps(request._asdict()) + "\n")
    except OSError as error:
        hint = "the folder must be writable for whoever asks; a signal to the training (kill) saves and stops it"
        raise UserError(f"{folder / REQUEST} cannot be written: {error.strerror or error}", hint=hint) from None


def _attempt_of(start: Mapping[str, Any]) -> Attempt:
    return [start.get(name) for name in ("time", "host", "process")]


def _read(path: Path) -> Request:
    """Read a request. Raises one of UNREADABLE if the file holds none."""
    if not stat.S_ISREG(path.lstat().st_mode):  # Opening a named pipe would wait for its writer.
        raise ValueError("not a file")
    with path.open("rb") as file:
        request = Request(**json.loads(file.read(MOST_BYTES)))
    if request.action not in get_args(Action) or not is_count(request.steps, 0):
        raise ValueError("not a request")
    return request


@dataclass
class Inbox:
    """Takes requests to a training from its run folder."""

    path: Path
    attempt: Attempt  # What identifies this start of the training.
    left: tuple[int, ...] = ()  # What identifies a file that could not be removed.
    has_warned: bool = False

    def take(self) -> Request | None:
        """Remove the file, and return the request in it once if it is one to this training. Never fails."""
        request, fault = None, ""
        try:
            found = self.path.lstat()
        except OSError:  # There is none.
            return None
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if identity == self.left:
            return None
        try:
            request = _read(self.path)
        except UNREADABLE:
            fault = "holds no request of gputrain"
        try:
            self.path.unlink(missing_ok=True)
            self.left = ()
        except OSError as error:
            self.left, fault = identity, f"cannot be removed ({error.strerror or error})"
        if fault and not self.has_warned:
            self.has_warned = True
            log.warning("%s %s; the training goes on", self.path, fault)
        return request if request and request.attempt == self.attempt else None


class Requests:
    """Acts on the requests to this training: those for a cool-down at the end of a step, the others at once."""

    def __init__(self, loop: StepLoop) -> None:
        self.loop = loop
        self.cooldowns: deque[int] = deque()  # Cool-downs that are asked for, over so many steps.

    def due(self, end: StepEnd) -> bool:
        return bool(self.cooldowns)

    def run(self, end: StepEnd) -> None:
        while self.cooldowns and not end.requested_end:
            try:
                end.requested_end = self.loop.steps.end_by_request(end.step, self.cooldowns.popleft())
            except UserError as error:
                log.warning(message := f"no cool-down as asked from gputrain watch: {error.message}")
                self.loop.note_cooldown(message)
                self.loop.saver.write_plan()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take up each request to this training in a thread, on the leader of several ranks."""
        run = self.loop.run
        start = open_start(run.folder)
        if start is None or not run.group.leads:
            yield
            return
        inbox = Inbox(run.folder / REQUEST, _attempt_of(start))

        def look() -> bool:
            if request := inbox.take():
                self.take_up(request)
            return False

        # A disk that does not answer must not keep the training from its end.
        with repeated(look, LOOK_SECONDS, "requests", patience=LOOK_SECONDS):
            yield

    def take_up(self, request: Request) -> None:
        """Note a request, in the thread that has found it. Several ranks could not agree to leave a wait for data."""
        stop = self.loop.run.stop
        if request.action == "cooldown":
            self.cooldowns.append(request.steps)
        elif request.action == "save":
            self.loop.saver.is_overdue = True
            log.info("asked from gputrain watch: checkpoint_last.pt is written after this step")
        elif not stop.requested:
            log.warning("%s: finishing the step and saving", ASKED_TO_STOP)
            (stop.interrupt_wait if self.loop.run.group.ranks.count == 1 else stop.request)(ASKED_TO_STOP)
