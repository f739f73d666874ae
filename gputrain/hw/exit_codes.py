"""Explains exit codes of processes that died, and what to do about them."""

import signal

from gputrain.hw import numba_cache

ACCESS_VIOLATION = 0xC0000005  # Windows' counterpart of SIGSEGV.


def describe(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit code.

    multiprocessing and subprocess report a signal as a negative number.
    """
    if code == ACCESS_VIOLATION:
        return "access violation"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def remedy(code: int) -> str:
    """Return advice on what to try after a worker process ended with this code."""
    if describe(code) == "SIGKILL":
        return "the system kills processes when memory runs out: run it again with a lower --num-workers"
    if describe(code) == "SIGBUS":
        return "shared memory may be full: enlarge a container's /dev/shm (--shm-size), or lower --num-workers"
    if describe(code) in ("SIGSEGV", "access violation"):
        return f"machine code that numba keeps on disk may be damaged: {numba_cache.how_to_clear()}, and run it again"
    return "run it again with --num-workers 0, where the cause is printed"
