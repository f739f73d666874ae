"""Collects facts about this machine without changing anything."""

import math
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from gputrain import __version__
from gputrain.errors import UserError, first_line
from gputrain.hw.driver import NO_DRIVER, Driver, query_driver

SHARED_MEMORY = Path("/dev/shm")
TASKS_OF_PROCESS = 4  # Tasks that a data process takes beside a thread for each core, which libraries start.
# Environment variables of torch's allocator in their order: torch reads only the first one that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Chips of Turing (TU116, TU117) without tensor cores, by the driver's names: GeForce GTX 16 and MX, small Quadros.
WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16\d\d|MX[45]50|T(400|500|550|600|1000|1200|2000))\b")


@dataclass(frozen=True)
class Machine:
    """Facts from which a run is planned. Memory is in GB (1e9 bytes), 0 if unknown; versions are texts."""

    system: str  # Operating system: "Linux", "Windows", "Darwin".
    cpu_cores: int  # Number of cores that this process may use.
    wsl: bool = False  # True in Windows' subsystem for Linux.
    gpu: str = ""  # Name of the GPU that torch can use, empty if there is none.
    gpu_count: int = 0  # Number of GPUs that torch can use.
    gpu_memory_gb: float = 0.0
    compute_capability: tuple[int, int] = (0, 0)
    compiled_capabilities: tuple[str, ...] = ()  # Capabilities that torch was built for, such as "sm_120".
    cuda: str = ""  # CUDA version that torch was built for.
    compiler: str = ""  # C++ compiler on PATH; Triton needs a C compiler on Linux.
    triton: bool = False  # True if Triton is installed, which torch.compile needs for a GPU.
    gpu_free_gb: float = 0.0
    gpu_error: str = ""  # Message of torch why it can use no GPU.
    driver: Driver = NO_DRIVER
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, None if unset.
    python: str = ""
    torch: str = ""
    torch_error: str = ""  # Reason why torch cannot be imported.
    ram_gb: float = 0.0
    ram_free_gb: float = 0.0
    gpus: int = 1  # Number of GPUs that train together, each with a process of its own.
    # Free space in SHARED_MEMORY, through which data workers pass batches; 0 also if it is unlimited.
    shared_memory_gb: float = 0.0

    @property
    def has_bf16(self) -> bool:
        """True for native bf16 arithmetic: Ampere and later. torch also counts a T4's emulation, slower than fp32."""
        return self.compute_capability >= (8, 0)

    @property
    def has_tensor_cores(self) -> bool:
        """True since Volta, except for the small chips of Turing. The driver does not report it: only names differ."""
        return self.compute_capability >= (7, 0) and not WITHOUT_TENSOR_CORES.search(self.gpu)

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_kernels(self) -> bool:
        """True if torch has code for the GPU: for its major version up to its minor version, or portable PTX."""
        major, minor = self.compute_capability
        for name in self.compiled_capabilities:
            kind, _, digits = name.rstrip("af").partition("_")
            if not digits:  # AMD's names differ ("gfx1100"); torch offers no GPU that it has no code for.
                return True
            built = (int(digits[:-1]), int(digits[-1]))
            if kind == "sm" and built[0] == major and built[1] <= minor:
                return True
            if kind == "compute" and built <= (major, minor):
                return True
        return False

    @property
    def has_expandable_segments(self) -> bool:
        """True if torch's allocator can grow its segments. On Windows it is built without; in the subsystem for Linux,
        drivers refuse its calls (https://github.com/pytorch/pytorch/issues/192330)."""
        return self.system == "Linux" and not self.wsl


def probe(gpu: int = 0) -> Machine:
    """Collect the facts. Imports torch, and starts CUDA if there is a GPU, with expandable segments. `gpu` is the
    number of the GPU among those that torch sees."""
    request_expandable_segments()
    ram_gb, ram_free_gb = ram()
    return Machine(
        system=platform.system(),
        cpu_cores=usable_cores(),
        wsl=is_wsl(),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), ""),
        driver=query_driver(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        python=platform.python_version(),
        ram_gb=ram_gb,
        ram_free_gb=ram_free_gb,
        shared_memory_gb=shared_memory_gb(),
        triton=find_spec("triton") is not None,
        **_torch(gpu),
    )


def request_expandable_segments() -> None:
    """Request expandable segments if they work here and the user has not configured the allocator.

    torch reads the environment once, when CUDA starts; later changes have no effect.
    """
    works = Machine(platform.system(), 1, wsl=is_wsl()).has_expandable_segments
    if works and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def is_wsl() -> bool:
    """Return True in Windows' subsystem for Linux, whose kernel releases contain Microsoft's name."""
    return "microsoft" in platform.release().lower()


def _torch(gpu: int) -> dict[str, Any]:
    """Return facts about the build of torch and the GPU that it can use. Raises UserError if there are fewer GPUs."""
    try:
        import torch
    except (ImportError, OSError) as error:  # One of its libraries is missing, or made for another system.
        return {"torch_error": first_line(error)}
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return {**facts, **_torch_gpu(gpu)}
    cause = first_line(said[0].message) if said else ""  # torch warns why it cannot use the GPU.
    return {**facts, "gpu_error": cause}


def _torch_gpu(gpu: int) -> dict[str, Any]:
    import torch

    if gpu >= torch.cuda.device_count():
        raise UserError(
            f"rank {gpu} of this machine has no GPU: torch sees {torch.cuda.device_count()}",
            hint=f"torchrun --nproc-per-node {torch.cuda.device_count()}",
        )
    try:
        card = torch.cuda.get_device_properties(gpu)
        free, _ = torch.cuda.mem_get_info(gpu)
    except RuntimeError as error:  # The GPU is lost, or another program holds it exclusively.
        return {"gpu_error": first_line(error)}
    return {
        "gpu": card.name,
        "gpu_count": torch.cuda.device_count(),
        "gpu_memory_gb": card.total_memory / 1e9,
        "gpu_free_gb": free / 1e9,
        "compute_capability": (card.major, card.minor),
        "compiled_capabilities": tuple(torch.cuda.get_arch_list()),
    }


def usable_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPU cores that this process may use, by its affinity and the quotas of its control groups,
    of which each process of a job may have one; fewer if that many processes more are not allowed there."""
    from joblib import cpu_count  # It imports numpy, without which --help is faster.

    cores: int = cpu_count()  # It reads the quota of a container as the root, but not those of a job or a service.
    for group in _groups("cpu", proc, cgroup):
        # "100000 50000" in version 2, where "max" is no limit; in version 1 that is -1.
        quota = " ".join(_read(group / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")).split()
        if len(quota) == 2 and all(word.isdecimal() for word in quota):
            cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    for group in _groups("pids", proc, cgroup):
        limit, used = _read(group / "pids.max").strip(), _read(group / "pids.current").strip()
        if limit.isdecimal() and used.isdecimal():
            cores = min(cores, (int(limit) - int(used)) // (TASKS_OF_PROCESS + (os.cpu_count() or 1)))
    return max(1, cores)


def ram(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """Return the memory that this process may use, and how much of it is free, in GB; 0 if unknown.

    The limits of containers count. Memory with cached files counts as free, as the kernel reclaims
    it before it kills a program.
    """
    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError):
        return 0.0, 0.0
    total, free = int(memory.total), int(memory.available)
    for limit, spare in _group_limits(proc, cgroup):
        if limit < total:
            total, free = limit, min(free, spare)
    return total / 1e9, max(0, free) / 1e9


def _groups(kind: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """Yield the folders of the control groups (version 2 and 1) that limit this process, the outermost first."""
    lines = [line.split(":", 2) for line in _read(proc / "self" / "cgroup").splitlines()]
    for mark, root in (("", cgroup), (kind, cgroup / kind)):
        parts = next((path.strip("/").split("/") for _, kinds, path in lines if mark in kinds.split(",")), [])
        for depth in range(len(parts) + 1):  # A container often sees its own group as the root.
            yield root.joinpath(*parts[:depth])


def _group_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and free part, in bytes, of each control group of this process."""
    versions = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    for folder in _groups("memory", proc, cgroup):
        for limit_name, used_name, prefix in versions:
            limit, used = (_read(folder / name).strip() for name in (limit_name, used_name))
            if limit.isdecimal() and used.isdecimal():
                stat = _read(folder / "memory.stat")
                copies = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
                yield int(limit), int(limit) - int(used) + sum(map(int, copies))


def shared_memory_gb(folder: Path = SHARED_MEMORY) -> float:
    """Return the free space of the file system of shared memory; 0 if there is none, as on Windows."""
    try:
        return shutil.disk_usage(folder).free / 1e9
    except OSError:
        return 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def machine_facts(device: str = "auto") -> dict[str, Any]:
    """Returns the name of the device ("auto": the GPU, if any) and the versions, which every figure needs."""
    import torch

    on_gpu = device != "cpu" and torch.cuda.is_available()
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else f"{cpu_name()}, {usable_cores()} cores",
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gputrain": __version__,
    }
    if on_gpu:
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts |= {"memory_gb": round(card.total_memory / 1e9, 2), "cuda": torch.version.cuda}
    return facts


def cpu_name() -> str:
    """Returns the processor's name in /proc/cpuinfo, otherwise as the system gives it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        text = ""
    found = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or f"{platform.machine()} CPU"
