"""Facts of this machine, found without changing anything."""

import os
import platform
import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What the decisions about a run are made from. Memory in GB (1e9 bytes)."""

    system: str  # "Linux", "Windows", "Darwin"
    cpu_cores: int  # those this process may use
    gpu: str = ""  # name of the GPU, empty without one
    gpu_memory_gb: float = 0.0
    compute_capability: tuple[int, int] = (0, 0)
    compiled_capabilities: tuple[str, ...] = ()  # those torch was built for, such as "sm_120"
    cuda: str = ""  # CUDA version that torch was built for
    compiler: str = ""  # C++ compiler on PATH, which torch.compile needs for the CPU
    triton: bool = False  # which torch.compile needs for a GPU

    @property
    def has_bf16(self) -> bool:
        """Native bf16 arithmetic: Ampere and later. (torch also counts a T4's emulation, which is slower than fp32.)"""
        return self.compute_capability >= (8, 0)

    @property
    def has_tf32(self) -> bool:
        return self.compute_capability >= (8, 0)

    @property
    def has_kernels(self) -> bool:
        """Whether torch holds code for the card: made for its generation (it runs on later minors), or portable PTX."""
        major, minor = self.compute_capability
        for name in self.compiled_capabilities:
            kind, _, digits = name.rstrip("af").partition("_")
            built = (int(digits[:-1]), int(digits[-1]))
            if kind == "sm" and built[0] == major and built[1] <= minor:
                return True
            if kind == "compute" and built <= (major, minor):
                return True
        return False


def probe() -> Machine:
    """Look at the machine. Imports torch."""
    import importlib.util

    import torch

    facts = Machine(
        system=platform.system(),
        cpu_cores=usable_cores(),
        compiler=next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), ""),
        triton=importlib.util.find_spec("triton") is not None,
        cuda=torch.version.cuda or "",
    )
    if not torch.cuda.is_available():
        return facts
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        **{
            **vars(facts),
            "gpu": card.name,
            "gpu_memory_gb": card.total_memory / 1e9,
            "compute_capability": (card.major, card.minor),
            "compiled_capabilities": tuple(torch.cuda.get_arch_list()),
        }
    )


def usable_cores() -> int:
    """CPU cores that this process may run on; a container is often given fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
