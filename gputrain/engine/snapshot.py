"""Copies of the tensors of a checkpoint in host memory, so that training can go on while they are written."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gputrain.hw.probe import ram
from gputrain.hw.runtime import is_out_of_memory

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 20  # torch rounds pinned memory up to powers of two, so tensors share chunks of this size.
ALIGNMENT = 64  # Bytes.
FREE_SHARE = 0.1  # Share of the RAM that must stay free; from 0.9 on, the monitor warns.


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which `change` has replaced the tensors, in their order.

    Other values are passed on, and a dict keeps its class and its attributes, such as the versions in a state_dict.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        mapped = type(value)((key, map_tensors(item, change)) for key, item in value.items())
        if hasattr(value, "__dict__"):
            mapped.__dict__.update(value.__dict__)
        return mapped
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    return value


def distinct_tensors(content: Any) -> dict[Any, Tensor]:
    """Return the tensors in nested containers by what identifies their values. The same tensor appears once."""
    found: dict[Any, Tensor] = {}

    def look(tensor: Tensor) -> Tensor:
        return found.setdefault(_identity(tensor), tensor)

    map_tensors(content, look)
    return found


def tensor_bytes(content: Any) -> int:
    """Return the size of all tensors in nested containers. The same tensor counts once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct_tensors(content).values())


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


class HostSnapshot:
    """Copies tensors into buffers in host memory, which are kept and used again from copy to copy.

    The buffers are pinned if the tensors come from a GPU, so that its copies run at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []  # Shapes, strides and types that the buffers are for.
        self._buffers: list[Tensor] = []
        self._has_said = False

    def copy(self, content: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
        """Return a copy of the content, valid until the next call; None, with one message, if memory is too short.

        On return all tensors have been copied from the device.
        """
        tensors = distinct_tensors(content)
        layout = [(key[2:], tensor.device.type) for key, tensor in tensors.items()]
        if layout != self._layout and not self._allocate(layout, list(tensors.values()), device):
            return None
        buffers = dict(zip(tensors, self._buffers, strict=True))
        with torch.no_grad():
            for key, tensor in tensors.items():
                buffers[key].copy_(tensor, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return dict(map_tensors(content, lambda tensor: buffers[_identity(tensor)]))

    def release(self) -> None:
        """Drop the buffers; the next copy allocates new ones."""
        self._layout, self._buffers = [], []

    def _allocate(self, layout: list[Any], tensors: list[Tensor], device: torch.device) -> bool:
        """Allocate buffers. Returns False if they don't fit into the RAM."""
        self.release()
        size = sum(_padded(tensor) for tensor in tensors)
        total_gb, free_gb = ram()
        fits = not free_gb or size / 1e9 <= free_gb - FREE_SHARE * total_gb
        try:
            if fits:
                self._buffers = buffers_like(tensors, pinned=device.type == "cuda")
                self._layout = layout
                return True
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and not is_out_of_memory(error):
                raise
        if not self._has_said:
            self._has_said = True
            log.warning(
                "training waits for every save: a copy of the checkpoint takes %.2f GB of RAM, and %.2f GB are free",
                size / 1e9, free_gb,
            )  # fmt: skip
        return False


def buffers_like(tensors: list[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return host tensors of the same shapes, strides and types, each with a storage of its own size."""
    left = sum(_padded(tensor) for tensor in tensors)
    chunk, used, buffers = torch.empty(0, dtype=torch.uint8).numpy(), 0, []
    for tensor in tensors:
        needed = _padded(tensor)
        if used + needed > len(chunk):
            size = max(needed, min(CHUNK_BYTES, left))
            new = torch.empty(size, dtype=torch.uint8)
            chunk, used = (new.pin_memory() if pinned else new).numpy(), 0
        # A tensor made from a slice of an array has a storage of the slice alone, and torch.save writes whole storages.
        part = torch.from_numpy(chunk[used : used + tensor.numel() * tensor.element_size()])
        strides = torch.empty_like(tensor, device="meta").stride()  # Dense, in the tensor's order of dimensions.
        buffers.append(part.view(tensor.dtype).as_strided(tensor.shape, strides))
        used, left = used + needed, left - needed
    return buffers


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
