"""The kinds of files that hold pictures or recordings, and the rows of tables: parquet and Arrow, as on the Hub.

The library `datasets` reads tables, in a process of its own, which a damaged Arrow file may end, and which the threads
of pyarrow may abort at its end. Each row is written as a file once. Imports no torch.
"""

import errno
import glob
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gputrain.data_in.preparation import RefusedItem, is_of_programs
from gputrain.engine.data import describe_exit, signals_blocked
from gputrain.errors import UserError, first_line, require
from gputrain.fetch.archives import fault_of_name, room_for, too_large, write_new
from gputrain.fetch.datasets import NO, UNUSABLE, split_of
from gputrain.files import Progress, writing
from gputrain.formatting import shell_command
from gputrain.kinds import kinds

MediaKind = Literal["image", "audio"]

PICTURES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".dib", ".gif", ".avif", ".heic",
    ".heif", ".hif",
})  # fmt: skip
SOUNDS = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".w64", ".caf"})
# Sound and video that ffmpeg decodes, if it is installed.
FFMPEG_SOUNDS = frozenset({
    ".m4a", ".m4b", ".aac", ".wma", ".amr", ".ape", ".wv", ".ac3", ".mka",
    ".mp4", ".m4v", ".webm", ".3gp", ".mkv", ".mov", ".avi",
})  # fmt: skip
TEXTS = frozenset({".txt", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".psv", ".list", ".srt", ".vtt"})
ROWS = 1  # Rows of a parquet file that are decoded at once; pyarrow reads some tens of such parts ahead.
PATH_COLUMNS = ("file_name", "filename", "file", "path")
TEXTS_OF_ROWS = "metadata.jsonl"  # The texts of recordings that stand in columns beside them.
COLUMNS = "columns.json"  # Roles of the columns of tables, beside the folder of their rows.
NAME_COLUMNS = (*PATH_COLUMNS, "__key__", "key")  # They name a row that has no path itself.


@dataclass(frozen=True)
class Media:
    """The files that a kind of model reads out of containers, and how they are recognised."""

    noun: str
    feature: str  # Name of the type in the metadata that the Hub's library writes.
    columns: tuple[str, ...]  # Usual names of the column, the preferred first.
    suffixes: frozenset[str]
    texts: frozenset[str]  # Suffixes of the texts that belong to them.
    signatures: tuple[tuple[bytes, str], ...]  # Regular expressions of the first bytes, and the suffix of each.
    default: str  # Suffix of unknown content, which is then found, and refused by its name.


MEDIA: dict[MediaKind, Media] = {
    "image": Media(
        "pictures", "Image", ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp", "image_path"),
        PICTURES, frozenset(),
        (
            (rb"\xff\xd8\xff", ".jpg"), (rb"\x89PNG\r\n\x1a\n", ".png"), (rb"RIFF....WEBP", ".webp"),
            (rb"GIF8", ".gif"), (rb"II\*\0|MM\0\*|II\+\0|MM\0\+", ".tif"), (rb"BM", ".bmp"),
            (rb"....ftypavi", ".avif"), (rb"....ftyp(hei|hev|mif1|msf1)", ".heic"),
        ), ".jpg",
    ),
    "audio": Media(
        "recordings", "Audio", ("audio", "wav", "flac", "mp3", "sound", "recording", "speech", "audio_path"),
        SOUNDS | FFMPEG_SOUNDS, TEXTS,
        (
            (rb"(RIFF|RIFX|RF64)....WAVE", ".wav"), (rb"fLaC", ".flac"), (rb"OggS.{24,25}OpusHead", ".opus"),
            (rb"OggS", ".ogg"), (rb"FORM....AIF", ".aiff"), (rb"\.snd", ".au"), (rb"caff", ".caf"),
            (rb"riff\x2e\x91\xcf\x11", ".w64"), (rb"....ftyp", ".m4a"), (rb"\x1aE\xdf\xa3", ".webm"),
            (rb"\xff[\xf1\xf9]", ".aac"), (rb"ID3|\xff[\xe2-\xff]", ".mp3"),
        ), ".wav",
    ),
}  # fmt: skip


def suffix_of(content: bytes | Path, media: Media) -> str:
    """Returns the suffix of encoded content by its first bytes, the default if they are unknown."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            content = file.read(64)
    return next((suffix for start, suffix in media.signatures if re.match(start, content, re.DOTALL)), media.default)


# ------------------------------------------------------------------------------------------------- what a file is

ARCHIVE = re.compile(r"\.(zip|tgz|tbz2|txz|tar(\.(gz|bz2|xz|zst))?)$", re.IGNORECASE)
TABLE = re.compile(r"\.(parquet|arrow|feather)$", re.IGNORECASE)
READ = "a folder, parquet, Arrow, tar and zip files, and hf://datasets/NAME; docs/data_sources.md"


def hint_of_others(suffixes: Iterable[str]) -> str:
    """Returns which kinds of model the pictures or recordings among files are for, and nothing if there are none."""
    for name, media in MEDIA.items():
        if not media.suffixes.isdisjoint(suffixes):
            of = [kind for kind in kinds().values() if kind.media == name]
            commands, names = (" or ".join(getattr(kind, part) for kind in of) for part in ("command", "name"))
            return f"it holds {media.noun}, for {commands}; prepare-data and validate take --kind {names} for them"
    return ""


def check_file(path: Path) -> None:
    """Raises UserError unless a file is an archive or a table of rows, by its name and beginning."""
    suffix, fault, hint = path.suffix.lower(), "", "copy or load it again"
    try:
        is_file = path.is_file()  # A pipe would never end.
        head = path.open("rb").read(64) if is_file else b""
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file or a folder that can be read") from None
    if not is_file:
        fault, hint = "no regular file", f"read are {READ}"
    elif not head:
        fault = "the file is empty"
    elif head.startswith(b"version https://git-lfs"):
        fault, hint = "a git-LFS pointer, not the file itself", "fetch the file: git lfs pull, or hf download"
    elif TABLE.search(path.name) and not head.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        fault = f"no {suffix[1:]} file that can be read, or damaged at its beginning"
    elif not (TABLE.search(path.name) or ARCHIVE.search(path.name)):
        fault = "is neither a folder nor a file that holds others"
        hint = (
            f"read are {READ}. Unpack other archives by their own programs; texts of recordings are named with "
            "--transcripts; files at addresses are loaded by img2dataset, say, into tar files"
        )
    if fault:
        raise UserError(f"{path}: {fault}", hint=hint)


# ------------------------------------------------------------------------------------------------- tables of rows


def read_tables(
    tables: Mapping[str, Path], media: MediaKind, column: str, folder: Path, progress: Progress
) -> list[RefusedItem]:
    """Writes the rows of tables as files of a new folder, recordings with a table of their texts. `tables` are files by
    the names that messages give them.

    Returns the rows that are left out. Raises UserError for a table that cannot be read, and for one that names a file
    outside its folder or holds more than `room_for` allows.
    """
    require("datasets", needed_by="parquet and Arrow files")
    packed = sum(path.stat().st_size for path in tables.values())
    room = room_for(next(iter(tables)), packed, folder)
    with tempfile.TemporaryDirectory(prefix="gputrain-") as cache:
        tables = {name: Path(os.path.abspath(path)) for name, path in tables.items()}
        job = TableJob(tables, MEDIA[media], column, folder, Path(cache), packed, room)
        return _in_process(job, lambda done: progress(done, len(tables)))


@dataclass(frozen=True)
class TableJob:
    """The tables that are read, and what is taken of them."""

    tables: Mapping[str, Path]
    media: Media
    column: str
    folder: Path
    cache: Path
    packed: int  # Bytes of the tables,
    room: int  # and those that may be written.


def _in_process(job: TableJob, progress: Callable[[float], None]) -> list[RefusedItem]:
    """Returns what `work` does, of a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(job, theirs), daemon=True)
    with signals_blocked([signal.SIGINT]):
        process.start()
    theirs.close()
    where, told = next(iter(job.tables)), None
    try:
        while not isinstance(told, (list, UserError)):
            told = mine.recv()
            if isinstance(told, tuple):
                where = told[0]
                progress(told[1])
    except EOFError:
        process.join()
        told = UserError(
            f"{where}: reading it ended the process ({describe_exit(process.exitcode or 0)})",
            hint="it is damaged, or made to do harm: load it again",
        )
    finally:
        process.kill()  # It waits for threads of pyarrow, some of which abort it.
        process.join()
    if isinstance(told, UserError):
        raise told
    return told


def _work(job: TableJob, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process.
    # The library imports those of these that it finds, and would ask the Hub.
    os.environ |= dict.fromkeys(("USE_TORCH", "USE_TF", "USE_JAX"), "0") | {"HF_HUB_OFFLINE": "1"}
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())  # Its own lock is one of several processes, which a killed one would leave behind.
    try:
        pipe.send(work(job, lambda *told: pipe.send(told)))
    except UserError as error:
        pipe.send(error)


def work(job: TableJob, tell: Callable[[str, float], None]) -> list[RefusedItem]:
    """Writes the rows, and returns those that are left out. `tell` gets the row that is read, and how far that is."""
    refused, written, left_out = list[RefusedItem](), 0, {*NAME_COLUMNS, *job.media.columns}
    # The table of texts is there before any row, and rows are written to new files alone.
    with (job.folder / TEXTS_OF_ROWS).open("x", encoding="ascii") if job.media.texts else nullcontext() as texts:
        for number, (label, path) in enumerate(job.tables.items()):
            tell(label, number)
            start, size, told = written, path.stat().st_size, time.monotonic()
            for row, (content, given, values) in enumerate(_rows_of(path, label, job)):
                where = f"{label}, row {row}"
                if not texts and (mark := _mark_of(values)):
                    refused.append(RefusedItem(where, "excluded", mark))
                    continue
                source = content or ("an empty cell" if content is not None else _file_of(path, given, where))
                if isinstance(source, str):
                    refused.append(RefusedItem(where, "unreadable", source))
                    continue
                written += len(content or b"")
                if written > job.room:
                    raise too_large(label, job.packed, job.room)
                named = given or next((str(values[name]) for name in NAME_COLUMNS if name in values), "")
                with writing(job.folder):
                    name = _write(job, named, f"{TABLE.sub('', label)}/{row:08d}", source)
                    if texts:
                        row_of = {key: value for key, value in values.items() if key not in left_out}
                        texts.write(json.dumps({"audio": name, **row_of}) + "\n")
                if time.monotonic() > told + 0.2:
                    told = time.monotonic()
                    tell(where, number + min(1.0, (written - start) / size))
    return refused


def _mark_of(values: Mapping[str, object]) -> str:
    """Returns what excludes a row: a mark, or a split beside that for training; empty if nothing does."""
    for name, value in values.items():
        is_unusable = name.lower() in UNUSABLE and str(value).strip().lower() not in NO
        if is_unusable or (name == "split" and split_of(str(value)) not in ("train", "")):
            return f"{name}: {str(value)[:40]}"
    return ""


def _write(job: TableJob, named: str, plain: str, source: bytes | Path) -> str:
    """Writes bytes, or links a file, by the name that a row has, or by `plain` if that is taken, or no file can have
    it. Returns the name."""
    parts = named.split("/")
    is_usable = not fault_of_name(named) and not any(map(is_of_programs, parts)) and "\\" not in named
    for name in [named] * (is_usable and max(len(os.fsencode(part)) for part in parts) < 180) + [plain]:
        if PurePosixPath(name).suffix.lower() not in job.media.suffixes:
            name += suffix_of(source, job.media)
        target = job.folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            link_new(source, target) if isinstance(source, Path) else write_new(target, [source])
            return PurePosixPath(name).as_posix()
        except (FileExistsError, NotADirectoryError):
            continue
    raise UserError(f"{plain}: another row has this name already", hint="rename the paths in the table")


def link_new(source: Path, target: Path) -> None:
    """Links a file of the user by a name that is not there yet, or copies it where no links can be made."""
    for make in (os.symlink, os.link):
        try:
            return make(source, target)
        except FileExistsError:
            raise
        except OSError as error:  # Windows allows links to few users, and FAT has none.
            if error.errno == errno.ENOSPC:
                raise
    shutil.copy2(source, target)


def _file_of(table: Path, given: str, where: str) -> Path | str:
    """Returns the file that a cell names, or why there is none. Raises UserError for one outside the table's folder."""
    if not given:
        return "an empty cell: neither bytes nor a path"
    if re.match(r"[a-z0-9+]+://", given, re.IGNORECASE):
        return f"an address, from which nothing is loaded: {given[:80]}"
    if fault_of_name(given):
        raise UserError(
            f"{where}: no bytes, and {given[:120]!r} leads out of the table's folder",
            hint="paths in a table are relative to it; texts of recordings in other places are named by --transcripts",
        )
    try:
        return table.parent / given if (table.parent / given).is_file() else f"no bytes, and no file {given[:120]}"
    except OSError:  # Bytes in Base64, say, are no path.
        return f"no bytes, and {given[:40]}... is no path"


def _rows_of(
    path: Path, label: str, job: TableJob
) -> Iterator[tuple[bytes | None, str, dict[str, str | int | float | None]]]:
    """Yields the bytes, the path and the other columns of each row."""
    import datasets
    from pyarrow.dataset import ParquetFragmentScanOptions

    datasets.logging.set_verbosity(logging.CRITICAL)  # It logs what it raises, too.
    at = "its beginning"
    try:
        with path.open("rb") as file:
            format = "parquet" if file.read(4) == b"PAR1" else "arrow"
        # Otherwise all that was read of a file stays in memory until its end.
        scan = ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True, buffer_size=1 << 20)
        options = {"batch_size": ROWS, "fragment_scan_options": scan} if format == "parquet" else {}
        table = datasets.load_dataset(
            format,
            data_files=glob.escape(str(path)),
            cache_dir=str(job.cache),
            split="train",
            streaming=True,
            **options,
        )
        name = _column_of(table.features, label, job.media, job.column)
        others = [
            column
            for column, feature in table.features.items()
            if _holds(feature) in ("text", "value") or (column == "json" and isinstance(feature, dict))
        ]
        others = [column for column in others if column != name]
        if not job.media.texts:  # Texts of recordings are chosen by whoever reads them.
            has_train = "split" in others and any(
                split_of(str(row["split"])) == "train" for row in table.select_columns(["split"])
            )
            known = {*NAME_COLUMNS, *UNUSABLE, *["split"] * has_train}
            others = [column for column in others if column.lower() in known]
        dropped = dict.fromkeys(column for column in table.features if column not in (name, *others, *NAME_COLUMNS))
        # Whoever reads the texts of recordings says by itself which columns it uses.
        roles = {column: "name" * (column in NAME_COLUMNS) for column in table.features} | {name: job.media.noun}
        roles |= {} if job.media.texts else {column: "choice" for column in others if column not in NAME_COLUMNS}
        job.folder.with_name(COLUMNS).write_text(json.dumps(roles), encoding="ascii")
        for row, example in enumerate(table.decode(False).select_columns([name, *others])):
            at = f"row {row + 1}"
            cell = example.pop(name)
            cell = cell if isinstance(cell, dict) else {"path" if isinstance(cell, str) else "bytes": cell}
            given = cell.get("path")
            if isinstance(nested := example.get("json"), dict):  # The object of NAME.json in tables of WebDataset.
                example = {**nested, **{key: value for key, value in example.items() if key != "json"}}
            values = {key: _value(value) for key, value in example.items()}
            values = {key: value for key, value in values.items() if value is not None and value == value}
            values |= {} if row else dropped  # The first row names them for the account of columns.
            yield cell.get("bytes"), given if isinstance(given, str) else "", values
    except UserError:
        raise
    except Exception as error:  # Those of datasets, pyarrow and pandas, of many types.
        raise UserError(
            f"{label}: damaged, cut off or of an unknown kind at {at}: {first_line(error.__cause__ or error)}",
            hint="copy or load it again, or write it anew",
        ) from None


def _value(value: Any) -> Any:
    """Returns a value of a cell as JSON takes it: databases write identifiers and times as decimals."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if isinstance(value, str | int | float) else None


def _holds(feature: Any) -> str:
    """Returns what a column may hold: "struct" (bytes and a path), "bytes", "text", "value", or "other"."""
    dtype = str(getattr(feature, "dtype", ""))
    if type(feature).__name__ in ("Image", "Audio"):
        return "struct"
    if isinstance(feature, dict):
        return "struct" if "bytes" in feature or ("path" in feature and "array" not in feature) else "other"
    if type(feature).__name__ != "Value":
        return "value" if type(feature).__name__ == "ClassLabel" else "other"
    is_time = dtype.startswith(("time", "date", "duration"))
    return "bytes" if "binary" in dtype else "text" if "string" in dtype else "other" if is_time else "value"


def _column_of(features: Mapping[str, Any], label: str, media: Media, column: str) -> str:
    """Returns the column of pictures or recordings: the chosen one, otherwise the one that the Hub's metadata give, or
    the first with a usual name. Raises UserError if there is none, or several."""
    types = {name: type(feature).__name__ for name, feature in features.items()}
    readable = [name for name, feature in features.items() if _holds(feature) in ("struct", "bytes", "text")]
    usual = [name for known in (*media.columns, *PATH_COLUMNS) for name in readable if name.lower() == known]
    typed = [name for name in readable if types[name] == media.feature]
    found = [name for name in usual if name in typed][:1] or typed or usual[:1]
    if column:
        found = [column] if column in readable else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{label}: several columns may hold the {media.noun}: {', '.join(found)}",
            hint=f"choose one: prepare-data --column {shell_command(found[0])}",
        )
    shown = [f"{name} ({getattr(feature, 'dtype', types[name])})"[:80] for name, feature in features.items()]
    hint = (
        "choose one of bytes, of bytes and paths, or of paths: --column NAME of prepare-data. Lists, arrays and "
        "addresses are not read; img2dataset, say, loads addresses into tar files"
    )
    other = next(kind for kind in MEDIA.values() if kind != media)
    if any(name.lower() in other.columns or types[name] == other.feature for name in features):
        hint = hint_of_others(other.suffixes)
    fault = f"no column {column} of {media.noun}" if column else f"no column of {media.noun}"
    raise UserError(f"{label}: {fault}; columns: {', '.join(shown) or 'none'}", hint=hint)
