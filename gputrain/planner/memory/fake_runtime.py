"""Runs a training step on fake tensors: nothing is computed, and no memory is allocated."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.errors import UserError
from gputrain.hw.plan import Plan
from gputrain.hw.runtime import DTYPES, Runtime
from gputrain.planner.memory.timeline import MemoryTimeline

F = TypeVar("F", bound=Callable[..., Any])
Rules = Literal["cuda", "cpu"]
aten = torch.ops.aten
CPU = torch.device("cpu")

# Losses apply these operators to labels, masks and lengths; none has more results than inputs.
OF_VALUES = {
    aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.eq.Scalar, aten.ne.Scalar, aten.sum.default,
    aten.sum.dim_IntList, aten.max.default, aten.min.default, aten.any.default, aten.all.default,
    aten.masked_select.default, aten._local_scalar_dense.default, aten.add.Tensor, aten.sub.Tensor,
    aten.div.Tensor_mode, aten._to_copy.default, aten.view.default, aten.detach.default, aten.alias.default,
    aten.is_nonzero.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
}  # fmt: skip
# These operators draw numbers that depend on no data. A single one, as in layer drop, may decide what a model computes.
UNIFORM = {
    aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.uniform_.default, aten.uniform.default,
}  # fmt: skip


@contextmanager
def on_fake_tensors() -> Iterator[None]:
    """Has new tensors be fake: with shapes, dtypes and strides, but without memory and values; no operator computes.

    They are nominally on the CPU. torch's random state is the same afterwards.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with (
        _errors_not_logged(),
        torch.random.fork_rng(devices=devices),
        QuickFakeMode(),
    ):
        yield


@contextmanager
def _errors_not_logged() -> Iterator[None]:
    """Suppresses the tracebacks that torch logs in addition to the exceptions of operators on fake tensors."""

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    logger = logging.getLogger(fake_tensor.__name__)
    logger.addFilter(is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(is_no_error)


@dataclass
class _KnownOperator:
    """An operator, and its results for arguments of which the shapes are known."""

    operator: Any
    of_values: bool
    draws: bool
    makes_views: bool
    changes_views: bool
    results: dict[Any, "_Results"] = field(default_factory=dict)

    @classmethod
    def of(cls, func: Any) -> "_KnownOperator":
        # Functions that consist of others, such as `to`, may copy.
        makes_views = func is aten._unsafe_view.default or (func.is_view and not func._can_decompose())
        changes_views = torch.Tag.inplace_view in func.tags
        return cls(func, func in OF_VALUES, func in UNIFORM, makes_views, changes_views)


class _Results(NamedTuple):
    """The results of an operator: each is a new tensor of a shape, strides and a dtype, an argument, or None."""

    group: type | None  # A tuple or a list; None: there is one result.
    made: list[tuple[Any, ...] | int | str | None]  # int and str: the position or the name of the argument.


class _NotOfShapes(Exception):
    """An argument has values, or is not one of this mode's dense tensors."""


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """FakeTensorMode for tensors on one device, which finds the results of an operator once for equal arguments.

    Blocks of a model repeat each other, and for most operators FakeTensorMode takes 0.2 to 1 ms. Integers that have
    values, such as labels, keep them through the operators in `OF_VALUES`. A single uniform number that is drawn has
    almost the highest value, so that `if torch.rand([]) < rate: continue` keeps every layer; FakeTensorMode carries it
    through operators until they meet a tensor without values.
    """

    known: ClassVar[dict[int, _KnownOperator]] = {}  # By identity, because operators take long to be hashed.

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's cache takes ten times as long to answer as `known`.
        self.attributes = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), CPU)))

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # A third of all calls.
            return args[0].fake_device
        if not isinstance(func, OpOverload):
            return super().dispatch(func, types, args, kwargs)
        kwargs, known = kwargs or {}, self.known.get(id(func))
        if known is None:
            known = self.known[id(func)] = _KnownOperator.of(func)
        with torch._C.DisableTorchFunction():  # Finding shapes is no part of the step.
            try:
                made = self._of_shapes(known, types, args, kwargs)
            except _NotOfShapes:
                if known.of_values and _all_have_values(args):
                    with unset_fake_temporarily():
                        return func(*args, **kwargs)
                made = super().dispatch(func, types, args, kwargs)
            if known.draws:
                self._draw(made, args[1:] if func in (aten.uniform_.default, aten.uniform.default) else ())
        return made

    def _draw(self, made: FakeTensor, bounds: Sequence[float]) -> None:
        """Gives what a random operator made its value, if it is a single number of its own memory."""
        own = made.numel() == 1 and made.untyped_storage().nbytes() == made.element_size()
        if not own or not made.is_floating_point() or isinstance(made, nn.Parameter):  # Parameters are drawn, too.
            return
        highest = bounds[1] if len(bounds) > 1 else 1.0
        with unset_fake_temporarily():
            made.constant = torch.full(made.shape, highest - torch.finfo(made.dtype).eps, dtype=made.dtype)
        self.fake_tensor_converter.add_constant_storage_mapping(made)

    def _of_shapes(self, known: _KnownOperator, types: Any, args: Any, kwargs: Any) -> Any:
        """Returns the results of an operator. Raises _NotOfShapes if they may depend on values."""
        described = self._described((*args, *kwargs, *kwargs.values()))
        if known.makes_views:
            with in_kernel_invocation_manager(self):
                made = known.operator(*args, **kwargs)
            return type(made)(map(self._faked, made)) if isinstance(made, (tuple, list)) else self._faked(made)
        key = (torch.get_default_dtype(), described)
        if key not in known.results:
            made = super().dispatch(known.operator, types, args, kwargs)
            # Operators that change the shape or the memory of an argument are not known.
            same = described == self._described((*args, *kwargs, *kwargs.values())) and not known.changes_views
            learnt = same and _results(made, args, kwargs)
            if not learnt:
                return made
            known.results[key] = learnt  # torch has references to what it made, which nn.Module.to refuses.
        group, results = known.results[key]
        made_again = [
            self._new(*result) if type(result) is tuple else args[result] if type(result) is int else kwargs.get(result)
            for result in results
        ]
        return group(made_again) if group else made_again[0]

    def _described(self, values: Iterable[Any]) -> tuple[Any, ...]:
        """Returns what the shapes of an operator's results depend on. The numbers 1, 1.0 and True are different."""
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                own = value.fake_mode is self and value.fake_device == CPU and value.layout is torch.strided
                if value.constant is not None or not own:
                    raise _NotOfShapes
                found += (value.shape, value.stride(), value.dtype)
            elif kind is list or kind is tuple:
                found.append(self._described(value))
            elif isinstance(value, Tensor):
                raise _NotOfShapes
            else:
                found += (kind, value)
        return tuple(found)

    def _new(self, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
        return self._faked(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))

    def _faked(self, made: Any) -> Any:
        """Returns a fake tensor for one on the meta device, with the attributes that FakeTensor's constructor sets."""
        if not isinstance(made, Tensor) or isinstance(made, FakeTensor):
            return made
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        fake.__dict__.update(self.attributes)
        return fake


def _results(made: Any, args: Any, kwargs: Any) -> _Results | None:
    """Returns the results of an operator that made these; None if one has values or shares memory without being an
    argument."""
    group = list if isinstance(made, list) else tuple if isinstance(made, tuple) else None
    named = (*reversed(tuple(enumerate(args))), *kwargs.items())  # Of equal arguments, the first is written to.
    given = {id(value): name for name, value in named if isinstance(value, Tensor)}
    memory = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    results: list[Any] = []
    for tensor in made if group else [made]:
        if tensor is None or id(tensor) in given:
            results.append(None if tensor is None else given[id(tensor)])
            continue
        if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.fake_device != CPU:
            return None
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in memory:
            return None
        alone = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if alone.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
        results.append((tensor.shape, tensor.stride(), tensor.dtype))
    return _Results(group, results)


def _all_have_values(arguments: Sequence[Any]) -> bool:
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


class FakeRuntime(Runtime):
    """The runtime of a plan for fake tensors, which are nominally on the CPU, for any device of the plan.

    A function that would be compiled is a region of `timeline`.
    """

    def __init__(self, plan: Plan, timeline: MemoryTimeline) -> None:
        last = torch.channels_last if plan.channels_last.value else torch.contiguous_format
        super().__init__(plan, torch.device("cpu"), DTYPES[str(plan.precision.value)], last)
        self.timeline = timeline

    @property
    def kernel_device(self) -> str:
        return str(self.plan.device.value)

    @property
    def product_dtype(self) -> torch.dtype | None:
        # GPUs that know TF32 know bf16 as well.
        knows_it = self.plan.tf32.value or self.plan.precision.value == "bf16"
        in_bf16 = self.kernel_device == "cuda" and knows_it
        return torch.bfloat16 if in_bf16 else None

    def autocast(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(FunctionsOf("cuda" if self.kernel_device == "cuda" else "cpu"))
        stack.enter_context(super().autocast())
        return stack

    def compile(self, function: F, *, any_count: bool = False, any_shape: bool = False) -> F:
        return self.timeline.in_region(function, frees_inner=True) if self.plan.compile.value else function

    def compile_modules(
        self, modules: Iterable[nn.Module], *, any_count: bool = False, any_shape: bool = False
    ) -> None:
        """Has every forward pass be a compiled region. Its memory stays as it is, because it is not known what the
        compiler would keep for the backward pass."""
        if self.plan.compile.value:
            for module in modules:
                module.forward = self.timeline.in_region(module.forward)

    def verify_layout(self, name: str, block: Callable[[Tensor], Tensor], channels: int) -> None:
        """Does nothing, because nothing is computed."""


# CUDA's autocast computes these functions in fp32, and the CPU's does not.
# https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
IN_FP32 = {
    "layer_norm", "group_norm", "native_layer_norm", "native_group_norm", "softmax", "log_softmax", "softmin",
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "ctc_loss", "norm", "cumsum", "cumprod", "prod", "sum",
    "exp", "expm1", "log", "log10", "log2", "log1p", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "softplus",
    "acos", "asin", "cosh", "erfinv", "sinh", "tan", "cosine_similarity", "renorm", "dist", "cdist", "logsumexp",
}  # fmt: skip


# On CUDA these are single kernels of cuDNN, whose workspaces are unknown; on the CPU one of them is oneDNN's.
RECURRENT = {f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}
ONE_DNN_RECURRENT = {"lstm"}


class FunctionsOf(TorchFunctionMode):
    """Has torch's functions work on fake tensors as on another device: they cast to fp32 if CUDA's autocast would and
    the CPU's does not; dropout is CUDA's kernel, which keeps a mask of a byte for each number; attention keeps no
    scores, with dropout neither; the CTC loss needs no values; products of groups of rows have any dtype; and functions
    whose memory does not follow from shapes are refused."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.cuda = rules == "cuda"

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named, name = named or {}, getattr(function, "__name__", "")
        if name in (RECURRENT if self.cuda else ONE_DNN_RECURRENT):
            raise UserError(
                f"what the kernel of {name} keeps for the backward pass is not published",
                hint="run create_optimal_config on the machine with the GPU, where it measures a real step",
            )
        if name == "ctc_loss":
            with self:
                return ctc_loss(*arguments, **named)
        if name in ("grouped_mm", "_grouped_mm") and arguments[0].dtype != torch.bfloat16:
            return grouped_product(*arguments[:2])
        if self.cuda and name == "dropout":
            return dropout(*arguments, **named)
        if self.cuda and name == "scaled_dot_product_attention":
            # The CPU has a kernel without scores only for attention without dropout.
            arguments = (*arguments[:4], *(0.0 for _ in arguments[4:5]), *arguments[5:])
            named = {**named, "dropout_p": 0.0} if "dropout_p" in named else named
        if self.cuda and name == "group_norm":
            arguments = (arguments[0].contiguous(), *arguments[1:])  # CUDA's function knows no other layout.
        if self.cuda and name in IN_FP32 and torch.is_autocast_enabled("cpu"):
            arguments, named = tree_map(_to_fp32, (arguments, named))
        if function is torch.autograd.backward:
            with self:  # torch would leave the mode, and checkpointing would repeat operators differently.
                return _backward(*arguments, **named)
        return function(*arguments, **named)


def _backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Sequence[Tensor] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Calls the engine behind torch.autograd.backward, which would leave function modes."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = tuple(grad_tensors or map(torch.ones_like, tensors))
    how = (bool(retain_graph), create_graph, tuple(inputs or ()))
    _engine_run_backward(tensors, gradients, *how, allow_unreachable=True, accumulate_grad=True)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool | None = None
) -> Tensor:
    """Replaces torch.dropout and torch.nn.functional.dropout by the function that both choose on CUDA."""
    if p == 0 or not (training if train is None else train):
        return input
    if inplace:
        return input.mul_(torch.native_dropout(input, p, True)[1])
    made: Tensor = torch.native_dropout(input, p, True)[0]
    return made


def grouped_product(rows: Tensor, weights: Tensor) -> Tensor:
    """Replaces torch.nn.functional.grouped_mm of rows (N, K) with the matrices of their groups (G, K, M), which on fake
    tensors takes bf16 alone: as many FLOPs, and a gradient of all matrices. Autocast leaves it as it is."""
    with torch.autocast("cpu", enabled=False):
        made: Tensor = rows @ weights[0]
        return made


def _to_fp32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Replaces torch.nn.functional.ctc_loss: allocates and keeps the same memory, in fp32 as under autocast.

    Concatenated targets are assumed to have equal lengths if their lengths have no values.
    """
    log_probs = log_probs.float()
    items = 1 if log_probs.ndim == 2 else log_probs.shape[1]
    if targets.ndim == 2:
        most = targets.shape[1]
    elif isinstance(target_lengths, FakeTensor):
        most = -(-targets.numel() // items)
    else:
        most = int(torch.as_tensor(target_lengths).max())
    losses: Tensor = _CtcLoss.apply(log_probs, items, most)  # type: ignore[no-untyped-call]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    return losses if reduction in ("none", 0) else losses.mean() if reduction in ("mean", 1) else losses.sum()


class _CtcLoss(torch.autograd.Function):
    """A CTC loss of log-probabilities (T, B, C) and up to `most` symbols: alpha and beta are (B, T, 2 most + 1).

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/LossCTC.cu
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, items: int, most: int) -> Tensor:
        log_alpha = log_probs.new_empty(items, log_probs.shape[0], 2 * most + 1)
        losses = log_probs.new_empty(items)
        ctx.save_for_backward(log_probs, log_alpha, losses)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        log_probs, log_alpha, _ = ctx.saved_tensors
        log_beta = torch.empty_like(log_alpha)
        found = torch.empty_like(log_probs)
        del log_beta
        return found, None, None
