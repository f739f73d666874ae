"""Counts the FLOPs of a training step on fake tensors."""

from typing import Any

import torch
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


# scaled_dot_product_attention calls these operators on the CPU; torch counts only the kernels for CUDA.
FURTHER = {
    aten.bmm: _bmm,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


COUNTS = {
    **flop_registry,
    **{operator: shape_wrapper(count) for operator, count in FURTHER.items()},  # type: ignore[no-untyped-call]
}


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations (a multiplication and an addition are two) of products and convolutions.

    Elementwise work is left out, as is usual: `with FlopCount() as count: ...`, then `count.total`. The formulas are
    torch's. FlopCounterMode of torch also counts by module, with hooks that keep tensors alive in reference cycles.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        count = COUNTS.get(function.overloadpacket)
        if count is not None:
            self.total += int(count(*arguments, **(named or {}), out_val=made))
        return made
