"""Training on several GPUs: what the ranks exchange over torch.distributed, between steps and within a step.

Every rank computes the gradients of its part of the same batch. Terms are divided by counts of the whole batch, so the
sums over ranks are the gradients of the whole batch; all ranks then make the same step, and their weights stay equal
without further communication. No backward pass contains a collective operation: a rank that runs out of memory repeats
its part in smaller micro-batches while the others wait.

Gradients travel over NCCL between GPUs and over Gloo between CPUs. Decisions travel over a second group, Gloo on the
CPU, whose timeout is long: there the other ranks wait while rank 0 evaluates and saves.
"""

import atexit
import contextlib
import datetime
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gputrain.errors import UserError
from gputrain.hw.ranks import SINGLE, Ranks, interface_towards

T = TypeVar("T")

BUCKET_BYTES = 64 << 20  # Size of the flat buffers in which gradients travel.
IN_FLIGHT = 2  # Number of buffers: one is filled while another travels.
CONTROL_TIMEOUT = datetime.timedelta(days=7)
GRADIENT_TIMEOUT = datetime.timedelta(hours=1)
JOIN_TIMEOUT = datetime.timedelta(minutes=15)


@dataclass
class RankGroup:
    """The connection between the ranks of a training. Without torchrun it consists of one rank, and does nothing."""

    ranks: Ranks = SINGLE
    control: Any = None  # The Gloo group of decisions.

    @classmethod
    def join(cls, ranks: Ranks, *, on_gpu: bool, init_method: str = "env://") -> "RankGroup":
        """Connects this process with the other ranks. Returns when all have joined.

        `init_method` is the address at which they find each other; by default it is torchrun's, in the environment.
        """
        if ranks.count == 1:
            return cls(ranks)
        spans_machines = ranks.count > ranks.local_count and "GLOO_SOCKET_IFNAME" not in os.environ
        if spans_machines and (interface := interface_towards(os.environ.get("MASTER_ADDR", ""))):
            # Gloo would take the address of the machine's own name, which is a loopback on many systems.
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        backend = "nccl" if on_gpu and dist.is_nccl_available() else "gloo"
        with _connected():
            store, index, count = next(dist.rendezvous(init_method, ranks.index, ranks.count, timeout=JOIN_TIMEOUT))  # type: ignore[attr-defined]
            # torchrun's store outlives a restart, and with it the addresses of ranks that have ended.
            store = dist.PrefixStore(f"attempt {ranks.restarts}", store)  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=GRADIENT_TIMEOUT)
            group = cls(ranks, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
        atexit.register(group.close)  # torch warns of groups that are left open.
        return group

    @classmethod
    @contextlib.contextmanager
    def of_connected(cls, processes: int) -> Iterator["RankGroup"]:
        """Yields the group of so many processes, all of which call it, and which another library has connected."""
        if processes == 1:
            yield cls()
            return
        group = cls(Ranks(dist.get_rank(), processes), dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))
        try:
            yield group
        finally:
            dist.destroy_process_group(group.control)

    def close(self) -> None:
        """Disconnects; the process may join another group afterwards."""
        if self.control is not None:
            self.control = None
            with contextlib.suppress(RuntimeError):  # Another rank may have gone already.
                dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.ranks.leads

    # ------------------------------------------------------------------------------------------------ decisions

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, which must be picklable, in the order of the ranks."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.ranks.count
        with _connected():
            dist.all_gather_object(values, value, group=self.control)
        return values

    def from_leader(self, make: Callable[[], T]) -> T:
        """Returns what `make` returns on rank 0, where alone it is called. Tensors arrive on the CPU.

        The value consists of what torch.save and torch.load with `weights_only` can carry.
        """
        if self.control is None:
            return make()
        packed = torch.empty(0, dtype=torch.uint8)
        if self.leads:
            value = make()
            file = io.BytesIO()
            torch.save(value, file)
            packed = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        with _connected():
            size = torch.tensor(packed.numel())
            dist.broadcast(size, 0, group=self.control)
            if not self.leads:
                packed = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(packed, 0, group=self.control)
        if self.leads:
            return value
        arrived: T = torch.load(io.BytesIO(packed.numpy().data), map_location="cpu", weights_only=True)
        return arrived

    def any_rank(self, *flags: bool) -> list[bool]:
        """Returns for each flag whether it is set on any rank."""
        if self.control is None:
            return list(flags)
        values = torch.tensor(flags, dtype=torch.uint8)
        with _connected():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in values.tolist()]

    def total(self, *values: float) -> list[float]:
        """Returns the sum of each value over the ranks."""
        if self.control is None:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        with _connected():
            dist.all_reduce(sums, group=self.control)
        found: list[float] = sums.tolist()
        return found

    def wait_for_all(self) -> None:
        """Returns when every rank has called it, however long the leader evaluates or saves."""
        self.any_rank(False)

    # ------------------------------------------------------------------------------------------------ gradients

    def all_reduce(self, gradients: Sequence[Tensor], scalars: Sequence[dict[str, Tensor]]) -> None:
        """Replaces gradients and scalars by their sums over all ranks.

        Every rank has gradients of the same parameters, and scalars of the same names: both depend on the step only.
        """
        if self.control is None or not gradients:
            return
        with _connected():
            self._all_reduce_scalars(scalars)
            self._all_reduce_gradients(gradients)

    def _all_reduce_scalars(self, scalars: Sequence[dict[str, Tensor]]) -> None:
        places = [(named, name) for named in scalars for name in sorted(named)]
        if not places:
            return
        values = torch.stack([named[name].double() for named, name in places])
        dist.all_reduce(values)
        for (named, name), value in zip(places, values.unbind(), strict=True):
            named[name] = value.to(named[name].dtype)

    def _all_reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sums gradients in buckets. While one bucket travels, the next one is filled; few of them are in memory."""
        travelling: deque[tuple[Any, list[Tensor], list[Tensor]]] = deque()
        for pieces in buckets(gradients, BUCKET_BYTES):
            flat = torch.cat(pieces)
            parts = list(torch.split(flat, [piece.numel() for piece in pieces]))
            travelling.append((dist.all_reduce(flat, async_op=True), parts, pieces))
            if len(travelling) == IN_FLIGHT:
                _copy_when_reduced(*travelling.popleft())
        while travelling:
            _copy_when_reduced(*travelling.popleft())

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors of rank 0 to all ranks."""
        if self.control is None:
            return
        with _connected():
            for pieces in buckets([tensor.detach() for tensor in tensors], BUCKET_BYTES):
                flat = torch.cat(pieces)
                dist.broadcast(flat, 0)
                torch._foreach_copy_(pieces, list(torch.split(flat, [piece.numel() for piece in pieces])))

    def reseed(self, seed: int, step: int) -> None:
        """Makes the random numbers of dropout a function of the step and the rank, so that ranks draw different ones.

        Alone, a process continues its own sequence instead, which a checkpoint holds.
        """
        if self.control is not None:
            torch.manual_seed((seed << 32) + step * self.ranks.count + self.ranks.index)


def _copy_when_reduced(handle: Any, parts: list[Tensor], pieces: list[Tensor]) -> None:
    handle.wait()
    torch._foreach_copy_(pieces, parts)


def buckets(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Yields flat views of the tensors in lists of at most `most_bytes` and of one dtype; large tensors are divided."""
    gathered: list[Tensor] = []
    room = most_bytes
    for tensor in tensors:
        flat, size = in_memory_order(tensor), tensor.element_size()
        while flat.numel():
            if gathered and (room < size or gathered[0].dtype != flat.dtype):
                yield gathered
                gathered, room = [], most_bytes
            count = min(flat.numel(), room // size)
            gathered.append(flat[:count])
            flat, room = flat[count:], room - count * size
    if gathered:
        yield gathered


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view of a tensor without gaps, in the order of its memory, which is not the order of
    its indices in channels_last. Ranks have equal layouts, so that equal places correspond."""
    return tensor.as_strided((tensor.numel(),), (1,))


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Turns a failed exchange into a UserError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"the connection to another rank is lost ({lines[0][:200]})",
            hint="its own message says why it ended; torchrun --max-restarts 3 continues from the last checkpoint",
        ) from None


# ---------------------------------------------------------------------------------------------------- random numbers


@dataclass(frozen=True)
class BatchDraws:
    """Random numbers of a step, drawn for the whole batch; each rank keeps those of its rows.

    So the noise of an item depends neither on the number of ranks nor on the micro-batches.
    """

    generator: torch.Generator
    global_items: int  # Items of the whole batch, over all ranks.
    rows: tuple[slice, ...]  # Items of this rank.

    @classmethod
    def of_step(
        cls, seed: int, step: int, device: torch.device, items: int, *, global_items: int, ranks: Ranks
    ) -> "BatchDraws":
        """Returns the draws of a step for `items` on this rank, of a batch of `global_items` items over all ranks.

        A rank that trains alone may have another number of items than a whole batch.
        """
        generator = torch.Generator(device).manual_seed((seed << 32) + step)
        if ranks.count == 1:
            return cls(generator, items, (slice(0, items),))
        rows = ranks.rows(global_items)
        assert rows.stop - rows.start == items, f"rank {ranks.index} has {items} items of {global_items}"
        return cls(generator, global_items, (rows,))

    def uniform(self) -> Tensor:
        """Returns uniform numbers in [0, 1), one for each item of this rank."""
        return self.kept(torch.rand(self.global_items, generator=self.generator, device=self.generator.device))

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns normally distributed numbers of shape (items of this rank, *shape)."""
        where: dict[str, Any] = {"generator": self.generator, "device": self.generator.device}
        return self.kept(torch.randn(self.global_items, *shape, dtype=dtype, **where))

    def kept(self, drawn: Tensor) -> Tensor:
        """Returns this rank's rows of what was drawn for the whole batch; those of the others leave the memory."""
        if self.rows == (slice(0, self.global_items),):
            return drawn
        return torch.cat([drawn[rows] for rows in self.rows])
