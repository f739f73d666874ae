"""Shared by preparations of folders and by reports on them: finding files and duplicates, what is left out, results so
far. Sources are only read, never moved or deleted. Imports no torch.
"""

import fnmatch
import json
import logging
import mmap
import multiprocessing
import os
import re
import signal
import stat
import statistics
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from gputrain.data_in.split import fingerprint
from gputrain.engine.data import describe_exit, remedy_for_exit, signals_blocked
from gputrain.errors import UserError
from gputrain.files import Progress, read_rows, write_rows, writing
from gputrain.formatting import format_number
from gputrain.kinds import refuse_other_data
from gputrain.serialization import from_row, unreadable

log = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
# Folders in which programs and systems keep thumbnails, deleted files, copies and notes: those of Synology, QNAP and
# NetApp (with a sign before the name), macOS, Windows, ext4, FrontPage and Python. Hidden folders, such as .git,
# .thumbnails, .Trash-1000 and .ipynb_checkpoints, begin with a dot.
OF_PROGRAMS = {
    "@eadir", "#recycle", "@recycle", "#snapshot", "~snapshot", "@recently-snapshot", "@tmp", "@transcode", "@__thumb",
    "__macosx", "network trash folder", "thevolumesettingsfolder", "temporary items", "ipod photo cache",
    "$recycle.bin", "recycler", "recycled", "system volume information", "$extend", "lost+found", "_vti_cnf",
    "__pycache__",
}  # fmt: skip
EXCLUDED = "excluded by "  # Before the pattern of ignored files.
CHECKED_DISK = re.compile(r"found\.\d{3}")  # Files that Windows's chkdsk recovered.

Job = TypeVar("Job")
Result = TypeVar("Result")
JournalRow = dict[str, Any]
Buffer = bytes | mmap.mmap

# ------------------------------------------------------------------------------------------------- what is left out


@dataclass(frozen=True)
class RefusedItem:
    """An item that is left out, with the reason. `path` is that of a file, relative to the folder that was read, or
    names a line of its transcripts."""

    path: str
    reason: str
    detail: str
    repeats: str | None = None  # the first file with the content of this duplicate


def sorted_refusals(refused: Iterable[RefusedItem]) -> list[RefusedItem]:
    return sorted(refused, key=lambda refusal: (refusal.path, refusal.reason))


def faults_of(refused: Sequence[RefusedItem]) -> str:
    """Returns as text the number of files left out for each reason, and the first file with its fault."""
    counts = Counter(refusal.reason for refusal in refused).most_common(5)
    first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
    return ", ".join(f"{count} {reason}" for reason, count in counts) + first


def why_unreadable(path: Path, error: OSError) -> str:
    """Returns the cause as text; for a broken link, its target."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    return error.strerror or str(error)


def write_quarantine(folder: Path, refused: Iterable[RefusedItem]) -> None:
    write_rows(folder / QUARANTINE, map(asdict, refused))


def read_quarantine(folder: Path) -> list[RefusedItem]:
    """Returns the items that the preparation of a folder left out."""
    path = folder / QUARANTINE
    try:
        return [from_row(RefusedItem, row) for row in read_rows(path, ())] if path.is_file() else []
    except ValueError:
        raise unreadable(path, "prepare the data again") from None


def nothing_usable(fault: str, folder: Path) -> UserError:
    """Returns the error for a folder into which nothing could be prepared."""
    return UserError(fault, hint=f"{folder / QUARANTINE} names each and its fault")


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Report on a folder that is prepared or validated: an account of all that was found in it."""

    input_dir: str
    ignored: dict[str, list[str]]  # other files, by suffix
    refused: list[RefusedItem]
    columns: dict[str, str] = field(default_factory=dict)  # role of each column or key; "" if ignored

    @property
    def reasons(self) -> dict[str, int]:
        """Number of items left out for each reason, the most frequent first."""
        return dict(Counter(refusal.reason for refusal in self.refused).most_common())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "reasons": self.reasons}

    def account(self) -> dict[str, object]:
        """Returns as text the columns and keys that are used, and what is ignored: columns, keys, and files, of which
        one of each suffix is named."""
        used = [name for name, role in self.columns.items() if role]
        ignored = [name for name, role in self.columns.items() if not role]
        files = [_counted_files(kind, names) for kind, names in by_count(self.ignored)]
        rows = {"used": _shortened(used), "ignored": _shortened(ignored), "ignored files": _shortened(files)}
        return {name: text for name, text in rows.items() if text}


NAMED = 4  # Names of a list in the account, which mostly fit a terminal.


def format_counts(ignored: Mapping[str, Sequence[str]]) -> str:
    """Returns as text the numbers of files by suffix, the most frequent first."""
    return ", ".join(f"{len(names)} {kind}" for kind, names in by_count(ignored)[:5])


def by_count(ignored: Mapping[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return sorted(ignored.items(), key=lambda item: (-len(item[1]), item[0]))


def _counted_files(suffix: str, names: Sequence[str]) -> str:
    """Returns the number of files of a suffix with the name of the first, or the name of the only one."""
    if len(names) == 1 and suffix.startswith("."):
        return PurePosixPath(names[0]).name
    return f"{len(names)} {suffix}" + (f" such as {PurePosixPath(names[0]).name}" if suffix.startswith(".") else "")


def _shortened(names: Sequence[str]) -> str:
    """Returns the first names of a list, and the number of the others."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


@dataclass(frozen=True, kw_only=True)
class PrepareReport(DataReport):
    """Result of a preparation: items `made` by this run or `kept` from earlier ones, and those left out."""

    output_dir: str
    made: int
    kept: int


@dataclass(frozen=True)
class ValueRange:
    """Smallest, median and largest value."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "ValueRange":
        """Returns the spread of values. Raises ValueError where there are none."""
        return cls(min(values), statistics.median(values), max(values))


def format_range(of: ValueRange | None) -> str:
    """Returns a range as text; "-" for none."""
    if of is None:
        return "-"
    low, middle, high = map(format_number, (of.min, of.median, of.max))
    return f"all {low}" if of.min == of.max else f"{low} to {high}, half of them at most {middle}"


def value_range(values: Sequence[float]) -> ValueRange | None:
    """Returns the spread of values, or None where there are none."""
    return ValueRange.of(values) if values else None


# ------------------------------------------------------------------------------------------------- finding files


@dataclass(frozen=True)
class SourceFile:
    """A file of a folder; `path` is relative, with forward slashes."""

    path: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class SourceTree:
    """Files of a folder with the suffixes that were looked for, in the order of their paths, folders that cannot be
    read, and the other files by suffix."""

    paths: list[str]
    refused: list[RefusedItem]
    ignored: dict[str, list[str]]


@dataclass(frozen=True)
class Companions:
    """Files that stand beside others without being data of a training themselves, such as masks of pictures, by their
    names: they match `pattern`, or are in `folders`, and there is a file whose name, of `owner`, has the same stem."""

    reason: str
    pattern: re.Pattern[str]  # The group that took part in the match is the stem.
    owner: re.Pattern[str]
    folders: re.Pattern[str] = re.compile(r"(?!)")

    def owners(self, paths: Iterable[str]) -> dict[str, str]:
        """Returns the companions among files with the file that each belongs to: in the same folder, or for one in a
        folder of companions, anywhere beside that folder."""
        found: list[tuple[str, PurePosixPath, str]] = []
        owners: dict[tuple[PurePosixPath, str], str] = {}
        for path in paths:
            pure = PurePosixPath(path)
            at = next((parent for parent in pure.parents if self.folders.fullmatch(parent.name)), None)
            own, other = self.pattern.fullmatch(pure.stem), self.owner.fullmatch(pure.stem)
            stem = (own[own.lastindex or 0] if own else pure.stem).casefold()
            if own or at:
                found.append((path, at.parent if at else pure.parent, stem))
            if other and not at:
                for folder in pure.parents:
                    owners.setdefault((folder, other[other.lastindex or 0].casefold()), path)
                    owners.setdefault((folder, pure.name.casefold()), path)  # A mask may be called a.jpg.png.
        return {path: owner for path, at, stem in found if (owner := owners.get((at, stem), path)) != path}


GO_ON = "run gputrain prepare-data again, with the same options: it goes on where it ended"


def check_input_folder(folder: Path, content: str) -> None:
    if not folder.is_dir():
        fault = "is a file, expected a folder" if folder.exists() else "no such folder or file"
        hint = f"name the folder that holds the {content}"
        raise UserError(f"{folder}: {fault}", hint=f"{hint}, or another source of data: docs/data_sources.md")


def check_folders(input_dir: Path, output_dir: Path, kind: str) -> None:
    """Raises UserError if one folder contains the other, or the output is a file or is prepared for other kinds of
    model than `kind`."""
    read, written = input_dir.resolve(), output_dir.resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(
            f"{input_dir} and {output_dir}: one contains the other, so prepared data would mix with sources",
            hint="choose an output folder outside the input folder",
        )
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"{output_dir}: is a file, expected a folder", hint="name a new folder, or one prepared before")
    refuse_other_data(output_dir, kind, hint="prepare into another folder: --output-dir NEW_FOLDER")


def scan(
    folder: Path, suffixes: Iterable[str], exclude: Sequence[str] = (), companions: Companions | None = None
) -> SourceTree:
    """Finds the files of a folder tree by their suffixes. Links are followed, but each folder is read once.

    Files that match a pattern of `exclude`, or that are in a folder that does, are ignored; `companions` of others are
    refused. Raises UserError for a pattern that matches nothing.

    Hidden files and folders, and those of OF_PROGRAMS below the given folder, are not searched: they are counted among
    the ignored, with a slash after the name, and logged. Of several names of a folder, the one nearest to the top is
    taken.
    """
    suffixes = frozenset(suffixes)
    found, refused, ignored = [], list[RefusedItem](), defaultdict[str, list[str]](list)

    def refuse(error: OSError) -> None:
        name = Path(error.filename).relative_to(folder).as_posix()
        refused.append(RefusedItem(name, "unreadable", error.strerror or str(error)))

    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        visible: dict[str, str] = {}
        for name in sorted(folders):
            if is_of_programs(name):
                inside = Path(at, name).relative_to(folder).as_posix()
                ignored["hidden/" if name.startswith(".") else f"{name}/"].append(inside)
            else:
                visible.setdefault(os.path.realpath(Path(at, name)), name)
        folders[:] = [name for place, name in visible.items() if place not in seen]
        seen |= visible.keys()
        for name in names:
            path = Path(at, name)
            suffix, inside = path.suffix.lower(), path.relative_to(folder).as_posix()
            if suffix in suffixes and not name.startswith("."):
                found.append(inside)
            else:
                ignored["hidden" if name.startswith(".") else suffix or "without suffix"].append(inside)
    if skipped := {name: len(names) for name, names in sorted(ignored.items()) if name.endswith("/")}:
        named = ", ".join(f"{count} {name}" for name, count in skipped.items())
        log.info("%s: folders of programs are not searched: %s", folder, named)
    for pattern in exclude:
        hits = [path for path in found if _matches(path, pattern)]
        if not hits:
            raise UserError(
                f"{folder}: no file matches --exclude {pattern}",
                hint="a pattern such as '*_mask.png' is compared with the names of files and folders, and with paths",
            )
        ignored[f"{EXCLUDED}{pattern}"] += hits
    found = [path for path in found if not any(_matches(path, pattern) for pattern in exclude)]
    if companions:
        owners = companions.owners(found)
        refused += [RefusedItem(path, companions.reason, f"belongs to {owner}") for path, owner in owners.items()]
        found = [path for path in found if path not in owners]
    return SourceTree(sorted(found), refused, {kind: sorted(names) for kind, names in ignored.items()})


def refuse_exclude(folder: Path, exclude: Sequence[str]) -> None:
    """Raises UserError for patterns beside prepared data."""
    if exclude:
        raise UserError(f"{folder}: exclude does nothing with prepared data", hint="prepare them again with --exclude")


def _matches(path: str, pattern: str) -> bool:
    parts = path.split("/")
    return any(
        fnmatch.fnmatchcase(name, pattern)
        for end in range(1, len(parts) + 1)
        for name in (parts[end - 1], "/".join(parts[:end]))
    )


def is_of_programs(folder_name: str) -> bool:
    """Returns True for the name of a folder that a program keeps for itself, hidden or not."""
    name = folder_name.casefold()
    return name.startswith(".") or name in OF_PROGRAMS or bool(CHECKED_DISK.fullmatch(name))


def source_files(folder: Path, paths: Iterable[str], refused: list[RefusedItem]) -> list[SourceFile]:
    """Returns files with their sizes and times; those that are no files or cannot be reached are added to `refused`."""
    files = []
    for path in paths:
        try:
            status = (folder / path).stat()
        except OSError as error:
            refused.append(RefusedItem(path, "unreadable", why_unreadable(folder / path, error)))
            continue
        if stat.S_ISREG(status.st_mode):
            files.append(SourceFile(path, status.st_size, status.st_mtime_ns))
        else:
            refused.append(RefusedItem(path, "unreadable", "not a regular file"))
    return files


def find_duplicates(
    folder: Path, files: Iterable[SourceFile], prints: Mapping[str, str] | None = None
) -> dict[str, RefusedItem]:
    """Returns the refusals of files that have the content of an earlier one, by path. Content is compared by SHA-256.

    Only files with equal sizes and fingerprints are read in full, which avoids nearly all reading. `prints` are
    fingerprints that are known already, by path.
    """
    import pooch

    def content(digest: Callable[[Path], str], file: SourceFile) -> str:
        try:
            return digest(folder / file.path)
        except OSError:
            return file.path  # A path is unique.

    keys: list[Callable[[SourceFile], str]] = [
        lambda file: str(file.bytes),
        partial(content, fingerprint) if prints is None else lambda file: prints[file.path],
        partial(content, pooch.file_hash),
    ]
    groups = [list(files)]
    for key in keys:
        finer: dict[tuple[int, str], list[SourceFile]] = defaultdict(list)
        for number, group in enumerate(groups):
            for file in group:
                finer[number, key(file)].append(file)
        groups = [group for group in finer.values() if len(group) > 1]
    return {
        file.path: duplicate(file.path, group[0].path, "has the content of") for group in groups for file in group[1:]
    }


def duplicate(path: str, first: str, relation: str) -> RefusedItem:
    return RefusedItem(path, "duplicate", f"{relation} {first}", repeats=first)


def hole_of_zeros(content: Buffer, begin: int, end: int, sector: int, alignment: int) -> tuple[int, int] | None:
    """Returns the first byte of a hole in a file, and the byte behind it: whole sectors of zeros between bytes that are
    none, as a disk or an interrupted copy leaves them; None without one. A hole that reaches the end need only begin at
    a multiple of `alignment`.

    Zeros that a file holds rightly begin and end anywhere: both at borders of sectors in one case of sector^2.
    """
    bytes_B = np.frombuffer(content, np.uint8, end)
    first, last = -(-begin // sector), end // sector
    words = bytes_B[first * sector : max(first, last) * sector].view(np.uint64).reshape(-1, sector // 8)
    empty = np.flatnonzero(~words.any(axis=1)) + first
    starts = empty[np.diff(empty, prepend=-2) > 1] * sector
    stops = (empty[np.diff(empty, append=-2) != 1] + 1) * sector
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        if start > begin and bytes_B[start - 1] and stop < end and bytes_B[stop]:
            return start, stop
        if not bytes_B[stop:].any():
            before = np.flatnonzero(bytes_B[begin:start][-sector:])
            start -= min(sector, start - begin) - 1 - int(before[-1]) if len(before) else 0
            return (start, end) if len(before) and start % alignment == 0 else None
    return None


# ------------------------------------------------------------------------------------------------- working


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    num_workers: int,
    use: Callable[[Result], object],
    progress: Progress,
    kept: int = 0,
) -> None:
    """Calls `use` with the results of `in_processes` in order. Progress begins with the items `kept` from earlier."""
    total = kept + len(jobs)
    progress(kept, total)
    with closing(in_processes(function, jobs, num_workers)) as results:
        for done, result in enumerate(results, start=kept + 1):
            use(result)
            progress(done, total)


def in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], num_workers: int
) -> Generator[Result, None, None]:
    """Yields `map(function, jobs)` in order, from `num_workers` new processes; 0 and 1 compute in this process.

    The function and the jobs must be picklable. Close the iterator (`contextlib.closing`) to stop early. Raises
    UserError if a process dies.
    """
    num_workers = min(num_workers, len(jobs))
    if num_workers < 2:
        yield from map(function, jobs)
        return
    # Processes are spawned on every platform, because a fork would copy the locks of the progress display's threads.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_start_process)
    waiting: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            with signals_blocked([signal.SIGINT]):
                waiting.append(pool.submit(function, job))
            if len(waiting) > 4 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        workers = list(pool._processes.values())
        pool.shutdown(wait=True)  # Afterwards all processes have exit codes.
        # When one process has died, the pool ends the others by SIGTERM.
        codes = [worker.exitcode for worker in workers if worker.exitcode not in (None, 0, -signal.SIGTERM)]
        code = codes[0] if codes and codes[0] else -signal.SIGTERM
        raise UserError(f"a worker process died ({describe_exit(code)})", hint=remedy_for_exit(code)) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; only the main process handles it.
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """End this worker with its parent: a killed parent closes no queue, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Journal:
    """The results of a preparation: a head, on which all of them depend, then a line with a JSON object for each.

    A row is appended after the files of its result are written, so that an interrupted preparation continues behind
    it. `head` is None, and there are no rows, where there is no journal yet. An incomplete last line, which a killed
    run may leave, is not a row; `is_damaged` is True if any other line is none.
    """

    def __init__(self, path: Path) -> None:
        """Reads a journal. Raises UserError if it cannot be read."""
        self.path = path
        self.head: JournalRow | None = None
        self.rows: list[JournalRow] = []
        self.is_damaged = False
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})", hint="choose another folder") from None
        head, *rows = [_parsed(line) for line in text.rpartition("\n")[0].splitlines()] or [None]
        self.head, self.rows = head or {}, [row for row in rows if row]
        self.is_damaged = not head or len(self.rows) < len(rows) or "\ufffd" in text

    def rewrite(self, rows: Iterable[JournalRow]) -> None:
        """Replaces all content by the head and these rows. Raises UserError if it cannot be written."""
        self.rows = list(rows)
        write_rows(self.path, [self.head or {}, *self.rows])

    def append(self, row: JournalRow) -> None:
        """Raises UserError if the row cannot be written."""
        self.rows.append(row)
        with writing(self.path), self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


def _parsed(line: str) -> JournalRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
