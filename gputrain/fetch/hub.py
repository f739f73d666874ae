"""Reads names of the Hugging Face Hub, and fetches from it the files that are needed, by huggingface_hub.

Its cache, its token, its mirrors and its offline switch hold, so that what another program has fetched is not fetched
again. Without the Hub, the files count that the cache has of the newest commit that it knows of a revision.
"""

import contextlib
import errno
import glob
import hashlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from gputrain.caches import say_once
from gputrain.errors import UserError, first_line

log = logging.getLogger(__name__)

OFFLINE = "HF_HUB_OFFLINE"  # The variable by which huggingface_hub switches the network off.
REPO = r"(?a:(?P<type>datasets/)?(?P<repo>\w[\w.-]*/\w[\w.-]*))"
PLAIN = re.compile(REPO + "/?(:(?P<path>[^@]*))?(@(?P<revision>.+))?")
PAGE = re.compile(REPO + "(@(?P<revision>[^/:]+))?(/(tree|blob|resolve|raw)/(?P<view>[^/]+))?(/(?P<path>[^:]*))?")
# The adapter of a language of MMS is named by its file, as in a folder.
ADAPTER_FILE = re.compile(r"adapter\.[\w.-]+\.(safetensors|bin)")
ADAPTER = re.compile(rf"(?a:(?P<repo>\w[\w.-]*/\w[\w.-]*))/(?P<path>{ADAPTER_FILE.pattern})(@(?P<revision>.+))?")
# Beginnings of what people copy from a browser, and of fsspec's names.
PREFIXES = re.compile(r"(?:https?:/{1,2}(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/{1,2})(?P<rest>.+)")
NO_OWNERS = ("spaces", "collections", "papers", "docs", "blog", "api")  # Pages whose next part is no repository.
PATIENCE = "HF_HUB_ETAG_TIMEOUT"  # The variable of huggingface_hub for slow networks: seconds that a server may take.
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 10.0  # These without it, to take a connection and to answer.
LOG_IN = "run `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """The name of a repository on the Hub, and of a folder, a file or a pattern of files in it."""

    repo: str  # org/name
    type: Literal["model", "dataset"] = "model"
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
    text = name.strip()
    if match := PREFIXES.fullmatch(text):
        text = unquote(re.split("[?#]", match["rest"])[0]).rstrip("/").removeprefix("models/")
        match = PAGE.fullmatch(text) or PLAIN.fullmatch(text)
    else:
        match = PLAIN.fullmatch(text) or ADAPTER.fullmatch(text)
    if match is None:
        return None
    facts = match.groupdict()
    repo, path = match["repo"], (match["path"] or "").strip("/")
    wrong = [part for part in repo.split("/") if part.endswith((".git", ".", "-")) or ".." in part or "--" in part]
    if wrong or ".." in path.split("/") or "\\" in path or repo.split("/")[0] in NO_OWNERS:
        return None
    revision = facts.get("view") or match["revision"] or ""
    return HubName(repo, "dataset" if facts.get("type") else "model", path, revision)


def is_offline() -> bool:
    """Returns True if nothing may be fetched, by the variables of huggingface_hub."""
    values = [os.environ.get(name, "") for name in (OFFLINE, "TRANSFORMERS_OFFLINE")]
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def cache_folder() -> Path:
    """Returns the folder of huggingface_hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


# ------------------------------------------------------------------------------------------------ opening a repository


@dataclass(frozen=True)
class Repository:
    """A repository at a commit, and the digests of its files: SHA-256 of large ones, git's SHA-1 of small ones."""

    name: HubName
    commit: str
    files: Mapping[str, str]  # Digests by names; from the cache, empty digests of the files that it has.
    cached: Path | None = None  # The folder of the cache, if the Hub was not asked or did not answer,
    why_cached: str = ""  # and why.

    def fetch(self, paths: Sequence[str]) -> Path:
        """Fetches the files that the cache lacks, or has in another form than the Hub states. Returns the folder of the
        repository in the cache.

        Raises UserError, with what to do, if one of them cannot be fetched or differs from what the Hub states.
        """
        log.info("%s: %d files at commit %s, of the Hub or its cache", self.name, len(paths), self.commit[:12])
        for _ in range(2):
            folder = self.cached or self._download(paths)
            damaged = [path for path in paths if not _is_intact(folder / path, self.files[path])]
            if not damaged:
                return folder
            for file in [folder / path for path in damaged]:
                log.warning("%s is damaged, and is removed from the cache", file)
                content = file.resolve()  # The name is a link, which a lying mirror can let lead out of the cache.
                if {cache_folder().resolve(), folder.parents[1].resolve()} & set(content.parents):
                    content.unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        raise UserError(
            f"{self.name}: what came for {damaged[0]} is not the file of the Hub: its digest is another one",
            hint="run the command again; if it stays so, a proxy or a mirror (HF_ENDPOINT) changes it",
        )

    def _download(self, paths: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        if not sys.stderr.isatty():
            disable_progress_bars()
        patterns = [glob.escape(path) for path in paths]
        try:
            with _refusing_paths():
                folder = Path(snapshot_download(**facts_of(self.name), allow_patterns=patterns))
        except Exception as error:  # Its versions make connections by four libraries.
            raise explained(error, self.name) from None
        if folder.name != self.commit or not all((folder / path).is_file() for path in paths):
            raise UserError(
                f"{self.name}: the Hub does not give the files that it has listed", hint="run the same command again"
            )
        return folder


@contextlib.contextmanager
def _refusing_paths() -> Iterator[None]:
    """Lets huggingface_hub refuse a digest and a commit that are no plain names: it joins them to the path of its cache
    unchecked, and a mirror may state any. A version without this function of its own loads as it is."""
    from huggingface_hub import file_download

    module: Any = file_download
    stated = getattr(module, "_get_metadata_or_catch_error", None)
    if stated is None:
        yield
        return

    def checked(*words: Any, **options: Any) -> Any:
        found = stated(*words, **options)
        if not all(re.fullmatch(r"[\w+=-]+", name) for name in found[1:3] if name is not None):
            raise ValueError(f"{found[1]!r} of commit {found[2]!r} is no digest")
        return found

    module._get_metadata_or_catch_error = checked
    try:
        yield
    finally:
        module._get_metadata_or_catch_error = stated


def facts_of(name: HubName) -> dict[str, Any]:
    """Returns how functions of huggingface_hub take a repository and its revision."""
    return {"repo_id": name.repo, "repo_type": name.type, "revision": name.revision or "main"}


def _is_intact(file: Path, digest: str) -> bool:
    """Returns True if a file has the digest that the Hub states, or the Hub states none."""
    import pooch

    if len(digest) == 64:
        return bool(pooch.file_hash(file) == digest)
    return not digest or hashlib.sha1(b"blob %d\0" % file.stat().st_size + file.read_bytes()).hexdigest() == digest


def refuse_silence(address: str) -> None:
    """Raises ConnectionError if a server, or the proxy before it, leaves an attempt to connect without an answer, for
    which a request would wait long, and for each of its addresses anew. Of other faults the request itself tells."""
    url, seconds = urlsplit(address), float(os.environ.get(PATIENCE) or CONNECT_SECONDS)
    proxies = {} if proxy_bypass(url.hostname or "") else getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all", "")
    through = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else url
    secures = url.scheme == "https" and through.scheme == ("http" if proxy else "https")
    kind = HTTPSConnection if secures else HTTPConnection
    connection = kind(through.hostname or "", through.port or (443 if through.scheme == "https" else 80))
    if proxy and secures:
        connection.set_tunnel(url.hostname or "", url.port or 443)

    def connect() -> None:
        with contextlib.suppress(Exception), contextlib.closing(connection):
            connection.connect()

    attempt = threading.Thread(target=connect, daemon=True)  # The look-up of a name has no time limit of its own.
    attempt.start()
    attempt.join(seconds)
    if attempt.is_alive():
        raise ConnectionError(f"no connection in {seconds:g} s")


def open_repository(name: HubName) -> Repository:
    """Returns a repository at the commit that its revision has on the Hub; without network, at the one in the cache.

    Raises UserError if neither has it.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    fault = None
    if not is_offline():
        log.info("%s: asking %s for it", name, constants.ENDPOINT)
        try:
            refuse_silence(constants.ENDPOINT)
            patience = float(os.environ.get(PATIENCE) or ANSWER_SECONDS)
            info: Any = HfApi().repo_info(**facts_of(name), files_metadata=True, timeout=patience)
            files = {
                file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id or "" for file in info.siblings or ()
            }
            return Repository(name, str(info.sha), files)
        except Exception as error:
            fault = explained(error, name)
    try:  # The folder is asked for, whatever it has, since no file needs to match.
        folder = Path(snapshot_download(**facts_of(name), local_files_only=True, allow_patterns=[]))
    except (OSError, ValueError):
        raise fault or lacks(name, "", "offline") from None
    if fault:
        say_once(f"{fault.message}; the files in the cache are used")
    why = fault.message if fault else "offline"
    return Repository(name, folder.name, dict.fromkeys(files_below(folder), ""), folder, why)


def files_below(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder tree by their names below it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------------------------- errors

Faults = tuple[tuple[set[Any], str, str], ...]
# Names of errors and of their classes, or statuses of answers; what is said of them, and what to do.
FAULTS: Faults = (
    ({429}, "{server} has had too many requests from here", "wait some minutes and run the command again{more}"),
    (set(range(400, 600)), "{server} answers with error {status}", "run the command again later{more}"),
    ({"ENOSPC", "EDQUOT", "No space left"}, "the disk of {cache} is full",
     "free some space and run the command again; or {move}"),
    ({"EACCES", "EPERM", "EROFS"}, "{cache} cannot be written ({reason})", "see to its rights; or {move}"),
    ({"SSLError"}, "the certificate of {server} cannot be verified: {reason}",
     "check the clock of this machine; SSL_CERT_FILE and REQUESTS_CA_BUNDLE name the certificates of a network"),
    ({"ConnectionError", "ConnectError", "ConnectTimeout", "ProxyError", "ReadTimeout"},
     "{server} cannot be reached: {reason}",
     "check the network; behind a proxy, HTTPS_PROXY and NO_PROXY; HF_ENDPOINT names a mirror of the Hub; "
     f"{PATIENCE}=20 waits longer; or run `gputrain fetch {{what}}` on another machine and copy its {{cache}} here"),
    ({"ValueError"}, "what {server} sends is not what it should be: {reason}",
     "run the command again; a network may ask to log in by a browser, or a proxy or a mirror changes it{more}"),
    ({"Exception"}, "the connection to {server} broke off: {reason}", "run the command again{more}"),
)  # fmt: skip

# Errors of huggingface_hub, or statuses of answers; what is said of them, and what to do.
HUB_FAULTS: Faults = (
    ({"GatedRepoError", 403}, "the Hub gives it only to users who have accepted its licence",
     f"accept it at {{page}}, then {LOG_IN}"),
    ({"RevisionNotFoundError"}, "the repository has no revision {revision}", "see {page}/tree/main"),
    ({"RepositoryNotFoundError", 401, 404}, "not on the Hugging Face Hub, or private",
     f"check the spelling, and the server which was asked: {{server}}; for a private one, {LOG_IN}"),
    ({"HFValidationError"}, "not a name that the Hub can have: {reason}", "names are org/name"),
)  # fmt: skip


def fault_of_download(
    error: Exception, what: str, faults: Faults, cache: Path, move: str, *, more: str = "", **facts: object
) -> UserError:
    """Returns an error of a library that downloads, which came through several others, as one that says what to do.

    `faults` are looked through before FAULTS. `move` says how to move the cache, and `more` ends some hints; further
    `facts` stand in the texts of `faults`.
    """
    signs: set[Any] = {"No space left"} if "No space left" in str(error) else set()  # As the library for Xet says it.
    status, reason = 0, ""
    inner: BaseException | None = error
    while inner is not None:
        signs |= {kind.__name__ for kind in type(inner).__mro__} | {errno.errorcode.get(getattr(inner, "errno", 0))}
        answer = getattr(inner, "response", None)  # One of requests is false if it is an error.
        status = status or getattr(answer, "status_code", 0)
        reason = first_line(getattr(inner, "strerror", None) or inner)
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
    facts |= {"what": what, "status": status, "reason": reason, "cache": cache, "move": move, "more": more}
    fault, hint = next(texts for kinds, *texts in (*faults, *FAULTS) if kinds & (signs | {status}))
    return UserError(f"{what}: {fault.format(**facts)}", hint=hint.format(**facts))


def lacks(name: HubName, path: str, why: str) -> UserError:
    """Returns the error for what the cache lacks, when the Hub is not asked or does not answer."""
    what = f"has no {path} of it" if path else "does not have it"
    return UserError(
        f"{name}: {why}, and the cache {cache_folder()} {what}",
        hint=f"run `gputrain fetch {name}` with a network, or on another machine and copy that folder here",
    )


def explained(error: Exception, name: HubName) -> UserError:
    """Returns an error of huggingface_hub as one that says what to do."""
    from huggingface_hub import constants

    facts = {"page": name.page, "revision": name.revision or "main", "server": constants.ENDPOINT}
    return fault_of_download(error, str(name), HUB_FAULTS, cache_folder(), "set HF_HOME to another disk", **facts)


def format_some(names: Iterable[str], most: int = 6) -> str:
    listed = list(names)
    return f"it has {', '.join(listed[:most])}" + (f" and {len(listed) - most} more" if len(listed) > most else "")
