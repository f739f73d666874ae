"""The only writer of torch's global switches: a Plan is put into effect here, and nowhere else."""

import contextlib
import functools
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from gputrain.errors import UserError
from gputrain.hw import bf16_check
from gputrain.hw.plan import Plan, Setting
from gputrain.hw.probe import ALLOCATOR_VARIABLES, request_expandable_segments
from gputrain.hw.speed import product_flops_per_second

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# What running out of memory looks like beside torch.OutOfMemoryError: the driver's words, libraries that report a
# failed workspace or handle as an error of their own, and the CPU's allocator. CUDNN_STATUS_NOT_SUPPORTED is not among
# them, as it also names a convolution that cuDNN cannot do at all; where memory is short, torch tries the other
# algorithms after it, and ends with one of the sentences below.
OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",  # torch.OutOfMemoryError in the words of an error that wraps it
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # of expandable segments and of graphs
    "Triton Error [CUDA]: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "_ALLOC_FAILED",  # of cuBLAS, cuDNN, cuFFT, cuSOLVER and cuSPARSE
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "HOST_ALLOCATION_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # A library that has worked before is initialized when a stream first needs it.
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUFFT_INTERNAL_ERROR",
    "unable to find an engine",  # cuDNN's, when no algorithm's workspace fits
    "Unable to find a valid cuDNN algorithm",
    "No valid execution plans",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
)


@dataclass
class Runtime:
    """A plan in effect. Where a switch turns out not to work, `plan` is corrected and a warning says why."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype  # of the arithmetic under autocast; fp32: no autocast
    memory_format: torch.memory_format

    @property
    def stands_for(self) -> str:
        """Type of the device whose way of computing is followed."""
        return self.device.type

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, its convolution weights in the chosen layout."""
        if any(parameter.device.type != self.device.type for parameter in module.parameters()):
            module.to(self.device)  # (a module that has shapes only lies where it must, and cannot be moved)
        if self.memory_format == torch.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def compile(self, function: F, *, any_count: bool = False) -> F:
        """A function that runs compiled for as long as the plan says so. Shapes are static: crops are of one size, and
        micro-batches of few. With `any_count`, the first dimension of its tensors may change from call to call without
        compiling anew, but for a single item."""
        if not self.plan.compile.value:
            return function
        # One trace for every shape, and for every layer that shares its code with others. Past the default limit of 8,
        # the function would silently run as it is.
        torch._dynamo.config.recompile_limit = 256
        # It does so for a Fourier transform, which is called as it is, and that is what is wanted.
        warnings.filterwarnings("ignore", message=".*does not support code generation for complex operators")
        compiled = torch.compile(function, dynamic=False)

        @functools.wraps(function)
        def either(*arguments: Any, **named: Any) -> Any:
            if any_count:
                for tensor in (value for value in arguments if isinstance(value, torch.Tensor)):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return (compiled if self.plan.compile.value else function)(*arguments, **named)

        return cast(F, either)

    def compile_modules(self, modules: Iterable[nn.Module], *, any_count: bool = False) -> None:
        """Have the forward passes of modules run compiled. Their names in a checkpoint stay."""
        if self.plan.compile.value:
            for module in modules:
                module.forward = self.compile(module.forward, any_count=any_count)

    def stop_compiling(self, cause: str) -> None:
        """Let everything run as it is, after the compiler has failed."""
        self.plan = replace(self.plan, compile=Setting(False, f"the compiler failed: {cause}"))
        log.warning("torch.compile failed (%s); training goes on without it", cause)

    def verify_layout(self, block: nn.Module, channels: int) -> None:
        """Find out whether channels_last passes through a block, which a normalisation may quietly undo."""
        if not self.plan.channels_last.value:
            return
        x_BCHW = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(0)).to(self.device)
        with torch.no_grad(), self.autocast():
            out_BCHW = block(x_BCHW.contiguous(memory_format=torch.channels_last))
        if not out_BCHW.is_contiguous(memory_format=torch.channels_last):
            reason = f"{type(block).__name__} returns another layout with this torch, so each layer converts"
            self.plan = replace(self.plan, channels_last=Setting(False, reason))
            self.memory_format = torch.contiguous_format
            log.warning("channels_last is off: %s", reason)

    def limit_memory(self, budget_gb: float) -> None:
        """Have torch run out of memory at `budget_gb` of a GPU, though the card has more. Windows' drivers would go on
        into the RAM instead, at a tenth of the speed; and a large card can stand for a smaller one."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_gb * 1e9 / total), self.device)

    @functools.cached_property
    def product_rate(self) -> float:
        """FLOPS of a large matrix product in the precision of the training, measured: what its peak is."""
        return product_flops_per_second(self.device, self.dtype)


def apply(plan: Plan) -> Runtime:
    """Set torch's switches as the plan says. What turns out not to be in effect is corrected in the runtime's plan."""
    device = torch.device(str(plan.device.value))
    if device.type == "cuda":
        device = torch.device("cuda", 0)  # Some of torch's functions refuse a device without its index.
        # The newer fp32_precision attributes would make torch's own readers of the older ones raise, compilation's too.
        torch.set_float32_matmul_precision("high" if plan.tf32.value else "highest")
        torch.backends.cudnn.allow_tf32 = bool(plan.tf32.value)
        torch.backends.cudnn.benchmark = bool(plan.cudnn_benchmark.value)
        if plan.expandable_segments.value:  # for a process that has not probed the machine, such as calibration's
            request_expandable_segments()
        if torch.cuda.is_available():  # A plan for a card can be applied where there is none.
            plan = verify_expandable_segments(plan, device)
    elif plan.precision.value == "bf16":
        plan = verify_bf16_on_cpu(plan)
    if plan.compile.value:
        keep_compiled_code()
    return Runtime(
        plan=plan,
        device=device,
        dtype=DTYPES[str(plan.precision.value)],
        memory_format=torch.channels_last if plan.channels_last.value else torch.contiguous_format,
    )


def verify_expandable_segments(plan: Plan, device: torch.device) -> Plan:
    """Starts CUDA and compares the plan with the allocator's own settings. Returns the plan as it really is."""
    in_effect = torch.cuda.get_allocator_backend() == "native" and bool(  # cudaMallocAsync knows neither of these
        torch.cuda.memory._snapshot(device)["allocator_settings"]["expandable_segments"]
    )
    if in_effect == plan.expandable_segments.value:
        return plan
    given = [f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ]
    reason = f"{' and '.join(given)} in the environment" if given else "CUDA was started before the setting was made"
    log.warning("expandable segments are %s: %s", "on" if in_effect else "off", reason)
    return replace(plan, expandable_segments=Setting(in_effect, reason))


def verify_bf16_on_cpu(plan: Plan, similarity: Callable[[], float] = bf16_check.similarity) -> Plan:
    """Compares bf16 with fp32 and keeps oneDNN from AMX where that is wrong. Returns the plan with the reason for it.

    Raises UserError where bf16 stays wrong.
    """
    change = cap_onednn_if_wrong()
    if (found := similarity()) < bf16_check.LEAST_SIMILARITY:
        raise UserError(
            f"convolutions in bf16 are wrong on this CPU: their cosine similarity to fp32 is {found:.3f}",
            hint=f"set the environment variable {bf16_check.VARIABLE}={bf16_check.BELOW_AMX} before the start, "
            "or train in fp32: --no-mixed-precision",
        )
    if not change:
        return plan
    log.warning("bf16: %s", change)
    return replace(plan, precision=Setting("bf16", f"{plan.precision.reason}; {change}"))


def cap_onednn_if_wrong() -> str:
    """Keeps oneDNN from using AMX where convolutions in bf16 are wrong with it, and says so; otherwise returns "".

    It must come before the first convolution of this process, as oneDNN reads its environment then. So it is tried in
    a process of its own, and only where the CPU has AMX and the user has not chosen an instruction set.
    """
    if not bf16_check.has_amx() or bf16_check.VARIABLE in os.environ:
        return ""
    if bf16_check.similarity_in_child() >= bf16_check.LEAST_SIMILARITY:
        return ""
    os.environ[bf16_check.VARIABLE] = bf16_check.BELOW_AMX
    return f"oneDNN runs without AMX ({bf16_check.VARIABLE}={bf16_check.BELOW_AMX}), with which convolutions are wrong"


def keep_compiled_code() -> None:
    """Have compiled code kept where the next run finds it; left to itself, torch keeps it in a temporary folder."""
    folder = cache_folder() / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    home = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "gputrain"


def compiler_failure(error: BaseException) -> str:
    """What the compiler says of its failure, in a line; nothing where the error is not the compiler's."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def release_memory() -> None:
    """Give back what an interrupted step has left behind; outside the except block, whose traceback pins tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_gb(device: torch.device) -> dict[str, float]:
    """Largest memory in use so far, under the names of the metrics. A GPU's is what torch's tensors took, and what its
    allocator held for them; the CPU's is the resident memory of the process, where the system tells it."""
    if device.type == "cuda":
        return {
            "memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
            "memory/peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        }
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes, kilobytes
    return {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


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
