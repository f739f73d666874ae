"""The timeline of a step's memory: when storages are allocated and freed, and the purpose of each. It also logs the
operators of the step."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gputrain.planner.memory.allocator import CachingAllocator, MemoryBlock, PlainAllocator, StorageEvent, rounded
from gputrain.planner.time.flops import OperatorMode, StorageNumbers
from gputrain.planner.time.operators import OperatorLog, cudnn_workspace

F = TypeVar("F", bound=Callable[..., Any])
KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass
class MemoryTimeline:
    """The storages that are allocated and freed while `watching()`.

    `note` sets the kind of a storage; otherwise it is workspace if the backward pass allocates it, and activations if
    the forward pass does.
    """

    events: list[StorageEvent] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # Kind of each storage.
    log: OperatorLog = field(default_factory=OperatorLog)  # Operators that compute or write.
    _fused: int = 0  # Nesting depth of fused functions.
    _numbers: StorageNumbers = field(init=False)
    _forgotten: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._numbers = StorageNumbers(self._remove, len(self.kinds))

    @classmethod
    def on(cls, device: str) -> "MemoryTimeline":
        """Returns the timeline of operators that a device computes: "cuda" has cuDNN's convolutions."""
        return cls(log=OperatorLog(cudnn=device == "cuda"))

    def note(self, kind: str, *groups: Any) -> None:
        """Notes that these tensors are in memory, and their kind."""
        for tensor in (tensor for group in groups for tensor in group if isinstance(tensor, Tensor)):
            self.kinds[self._number(tensor)] = kind

    def in_region(self, function: F, *, frees_inner: bool = False) -> F:
        """Returns a function that is a compiled region, and takes as much memory as before.

        With `frees_inner`, its intermediate results take none, except with autograd, because it is not known what the
        compiler keeps for the backward pass.
        """

        @functools.wraps(function)
        def as_one(*arguments: Any, **named: Any) -> Any:
            if not frees_inner or torch.is_grad_enabled():
                return self.log.compiled(function, arguments, named)
            self._fused += 1
            try:
                made = self.log.compiled(function, arguments, named)
            finally:
                self._fused -= 1
            self._see(made)
            return made

        return cast(F, as_one)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes the results of every operator."""
        with _Watch(self):
            yield

    def peak(self, allocator: PlainAllocator | CachingAllocator | None = None) -> tuple[int, dict[str, float]]:
        """Returns the bytes at the peak, and the GB by kind at that moment.

        Each storage is as large as the block that the allocator returns for it; without an allocator, its request
        rounded up to 512 bytes. Afterwards the allocator knows the memory that it reserved.
        """
        allocator = allocator or PlainAllocator()
        standing = dict.fromkeys(KINDS, 0)
        held: dict[int, MemoryBlock] = {}
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

    def repeat(self, begin: int) -> None:
        """Appends the events from this number on once more, without what stays in memory: a second step, which finds
        the segments of the first."""
        again = self.events[begin:]
        passing = {event.storage for event in again if event.bytes} & {e.storage for e in again if not e.bytes}
        self.events += [event for event in again if event.storage in passing]

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Removes the storages of these tensors from the timeline, as if they had never been allocated."""
        forgotten = {self._number(tensor) for tensor in tensors}
        self.events = [event for event in self.events if event.storage not in forgotten]
        self._forgotten |= forgotten

    def _use(self, size: int, weights: int) -> None:
        """Notes a workspace of an operator, which is freed when the operator ends; 0: it has none."""
        if not size:
            return
        self.events += [StorageEvent(len(self.kinds), size, weights), StorageEvent(len(self.kinds), 0)]
        self.kinds.append("workspace")
        self._numbers.count += 1

    def _see(self, made: Any) -> bool:
        """Numbers the results of an operator. Returns whether one of them was new."""
        before = len(self.kinds)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._number(leaf)
        return len(self.kinds) > before

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.of(tensor)
        if number == len(self.kinds):
            in_backward = torch._C._current_graph_task_id() != -1  # Autograd's engine is running.
            self.kinds.append("workspace" if in_backward else "activations")
            if size := tensor.untyped_storage().nbytes():
                self.events.append(StorageEvent(number, size))
            else:
                self._forgotten.add(number)
        return number

    def _remove(self, number: int) -> None:
        if number not in self._forgotten:
            self.events.append(StorageEvent(number, 0))


class _Watch(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, timeline: MemoryTimeline) -> None:
        super().__init__()
        self.timeline = timeline

    def after(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
        timeline = self.timeline
        if timeline._fused:
            timeline.log.record(function, arguments, named, made)
            return
        new = timeline._see(made)
        if timeline.log.cudnn:
            timeline._use(*cudnn_workspace(function, arguments, made, compiled=timeline.log.region is not None))
        if new or function._schema.is_mutable:
            timeline.log.record(function, arguments, named, made)
