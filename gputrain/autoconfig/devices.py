"""Several GPUs that train together: the machines to plan for."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gputrain.errors import UserError
from gputrain.hw.gpus import find_gpu
from gputrain.hw.probe import Machine, probe
from gputrain.hw.ranks import Ranks, weakest_of
from gputrain.planner.target import one_machine


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
