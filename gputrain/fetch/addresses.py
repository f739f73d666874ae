"""Files at addresses other than the Hub's, fetched by pooch into the user's cache, which all runs share.

`fetched/NAME-HASH` of the cache, where HASH stands for the address, has the file, or the folder of an archive's
content. It appears when that is complete and verified.
"""

import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from gputrain import __version__
from gputrain.caches import cache_folder
from gputrain.errors import UserError, without_secrets
from gputrain.fetch.archives import LARGEST_RATIO, SMALL, content_of, stem_of, unpack
from gputrain.fetch.hub import Faults, fault_of_download, is_offline
from gputrain.formatting import format_bytes

log = logging.getLogger(__name__)

RETRIES = 1  # pooch counts another SHA-256 as a failure, too, so that each one loads the whole file again.
TIMEOUTS = (10.0, 60.0)  # Seconds for a connection, and between two blocks.
BLOCK = 1 << 16  # Bytes; a compressed block can become a thousand times as large in memory.
SPARED = 1_000_000_000  # Bytes of the disk that a file of unknown size leaves free, for the checkpoints of trainings.
LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1")
MOVE = "set XDG_CACHE_HOME to another disk"
FAULTS: Faults = (
    ({401, 403, 407}, "{server} refuses it without a login (status {status})",
     "download it in a browser and name its path, or write the login into ~/.netrc{more}"),
    ({404, 410}, "there is no such file (status {status})",
     "check the address; gputrain fetch --list shows the known ones{more}"),
)  # fmt: skip


@dataclass(frozen=True)
class Address:
    """A file on the web, and what is published about it."""

    label: str  # The name by which the user knows it.
    url: str
    size: int | None = None  # Bytes.
    sha256: str = ""
    page: str = ""
    licence: str = ""

    @property
    def file_name(self) -> str:
        """The last part of the address; empty if it cannot be the name of a file here."""
        return _plain_name(unquote(urlsplit(self.url).path))

    @property
    def place(self) -> Path:
        """The folder of the cache that has it."""
        plain = re.sub(r"[^\w.-]+", "_", self.file_name)[:80].strip("._") or "file"
        return cache_folder() / "fetched" / f"{plain}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"


def _plain_name(path: str) -> str:
    """Returns the last part of a path as the name of a file here; nothing if it cannot be one."""
    name = re.sub(r'[\x00-\x1f<>:"|?*]', "_", path.replace("\\", "/").rpartition("/")[2]).strip()
    return "" if name in ("", ".", "..") else name[-200:]


def address_of_url(url: str) -> Address:
    """Returns the address of a file that the user names. Raises UserError if it is not https."""
    refuse_insecure(url)
    # The file, not its page.
    return Address(shown(url), re.sub(r"^(https://(?:www\.)?github\.com/[^/]+/[^/]+)/blob/", r"\1/raw/", url))


def shown(url: str) -> str:
    """Returns an address without its query and password, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def refuse_insecure(url: str, origin: str = "") -> None:
    """Raises UserError for an address that is not https, unless it is on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if not host or parts.scheme not in ("http", "https"):
        raise UserError(f"{url!r}: is no web address", hint="an address begins with https:// and the name of a server")
    if parts.scheme == "http" and not LOOPBACK.fullmatch(host):
        came = f"{shown(origin)}: redirects to {shown(url)}, which" if origin else f"{shown(url)}:"
        raise UserError(
            f"{came} is not encrypted: what it sends could be changed on the way",
            hint="use the https address; or download the file another way, and name its path",
        )


def fetch_address(address: Address) -> Path:
    """Returns the file of an address, or the folder of its unpacked archive, in the cache; it is downloaded if it is
    not there, or has another SHA-256 than the published one. Raises UserError with the remedy."""
    import pooch

    found = _content(address.place)
    if found is not None and (found.is_dir() or not address.sha256 or pooch.file_hash(found) == address.sha256):
        return found
    if is_offline():
        raise UserError(
            f"{address.label}: is {'damaged in' if found else 'not in'} the cache, and nothing may be downloaded",
            hint=f"load it ahead of time, without --offline: gputrain fetch {address.label}",
        )
    if found is not None:
        log.warning("%s: has another SHA-256 than the published one; downloading it again", found)
    facts = f" ({format_bytes(address.size)})" if address.size else ""
    licence = f", licence {address.licence}" if address.licence else ""
    log.info("downloading %s%s from %s%s", address.label, facts, urlsplit(shown(address.url)).netloc, licence)
    try:
        return _fetch(address, replaces=found is not None)
    except (OSError, ValueError) as error:
        page = f"; its page is {address.page}" if address.page else ""
        server = urlsplit(shown(address.url)).netloc
        fault = fault_of_download(error, address.label, FAULTS, cache_folder(), MOVE, more=page, server=server)
        raise UserError(without_secrets(fault.message), hint=fault.hint) from None


def _content(place: Path) -> Path | None:
    """Returns the file in a place of the cache, or the folder of an archive's content; None if nothing is there."""
    only = next(place.glob("*"), None)
    return content_of(only) if only and only.is_dir() else only


def _fetch(address: Address, *, replaces: bool) -> Path:
    """Fills the place of an address. Raises UserError, OSError, which the errors of requests are, or ValueError."""
    import pooch

    pooch.get_logger().setLevel(logging.ERROR)  # It would print the whole address.
    root = address.place.parent
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as aside:
        download = Download(address, address.size or max(0, shutil.disk_usage(root).free - SPARED))
        name = address.file_name or "file"
        registry: dict[str, Any] = {name: address.sha256 or None}
        store = pooch.create(aside, "", registry=registry, urls={name: address.url}, retry_if_failed=RETRIES)
        file = Path(store.fetch(name, downloader=download))
        content = Path(aside, "content")
        content.mkdir()
        name = name if Path(name).suffix else download.stated_name or name
        if stem_of(name):
            archive = file.rename(Path(aside, name))
            unpack(archive, content / stem_of(name))
        else:
            file.rename(content / name)
        if replaces:
            shutil.rmtree(address.place, ignore_errors=True)
        try:
            os.replace(content, address.place)
        except OSError:
            if not address.place.is_dir():  # Otherwise another process was faster.
                raise
    return _content(address.place) or address.place


class Download:
    """Downloads a file for pooch by its own downloader, and refuses what is not the file: an answer that is not
    encrypted or is a web page, more bytes than are published or the disk can spare, and fewer than are stated."""

    def __init__(self, address: Address, limit: int) -> None:
        self.address, self.limit = address, limit  # In bytes.
        self.file: IO[bytes]
        self.stated: int | None = None  # The bytes that the server says it sends.
        self.stated_name = ""

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        from pooch import HTTPDownloader

        headers = {"User-Agent": f"gputrain/{__version__}", "Accept-Encoding": "identity"}
        hooks = {"response": self.check}
        get = HTTPDownloader(sys.stderr.isatty(), BLOCK, timeout=TIMEOUTS, headers=headers, hooks=hooks)
        with open(output_file, "wb") as self.file:
            get(url, self, pooch)
            if self.file.tell() == 0 or self.stated not in (None, self.file.tell()):
                raise ValueError("the connection was cut")

    def check(self, response: Any, *_: Any, **__: Any) -> None:
        """Raises UserError for an answer that is not the file, and for a redirect that is not encrypted."""
        refuse_insecure(response.url)
        headers = response.headers
        if response.is_redirect:
            refuse_insecure(urljoin(response.url, headers["Location"]), response.url)
            return
        name = _plain_name(unquote(urlsplit(response.url).path))
        is_page = response.ok and headers.get("Content-Type", "").lower().startswith("text/html")
        if is_page and not name.endswith((".html", ".htm")):
            raise UserError(
                f"{shown(response.url)}: the server sent a web page instead of the file",
                hint="open the address in a browser: it may be a login, a network's welcome page, or a page about the "
                "file, which has another address itself (on GitHub /raw/ in the place of /blob/)",
            )
        disposition = Message()
        disposition["Content-Disposition"] = headers.get("Content-Disposition", "")
        self.stated_name = _plain_name(disposition.get_filename() or name)
        length = headers.get("Content-Length", "")
        is_plain = headers.get("Content-Encoding", "identity").lower() == "identity"
        self.stated = int(length) if length.isdecimal() and is_plain else None
        if (
            length.isdecimal() and not is_plain and not self.address.size
        ):  # It is unpacked, though nobody asked for that.
            self.limit = min(self.limit, max(SMALL, LARGEST_RATIO * int(length)))
        self.refuse_more(self.stated or 0)

    def refuse_more(self, total: int) -> None:
        if total > self.limit:
            known = "are published" if self.address.size else "the disk can spare, or its packed size makes plausible"
            raise UserError(
                f"{self.address.label}: the server sends more than the {self.limit:,} bytes that {known}",
                hint=f"see whether it is the file; for a larger one, free some space, or {MOVE}",
            )

    def write(self, block: bytes) -> None:
        self.refuse_more(self.file.tell() + len(block))
        self.file.write(block)

    def flush(self) -> None:
        """Leaves it to the file when to write: pooch calls this after each block."""
