"""Turns whatever holds pictures or recordings into an ordinary folder of files, which everything else reads.

A folder of files is used as it is. Tables, archives, a folder or a pattern of such, and data sets of the Hugging Face
Hub are unpacked once:

    AT/NAME/journal.json   what is unpacked, when all of it is, and what was left out
    AT/NAME/content/       the files

An interrupted run starts over. Imports no torch.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from gputrain.data_in.containers import (
    ARCHIVE,
    COLUMNS,
    MEDIA,
    TABLE,
    TEXTS_OF_ROWS,
    Media,
    MediaKind,
    check_file,
    hint_of_others,
    link_new,
    read_tables,
)
from gputrain.data_in.preparation import RefusedItem, is_of_programs, scan, sorted_refusals, write_quarantine
from gputrain.data_in.split import fingerprint
from gputrain.errors import UserError
from gputrain.fetch.archives import ENDINGS, content_of, stem_of, unpack
from gputrain.fetch.datasets import download_dataset, is_dataset_name, of_one_split
from gputrain.files import Progress, no_progress, write_rows, writing
from gputrain.kinds import prepared_for

log = logging.getLogger(__name__)

# The last suffixes of containers.
CONTAINERS = {f".{ending.rpartition('.')[2]}" for ending in (*ENDINGS, ".zst", ".parquet", ".arrow", ".feather")}
SHARD = re.compile(r"(\d{4,6})-of-(\d{4,6})")
_kept: list["TemporaryDirectory[str]"] = []  # They are removed when the program ends.


@dataclass(frozen=True)
class Source:
    """A folder of files that stands for what was given."""

    given: str
    folder: Path
    unpacked: Path | None = None  # What was made for it; None: the folder was given.
    refused: tuple[RefusedItem, ...] = ()  # What was left out.
    lock: FileLock | None = None  # Held until what was unpacked is removed.

    def complete(self, report: Any, output_dir: Path | None = None) -> Any:
        """Returns a report on the folder as one on what was given, with what was left out before; so does the
        quarantine of `output_dir`."""
        if self.unpacked is None:
            return report
        refused = sorted_refusals([*report.refused, *self.refused])
        if output_dir is not None:
            write_quarantine(output_dir, refused)
        columns = report.columns or _read(self.unpacked / COLUMNS)
        ignored = {kind: names for kind, names in report.ignored.items() if names != [TEXTS_OF_ROWS]}  # It is ours.
        return replace(report, input_dir=self.given, refused=refused, columns=columns, ignored=ignored)

    def remove(self) -> None:
        """Removes what was unpacked, as far as the system lets it: Windows keeps a file that is open."""
        if self.unpacked is not None:
            shutil.rmtree(self.unpacked, ignore_errors=True)
        if self.lock:
            self.lock.release()
            with contextlib.suppress(OSError):
                Path(self.lock.lock_file).unlink(missing_ok=True)
                Path(self.lock.lock_file).parent.rmdir()


@dataclass(frozen=True)
class FoundData:
    """The files that are to be unpacked, copied or linked, by the names that they get."""

    archives: Mapping[str, Path] = field(default_factory=dict)
    tables: Mapping[str, Path] = field(default_factory=dict)
    texts: Mapping[str, Path] = field(default_factory=dict)  # Tables and texts beside archives.
    files: Mapping[str, Path] = field(default_factory=dict)

    def state(self) -> list[Any]:
        """Returns the files that are read, with their times, and fingerprints, as copies may keep times."""
        read = [*self.archives.values(), *self.tables.values(), *self.texts.values()]
        described = [[str(path), path.stat().st_mtime_ns, fingerprint(path)] for path in read]
        return [*described, *([name, str(path)] for name, path in self.files.items())]


def open_source(
    given: Path,
    media: MediaKind,
    at: Path | None = None,
    *,
    column: str = "",
    progress: Progress = no_progress,
    exclusive: bool = False,
) -> Source:
    """Returns a folder of files for a folder, an archive, a table, a pattern of such, or a name on the Hub; unpacked
    under `at`, or where temporary files are until the program ends.

    `column` names the column of a table that holds the pictures or recordings; default: found. An `exclusive` source
    lets other processes wait that unpack the same, until it is removed. Raises UserError if an archive or a table
    cannot be read as a whole, if there is nothing in it, and if the disk is too small.
    """
    shown = hub_name(given) or str(given)
    found = _find(given, MEDIA[media])
    if column and not (found and found.tables):
        raise UserError(f"column does nothing with {shown}, which is no parquet or Arrow data", hint="drop --column")
    if found is None:
        return Source(shown, given)
    if at is None:
        _kept.append(TemporaryDirectory(prefix="gputrain-", ignore_cleanup_errors=True))
        at = Path(_kept[-1].name)
    identity = hashlib.sha256(
        os.fsencode("\0".join((hub_name(given) or os.path.abspath(given), media, column)))
    ).hexdigest()[:8]
    label = re.sub(r"[^\w.-]+", "_", PurePosixPath(shown.replace("\\", "/")).name).strip("_.")[:60] or "data"
    place = at / f"{label}-{identity}"
    lock = _locked(place.with_name(f"{place.name}.lock"))  # Other ranks of a training wait here.
    try:
        state, journal = found.state(), place / "journal.json"
        done = _read(journal)
        if done.get("state") != state or not (place / "content").is_dir():
            with writing(place):
                if not done and place.exists():
                    raise UserError(f"{place}: was not unpacked here", hint="choose another --output-dir")
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                write_rows(journal, [{"state": None}])
                try:
                    refused = _fill(place, shown, found, media, column, progress)
                except Exception:
                    shutil.rmtree(place, ignore_errors=True)
                    raise
                done = {"state": state, "refused": [asdict(refusal) for refusal in refused]}
                write_rows(journal, [done])
    except BaseException:
        lock.release()
        raise
    if not exclusive:
        lock.release()
    return Source(
        shown,
        content_of(place / "content"),
        place,
        tuple(RefusedItem(**row) for row in done["refused"]),
        lock if exclusive else None,
    )


def _locked(path: Path) -> FileLock:
    lock = FileLock(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except FileNotFoundError:  # The process that was waited for has removed the folder.
            return _locked(path)
    return lock


def _read(journal: Path) -> dict[str, Any]:
    try:
        found = json.loads(journal.read_text(encoding="ascii"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _fill(
    place: Path, shown: str, found: FoundData, media: MediaKind, column: str, progress: Progress
) -> list[RefusedItem]:
    """Unpacks, copies and links what was found into place/content. Returns what is left out."""
    content, refused = place / "content", list[RefusedItem]()
    content.mkdir()
    for name, path in {**found.texts, **found.files}.items():
        target = content / "/".join(f"_{part}" if is_of_programs(part) else part for part in name.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target) if name in found.texts else link_new(path.resolve(), target)
    if found.archives or found.tables:
        log.info("unpacking %s into %s", shown, place)
    if found.tables:
        refused += read_tables(found.tables, media, column, content, progress)
    for number, (name, path) in enumerate(found.archives.items()):
        unpack(path, place / "archive", lambda share, number=number: progress(number + share, len(found.archives)))  # type: ignore[misc]
        _merge(place / "archive", content, stem_of(name))
    suffixes = {path.suffix.lower() for path in content.rglob("*")}
    if MEDIA[media].suffixes & suffixes:
        return refused
    fault, hint = f"no {MEDIA[media].noun} in it", f"looked for {' '.join(sorted(MEDIA[media].suffixes))}"
    if refused:
        fault = f"none of the {MEDIA[media].noun} in it can be used: {refused[0].path}: {refused[0].detail}"
    elif any(ARCHIVE.search(f"x{suffix}") for suffix in suffixes):
        hint = "it holds archives itself: unpack it once, and name the folder"
    else:
        hint = hint_of_others(suffixes) or hint
    raise UserError(f"{shown}: {fault}", hint=hint)


def _merge(archive: Path, content: Path, stem: str) -> None:
    """Moves the files of an unpacked archive to those of others; into a folder of its own if a name is taken, so that a
    recording stays beside its text."""
    names = [path.relative_to(archive) for path in sorted(archive.rglob("*")) if path.is_file()]
    is_taken = any((content / name).exists() or any((content / at).is_file() for at in name.parents) for name in names)
    for name in names:
        target = (content / stem / name) if is_taken else content / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(archive / name, target)
    shutil.rmtree(archive)


# ------------------------------------------------------------------------------------------------- what is given


def hub_name(given: Path) -> str:
    """Returns the name of a data set of the Hub, whose slashes a path has merged or turned; "" for other paths."""
    name = re.sub(r"^(hf|https?|s3|gs|ftp):/{1,2}", r"\1://", str(given).replace("\\", "/"))
    if is_dataset_name(name):
        return name
    if re.match("(hf|https?|s3|gs|ftp)://", name):
        raise UserError(
            f"{name}: data are read from disks and from the Hugging Face Hub",
            hint="load it and name the file, or write hf://datasets/ORG/NAME",
        )
    return ""


def may_hold(given: Path, media: MediaKind) -> bool:
    """Returns True if a path leads to pictures or recordings, or to what they can be unpacked from."""
    suffixes = {*MEDIA[media].suffixes, *CONTAINERS}
    files = [given] if given.is_file() else given.rglob("*")
    return bool(hub_name(given)) or any(path.suffix.lower() in suffixes for path in files)


def is_there(given: Path) -> bool:
    """Returns True if a path of data leads to something: a folder, a file, or files of a pattern."""
    return bool(given.exists() or hub_name(given) or _expanded(given))


def _find(given: Path, media: Media) -> FoundData | None:
    """Returns what to unpack; None for a folder of files, and for a path of nothing, which its reader refuses."""
    if name := hub_name(given):
        folder, names = download_dataset(name)
        found = _in_folder(folder, names, name, media)
        return found or FoundData(files={path: folder / path for path in names})
    if given.is_dir():
        if prepared_for(given):
            return None
        tree = scan(given, {*media.suffixes, *media.texts, *CONTAINERS})
        return _in_folder(given, tree.paths, str(given), media)
    if given.suffix.lower() in media.suffixes and given.is_file():
        raise UserError(f"{given}: a single file, expected a folder", hint=f"name the folder of the {media.noun}")
    if given.exists():
        check_file(given)
    paths = [given] if given.exists() else _expanded(given)
    return _of_pattern(given, paths) if paths else None


def _in_folder(folder: Path, names: Iterable[str], shown: str, media: Media) -> FoundData | None:
    """Returns what to unpack of the files of a folder; None if its pictures or recordings are read as they are."""
    # datasets keeps results of functions in files of this name beside a data set.
    names = [name for name in names if not re.search(r"(^|/)cache-[0-9a-f]+[^/]*\.arrow$", name)]
    containers = [name for name in names if ARCHIVE.search(name) or TABLE.search(name)]
    files = [name for name in names if PurePosixPath(name).suffix.lower() in media.suffixes]
    if containers and files:  # Such as a preview of a data set.
        groups = sorted((containers, files), key=lambda group: sum((folder / name).stat().st_size for name in group))
        smaller, larger = groups
        log.warning(
            "%s: holds files such as %s, which are read, being larger, and others that are not, such as %s (%d in "
            "all): name these themselves to read them",
            shown,
            larger[0],
            smaller[0],
            len(smaller),
        )
        containers = [] if larger is files else containers
    if not containers:
        return None
    # img2dataset writes 00000.parquet, with the addresses of the pictures, beside 00000.tar.
    stems = {stem_of(name) for name in containers if ARCHIVE.search(name)}
    containers = [name for name in containers if ARCHIVE.search(name) or TABLE.sub("", name) not in stems]
    texts = [name for name in names if PurePosixPath(name).suffix.lower() in media.texts]
    if texts and not stems:
        log.warning("%s: texts beside tables are not read, such as %s", shown, texts[0])
        texts = []
    if not hub_name(Path(shown)):  # Of the Hub, the split is chosen before it is fetched.
        chosen = set(of_one_split([*containers, *texts], shown, f"{shown}{os.sep}"))
        containers, texts = ([name for name in group if name in chosen] for group in (containers, texts))
    _warn_of_missing_shards(containers, shown)
    # The only table beside archives is that of all recordings, in whichever folder it is.
    of_all = [name for name in texts if PurePosixPath(name).suffix.lower() not in {".txt", ".srt", ".vtt"}]
    by_name = {PurePosixPath(name).name if of_all == [name] else name: folder / name for name in texts}
    return _of_containers(shown, {name: folder / name for name in containers}, by_name)


def _warn_of_missing_shards(names: Sequence[str], shown: str) -> None:
    found: dict[str, set[int]] = {}
    for name in names:
        if match := SHARD.search(name):
            found.setdefault(SHARD.sub(f"N-of-{match[2]}", name), set()).add(int(match[1]))
    for name, numbers in found.items():
        count = int(name.rpartition("-of-")[2].partition(".")[0])
        if missing := sorted(set(range(count)) - numbers):
            log.warning("%s: %d of %d %s are not there, such as %d", shown, len(missing), count, name, missing[0])


def _of_containers(shown: str, containers: Mapping[str, Path], texts: Mapping[str, Path]) -> FoundData:
    for path in containers.values():
        check_file(path)
    archives = {name: path for name, path in containers.items() if ARCHIVE.search(name)}
    tables = {name: path for name, path in containers.items() if name not in archives}
    if archives and tables:
        raise UserError(
            f"{shown}: holds archives and tables, such as {next(iter(archives))} and {next(iter(tables))}",
            hint="name those that hold the data, by a pattern in quotation marks: 'FOLDER/*.tar'",
        )
    return FoundData(archives, tables, texts)


def _expanded(given: Path) -> list[Path]:
    """Returns the files of a pattern with *, ? or [...]."""
    # What exists under its own name is that, whatever brackets are in it.
    folder = next((place for place in given.parents if place.exists()), Path(given.anchor))
    pattern = str(given.relative_to(folder))
    if not glob.has_magic(pattern):
        return []
    return [Path(match) for match in sorted(glob.glob(os.path.join(glob.escape(str(folder)), pattern), recursive=True))]


def _of_pattern(given: Path, paths: Sequence[Path]) -> FoundData:
    """Returns the containers of a pattern. Raises UserError if some of its files are none."""
    odd = [path for path in paths if not (ARCHIVE.search(path.name) or TABLE.search(path.name))]
    if odd:
        raise UserError(
            f"{given}: a pattern names archives or tables, and {odd[0]} is neither", hint="name the folder of the files"
        )
    absolute = [Path(os.path.abspath(path)) for path in paths]
    base = Path(os.path.commonpath([path.parent for path in absolute]))
    return _of_containers(str(given), {path.relative_to(base).as_posix(): path for path in absolute}, {})
