"""Downloads a file: resumed where it broke off, verified, and under its name only when it is complete.

What has arrived is beside the final name, in NAME.partial, and NAME.partial.json has what the server said of the file.
"""

import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from gputrain import __version__
from gputrain.caches import cache_folder
from gputrain.errors import UserError, first_line
from gputrain.fetch.files import fault_of
from gputrain.figures import format_bytes

log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0, 4.0, 8.0)  # Seconds before the attempts after a failed one.
LONGEST_PAUSE = 120.0  # Seconds; a server that asks for more is left alone.
TIMEOUTS = (10.0, 60.0)  # Seconds for a connection, and between two blocks.
WORTH_IT = 1 << 20  # Bytes by which an attempt does not count as failed.
MOST_REDIRECTS = 10
BLOCK = 1 << 20
OTHER_FOLDER = "load into another folder: gputrain fetch NAME --output-dir FOLDER; XDG_CACHE_HOME moves the cache"
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}  # Statuses after which another attempt may succeed.
ByteProgress = Callable[[int, int | None], None]  # Called with the bytes that are there, and of how many.

# The beginning of what servers send instead of a file, and what it is; and the types that they state for it.
OTHER_CONTENT = {
    b"<!doctype html": "a web page",
    b"<html": "a web page",
    b"version https://git-lfs": "a pointer of Git LFS",
}
OTHER_TYPES = {"text/html": "a web page", "application/json": "a message"}
BEGIN_SO = {"a web page": (".html", ".htm"), "a message": (".json", ".jsonl")}  # Files that are such content.


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address, with what is known of it."""

    url: str
    size: int | None = None  # Bytes.
    sha256: str = ""
    page: str = ""  # Where its publisher describes it.

    @property
    def shown(self) -> str:
        """The address without what may be secret."""
        return shown(self.url)


class TryAgain(Exception):
    """An attempt has failed in a way that the next one may not."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause  # Seconds that the server asks for.


def download(
    file: RemoteFile,
    target: Path,
    *,
    anew: bool = False,
    progress: ByteProgress = lambda done, total: None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Download a file to `target`, unless it is there and has the stated size and SHA-256; `anew`, also then.

    Another process that downloads it is waited for. Raises UserError with the remedy; what has arrived by then is kept,
    and a later call continues it.
    """
    refuse_insecure(file.url)
    with writing_into(target.parent), only_process(target, target.name):
        target.parent.mkdir(parents=True, exist_ok=True)
        if not anew and target.is_file() and not fault_of(target, file.size, file.sha256):
            return
        Transfer(file, PartialDownload(target), progress, sleep).run()


def shown(url: str) -> str:
    """Returns an address without its query and password, which may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def without_secrets(text: str) -> str:
    """Returns a text whose addresses are without their queries and passwords."""
    return re.sub(r"https?://[^\s'\"\[\]]+", lambda match: shown(match[0]), text)


def refuse_insecure(url: str, origin: str = "") -> None:
    """Raises UserError for an address that is not https, unless it is on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if not host or parts.scheme not in ("http", "https"):
        raise UserError(f"{url!r}: is no web address", hint="an address begins with https:// and the name of a server")
    if parts.scheme == "http" and not _is_loopback(host):
        came = f"{shown(origin)}: redirects to {shown(url)}, which" if origin else f"{shown(url)}:"
        raise UserError(
            f"{came} is not encrypted: what it sends could be changed on the way",
            hint="use the https address; or download the file another way, and name its path",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raises UserError for an OSError of the block: a full disk, or a folder that cannot be written to."""
    try:
        yield
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else folder
        raise UserError(
            f"{place}: cannot be written: {error.strerror or error}",
            hint=f"see to the disk, or {OTHER_FOLDER}",
        ) from None


@contextlib.contextmanager
def only_process(target: Path, name: str) -> Iterator[None]:
    """Let one process at a time write a file, which messages call `name`; others wait. Where files cannot be locked,
    none waits."""
    from filelock import FileLock, Timeout

    digest = hashlib.sha256(os.fsencode(target.resolve())).hexdigest()[:24]
    lock = FileLock(cache_folder() / "locks" / f"{digest}.lock")
    with contextlib.ExitStack() as stack:
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock.acquire(timeout=0.5))
            except Timeout:
                log.info("another process downloads %s: waiting for it", name)
                stack.enter_context(lock.acquire())
        except (OSError, NotImplementedError) as error:
            log.info("%s cannot be locked (%s): download it with one process at a time", target, error)
        yield


class PartialDownload:
    """Keeps what has arrived of a file in NAME.partial, and what the server said of it in NAME.partial.json."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f"{target.name}.partial")
        self.facts_path = target.with_name(f"{target.name}.partial.json")
        self.facts = self._read_facts()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    @property
    def total(self) -> int | None:
        return self.facts.get("total")

    @property
    def validator(self) -> str:
        """The server's mark of this version of the file."""
        return self.facts.get("validator") or ""

    def _read_facts(self) -> dict[str, Any]:
        try:
            facts = json.loads(self.facts_path.read_text(encoding="utf-8"))
            return {"url": str(facts["url"]), "validator": str(facts["validator"]), "total": facts["total"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def start(self, url: str, validator: str, total: int | None) -> None:
        """Begin anew with a file that the server describes so."""
        self.drop()
        self.facts = {"url": url, "validator": validator, "total": total}
        self.facts_path.write_text(json.dumps(self.facts), encoding="utf-8")
        self.path.touch()

    def drop(self) -> None:
        for path in (self.path, self.facts_path):
            path.unlink(missing_ok=True)
        self.facts = {}

    def write(self, blocks: Iterator[bytes], limit: int | None, progress: ByteProgress) -> bool:
        """Append blocks, and return False as soon as they are more than `limit` bytes in all."""
        done = self.size
        with self.path.open("ab", buffering=0) as file:
            for block in blocks:
                done += len(block)
                if limit is not None and done > limit:
                    return False
                rest = memoryview(block)
                while rest:
                    rest = rest[file.write(rest) :]
                progress(done, limit)
        return True

    def finish(self) -> None:
        """Give the file its final name."""
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path, self.target)
        self.facts_path.unlink(missing_ok=True)


class Server:
    """Sends requests for one file, and explains the answers that are not the file."""

    def __init__(self, file: RemoteFile) -> None:
        import requests

        self.file, self.requests = file, requests
        self.session = requests.Session()  # It uses HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE and ~/.netrc.
        self.session.headers.update({"User-Agent": f"gputrain/{__version__}", "Accept-Encoding": "identity"})
        self.has_answered = False

    def name_of_file(self) -> str:
        """Returns the name that the server gives the file, which may be a path. Raises UserError."""
        from email.message import Message

        try:
            with self.session, self.open({}) as response:
                self.check_status(response)
                header = Message()
                header["Content-Disposition"] = response.headers.get("Content-Disposition", "")
                return header.get_filename() or unquote(urlsplit(response.url).path)
        except TryAgain as error:
            raise UserError(f"{self.file.shown}: {error}", hint="run the same command again later") from None

    def open(self, headers: dict[str, str]) -> Any:
        """Returns the answer to a request after all redirects. Raises UserError, or TryAgain."""
        errors = self.requests.exceptions
        url, origin = self.file.url, ""
        for _ in range(MOST_REDIRECTS + 1):
            refuse_insecure(url, origin)
            try:
                response = self.session.get(url, headers=headers, stream=True, allow_redirects=False, timeout=TIMEOUTS)
                target = self.session.get_redirect_target(response)
            except (errors.SSLError, errors.ProxyError, errors.Timeout, errors.ConnectionError) as error:
                raise self._of_connection(url, error) from None
            except (errors.RequestException, ValueError) as error:
                hint = "pip install pysocks" if "SOCKS" in str(error) else "check the address"
                raise UserError(f"{shown(url)}: {first_line(error)}", hint=hint) from None
            self.has_answered = True
            if not target:
                return response
            response.close()
            url, origin = urljoin(url, target), url
        raise UserError(
            f"{self.file.shown}: redirects more than {MOST_REDIRECTS} times",
            hint="open the address in a browser; if it leads to a file there, download it and name its path",
        )

    def _of_connection(self, url: str, error: Exception) -> Exception:
        """Returns the error for a connection that has failed: another attempt is worth it once the server has answered,
        or if it is slow."""
        errors = self.requests.exceptions
        host = urlsplit(url).netloc.rpartition("@")[2]
        if isinstance(error, errors.SSLError):
            return UserError(
                f"{host}: its certificate cannot be verified: {_cause(error)}",
                hint="check the clock of this machine; REQUESTS_CA_BUNDLE names the certificates of a network",
            )
        if isinstance(error, errors.ProxyError):
            return UserError(
                f"{host}: the proxy does not let it through: {_cause(error)}",
                hint="check HTTPS_PROXY, or name the host in NO_PROXY",
            )
        if self.has_answered or isinstance(error, errors.Timeout):
            return TryAgain(f"no connection to {host}: {_cause(error)}")
        return UserError(
            f"{host}: no connection: {_cause(error)}",
            hint="check the network, and HTTPS_PROXY if there is a proxy; or copy the file from another machine "
            "and name its path",
        )

    def check_status(self, response: Any) -> None:
        """Raises UserError or TryAgain unless the answer is the file."""
        status = response.status_code
        if status in (200, 206):
            return
        page = f"; its page is {self.file.page}" if self.file.page else ""
        if status in TEMPORARY:
            reason = "too many requests" if status == 429 else "the server has a fault or is busy"
            raise TryAgain(f"{reason} (status {status})", _retry_after(response.headers.get("Retry-After", "")))
        if status in (401, 403, 407):
            raise UserError(
                f"{self.file.shown}: the server refuses it without a login (status {status})",
                hint=f"download it in a browser and name its path, or write the login into ~/.netrc{page}",
            )
        if status in (404, 410):
            raise UserError(
                f"{self.file.shown}: there is no such file (status {status})",
                hint=f"check the address; gputrain fetch --list shows the known ones{page}",
            )
        raise UserError(
            f"{self.file.shown}: refused with status {status} {response.reason or ''}".rstrip(),
            hint=f"open the address in a browser; if it works there, download the file and name its path{page}",
        )


class Transfer:
    """The attempts to download one file."""

    def __init__(
        self, file: RemoteFile, part: PartialDownload, progress: ByteProgress, sleep: Callable[[float], None]
    ) -> None:
        self.file, self.part, self.progress, self.sleep = file, part, progress, sleep
        self.server = Server(file)
        if part.facts.get("url") != file.url:
            part.drop()

    def run(self) -> None:
        """Download, verify and rename. Raises UserError or OSError."""
        with self.server.session:
            was_continued = self.part.size > 0
            self._receive_all()
            if fault := fault_of(self.part.path, self.file.size, self.file.sha256):
                self.part.drop()
                if was_continued:
                    log.info("%s: %s; it is downloaded anew", self.part.target.name, fault)
                    self._receive_all()
                    fault = fault_of(self.part.path, self.file.size, self.file.sha256)
            if fault:
                self.part.drop()
                raise self._refusal(
                    f"{self.part.target.name}: {fault}", "the server sent other bytes than the published"
                )
        self.part.finish()

    def _refusal(self, message: str, reason: str) -> UserError:
        page = f"; its page is {self.file.page}" if self.file.page else ""
        return UserError(message, hint=f"{reason}: try again later or in another network{page}")

    def _receive_all(self) -> None:
        """Receive the rest of the file, in several attempts if need be."""
        failures, most = 0, self.part.size
        while True:
            try:
                self._receive()
                return
            except TryAgain as error:
                failures = 0 if self.part.size >= most + WORTH_IT else failures + 1
                most = max(most, self.part.size)
                total = f" of {format_bytes(self.part.total)}" if self.part.total else ""
                there = f"{format_bytes(self.part.size)}{total} have arrived"
                if failures > len(PAUSES):
                    raise UserError(
                        f"{self.file.shown}: {error}",
                        hint=f"{there}; run the same command again later, it continues from there",
                    ) from None
                pause = PAUSES[max(0, failures - 1)] if error.pause is None else error.pause
                if pause > LONGEST_PAUSE:
                    raise UserError(
                        f"{self.file.shown}: {error}, and asks to wait {pause / 60:.0f} minutes",
                        hint=f"{there}; run the same command again then, it continues from there",
                    ) from None
                if pause:
                    log.info("%s: %s; %s; trying again in %.0f s", self.part.target.name, error, there, pause)
                    self.sleep(pause)

    def _receive(self) -> None:
        """Make one request for the rest of the file. Raises TryAgain, UserError or OSError."""
        part = self.part
        if not (part.validator or self.file.sha256):  # Nothing would show that the rest is that of another version.
            part.drop()
        offset = part.size
        if offset and offset in (part.total, self.file.size):
            return
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        if offset and part.validator:
            headers["If-Range"] = part.validator
        with self.server.open(headers) as response:
            if response.status_code == 416 and offset:
                part.drop()  # The server's file is shorter than what is there.
                raise TryAgain("the file has changed", pause=0)
            self.server.check_status(response)
            start, total = _place(response)
            if self.file.size is not None and total is not None and total != self.file.size:
                message = f"{self.file.shown}: has {total:,} bytes, expected {self.file.size:,}"
                raise self._refusal(message, "the file is not the published one")
            blocks = self._blocks(response)
            first = next(blocks, b"")
            self._refuse_other_content(response, first)
            continues = start == offset and (not offset or None in (total, part.total) or total == part.total)
            if start and not continues:
                part.drop()
                raise TryAgain("the server sent another part than the one asked for", pause=0)
            limit = total if total is not None else self.file.size
            self._check_disk(None if limit is None else limit - start)
            if not start:
                if offset:
                    log.info("%s: has changed, or its server cannot continue: downloaded anew", part.target.name)
                part.start(self.file.url, _validator(response), total)
            self._store(first, blocks, limit)

    def _check_disk(self, needed: int | None) -> None:
        """Raises UserError if fewer bytes are free than will arrive."""
        folder, free = self.part.path.parent, shutil.disk_usage(self.part.path.parent).free
        if needed is not None and needed > free:
            raise UserError(
                f"{folder}: has {format_bytes(free)} free, {self.part.target.name} needs {format_bytes(needed)}",
                hint=f"free the space, or {OTHER_FOLDER}",
            )

    def _store(self, first: bytes, blocks: Iterator[bytes], limit: int | None) -> None:
        """Append what arrives to the part. Raises TryAgain if the connection was cut, UserError if it is too much."""
        part = self.part

        def all_blocks() -> Iterator[bytes]:
            yield first
            yield from blocks

        if not part.write(all_blocks(), limit, self.progress):
            part.drop()
            message = f"{self.file.shown}: sends more than the {limit:,} bytes that are stated"
            raise self._refusal(message, "the file is not the published one")
        if limit is not None and part.size < limit:
            raise TryAgain("the connection was cut")

    def _blocks(self, response: Any) -> Iterator[bytes]:
        """Yield what arrives, as soon as it does. Raises TryAgain if the connection breaks."""
        from urllib3.exceptions import HTTPError

        while True:
            try:
                block = response.raw.read1(BLOCK, decode_content=True)
            except (HTTPError, OSError) as error:
                raise TryAgain(f"the connection was cut: {_cause(error)}") from None
            if not block:
                return
            yield block

    def _refuse_other_content(self, response: Any, first: bytes) -> None:
        """Raises UserError if the server sends a web page, or a pointer, in place of the file."""
        stated = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        found = other_content(first) or OTHER_TYPES.get(stated, "" if first.strip() else "nothing")
        if not found or self.part.target.suffix.lower() in BEGIN_SO.get(found, ()):
            return
        raise UserError(
            f"{self.file.shown}: the server sent {found} instead of the file",
            hint="open the address in a browser: it may be a login, a network's welcome page, or a page about the "
            "file, which has another address itself (on GitHub /raw/ in the place of /blob/)",
        )


def other_content(first: bytes) -> str:
    """Returns what the first bytes of an answer are if servers send such in the place of a file; otherwise nothing."""
    begin = first[:512].lstrip().lower()
    return next((what for mark, what in OTHER_CONTENT.items() if begin.startswith(mark)), "")


def _place(response: Any) -> tuple[int, int | None]:
    """Returns where the bytes of an answer begin in the file, and the bytes of the file if they are stated."""
    if response.status_code == 206:
        span, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        start = span.partition("-")[0]
        return int(start) if start.isdecimal() else -1, int(total) if total.isdecimal() else None
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() and not _is_encoded(response) else None


def _is_encoded(response: Any) -> bool:
    """Returns True if the server compresses what it sends, so that its places are not those in the file."""
    return response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity")


def _validator(response: Any) -> str:
    """Returns the server's mark of this version of the file, for If-Range; nothing if it has none that is strict."""
    tag: str = response.headers.get("ETag", "")
    if _is_encoded(response):
        return ""
    return tag if tag.startswith('"') else response.headers.get("Last-Modified", "")


def _retry_after(text: str) -> float | None:
    """Returns the seconds that a server asks to wait, which it states as a number or as a time."""
    from email.utils import parsedate_to_datetime

    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):
        return None


def _cause(error: BaseException) -> str:
    """Returns the innermost reason of a network error, without the objects' addresses that the libraries print."""
    inner: Any = error
    for _ in range(8):
        nested = getattr(inner, "reason", None) or next(
            (one for one in getattr(inner, "args", ()) if isinstance(one, BaseException)), None
        )
        if not isinstance(nested, BaseException):
            break
        inner = nested
    return re.sub(r"^<?[\w.]*(Connection|Pool)\w*(\(.*?\)| object at \w+>): ", "", first_line(inner))
