"""Records the operators of a step on fake tensors: the kernels that each stands for on a GPU, their bytes and FLOPs.

Bytes are those of every storage that an operator reads or writes, once each, as if no result stayed in a cache. FLOPs
are those of products and convolutions, by torch's formulas.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gputrain.planner.time.flops import COUNTS, StorageNumbers

aten = torch.ops.aten

# These operators make tensors and launch nothing.
WITHOUT_KERNEL = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
    "resize_", "set_", "is_same_size", "_local_scalar_dense", "scalar_tensor", "_unsafe_view", "view", "record_stream",
}  # fmt: skip
WRITE_ONLY = {
    "fill_", "zero_", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like",
    "new_full", "arange", "rand", "rand_like", "randn", "randn_like", "randint", "bernoulli_", "normal_", "uniform_",
    "exponential_", "eye", "linspace",
}  # fmt: skip
# Of their first operand these operators read no more than they write.
PICKING = {"index", "index_select", "gather", "embedding", "masked_select", "unfold", "slice_backward"}
# Launches, and passes over what is read, of operators that need several kernels (torch's sources for CUDA).
LAUNCHES_AND_PASSES = {
    "native_group_norm": (3, 2), "native_group_norm_backward": (4, 2),
    "native_layer_norm_backward": (3, 2), "native_batch_norm": (2, 2), "native_batch_norm_backward": (2, 2),
    "cudnn_batch_norm": (2, 2), "cudnn_batch_norm_backward": (2, 2),
    "slice_backward": (2, 1), "select_backward": (2, 1), "sort": (4, 4), "topk": (3, 2), "cumsum": (2, 2),
    "constant_pad_nd": (2, 1), "masked_fill": (2, 1), "reflection_pad1d_backward": (2, 1), "unfold_backward": (2, 1),
}  # fmt: skip
# torch divides the reduction of so many numbers among blocks of threads, whose counters it clears by one more launch:
# 256 for each of 512 threads (setReduceConfig in torch's Reduce.cuh). Numbers for this many results are 4 to a thread.
DIVIDED_REDUCTION = 256 * 512
RESULTS_OF_BLOCK = 32
# Whether cuDNN computes each group of a grouped convolution as a convolution of its own, with its conversions. A guess,
# not measured: NVIDIA's profiler takes each kernel of such a convolution for one group's, except those of the direct
# kernels for all groups (https://github.com/NVIDIA/PyProf, pyprof/prof/conv.py). Which are chosen, and whether all
# groups are converted at once, is what the probe of convolutions in `benchmarks/gpu.sh measure` shows.
GROUP_BY_GROUP = True
FOURIER_PASSES = 2  # A transform of cuFFT reads and writes its data about twice.
FOREACH_TENSORS = 50  # Tensors that a launch of a foreach kernel takes.
FUSED_TENSORS = 30  # The same for a fused optimizer.
FOREACH_CHUNKS = 320  # Chunks of 65,536 elements that a launch takes.
CHUNK = 65536

ADDITIONS = {"add_", "_foreach_add_"}  # With these, autograd and buckets of gradients add to an existing gradient.

# The results of these need all of their input, so that what follows is a kernel of its own.
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "all", "any", "norm", "linalg_vector_norm", "var", "var_mean", "std",
    "prod", "logsumexp", "cumsum",
}  # fmt: skip
LONGEST_ROW = 1024  # A compiler keeps rows of so many numbers in registers (inductor's persistent reductions).
# These are a reduction to a few numbers for each group or channel, and an elementwise function of those.
NORMALISATIONS = {
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "native_layer_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
}  # fmt: skip
# A compiler calls torch's own kernels for these; products and convolutions are recognised by their FLOPs.
NOT_FUSED = {
    "index_put", "index_put_", "embedding_dense_backward", "sort", "topk", "_ctc_loss", "scatter", "scatter_add",
    "scatter_add_", "scatter_reduce", "masked_select", "nonzero", "unfold_backward",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Region:
    """A call of a compiled function, or its backward pass. Each call is another region."""

    name: str
    backward: bool = False


@dataclass(slots=True)
class Operator:
    """An operator, or one of the kernels that it consists of, with bytes by storage."""

    name: str
    reads: dict[int, float]
    writes: dict[int, float]
    launches: int = 1
    flops: float = 0.0
    tiles: float = 0.0  # Tiles of a product's result, each computed by one multiprocessor; 0: as many as needed.
    filled: float = 1.0  # Share of the tiles that is used.
    sixteen_bit: bool = False
    passes: int = 1  # Times that everything is read.
    fusible: bool = True  # A compiler fuses it with its neighbours.
    region: "Region | None" = None  # The compiled region that it belongs to; None: it runs uncompiled.
    accumulates: bool = False  # It adds to a gradient of an earlier micro-batch, which the first one does not do.
    of_rows: bool = False  # A reduction of short rows, which a compiler keeps in registers for what follows.

    @property
    def bytes(self) -> float:
        return self.passes * sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class OperatorLog:
    """The operators in the order in which they ran."""

    operators: list[Operator] = field(default_factory=list)
    cudnn: bool = False  # cuDNN computes the convolutions.
    _region: Region | None = None
    _numbers: StorageNumbers = field(default_factory=StorageNumbers)
    _gradients: set[int] = field(default_factory=set)  # Storages of gradients that an earlier micro-batch has made.

    @property
    def region(self) -> Region | None:
        """The region that runs now. That of a backward pass ends with the pass, if no argument needs a gradient."""
        region = self._region
        in_backward = torch._C._current_graph_task_id() != -1  # Autograd's engine is running.
        return None if region and region.backward and not in_backward else region

    def drain(self) -> list[Operator]:
        """Returns the operators, and removes them from the log."""
        found, self.operators = self.operators, []
        return found

    def note_gradients(self, gradients: Iterable[Tensor | None]) -> None:
        """Notes gradients that stand for those of an earlier micro-batch, until something is added to them."""
        self._gradients.update(self._numbers.of(gradient) for gradient in gradients if gradient is not None)

    def is_untouched(self, gradient: Tensor) -> bool:
        """Returns whether nothing has been added to a gradient since it was noted."""
        return self._numbers.of(gradient) in self._gradients

    @contextmanager
    def _within(self, region: Region) -> Iterator[None]:
        """Marks the operators within as compiled together, unless they are part of a forward region already."""
        before = self.region
        self._region = before if before and not before.backward else region
        try:
            yield
        finally:
            self._region = before

    def compiled(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function as one compiled region, and marks its backward pass as another one.

        The backward pass of the region begins with the gradient of a result, and ends with that of an argument.
        """
        owner = getattr(function, "__self__", None)
        name = type(owner).__name__ if owner is not None and function.__name__ == "forward" else function.__name__
        within = self.region
        if (within and not within.backward) or not torch.is_grad_enabled():
            with self._within(Region(name)):
                return function(*arguments, **named)
        backward = Region(f"{name}, backward", backward=True)

        def enter(gradient: Tensor) -> None:
            self._region = backward

        def leave(gradient: Tensor) -> None:
            if self._region is backward:
                self._region = None

        for tensor in _tensors((arguments, named)):
            if tensor.requires_grad:
                tensor.register_hook(leave)  # type: ignore[no-untyped-call]
        with self._within(Region(name)):
            made = function(*arguments, **named)
        for tensor in _tensors(made):
            if tensor.requires_grad:
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]
        return made

    def record(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        """Appends the kernels of an operator that returned `made`; none if it only returns views of its operands."""
        name = function.overloadpacket.__name__
        if name in WITHOUT_KERNEL:
            return
        read, results = _tensors((arguments, named)), _tensors(made)
        mutable = function._schema.is_mutable
        known = {self._numbers.of(tensor) for tensor in read}
        written = results if mutable else [tensor for tensor in results if self._numbers.of(tensor) not in known]
        if mutable and not results:
            given = zip(function._schema.arguments, arguments, strict=False)
            written = _tensors(
                [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
            )
        if not written:
            return
        call = _Call(
            name,
            arguments,
            made,
            self._bytes(read),
            self._bytes(written),
            self.region,
            self.cudnn,
            any(tensor.dtype.itemsize == 2 and tensor.is_floating_point() for tensor in (*read, *results)),
        )
        count = COUNTS.get(function.overloadpacket)
        flops = float(count(*arguments, **named, out_val=made)) if count else 0.0
        made_now = _kernels(call, flops, self._bytes)
        if name in ADDITIONS and self._gradients.issuperset(call.writes):
            for operator in made_now:
                operator.accumulates, operator.fusible = True, False
        self._gradients.difference_update(call.writes)
        self.operators += made_now

    def _bytes(self, tensors: Sequence[Tensor]) -> dict[int, float]:
        """Returns the bytes by storage. A tensor that repeats its elements has those of its storage."""
        found: dict[int, float] = {}
        for tensor in tensors:
            number = self._numbers.of(tensor)
            size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
            found[number] = max(found.get(number, 0.0), float(size))
        return found


@dataclass(slots=True)
class _Call:
    """A call of an operator, with the bytes that it reads and writes."""

    name: str
    arguments: tuple[Any, ...]
    made: Any
    reads: dict[int, float]
    writes: dict[int, float]
    region: Region | None
    cudnn: bool
    sixteen_bit: bool

    def kernel(
        self,
        name: str,
        reads: dict[int, float],
        writes: dict[int, float],
        flops: float = 0.0,
        tiles: tuple[float, float] = (0.0, 1.0),
        **more: Any,
    ) -> Operator:
        return Operator(
            name,
            reads,
            writes,
            flops=flops,
            tiles=tiles[0],
            filled=tiles[1],
            sixteen_bit=self.sixteen_bit,
            region=self.region,
            **more,
        )


Sizes = Callable[[Sequence[Tensor]], dict[int, float]]


def _kernels(call: _Call, flops: float, bytes_of: Sizes) -> list[Operator]:
    """Returns the kernels of a call."""
    name, reads, writes = call.name, call.reads, call.writes
    if name in ("convolution", "_convolution"):
        return _convolution(call, flops, bytes_of)
    if name == "convolution_backward":
        return _convolution_backward(call, flops, bytes_of)
    if "scaled_dot_product" in name:
        launches = 3 if "backward" in name else 1
        return [call.kernel("attention", reads, writes, flops, fusible=False, launches=launches)]
    if flops:
        result = _tensors(call.made)[0]
        rows = math.prod(result.shape[:-1])
        return [call.kernel(name, reads, writes, flops, _tiles(rows, result.shape[-1]), fusible=False)]
    if name.startswith("_fft"):
        return [call.kernel(name, reads, writes, launches=2, passes=FOURIER_PASSES, fusible=False)]
    if name.startswith("_fused_"):
        return [call.kernel(name, reads, writes, launches=_fused_launches(call.arguments[0]), fusible=False)]
    if name.startswith("_foreach"):
        launches = math.ceil(len(call.arguments[0]) / FOREACH_TENSORS) * (2 if "norm" in name else 1)
        return [call.kernel(name, reads, writes, launches=launches, fusible=False)]
    if name in WRITE_ONLY:
        reads = {}
    elif name == "copy_":
        reads = bytes_of(call.arguments[1:2])
    elif name in PICKING:
        most = sum(writes.values())
        reads = {storage: min(size, most) for storage, size in reads.items()}
    launches, passes = LAUNCHES_AND_PASSES.get(name, (1, 1))
    if name in REDUCTIONS and name != "cumsum" and isinstance(call.arguments[0], Tensor):
        dims = next((argument for argument in call.arguments[1:] if isinstance(argument, (list, tuple))), None)
        launches += _is_divided(call.arguments[0], dims)
    fusible, of_rows = name not in NOT_FUSED, name in REDUCTIONS and _is_of_rows(call.arguments)
    return [call.kernel(name, reads, writes, launches=launches, passes=passes, fusible=fusible, of_rows=of_rows)]


def _is_of_rows(arguments: tuple[Any, ...]) -> bool:
    """Returns whether a reduction, of a tensor along dimensions, is one of short rows that are contiguous in memory."""
    x, *rest = arguments
    dims = next((argument for argument in rest if isinstance(argument, (list, tuple))), None)
    if not isinstance(x, Tensor) or not x.ndim or dims is None:
        return False
    return [dim % x.ndim for dim in dims] == [x.ndim - 1] and x.stride(-1) == 1 and x.shape[-1] <= LONGEST_ROW


def _is_divided(x: Tensor, dims: Sequence[int] | None) -> bool:
    """Returns whether blocks of threads share each result of a reduction along dimensions, or along all of them. Where
    the kept dimension is the one that is contiguous in memory, each thread of a block has results of its own."""
    reduced = {dim % x.ndim for dim in dims or range(x.ndim)} if x.ndim else set()
    numbers = math.prod(x.shape[dim] for dim in reduced)
    inner = min((dim for dim in range(x.ndim) if x.shape[dim] > 1), key=x.stride, default=None)
    if inner is None or inner in reduced:
        return numbers >= DIVIDED_REDUCTION
    each = math.gcd(4, x.shape[inner])
    return numbers * min(x.numel() // max(1, numbers), RESULTS_OF_BLOCK * each) >= DIVIDED_REDUCTION


def converted_by_cudnn(x: Tensor, result: Tensor, groups: int, *, compiled: bool) -> list[Tensor]:
    """Returns the activations of a convolution that cuDNN converts between the layouts NCHW and NHWC in a workspace.

    Its kernels for tensor cores compute in NHWC. Those of TF32 write NCHW themselves, as their names say: tf32f32 ...
    nhwckcrs_nchw, and f16f16 ... nhwckrsc_nhwc. Depthwise convolutions do not use tensor cores. torch hands sequences
    over as pictures of height 1. That fp32 is computed in TF32 is assumed. In compiled regions inductor has pictures in
    NHWC by itself.
    https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/index.html#tensor-layout
    """
    in_nhwc = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    if in_nhwc or groups == x.shape[1] > 1 or (compiled and x.ndim == 4):
        return []
    return [x, result] if x.dtype.itemsize == 2 else [x]


def _product(call: _Call, kernel: Operator, tensors: Sequence[Tensor], groups: int, bytes_of: Sizes) -> list[Operator]:
    """Returns the kernel of a convolution, or of a product of its backward pass, with those that convert its layouts.
    The tensors are its input, result and weight.

    Both operands and the result are converted (a convolution in 16 bits is 4 kernels: https://arxiv.org/abs/2512.23236,
    section 5, on an H100), except that forward kernels of TF32 read weights and write results in NCHW; those of the
    backward pass are named tf32f32 ... nhwckrsc_nhwc.
    """
    x, result, _ = tensors
    made = [kernel]
    if call.cudnn and converted_by_cudnn(x, result, groups, compiled=call.region is not None):
        converted = tensors if x.dtype.itemsize == 2 or call.name == "convolution_backward" else tensors[:1]
        made += [call.kernel("layout", bytes_of([copied]), bytes_of([copied]), fusible=False) for copied in converted]
    if call.cudnn and GROUP_BY_GROUP and 1 < groups < x.shape[1]:
        for kernel in made:
            kernel.launches = groups
    return made


def cudnn_workspace(function: Any, arguments: tuple[Any, ...], made: Any, *, compiled: bool) -> tuple[int, int]:
    """Returns the bytes of the copies in NHWC that cuDNN makes for a convolution or a product of its backward pass, and
    how many of them are of the weight."""
    name = function.overloadpacket.__name__
    if name == "convolution":
        x, weight, result, groups = arguments[0], arguments[1], made, arguments[8]
    elif name == "convolution_backward":
        result, x, weight, groups = *arguments[:3], arguments[9]
    else:
        return 0, 0
    converted = converted_by_cudnn(x, result, groups, compiled=compiled)
    copied, *activations = (tensor.numel() * tensor.element_size() for tensor in (weight, *converted))
    return (copied + sum(activations), copied) if activations else (0, 0)


def _convolution(call: _Call, flops: float, bytes_of: Sizes) -> list[Operator]:
    """Returns the convolution, its conversions and, as cuDNN's does not add the bias, the addition."""
    x, weight, bias = call.arguments[:3]
    result = call.made
    rows = result.numel() / result.shape[1]
    tiles = _tiles(rows, result.shape[1])
    kernel = call.kernel("convolution", bytes_of([x, weight]), call.writes, flops, tiles, fusible=False)
    made = _product(call, kernel, [x, result, weight], call.arguments[8], bytes_of)
    if bias is not None:
        made.append(call.kernel("bias", {**call.writes, **bytes_of([bias])}, call.writes))
    return made


def _convolution_backward(call: _Call, flops: float, bytes_of: Sizes) -> list[Operator]:
    """Returns the products of a convolution's backward pass: for its input, for its weight, and the sum for the bias,
    with the conversions of the products.

    The weight's product is divided along its long inner dimension, so that every multiprocessor takes part.
    """
    gradient, x, weight = call.arguments[:3]
    needed = call.arguments[-1]
    each = flops / max(1, sum(needed[:2]))
    made = []
    if needed[0]:
        reads, tiles = bytes_of([gradient, weight]), _tiles(x.numel() / x.shape[1], x.shape[1])
        made.append(call.kernel("input gradient", reads, bytes_of(call.made[:1]), each, tiles, fusible=False))
    if needed[1]:
        reads = bytes_of([gradient, x])
        made.append(call.kernel("weight gradient", reads, bytes_of(call.made[1:2]), each, fusible=False))
    tensors, groups = [x, gradient, weight], call.arguments[9]
    made = [with_layouts for kernel in made for with_layouts in _product(call, kernel, tensors, groups, bytes_of)]
    if needed[2]:
        launches = 1 + _is_divided(gradient, [dim for dim in range(gradient.ndim) if dim != 1])
        made.append(call.kernel("sum", bytes_of([gradient]), bytes_of([call.made[2]]), launches=launches))
    return made


TILE = 128  # Rows and, at most, columns of a product that one multiprocessor computes at a time.
LEAST_COLUMNS = 16  # The narrowest tile.


def _tiles(rows: float, columns: int) -> tuple[float, float]:
    """Returns the number of tiles of a product, and the share of their columns that is used.

    The number grows linearly with the rows, so that it can be found for any number of items.
    """
    tile = min(TILE, max(LEAST_COLUMNS, 1 << (columns - 1).bit_length()))
    across = math.ceil(columns / tile)
    return rows / TILE * across, columns / (across * tile)


def _fused_launches(parameters: Sequence[Tensor]) -> int:
    elements = sum(parameter.numel() for parameter in parameters)
    return max(math.ceil(len(parameters) / FUSED_TENSORS), math.ceil(elements / CHUNK / FOREACH_CHUNKS))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
