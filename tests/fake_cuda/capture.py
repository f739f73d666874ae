"""Streams and CUDA graphs of the fake card: what CUDA and torch refuse is refused, and all calls are noted in order.

While a stream captures, nothing may be read by the host or copied from it, and memory is neither returned to the driver
nor waited for. A graph can be captured on a stream that is not the default one, is captured once, and is replayed after
its capture. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#prohibited-and-unhandled-operations
As in torch 2.9 to 2.11, a capture that fails leaves the default generator of random numbers in the state of a capture.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fake_cuda.tensors import Copy


class Stream:
    """torch.cuda.Stream by its number; 0 is the default stream."""

    card: "StreamsAndGraphs"

    def __init__(self, device: Any = None, number: int = -1) -> None:
        self.number = len(self.card.streams) if number < 0 else number
        self.device = device
        self.card.streams.append(self)

    def wait_stream(self, other: "Stream") -> None:
        if self.card.capturing is not None and other is not self.card.current:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.card.note(f"stream {self.number} waits for {other.number}")


class CudaGraph:
    """torch.cuda.CUDAGraph."""

    card: "StreamsAndGraphs"

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured, self.replays, self.copies_before = False, 0, 0

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        assert not self.captured, "This CUDAGraph instance already owns a captured graph."
        if self.card.current.number == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self.card.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, "
                               f"got {capture_error_mode}")  # fmt: skip
        self.card.capturing, self.copies_before = self, len(self.card.copies)
        torch.cuda.default_generators[0].state.capturing = True
        self.card.note(f"capture on stream {self.card.current.number} into pool {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        if self.card.capturing is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        self.card.capturing = None
        if len(self.card.copies) > self.copies_before:
            places = {
                f"{copy.direction} ({copy.operator}, {copy.where})" for copy in self.card.copies[self.copies_before :]
            }
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {sorted(places)}")
        torch.cuda.default_generators[0].state.capturing = False
        self.captured = True
        self.card.note("end of capture")

    def replay(self) -> None:
        if not self.captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self.card.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.replays += 1
        self.card.note("replay")


@dataclass
class StreamsAndGraphs:
    """The streams of the card, and the graph that is captured now."""

    log: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    capturing: CudaGraph | None = None
    pools: int = 0

    def note(self, call: str) -> None:
        self.log.append(call)

    def stubs(self, copies: list[Copy]) -> dict[str, Any]:
        """By their names in torch.cuda."""
        self.copies = copies
        stream_class, graph_class = (type(one.__name__, (one,), {"card": self}) for one in (Stream, CudaGraph))
        self.default = self.current = stream_class(number=0)

        @contextlib.contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, self.current = self.current, chosen
            yield
            self.current = before  # As in torch, an error in between leaves the stream to its caller.

        def set_stream(chosen: Stream) -> None:
            self.current = chosen

        def graph_pool_handle() -> tuple[int, int]:
            self.pools += 1
            return (0, self.pools)

        return {
            "Stream": stream_class, "CUDAGraph": graph_class, "stream": stream, "set_stream": set_stream,
            "current_stream": lambda device=None: self.current, "graph_pool_handle": graph_pool_handle,
            "is_current_stream_capturing": lambda: self.capturing is not None,
        }  # fmt: skip
