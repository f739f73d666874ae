"""Formulas for the FLOPs of operators, their count on fake tensors, and numbers of the storages that they use."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

aten = torch.ops.aten


def _attention(query: torch.Size, key: torch.Size, *rest: Any, **named: Any) -> int:
    """Returns the FLOPs of two products, queries by keys and scores by values; shapes are (items, heads, tokens,
    channels)."""
    items, heads, queries, channels = query
    return 4 * items * heads * queries * key[2] * channels


def _attention_backward(gradient: Any, query: torch.Size, key: torch.Size, *rest: Any, **named: Any) -> int:
    """Returns the FLOPs of four products; a fifth, which recomputes the scores, is not counted."""
    return 2 * _attention(query, key)


def _bmm(a: torch.Size, b: torch.Size, *rest: Any, **named: Any) -> int:
    """Returns the FLOPs of a batched product. torch's formula mistakes the dtype of the result for its shape."""
    items, rows, inner = a
    return 2 * items * rows * inner * b[2]


def _added_product(_: torch.Size, a: torch.Size, b: torch.Size, *rest: Any, **named: Any) -> int:
    """Returns the FLOPs of a product, batched or not, that is added to a tensor in place."""
    return 2 * math.prod(a) * b[-1]


def _convolution_backward(gradient: torch.Size, x: torch.Size, weight: torch.Size, *rest: Any, **named: Any) -> int:
    """Returns the FLOPs of the gradients that are asked for, each of which takes as many as the convolution. torch's
    formula counts the weight's as if it had one group."""
    transposed, needed = rest[4], rest[7]
    positions = math.prod((x if transposed else gradient)[2:])
    return int(2 * sum(needed[:2]) * x[0] * positions * math.prod(weight))


# What torch does not count, or counts wrongly: products in place, groups, and attention on the CPU.
FURTHER = {
    aten.bmm: _bmm,
    aten.addmm_: _added_product,
    aten.baddbmm_: _added_product,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

# By operator: its FLOPs (a multiplication and an addition are two), by torch's formulas. Elementwise work is left out.
COUNTS = {
    **flop_registry,
    **{operator: shape_wrapper(count) for operator, count in FURTHER.items()},  # type: ignore[no-untyped-call]
}


class StorageNumbers:
    """Numbers storages in the order in which they are first seen, and calls `released` with the number of each that
    leaves the memory."""

    def __init__(self, released: Callable[[int], None] = lambda number: None, count: int = 0) -> None:
        self.count, self.released = count, released
        self._living: dict[int, tuple[int, Any]] = {}  # By address: the number, and the reference that sees the end.

    def of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._living:
            self._living[address] = (self.count, weakref.ref(storage, lambda _: self._end(address)))
            self.count += 1
        return self._living[address][0]

    def _end(self, address: int) -> None:
        self.released(self._living.pop(address)[0])


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `after` with each operator that has run, its arguments and its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # Three in four calls.
            return arguments[0].fake_device if isinstance(arguments[0], FakeTensor) else arguments[0].device
        named = named or {}
        made = function(*arguments, **named)
        self.after(function, arguments, named, made)
        return made

    def after(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        raise NotImplementedError


class FlopCount(OperatorMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of the operators that run within, in `flops`, and notes nothing else about them."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def after(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        count = COUNTS.get(function.overloadpacket)
        if count:
            self.flops += count(*arguments, **named, out_val=made)
