"""Peak memory of a training step of any torch model, predicted without a GPU.

A step runs on fake tensors, which have sizes and dtypes, but no memory, and no operator computes. The allocation and
the release of every storage are noted; two steps are then replayed through a model of CUDA's caching allocator, because
the second reuses the segments of the first. The prediction does not contain the CUDA context (0.3 to 0.6 GB) and
workspaces of cuDNN and cuBLAS, and it contains intermediate results that a compiler would fuse. GB is 1e9 bytes.
"""

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
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

from gputrain.errors import UserError, first_line
from gputrain.hw.runtime import DTYPES
from gputrain.planner.allocator import CachingAllocator, PlainAllocator
from gputrain.planner.fake_runtime import Draws, FunctionsOf, Rules, on_fake_tensors
from gputrain.planner.fusion import kernel_costs
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.operators import WRITE_ONLY, Operator, addition
from gputrain.planner.roofline import KernelCost, StepTotals
from gputrain.planner.torch_model import (
    checkpoint_blocks,
    copy_with,
    refuse_unpredictable,
    without_random_choices,
)

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "muon", "sgd"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class MemoryEstimate:
    """The predicted memory of a step; `parts` are the GB at the peak by purpose."""

    allocated_gb: float
    reserved_gb: float  # Memory that the allocator takes from the device.
    parts: dict[str, float]  # Parameters, gradients, optimizer, activations, workspace.
    flops: int  # FLOPs of the step, with those that checkpointing repeats, without elementwise operations.
    seconds_to_predict: float
    micro_batch: tuple[KernelCost, ...] = ()  # Kernels of a micro-batch, without those of the optimizer.
    update: tuple[KernelCost, ...] = ()  # Kernels of the optimizer.
    graph_launches: int = 0  # As in StepCost.

    @property
    def kernels(self) -> int:
        """Kernels that a micro-batch launches."""
        return StepTotals.of(self.micro_batch).kernels

    @classmethod
    def of(
        cls,
        timeline: MemoryTimeline,
        micro_batch: Sequence[Operator],
        update: Sequence[Operator],
        seconds: float,
        allocator: PlainAllocator | CachingAllocator,
    ) -> "MemoryEstimate":
        peak_bytes, parts = timeline.peak(allocator)
        flops = sum(operator.flops for operator in (*micro_batch, *update))
        kernels = (kernel_costs(micro_batch), kernel_costs(update))
        return cls(peak_bytes / 1e9, allocator.reserved_bytes / 1e9, parts, round(flops), seconds, *kernels)


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
    """Returns the memory of an optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `model` and the tensors in `batch` may be on any device, including meta; neither is changed. `precision` is that of
    autocast; weights, gradients and optimizer state have the weights' own dtype. `optimizer` muon is torch's Muon for
    matrices, and AdamW for the rest. `checkpointing` enables the gradient checkpointing of a transformers model.
    `gradients_resident`: a micro-batch adds to existing gradients, as in gradient accumulation. `ema`: there is a
    moving average of the weights. `caching_allocator`: False for a CPU, which frees memory at once;
    `expandable_segments`: as set by PYTORCH_CUDA_ALLOC_CONF. Raises UserError if the model needs values to run, or has
    modules whose memory cannot be predicted, and names the operator or the module.

    If single random numbers decide what the model computes, as in layer drop, the step is the larger of two: with all
    of them at the upper and at the lower end of their ranges. A step that does not run at one of them, because no
    trained layer is left, does not count.
    """
    refuse_unpredictable(model)
    predict = functools.partial(
        _predict, model, loss, batch, precision=precision, optimizer=optimizer, checkpointing=checkpointing,
        gradients_resident=gradients_resident, ema=ema, caching_allocator=caching_allocator,
        expandable_segments=expandable_segments, autocast_rules=autocast_rules,
    )  # fmt: skip
    found: list[MemoryEstimate] = []
    failure: DoesNotRun | None = None
    for draws in (Draws("upper"), Draws("lower")):
        try:
            found.append(predict(draws))
        except DoesNotRun as error:
            failure = failure or error
        if not draws.decided:
            break
    if failure and not found:
        raise failure
    return max(found, key=lambda each: each.allocated_gb)


def _predict(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, draws: Draws, *, precision: Precision,
    optimizer: Optimizer, checkpointing: bool, gradients_resident: bool, ema: bool, caching_allocator: bool,
    expandable_segments: bool, autocast_rules: Rules,
) -> MemoryEstimate:  # fmt: skip
    """Returns the memory of a step whose single random numbers are as `draws` says."""
    began = time.perf_counter()
    timeline = MemoryTimeline.on(autocast_rules)
    with on_fake_tensors(draws):
        twin, shapes = _on_shapes(model, batch)
        if checkpointing:
            checkpoint_blocks(twin)
        average = [torch.empty_like(p) for p in twin.parameters()] if ema else []
        trainable = [p for p in twin.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(timeline.mark_accumulated)  # type: ignore[no-untyped-call]
        optimizers = make_optimizers(optimizer, trainable)
        timeline.note("parameters", twin.parameters(), twin.buffers(), average, tree_leaves(shapes))
        # The autocast rules hold in the backward pass too, where checkpointing repeats the forward pass.
        with explained(twin), timeline.watching(), FunctionsOf(autocast_rules):
            begin = len(timeline.events)
            with torch.autocast("cpu", DTYPES[precision], enabled=precision != "fp32"):
                value = loss(twin, shapes)
            torch.autograd.backward(value)
            del value
            end, computed = len(timeline.events), len(timeline.log.operators)
            timeline.note("gradients", (p.grad for p in trainable))
            for one in optimizers:
                one.step()
        timeline.note("optimizer", *(state.values() for one in optimizers for state in one.state.values()))
    whole = timeline.training(slice(begin, end), slice(end, len(timeline.events)), accumulated=gradients_resident)
    operators = timeline.log.operators
    micro_batch = operators[:computed]
    if gradients_resident:
        micro_batch += [
            addition(p) for p in trainable if p.grad is not None
        ]  # Each gradient is added to the existing one.
    # Only the first step allocates the optimizer's state.
    update = [operator for operator in operators[computed:] if operator.name not in WRITE_ONLY]
    allocator = CachingAllocator(expandable=expandable_segments) if caching_allocator else PlainAllocator()
    return MemoryEstimate.of(whole, micro_batch, update, time.perf_counter() - began, allocator)


def make_optimizers(kind: Optimizer, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a kind, with a learning rate of 0: Muon is for matrices, and AdamW for the rest."""
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=0.0, fused=True)]
    matrices = [p for p in parameters if p.ndim == 2] if kind == "muon" else []
    others = [p for p in parameters if p.ndim != 2 or not matrices]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=0.0, fused=True)] if others else []
    return [*made, torch.optim.Muon(matrices, lr=0.0)] if matrices else made


def _on_shapes(model: M, batch: Any) -> tuple[M, Any]:
    """Returns the model and the batch with fake tensors, nominally on the CPU. Integers of the batch keep their values,
    because losses read those of labels."""

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
    return cast(M, without_random_choices(twin)), tree_map(input_of, batch)


class DoesNotRun(UserError):
    """The model does not run on the batch, or not on fake tensors."""


@contextmanager
def explained(model: nn.Module | None = None) -> Iterator[None]:
    """Turns errors of fake tensors into a UserError that names the operator and the module of `model`."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        cause = error.args[0] if error.args else error
        raise UserError(
            f"the model needs values, not shapes alone: {cause}{_place(model, error)}",
            hint="leave out inputs whose values the model chooses by, such as masks, or measure on the GPU",
        ) from None
    except UserError as error:
        raise UserError(f"{error.message}{_place(model, error)}", hint=error.hint) from None
    except Exception as error:
        if model is None:
            raise
        raise DoesNotRun(
            f"{type(model).__name__} does not run on such a batch: {first_line(error)}{_place(model, error)}",
            hint="if it does with real tensors, run create_optimal_config on the machine with the GPU, where it "
            "measures two real steps; else pass another batch or loss",
        ) from error


def _place(model: nn.Module | None, error: BaseException) -> str:
    """Returns the innermost module that the error passed through, in words; nothing if there is none."""
    names = {id(module): name for name, module in model.named_modules()} if model else {}
    held = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [module for module in held if id(module) in names]
    if not inside:
        return ""
    return f" (in {names[id(inside[-1])] or 'the model'}, a {type(inside[-1]).__name__})"
