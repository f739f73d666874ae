"""Unpacks zip and tar archives whole or not at all: no path leaves the folder, no links, no more bytes than plausible.

Both formats go through one writer, which checks names more strictly than tarfile's filters do (these let links within
the folder pass, and are not in the first releases of Python 3.10 and 3.11).
"""

import bz2
import errno
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from gputrain.errors import UserError, first_line
from gputrain.formatting import format_bytes, shell_command

ENDINGS = (".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar")
LARGEST_RATIO = 100  # Bytes of the content for each of the archive: weights, sound and pictures shrink much less.
SMALL = 100_000_000  # Bytes that every archive may have.
BLOCK = 1 << 20
OF_MACOS = ("__MACOSX", ".DS_Store", "._")  # Beginnings of the names of what macOS adds to archives.
# RuntimeError: versions of zip that zipfile does not know, and tarfile's recursion through headers with long names.
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)
BY_HAND = "unpack it with a program of your own if you trust it, and name what you need of it"


def stem_of(name: str) -> str:
    """Returns the name of an archive without its ending; an empty text if it is none."""
    return next((name[: -len(ending)] for ending in ENDINGS if name.lower().endswith(ending)), "")


def content_of(folder: Path) -> Path:
    """Returns the folder that an archive's files are in: archives often hold a single folder."""
    while True:
        inside = [path for path in folder.iterdir() if not path.name.startswith(OF_MACOS)]
        if len(inside) != 1 or not inside[0].is_dir():
            return folder
        folder = inside[0]


def unpack(archive: Path, folder: Path, progress: Callable[[float], None] = lambda share: None) -> None:
    """Unpacks an archive into a new folder, which appears when it is complete. `progress` gets the share that is read.

    Raises UserError for a damaged archive, and for one that holds anything but plain files with plain names, a name
    twice, or more than `room_for` allows; OSError for the disk.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        room, packed = room_for(str(archive), archive.stat().st_size, aside), max(1, archive.stat().st_size)
        with archive.open("rb") as raw:
            is_zip = raw.read(2) == b"PK" or archive.name.lower().endswith(".zip")
            raw.seek(0)
            for name, content in (_zip_members if is_zip else _tar_members)(archive, raw, room):
                _add(archive, aside, name, content)
                progress(min(1.0, raw.tell() / packed))
        getattr(os, "sync", lambda: None)()  # The folder stands for its content, also after a power failure.
        os.replace(aside, folder)
    except (*DAMAGE, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise UserError(
            f"{archive}: damaged, or not an archive that can be unpacked: {first_line(error).partition(':')[0]}",
            hint="load or copy it again, or unpack it with another program, such as 7z",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def room_for(what: str, packed: int, folder: Path) -> int:
    """Returns how many bytes the content of so many packed bytes may have. Raises UserError if the disk of `folder` has
    less than the packed bytes free."""
    free = shutil.disk_usage(folder).free
    if packed > free:
        raise UserError(
            f"{what}: unpacking takes {format_bytes(packed)}, and the disk of {folder} has {format_bytes(free)} free",
            hint="free some space, or choose another disk: by --output-dir, and for temporary copies by TMPDIR",
        )
    return min(max(SMALL, LARGEST_RATIO * packed), free)


def too_large(what: str, packed: int, room: int) -> UserError:
    return UserError(
        f"{what}: is not unpacked, since its {format_bytes(packed)} hold more than {format_bytes(room)}",
        hint=f"free some space, or {BY_HAND}",
    )


def fault_of_name(name: str) -> str:
    """Returns why no file may have a name that a stranger has chosen; an empty text if one may."""
    path = PurePosixPath(name.replace("\\", "/"))
    # A colon is a drive or a hidden stream on Windows.
    if path.is_absolute() or ".." in path.parts or not path.parts or ":" in name or "\0" in name:
        return "would be written outside its folder"
    if re.search("[\ud800-\udfff]", name):
        return "has a name that is not UTF-8"
    return "has a name that Windows reserves" if os.name == "nt" and PureWindowsPath(name).is_reserved() else ""


def write_new(path: Path, blocks: Iterable[bytes]) -> None:
    """Writes a file that is not there yet. Its time follows from its content, so that a preparation of the same data
    finds its earlier results."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("xb") as file:
        for block in blocks:
            digest.update(block)
            file.write(block)
    # Even seconds, as FAT has no others, between 2001 and 2017.
    seconds = 1_000_000_000 + int.from_bytes(digest.digest(), "big") % 250_000_000 * 2
    os.utime(path, (seconds, seconds))


def _add(archive: Path, folder: Path, name: str, content: IO[bytes] | None) -> None:
    """Writes a member; `content` is None for anything but a plain file."""
    fault = "is no plain file" if content is None else fault_of_name(name)
    try:
        if content is not None and not fault:
            target = folder.joinpath(*PurePosixPath(name.replace("\\", "/")).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_new(target, iter(lambda: content.read(BLOCK), b""))
    except (FileExistsError, NotADirectoryError):
        fault = "is there twice"
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ):
            raise
        fault = "has a name that this disk cannot hold"
    if fault:
        raise UserError(f"{archive}: is not unpacked, since its member {name[:200]!r} {fault}", hint=BY_HAND)


def _zip_members(archive: Path, raw: IO[bytes], room: int) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(raw) as opened:
        members = [info for info in opened.infolist() if not info.is_dir()]
        if sum(info.file_size for info in members) > room:  # zipfile yields no more of a file than its stated size.
            raise too_large(str(archive), archive.stat().st_size, room)
        for info in members:
            if info.flag_bits & 1:
                hint = "unpack it with its password, and name the folder: 7z x FILE"
                raise UserError(
                    f"{archive}: is not unpacked, since its member {info.filename!r} is encrypted", hint=hint
                )
            is_plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
            with opened.open(info) as content:
                yield _name_of(archive, info), content if is_plain else None


def _name_of(archive: Path, info: zipfile.ZipInfo) -> str:
    """Returns the name of a member, of which only those that are marked are surely UTF-8: macOS and others write it
    without the mark, and Windows writes the code page of its language, which nothing states. Raises UserError for
    those."""
    stated = info.orig_filename.replace(os.sep, "/")
    # Another name than that of the entry is from a field with its Unicode form.
    if info.flag_bits & 0x800 or stated.isascii() or stated != info.filename.replace(os.sep, "/"):
        return info.filename
    try:
        return info.orig_filename.encode("cp437").decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"{archive}: is not unpacked, since nothing states the code page of its names, such as {info.filename!r}",
            hint="unpack it with that of its computer (cp866 is Russian, cp932 Japanese), by Python 3.11 or newer, and "
            f"name the folder: python -m zipfile --metadata-encoding cp866 -e {shell_command(archive)} FOLDER",
        ) from None


class _Plain:
    """The decompressed bytes of a tar archive, of which no more than `room` are read: a header may state any size."""

    def __init__(self, archive: Path, raw: IO[bytes], room: int) -> None:
        start = raw.read(6)
        raw.seek(0)
        openers: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
        self._file = next((opened(raw) for mark, opened in openers.items() if start.startswith(mark)), raw)
        self._archive, self._room, self._left, self.tail = archive, room, room, b""

    def read(self, size: int) -> bytes:
        block = bytes(self._file.read(size))
        self._left -= len(block)
        if self._left < 0:
            raise too_large(str(self._archive), self._archive.stat().st_size, self._room)
        self.tail = (self.tail + block)[-512:]
        return block


def _tar_members(archive: Path, raw: IO[bytes], room: int) -> Iterator[tuple[str, IO[bytes] | None]]:
    plain: Any = _Plain(archive, raw, room)
    with tarfile.open(fileobj=plain, mode="r|") as opened:
        while info := opened.next():
            opened.members = []  # type: ignore[attr-defined]  # tarfile would keep every header.
            if not info.isdir():
                # A sparse file takes little of an archive, and may be of any size.
                yield info.name, opened.extractfile(info) if info.isreg() and not info.issparse() else None
        # The checksum of a compressed archive is at its end, and a second archive would be behind that of the first.
        while rest := opened.fileobj.read(BLOCK):
            if rest.strip(b"\0"):
                raise EOFError("it goes on behind its end, as two archives in one file do")
    if plain.tail.strip(b"\0"):
        raise EOFError("cut off: it does not end with blocks of zeros")
