"""The course of a step's memory: which storages come and go, when, and what each is for."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gputrain.planner.allocator import Block, CachingAllocator, Event, PlainAllocator, rounded

F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass
class MemoryTimeline:
    """What comes and goes while `watching()`. Kinds are told by `note`; else what the backward pass makes is workspace,
    and what comes before it activations."""

    events: list[Event] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # by storage
    kernels: int = 0  # operators that compute or write
    standing: int = 0  # bytes now
    accumulated: dict[int, int] = field(default_factory=dict)  # by storage of a gradient: how many events came before
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

    def peak(self, allocator: PlainAllocator | CachingAllocator | None = None) -> tuple[int, dict[str, float]]:
        """Bytes at the peak, and GB by kind at that moment, each storage as large as the block that the allocator gives
        to it; without one, its request rounded to 512 bytes. The allocator then knows what it has reserved."""
        allocator = allocator or PlainAllocator()
        standing = dict.fromkeys(KINDS, 0)
        held: dict[int, Block] = {}
        peak, parts = 0, dict(standing)
        for event in self.events:
            kind = self.kinds[event.storage]
            if not event.bytes:
                block = held.pop(event.storage)
                standing[kind] -= block.size
                allocator.release(block)
                continue
            held[event.storage] = block = allocator.allocate(rounded(event.bytes))
            standing[kind] += block.size
            if (total := sum(standing.values())) > peak:
                peak, parts = total, dict(standing)
        return peak, {kind: size / 1e9 for kind, size in parts.items()}

    def kinds_of(self, events: slice) -> list[str]:
        """What came in these events is for."""
        return [self.kinds[event.storage] for event in self.events[events] if event.bytes]

    def mark_accumulated(self, parameter: Tensor) -> None:
        """Note that the backward pass has just added to this parameter's gradient."""
        assert parameter.grad is not None
        self.accumulated[self._number(parameter.grad)] = len(self.events)

    def training(self, micro_batch: slice, first_step: slice, *, accumulated: bool) -> "MemoryTimeline":
        """Two optimizer steps, composed of events that were watched once: of a micro-batch that begins without
        gradients, and of the optimizer's first step, which makes its state beside what any step makes.

        The state is there from the beginning, as in a resumed training; the second step finds the segments that the
        first one has left behind. `accumulated`: each step has a second micro-batch, which adds to the gradients.
        """
        made = MemoryTimeline(self.events[: micro_batch.start], list(self.kinds))
        stays = [self.kinds[event.storage] == "optimizer" for event in self.events[first_step]]
        made.events += compress(self.events[first_step], stays)
        passing_by = [event for event, stay in zip(self.events[first_step], stays, strict=True) if not stay]
        gradients = {storage for storage in self.accumulated if self.kinds[storage] == "gradients"}
        added = ["workspace" if storage in gradients else kind for storage, kind in enumerate(self.kinds)]
        for _ in range(2):
            standing = made._again(self.events[micro_batch], self.kinds)
            made._free(name for storage, name in standing.items() if storage not in gradients)
            if accumulated:
                made._free(made._again(self._adding(micro_batch), added).values())
            made._free(made._again(passing_by, self.kinds).values())
            made._free(name for storage, name in standing.items() if storage in gradients)
        return made

    def _again(self, events: Iterable[Event], kinds: Sequence[str]) -> dict[int, int]:
        """Append events under new numbers; those of what stands at their end, by the old ones."""
        names: dict[int, int] = {}
        for event in events:
            if event.bytes:
                names[event.storage] = len(self.kinds)
                self.kinds.append(kinds[event.storage])
                self.events.append(Event(names[event.storage], event.bytes))
            elif event.storage in names:
                self.events.append(Event(names.pop(event.storage), 0))
        return names

    def _adding(self, micro_batch: slice) -> Iterator[Event]:
        """The events of a micro-batch, as if there had been gradients: each new one goes when it has been added."""
        added: dict[int, list[int]] = {}
        for storage, index in self.accumulated.items():
            added.setdefault(index, []).append(storage)
        for index in range(micro_batch.start, micro_batch.stop + 1):
            yield from (Event(storage, 0) for storage in added.get(index, ()))
            if index < micro_batch.stop:
                yield self.events[index]

    def _free(self, storages: Iterable[int]) -> None:
        self.events += [Event(storage, 0) for storage in storages]

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
    def __init__(self, timeline: MemoryTimeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = timeline

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.prim.device.default:  # three in four calls, each of them on its way through all modes
            return arguments[0].fake_device if isinstance(arguments[0], FakeTensor) else arguments[0].device
        made = function(*arguments, **(named or {}))
        if not self.timeline._fused and (self.timeline._see(made) or function._schema.is_mutable):
            self.timeline.kernels += 1
        return made
