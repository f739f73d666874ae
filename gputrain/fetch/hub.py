"""Reads names of the Hugging Face Hub, and fetches from it the files that are needed, by way of huggingface_hub.

Its cache, its token and its offline switch are used, so that what another program has fetched is not fetched again. A
repository is opened at one commit; its files are listed, and those that are wanted are fetched one by one:

    with the Hub      the commit of the revision and the list of its files are asked for
    without           the newest commit that the cache has, and the files that the cache has of it

huggingface_hub gives up what a broken connection has left of a file, since its version 1. Here the beginning of a file
stays in the cache, as its versions before 1 kept it, and the next call goes on from there. A file gets its final name
only when its size and its digest are those that the Hub states.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from gputrain.errors import UserError, first_line
from gputrain.fetch.download import other_content
from gputrain.fetch.files import sha256
from gputrain.figures import format_bytes

log = logging.getLogger(__name__)

RepoType = Literal["model", "dataset"]
MAIN = "main"
OFFLINE = "HF_HUB_OFFLINE"  # The variable by which huggingface_hub, and --offline, switch the network off.
COMMIT = re.compile("[0-9a-f]{40}")
REPO = re.compile(r"(?P<type>datasets/)?(?P<repo>\w[\w.-]*/\w[\w.-]*)", re.ASCII)
# The adapter of a language of MMS is named by its file, as in a folder.
ADAPTER_FILE = re.compile(r"adapter\.[\w.-]+\.(safetensors|bin)")
ADAPTER = re.compile(rf"(?P<repo>\w[\w.-]*/\w[\w.-]*)/(?P<file>{ADAPTER_FILE.pattern})", re.ASCII)
# Beginnings of what people copy from a browser, and of fsspec's names.
PREFIXES = re.compile(r"(?:https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/{1,2})(?P<rest>.+)")
VIEWS = ("tree", "blob", "resolve", "raw")  # Pages of a repository whose next part is a revision.
NO_OWNERS = ("spaces", "collections", "papers", "docs", "blog", "api")  # Pages whose next part is no repository.
SMALL_FILE = 10_000_000  # Bytes; several files up to this size are fetched at once.
AT_ONCE = 8
PART = ".incomplete"
# The errors of the libraries that make connections, by which there is none.
NO_CONNECTION = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "SSLError"}
LOG_IN = "run `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """The name of a repository on the Hub, and of a folder, a file or a pattern of files in it."""

    repo: str  # org/name
    type: RepoType = "model"
    path: str = ""  # That in the repository; empty for all of it.
    revision: str = ""  # A branch, a tag or a commit; empty for the main branch.

    def __str__(self) -> str:
        path, revision = self.path and f":{self.path}", self.revision and f"@{self.revision}"
        return f"{'datasets/' if self.type == 'dataset' else ''}{self.repo}{path}{revision}"

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{'datasets/' if self.type == 'dataset' else ''}{self.repo}"


def parse_hub_name(name: str) -> HubName | None:
    """Returns what a text means as a name on the Hub; None if it is none.

    Names are org/name, org/name@revision, org/name:folder/file and org/name:folder/file@revision, with datasets/ before
    them for a repository of data; hf://org/name/folder/file; and the addresses of a repository's pages.
    """
    if match := PREFIXES.fullmatch(name.strip()):
        rest = unquote(match["rest"].partition("?")[0].partition("#")[0]).rstrip("/")
        return _parse_address(rest.removeprefix("models/"))
    plain, _, revision = name.strip().partition("@")
    if match := ADAPTER.fullmatch(plain):
        plain = f"{match['repo']}:{match['file']}"
    repo, _, path = plain.partition(":")
    match = REPO.fullmatch(repo.rstrip("/"))
    if match is None or "\\" in name or ("@" in name and not revision):
        return None
    return _checked(HubName(match["repo"], "dataset" if match["type"] else "model", path.strip("/"), revision))


def _parse_address(rest: str) -> HubName | None:
    """Returns the name in org/name[@revision][/folder/file] or org/name/tree/revision/folder/file."""
    kind: RepoType = "dataset" if rest.startswith("datasets/") else "model"
    parts = rest.removeprefix("datasets/").split("/")
    if len(parts) < 2 or parts[0] in NO_OWNERS:
        return None
    (repo, _, revision), path = "/".join(parts[:2]).partition("@"), parts[2:]
    if ":" in repo or (path and ":" in path[0]) or (not path and "@" in rest and ":" in rest):
        return parse_hub_name(rest)
    if len(path) > 1 and path[0] in VIEWS:
        revision, path = path[1], path[2:]
    if REPO.fullmatch(repo) is None:
        return None
    return _checked(HubName(repo, kind, "/".join(path), revision))


def _checked(name: HubName) -> HubName | None:
    """Returns the name, or None if a part of it is one that no repository can have."""
    owner, _, repo = name.repo.partition("/")
    wrong = any(part.endswith((".git", ".", "-")) or ".." in part or "--" in part for part in (owner, repo))
    return None if wrong or ".." in name.path.split("/") else name


def is_offline() -> bool:
    """Returns True if nothing may be fetched, by --offline or by the variables of huggingface_hub."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in (OFFLINE, "TRANSFORMERS_OFFLINE")
    )


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    path: str
    size: int  # bytes
    digest: str = ""  # The SHA-256 of a large file, that of git of a small one; not known in the cache.

    @property
    def is_large(self) -> bool:
        """True if the Hub states the SHA-256."""
        return len(self.digest) == 64

    def digest_of(self, path: Path) -> str:
        if self.is_large:
            return sha256(path)
        return hashlib.sha1(b"blob %d\0" % self.size + path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Repository:
    """A repository at a commit: its files, and which of them are in the cache."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]
    is_cached: bool  # True: the Hub was not asked, so that only the files are known that the cache has.
    why_cached: str = ""  # why the Hub was not asked, or did not answer

    @property
    def storage(self) -> Path:
        return storage_of(self.name)

    @property
    def folder(self) -> Path:
        """The folder of the cache that has the files by their names."""
        return self.storage / "snapshots" / self.commit

    def fetch(self, paths: Sequence[str], *, thoroughly: bool = False) -> Path:
        """Fetches the files that the cache lacks, and with `thoroughly`, those that are damaged there. Returns the
        folder of the repository in the cache.

        Raises UserError, with what to do, if one of them cannot be fetched or differs from what the Hub states.
        """
        for file in [self.files[path] for path in paths] if thoroughly else ():
            self._drop_damaged(file)
        lacking = [self.files[path] for path in paths if not self._has(self.files[path])]
        if lacking and self.is_cached:
            raise lacks(self.name, lacking[0].path, self.why_cached)
        if lacking:
            self._check_disk(lacking)
            total = sum(file.size for file in lacking)
            what = lacking[0].path if len(lacking) == 1 else f"{len(lacking)} files"
            log.info("fetching %s of %s (%s) into %s", what, self.name, format_bytes(total), self.storage)
            from concurrent.futures import ThreadPoolExecutor  # Every command line imports this file.

            with _quiet_hub(), ThreadPoolExecutor(AT_ONCE) as pool:
                for _ in pool.map(self._fetch, [file for file in lacking if file.size <= SMALL_FILE]):
                    pass
                for file in lacking:
                    if file.size > SMALL_FILE:
                        self._fetch(file)
        if not self.is_cached:
            self._note_commit()
        return self.folder

    def _has(self, file: HubFile) -> bool:
        path = self.folder / file.path
        return path.is_file() and path.stat().st_size == file.size

    def _drop_damaged(self, file: HubFile) -> None:
        """Removes a file from the cache whose digest is not the one that the Hub states."""
        path = self.folder / file.path
        if file.digest and self._has(file) and file.digest_of(path) != file.digest:
            log.warning("%s is damaged; downloading it again", path)
            path.resolve().unlink()  # The name is a link to the content.
            path.unlink(missing_ok=True)

    def _check_disk(self, lacking: Sequence[HubFile]) -> None:
        blobs = self.storage / "blobs"
        try:
            blobs.mkdir(parents=True, exist_ok=True)
            parts = [blobs / f"{file.digest}{PART}" for file in lacking]
            there = sum(part.stat().st_size for part in parts if part.is_file())
            free = shutil.disk_usage(blobs).free
        except OSError as error:
            raise explained(error, self.name) from None
        needed = sum(file.size for file in lacking) - there
        if needed > free:
            raise UserError(
                f"{self.name}: needs {format_bytes(needed)}, and the disk of {blobs} has {format_bytes(free)} free",
                hint="free some space, or set HF_HOME to a folder on another disk",
            )

    def _fetch(self, file: HubFile) -> None:
        from filelock import FileLock
        from huggingface_hub import hf_hub_download

        blob, pointer = self.storage / "blobs" / file.digest, self.folder / file.path
        lock = cache_folder() / ".locks" / self.storage.name / f"{file.digest}.lock"
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if pointer.is_file() and not self._has(file):
                    pointer.unlink()  # The cache was damaged; its file is fetched anew.
                if not blob.is_file() or blob.stat().st_size != file.size:
                    self._fetch_blob(file, blob)
            hf_hub_download(self.name.repo, file.path, repo_type=self.name.type, revision=self.commit)
            if not pointer.is_symlink() and blob.is_file():
                blob.unlink()  # A system without links has a copy by each name.
        except network_errors() as error:
            raise explained(error, self.name, file.path) from None

    def _fetch_blob(self, file: HubFile, blob: Path) -> None:
        """Fetches the content of a file, from where an earlier call has stopped. Raises UserError if its digest
        differs."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        part = blob.with_name(blob.name + PART)
        url = hf_hub_url(self.name.repo, file.path, repo_type=self.name.type, revision=self.commit)
        # Where a compressed answer is sent, no range of the file can be asked for.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        facts: dict[str, Any] = {
            "headers": headers,
            "expected_size": file.size,
            "displayed_filename": file.path.rpartition("/")[2],
        }
        comes = True
        while comes:
            with part.open("ab") as opened:
                if opened.tell() > file.size:
                    opened.truncate(0)
                if there := opened.tell():
                    log.info("%s: going on after %s of %s", file.path, format_bytes(there), format_bytes(file.size))
                try:
                    http_get(url, opened, resume_size=there, **facts)
                    comes = False
                except network_errors():
                    opened.flush()
                    with part.open("rb") as begun:
                        found = other_content(begun.read(512))
                    if found:
                        opened.truncate(0)  # The next call would go on after it.
                        raise UserError(
                            f"{self.name}: {file.path}: the server sent {found} instead of the file",
                            hint="open the page in a browser: the network may ask to log in, or to use HTTPS_PROXY",
                        ) from None
                    if not there < part.stat().st_size < file.size:  # Otherwise some of it came, and more may come.
                        raise
        if part.stat().st_size != file.size or file.digest_of(part) != file.digest:
            part.unlink()
            raise UserError(
                f"{self.name}: what came for {file.path} is not the file of the Hub: its digest is another one",
                hint="run the command again; if it stays so, something between here and the Hub (a proxy, a mirror in "
                "HF_ENDPOINT) changes it",
            )
        part.replace(blob)

    def _note_commit(self) -> None:
        """Lets the cache find the commit by the name of the revision, when its files are there."""
        revision = self.name.revision or MAIN
        ref = self.storage / "refs" / revision
        if COMMIT.fullmatch(revision) or (ref.is_file() and ref.read_text() == self.commit):
            return
        try:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)
        except OSError as error:
            log.warning("%s cannot be written (%s): without network, %s will not be found", ref, error, self.name)


def storage_of(name: HubName) -> Path:
    """Returns the folder of the cache that holds a repository, as huggingface_hub lays it out."""
    return cache_folder() / f"{name.type}s--{name.repo.replace('/', '--')}"


# ------------------------------------------------------------------------------------------------ opening a repository


def open_repository(name: HubName) -> Repository:
    """Returns a repository at the commit that its revision has on the Hub; without network, at the one in the cache.

    Raises UserError if neither has it.
    """
    cached = _open_cached(name)
    if is_offline():
        if cached is None:
            raise lacks(name, "", "offline")
        return replace(cached, why_cached="offline")
    try:
        with _quiet_hub():
            return _open_online(name)
    except network_errors() as error:
        fault = explained(error, name)
        if cached is None:
            raise fault from None
        warn_once(f"{fault.message}; the files in the cache are used")
        return replace(cached, why_cached=fault.message)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning that every use of a repository would repeat."""
    log.warning("%s", message)


def _open_online(name: HubName) -> Repository:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api, revision = HfApi(), name.revision or MAIN
    commit = revision
    if not COMMIT.fullmatch(revision):
        commit = str(api.repo_info(name.repo, repo_type=name.type, revision=revision, timeout=30).sha)
    listed = api.list_repo_tree(name.repo, recursive=True, revision=commit, repo_type=name.type)
    found = [
        HubFile(one.path, one.size, one.lfs.sha256 if one.lfs else one.blob_id)
        for one in listed
        if isinstance(one, RepoFile)
    ]
    return Repository(name, commit, {file.path: file for file in found}, is_cached=False)


def _open_cached(name: HubName) -> Repository | None:
    storage, commit = storage_of(name), name.revision or MAIN
    with_name = storage / "refs" / commit
    if not COMMIT.fullmatch(commit):
        try:
            commit = with_name.read_text(encoding="utf-8").strip()
        except OSError:
            return None
    folder = storage / "snapshots" / commit
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [HubFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found]
    return Repository(name, commit, {file.path: file for file in files}, is_cached=True) if files else None


# ------------------------------------------------------------------------------------------------------------- errors


def network_errors() -> tuple[type[BaseException], ...]:
    """Returns the errors of the network, of the Hub's answers, which may be no JSON, and of the disk.

    The library that makes connections is another one in each major version of huggingface_hub, and its errors are bases
    of the Hub's.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *HfHubHTTPError.__bases__)


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keeps huggingface_hub from reporting each interrupted connection, after which it goes on by itself."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def lacks(name: HubName, path: str, why: str) -> UserError:
    """Returns the error for what the cache lacks, when the Hub is not asked or does not answer."""
    what = f"has no {path} of it" if path else "does not have it"
    return UserError(
        f"{name}: {why}, and the cache {cache_folder()} {what}",
        hint=f"run `gputrain fetch {name}` with a network, or on another machine and copy that folder here",
    )


def explained(error: BaseException, name: HubName, path: str = "") -> UserError:
    """Returns an error of the network, of the Hub or of the disk as one that says what to do."""
    from huggingface_hub import constants, errors

    answers = (getattr(one, "response", None) for one in (error, error.__cause__))
    # The answers of the library of versions before 1.0 are false if they are errors.
    status = next((answer.status_code for answer in answers if answer is not None), 0)
    where = f"{name}: {path}" if path else str(name)
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return UserError(
            f"{where}: the Hub gives it only to users who have accepted its licence",
            hint=f"accept it at {name.page}, then {LOG_IN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{name}: the repository has no revision {name.revision or MAIN}", hint=f"see {name.page}/tree/main"
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return UserError(
            f"{where}: not on the Hugging Face Hub, or private",
            hint=f"check the spelling; for a private one, {LOG_IN}",
        )
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{name}: not a name that the Hub can have: {first_line(error)}", hint="names are org/name")
    if status == 429:
        return UserError(
            f"{where}: the Hub has had too many requests from here",
            hint=f"wait some minutes and run the command again, which goes on from there; for a higher limit, {LOG_IN}",
        )
    if status:
        return UserError(
            f"{where}: the Hub answers with error {status}",
            hint="run the command again later, which goes on from there; https://status.huggingface.co says more",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{where}: the disk of {cache_folder()} is full",
            hint="free some space and run the command again, which goes on from there; or set HF_HOME to another disk",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(
            f"{where}: {error.filename or cache_folder()} cannot be written ({error.strerror})",
            hint="set HF_HOME to a folder that can be written",
        )
    if isinstance(error, ValueError):
        return UserError(
            f"{where}: the answer is not that of the Hub ({first_line(error)})",
            hint=f"a network may ask to log in by a browser, or to use a proxy, HTTPS_PROXY; the address is "
            f"{constants.ENDPOINT}, by HF_ENDPOINT another one",
        )
    if type(error).__name__ in NO_CONNECTION:
        return UserError(
            f"{name}: the Hub cannot be reached: {_first_cause(error)}",
            hint=f"check the network; behind a proxy, set HTTPS_PROXY; HF_ENDPOINT names another address than "
            f"{constants.ENDPOINT}; --offline uses what the cache has",
        )
    return UserError(
        f"{where}: the connection broke off: {_first_cause(error)}",
        hint="run the command again, which goes on from there",
    )


def _first_cause(error: BaseException) -> str:
    """Returns what an error says that has come through several libraries."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return first_line(getattr(error, "strerror", None) or error)


def format_some(names: Iterable[str], most: int = 6) -> str:
    listed = list(names)
    return f"it has {', '.join(listed[:most])}" + (f" and {len(listed) - most} more" if len(listed) > most else "")
