"""Unpacks archives that come from elsewhere: no path leaves the folder, no links, no more bytes than is plausible."""

import gzip
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from gputrain.errors import UserError, first_line
from gputrain.figures import format_bytes

ENDINGS = (".zip", ".tar.gz", ".tgz", ".tar")
LARGEST_RATIO = 20  # Bytes of the content for each of the archive: weights and sound hardly shrink.
SMALL = 100_000_000  # Bytes that every archive may have.
BLOCK = 1 << 20
DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError,
)  # fmt: skip
PADDING = 100  # Blocks that an archive may have after its last file.


def stem_of(name: str) -> str:
    """Returns the name of an archive without its ending; an empty text if it is none."""
    return next((name[: -len(ending)] for ending in ENDINGS if name.lower().endswith(ending)), "")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a new folder, which appears when it is complete.

    Raises UserError for a damaged archive, and for one whose content leaves the folder, is no plain file, or is more
    than LARGEST_RATIO times as large as the archive; OSError for the disk.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        limit = max(SMALL, LARGEST_RATIO * archive.stat().st_size)
        members = _zip_members if archive.name.lower().endswith(".zip") else _tar_members
        for name, size, source in members(archive):
            limit -= _write(archive, aside, name, size, source, limit)
    except DAMAGE as error:
        raise UserError(
            f"{archive}: damaged, or not an archive that can be unpacked: {first_line(error).partition(':')[0]}",
            hint="run the same command again, which downloads it anew",
        ) from None
    else:
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _zip_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                continue
            if kind not in (0, stat.S_IFREG):
                raise _refused(archive, info.filename, "is no plain file")
            if info.flag_bits & 1:
                raise _refused(archive, info.filename, "is encrypted")
            with opened.open(info) as source:
                yield info.filename, info.file_size, source


def _tar_members(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with tarfile.open(archive, "r:*") as opened:
        for info in opened:
            if info.isdir():
                continue
            source = opened.extractfile(info) if info.isreg() else None
            if source is None:
                raise _refused(archive, info.name, "is no plain file")
            yield info.name, info.size, source
        for _ in range(PADDING):  # The checksum of a compressed archive is at its end.
            if opened.fileobj is None or not opened.fileobj.read(BLOCK):
                break


def _write(archive: Path, folder: Path, name: str, size: int, source: IO[bytes], limit: int) -> int:
    """Write one file of an archive, and return its bytes."""
    parts = PurePosixPath(name.replace("\\", "/"))
    # A colon is a drive or a hidden stream on Windows.
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or ":" in name or "\0" in name:
        raise _refused(archive, name, "would be written outside its folder")
    if size > limit:
        raise _too_large(archive)
    target = folder.joinpath(*parts.parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise _refused(archive, name, "is in it twice")
    with target.open("xb") as file:
        shutil.copyfileobj(source, file, BLOCK)  # Neither format yields more than the stated size.
        file.flush()
        os.fsync(file.fileno())
    return size


def _refused(archive: Path, name: str, reason: str) -> UserError:
    return UserError(
        f"{archive.name}: is not unpacked, since {name!r} in it {reason}",
        hint="unpack it with a program of your own if you trust it, and name the path of what you need",
    )


def _too_large(archive: Path) -> UserError:
    size = archive.stat().st_size
    return UserError(
        f"{archive.name}: is not unpacked, since its {format_bytes(size)} hold more than "
        f"{format_bytes(max(SMALL, LARGEST_RATIO * size))}",
        hint="unpack it with a program of your own if you trust it, and name the path of what you need",
    )


def content_of(folder: Path) -> Path:
    """Returns the folder that an archive's files are in: archives often hold a single folder."""
    while True:
        inside = [path for path in folder.iterdir() if path.name != "__MACOSX" and not path.name.startswith(".")]
        if len(inside) != 1 or not inside[0].is_dir():
            return folder
        folder = inside[0]
