"""Turns whatever holds pictures or recordings into an ordinary folder of files, which everything else reads.

A folder of files is used as it is. Parquet and Arrow files, tar and zip archives, a folder, a pattern or a list of
such, and data sets of the Hugging Face Hub are unpacked once (`gputrain.engine.unpacking`); the files of a list of
paths are linked. Imports no torch.
"""

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from gputrain.engine.containers import CONTAINERS, LISTS, MEDIA, Media, MediaKind, format_of
from gputrain.engine.data import Progress, no_progress
from gputrain.engine.preparation import RefusedItem, is_of_programs
from gputrain.engine.unpacking import FoundData, Source, Unpacking, only_folder
from gputrain.errors import UserError
from gputrain.fetch.datasets import download_dataset, is_dataset_name, of_one_split
from gputrain.figures import counted
from gputrain.kinds import prepared_for

log = logging.getLogger(__name__)

OF_ROWS = (".parquet", ".arrow", ".feather")  # Suffixes of containers that are tables.
MOST_SHARDS = 100_000  # Files of a range in a pattern.
SHARD = re.compile(r"(?P<name>.*?)-?(?P<number>\d{4,6})-of-(?P<count>\d{4,6})")
_kept: list["TemporaryDirectory[str]"] = []  # They are removed when the program ends.


def open_source(
    given: Path,
    media: MediaKind,
    at: Path | None = None,
    *,
    column: str = "",
    progress: Progress = no_progress,
    exclusive: bool = False,
) -> Source:
    """Returns a folder of files for a folder, a container, a pattern of containers, a list of paths, or a name on the
    Hub; unpacked under `at`, or where temporary files are until the program ends.

    `column` names the column of a table that holds the pictures or recordings; default: found. An `exclusive` source
    lets other processes wait that unpack the same, until it is removed. Raises UserError if nothing can be read, or the
    disk is too small.
    """
    kind, shown = MEDIA[media], hub_name(given) or str(given)
    found = _find(given, kind)
    if not isinstance(found, FoundData):
        if column:
            raise UserError(
                f"column does nothing with {shown}, which is no parquet or Arrow data", hint="drop --column"
            )
        return Source(shown, found or given)
    if at is None:
        _kept.append(TemporaryDirectory(prefix="gputrain-", ignore_cleanup_errors=True))
        at = Path(_kept[-1].name)
    identity = hashlib.sha256(os.fsencode("\0".join((found.identity, media, column)))).hexdigest()[:8]
    label = re.sub(r"[^\w.-]+", "_", found.label).strip("_.")[:60] or "data"
    return Unpacking(shown, found, kind, column, at / f"{label}-{identity}", progress, exclusive).run()


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


def origin_of(given: Path) -> str:
    """Returns what a preparation notes of its source, wherever that was unpacked: the full path, or the Hub's name."""
    return hub_name(given) or str(given.resolve())


def is_there(given: Path) -> bool:
    """Returns True if a path of data leads to something: a folder, a file, or files of a pattern."""
    return bool(given.exists() or hub_name(given) or _expanded(given))


def _find(given: Path, media: Media) -> FoundData | Path | None:
    """Returns what to unpack; a folder of files that was loaded for it; None for one that is given, and for a path of
    nothing, which its reader refuses."""
    if name := hub_name(given):
        return _of_hub(name, media)
    if given.is_dir():
        return None if prepared_for(given) else _in_folder(given, given, media)
    identity = str(Path(os.path.abspath(given)))
    if given.exists():
        if given.suffix.lower() in media.suffixes:
            raise UserError(f"{given}: a single file, expected a folder", hint=f"name the folder of the {media.noun}")
        if format_of(given) != "list":
            return FoundData(given.parent, identity, given.name, (given,))
        return _of_paths(given, identity, _listed(given), media, given)
    if not (paths := _expanded(given)):
        return None
    return _of_paths(given, identity, [(path, str(path)) for path in paths], media, None)


def _of_hub(name: str, media: Media) -> FoundData | Path | None:
    local = download_dataset(name)
    found = _in_folder(local, name, media) if local.is_dir() else _find(local, media)
    if isinstance(found, FoundData):
        return replace(found, identity=name, label=name.partition("datasets/")[2])
    return local / only_folder(local)


def _in_folder(folder: Path, given: Path | str, media: Media) -> FoundData | None:
    containers, texts, files = _walked(folder, media)
    if not containers:
        return None
    if files and _bytes_of(files) >= _bytes_of(containers):
        log.warning(
            "%s: holds %s, which are read, and %s not, such as %s: name it itself to read it", given, media.noun,
            counted(len(containers), "container that is", "containers that are"), containers[0].name,
        )  # fmt: skip
        return None
    if files:  # Such as a preview of a data set.
        log.warning(
            "%s: holds %s, read as the larger part, and %s not read, such as %s: move them to a folder of their own",
            given, counted(len(containers), "container"), counted(len(files), "file"), files[0].name,
        )  # fmt: skip
    # img2dataset writes 00000.parquet, with the addresses of the pictures, beside 00000.tar.
    archives = {path.with_suffix("") for path in containers if path.suffix.lower() not in OF_ROWS}
    containers = [
        path for path in containers if path.suffix.lower() not in OF_ROWS or path.with_suffix("") not in archives
    ]
    is_archive = bool(archives)
    by_name = {path.relative_to(folder).as_posix(): path for path in [*containers, *(texts if is_archive else ())]}
    names, note = of_one_split(sorted(by_name), str(given), f"{given}{os.sep}")
    if note:
        log.warning("%s: %s", given, note)
    taken = [by_name[name] for name in names]
    containers = [path for path in taken if CONTAINERS.search(path.name)]
    texts = [path for path in taken if not CONTAINERS.search(path.name)]
    _warn_of_missing_shards(containers, given)
    identity = str(Path(os.path.abspath(given)))
    return FoundData(folder, identity, folder.name, tuple(containers), tuple(texts))


def _bytes_of(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _walked(folder: Path, media: Media) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the containers, the texts, and the files of the media themselves of a folder tree."""
    containers: list[Path] = []
    texts: list[Path] = []
    files: list[Path] = []
    for at, folders, names in os.walk(folder, followlinks=True):
        depth = len(Path(at).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not is_of_programs(name)) if depth < 20 else []
        for name in sorted(names):
            path, suffix = Path(at, name), os.path.splitext(name)[1].lower()
            # datasets keeps results of functions in files of this name beside a data set.
            if name.startswith(".") or re.fullmatch(r"cache-[0-9a-f]+.*\.arrow", name):
                continue
            if CONTAINERS.search(name):
                containers.append(path)
            elif suffix in media.suffixes:
                files.append(path)
            elif suffix in media.texts:
                texts.append(path)
    return containers, texts, files


def _warn_of_missing_shards(containers: Sequence[Path], given: Path | str) -> None:
    found: dict[tuple[str, int], set[int]] = {}
    for path in containers:
        if match := SHARD.search(path.name):
            found.setdefault((match["name"], int(match["count"])), set()).add(int(match["number"]))
    for (name, count), numbers in found.items():
        if missing := sorted(set(range(count)) - numbers):
            log.warning(
                "%s: %d of %d shards of %s are not there, the first is number %d", given, len(missing), count, name,
                missing[0],
            )  # fmt: skip


def _expanded(given: Path) -> list[Path]:
    """Returns the files of a pattern with * ? [...] {a,b} or {000..009}. Raises UserError if a file of a range is not
    there."""
    text = str(given)
    spelled = list(_braces(text))
    if len(spelled) == 1 and not glob.has_magic(text):
        return []
    found: dict[str, None] = {}
    for one in spelled:
        matches = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) else [one] if Path(one).exists() else []
        if not matches and len(spelled) > 1:
            raise UserError(f"{given}: {one} is not there", hint="correct the range, or load the missing file")
        found |= dict.fromkeys(matches)
    return [Path(one) for one in found]


def _braces(text: str) -> Iterator[str]:
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if match is None:
        yield text
        return
    if match[1] is None:
        choices = match[3].split(",")
    else:
        width = len(match[1]) if match[1].startswith("0") or len(match[1]) == len(match[2]) else 0
        numbers = range(int(match[1]), int(match[2]) + 1)
        if len(numbers) > MOST_SHARDS:
            raise UserError(f"{text}: a range of {len(numbers)} files", hint=f"at most {MOST_SHARDS} are read at once")
        choices = [f"{number:0{width}d}" for number in numbers]
    for choice in choices:
        yield from _braces(text[: match.start()] + choice + text[match.end() :])


# ------------------------------------------------------------------------------------------------- lists of paths


def _listed(file: Path) -> list[tuple[Path, str]]:
    """Returns the paths in a list, and the place of each. Empty lines and comments are skipped."""
    content = file.read_bytes()
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {number}: not UTF-8", hint="save the list as UTF-8") from None
    found = []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        name = line.strip().strip("\"'").removeprefix("file://")
        if name and not (name.startswith("#") and not (file.parent / name).exists()):
            path = file.parent / Path(name).expanduser()
            if "\\" in name and not path.exists():
                path = file.parent / name.replace("\\", "/")
            found.append((path, f"{file.name}, line {number}"))
    return found


def _of_paths(
    given: Path,
    identity: str,
    listed: Sequence[tuple[Path, str]],
    media: Media,
    file: Path | None,
) -> FoundData:
    """Returns the containers of a list or a pattern, or its files of the media. Raises UserError if it has neither."""
    if listed and all(CONTAINERS.search(path.name) for path, _ in listed):
        if missing := [where for path, where in listed if not path.is_file()]:
            raise UserError(f"{given}: {missing[0]}: no such file", hint="correct the list")
        containers = tuple(dict.fromkeys(path for path, _ in listed))
        return FoundData(_common([path.parent for path in containers]), identity, given.name, containers)
    files: dict[Path, str] = {}
    refused = []
    for path, where in listed:
        fault = _fault_of(path, media)
        if fault:
            refused.append(RefusedItem(where, "unreadable", fault))
        else:
            files.setdefault(Path(os.path.abspath(path)), where)
    if not files:
        first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
        hint = f"a list has the path of one of the {media.noun} in each line, absolute or relative to the list"
        if any(re.search(r"[|\t]", path.name) for path, _ in listed):
            hint = (
                "a list of recordings with their texts is named with --transcripts, and their folder with --input-dir"
            )
        raise UserError(f"{given}: no line names one of the {media.noun}{first}", hint=hint)
    own = Path(os.path.abspath(file.parent)) if file else None
    nearest = _common([path.parent for path in files])
    base = own if own and all(path.is_relative_to(own) for path in files) else nearest
    if media.texts:  # The table of recordings in wavs/ is mostly beside that folder.
        base = next((folder for folder in (nearest, nearest.parent) if _tables_in(folder, file)), base)
    texts = _texts_beside(list(files), base, file) if media.texts else []
    watched = (file,) if file else ()
    return FoundData(base, identity, given.name, (), tuple(texts), tuple(files.items()), tuple(refused), watched)


def _fault_of(path: Path, media: Media) -> str:
    """Returns why a path in a list is left out; "" if it names a file of the media."""
    name = str(path)
    if re.search(r"\b(https?|s3|gs):/", name):
        return "an address, from which nothing is loaded"
    try:
        if not path.is_file():
            return f"{path} is a folder" if path.is_dir() else f"no such file: {path}"
    except OSError as error:
        return error.strerror or str(error)
    if path.suffix.lower() not in media.suffixes:
        return f"{path.name}: none of the {media.noun}, by its suffix"
    return ""


def _common(folders: Sequence[Path]) -> Path:
    """Returns the folder that holds all others; the first one's root where they are on several drives."""
    try:
        return Path(os.path.commonpath([os.path.abspath(one) for one in folders]))
    except ValueError:
        return Path(os.path.abspath(folders[0]).partition(os.sep)[0] + os.sep)


def _texts_beside(files: Sequence[Path], base: Path, own: Path | None) -> list[Path]:
    """Returns the texts of listed recordings, NAME.txt or NAME.uz.srt for NAME.wav, and the tables in `base`."""
    stems = {path.with_suffix("") for path in files}
    found = []
    for folder in sorted({path.parent for path in files}):
        for text in sorted(folder.iterdir()):
            parts = text.name.split(".")
            cuts = {folder / ".".join(parts[:end]) for end in range(1, len(parts))}
            if text.suffix.lower() in MEDIA["audio"].texts and cuts & stems:
                found.append(text)
    return list(dict.fromkeys([*found, *_tables_in(base, own)]))


def _tables_in(folder: Path, own: Path | None) -> list[Path]:
    """Returns the tables in a folder that may have the texts of its recordings; `own` is the list itself."""
    tables = [
        path for path in sorted(folder.iterdir()) if path.suffix.lower() in MEDIA["audio"].texts and path.is_file()
    ]
    tables = [path for path in tables if path.suffix.lower() not in LISTS or path.stem == "metadata"]
    return [path for path in tables if own is None or path != Path(os.path.abspath(own))]
