"""Puts a Plan into effect. This is the only module that changes torch's global settings."""

import contextlib
import functools
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from gputrain.caches import cache_folder
from gputrain.errors import UserError, first_line
from gputrain.hw.plan import DeviceName, Hardware, Plan, PrecisionWish, Setting, decide
from gputrain.hw.probe import ALLOCATOR_VARIABLES, probe, request_expandable_segments, usable_cores
from gputrain.hw.ranks import SINGLE, Ranks
from gputrain.hw.speed import product_flops_per_second

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)

TF32_EPS = 2.0**-10  # TF32 has 10 bits of mantissa.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Messages of errors that mean out of memory besides torch.OutOfMemoryError: the driver's, those of libraries that
# report a failed allocation as an error of their own, and the CPU allocator's. CUDNN_STATUS_NOT_SUPPORTED is in neither
# table, as it means a convolution that cuDNN does not support; if memory is short, torch tries the other algorithms
# after it, and ends with one of the messages below.
OUT_OF_MEMORY_TEXTS = (
    "CUDA out of memory",  # Message of torch.OutOfMemoryError inside an error that wraps it.
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",  # Message of expandable segments and of graphs.
    "Triton Error [CUDA]: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "_ALLOC_FAILED",  # Status of cuBLAS, cuDNN, cuFFT, cuSOLVER and cuSPARSE.
    "DEVICE_ALLOCATION_FAILED",  # Status of cuDNN 9.
    "HOST_ALLOCATION_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Message on Windows.
)
# Messages of libraries that have another cause if enough memory is free: a convolution that cuDNN cannot compute at
# all, or a library that does not go with the driver or the GPU.
LIBRARY_FAILURE_TEXTS = (
    "unable to find an engine",  # Messages of cuDNN if no algorithm's workspace fits, or if there is no algorithm.
    "Unable to find a valid cuDNN algorithm",
    "No valid execution plans",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # A handle is made when a stream first needs it, with memory beside torch's.
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUFFT_INTERNAL_ERROR",
)
# Memory is short if less than this share of what the process may use is free. A convolution's workspace may hold
# converted copies of its tensors, one of which alone can take a tenth of the memory of a step, so that the share is a
# large one. A failure that is taken for a lack of memory by mistake is tried again with a smaller batch, which leaves
# more free, until it is recognised.
SHORT_SHARE = 0.25


@dataclass
class Runtime:
    """A plan in effect. If a setting turns out not to work, `plan` is corrected and a warning gives the reason."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype  # Format of the arithmetic under autocast; fp32: no autocast.
    memory_format: torch.memory_format
    ranks: Ranks = SINGLE  # The processes that train together.

    @property
    def kernel_device(self) -> str:
        """Type of the device whose kernels are used, or simulated on fake tensors."""
        return self.device.type

    @property
    def product_dtype(self) -> torch.dtype | None:
        """Format of the matrix products of optimizers; None: as the device's tensors have it."""
        return None

    def product_eps(self, dtype: torch.dtype | None = None) -> float:
        """Return the relative rounding step of products of tensors in a format, by default in that of the training: the
        step of TF32 where fp32 products are computed in it."""
        dtype = dtype or self.dtype
        return TF32_EPS if dtype == torch.float32 and self.plan.tf32.value else float(torch.finfo(dtype).eps)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device, with its convolution weights in the chosen layout."""
        if any(parameter.device.type != self.device.type for parameter in module.parameters()):
            module.to(self.device)  # A module of fake tensors is on its device already, and cannot be moved.
        if self.memory_format == torch.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module

    def compile(self, function: F, *, any_count: bool = False, any_shape: bool = False) -> F:
        """Return a function that runs compiled as long as the plan says so. Shapes are static: crops have one size, and
        micro-batches few sizes. With `any_count`, the first dimension of its tensors may change from call to call
        without another compilation, except for a single item; with `any_shape`, any of them."""
        if not self.plan.compile.value:
            return function
        # There is one trace for every shape, and for every layer that shares its code with others. Past the default
        # limit of 8, the function would silently run uncompiled.
        torch._dynamo.config.recompile_limit = 256
        # The warning is about a Fourier transform, which is called uncompiled, as intended.
        warnings.filterwarnings("ignore", message=".*does not support code generation for complex operators")
        compiled = torch.compile(function, dynamic=any_shape)

        @functools.wraps(function)
        def either(*arguments: Any, **named: Any) -> Any:
            if any_count:
                for tensor in (value for value in arguments if isinstance(value, torch.Tensor)):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return (compiled if self.plan.compile.value else function)(*arguments, **named)

        return cast(F, either)

    def compile_modules(
        self, modules: Iterable[nn.Module], *, any_count: bool = False, any_shape: bool = False
    ) -> None:
        """Compile the forward passes of modules. Their names in a checkpoint do not change."""
        if self.plan.compile.value:
            for module in modules:
                module.forward = self.compile(module.forward, any_count=any_count, any_shape=any_shape)

    def stop_compiling(self, cause: str) -> None:
        """Run everything uncompiled, after the compiler has failed."""
        self.plan = replace(self.plan, compile=Setting(False, f"the compiler failed: {cause}"))
        log.warning("torch.compile failed (%s); training goes on without it", cause)

    def verify_layout(self, name: str, block: Callable[[Tensor], Tensor], channels: int) -> None:
        """Check that a block preserves channels_last, which a normalisation may silently undo; switch it off if not."""
        if not self.plan.channels_last.value:
            return
        x_BCHW = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(0)).to(self.device)
        with torch.no_grad(), self.autocast():
            out_BCHW = block(x_BCHW.contiguous(memory_format=torch.channels_last))
        if not out_BCHW.is_contiguous(memory_format=torch.channels_last):
            reason = f"{name} returns another layout with this torch, so each layer converts"
            self.plan = replace(self.plan, channels_last=Setting(False, reason))
            self.memory_format = torch.contiguous_format
            log.warning("channels_last is off: %s", reason)

    def limit_memory(self, budget_gb: float) -> None:
        """Make torch run out of memory at `budget_gb` of a GPU, even if the GPU has more.

        Windows' drivers would use the RAM instead, at a tenth of the speed; and a large GPU can simulate a smaller one.
        """
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_gb * 1e9 / total), self.device)

    @functools.cached_property
    def product_rate(self) -> float:
        """Measured FLOPS of a large matrix product in the precision of the training."""
        return product_flops_per_second(self.device, self.dtype)

    def peak_share(self, flops_per_second: float) -> float | None:
        """Return the share of a GPU's peak, for which the rate of a large matrix product is taken. It is None on a CPU,
        where convolutions, by another library, may be twice as fast as products."""
        return flops_per_second / self.product_rate if self.device.type == "cuda" else None


def apply(plan: Plan, ranks: Ranks = SINGLE) -> Runtime:
    """Set torch's settings by the plan. The runtime's plan is corrected where a setting is not in effect."""
    device = torch.device(str(plan.device.value))
    if device.type == "cuda":
        # Some of torch's functions refuse a device without its index, others take the current device.
        device = torch.device("cuda", ranks.local_index)
        if ranks.local_index:
            torch.cuda.set_device(device)
        # The newer fp32_precision attributes would make torch's own readers of the older ones raise, compilation's too.
        torch.set_float32_matmul_precision("high" if plan.tf32.value else "highest")
        torch.backends.cudnn.allow_tf32 = bool(plan.tf32.value)
        torch.backends.cudnn.benchmark = bool(plan.cudnn_benchmark.value)
        if plan.expandable_segments.value:  # A process that has not probed the machine needs it.
            request_expandable_segments()
        if torch.cuda.is_available():  # A plan for a card can be applied where there is none.
            plan = verify_expandable_segments(plan, device)
    # torch counts the cores of the machine, and threads beyond a container's quota only hold each other up.
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    # The plan gives the number of workers with its reason, also if they are more than the cores.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if plan.compile.value:
        keep_compiled_code()
    return Runtime(
        plan=plan,
        device=device,
        dtype=DTYPES[str(plan.precision.value)],
        memory_format=torch.channels_last if plan.channels_last.value else torch.contiguous_format,
        ranks=ranks,
    )


def runtime_on(device: DeviceName, *, precision: PrecisionWish = "auto") -> Runtime:
    """Return the runtime of a command that uses a trained model on this machine, for inputs of any size. Raises
    UserError as `decide` does."""
    return apply(decide(probe(), Hardware(device=device, precision=precision), fixed_shapes=False))


@contextlib.contextmanager
def shapes_may_change() -> Iterator[None]:
    """Let cuDNN choose convolutions by its heuristics within the block, as it would search again for every new shape.

    Algorithms that were found for the shapes of the training are used again afterwards. A shape of the training that is
    first met within the block keeps what the heuristics chose for it: torch remembers one choice for each shape.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def verify_expandable_segments(plan: Plan, device: torch.device) -> Plan:
    """Start CUDA and compare the plan with the allocator's own settings. Returns the plan in effect."""
    in_effect = torch.cuda.get_allocator_backend() == "native" and bool(  # cudaMallocAsync has neither of these.
        torch.cuda.memory._snapshot(device)["allocator_settings"]["expandable_segments"]
    )
    if in_effect == plan.expandable_segments.value:
        return plan
    given = [f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if name in os.environ]
    reason = f"{' and '.join(given)} in the environment" if given else "CUDA was started before the setting was made"
    log.warning("expandable segments are %s: %s", "on" if in_effect else "off", reason)
    return replace(plan, expandable_segments=Setting(in_effect, reason))


def keep_compiled_code() -> None:
    """Keep compiled code where the next run finds it; by default torch keeps it in a temporary folder."""
    folder = cache_folder() / "compiled"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    # Our autograd functions need not be compiled again: the key holds the graphs of their forward and backward passes.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True


def compiler_failure(error: BaseException) -> str:
    """Return the compiler's message in one line; nothing if the error is not the compiler's."""
    dynamo = sys.modules.get("torch._dynamo.exc")
    if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def synchronize(device: torch.device) -> None:
    """Waits until the device has computed everything; nothing is pending on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory has run out. Call it in the except block, while the memory of the failed part is in use."""
    if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OUT_OF_MEMORY_TEXTS):
        return True
    return is_library_failure(error) and memory_is_short() is True


def is_library_failure(error: BaseException) -> bool:
    return any(text in str(error) for text in LIBRARY_FAILURE_TEXTS)


def library_failure(error: BaseException) -> UserError | None:
    """Return what to show for the failure of a library of CUDA that has not run out of memory; None for others."""
    if not is_library_failure(error) or memory_is_short() is not False:
        return None
    return UserError(
        f"a library of CUDA has failed, although memory is free: {first_line(error)}",
        hint="gputrain check-compatibility tries the libraries; --no-channels-last, --precision tf32 or "
        "--no-use-torch-compile may choose an algorithm that works",
    )


def memory_is_short() -> bool | None:
    """Return whether little memory of the current GPU is free, without what torch has reserved; None if CUDA gives no
    answer any more, as after an error of a kernel."""
    if not torch.cuda.is_available():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
        limit = total * torch.cuda.get_per_process_memory_fraction()
        return min(free, limit - torch.cuda.memory_reserved()) < SHORT_SHARE * limit
    except RuntimeError:
        return None


def release_memory() -> None:
    """Free what an interrupted step left. Call it outside the except block, whose traceback keeps tensors alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_gb(device: torch.device) -> dict[str, float]:
    """Return the largest memory in use so far, on a GPU since the peak was last reset, under the names of the metrics.

    For a GPU it is the memory of torch's tensors, and what its allocator reserved for them; for the CPU it is the
    resident memory of the process, if the system reports it.
    """
    if device.type == "cuda":
        return {
            "memory/peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
            "memory/peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
        }
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024  # The unit is bytes on macOS, kilobytes elsewhere.
    return {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's generators, for a checkpoint and for repeating a phase."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
