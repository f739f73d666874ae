"""Memory and work of a training step of a model that is not ours: predicted on shapes, or measured where it cannot be.

Both are of a step with gradients and optimizer state resident, as they are while a batch is accumulated. A model that
needs values to run is measured in a copy, on the device that it will train on. GB is 1e9 bytes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.autoconfig.inputs import Loss, MakeBatch
from gputrain.autoconfig.lengths import LengthCurve
from gputrain.errors import UserError
from gputrain.hw.runtime import DTYPES, release_memory
from gputrain.planner.flops import FlopCount
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.microbatch import MemoryModel
from gputrain.planner.predict import DoesNotRun, Optimizer, Precision, predict_training_memory
from gputrain.planner.torch_model import checkpoint_blocks, copy_with, on_meta, without_chance

MOMENTS: dict[Optimizer, int] = {"adamw": 2, "muon": 2, "sgd": 0}  # of a weight, that the optimizer keeps (at most)


class Step(NamedTuple):
    """One step: GB at its peak by what they are for, its arithmetic, the kernels it launches (0: unknown), and GB that
    the device's allocator holds beyond its tensors."""

    parts: dict[str, float]
    flops: int
    kernels: int
    cached_gb: float = 0.0

    @property
    def peak_gb(self) -> float:
        """What the allocator takes from the device."""
        return sum(self.parts.values()) + self.cached_gb


class MemoryModels:
    """What steps of a model take, each found once. `device`: where a model may be measured; None: nowhere."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        make_batch: MakeBatch,
        precision: Precision,
        optimizer: Optimizer,
        device: torch.device | None,
    ) -> None:
        self.model, self.loss, self.make_batch = model, loss, make_batch
        self.precision, self.optimizer, self.device = precision, optimizer, device
        self.unpredictable = ""  # why the model had to be measured
        self.known: dict[tuple[int, float, bool], Step] = {}
        self._twin = on_meta(model)

    def step(self, items: int, seconds: float, checkpointing: bool = False) -> Step:
        """A step on so many items of a length. Raises UserError where the batch does not suit the model, or the model
        needs values and there is no device to measure it on."""
        key = (items, seconds, checkpointing)
        if key not in self.known:
            self.known[key] = self._find(*key)
        return self.known[key]

    def _find(self, items: int, seconds: float, checkpointing: bool) -> Step:
        if not self.unpredictable:
            try:
                return self._predict(items, seconds, checkpointing)
            except UserError as error:
                if self.device is None:
                    raise
                self.unpredictable = error.message
        return measure(
            self.model, self.loss, self.make_batch(items, seconds), self.device or torch.device("cpu"),
            precision=self.precision, optimizer=self.optimizer, checkpointing=checkpointing,
        )  # fmt: skip

    def _predict(self, items: int, seconds: float, checkpointing: bool) -> Step:
        try:
            found = predict_training_memory(
                self._twin, self.loss, self.make_batch(items, seconds),
                precision=self.precision, optimizer=self.optimizer, checkpointing=checkpointing,
                caching_allocator=self.device is None or self.device.type == "cuda",
            )  # fmt: skip
        except DoesNotRun as error:
            raise UserError(
                error.message,
                hint="pass batch=, a function of the number of items and their seconds, and loss= if need be; if the "
                "model runs with real tensors, call this where the card is: it measures two real steps",
            ) from error
        return Step(found.parts, found.flops, found.kernels, found.reserved_gb - found.allocated_gb)

    def memory_model(self, seconds: float, checkpointing: bool) -> MemoryModel:
        """The line through one item and two, or the most that is known of this length."""
        most = self.most_items(seconds, checkpointing)
        one, many = (self.step(items, seconds, checkpointing) for items in (1, most))
        flops = (many.flops - one.flops) / (most - 1)
        return MemoryModel.through(
            one.parts, many.parts, flops, many.kernels, items=most, cached_gb=many.cached_gb
        )  # fmt: skip

    def most_items(self, seconds: float, checkpointing: bool) -> int:
        """How many items of a length are known together, 2 at least."""
        return max([2, *(items for items, *rest in self.known if rest == [seconds, checkpointing])])

    def curve(self, longest: float, shortest: float, checkpointing: bool) -> LengthCurve:
        """What an item adds by its length, from the longest, its half and its quarter, as far as there are such.

        Of shorter items so many more go into the step that the weights stay beside the point.
        """
        memory_model = self.memory_model(longest, checkpointing)
        fixed_gb = memory_model.peak_gb(0)
        found = {longest: memory_model.peak_gb(1) - fixed_gb}
        for items, seconds in ((4, longest / 2), (8, longest / 4)):
            if shortest < 1.5 * seconds:
                found[seconds] = (self.step(items, seconds, checkpointing).peak_gb - fixed_gb) / items
        return LengthCurve.through(found)


def measure(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    device: torch.device,
    *,
    precision: Precision,
    optimizer: Optimizer,
    checkpointing: bool = False,
) -> Step:
    """Two real steps of a copy of the model on the device; all of it is given back. Tensors of the batch that have no
    values get random ones."""
    try:
        twin = without_chance(copy_with(model, lambda tensor: _real(tensor, device))).train()
        real = tree_map(lambda leaf: _real(leaf, device), batch)
        return _measured(twin, loss, real, device, precision, optimizer, checkpointing)
    finally:
        release_memory()


def _measured(
    twin: Any, loss: Loss, batch: Any, device: torch.device, precision: Precision, optimizer: Optimizer, repeats: bool
) -> Step:
    if repeats:
        checkpoint_blocks(twin, {"use_reentrant": False})
    learning = [p for p in twin.parameters() if p.requires_grad]
    kinds: dict[Optimizer, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.0, fused=True),
        "muon": lambda p: torch.optim.AdamW(p, lr=0.0, fused=True),  # which keeps no less
        "sgd": lambda p: torch.optim.SGD(p, lr=0.0, fused=True),
    }
    stepping = kinds[optimizer](learning)
    timeline = MemoryTimeline()
    timeline.note("parameters", twin.parameters(), twin.buffers(), tree_leaves(batch))
    before = torch.cuda.memory_allocated(device) - timeline.standing if device.type == "cuda" else 0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with FlopCount() as count, timeline.watching():
            with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
                value = loss(twin, batch)
            torch.autograd.backward(value)
            del value
            timeline.note("gradients", (p.grad for p in learning))
            stepping.step()
        timeline.note("optimizer", *(state.values() for state in stepping.state.values()))
    _, parts = timeline.peak()
    if device.type == "cpu":
        return Step(parts, count.total, 0)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # What was counted of the operators' results, and what they needed besides.
    parts["workspace"] += (allocated - before) / 1e9 - sum(parts.values())
    return Step(parts, count.total, 0, (reserved - allocated) / 1e9)


def _real(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_meta:
        return leaf.detach().to(device, copy=True)
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
