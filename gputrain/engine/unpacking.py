"""Unpacks containers of pictures or recordings into a folder of files, once, as a stream.

    AT/NAME/           the files, by their own names where the container has them, otherwise by shard and row
    AT/NAME.json       what was unpacked, whether all of it was, and what was left out
    AT/NAME.rows       the place of each file in its container, by which messages name it

The modification time of an unpacked file follows from its content, so that a preparation of the same data finds its
earlier results. A run that was interrupted goes on: files of the right size are there already. Imports no torch.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import unicodedata
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from tarfile import TarError
from typing import Any

from filelock import FileLock

from gputrain.engine.containers import (
    CONTAINERS,
    LISTS,
    MEDIA,
    NAME_COLUMNS,
    SUBTITLES,
    ContainerReading,
    Entry,
    Media,
    entries,
    format_of,
    suffix_of,
    unpacked_bytes,
)
from gputrain.engine.data import Progress, fingerprint, writing
from gputrain.engine.preparation import RefusedItem, is_of_programs, sorted_refusals, write_quarantine
from gputrain.errors import UserError
from gputrain.figures import format_bytes

log = logging.getLogger(__name__)

TABLE = "metadata.jsonl"  # The texts of recordings that stood in columns beside them.
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
LARGE = 10_000_000  # Bytes of a file from which on the free space is looked at before it is written.
LONGEST_NAME = 180  # Bytes of a name, of the 255 that file systems take, as preparations add to names.


@dataclass(frozen=True)
class FoundData:
    """The files that are to be unpacked or linked. `base` is the folder to which names are relative."""

    base: Path
    identity: str
    label: str
    containers: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()  # Tables and texts beside archives.
    files: tuple[tuple[Path, str], ...] = ()  # Files of a list, with the places that name them.
    refused: tuple[RefusedItem, ...] = ()
    watched: tuple[Path, ...] = ()  # Further files whose change makes the result outdated.


@dataclass(frozen=True)
class Source:
    """A folder of files that stands for what was given."""

    given: str
    folder: Path
    unpacked: Path | None = None  # What was made for it; None: the folder was given.
    refused: tuple[RefusedItem, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    lock: FileLock | None = None  # Held until what was unpacked is removed.

    def complete(self, report: Any, output_dir: Path | None = None) -> Any:
        """Returns a report on the folder as one on what was given: what was left out is named by its container and its
        row, also in the quarantine of `output_dir`."""
        if self.unpacked is None:
            return report
        refused = sorted_refusals(self.located(report.refused))
        ignored = {
            name: report.ignored.get(name, 0) + self.ignored.get(name, 0) for name in {*report.ignored, *self.ignored}
        }
        if output_dir is not None:
            write_quarantine(output_dir, refused)
        return replace(report, input_dir=self.given, refused=refused, ignored=ignored)

    def located(self, refused: Sequence[RefusedItem]) -> list[RefusedItem]:
        """Returns refused files of the folder with their places in containers, and what was left out before."""
        if self.unpacked is None:
            return list(refused)
        prefix = self.folder.relative_to(self.unpacked).as_posix()
        start = "" if prefix == "." else f"{prefix}/"
        wanted = {f"{start}{one.path}" for one in refused}
        places = {}
        rows = self.unpacked.with_name(f"{self.unpacked.name}.rows")
        if wanted:
            with rows.open(encoding="ascii") as lines:
                for line in lines:
                    path, where = json.loads(line)
                    if path in wanted:
                        places[path] = where
        where = [places.get(f"{start}{one.path}", "") for one in refused]
        found = [
            replace(one, detail=f"{at}: {one.detail}") if at else one for at, one in zip(where, refused, strict=True)
        ]
        return [*found, *self.refused]

    def remove(self) -> None:
        """Removes what was unpacked."""
        if self.unpacked is not None:
            remove_unpacked(self.unpacked)
        if self.lock:
            self.lock.release()


def remove_unpacked(folder: Path) -> None:
    """Removes what was unpacked into a folder, as far as the system lets it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # Windows keeps a file that is open; a folder stays while others are in it.
        for ending in ("json", "rows", "partial", "lock"):
            folder.with_name(f"{folder.name}.{ending}").unlink(missing_ok=True)
        folder.parent.rmdir()


@dataclass
class Unpacking:
    """The work of unpacking what was found into a folder."""

    given: str
    found: FoundData
    media: Media
    column: str
    folder: Path
    progress: Progress
    exclusive: bool = False

    def run(self) -> Source:
        for container in self.found.containers:
            format_of(container)
        state = self.folder.with_name(f"{self.folder.name}.json")
        lock = FileLock(self.folder.with_name(f"{self.folder.name}.lock"))
        self._acquire(lock)  # Other ranks of a training wait here, and find the folder complete.
        with lock:
            if not self.exclusive:
                lock.release()  # At the end of the block it is free.
            earlier, parts = _read_state(state), self._parts()
            if earlier and earlier["parts"] == parts and earlier["complete"] and self.folder.is_dir():
                return self._source(earlier, lock)
            if earlier is None and self.folder.exists():
                raise UserError(
                    f"{self.folder}: holds files that were not unpacked here", hint="choose another --output-dir"
                )
            if earlier and earlier["parts"] != parts:
                shutil.rmtree(self.folder, ignore_errors=True)
            with writing(self.folder):
                self.folder.mkdir(exist_ok=True)
                _write_state(state, {"parts": parts, "complete": False})
            made = self._unpack()
            with writing(self.folder):
                _write_state(state, {"parts": parts, "complete": True, **made})
            return self._source(_read_state(state) or {}, lock)

    def _acquire(self, lock: FileLock) -> None:
        with writing(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except FileNotFoundError:  # The process that was waited for has removed the folder.
                self._acquire(lock)

    def _parts(self) -> list[Any]:
        """Returns the files that are read, with their times, and fingerprints, as copies may keep times."""
        paths = [*self.found.containers, *self.found.texts, *self.found.watched]
        described = [[str(path), path.stat().st_mtime_ns, fingerprint(path)] for path in paths]
        return [*described, *([str(path)] for path, _ in self.found.files)]

    def _source(self, state: Mapping[str, Any], lock: FileLock) -> Source:
        refused = tuple(RefusedItem(**row) for row in state["refused"])
        held = lock if self.exclusive else None
        return Source(self.given, self.folder / state["root"], self.folder, refused, state["ignored"], held)

    def _unpack(self) -> dict[str, Any]:
        reading = ContainerReading(self.media, self.column)
        self._check_disk(reading)
        refused, faults = list(self.found.refused), list[UserError]()
        with FileWriter(self.folder, self.media) as writer:
            for path, where in self.found.files:
                writer.link(path, self._name_of(path), where)
            tables = [path for path in self.found.texts if path.suffix.lower() not in LISTS | SUBTITLES]
            for path in self.found.texts:
                # The only table beside archives is that of all recordings, in whichever folder it is.
                of_all = self.found.containers and tables == [path]
                writer.link(path, path.name if of_all else self._name_of(path), "")
            for number, container in enumerate(self.found.containers):
                for entry in self._entries(container, reading, refused, faults):
                    fault = entry if isinstance(entry, RefusedItem) else self._write(entry, container, writer)
                    if fault:
                        refused.append(fault)
                    if isinstance(entry, Entry):
                        self.progress(number + entry.position, len(self.found.containers))
                self.progress(number + 1, len(self.found.containers))
        if not writer.media_files:
            raise self._nothing(refused, faults, reading)
        return {
            "root": only_folder(self.folder) if self.found.containers else ".",
            "refused": [asdict(one) for one in refused], "ignored": dict(reading.ignored),
        }  # fmt: skip

    def _entries(
        self, container: Path, reading: ContainerReading, refused: list[RefusedItem], faults: list[UserError]
    ) -> Iterator[Entry | RefusedItem]:
        """Yields what a container holds. One that cannot be read is left out, for the sake of the others."""
        label = self._name_of(container)
        try:
            yield from entries(container, label, reading)
        except (UserError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else error.message.removeprefix(f"{container}: ")
            refused.append(RefusedItem(label, "unreadable", text or str(error)))
            faults.append(error if isinstance(error, UserError) else UserError(f"{container}: {text or error}"))

    def _write(self, entry: Entry, container: Path, writer: "FileWriter") -> RefusedItem | None:
        label = PurePosixPath(self._name_of(container))
        return writer.add(entry, label.parent.as_posix(), CONTAINERS.sub("", label.name))

    def _name_of(self, path: Path) -> str:
        path, base = Path(os.path.abspath(path)), Path(os.path.abspath(self.found.base))
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
        return "/".join(safe_parts(path.as_posix()))

    def _check_disk(self, reading: ContainerReading) -> None:
        """Raises UserError if the disk has not enough space for what is to be unpacked."""
        needed = sum(unpacked_bytes(container, reading) for container in self.found.containers)
        there = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        free = shutil.disk_usage(self.folder).free
        if self.found.containers:
            log.info("unpacking %s (%s) into %s", self.given, format_bytes(needed), self.folder)
        if needed - there > free:
            raise full_disk(self.given, needed - there, self.folder.parent)

    def _nothing(
        self, refused: Sequence[RefusedItem], faults: Sequence[UserError], reading: ContainerReading
    ) -> UserError:
        """Returns the error for containers in which nothing can be used; nothing of them is kept."""
        remove_unpacked(self.folder)
        if faults and len(faults) == len(self.found.containers):
            return faults[0]
        if refused:
            first = f"{refused[0].path}: {refused[0].detail}"
            more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
            return UserError(
                f"{self.given}: none of the {self.media.noun} in it can be used: {first}{more}",
                hint="a table holds their bytes, or paths relative to itself; an archive holds files, and no links",
            )
        others = ", ".join(f"{count} {suffix}" for suffix, count in reading.ignored.most_common(5))
        hint = f"looked for {' '.join(sorted(self.media.suffixes))}"
        if any(CONTAINERS.search(f"x{suffix}") for suffix in reading.ignored):
            hint = "it holds archives itself: unpack it once, and name the folder"
        for other in MEDIA.values():
            if other is not self.media and other.suffixes & reading.ignored.keys():
                hint = f"it holds {other.noun}: choose a --kind of model that is trained on them"
        found = f", but {others}" if others else ": it is empty"
        return UserError(f"{self.given}: no {self.media.noun} in it{found}", hint=hint)


def full_disk(what: str, needed: int, folder: Path) -> UserError:
    free = format_bytes(shutil.disk_usage(folder).free)
    return UserError(
        f"{what}: unpacking takes {format_bytes(needed)}, and the disk of {folder} has {free} free",
        hint="free some space, or choose another disk: by --output-dir, and for temporary copies by TMPDIR",
    )


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="ascii"))
        return state if isinstance(state["parts"], list) and isinstance(state["complete"], bool) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(state), encoding="ascii")
    partial.replace(path)


def only_folder(folder: Path) -> str:
    """Returns the path of the first folder in a tree that holds more than another folder, as most archives begin with
    one that has their own name."""
    at = folder
    while len(inside := list(at.iterdir())) == 1 and inside[0].is_dir():
        at = inside[0]
    return at.relative_to(folder).as_posix()


# ------------------------------------------------------------------------------------------------- names and files


def safe_parts(name: str, *, windows: bool = os.name == "nt") -> list[str]:
    """Returns the parts of a relative path without anything that leads elsewhere, is hidden, or is too long."""
    name = name.partition("::")[0].rpartition("://")[2]
    if re.match(r"[A-Za-z]:[\\/]|[^/]*\\", name):  # A path of Windows.
        name = re.sub("^[A-Za-z]:", "", name).replace("\\", "/")
    parts = []
    for part in name.split("/"):
        part = part.replace("\0", "_").lstrip(".")
        if windows:
            part = re.sub(r'[<>:"|?*\x00-\x1f]', "_", part).rstrip(" .")
            part = f"_{part}" if RESERVED.fullmatch(part) else part
        if part:
            part = f"_{part}" if is_of_programs(part) else part
            parts.append(part)
    return parts


def _short(part: str) -> str:
    """Returns a name that is not too long; a part of one that is gets a hash."""
    encoded = os.fsencode(part)
    if len(encoded) <= LONGEST_NAME:
        return part
    digest = hashlib.sha256(encoded).hexdigest()[:16]
    return encoded[: LONGEST_NAME - 20].decode("utf-8", "ignore") + f"-{digest}"


class FileWriter:
    """Writes entries of containers as files of a folder, each under a name of its own."""

    def __init__(self, folder: Path, media: Media) -> None:
        self.folder, self.media, self.media_files = folder, media, 0
        self._stems: dict[str, str] = {}  # Names without suffixes, with the shards that have them.
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._copies: dict[str, int] = {}  # Numbers of files that had the same name.
        self._partial = folder.with_name(f"{folder.name}.partial")
        self._rows_path = folder.with_name(f"{folder.name}.rows")
        self._rows = self._rows_path.open("w", encoding="ascii")
        self._table: Any = None
        self._table_lines = 0
        self._folds = _ignores_case(folder)

    def __enter__(self) -> "FileWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._rows.close()
        if self._table:
            self._table.close()

    def add(self, entry: Entry, prefix: str, shard: str) -> RefusedItem | None:
        """Writes an entry. Returns the reason for leaving it out, if it cannot be read."""
        if entry.values is not None and not entry.size and entry.path is None:
            return RefusedItem(entry.where, "unreadable", "an empty cell")
        name = self._name(entry, "" if prefix == "." else f"{prefix}/", shard)
        try:
            with writing(self.folder):
                if entry.path is not None:
                    self._link(entry.path, name)
                else:
                    self._write(entry, name)
        except (zipfile.BadZipFile, TarError, zlib.error, EOFError, NotImplementedError) as error:
            return RefusedItem(entry.where, "unreadable", f"damaged or cut off ({error})")
        # The name of a file in an archive is that of the file.
        self._note(name, entry.where if entry.values is not None else entry.container)
        self.media_files += PurePosixPath(name).suffix.lower() in self.media.suffixes
        if entry.values is not None and self.media.texts:
            self._add_row(name, entry)
        return None

    def link(self, path: Path, name: str, where: str) -> None:
        """Links a file of the user under a name."""
        with writing(self.folder):
            self._link(path, name)
        self._files.add(self._folded(name))
        self._stems.setdefault(self._folded(name.rpartition(".")[0]), "")
        if where:
            self._note(name, where)
            self.media_files += 1

    def _note(self, name: str, where: str) -> None:
        self._rows.write(json.dumps([name, where]) + "\n")

    def _add_row(self, name: str, entry: Entry) -> None:
        """Adds the other columns of a row to the table of texts, in which a path names the recording."""
        left_out = {*NAME_COLUMNS, *self.media.columns}
        row = {key: value for key, value in (entry.values or {}).items() if key not in left_out}
        row = {key: value for key, value in row.items() if value is not None and value == value}  # NaN is no value.
        if self._table is None:
            self._table = (self.folder / TABLE).open("w", encoding="ascii")
        self._table.write(json.dumps({"audio": name, **row}) + "\n")
        self._table_lines += 1
        self._note(f"{TABLE}, line {self._table_lines}", entry.where)

    # ---- names

    def _folded(self, name: str) -> str:
        return unicodedata.normalize("NFC", name).casefold() if self._folds else name

    def _name(self, entry: Entry, prefix: str, shard: str) -> str:
        """Returns a name for an entry that no other file has. Files of the same name in another shard get the shard's
        name as a folder, so that a recording stays beside its text."""
        parts = safe_parts(entry.name) or [shard, f"{entry.number:08d}"]
        stem, suffix = _cut(parts[-1])
        if suffix.lower() not in self.media.suffixes | (frozenset() if entry.values is not None else self.media.texts):
            stem, suffix = parts[-1], suffix_of(_head_of(entry), self.media) or self.media.default
        stem = prefix + "/".join([*map(_short, parts[:-1]), _short(stem)])
        if self._stems.setdefault(self._folded(stem), shard) != shard:
            stem = f"{prefix}{shard}/{stem.removeprefix(prefix)}"
            self._stems[self._folded(stem)] = shard
        if any(self._folded(str(parent)) in self._files for parent in PurePosixPath(stem).parents):
            stem = stem.replace("/", "_")
        name, copies = stem + suffix, self._copies.get(self._folded(stem + suffix), 1)
        while self._folded(name) in self._files or self._folded(name) in self._folders:
            copies += 1
            name = f"{stem}-{copies}{suffix}"
        if copies > 1:
            self._copies[self._folded(stem + suffix)] = copies
        self._files.add(self._folded(name))
        self._folders |= {self._folded(str(parent)) for parent in PurePosixPath(name).parents}
        return name

    # ---- files

    def _write(self, entry: Entry, name: str) -> None:
        """Writes the content of an entry, unless a file of its size is there, which an earlier run has written. The
        time of the file follows from its content."""
        target = self.folder / name
        if target.is_file() and target.stat().st_size == entry.size:
            return
        if entry.size > LARGE and entry.size > shutil.disk_usage(self.folder).free:
            raise full_disk(entry.where, entry.size, self.folder.parent)
        digest, size = hashlib.blake2b(digest_size=8), 0
        try:
            with self._partial.open("wb") as file:
                for block in _blocks(entry.content):
                    size += len(block)
                    digest.update(block)
                    file.write(block)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise
        if size != entry.size:
            raise EOFError(f"{size} of {entry.size} bytes")
        # Even seconds, as FAT has no others, between 2001 and 2017.
        seconds = 1_000_000_000 + int.from_bytes(digest.digest(), "big") % 250_000_000 * 2
        os.utime(self._partial, (seconds, seconds))
        target.parent.mkdir(parents=True, exist_ok=True)
        self._partial.replace(target)

    def _link(self, path: Path, name: str) -> None:
        target, path = self.folder / name, Path(os.path.abspath(path))
        if target.exists() and os.path.samefile(target, path):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        for make in (os.symlink, os.link):
            try:
                make(path, target)
                return
            except OSError as error:  # Windows allows links to few users, and FAT has none.
                if error.errno == errno.ENOSPC:
                    raise
        shutil.copy2(path, target)


def _cut(name: str) -> tuple[str, str]:
    """Splits a name at its last full stop, if there is a name before it."""
    path = PurePosixPath(name)
    return path.name.removesuffix(path.suffix), path.suffix


def _head_of(entry: Entry) -> bytes:
    """Returns the first bytes of a row of a table."""
    if entry.path is None:
        return bytes(entry.content[:64])
    try:
        with entry.path.open("rb") as file:
            return file.read(64)
    except OSError:  # Whoever reads the file says so.
        return b""


def _blocks(content: Any) -> Iterable[Any]:
    if isinstance(content, memoryview):
        return [content]
    return iter(lambda: content.read(1 << 20), b"")


def _ignores_case(folder: Path) -> bool:
    """Returns True if the disk of a folder takes names that differ in capitals for one."""
    probe = folder / ".Case"
    probe.touch()
    try:
        return (folder / ".case").exists()
    finally:
        probe.unlink()
