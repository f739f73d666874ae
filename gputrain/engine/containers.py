"""Reads containers of pictures or recordings: parquet and Arrow files as on the Hugging Face Hub, tar and zip archives.

`entries()` yields what a container holds in its order, one item at a time, so that memory does not grow with its size.
Nothing here writes: `gputrain.engine.sources` makes a folder of files of it. Imports no torch, and pyarrow only to read
parquet and Arrow files.
"""

import bz2
import gzip
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from gputrain.engine.preparation import RefusedItem, is_of_programs
from gputrain.errors import UserError, first_line, import_package, require
from gputrain.figures import counted

Format = Literal["parquet", "arrow", "tar", "zip", "list"]
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
ROWS = 32  # Rows of a parquet file that are decoded at once.
PATH_COLUMNS = ("file_name", "filename", "file", "path")
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


def suffix_of(content: bytes, media: Media) -> str:
    """Returns the suffix of encoded content by its first bytes; "" if they are unknown."""
    return next((suffix for start, suffix in media.signatures if re.match(start, content, re.DOTALL)), "")


@dataclass
class Entry:
    """A file in a container, or a row of a table. Either `content` (its bytes, or an open file) or `path`, an existing
    file, is given. `size` is that of the content; `values` are the other columns of the row."""

    container: str
    where: str
    number: int
    name: str
    size: int
    content: Any = None
    path: Path | None = None
    values: dict[str, Any] | None = None
    position: float = 0.0  # Share of the container that is read.


@dataclass
class ContainerReading:
    """The purpose for which containers are read, and the number of other files in them."""

    media: Media
    column: str = ""  # Name of the column that the user chose.
    ignored: Counter[str] = field(default_factory=Counter)  # Number of other files, by suffix.


# ------------------------------------------------------------------------------------------------- what a file is

SIGNATURES: tuple[tuple[bytes, Format], ...] = (
    (b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"PK\x03\x04", "zip"), (b"PK\x05\x06", "zip"),
)  # fmt: skip
CONTAINERS = re.compile(r"\.(parquet|arrow|feather|zip|tgz|tbz2|txz|tar(\.(gz|bz2|xz|zst))?)$", re.IGNORECASE)
LISTS = {".txt", ".lst", ".list"}
SUBTITLES = {".srt", ".vtt"}
TABLES = {".csv", ".tsv", ".json", ".jsonl", ".ndjson"}
LFS = b"version https://git-lfs"
UNREADABLE = (  # Signatures of what is not read, with the remedy.
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it, and name the folder: 7z x FILE -oFOLDER"),
    (b"Rar!", "a RAR archive", "unpack it, and name the folder: unrar x FILE FOLDER/"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it: zstd -d FILE"),
    (b"PARE", "an encrypted parquet file", "decrypt it, and write it without a key"),
    (b"FEA1", "a Feather file of version 1", "write it as parquet: pandas.read_feather(FILE).to_parquet(NEW_FILE)"),
    (b"\x89HDF", "an HDF5 file", "write its pictures or recordings as files or as parquet"),
    (LFS, "a git-LFS pointer, not the file itself", "fetch the file: git lfs pull, or hf download"),
)  # fmt: skip


def format_of(path: Path) -> Format:
    """Returns the format of a container, by its content. Raises UserError for any other file."""
    if path.exists() and not path.is_file():  # A pipe would never end.
        raise UserError(f"{path}: not a regular file", hint=f"read are {READ}")
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="name a file or a folder that can be read") from None
    if not head:
        raise UserError(f"{path}: the file is empty", hint="copy or load it again")
    for start, what, remedy in UNREADABLE:
        if head.startswith(start):
            raise UserError(f"{path}: {what}", hint=remedy)
    for start, format in SIGNATURES:
        if head.startswith(start):
            return format
    suffix, name = path.suffix.lower(), path.name.lower()
    if head[:4] == b"\xff\xff\xff\xff" and suffix in (".arrow", ".feather"):
        return "arrow"
    if head[257:262] == b"ustar" or re.search(r"\.(tar(\.\w+)?|tgz|tbz2|txz)$", name):
        return "tar"
    if suffix in LISTS:
        return "list"
    if suffix in TABLES:
        raise UserError(
            f"{path}: a table, which holds names or addresses, and no files",
            hint="name the folder that holds the files, or a .txt file with a path in each line; texts of recordings: "
            "--transcripts FILE. Nothing is loaded from addresses: img2dataset, say, writes tar files of them",
        )
    broken = CONTAINERS.search(name) is not None
    raise UserError(
        f"{path}: {f'no {suffix[1:]} file, or damaged at its beginning' if broken else 'a file of another format'}",
        hint="copy or load it again" if broken else f"read are {READ}",
    )


READ = (
    "a folder, parquet, Arrow, tar and zip files, a .txt file with a path in each line, and hf://datasets/NAME; "
    "docs/data_sources.md"
)


def entries(path: Path, label: str, reading: ContainerReading) -> Iterator[Entry | RefusedItem]:
    """Yields what a container holds: each item as it is read, and what cannot be read. `label` names it in messages.

    The content of an entry is valid until the next one is taken. Raises UserError if nothing can be read.
    """
    format = format_of(path)
    readers = {"parquet": _in_parquet, "arrow": _in_arrow, "tar": _in_tar, "zip": _in_zip}
    return readers[format](path, label, reading)


def unpacked_bytes(path: Path, reading: ContainerReading) -> int:
    """Returns how many bytes a container takes unpacked; of a compressed tar archive, its own size, as the one of its
    content is known only at its end. 0 if it cannot be read, which `entries` reports."""
    format = format_of(path)
    if format == "zip":
        try:
            with zipfile.ZipFile(path) as archive:
                return sum(
                    one.file_size for one in archive.infolist() if _is_wanted(one.filename, reading, count=False)
                )
        except (zipfile.BadZipFile, OSError):
            return 0
    if format == "parquet":
        parquet, pyarrow = _pyarrow("pyarrow.parquet"), _pyarrow()
        try:
            with parquet.ParquetFile(path) as file:
                name = _column_of(file.schema_arrow, str(path), reading)
                groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
                chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
                return sum(one.total_uncompressed_size for one in chunks if one.path_in_schema.split(".")[0] == name)
        except (pyarrow.ArrowException, OSError):
            return 0
    if format == "arrow":
        _pyarrow()
    return path.stat().st_size


# ------------------------------------------------------------------------------------------------- archives


def _is_wanted(name: str, reading: ContainerReading, *, count: bool = True) -> bool:
    """Returns True for the name of a picture or recording, or of a text of recordings, in an archive. Files of programs
    and hidden ones are left out, as they are in folders."""
    path = PurePosixPath(name.replace("\\", "/"))
    hidden = any(is_of_programs(part) for part in path.parts if part != "..")
    wanted = not hidden and path.suffix.lower() in reading.media.suffixes | reading.media.texts
    if count and not wanted:
        reading.ignored["hidden" if hidden else path.suffix.lower() or "without suffix"] += 1
    return wanted


def _leads_out(where: str, name: str) -> RefusedItem | None:
    if ".." not in name.replace("\\", "/").split("/"):
        return None
    return RefusedItem(where, "unreadable", "its name leads out of the archive")


def _decompressed(raw: IO[bytes]) -> Any:
    """Returns a file that may be compressed, to read its content."""
    start = raw.read(6)
    raw.seek(0)
    if start[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)
    if start[:3] == b"BZh":
        return bz2.BZ2File(raw)
    return lzma.LZMAFile(raw) if start == b"\xfd7zXZ\0" else raw


def _in_tar(path: Path, label: str, reading: ContainerReading) -> Iterator[Entry | RefusedItem]:
    size = path.stat().st_size
    number = 0
    try:
        with path.open("rb") as raw, _decompressed(raw) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            for number, member in enumerate(archive):
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep every header.
                if member.isdir():
                    continue
                where = f"{label}, {member.name}"
                if not _is_wanted(member.name, reading):
                    continue
                if refused := _leads_out(where, member.name):
                    yield refused
                elif member.islnk() or member.issym():
                    yield RefusedItem(where, "unreadable", f"a link to {member.linkname}, without content")
                elif not member.isreg():
                    yield RefusedItem(where, "unreadable", "a device or a pipe, not a file")
                else:
                    share = raw.tell() / size
                    content = archive.extractfile(member)
                    yield Entry(label, where, number, member.name, member.size, content, position=share)
            while plain.read(1 << 20):  # The checksum of compressed content is at its end.
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        if isinstance(error, OSError) and not isinstance(error, tarfile.TarError) and error.errno:
            raise
        yield RefusedItem(label, "unreadable", f"damaged or cut off after {counted(number + 1, 'member')}: {error}")


def _in_zip(path: Path, label: str, reading: ContainerReading) -> Iterator[Entry | RefusedItem]:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"{path}: damaged or cut off ({error})",
            hint=f"copy or load it again; zip -FF {path.name} --out repaired.zip saves what is whole in it",
        ) from None
    with archive:
        members = [one for one in archive.infolist() if not one.is_dir() and _is_wanted(one.filename, reading)]
        if any(one.flag_bits & 1 for one in members):
            raise UserError(f"{path}: encrypted", hint="unpack it with its password, and name the folder: 7z x FILE")
        for number, member in enumerate(members):
            member.filename = _decoded_name(member)
            where = f"{label}, {member.filename}"
            is_link = (member.external_attr >> 16) & 0o170000 == 0o120000
            if refused := _leads_out(where, member.filename):
                yield refused
            elif is_link:
                yield RefusedItem(where, "unreadable", "a link, without content")
            else:
                yield from _zipped(archive, member, label, number, number / len(members))


def _decoded_name(member: zipfile.ZipInfo) -> str:
    """Returns the name of a member. macOS and others write UTF-8 without the mark by which zipfile recognises it."""
    try:
        return member.filename if member.flag_bits & 0x800 else member.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return member.filename


def _zipped(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, label: str, number: int, position: float
) -> Iterator[Entry | RefusedItem]:
    where = f"{label}, {member.filename}"
    try:
        content: IO[bytes] = archive.open(member)
    except (NotImplementedError, zipfile.BadZipFile, RuntimeError) as error:
        yield RefusedItem(where, "unreadable", f"{error}; unpack the archive by another program, such as 7z")
        return
    with content:
        yield Entry(label, where, number, member.filename, member.file_size, content, position=position)


# ------------------------------------------------------------------------------------------------- tables


def _pyarrow(module: str = "pyarrow") -> Any:
    """Returns a module of pyarrow. Raises UserError if it is not installed."""
    require("pyarrow", needed_by="parquet and Arrow files")
    return import_package(module)


def _in_parquet(path: Path, label: str, reading: ContainerReading) -> Iterator[Entry | RefusedItem]:
    parquet, pyarrow = _pyarrow("pyarrow.parquet"), _pyarrow()
    try:
        # A row group may be larger than the memory: its pages are read through a buffer, and decoded a few at once.
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path}: damaged, cut off or of an unknown kind ({first_line(error)})", hint="copy or load it again"
        ) from None
    with file:
        name = _column_of(file.schema_arrow, label, reading)
        columns = [name, *_values_of(file.schema_arrow, name, reading)]
        first, rows = 0, max(1, file.metadata.num_rows)
        for group in range(file.metadata.num_row_groups):
            at, end = first, first + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns, use_threads=False):
                    yield from _rows(batch, name, path, label, at, rows)
                    at += batch.num_rows
            except (pyarrow.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise
                lost = f"{label}, rows {at} to {end - 1}"
                yield RefusedItem(lost, "unreadable", f"damaged or of an unknown codec: {first_line(error)}")
            first = end


def _in_arrow(path: Path, label: str, reading: ContainerReading) -> Iterator[Entry | RefusedItem]:
    pyarrow, ipc = _pyarrow(), _pyarrow("pyarrow.ipc")
    size, at = path.stat().st_size, 0
    with pyarrow.memory_map(str(path)) as source:  # A batch may be larger than the memory.
        try:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = (ipc.open_file if is_file else ipc.open_stream)(source)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
            name = _column_of(reader.schema, label, reading)
            columns = [name, *_values_of(reader.schema, name, reading)]
            for batch in batches:
                for entry in _rows(batch.select(columns), name, path, label, at, 1):
                    if isinstance(entry, Entry):
                        entry.position = min(1.0, source.tell() / size)
                    yield entry
                at += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            fault = f"damaged or cut off after row {at}: {first_line(error)}"
            if not at:
                raise UserError(f"{path}: {fault}", hint="copy or load it again") from None
            yield RefusedItem(label, "unreadable", fault)


def _storage(kind: Any) -> Any:
    return getattr(kind, "storage_type", kind)


def _holds(kind: Any) -> str:
    """Returns what a column of a type may hold: "bytes", "struct" (bytes and path), "text", "value", or "other"."""
    types = _pyarrow("pyarrow.types")
    kind = _storage(kind)
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_struct(kind):
        parts = {kind.field(index).name for index in range(kind.num_fields)}
        return "struct" if "bytes" in parts or ("path" in parts and "array" not in parts) else "other"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return "bytes"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    is_number = types.is_primitive(kind) or types.is_decimal(kind)
    return "value" if is_number and not types.is_temporal(kind) else "other"


def _values_of(schema: Any, media_column: str, reading: ContainerReading) -> list[str]:
    """Returns the columns that are read beside that of the media: for recordings all texts and numbers."""
    types = _pyarrow("pyarrow.types")
    named = [
        one.name
        for one in schema
        if one.name != media_column
        and (_holds(one.type) in ("text", "value") or (one.name == "json" and types.is_struct(one.type)))
    ]
    return list(dict.fromkeys(named)) if reading.media.texts else [one for one in named if one in NAME_COLUMNS]


def _column_of(schema: Any, label: str, reading: ContainerReading) -> str:
    """Returns the column of pictures or recordings: the chosen one, the one that the Hub's metadata give, one of bytes
    and path, one of bytes, or one of paths with a usual name. Raises UserError if there is none, or several."""
    media = reading.media
    held: dict[str, str] = {one.name: _holds(one.type) for one in schema}
    found = ", ".join(f"{one.name} ({_storage(one.type)})"[:80] for one in schema) or "none"
    if reading.column:
        if held.get(reading.column) not in ("bytes", "struct", "text"):
            raise UserError(
                f"{label}: {'column' if reading.column in held else 'no column'} {reading.column}"
                f"{' holds no ' + media.noun if reading.column in held else ''}; columns: {found}",
                hint="--column takes one of bytes, of bytes and paths, or of paths",
            )
        return reading.column
    content = [name for name, kind in held.items() if kind in ("bytes", "struct")]
    others = {one.feature for one in MEDIA.values()} - {media.feature}
    features = _features(schema)
    content = [name for name in content if features.get(name) not in others]
    for candidates in (
        [name for name in content if features.get(name) == media.feature],
        [name for name in content if held[name] == "struct" and not _is_other_name(name, media)],
        [name for name in content if held[name] == "bytes" and not _is_other_name(name, media)],
        [name for name, kind in held.items() if kind == "text" and name.lower() in (*media.columns, *PATH_COLUMNS)],
    ):
        usual = sorted((one for one in candidates if one.lower() in media.columns), key=lambda one: _rank(one, media))
        if usual or len(candidates) == 1:
            return usual[0] if usual else candidates[0]
        if candidates and held[candidates[0]] != "text":
            raise UserError(
                f"{label}: several columns may hold the {media.noun}: {', '.join(candidates)}",
                hint=f"choose one: gputrain prepare-data --column {candidates[0]}",
            )
    raise _no_column(label, held, found, media, features)


def _rank(name: str, media: Media) -> int:
    return media.columns.index(name.lower())


def _is_other_name(name: str, media: Media) -> bool:
    """Returns True for the usual name of the other kind of content."""
    return any(name.lower() in other.columns for other in MEDIA.values() if other is not media)


def _features(schema: Any) -> dict[str, str]:
    """Returns the types of columns that the Hub's library has noted in a schema."""
    try:
        noted = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: str(kind.get("_type", "")) for name, kind in noted.items() if isinstance(kind, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _no_column(label: str, held: dict[str, str], found: str, media: Media, features: dict[str, str]) -> UserError:
    other = next(one for one in MEDIA.values() if one is not media)
    hint = "rename its column to " + media.columns[0] + ", or choose it: gputrain prepare-data --column NAME"
    if any(name.lower() in other.columns or features.get(name) == other.feature for name in held):
        hint = f"it holds {other.noun}: choose a --kind of model that is trained on them"
    elif any(kind == "other" and name.lower().rstrip("s") in media.columns for name, kind in held.items()):
        hint = (
            f"lists and arrays are not read: write a row for each of the {media.noun}, as encoded bytes, such as those "
            f'of datasets.Dataset.cast_column("{media.columns[0]}", datasets.{media.feature}())'
        )
    elif any("url" in name.lower() for name in held):
        hint = "nothing is loaded from the addresses in it: img2dataset, say, loads them into tar files, which are read"
    return UserError(f"{label}: no column of {media.noun}; columns: {found}", hint=hint)


def _rows(batch: Any, name: str, path: Path, label: str, first: int, rows: int) -> Iterator[Entry | RefusedItem]:
    """Yields the rows of a batch, numbered from `first`."""
    column = batch.column(batch.schema.get_field_index(name))
    column = getattr(column, "storage", column)
    kind = _holds(column.type)
    parts: dict[str, Any] = {{"bytes": "bytes", "text": "path"}.get(kind, ""): column}
    if kind == "struct":
        names = [column.type.field(index).name for index in range(column.type.num_fields)]
        parts = dict(zip(names, column.flatten(), strict=True))
    others = [one for one in batch.schema.names if one != name]
    for index in range(batch.num_rows):
        number = first + index
        where = f"{label}, row {number}"
        cells = {one: batch.column(batch.schema.get_field_index(one))[index].as_py() for one in others}
        if isinstance(nested := cells.get("json"), dict):  # In the Hub's tables of WebDataset, the object of NAME.json.
            cells = {key: value for key, value in nested.items() if isinstance(value, str | int | float)} | cells
        values = {key: _value(value) for key, value in cells.items() if not isinstance(value, dict)}
        content = parts["bytes"][index] if "bytes" in parts else None
        given = parts["path"][index].as_py() if "path" in parts else None
        given = given if isinstance(given, str) else ""
        named = given or next((values[one] for one in NAME_COLUMNS if isinstance(values.get(one), str)), "")
        share = number / rows if rows > 1 else 0.0
        if content is not None and content.is_valid:
            buffer = content.as_buffer() if hasattr(content, "as_buffer") else content.as_py()
            yield Entry(label, where, number, named, len(buffer), memoryview(buffer), None, values, share)
        else:
            yield _at_path(path, given, where, Entry(label, where, number, named, 0, None, None, values, share))


def _value(value: Any) -> Any:
    """Returns a value of a cell as JSON takes it: databases write identifiers and times as decimals."""
    if not isinstance(value, Decimal):
        return value
    return int(value) if value == value.to_integral_value() else float(value)


def _at_path(container: Path, given: str, where: str, entry: Entry) -> Entry | RefusedItem:
    """Returns a row that names a file; the reason for leaving it out if there is no such file."""
    if not given:
        return RefusedItem(where, "unreadable", "an empty cell: neither bytes nor a path")
    if re.match(r"[a-z0-9+]+://", given, re.IGNORECASE):
        return RefusedItem(where, "unreadable", f"an address, from which nothing is loaded: {given[:80]}")
    try:
        file = container.parent / given
        if not file.is_file():
            return RefusedItem(where, "unreadable", f"no bytes, and no file {given[:120]} beside {container.name}")
        entry.path, entry.size = file, file.stat().st_size
    except (OSError, ValueError):  # Bytes in Base64, say, are no path.
        return RefusedItem(where, "unreadable", f"no bytes, and {given[:40]}... is no path")
    return entry
