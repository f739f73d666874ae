"""Machines to plan for: this one, or this one with another GPU. This module itself imports no torch."""

from dataclasses import dataclass, replace

from gputrain.errors import UserError
from gputrain.hw.gpus import Gpu, find_gpu, known_gpus
from gputrain.hw.plan import Cards, Plan
from gputrain.hw.probe import Machine, probe
from gputrain.hw.ranks import weakest_of
from gputrain.planner.time.roofline import DeviceRates


@dataclass(frozen=True)
class TargetMachine:
    """A machine under the name of its GPU. `gpu`: the published data of a GPU that is not in this machine."""

    name: str
    machine: Machine
    gpu: Gpu | None = None
    price_per_hour: float = 0.0  # Of all its GPUs together; 0: unknown.

    def rates(self, plan: Plan) -> DeviceRates | None:
        """Returns the rates that the GPU is predicted to reach; None if its published ones are unknown."""
        return published_rates(self.gpu or self.machine.gpu, plan)


def published_rates(gpu: Gpu | str, plan: Plan) -> DeviceRates | None:
    """Returns the rates that a GPU, or the one of a name, is predicted to reach; None if they are unknown."""
    try:
        found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    except UserError:
        return None
    return DeviceRates.published(found, tf32=bool(plan.tf32.value), compiled=bool(plan.compile.value))


def target_machines(cards: Cards) -> list[TargetMachine]:
    """Returns the requested GPUs in their order; without any, this machine. Raises UserError for an unknown name."""
    machine = probe()
    named, prices = [*map(find_gpu, cards.gpu), *map(unknown_gpu, cards.vram_gb)], cards.prices()
    if cards.together:
        return [replace(_together(named, machine), price_per_hour=sum(prices))]
    priced = dict(zip(named, prices, strict=False))  # Without a name, there is the price of this machine's GPU.
    if cards.all_gpus:
        everything = [*named[: len(cards.gpu)], *known_gpus().values(), *named[len(cards.gpu) :]]
        priced = {gpu: priced.get(gpu, prices[0]) for gpu in everything}
    together = replace(machine, gpus=cards.gpus)
    times = f"{cards.gpus} x " if cards.gpus > 1 else ""
    if not priced:
        return [TargetMachine(times + (machine.gpu or "this CPU"), together, None, cards.gpus * prices[0])]
    return [
        TargetMachine(times + gpu.key, gpu.installed_in(together), gpu, cards.gpus * price)
        for gpu, price in priced.items()
    ]


def _together(gpus: list[Gpu], machine: Machine) -> TargetMachine:
    """Returns a machine with several different GPUs, whose ranks plan for the weakest."""
    machines = [gpu.installed_in(replace(machine, gpus=len(gpus))) for gpu in gpus]
    common = weakest_of(machines, machines[0])
    slowest = min(gpus, key=lambda gpu: gpu.flops_per_second("fp16") or 0.0)
    return TargetMachine(" + ".join(gpu.key for gpu in gpus), common, slowest)


def unknown_gpu(memory_gb: float) -> Gpu:
    """Returns a GPU of which only the memory is known; it is assumed to support bf16, as all do since Ampere."""
    if memory_gb > 1000:
        raise UserError(f"a card of {memory_gb:g} GB", hint="--vram-gb takes gigabytes, such as 24")
    return Gpu(f"{memory_gb:g} GB", f"a card of {memory_gb:g} GB", memory_gb, (8, 0), 0.0, source="")
