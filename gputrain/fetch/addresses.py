"""Files at addresses other than the Hub's, in the user's cache, shared between runs, or in a folder of the user.

A file is in `fetched/NAME-HASH/` of the cache, where HASH stands for its address; an archive is unpacked there.
`fetched/NAME-HASH.json` lists the files with their sizes and SHA-256, and is written when they are complete.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gputrain.caches import cache_folder
from gputrain.errors import UserError
from gputrain.fetch.archives import content_of, stem_of, unpack
from gputrain.fetch.catalogue import CatalogueEntry
from gputrain.fetch.download import (
    ByteProgress,
    RemoteFile,
    Server,
    download,
    only_process,
    refuse_insecure,
    shown,
    writing_into,
)  # fmt: skip
from gputrain.fetch.files import NOT_REPLACED, copy_files, fault_of, files_below, sha256
from gputrain.fetch.hub import is_offline
from gputrain.figures import format_bytes
from gputrain.stored import from_json

log = logging.getLogger(__name__)

LINE_SECONDS = 30.0  # Time between lines of progress.


@dataclass(frozen=True)
class Address:
    """A file on the web, and what is published about it."""

    label: str  # The name by which the user knows it.
    url: str
    file_name: str
    size: int | None = None  # Bytes.
    sha256: str = ""
    page: str = ""
    licence: str = ""
    unpacks: bool = False

    @property
    def remote(self) -> RemoteFile:
        return RemoteFile(self.url, self.size, self.sha256, self.page)

    @property
    def folder_name(self) -> str:
        return stem_of(self.file_name) or self.file_name

    @property
    def key(self) -> str:
        """The name of its folder in the cache."""
        plain = re.sub(r"[^\w.-]+", "_", self.folder_name)[:80].strip("._")
        return f"{plain}-{_digest(self.url)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def address_of(entry: CatalogueEntry) -> Address:
    """Returns the address of an entry of the list that is not on the Hub."""
    digest = entry.sha256.get(entry.file_name, "")
    return Address(
        entry.name, entry.url, entry.file_name, entry.bytes or None, digest, entry.page, entry.licence, entry.unpack
    )


def address_of_url(url: str) -> Address:
    """Returns the address of a file that the user names.

    Its server is asked for the name of the file if the address does not end with one. Raises UserError if it is not
    https, or names no file.
    """
    refuse_insecure(url)
    url = re.sub(r"^(https://(?:www\.)?github\.com/[^/]+/[^/]+)/blob/", r"\1/raw/", url)  # The file, not its page.
    name = _plain_name(unquote(urlsplit(url).path))
    if not Path(name).suffix:
        records = [_read_record(path) for path in _root().glob(f"*-{_digest(url)}.json")]
        if fetched := next(filter(None, records), None):
            name = fetched.file_name
        elif not is_offline():
            name = _plain_name(Server(RemoteFile(url)).name_of_file()) or name
    if not name:
        raise UserError(
            f"{shown(url)}: names no file",
            hint="copy the address of the file itself, such as the one behind its download button",
        )
    return Address(shown(url), url, name, unpacks=bool(stem_of(name)))


def _plain_name(path: str) -> str:
    """Returns the last part of a path as the name of a file here; nothing if it cannot be one."""
    name = re.sub(r'[\x00-\x1f<>:"|?*]', "_", path.replace("\\", "/").rpartition("/")[2]).strip()
    return "" if name in ("", ".", "..") else name[-200:]


# ------------------------------------------------------------------------------------------------ what has been fetched


@dataclass(frozen=True)
class FetchedFile:
    size: int
    sha256: str


@dataclass(frozen=True)
class FetchedFiles:
    """Lists what was downloaded from an address: files by their names in the folder."""

    url: str
    file_name: str  # That at the address: of an archive, its own.
    files: dict[str, FetchedFile]


def _root() -> Path:
    return cache_folder() / "fetched"


def _read_record(path: Path) -> FetchedFiles | None:
    try:
        return from_json(FetchedFiles, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


class FetchedPlace:
    """The place of an address's file in the cache, or below a folder of the user."""

    def __init__(self, address: Address, folder: Path | None = None) -> None:
        self.address, self.is_in_cache, root = address, folder is None, _root()
        if folder is None:
            self.base = root / address.key
            self.record_path = root / f"{address.key}.json"
        else:
            self.base = folder
            self.record_path = root / "elsewhere" / f"{address.key}-{_digest(str(folder.resolve()))}.json"
        self.file = self.base / address.file_name  # Of no meaning for an archive.

    @property
    def path(self) -> Path:
        """The file, or the folder with the files of an archive, which options take."""
        if not self.address.unpacks:
            return self.file
        return content_of(self.base) if self.is_in_cache else self.base

    def state(self, *, thoroughly: bool = False) -> str | None:
        """Returns what is wrong with what is there; an empty text if nothing is, None if nothing is there.

        Sizes are compared, and if it is done `thoroughly`, each SHA-256.
        """
        record = _read_record(self.record_path)
        if not (self.base if self.address.unpacks else self.file).exists() or (record is None and self.address.unpacks):
            return None
        if record is None:
            if self.address.size is None and not self.address.sha256:
                return f"{self.file}: is there already, and nothing tells whether it is the same"
            fault = fault_of(self.file, self.address.size, self.address.sha256)
            return f"{self.file}: {fault}" if fault else ""
        for name, file in record.files.items():
            if not (self.base / name).is_file():
                return f"{self.base / name}: is missing" if self.is_in_cache else None
            if fault := fault_of(self.base / name, file.size, file.sha256 if thoroughly else ""):
                return f"{self.base / name}: {fault}"
        return ""

    def fill(self, progress: ByteProgress) -> None:
        """Download the file, or copy it from the cache, where archives are unpacked first."""
        names = [self.address.file_name]
        if not self.is_in_cache and (self.address.unpacks or FetchedPlace(self.address).state() == ""):
            origin = fetch_address(self.address, thoroughly=True, progress=progress)
            files = files_below(origin) if self.address.unpacks else {self.address.file_name: origin}
            copy_files(files, self.base)
            names = [*files]
        elif self.address.unpacks:
            aside = self.base.with_name(f"{self.base.name}.download")
            archive = aside / self.address.file_name
            download(self.address.remote, archive, progress=progress)
            try:
                unpack(archive, aside / "content")
                shutil.rmtree(self.base, ignore_errors=True)
                os.replace(aside / "content", self.base)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            names = [*files_below(self.base)]
        else:
            download(self.address.remote, self.file, anew=True, progress=progress)
        self._write_record(names)

    def _write_record(self, names: Sequence[str]) -> None:
        known = "" if self.address.unpacks else self.address.sha256  # It has been verified.
        files = {
            name: FetchedFile((self.base / name).stat().st_size, known or sha256(self.base / name)) for name in names
        }
        record = FetchedFiles(shown(self.address.url), self.address.file_name, files)
        self.record_path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.record_path.with_suffix(".partial")
        aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
        os.replace(aside, self.record_path)


def fetch_address(
    address: Address, folder: Path | None = None, *, thoroughly: bool = False, progress: ByteProgress | None = None
) -> Path:
    """Returns the file of an address, or the folder of its unpacked archive, in the cache or below `folder`; it is
    downloaded if it is not there.

    With `thoroughly`, what is there is verified by its SHA-256. What is damaged in the cache is downloaded again; in
    the user's folder nothing is replaced. Raises UserError with the remedy.
    """
    place = FetchedPlace(address, folder)
    with writing_into(place.base):
        state = place.state(thoroughly=thoroughly)
        if state == "":
            return place.path
        if state and not place.is_in_cache:
            raise UserError(state, hint=NOT_REPLACED)
        if is_offline() and (place.is_in_cache or FetchedPlace(address).state() != ""):
            raise UserError(
                f"{address.label}: {'is not in the cache' if state is None else state}, and nothing may be downloaded",
                hint=f"load it ahead of time, without --offline: gputrain fetch {address.label}",
            )
        with only_process(place.file.with_name(f"{place.file.name}.lock"), address.label):
            if place.state(thoroughly=thoroughly) != "":
                if state:
                    log.warning("%s; downloading it again", state)
                size = f" ({format_bytes(address.size)})" if address.size else ""
                licence = f", licence {address.licence}" if address.licence else ""
                host = urlsplit(shown(address.url)).netloc
                log.info("downloading %s%s from %s%s", address.label, size, host, licence)
                place.fill(progress or logged(address.label))
    return place.path


def logged(label: str, clock: Callable[[], float] = time.monotonic) -> ByteProgress:
    """Returns a report of progress as a line every half minute."""
    line_at = clock() + LINE_SECONDS

    def report(done: int, total: int | None) -> None:
        nonlocal line_at
        if clock() >= line_at:
            line_at = clock() + LINE_SECONDS
            of = f" of {format_bytes(total)}" if total else ""
            log.info("%s: %s%s", label, format_bytes(done), of)

    return report
