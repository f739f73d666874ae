"""Memory and FLOPs of a training step of any torch model: predicted on fake tensors, or else measured.

Gradients and optimizer state are in memory from the beginning, as they are while a batch is accumulated. A model that
needs values to run is measured in a copy, on the device that it will train on. GB is 1e9 bytes.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gputrain.autoconfig.inputs import Loss, MakeBatch
from gputrain.autoconfig.lengths import LengthCurve
from gputrain.engine.memory_check import MeasuredPeak, allocator_peak
from gputrain.errors import UserError
from gputrain.hw.runtime import DTYPES, release_memory
from gputrain.planner.memory_timeline import MemoryTimeline
from gputrain.planner.microbatch import MemoryModel
from gputrain.planner.predict import DoesNotRun, Optimizer, Precision, make_optimizers, predict_training_memory
from gputrain.planner.roofline import KernelCost, StepCost
from gputrain.planner.torch_model import checkpoint_blocks, copy_with, on_meta, without_random_choices

MOMENTS: dict[Optimizer, int] = {"adamw": 2, "muon": 2, "sgd": 0}  # Tensors that the optimizer keeps for a weight.


class StepMemory(NamedTuple):
    """The memory and the work of a step."""

    parts: dict[str, float]  # GB at the peak, by purpose.
    flops: int
    cached_gb: float = 0.0  # Memory that the device's allocator holds beyond its tensors.
    micro_batch: tuple[KernelCost, ...] = ()  # Kernels without those of the optimizer; none: unknown.
    update: tuple[KernelCost, ...] = ()  # Kernels of the optimizer.

    @property
    def peak_gb(self) -> float:
        """Memory that the allocator takes from the device."""
        return sum(self.parts.values()) + self.cached_gb


@dataclass
class MemoryModels:
    """Finds the memory of the steps of a model, of each once. The model may be measured on `device`; None: nowhere."""

    model: nn.Module
    loss: Loss
    make_batch: MakeBatch
    precision: Precision
    optimizer: Optimizer
    device: torch.device | None
    unpredictable: str = ""  # The reason why the model had to be measured.
    known: dict[tuple[int, float, bool], StepMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twin = on_meta(self.model)

    def step(self, items: int, seconds: float, checkpointing: bool = False) -> StepMemory:
        """Returns the memory of a step on `items` items of a length. Raises UserError if the batch does not suit the
        model, or if the model needs values and there is no device to measure it on."""
        key = (items, seconds, checkpointing)
        if key not in self.known:
            self.known[key] = self._find(*key)
        return self.known[key]

    def _find(self, items: int, seconds: float, checkpointing: bool) -> StepMemory:
        if not self.unpredictable:
            try:
                return self._predict(items, seconds, checkpointing)
            except UserError as error:
                if self.device is None:
                    raise
                self.unpredictable = error.message
        return measure_step(
            self.model, self.loss, self.make_batch(items, seconds), self.device or torch.device("cpu"),
            precision=self.precision, optimizer=self.optimizer, checkpointing=checkpointing,
        )  # fmt: skip

    def _predict(self, items: int, seconds: float, checkpointing: bool) -> StepMemory:
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
        cached_gb = found.reserved_gb - found.allocated_gb
        return StepMemory(found.parts, found.flops, cached_gb, found.micro_batch, found.update)

    def memory_model(self, seconds: float, checkpointing: bool) -> MemoryModel:
        """Returns the line through one item and two, or the largest known number of this length."""
        most = self.most_items(seconds, checkpointing)
        one, many = (self.step(items, seconds, checkpointing) for items in (1, most))
        flops = (many.flops - one.flops) / (most - 1)
        # Elementwise work alone says nothing about the rate of a step.
        known = flops and one.micro_batch
        cost = StepCost(one.micro_batch, many.micro_batch, most, one.update) if known else None
        return MemoryModel.through(one.parts, many.parts, flops, cost, items=most, cached_gb=many.cached_gb)

    def most_items(self, seconds: float, checkpointing: bool) -> int:
        """Returns the largest number of items of a length in a known step; at least 2."""
        return max([2, *(items for items, *rest in self.known if rest == [seconds, checkpointing])])

    def curve(self, longest: float, shortest: float, checkpointing: bool) -> LengthCurve:
        """Returns the memory that an item adds by its length, from steps on the longest items, and on items of half and
        of a quarter of its length if there are such.

        A step on shorter items has more of them, so that the weights have little influence.
        """
        memory_model = self.memory_model(longest, checkpointing)
        fixed_gb = memory_model.peak_gb(0)
        found = {longest: memory_model.peak_gb(1) - fixed_gb}
        for items, seconds in ((4, longest / 2), (8, longest / 4)):
            if shortest < 1.5 * seconds:
                found[seconds] = (self.step(items, seconds, checkpointing).peak_gb - fixed_gb) / items
        return LengthCurve.through(found)


def measure_step(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    device: torch.device,
    *,
    precision: Precision,
    optimizer: Optimizer,
    checkpointing: bool = False,
) -> StepMemory:
    """Measures two real steps of a copy of the model on the device, and releases all of their memory. Tensors of the
    batch that have no values get random ones."""
    try:
        twin: Any = without_random_choices(copy_with(model, lambda tensor: _real(tensor, device))).train()
        if checkpointing:
            checkpoint_blocks(twin)
        real = tree_map(lambda leaf: _real(leaf, device), batch)
        return _measure_twin(twin, loss, real, device, precision, optimizer)
    finally:
        release_memory()


def _measure_twin(
    twin: nn.Module, loss: Loss, batch: Any, device: torch.device, precision: Precision, optimizer: Optimizer
) -> StepMemory:
    on_gpu = device.type == "cuda"
    trainable = [p for p in twin.parameters() if p.requires_grad]
    # AdamW keeps at least as much as Muon.
    (stepping,) = make_optimizers("sgd" if optimizer == "sgd" else "adamw", trainable)
    timeline = MemoryTimeline()
    timeline.note("parameters", twin.parameters(), twin.buffers(), tree_leaves(batch))
    before_gb = (torch.cuda.memory_allocated(device) - timeline.standing) / 1e9 if on_gpu else 0.0
    for _ in range(2):
        peak = MeasuredPeak()
        measured = allocator_peak(device, peak) if on_gpu else nullcontext()
        begin = len(timeline.log.operators)
        with timeline.watching(), measured:
            with torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32"):
                value = loss(twin, batch)
            torch.autograd.backward(value)
            del value
            timeline.note("gradients", (p.grad for p in trainable))
            stepping.step()
        timeline.note("optimizer", *(state.values() for state in stepping.state.values()))
        flops = round(sum(operator.flops for operator in timeline.log.operators[begin:]))
    _, parts = timeline.peak()
    if not on_gpu:
        return StepMemory(parts, flops)
    # The timeline counts the results of operators; the rest of the measured peak is what operators need to run.
    parts["workspace"] += peak.allocated_gb - before_gb - sum(parts.values())
    return StepMemory(parts, flops, peak.reserved_gb - peak.allocated_gb)


def _real(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not leaf.is_meta:
        return leaf.detach().to(device, copy=True)
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
