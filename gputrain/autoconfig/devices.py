"""Several GPUs that train together: the machines to plan for, and gradients that are averaged over the processes.

Imports no transformers. GB is 1e9 bytes.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gputrain.autoconfig.settings import OptimalConfig
from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import Machine, probe
from gputrain.hw.ranks import Ranks, weakest_of
from gputrain.planner.target import one_machine

EXCHANGED_BYTES = 64 * 2**20  # Gradients travel in parts of about this size.


@dataclass(frozen=True)
class PlannedMachines:
    """`common` has what all GPUs can do, the least memory and the least capability; `each` has one of the GPUs."""

    common: Machine
    each: tuple[Machine, ...]


def count_gpus(gpu: str | Sequence[str] | None, gpus: int, batch_size: int) -> int:
    """Returns the number of GPUs that train together: as named, as asked for, or as torchrun says (`gpus` 0).

    Raises UserError if they contradict one another, or if the batch cannot be divided.
    """
    named = 0 if gpu is None or isinstance(gpu, str) else len(gpu)
    if named > 1 and gpus not in (0, named):
        raise UserError(f"{named} named GPUs, and gpus is {gpus}", hint="leave gpus out")
    count = (named if named > 1 else gpus) or Ranks.launched(os.environ).count
    if batch_size % count:
        raise UserError(
            f"a target batch size of {batch_size} cannot be divided among {count} GPUs",
            hint=f"choose a multiple of {count}",
        )
    return count


def machines_to_plan(gpu: str | Sequence[str] | None, vram_gb: float, gpus: int) -> PlannedMachines:
    """Returns the machines to plan for: this one, or this one with the named GPUs.

    Raises UserError if a GPU is unknown, or if its number contradicts the number of names.
    """
    names = [] if gpu is None else [gpu] if isinstance(gpu, str) else list(gpu)
    if len(names) > 1:
        if vram_gb:
            raise UserError("vram_gb for several named GPUs", hint="name the GPUs, or give the memory of one of them")
        here = replace(probe(), gpus=len(names))
        each = tuple(find_gpu(name).installed_in(here) for name in names)
        return PlannedMachines(weakest_of(list(each), each[0]), each)
    common = one_machine(names[0] if names else None, vram_gb, gpus)
    here = probe()
    if gpus > 1 and here.gpu_count > 1 and not names and not vram_gb:
        count = min(gpus, here.gpu_count)
        return PlannedMachines(common, tuple(replace(probe(index), gpus=gpus) for index in range(count)))
    return PlannedMachines(common, (common,))


def average_over_processes(model: nn.Module) -> None:
    """Replaces gradients by their means over all processes, and buffers by those of the first, as DDP does.

    A parameter that has a gradient in some processes only counts as zero in the others.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
    for parameter, used in zip(parameters, has_gradient.tolist(), strict=True):
        if used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    count = dist.get_world_size()
    for part in _exchanged([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([tensor.flatten() for tensor in part])
        dist.all_reduce(flat)
        for tensor, mean in zip(part, torch.split(flat / count, [tensor.numel() for tensor in part]), strict=True):
            tensor.copy_(mean.view_as(tensor))
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def _exchanged(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of the same dtype to parts that travel together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        part: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype == dtype:
                part.append(tensor)
                if sum(one.numel() * one.element_size() for one in part) >= EXCHANGED_BYTES:
                    yield part
                    part = []
        if part:
            yield part


def check_agreement(described: object) -> None:
    """Raises UserError if the processes that train together have different settings of what they share."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, described)
    if any(other != found[0] for other in found):
        raise UserError(
            "the processes that train together have planned differently",
            hint="give create_optimal_config the same dataset, model and options in all of them; machines with other "
            "GPUs need the option gpu with the names of all GPUs",
        )


def shared_settings(config: OptimalConfig) -> tuple[object, ...]:
    """Returns what all processes that train together must have in common."""
    precision = (config.fp16, config.bf16)
    edges = tuple(bucket.to_seconds for bucket in config.buckets)
    return (config.target_batch_size, config.gpus, precision, config.max_duration_seconds, config.over_long, edges)
