"""Page faults of repeated steps, in processes of their own, as what malloc has been told cannot be taken back."""

import os
import platform
import subprocess
import sys
import textwrap

import pytest

from gputrain.hw.runtime import VARIABLES
from tests.tables import slow

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters")

STEPS = """
    import resource
    from ctypes import create_string_buffer

    from gputrain.hw.runtime import keep_freed_memory

    kept = keep_freed_memory()

    def faults_of_a_step():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [create_string_buffer(size << 20) for size in (1, 40, 2, 60)]
        del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    print(kept, max([faults_of_a_step() for _ in range(4)][1:]))
"""


def steps(**environment: str) -> tuple[bool, int]:
    """Returns whether freed memory is kept, and the page faults of a step after the first."""
    clean = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", textwrap.dedent(STEPS)]
    done = subprocess.run(command, env=clean | environment, check=True, capture_output=True, text=True)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@on_glibc
def test_a_step_gets_the_memory_of_the_step_before() -> None:
    """103 MB are 26,368 pages of 4 kB; on ARM, pages may have 64 kB."""
    kept, faults = steps()
    assert kept
    assert faults < 100


@on_glibc
@pytest.mark.parametrize(
    "environment", [{"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, slow({"MALLOC_MMAP_MAX_": "9"})]
)
def test_the_users_own_settings_of_malloc_stay(environment: dict[str, str]) -> None:
    kept, faults = steps(**environment)
    assert not kept
    assert faults > 1000


def test_other_systems_keep_their_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    from gputrain.hw import runtime

    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: object())  # musl has no mallopt.
    assert not runtime.keep_freed_memory()
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: pytest.fail("the C library is used"))
    monkeypatch.setattr(runtime.sys, "platform", "darwin")
    assert not runtime.keep_freed_memory()
