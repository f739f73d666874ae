"""16-bit copies of weights, made once in a step for all of its passes.

Under autocast, every pass casts each weight and each bias to 16 bits, and every backward pass casts each gradient back:
a kernel each, and compiled code does not keep the copies from pass to pass. Here one call of a foreach function casts
all of them at the start of a step, and gradients are cast and added to the weights' own gradients in buckets. Every
gradient is cast before it is added, as by autocast, so that the sums are the same bit for bit.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d)  # Layers that autocast computes in 16 bits.
# Numbers of gradients that wait to be cast: 32 MB of them, and twice as much while they are added.
BUCKET_NUMBERS = 16 << 20


class WeightSlot(NamedTuple):
    """A tensor that is an attribute of a module: a parameter, or a weight that is computed from parameters."""

    module: nn.Module
    name: str

    def put(self, tensor: Tensor) -> None:
        if self.name in self.module._parameters:
            self.module._parameters[self.name] = tensor  # type: ignore[assignment]
        else:
            setattr(self.module, self.name, tensor)

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor


def layer_weights(modules: Iterable[nn.Module], without_autocast: Collection[nn.Module] = ()) -> list[WeightSlot]:
    """Returns the weights and biases of the linear layers and convolutions of `modules`, except for those inside of
    `without_autocast`, which compute without autocast."""
    left_out = {part for module in without_autocast for part in module.modules()}
    return [
        WeightSlot(part, name)
        for module in modules
        for part in module.modules()
        if isinstance(part, LAYERS) and part not in left_out
        for name, parameter in part.named_parameters(recurse=False)
        if parameter.dtype == torch.float32
    ]


@contextmanager
def weights_cast_once(slots: Iterable[WeightSlot], dtype: torch.dtype) -> Iterator[None]:
    """Puts copies in `dtype` into these places while the block runs. The gradients of the copies are added to `grad` of
    the originals, the last of them when the block is left. With fp32, does nothing."""
    if dtype == torch.float32 or not (slots := list(slots)):
        yield
        return
    originals = [slot.tensor for slot in slots]
    copies = [torch.empty_like(original, dtype=dtype) for original in originals]
    with torch.no_grad():
        torch._foreach_copy_(copies, [original.detach() for original in originals])
    bucket = GradientBucket()
    for slot, original, copy in zip(slots, originals, copies, strict=True):
        # A computed weight stays a plain tensor, which is no part of a module's state.
        leaf = nn.Parameter(copy, requires_grad=False) if isinstance(original, nn.Parameter) else copy
        if original.requires_grad:
            leaf.requires_grad_(True)
            leaf.register_post_accumulate_grad_hook(partial(bucket.take, original))  # type: ignore[no-untyped-call]
        slot.put(leaf)
    try:
        yield
        bucket.empty()
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.put(original)


class GradientBucket:
    """Gradients of copies that have not been added to the originals' yet, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.numbers = 0

    def take(self, original: Tensor, leaf: Tensor) -> None:
        """Takes the gradient of a copy of `original`."""
        assert leaf.grad is not None
        self.waiting.append((original, leaf.grad))
        leaf.grad = None
        self.numbers += original.numel()
        if self.numbers >= BUCKET_NUMBERS:
            self.empty()

    @torch.no_grad()
    def empty(self) -> None:
        """Adds all gradients to those of the originals. A second gradient of the same original waits for the next
        round."""
        while self.waiting:
            first: dict[Tensor, Tensor] = {}
            later: list[tuple[Tensor, Tensor]] = []
            for original, gradient in self.waiting:
                if original in first:
                    later.append((original, gradient))
                else:
                    first[original] = gradient
            self.waiting = later
            _add_gradients(first)
        self.numbers = 0


def _add_gradients(gradients: dict[Tensor, Tensor]) -> None:
    exact = [torch.empty_like(original) for original in gradients]
    torch._foreach_copy_(exact, list(gradients.values()))
    added, to = [], []
    for original, gradient in zip(gradients, exact, strict=True):
        if original.grad is None:
            original.grad = gradient
        else:
            to.append(original.grad)
            added.append(gradient)
    if to:
        torch._foreach_add_(to, added)
