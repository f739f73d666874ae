"""Peak memory of a training step, predicted without a GPU.

Two steps run on shapes alone: tensors have sizes and dtypes, but no memory, and no operator computes. Every storage
that an operator makes is noted, and when it goes; the course is then replayed, once as a sum and once through a model
of CUDA's caching allocator. Not in it: the CUDA context (0.3 to 0.6 GB), workspaces of cuDNN and cuBLAS, and what a
compiler fuses away. GB is 1e9 bytes.
"""

import copy
import gc
import time
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gputrain.errors import UserError
from gputrain.hw.flops import FlopCount, on_shapes
from gputrain.hw.runtime import DTYPES

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "sgd"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class MemoryEstimate:
    """`parts`: what stands in memory at the moment of the peak, by what it is for, in GB."""

    allocated_gb: float
    reserved_gb: float  # what the allocator has taken from the card for it
    parts: dict[str, float]  # parameters, gradients, optimizer, activations, workspace
    flops: int  # of the step, what checkpointing repeats included, elementwise work left out
    seconds_to_predict: float


def predict_training_memory(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    checkpointing: bool = False,
    gradients_resident: bool = True,
    autocast_rules: Literal["cuda", "cpu"] = "cuda",
) -> MemoryEstimate:
    """Memory of one optimizer step: forward, backward of the scalar `loss(model, batch)`, and a fused step.

    `model` and the tensors in `batch` may lie anywhere, on the meta device too; neither is changed. `precision` is that
    of autocast; weights, gradients and optimizer state have the weights' own dtype. `checkpointing` asks a model of
    transformers for gradient checkpointing. `gradients_resident`: whether gradients are kept from step to step, as
    they are when a batch is accumulated. Raises UserError where the model cannot run without values, naming the
    operator.
    """
    began = time.perf_counter()
    course = Course()
    with on_shapes():
        twin, shapes = _on_shapes(model, batch)
        if checkpointing:
            _checkpoint(twin)
        with _explained():
            flops = _two_steps(twin, shapes, loss, course, precision, optimizer, gradients_resident, autocast_rules)
    peak_bytes, parts = course.peak()
    return MemoryEstimate(
        allocated_gb=peak_bytes / 1e9,
        reserved_gb=CachingAllocator().replay(course.events) / 1e9,
        parts=parts,
        flops=flops,
        seconds_to_predict=time.perf_counter() - began,
    )


def _two_steps(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    course: "Course",
    precision: Precision,
    optimizer: Optimizer,
    gradients_resident: bool,
    autocast_rules: str,
) -> int:
    """The first step makes what stays; the second is the one to look at. Returns its FLOPs."""
    learning = [p for p in model.parameters() if p.requires_grad]
    course.note("parameters", model.parameters(), model.buffers(), tree_leaves(batch))
    state: list[Tensor] = []
    flops = 0
    for step in range(2):
        if not gradients_resident:
            model.zero_grad(set_to_none=True)
        with FlopCount() as count, course.watching():
            course.doing = "activations"
            with _autocast(precision, autocast_rules):
                value = loss(model, batch)
            course.doing = "workspace"
            torch.autograd.backward(value)
            del value
            course.note("gradients", [p.grad for p in learning if p.grad is not None])
            if step == 0:
                course.doing = "optimizer"
                moments = {"adamw": 2, "sgd": 0}[optimizer]
                state += [torch.zeros_like(p) for _ in range(moments) for p in learning if p.grad is not None]
        flops = count.total
    return flops


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
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UserError(
            f"{type(model).__name__} has no gradient checkpointing that can be asked for",
            hint="build the model with its checkpointing on, and leave checkpointing out here",
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what fake tensors cannot do into a UserError that names the operator."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise UserError(
            f"the model needs values, not shapes alone: {error.args[0] if error.args else error}",
            hint="leave out the inputs that choose by value, such as masks, or measure on the card",
        ) from None


# ---------------------------------------------------------------------------------------------------- autocast


def _autocast(precision: Precision, rules: str) -> ExitStack:
    stack = ExitStack()
    if precision != "fp32":
        stack.enter_context(torch.autocast("cpu", dtype=DTYPES[precision]))
        stack.enter_context(CudaAutocast() if rules == "cuda" else nullcontext())
    return stack


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
        return function(*arguments, **named)


def _to_fp32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


# ------------------------------------------------------------------------------------------------------ course


KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True)
class Event:
    """A storage comes (bytes) or goes (0)."""

    storage: int
    bytes: int


@dataclass
class Course:
    """What storages came and went, in order, and what each is for."""

    events: list[Event] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # by storage
    doing: str = "activations"
    standing: int = 0  # bytes now
    swept: int = 0  # what stood when rubbish was last swept up
    _known: Any = field(default_factory=WeakIdKeyDictionary)  # storages by identity, for as long as they are there

    def note(self, kind: str, *groups: Any) -> None:
        """These tensors are there, and of this kind."""
        for tensor in (tensor for group in groups for tensor in group if isinstance(tensor, Tensor)):
            self.kinds[self._number(tensor)] = kind

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            number, size = len(self.kinds), storage.nbytes()
            # Recomputing in the backward pass leaves fake tensors in cycles of references, as it does not with real
            # ones. They are swept up before a peak is believed that is a thousandth higher than the last.
            if self.doing != "activations" and self.standing + size > 1.001 * self.swept:
                gc.collect()
                self.swept = max(self.swept, self.standing + size)
            self._known[storage] = number
            self.kinds.append(self.doing)
            self._add(number, size)
            weakref.finalize(storage, self._remove, number, size)
        return int(self._known[storage])

    def _add(self, number: int, size: int) -> None:
        self.events.append(Event(number, size))
        self.standing += size

    def _remove(self, number: int, size: int) -> None:
        self.events.append(Event(number, 0))
        self.standing -= size

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what every operator makes."""
        gc.freeze()  # what is there already need not be looked through at every sweep
        try:
            with _Watch(self):
                yield
        finally:
            gc.unfreeze()

    def peak(self) -> tuple[int, dict[str, float]]:
        """Bytes at the peak, each storage rounded as the allocator does, and GB by kind at that moment."""
        standing = dict.fromkeys(KINDS, 0)
        sizes: dict[int, int] = {}
        peak, parts = 0, dict(standing)
        for event in self.events:
            size = _rounded(event.bytes) if event.bytes else -sizes.pop(event.storage)
            if event.bytes:
                sizes[event.storage] = size
            standing[self.kinds[event.storage]] += size
            if (total := sum(standing.values())) > peak:
                peak, parts = total, dict(standing)
        return peak, {kind: size / 1e9 for kind, size in parts.items()}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, course: Course) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.course = course

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.course._number(leaf)
        return made


# --------------------------------------------------------------------------------------------------- allocator

SMALL, LARGE = 2**20, 10 * 2**20  # bytes: requests up to SMALL have a pool, from LARGE on a segment each
GRAIN, SEGMENT_GRAIN = 512, 2 * 2**20  # bytes that requests and segments are rounded to


def _rounded(bytes_: int) -> int:
    return max(GRAIN, -(-bytes_ // GRAIN) * GRAIN)


@dataclass
class Block:
    """A stretch of a segment, between its neighbours."""

    size: int
    small: bool  # of which pool
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


class CachingAllocator:
    """CUDA's caching allocator as torch has it, without expandable segments: what it takes from the card and keeps.

    https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp describes the constants.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        # Of small and of large requests: sizes of the free blocks in order, and the blocks beside them.
        self.free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.blocks: dict[int, Block] = {}  # the free ones, by identity

    def replay(self, events: list[Event]) -> int:
        """Bytes that a course of storages makes it reserve."""
        held: dict[int, Block] = {}
        for event in events:
            if event.bytes:
                held[event.storage] = self.allocate(_rounded(event.bytes))
            else:
                self.release(held.pop(event.storage))
        return self.reserved_bytes

    def allocate(self, size: int) -> Block:
        small = size <= SMALL
        free = self.free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self.blocks.pop(free.pop(place)[1])
        else:
            whole = -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN
            segment = SEGMENT_GRAIN if small else 2 * LARGE if size < LARGE else whole
            self.reserved_bytes += segment
            block = Block(segment, small)
        block.free = False
        rest = block.size - size
        if rest >= GRAIN if small else rest > SMALL:
            remaining = Block(rest, small, before=block, after=block.after)
            if block.after:
                block.after.before = remaining
            block.size, block.after = size, remaining
            self._offer(remaining)
        return block

    def release(self, block: Block) -> None:
        """Give a block back, joined with free neighbours."""
        for neighbour in (block.before, block.after):
            if neighbour and neighbour.free:
                self._withdraw(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.before = neighbour.before
                    if block.before:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after:
                        block.after.before = block
        self._offer(block)

    def _offer(self, block: Block) -> None:
        block.free = True
        self.blocks[id(block)] = block
        insort(self.free[block.small], (block.size, id(block)))

    def _withdraw(self, block: Block) -> None:
        del self.blocks[id(block)]
        free = self.free[block.small]
        del free[bisect_left(free, (block.size, id(block)))]
