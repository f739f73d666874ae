"""Finds folders for files that can be computed again, such as compiled code. Imports no torch."""

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder for files of gputrain that can be computed again: that of the user, or a temporary one where it
    cannot be written to, as in containers."""
    named = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(named) if named else Path.home() / ".cache") / "gputrain"
    except RuntimeError:
        return temporary_folder()
    if can_write_into(folder):
        return folder
    say_once(f"caches are kept in {temporary_folder()}, because {folder} cannot be written to")
    return temporary_folder()


def plan_folder() -> Path:
    """Return the folder for what plans have been made of."""
    return cache_folder() / "plans"


@functools.cache
def say_once(message: str) -> None:
    log.info("%s", message)


def can_write_into(folder: Path) -> bool:
    """Return whether files can be written into a folder, or the folder can be made."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    except (OSError, StopIteration):
        return False


def provide_home() -> None:
    """Set HOME to a temporary folder if there is none, for packages that look for it: where HOME is not set and the
    user is not in the system's list, or HOME names a folder that does not exist and cannot be made."""
    try:
        home = Path.home()
        if home.exists() or can_write_into(home):
            return
    except (OSError, RuntimeError):
        pass
    os.environ["HOME"] = str(temporary_folder())
    os.environ.setdefault("USER", f"user-{os.getuid()}" if os.name == "posix" else "user")  # torch asks for a name.


@functools.cache
def temporary_folder() -> Path:
    """Return a folder that only this user can write to, since compiled code is run from it: the same for later runs, or
    a new one if another user has made a folder of its name."""
    user = str(os.getuid()) if os.name == "posix" else "cache"
    folder = Path(tempfile.gettempdir(), f"gputrain-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_own = os.name != "posix" or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
        if not (stat.S_ISDIR(status.st_mode) and is_own):
            folder = Path(tempfile.mkdtemp(prefix="gputrain-"))
    except OSError:
        pass  # Whoever writes there says so.
    return folder
