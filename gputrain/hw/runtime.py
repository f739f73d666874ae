"""The only writer of torch's global switches: a Plan is put into effect here, and nowhere else."""

import contextlib
import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gputrain.hw.plan import Plan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What running out of memory looks like beside torch.OutOfMemoryError: the driver, libraries that report a failed
# workspace as an error of their own, and the CPU's allocator.
OUT_OF_MEMORY_TEXTS = (
    "CUDA error: out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUFFT_INTERNAL_ERROR",
    "DefaultCPUAllocator: can't allocate memory",
)


@dataclass(frozen=True)
class Runtime:
    """A plan in effect."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype  # of the arithmetic under autocast; fp32: no autocast
    memory_format: torch.memory_format

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, its convolution weights in the chosen layout."""
        module.to(self.device)
        if self.memory_format == torch.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def compile(self, blocks: Iterable[nn.Module]) -> None:
        """Compile modules in place, so that their names in a checkpoint stay. Shapes are static: crops are of one size,
        and micro-batches of few."""
        if self.plan.compile.value:
            # One trace for every size of block, and again for evaluation and for a smaller micro-batch. Past the
            # default limit of 8 a block would silently run as it is.
            torch._dynamo.config.recompile_limit = 64
            for block in blocks:
                block.compile(dynamic=False)


def apply(plan: Plan) -> Runtime:
    """Set torch's switches as the plan says."""
    device = torch.device(str(plan.device.value))
    if device.type == "cuda":
        precision = "tf32" if plan.tf32.value else "ieee"
        torch.backends.cuda.matmul.fp32_precision = precision
        torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = True  # crops are of one size, so the search for an algorithm pays
        if os.name != "nt":
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return Runtime(
        plan=plan,
        device=device,
        dtype=DTYPES[str(plan.precision.value)],
        memory_format=torch.channels_last if plan.channels_last.value else torch.contiguous_format,
    )


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def release_memory() -> None:
    """Give back what an interrupted step has left behind; outside the except block, whose traceback pins tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory_gb(device: torch.device) -> float:
    """Largest memory in use so far: torch's on a GPU, the process's resident memory on the CPU; 0 where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's generators, for a checkpoint and for repeating a phase."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
