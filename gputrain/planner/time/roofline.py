"""The time of a training step on a GPU, predicted by a roofline of its kernels.

A kernel takes as long as its arithmetic at the rate of a large product, or as its memory traffic at the rate of a large
copy, whichever is longer, and at least a fixed time. As much of a kernel's traffic as fits into the second-level cache
was left there by the kernel before, and moves faster. The processor that launches runs ahead of the GPU, which waits
only where it has done everything that was launched. Products are computed in tiles, a wave of which occupies all
multiprocessors: a last wave that is half empty takes as long as a full one.
https://people.eecs.berkeley.edu/~kubitron/cs252/handouts/papers/RooflineVyNoYellow.pdf,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/

What is not in it: the choice of cuDNN's algorithms, first-level caches, the clock that a hot card keeps beyond
what gpus.yaml has of cards of little power, other processes.
Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gputrain.hw.gpus import Gpu

LAUNCH_SECONDS = 4e-6  # Time in which compiled code launches a kernel; an assumption.
# The same from Python, operator by operator, measured beside an H200: steps of a voice and of a vocoder took 20.4 and
# 20.8 microseconds for each of their 15,556 and 10,021 launches (benchmarks/results/gpu_h200.json).
EAGER_LAUNCH_SECONDS = 20e-6
LEAST_SECONDS = 2e-6  # Time that the smallest kernel takes on a GPU.
# Shares of the published rates that large operations reach: an H100 (SXM) does 798 of 989 TFLOPS and 3.0 of 3.35 TB/s.
PRODUCT_SHARE = 0.8
COPY_SHARE = 0.9
# Share that is taken of what others have measured in long products on tensor cores of cards of little power, so that
# these compare with other cards: 0.8 of the published rate is 0.83 of the 24.8 TFLOPS that the same program measured on
# an RTX 3060. In fp32, without tensor cores, steps reach the rate of long products (docs/evidence/cards_of_70_w.md).
MEASURED_SHARE = 0.83
# Bandwidth of the second-level cache relative to the memory's. Chosen once, on eight published times of an image VAE on
# an RTX 4090 and 3090, on which 2 and 4 make little difference (docs/evidence/published_times.md).
L2_SPEEDUP = 3.0
MOST_WAVE_LOSS = 4.0  # A product of few tiles is divided along its inner dimension, so that it loses no more than this.


@dataclass(frozen=True)
class DeviceRates:
    """The rates that a device reaches: measured, or predicted from published figures."""

    sixteen_bit_flops: float  # Per second, of a large matrix product.
    fp32_flops: float  # The same in fp32, or in TF32 if the plan enables it.
    bytes_per_second: float  # Read and written, by a large copy.
    multiprocessors: int = 1
    launch_seconds: float = LAUNCH_SECONDS
    least_seconds: float = LEAST_SECONDS
    l2_bytes: float = 0.0  # Second-level cache; 0: unknown, all traffic goes to the memory.

    @classmethod
    def published(cls, gpu: Gpu, *, tf32: bool, compiled: bool = True) -> "DeviceRates | None":
        """Returns the rates that a GPU reaches in practice, by compiled code or by Python: what others have measured,
        where that is known, else a share of the published rates; None if they are not published."""
        fp32 = _reached(gpu, "tf32", "fp32") if tf32 else _reached(gpu, "fp32")
        if not (fp32 and gpu.bandwidth_gb_s and gpu.multiprocessors):
            return None
        return cls(
            max(_reached(gpu, "bf16", "fp16", "least_bf16"), fp32),
            fp32,
            1e9 * (gpu.sustained.get("gb_s") or COPY_SHARE * gpu.bandwidth_gb_s),
            gpu.multiprocessors,
            launch_seconds=LAUNCH_SECONDS if compiled else EAGER_LAUNCH_SECONDS,
            l2_bytes=gpu.l2_mb * 2**20,
        )


@dataclass(frozen=True)
class KernelCost:
    """One or more launches of an operator, as numbers that grow linearly with the items of a micro-batch."""

    name: str
    launches: float
    bytes: float
    flops: float
    tiles: float  # 0: it uses all multiprocessors.
    filled: float  # Share of the tiles that is used.
    sixteen_bit: bool
    accumulates: bool = False  # It adds to a gradient of an earlier micro-batch, so that the first one leaves it out.


@dataclass(frozen=True)
class StepCost:
    """The kernels of a micro-batch of one item, or of `first` items, and of one of `items`, and those of a step's end,
    with the optimizer."""

    one: tuple[KernelCost, ...]
    many: tuple[KernelCost, ...]
    items: int
    update: tuple[KernelCost, ...] = ()
    first: int = 1
    _by_size: dict[int, tuple[KernelCost, ...]] = field(default_factory=dict, repr=False, compare=False)

    def micro_batch(self, items: int) -> tuple[KernelCost, ...]:
        """Returns the kernels of a micro-batch of any size, the same for every GPU. If the two that are known have
        different operators, the larger is scaled."""
        if items not in self._by_size:
            self._by_size[items] = self._of_size(items)
        return self._by_size[items]

    def _of_size(self, items: int) -> tuple[KernelCost, ...]:
        if items == self.items:
            return self.many
        if [kernel.name for kernel in self.one] != [kernel.name for kernel in self.many]:
            share = items / self.items
            return tuple(
                replace(kernel, bytes=kernel.bytes * share, flops=kernel.flops * share, tiles=kernel.tiles * share)
                for kernel in self.many
            )
        share = (items - self.first) / (self.items - self.first)
        return tuple(_between(a, b, share) for a, b in zip(self.one, self.many, strict=True))

    def seconds(self, rates: DeviceRates, micro_batch: int, passes: int) -> float:
        """Returns the time of a step of so many micro-batches."""
        kernels = self.micro_batch(micro_batch)
        first = [kernel for kernel in kernels if not kernel.accumulates]
        parts = busy_seconds(first, rates)
        if passes > 1:
            parts += (passes - 1) * busy_seconds(kernels, rates)
        return parts + busy_seconds(self.update, rates)


def _reached(gpu: Gpu, *precisions: str) -> float:
    """Returns the FLOPS of products in the first of the precisions that have a published rate; 0 if none has."""
    for precision in precisions:
        published = gpu.flops_per_second(precision)
        if published:
            measured = 1e12 * gpu.sustained.get(precision, 0.0)
            return measured * (1.0 if precision == "fp32" else MEASURED_SHARE) or PRODUCT_SHARE * published
    return 0.0


def kernel_seconds(kernel: KernelCost, rates: DeviceRates) -> tuple[float, float, float]:
    """Returns the seconds that a GPU needs for the arithmetic, for the memory traffic and for the launches."""
    flops = kernel.flops / kernel.filled / (rates.sixteen_bit_flops if kernel.sixteen_bit else rates.fp32_flops)
    if kernel.tiles:
        waves = math.ceil(kernel.tiles / rates.multiprocessors)
        flops *= min(MOST_WAVE_LOSS, waves * rates.multiprocessors / kernel.tiles)
    memory = kernel.bytes / rates.bytes_per_second
    if kernel.bytes:
        cached = min(1.0, rates.l2_bytes * max(1.0, kernel.launches) / kernel.bytes)
        memory *= 1 - cached + cached / L2_SPEEDUP
    return flops, memory, kernel.launches * rates.least_seconds


def busy_seconds(kernels: Sequence[KernelCost], rates: DeviceRates) -> float:
    """Returns the time from the first launch to the end of the last kernel, while launches overlap with
    execution."""
    if not kernels:
        return 0.0
    work = np.array([max(kernel_seconds(kernel, rates)) for kernel in kernels])
    starts = _starts(np.array([kernel.launches for kernel in kernels]), work, rates.launch_seconds)
    remaining = np.cumsum(work[::-1])[::-1]  # Work from each kernel to the end.
    # The GPU works without a pause from some kernel on, which began when it was launched.
    return float(np.max(starts + remaining))


def _starts(launches: np.ndarray, work: np.ndarray, launch_seconds: float) -> np.ndarray:
    """Returns the earliest start of each kernel by its launch. The last of several launches of an operator ends no
    earlier than its own share of the work after it was launched."""
    count = np.maximum(1.0, launches)
    launched = np.cumsum(count * launch_seconds)
    first: np.ndarray = launched - (count - 1) * launch_seconds
    starts: np.ndarray = np.maximum(first, launched - work * (1 - 1 / count))
    return starts


def _between(a: KernelCost, b: KernelCost, share: float) -> KernelCost:
    def at(one: float, many: float) -> float:
        return one + share * (many - one)

    launches, moved, flops = at(a.launches, b.launches), at(a.bytes, b.bytes), at(a.flops, b.flops)
    return replace(a, launches=launches, bytes=moved, flops=flops, tiles=at(a.tiles, b.tiles))
