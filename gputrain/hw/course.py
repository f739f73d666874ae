"""The course of a step's memory: which storages come and go, when, and what each is for."""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gputrain.hw.allocator import Event, rounded

F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass
class Course:
    """What comes and goes while `watching()`. Kinds are told by `note`; else what the backward pass makes is workspace,
    and what comes before it activations."""

    events: list[Event] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # by storage
    kernels: int = 0  # operators that compute or write
    standing: int = 0  # bytes now
    _fused: int = 0  # how many fused functions deep
    _known: Any = field(default_factory=WeakIdKeyDictionary)  # storages by identity, for as long as they are there

    def note(self, kind: str, *groups: Any) -> None:
        """These tensors are there, and of this kind."""
        for tensor in (tensor for group in groups for tensor in group if isinstance(tensor, Tensor)):
            self.kinds[self._number(tensor)] = kind

    def fused(self, function: F) -> F:
        """The function as one kernel: what it makes on the way takes no memory, as when it is compiled.

        Under autograd it runs as it is, since what the compiler would keep for the backward pass is not known.
        """

        @functools.wraps(function)
        def as_one(*arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*arguments, **named)
            self._fused += 1
            try:
                made = function(*arguments, **named)
            finally:
                self._fused -= 1
            self._see(made)
            self.kernels += 1
            return made

        return cast(F, as_one)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what every operator makes."""
        with _Watch(self):
            yield

    def peak(self) -> tuple[int, dict[str, float]]:
        """Bytes at the peak, each storage rounded as the allocator does, and GB by kind at that moment."""
        standing = dict.fromkeys(KINDS, 0)
        sizes: dict[int, int] = {}
        peak, parts = 0, dict(standing)
        for event in self.events:
            size = rounded(event.bytes) if event.bytes else -sizes.pop(event.storage)
            if event.bytes:
                sizes[event.storage] = size
            standing[self.kinds[event.storage]] += size
            if (total := sum(standing.values())) > peak:
                peak, parts = total, dict(standing)
        return peak, {kind: size / 1e9 for kind, size in parts.items()}

    def _see(self, made: Any) -> bool:
        """Number what an operator returned; whether anything of it was new."""
        before = len(self.kinds)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._number(leaf)
        return len(self.kinds) > before

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            number, size = len(self.kinds), storage.nbytes()
            self._known[storage] = number
            self.kinds.append("workspace" if in_backward() else "activations")
            if size:
                self.events.append(Event(number, size))
                self.standing += size
                weakref.finalize(storage, self._remove, number, size)
        return int(self._known[storage])

    def _remove(self, number: int, size: int) -> None:
        self.events.append(Event(number, 0))
        self.standing -= size


def in_backward() -> bool:
    """Whether autograd's engine is at work."""
    return torch._C._current_graph_task_id() != -1


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, course: Course) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.course = course

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(named or {}))
        if not self.course._fused and (self.course._see(made) or function._schema.is_mutable):
            self.course.kernels += 1
        return made
