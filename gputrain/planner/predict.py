"""Peak memory of a training step, predicted without a GPU.

A step runs on shapes alone: tensors have sizes and dtypes, but no memory, and no operator computes. Every storage that
an operator makes is noted, and when it goes; two steps of it are then replayed through a model of CUDA's caching
allocator, since the second finds what the first has left behind. Not in it: the CUDA context (0.3 to 0.6 GB),
workspaces of cuDNN and cuBLAS, and what a compiler fuses away. GB is 1e9 bytes.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.errors import UserError
from gputrain.hw.runtime import DTYPES
from gputrain.planner.allocator import CachingAllocator, PlainAllocator
from gputrain.planner.fake_runtime import Rules, autocast, following, on_fake_tensors
from gputrain.planner.flops import FlopCount
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.torch_model import (
    can_checkpoint,
    checkpoint_blocks,
    copy_with,
    refuse_unpredictable,
    without_chance,
)

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "muon", "sgd"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class MemoryEstimate:
    """`parts`: what stands in memory at the moment of the peak, by what it is for, in GB."""

    allocated_gb: float
    reserved_gb: float  # what the allocator has taken from the card for it
    parts: dict[str, float]  # parameters, gradients, optimizer, activations, workspace
    flops: int  # of the step, what checkpointing repeats included, elementwise work left out
    seconds_to_predict: float
    kernels: int = 0  # operators that compute or write, each a kernel or more

    @classmethod
    def of(
        cls,
        timeline: MemoryTimeline,
        flops: int,
        kernels: int,
        seconds: float,
        allocator: PlainAllocator | CachingAllocator,
    ) -> "MemoryEstimate":
        peak_bytes, parts = timeline.peak(allocator)
        return cls(peak_bytes / 1e9, allocator.reserved_bytes / 1e9, parts, flops, seconds, kernels)


def predict_training_memory(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    checkpointing: bool = False,
    gradients_resident: bool = True,
    ema: bool = False,
    caching_allocator: bool = True,
    expandable_segments: bool = False,
    autocast_rules: Rules = "cuda",
) -> MemoryEstimate:
    """Memory of one optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `model` and the tensors in `batch` may lie anywhere, on the meta device too; neither is changed. `precision` is that
    of autocast; weights, gradients and optimizer state have the weights' own dtype. `optimizer` muon is torch's for
    matrices, and AdamW for the rest. `checkpointing` asks a model of transformers for gradient checkpointing.
    `gradients_resident`: whether a micro-batch finds gradients and adds to them, as when a batch is accumulated. `ema`:
    whether an average of the weights is kept. `caching_allocator`: False for a CPU, which gives back at once what is
    freed; `expandable_segments`: as PYTORCH_CUDA_ALLOC_CONF sets them. Raises UserError where the model cannot run
    without values, or has what cannot be predicted, naming the operator or the module.
    """
    began = time.perf_counter()
    timeline = MemoryTimeline()
    refuse_unpredictable(model)
    with on_fake_tensors():
        twin, shapes = _on_shapes(model, batch)
        if checkpointing:
            _checkpoint(twin)
        average = [torch.empty_like(p) for p in twin.parameters()] if ema else []
        trainable = [p for p in twin.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(timeline.mark_accumulated)  # type: ignore[no-untyped-call]
        optimizers = make_optimizers(optimizer, trainable)
        timeline.note("parameters", twin.parameters(), twin.buffers(), average, tree_leaves(shapes))
        # The rules stand around the backward pass too: what checkpointing repeats there must come out the same.
        with explained(twin), timeline.watching(), following(autocast_rules):
            begin = len(timeline.events)
            with FlopCount() as count:
                with autocast(DTYPES[precision]):
                    value = loss(twin, shapes)
                torch.autograd.backward(value)
                del value
                end = len(timeline.events)
                timeline.note("gradients", (p.grad for p in trainable))
                for one in optimizers:
                    one.step()
                stepped = len(timeline.events)
        timeline.note("optimizer", *(state.values() for one in optimizers for state in one.state.values()))
    whole = timeline.training(slice(begin, end), slice(end, len(timeline.events)), accumulated=gradients_resident)
    kernels = timeline.kernels - timeline.kinds_of(slice(end, stepped)).count(
        "optimizer"
    )  # made by the first step alone
    if gradients_resident:
        kernels += len(timeline.accumulated)  # each gradient is added
    allocator = CachingAllocator(expandable=expandable_segments) if caching_allocator else PlainAllocator()
    return MemoryEstimate.of(whole, count.total, kernels, time.perf_counter() - began, allocator)


def make_optimizers(kind: Optimizer, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a kind, with a learning rate of 0: Muon is for matrices, and AdamW for the rest."""
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=0.0, fused=True)]
    matrices = [p for p in parameters if p.ndim == 2] if kind == "muon" else []
    others = [p for p in parameters if p.ndim != 2 or not matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=0.0, fused=True)] if others else []
    return [*made, torch.optim.Muon(matrices, lr=0.0)] if matrices else made


def _on_shapes(model: M, batch: Any) -> tuple[M, Any]:
    """The model and the batch with tensors that have shapes only, on the CPU in name; integers of the batch that have
    values keep them, since losses ask for those of labels."""

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def input_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        has_values = not (leaf.is_meta or leaf.is_floating_point() or leaf.is_complex())
        return leaf.detach().cpu() if has_values else shape_of(leaf)

    twin = copy_with(model, shape_of)
    for parameter in twin.parameters():
        parameter.grad = None
    return cast(M, without_chance(twin)), tree_map(input_of, batch)


def _checkpoint(model: nn.Module) -> None:
    if not can_checkpoint(model):
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing that can be asked for",
            hint="build the model with its checkpointing on, and leave checkpointing out here",
        )
    checkpoint_blocks(model, {"use_reentrant": False})


class DoesNotRun(UserError):
    """The batch does not suit the model, or the model what runs without values."""


@contextmanager
def explained(model: nn.Module | None = None) -> Iterator[None]:
    """Turn what cannot be done on shapes into a UserError that names the operator, and the module of `model`."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UserError(
            f"the model needs values, not shapes alone: {error.args[0] if error.args else error}{_place(model, error)}",
            hint="leave out the inputs that choose by value, such as masks, or measure on the card",
        ) from None
    except UserError as error:
        raise UserError(f"{error.message}{_place(model, error)}", hint=error.hint) from None
    except Exception as error:
        if model is None:
            raise
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DoesNotRun(
            f"{type(model).__name__} does not run on such a batch: {line}{_place(model, error)}",
            hint="if it does with real tensors, run create_optimal_config on the machine with the card, where it "
            "measures two real steps; else pass another batch or loss",
        ) from error


def _place(model: nn.Module | None, error: BaseException) -> str:
    """The innermost module that the error went through, in words; nothing where it was in none."""
    names = {id(module): name for name, module in model.named_modules()} if model else {}
    held = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [module for module in held if id(module) in names]
    if not inside:
        return ""
    return f" (in {names[id(inside[-1])] or 'the model'}, a {type(inside[-1]).__name__})"
