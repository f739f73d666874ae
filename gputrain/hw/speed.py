"""Measures the device: the rate of a matrix product, and of a copy."""

import time
from collections.abc import Callable
from functools import partial

import torch

WINDOWS = 5  # The best of so many counts: another program or a rising clock affects some, not all.
# The same on a CPU, each half a millisecond long: between the turns of another program, some are undisturbed.
CPU_WINDOWS = 400
LARGEST_SIDE = 8192  # This size fills every GPU; a larger one only takes longer.


def product_flops_per_second(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measure the sustained rate of a square matrix product, in floating-point operations per second.

    The share of peak of a training is relative to it: published peaks disagree with each other and with the clock that
    a GPU keeps. fp32 is measured with or without TF32, as the process is configured. The side of the matrices grows
    until a product takes a quarter of a count, or a tenth of the free memory is used; this is the warm-up.
    Raises RuntimeError if the device cannot compute the product.
    """
    largest, windows = 4096, WINDOWS if device.type == "cuda" else CPU_WINDOWS
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        largest = min(LARGEST_SIDE, int((free / 10 / 3 / dtype.itemsize) ** 0.5))  # Three of them take a tenth of it.
    side, took = 256, 0.0
    while True:
        factors = _matrices(side, device, dtype)
        _time(factors, 1)  # The first product selects the algorithm and allocates the workspace.
        took = _time(factors, 1)
        if took > seconds / windows / 4 or 2 * side > largest:
            break
        side *= 2
    count, ends = max(1, round(seconds / windows / took)), time.perf_counter() + seconds
    times = [_time(factors, count) for _ in range(WINDOWS)]
    while time.perf_counter() < ends:
        times.append(_time(factors, count))
    return 2 * side**3 * count / min(times)


COPIED_BYTES = 1 << 28  # More than the caches of most devices hold.
COPIED_AT_ONCE = 1 << 24  # The same of which a CPU copies one part after the other.


def copied_bytes_per_second(device: torch.device) -> float:
    """Measure the bytes that a large copy reads and writes in a second. Raises RuntimeError if memory is short."""
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # The first copy gets the memory from the system.
    part = (COPIED_BYTES if device.type == "cuda" else COPIED_AT_ONCE) // 4
    places = [slice(at, at + part) for at in range(0, len(source), part)]
    times = (timed(partial(target[at].copy_, source[at]), device) for _ in range(WINDOWS) for at in places)
    return 8 * part / min(times)


def _matrices(side: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two factors and a buffer for their product. They are random: a GPU multiplies zeros faster.

    They come from a generator of their own, so that a measurement during a training does not change its numbers.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    return a, b, torch.empty_like(a)


def _time(matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor], count: int) -> float:
    """Return the seconds of `count` products."""
    a, b, product = matrices

    def products() -> None:
        for _ in range(count):
            torch.mm(a, b, out=product)

    return timed(products, a.device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`, by the device's own clock on CUDA, so that launches do not count."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
