"""Keeps numba's compiled code on disk for later processes, and lets one process compile at a time.

numba writes the wrapper and the kernel of a vectorised function to files of their own, and each refers to the other by
names that number what its process has compiled. Processes that compile the same function at once overwrite each other's
files, so that a wrapper of one process refers to a kernel of another, and every later call crashes.
"""

import functools
import hashlib
import importlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from gputrain.caches import cache_folder, can_write_into, say_once

log = logging.getLogger(__name__)


def folder() -> Path:
    """Return numba's cache folder for gputrain: NUMBA_CACHE_DIR if it can be written to, or a folder that no other
    program writes to."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen and can_write_into(Path(chosen)):
        return Path(chosen)
    if chosen:
        say_once(f"NUMBA_CACHE_DIR {chosen} cannot be written to; another folder is used")
    return cache_folder() / "numba"


def how_to_clear() -> str:
    return f"set NUMBA_CACHE_DIR to a new folder, which takes the place of {folder()}"


def stamp(name: str, release: str) -> Path:
    """Return the file that exists once a release of `name` is compiled for this machine, Python and environment."""
    cpu = importlib.import_module("llvmlite.binding")
    machine = [cpu.get_host_cpu_name(), cpu.get_host_cpu_features().flatten()]
    environment = [sys.prefix, platform.python_version(), version("numba"), version("llvmlite"), release]
    digest = hashlib.blake2b("\n".join([*machine, *environment]).encode(), digest_size=8).hexdigest()
    return folder() / f"{name}-{digest}.compiled"


@contextmanager
def compiling(name: str, release: str) -> Iterator[None]:
    """Let numba compile `name` in the block while other processes wait, or load it if its stamp exists.

    If the folder cannot be written to or locked, numba chooses a folder by itself, and no process waits.
    """
    compiled = stamp(name, release)
    with ExitStack() as stack:
        try:
            compiled.parent.mkdir(parents=True, exist_ok=True)
            if not compiled.exists():
                stack.enter_context(FileLock(compiled.parent / "compiling.lock"))
            importlib.import_module("numba").config.CACHE_DIR = str(compiled.parent)
        except (OSError, NotImplementedError) as error:
            log.warning("%s cannot keep compiled code (%s); NUMBA_CACHE_DIR names another folder", folder(), error)
            yield
            return
        yield
        if not compiled.exists():
            compiled.touch()


def pyin_is_compiled() -> bool:
    return stamp("pyin", version("librosa")).exists()


@functools.cache
def load_pyin() -> Callable[..., Any]:
    """Return librosa's pyin with all its functions compiled: half a minute the first time, then some seconds.

    Raises RuntimeError or OSError if numba finds no folder to write to.
    """
    with compiling("pyin", version("librosa")):
        pyin: Callable[..., Any] = importlib.import_module("librosa").pyin
        tone = np.sin(2 * np.pi * 200 * np.arange(4000) / 16000).astype(np.float32)
        pyin(tone, sr=16000, fmin=100, fmax=400, frame_length=1024)  # This call compiles what the import has not.
    return pyin


if __name__ == "__main__":
    load_pyin()
