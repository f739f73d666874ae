"""The runs below some folders, as they appear, change and vanish: found and read by a thread, shown by pages."""

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gputrain.engine.history import HISTORY
from gputrain.engine.metrics import METRICS
from gputrain.engine.run_folder import PLAN
from gputrain.errors import first_line
from gputrain.report.page import unique_names
from gputrain.report.records import RunReader, RunRecord

log = logging.getLogger(__name__)

SIGN = re.compile(rf"{METRICS}|{HISTORY}|{PLAN}|checkpoint_.*\.pt")  # The names of files of which every run has one.
DEPTH = 3  # Levels of folders below a given one in which runs are looked for.
MOST_ENTRIES = 5_000  # Of a larger folder, such as one of pictures, the rest is not looked at.
MOST_RUNS = 2_000
MOST_ROWS = 2_000  # Lines of metrics of a run that are kept in memory, besides evaluations.
NOT_CRAWLED = {"samples", "logs"}
LOOK_SECONDS, READ_SECONDS = 5.0, 1.0  # Time between looks for new runs, and between readings.
READ_LIMIT = 0.5  # Seconds of a reading for long metrics.
LOOK_LIMIT = 1.0  # Seconds after which a look is interrupted, to be continued by the next one.
ASKED_SECONDS = 30.0  # Runs are read for so long after somebody has asked for them.
FIRST_LOOK_SECONDS = 3.0  # The longest time that the first page waits for the first look.


def id_of(folder: Path) -> str:
    """Returns the name of a run in addresses, from which its path doesn't follow."""
    return hashlib.sha256(_real(folder).encode("utf-8", "surrogatepass")).hexdigest()[:10]


def _real(folder: Path) -> str:
    """Returns the path of a folder without links, also for a text that can be no path."""
    try:
        return os.path.realpath(folder)
    except ValueError:
        return str(folder)


def find_runs(folder: Path, depth: int, seen: dict[str, int]) -> Iterator[Path | None]:
    """Yields the run folders at and below a folder, and None for every other one, after which a caller may pause. Links
    to folders are followed. `seen` are the depths to which folders have been looked at."""
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
    yield folder if is_run else None
    for name in sorted(below):
        yield from find_runs(folder / name, depth - 1, seen)


class Runs:
    """The runs below some folders. `more` names further run folders, those of a queue. Pages hold `lock` while they
    read records."""

    def __init__(self, folders: Sequence[Path], more: Callable[[], Sequence[Path]] = tuple) -> None:
        self.folders, self.more = list(folders), more
        self.lock = threading.RLock()
        self._readers: dict[str, RunReader] = {}
        self._asked = self._read = -ASKED_SECONDS
        self._looked, self._wanted = threading.Event(), threading.Event()
        self._crawl: Iterator[Path | None] | None = None
        self._found: dict[str, Path] = {}

    def start(self) -> None:
        """Begin to look for runs, in a thread that ends with the process."""
        threading.Thread(target=self._work, name="runs", daemon=True).start()

    def touch(self, ids: Sequence[str] = ()) -> None:
        """Note that somebody asks for all runs, and for everything about some of them or the only one. After a pause,
        these are read at once."""
        self._looked.wait(FIRST_LOOK_SECONDS)
        is_stale = time.monotonic() - self._read > 2 * READ_SECONDS
        with self.lock:
            for id in list(self._readers) if len(self._readers) == 1 else ids:
                reader = self._readers.get(id)
                if reader and (is_stale or not reader.record.is_read):
                    reader.refresh()
        self._asked = time.monotonic()
        self._wanted.set()

    def ids(self) -> list[str]:
        """Returns the names of all runs, the one that has changed last first."""
        with self.lock:
            order = [(-reader.record.changed_at, reader.record.name, id) for id, reader in self._readers.items()]
        return [id for _, _, id in sorted(order)]

    def record(self, id: str) -> RunRecord:
        """Returns what is known about a run. Raises KeyError if there is none of that name."""
        with self.lock:
            return self._readers[id].record

    def _work(self) -> None:
        look_at, fault = 0.0, ""
        while True:
            try:
                if time.monotonic() >= look_at:
                    self.look()
                    look_at = time.monotonic() + LOOK_SECONDS
                if time.monotonic() - self._asked < ASKED_SECONDS:
                    self.read()
            except Exception as error:  # The next turn may have more luck: a disk that is away comes back.
                if fault != (fault := first_line(error)):
                    log.warning("runs cannot be read: %s", fault)
            self._wanted.wait(LOOK_SECONDS)
            self._wanted.clear()
            time.sleep(READ_SECONDS)

    def look(self, limit: float = LOOK_LIMIT) -> None:
        """Look for runs that have appeared or vanished, for a limited time; the next call goes on from there."""
        end = time.monotonic() + limit
        if self._crawl is None:
            self._crawl, self._found = self._all_runs(), {}
        for folder in self._crawl:
            if folder is not None and len(self._found) < MOST_RUNS:
                self._found.setdefault(id_of(folder), folder)
            if time.monotonic() > end:
                self._update({**{id: reader.record.folder for id, reader in self._readers.items()}, **self._found})
                break
        else:
            self._crawl = None
            self._update(self._found)
        self._looked.set()

    def _all_runs(self) -> Iterator[Path | None]:
        seen: dict[str, int] = {}
        for folder in self.folders:
            yield from find_runs(folder, DEPTH, seen)
        for folder in self.more():
            yield from find_runs(folder, 0, seen)

    def _update(self, found: dict[str, Path]) -> None:
        """Make readers of new runs, each read in part, and forget those of vanished runs."""
        if found.keys() == self._readers.keys():
            return
        names = dict(zip(found, unique_names(list(found.values())), strict=True))
        made = {id: RunReader(found[id], names[id], most_rows=MOST_ROWS) for id in found.keys() - self._readers.keys()}
        for reader in made.values():
            reader.refresh(tail_only=True)
        with self.lock:
            self._readers = {id: self._readers.get(id) or made[id] for id in found}
            for id, reader in self._readers.items():
                reader.record.name = names[id]

    def read(self, limit: float = READ_LIMIT) -> None:
        """Read what is new in all runs. Of long metrics only the ends are read at first, so that all runs are shown
        soon, and for a limited time each turn the rest of one after the other, which takes much longer."""
        readers = list(self._readers.values())
        for reader in readers:
            with self.lock:
                reader.refresh(tail_only=True)
        self._read = time.monotonic()
        for reader in readers:
            if not reader.record.is_read and time.monotonic() < self._read + limit:
                with self.lock:
                    reader.refresh()
