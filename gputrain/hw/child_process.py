"""Runs modules in child processes, and explains how processes ended."""

import contextlib
import os
import signal
import subprocess
import sys
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


def run_child(module: list[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Run a module with arguments in `folder`, which also holds its caches, for at most `seconds`.

    Returns the exit code, None if the child was killed, and its output. The child prints to a file, as its own children
    may outlive it.
    """
    environment = {
        **package_environment(),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # One kernel needs no pool of processes.
    }
    with (folder / "output").open("w+b") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # An interrupted caller leaves no process behind either.
            _kill(child)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and the processes that it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()
