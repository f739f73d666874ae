"""Counting the arithmetic of a training step, on shapes alone."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


def _attention(query: torch.Size, key: torch.Size, *rest: Any, **named: Any) -> int:
    """Two products, queries by keys and scores by values; shapes are (items, heads, tokens, channels)."""
    items, heads, queries, channels = query
    return 4 * items * heads * queries * key[2] * channels


def _attention_backward(gradient: Any, query: torch.Size, key: torch.Size, *rest: Any, **named: Any) -> int:
    """Four products; a kernel that computes the scores again does a fifth, which is not the model's."""
    return 2 * _attention(query, key)


# What scaled_dot_product_attention calls on tensors of the CPU; torch counts only its kernels for CUDA.
FURTHER = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class FlopCount(FlopCounterMode):
    """Counts floating-point operations (a multiplication and an addition are two) of products and convolutions.

    Elementwise work is left out, as is usual: `with FlopCount() as count: ...`, then `count.total`.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=FURTHER)

    @property
    def total(self) -> int:
        return int(self.get_total_flops())
