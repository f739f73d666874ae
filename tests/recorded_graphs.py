"""CUDA graphs on the CPU: operators are recorded once, with their tensors, and executed again by a replay.

As in a graph of CUDA, only operators are repeated, no Python: numbers that Python has computed stay those of the
capture, and tensors stay where they were. A capture leaves everything that existed before it as it was, and what it has
made is not a number until the first replay. What CUDA refuses is refused: reading values, and copies from the host.
Random numbers of the default generator are drawn anew by each replay, and a capture draws none; those of other
generators are refused.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")
aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default,
    aten.masked_select.default, aten.lift_fresh.default,
}  # fmt: skip


def tensors_in(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.made: dict[int, Tensor] = {}  # Storages of the capture.
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # Storages that existed before, and their values.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = given_kwargs = kwargs or {}
        given_args = args
        if func in REFUSED or kwargs.get("generator") is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")
        if torch.Tag.inplace_view in func.tags:  # It changes a tensor's shape, and launches no kernel.
            return func(*args, **kwargs)
        self._keep_what_is_written(func, args, kwargs)
        # Shapes of tensors may change later, and those of their aliases don't.
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        out = func(*given_args, **given_kwargs)
        given = {storage_of(tensor) for tensor in tensors_in(args, kwargs)}
        new = [(i, t.detach()) for i, t in enumerate(tensors_in(out)) if storage_of(t) not in given]
        self.made.update((storage_of(tensor), tensor) for _, tensor in new)
        self.calls.append((func, args, kwargs, new))
        return out

    def _keep_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tensors_in(value):
                where = storage_of(tensor)
                if where not in self.made and where not in self.before:
                    whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
                    self.before[where] = whole, whole.clone()

    def undo(self) -> None:
        """Put everything back that existed before, and forget the values of everything else."""
        for whole, value in self.before.values():
            whole.copy_(value)
        for tensor in self.made.values():
            if tensor.is_floating_point():
                tensor.detach().fill_(math.nan)


class RecordedGraphs:
    """A back end for `replay_gradients`. `captures` and `replays` count."""

    def __init__(self) -> None:
        self.captures = self.replays = self.operators = 0

    def __call__(self) -> "RecordedGraphs":
        return self

    def warm_up(self, function: Callable[[], T]) -> T:
        return function()

    def capture(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        recording, random = _Recording(), torch.get_rng_state()
        try:
            with recording:
                made = function()
        finally:
            torch.set_rng_state(random)
            with torch.no_grad():
                recording.undo()
        self.captures += 1
        self.operators = len(recording.calls)

        def replay() -> None:
            self.replays += 1
            with torch._C._AutoDispatchBelowAutograd():
                for func, args, kwargs, new in recording.calls:
                    out = tensors_in(func(*args, **kwargs))
                    for place, tensor in new:
                        tensor.copy_(out[place])

        return made, replay
