"""A case of malformed input: what is written, which command reads it, and what the command must do."""

import contextlib
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.command import gputrain_here
from tests.waiting import HANG_SECONDS

RAN = Path(tempfile.gettempdir(), "malformed_checkpoint_ran_code")  # A file that code in a checkpoint would write.

WRITTEN = (
    "plan.json",
    "config.yaml",
    "metrics.jsonl",
    "journal.jsonl",
)  # Files that a resumed run or preparation writes.


@dataclass(frozen=True)
class Case:
    """`make` prepares a folder and returns the words of the command and the faulty path, which the message must name.

    `code` is the expected exit code: 2 if nothing else was asked for, 0 if the file is left out and the rest is done.
    """

    group: str
    name: str
    make: Callable[[Path], tuple[list[object], Path]]
    says: str = ""  # A part of the message.
    code: int = 2
    names_path: bool = True  # False for a path whose name cannot be printed as it is; `says` then checks the name.

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case: the command, its exit code, its messages, and the files that it changed."""

    command: str
    code: int
    said: str
    changed: list[str]
    name: str  # The name of the faulty file.

    @property
    def first_line(self) -> str:
        """The first line that names the fault: the error, or the file left out."""
        lines = self.said.splitlines()
        chosen = [line for line in lines if line.startswith("error:")] or [line for line in lines if self.name in line]
        return [*chosen, *lines, ""][0]


def contents(folder: Path) -> dict[str, str]:
    """Returns a digest of every regular file below a folder, by its relative path."""
    found = {}
    for place, _, names in os.walk(os.fsencode(folder)):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    found[os.fsdecode(path)] = hashlib.blake2b(file.read()).hexdigest()
    return found


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupts a command that waits for ever, as Ctrl-C does: it ends with exit code 75."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(case: Case, folder: Path) -> tuple[Outcome, Path]:
    """Runs a case in an empty folder. Returns what came of it, and the faulty path."""
    words, faulty = case.make(folder)
    before = contents(folder)
    with interrupted_after(HANG_SECONDS):
        done = gputrain_here(*words)
    after = contents(folder)
    changed = [path for path, digest in before.items() if after.get(path) != digest and not path.endswith(WRITTEN)]
    said = (done.stderr + done.stdout).replace(str(folder), "FOLDER")
    command = " ".join(str(word).replace(str(folder), "FOLDER") for word in words)
    return Outcome(command, done.returncode, said, changed, faulty.name), faulty


def faults(case: Case, found: Outcome, faulty: Path, folder: Path) -> list[str]:
    """Returns what is wrong with the outcome of a case."""
    wrong = []
    named = str(faulty).replace(str(folder), "FOLDER")
    if found.code != case.code:
        wrong.append(f"exit code {found.code}, expected {case.code}")
    if "Traceback" in found.said or "internal error" in found.said:
        wrong.append("a traceback")
    names = [named, faulty.name] + ["FOLDER/data"] * case.group.startswith("prepared data")  # Its folder is enough.
    if case.names_path and not any(name in found.said for name in names):
        wrong.append(f"{named} is not named")
    if case.says not in found.said:
        wrong.append(f"{case.says!r} is not said")
    if RAN.exists():
        RAN.unlink()
        wrong.append("code of a file has run")
    if found.changed:
        wrong.append(f"changed: {', '.join(found.changed)}")
    return wrong
