"""What autograd needs of C++ to take fake CUDA tensors, in a build of torch without CUDA and without a compiler.

For good, until the process ends.
"""

import atexit
import ctypes
import mmap
import platform
import re
from pathlib import Path
from typing import Any

import torch

GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # at::detail::getCUDAHooks()
CPU, CUDA = 0, 1  # numbers of c10::DeviceType
# What virtual functions answer, by their names in torch's headers. A c10::Device is two bytes: its type and index.
FIRST_DEVICE, NOTHING, STREAM = (ctypes.c_uint16, CUDA), (None, None), (bytes, "stream 0 of device 0")
# Machine code that puts 1 (the type CUDA, the index 0) into the first register of a result and 0 into the second.
STREAM_CODE = {"x86_64": "b801000000 31d2 c3", "aarch64": "20008052 010080d2 c0035fd6"}
GUARD_ANSWERS: dict[str, tuple[Any, Any]] = {
    "type": (ctypes.c_int8, CUDA), "deviceCount": (ctypes.c_int8, 1), "exchangeDevice": FIRST_DEVICE,
    "getDevice": FIRST_DEVICE, "setDevice": NOTHING, "uncheckedSetDevice": NOTHING,
    "getStream": STREAM, "getDefaultStream": STREAM, "exchangeStream": STREAM,
}  # fmt: skip
HOOK_ANSWERS: dict[str, tuple[Any, Any]] = {
    "isBuilt": (ctypes.c_bool, True),
    "hasPrimaryContext": (ctypes.c_bool, True),
}
WORD, TABLE = ctypes.sizeof(ctypes.c_void_p), 128  # bytes of a word; words copied of a table
KEPT: list[Any] = []  # C++ holds the addresses of these objects.


def allow_cuda_tensors() -> None:
    """Let autograd take CUDA tensors: its engine asks for a device guard and for the hooks of CUDA's library.

    The guard is the CPU's, which does nothing, with the first CUDA device and its default stream. A c10::Stream is two
    words, a device and a number, which comes back in two registers; ctypes knows of one, so machine code returns it.
    """
    folder = Path(torch.__file__).parent / "lib"
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(folder / "libc10.so")), GUARDS)
    atexit.register(_restore, guards, CUDA, guards[CUDA])  # C++ calls them after Python has let go of what they call
    guards[CUDA] = _changed(guards[CPU], "c10/core/impl/DeviceGuardImplInterface.h", GUARD_ANSWERS)
    get_hooks = ctypes.CDLL(str(folder / "libtorch_cpu.so"))[HOOKS]
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    changed = _changed(hooks, "ATen/detail/AcceleratorHooksInterface.h", HOOK_ANSWERS)
    functions = (ctypes.c_void_p * 1).from_address(hooks)
    atexit.register(_restore, functions, 0, functions[0])
    functions[0] = ctypes.c_void_p.from_address(changed).value
    torch._C._set_multithreading_enabled(False)  # Otherwise a thread of the device runs backward passes.


def _restore(words: Any, place: int, word: int | None) -> None:
    words[place] = word


def _changed(address: int | None, header: str, answers: dict[str, tuple[Any, Any]]) -> int:
    """The address of a C++ object like that at `address`, some of whose virtual functions give these answers instead.

    An object begins with the address of its table of virtual functions, which stand in the order of the header; two
    words lie before the table, and a destructor takes two places.
    """
    assert address is not None
    text = (Path(torch.__file__).parent / "include" / header).read_text()
    order = ["", "", *re.findall(r"(?m)^  virtual\s[\w:*\s]*?(~?\w+)\s*\(", text)]
    if order[2].startswith("~"):
        order.insert(2, "")
    start = ctypes.c_void_p.from_address(address).value
    assert start is not None
    table = (ctypes.c_void_p * TABLE)(*(ctypes.c_void_p * TABLE).from_address(start - 2 * WORD))
    for name, (kind, answer) in answers.items():
        function = (
            _stream_code()
            if kind is bytes
            else ctypes.CFUNCTYPE(kind, ctypes.c_void_p)(lambda *arguments, answer=answer: answer)
        )
        table[order.index(name)] = ctypes.cast(function, ctypes.c_void_p)
        KEPT.append(function)
    made = ctypes.c_void_p(ctypes.addressof(table) + 2 * WORD)
    KEPT.extend([table, made])
    return ctypes.addressof(made)


def _stream_code() -> ctypes.c_void_p:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(bytes.fromhex(STREAM_CODE[platform.machine()]))
    KEPT.append(memory)
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
