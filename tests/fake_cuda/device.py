"""A card that is not there: run GPU code paths on any machine.

    with fake_cuda(capability=(9, 0), memory_gb=80) as card:
        runtime = apply(decide(probe(), Hardware()))
        model = runtime.place(Model())          # parameters are fake CUDA tensors from here on
        with card.watched() as copies:
            step()                              # forward, backward and optimizer really run, on shapes
        assert not copies.to_host

Inside, `torch.cuda` finds one card. Its Python code is torch's own; the C++ functions below it are stubs that check
their arguments (`driver.py`). Tensors on the device are fake, those on the CPU are real (`tensors.py`). What the host
reads of the device (`.item()`, `.cpu()`, `bool()`) is zero, and is noted in `card.copies` with the place that asked.
Operators on tensors of two devices raise, in forward and backward passes. torch's switches, its random numbers and the
environment are as before when the block is left.

Not covered: values, kernels' own failures, memory (the allocator always tells 1 GB), work that streams do at the same
time, and torch.compile: with
`compiled=True` it is stood in for by a function that returns what it is given, so that the package's own paths for
compiled code run.

Works in builds of torch without CUDA, on Linux and macOS, without a compiler.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from gputrain.hw.driver import query_driver
from gputrain.planner.memory.timeline import _Watch
from gputrain.planner.time.flops import FlopCount
from tests.fake_cuda import tensors
from tests.fake_cuda.capture import StreamsAndGraphs
from tests.fake_cuda.driver import VARIABLES, Card, Event, Nvml
from tests.fake_cuda.tensors import CUDA, TO_DEVICE, TO_HOST, Copy, DeviceMode, FunctionMode, Generator

# Why there can be no fake card here, if there can be none.
UNAVAILABLE = (
    "Windows does not tell where torch keeps its device guards"
    if sys.platform == "win32"
    else "this build of torch has CUDA's own functions"
    if torch.version.cuda or torch.version.hip
    else ""
)
MODE = DeviceMode()  # one for the process, as code that caches tensors outlives a `with` block


@dataclass
class Copies:
    """What went between the sides in a watched region."""

    made: list[Copy] = field(default_factory=list)

    @property
    def to_host(self) -> list[Copy]:
        return [copy for copy in self.made if copy.direction == TO_HOST]

    @property
    def to_device(self) -> list[Copy]:
        return [copy for copy in self.made if copy.direction == TO_DEVICE]


@dataclass
class FakeCard(Card):
    """What `fake_cuda` yields: the card's state, with the copies made so far."""

    copies: list[Copy] = field(default_factory=list)
    graphs: StreamsAndGraphs = field(default_factory=StreamsAndGraphs)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Copies]:
        """Gather the copies that are made within."""
        before, copies = len(self.copies), Copies()
        try:
            yield copies
        finally:
            copies.made = self.copies[before:]


@contextlib.contextmanager
def fake_cuda(
    name: str = "NVIDIA H100 80GB HBM3",
    capability: tuple[int, int] = (9, 0),
    memory_gb: float = 80.0,
    *,
    compiled: bool = False,
) -> Iterator[FakeCard]:
    """One card, until the block is left. `compiled`: let torch.compile return its function as it is."""
    card = FakeCard(name, capability, memory_gb)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_kept())
        stack.enter_context(mock.patch.multiple(MODE, copies=card.copies, pinned=set(), synchronised=card.synchronised))
        for patch in _patches(card):
            stack.enter_context(patch)
        if compiled:
            stack.enter_context(mock.patch.object(torch, "compile", lambda function, **named: function))
        stack.enter_context(tensors.device_guard())
        stack.enter_context(FunctionMode(MODE))
        yield card


def _patches(card: FakeCard) -> list[Any]:
    import pynvml

    library = SimpleNamespace(cudaMemGetInfo=card.memory_info, cudaError=SimpleNamespace(success=0))
    stream = SimpleNamespace(is_capturing=lambda: False)
    new = {"create": True}
    return [
        *(mock.patch.object(torch._C, name, function, **new) for name, function in card.functions().items()),
        mock.patch.object(torch._C, "_accelerator_setAllocatorSettings", card._accelerator_setAllocatorSettings, **new),
        mock.patch.object(torch.cuda, "_cudart", library),
        mock.patch.object(torch.cuda, "_get_device_properties", card.device_properties, **new),
        mock.patch.object(torch.cuda, "_exchange_device", card._cuda_exchangeDevice),
        mock.patch.object(torch.cuda, "_maybe_exchange_device", card._cuda_maybeExchangeDevice),
        mock.patch.object(torch.cuda, "_initialized", False),
        mock.patch.object(torch.cuda, "_cached_device_count", None),
        mock.patch.object(torch.cuda, "default_generators", ()),
        mock.patch.object(torch.cuda, "Event", Event),
        *(mock.patch.object(torch.cuda, name, stub) for name, stub in card.graphs.stubs(card.copies).items()),
        mock.patch.object(torch._C, "_host_emptyCache", return_value=None, **new),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=CUDA),
        mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(torch, "save", tensors.saving()),
        mock.patch.object(FakeTensor, "__torch_dispatch__", tensors.answering_cpp(FakeTensor.__torch_dispatch__)),
        *(mock.patch.object(one, "__torch_dispatch__", tensors.answering_cpp_in(one)) for one in (FlopCount, _Watch)),
        mock.patch.object(FakeTensor, "is_cuda", property(tensors.is_cuda), **new),
        mock.patch.object(fake_tensor, "init_gpu_context", _no_context),
        mock.patch.object(torch._C, "_conv_determine_backend_memory_format", tensors.conv_layout),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", tensors.grouping()),
        mock.patch.object(nn.Module, "_apply", tensors.apply_to_parameters),
        *(mock.patch.object(pynvml, name, function) for name, function in Nvml(card).functions().items()),
    ]


def _no_context(device: Any) -> None:
    """Does nothing, and keeps no list of its calls as a mock does: there is one for every operator."""


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """torch's switches, random numbers and the environment are restored; caches that may hold tensors are emptied."""
    state, environment = torch.get_rng_state(), dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    restore = _switches()
    _forget()
    try:
        yield
    finally:
        _forget()
        restore()
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(state)


def _switches() -> Callable[[], None]:
    """What puts torch's switches back to where they are now."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision, tf32, benchmark = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark
    parts = [(part, part.fp32_precision) for part in (matmul, cudnn.conv, cudnn.rnn)]

    def restore() -> None:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = tf32, benchmark
        for part, value in parts:
            part.fp32_precision = value

    return restore


def switches() -> dict[str, bool]:
    """torch's switches as its own readers tell them, by the names of the plan's settings. They raise where they cannot
    make out a value, which torch.compile and cuDNN's own context manager ask for too."""
    with torch.backends.cudnn.flags():
        tf32 = {torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32}
    tf32.add(torch.get_float32_matmul_precision() == "high")
    (value,) = tf32
    return {"tf32": value, "cudnn_benchmark": torch.backends.cudnn.benchmark}


def _forget() -> None:
    """Empty the package's caches of tensors, and of what it found out about the device."""
    query_driver.cache_clear()
    audio, align = sys.modules.get("gputrain.audio.mel"), sys.modules.get("gputrain.tts.align")
    if audio:
        audio.mel_bank.cache_clear()
    if align:
        align.triton_search.cache_clear()
