"""The environment of child processes, and how they ended."""

import os
import signal
from pathlib import Path

ACCESS_VIOLATION = 0xC0000005  # Windows' counterpart of SIGSEGV.


def describe_exit(code: int) -> str:
    """Return the name of the signal that ended a process, or its exit code.

    multiprocessing and subprocess report a signal as a negative number.
    """
    if code == ACCESS_VIOLATION:
        return "access violation"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def remedy_for_exit(code: int) -> str:
    """Return advice on what to try after a worker process ended with this code."""
    if describe_exit(code) == "SIGKILL":
        return "the system kills processes when memory runs out: run it again with a lower --num-workers"
    if describe_exit(code) == "SIGBUS":
        return "shared memory may be full: enlarge a container's /dev/shm (--shm-size), or lower --num-workers"
    return "run it again with --num-workers 0, where the cause is printed"


def package_environment() -> dict[str, str]:
    """Returns the environment in which a child process finds this package, also where the working directory has a
    folder of its name."""
    root = str(Path(__file__).parents[2])  # The folder that contains the package.
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
