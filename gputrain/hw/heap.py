"""Makes glibc's malloc keep the memory of a training on a CPU for the next step.

A step allocates the same tensors as the step before. By default glibc gives blocks of more than 32 MB, and the free end
of the heap, back to the system, which has to clear each page of them again before the next step uses it.
"""

import ctypes
import os
import sys

# Parameters of mallopt in malloc.h, and as environment variables.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST = -1, 2**31 - 1  # A block of more than LARGEST bytes is returned when it is freed, as before.
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Have malloc keep freed memory from now on. Returns False, with nothing changed, if the C library is not glibc or
    the user has set malloc up by the environment."""
    chosen = any(name in os.environ for name in VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if not sys.platform.startswith("linux") or chosen:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):  # musl
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(library.mallopt(M_TRIM_THRESHOLD, NEVER))
