"""Running a training step on shapes alone: nothing is computed, and no memory is taken."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gputrain.hw.course import Course
from gputrain.hw.plan import Plan
from gputrain.hw.runtime import DTYPES, Runtime

F = TypeVar("F", bound=Callable[..., Any])
Rules = Literal["cuda", "cpu"]


@contextmanager
def on_shapes() -> Iterator[None]:
    """Tensors made within have shapes, dtypes and strides, but no memory and no values; no operator computes.

    They lie on the CPU in name. torch's random numbers are the same afterwards.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices), FakeTensorMode(allow_non_fake_inputs=True):
        yield


class ShapesRuntime(Runtime):
    """A plan in effect for tensors that have shapes only and lie on the CPU in name, whatever device they stand for.

    What would be compiled counts on `course` as one kernel.
    """

    def __init__(self, plan: Plan, course: Course) -> None:
        last = torch.channels_last if plan.channels_last.value else torch.contiguous_format
        super().__init__(plan, torch.device("cpu"), DTYPES[str(plan.precision.value)], last)
        self.course = course

    @property
    def stands_for(self) -> str:
        return str(self.plan.device.value)

    def autocast(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(following("cuda" if self.stands_for == "cuda" else "cpu"))
        stack.enter_context(autocast(self.dtype))
        return stack

    def place(self, module: nn.Module) -> nn.Module:
        return module  # it lies where it must; the layout of its weights changes no size

    def compile(self, function: F, *, any_count: bool = False) -> F:
        return self.course.fused(function) if self.plan.compile.value else function

    def compile_modules(self, modules: Iterable[nn.Module], *, any_count: bool = False) -> None:
        """Leave them: what the compiler would keep of them for the backward pass is not known."""

    def verify_layout(self, block: nn.Module, channels: int) -> None:
        """Nothing to find out: nothing is computed."""


def autocast(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast on tensors that lie on the CPU; for fp32, none."""
    return nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)


def following(rules: Rules) -> AbstractContextManager[object]:
    """Have autocast on the CPU follow the rules of another device."""
    return CudaAutocast() if rules == "cuda" else nullcontext()


# What CUDA's autocast computes in fp32 and the CPU's does not.
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
IN_FP32 = {
    "layer_norm", "group_norm", "native_layer_norm", "native_group_norm", "softmax", "log_softmax", "softmin",
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "norm", "cumsum", "cumprod", "prod", "sum",
    "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "softplus",
    "acos", "asin", "cosh", "erfinv", "sinh", "tan", "cosine_similarity", "renorm", "dist", "cdist", "logsumexp",
}  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Casts to fp32 before the functions that CUDA's autocast keeps in fp32, as far as the CPU's leaves them alone."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if getattr(function, "__name__", "") in IN_FP32 and torch.is_autocast_enabled("cpu"):
            arguments, named = tree_map(_to_fp32, (arguments, named))
        if function is torch.autograd.backward:
            with self:  # torch would leave the mode, and what checkpointing repeats would come out otherwise
                return _backward(*arguments, **named)
        return function(*arguments, **named)


def _backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Sequence[Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """torch.autograd.backward, past the place where function modes are left."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = tuple(grad_tensors or map(torch.ones_like, tensors))
    how = (bool(retain_graph), create_graph, tuple(inputs or ()))
    _engine_run_backward(tensors, gradients, *how, allow_unreachable=True, accumulate_grad=True)


def _to_fp32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
