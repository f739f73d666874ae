"""The runs below some folders, as they appear, change and vanish: found and read by threads, shown by pages."""

import contextlib
import copy
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gputrain.engine.run_folder import HISTORY, METRICS, PLAN
from gputrain.errors import first_line
from gputrain.heartbeat import HEARTBEAT
from gputrain.report.metrics_file import RowGroup
from gputrain.report.page import unique_names
from gputrain.report.records import RunReader, RunRecord

log = logging.getLogger(__name__)

# The names of files of which every run has one.
SIGN = re.compile(rf"{METRICS}|{HISTORY}|{HEARTBEAT}|{PLAN}|checkpoint_.*\.pt")
DEPTH = 3  # Levels of folders below a given one in which runs are looked for.
MOST_ENTRIES = 5_000  # Of a larger folder, such as one of pictures, the rest is not looked at.
MOST_RUNS = 2_000
MOST_ROWS = 2_000  # Lines of metrics of a run that are kept in memory, besides evaluations.
NOT_CRAWLED = {"samples", "logs"}
LOOK_SECONDS, READ_SECONDS = 5.0, 1.0  # Time between looks for new runs, and between readings.
ASKED_SECONDS = 30.0  # Runs are read for so long after somebody has asked for them.
FIRST_LOOK_SECONDS = 3.0  # The longest time that a page waits for the first look,
PATIENCE_SECONDS = 15.0  # and for another thread that reads its run.


def id_of(folder: Path) -> str:
    """Returns the name of a run in addresses, from which its path doesn't follow."""
    return hashlib.sha256(_real(folder).encode("utf-8", "surrogatepass")).hexdigest()[:10]


def _real(folder: Path) -> str:
    """Returns the path of a folder without links, also for a text that can be no path."""
    try:
        return os.path.realpath(folder)
    except ValueError:
        return str(folder)


def find_runs(folder: Path, depth: int, seen: dict[str, int]) -> Iterator[Path]:
    """Yields the run folders at and below a folder. Links to folders are followed. `seen` are the depths to which
    folders have been looked at."""
    real = _real(folder)
    if seen.get(real, -1) >= depth:
        return
    seen[real] = depth
    is_run, below = False, []
    try:
        with os.scandir(folder) as entries:
            for entry, _ in zip(entries, range(MOST_ENTRIES), strict=False):
                is_run = is_run or SIGN.fullmatch(entry.name) is not None
                if depth and not entry.name.startswith(".") and entry.name not in NOT_CRAWLED and entry.is_dir():
                    below.append(entry.name)
    except (OSError, ValueError):  # It has vanished, may not be read, or can be no path.
        pass
    if is_run:
        yield folder
    for name in sorted(below):
        yield from find_runs(folder / name, depth - 1, seen)


class WatchedRun(RunReader):
    """A run that one thread at a time reads. `known` is what pages show of it; it never changes, so that no page waits
    for a disk."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name, most_rows=MOST_ROWS)
        self.turn, self.known = threading.Lock(), copy.deepcopy(self.record)

    def read_on(self, patience: float = 0.0, *, again: bool = True) -> None:
        """Read what is new. Without `again`, only a run that was never read. Raises TimeoutError if another thread
        reads for longer."""
        if not self.turn.acquire(timeout=patience):
            raise TimeoutError
        try:
            if again or not self._signs:
                self.refresh()
                before, known = self.known, copy.copy(self.record)
                known.versions = dict(known.versions)
                if known.versions["metrics"] == before.versions["metrics"]:
                    known.metrics = before.metrics
                else:
                    known.metrics = table = copy.copy(known.metrics)
                    table.latest = table.latest.copy()
                    groups = table.groups.items()
                    table.groups = {names: RowGroup(*map(copy.copy, vars(group).values())) for names, group in groups}
                self.known = known
        finally:
            self.turn.release()


class Runs:
    """The runs below some folders. Pages hold `lock`, so that no run vanishes while they are made."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self.lock = threading.RLock()
        self._runs: dict[str, WatchedRun] = {}
        self._asked = self._read = -ASKED_SECONDS
        self._looked = threading.Event()

    def start(self) -> None:
        """Begin to look for runs, and to read them, in threads that end with the process."""
        looking = (self.look, lambda: LOOK_SECONDS if self._runs else READ_SECONDS)
        for work, pause in (looking, (self._read_if_asked, lambda: READ_SECONDS)):
            threading.Thread(target=_repeat, args=(work, pause), name="runs", daemon=True).start()

    def touch(self, ids: Sequence[str] = ()) -> None:
        """Note that somebody asks for all runs, or for everything about some of them or the only one. After a pause, or
        if the thread waits for a disk, they are read at once. Raises TimeoutError if the disk of one of these does not
        answer."""
        self._looked.wait(FIRST_LOOK_SECONDS)
        self._asked, is_stale = time.monotonic(), time.monotonic() - self._read > 2 * READ_SECONDS
        if is_stale and not ids:
            self.read()
        runs = self._runs
        for id in runs if len(runs) == 1 else ids:
            if id in runs:
                runs[id].read_on(PATIENCE_SECONDS, again=is_stale)

    def ids(self) -> list[str]:
        """Returns the names of all runs, the one that has changed last first."""
        order = sorted((-run.known.changed_at, run.known.name, id) for id, run in self._runs.items())
        return [id for _, _, id in order]

    def record(self, id: str) -> RunRecord:
        """Returns what is known about a run. Raises KeyError if there is none of that name."""
        return self._runs[id].known

    def look(self) -> None:
        """Look for runs that have appeared or vanished. On a slow disk, those that are found are shown meanwhile."""
        found: dict[str, Path] = {}
        shown_at = time.monotonic()
        seen: dict[str, int] = {}
        for folder in (run for root in self.folders for run in find_runs(root, DEPTH, seen)):
            if len(found) < MOST_RUNS:
                found.setdefault(id_of(folder), folder)
            if time.monotonic() > shown_at + READ_SECONDS:
                self._update({**{id: run.known.folder for id, run in self._runs.items()}, **found})
                shown_at = time.monotonic()
        self._update(found)

    def _update(self, found: dict[str, Path]) -> None:
        """Make readers of new runs, and forget those of vanished runs."""
        if found.keys() != self._runs.keys():
            names, runs = unique_names(list(found.values())), {}
            for (id, folder), name in zip(found.items(), names, strict=True):
                runs[id] = run = self._runs.get(id) or WatchedRun(folder, name)
                run.record.name = run.known.name = name
                if id not in self._runs:
                    run.read_on()
            with self.lock:
                self._runs = runs  # A new dict, so that other threads may go through the one they have.
        self._looked.set()

    def read(self) -> None:
        """Read what is new in all runs."""
        for run in self._runs.values():
            with contextlib.suppress(TimeoutError):  # Its disk does not answer, or a page has it read.
                run.read_on()
        self._read = time.monotonic()

    def _read_if_asked(self) -> None:
        if time.monotonic() - self._asked < ASKED_SECONDS:
            self.read()


def _repeat(work: Callable[[], None], pause: Callable[[], float]) -> None:
    """Do something again and again. After an error the next turn may have more luck: a disk that is away comes back."""
    fault = ""
    while True:
        try:
            work()
        except Exception as error:
            if fault != (fault := first_line(error)):
                log.warning("runs cannot be read: %s", fault)
        time.sleep(pause())
