"""Verifies files by their SHA-256, copies them without replacing others, and says why a download has failed."""

import errno
import filecmp
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gputrain.errors import UserError, first_line


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    """Returns the files of a folder tree by their names below it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files into a folder, under the names that are their keys; each appears when it is complete.

    A file that is there already stays. Raises UserError before anything is copied if one of them is another file, and
    if the folder cannot be written to.
    """
    lacking = {}
    for name, source in files.items():
        target = folder / name
        if not os.path.lexists(target):
            lacking[target] = source
        elif not (target.is_file() and filecmp.cmp(source, target, shallow=False)):
            raise UserError(
                f"{target}: is there already, and is another file",
                hint="it is not replaced: name another --output-dir",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, source in lacking.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as aside:
                shutil.copyfile(source, Path(aside, target.name))
                os.replace(Path(aside, target.name), target)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be written: {error.strerror or error}",
            hint="see to the disk, or name another --output-dir",
        ) from None


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
    ({"ConnectionError", "ConnectError", "ConnectTimeout", "ProxyError"}, "{server} cannot be reached: {reason}",
     "check the network; behind a proxy, HTTPS_PROXY and NO_PROXY; HF_ENDPOINT names a mirror of the Hub; --offline "
     "uses what the cache has"),
    ({"ValueError"}, "what {server} sends is not what it should be: {reason}",
     "run the command again; a network may ask to log in by a browser, or a proxy or a mirror changes it{more}"),
    ({"Exception"}, "the connection to {server} broke off: {reason}", "run the command again{more}"),
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
    facts |= {"status": status, "reason": reason, "cache": cache, "move": move, "more": more}
    fault, hint = next(texts for kinds, *texts in (*faults, *FAULTS) if kinds & (signs | {status}))
    return UserError(f"{what}: {fault.format(**facts)}", hint=hint.format(**facts))
