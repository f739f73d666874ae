"""Peak memory of a training step, predicted without a GPU.

A step runs on shapes alone: tensors have sizes and dtypes, but no memory, and no operator computes. Every storage that
an operator makes is noted, and when it goes; the course is then replayed, once as a sum and once through a model of
CUDA's caching allocator. Not in it: the CUDA context (0.3 to 0.6 GB), workspaces of cuDNN and cuBLAS, and what a
compiler fuses away. GB is 1e9 bytes.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.errors import UserError
from gputrain.hw.allocator import CachingAllocator
from gputrain.hw.course import Course
from gputrain.hw.flops import FlopCount
from gputrain.hw.inputs import can_checkpoint, checkpoint_blocks
from gputrain.hw.runtime import DTYPES
from gputrain.hw.shapes import Rules, autocast, following, on_shapes

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
    def of(cls, course: Course, flops: int, kernels: int, seconds: float, *, expandable: bool) -> "MemoryEstimate":
        peak_bytes, parts = course.peak()
        reserved_bytes = CachingAllocator(expandable=expandable).replay(course.events)
        return cls(peak_bytes / 1e9, reserved_bytes / 1e9, parts, flops, seconds, kernels)


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
    expandable_segments: bool = False,
    autocast_rules: Rules = "cuda",
) -> MemoryEstimate:
    """Memory of one optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `model` and the tensors in `batch` may lie anywhere, on the meta device too; neither is changed. `precision` is that
    of autocast; weights, gradients and optimizer state have the weights' own dtype. `optimizer` muon is torch's for
    matrices, and AdamW for the rest. `checkpointing` asks a model of transformers for gradient checkpointing.
    `gradients_resident`: whether gradients are kept from step to step, as they are when a batch is accumulated. `ema`:
    whether an average of the weights is kept. Raises UserError where the model cannot run without values, naming the
    operator.
    """
    began = time.perf_counter()
    with on_shapes():
        twin, shapes = _on_shapes(model, batch)
        if checkpointing:
            _checkpoint(twin)
        average = [torch.empty_like(p) for p in twin.parameters()] if ema else []
        learning = [p for p in twin.parameters() if p.requires_grad]
        while True:
            course, reached = Course(), set[nn.Parameter]()
            course.note("parameters", twin.parameters(), twin.buffers(), average, tree_leaves(shapes))
            optimizers = _made_state(optimizer, learning)
            course.note("optimizer", *(state.values() for one in optimizers for state in one.state.values()))
            if gradients_resident:
                course.note("gradients", (p.grad for p in learning))
            else:
                twin.zero_grad(set_to_none=True)
            hooks = [p.register_post_accumulate_grad_hook(reached.add) for p in learning]  # type: ignore[no-untyped-call]
            # The rules stand around the backward pass too: what checkpointing repeats there must come out the same.
            with explained(), FlopCount() as count, course.watching(), following(autocast_rules):
                with autocast(DTYPES[precision]):
                    value = loss(twin, shapes)
                torch.autograd.backward(value)
                del value
                course.note("gradients", (p.grad for p in learning))
                for one in optimizers:
                    one.step()
            for hook in hooks:
                hook.remove()
            if len(reached) == len(learning):
                break
            learning = [p for p in learning if p in reached]  # once more, without state for what has no part in it
    seconds = time.perf_counter() - began
    return MemoryEstimate.of(course, count.total, course.kernels, seconds, expandable=expandable_segments)


def _made_state(kind: Optimizer, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Optimizers that have stepped before; the parameters, and they alone, have gradients."""
    made = _optimizers(kind, parameters)
    for parameter in parameters:
        parameter.grad = parameter.new_empty(parameter.shape)
    for one in made:
        one.step()
    return made


def _optimizers(kind: Optimizer, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=1e-4, fused=True)]
    matrices = [p for p in parameters if p.ndim == 2] if kind == "muon" else []
    others = [p for p in parameters if p.ndim != 2 or not matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=1e-4, fused=True)] if others else []
    return [*made, torch.optim.Muon(matrices, lr=1e-4)] if matrices else made


def _on_shapes(model: M, batch: Any) -> tuple[M, Any]:
    """The model and the batch with tensors that have shapes only, on the CPU in name."""

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(shape_of(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = shape_of(buffer)
    twin = copy.deepcopy(model, memo)
    for parameter in twin.parameters():
        parameter.grad = None
    return twin, tree_map(lambda leaf: shape_of(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _checkpoint(model: nn.Module) -> None:
    if not can_checkpoint(model):
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing that can be asked for",
            hint="build the model with its checkpointing on, and leave checkpointing out here",
        )
    checkpoint_blocks(model, {"use_reentrant": False})


@contextmanager
def explained() -> Iterator[None]:
    """Turn what fake tensors cannot do into a UserError that names the operator."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UserError(
            f"the model needs values, not shapes alone: {error.args[0] if error.args else error}",
            hint="leave out the inputs that choose by value, such as masks, or measure on the card",
        ) from None
