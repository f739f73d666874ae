"""Machines to plan for: this one, or this one with another card in it. Imports no torch by itself."""

from dataclasses import dataclass

from gputrain.errors import UserError
from gputrain.hw.gpus import Gpu, find_gpu, known_gpus
from gputrain.hw.plan import Cards, Plan
from gputrain.hw.probe import Machine, probe


@dataclass(frozen=True)
class TargetMachine:
    """A machine under the name of its card. `gpu`: what is published about a card that is not at hand."""

    name: str
    machine: Machine
    gpu: Gpu | None = None

    def flops_per_second(self, plan: Plan) -> float | None:
        """The published rate of a matrix product in the plan's precision; None where it is unknown."""
        if self.gpu is None:
            return None
        precision = "tf32" if plan.precision.value == "fp32" and plan.tf32.value else str(plan.precision.value)
        tflops = self.gpu.tflops(precision)
        return 1e12 * tflops if tflops else None


def target_machines(cards: Cards) -> list[TargetMachine]:
    """The cards asked for, in their order; without any, the machine as it is. Raises UserError for an unknown name."""
    machine = probe()
    gpus = [find_gpu(name) for name in cards.gpu]
    gpus += known_gpus().values() if cards.all_gpus else []
    gpus += [_unknown(gb) for gb in cards.vram_gb]
    if not gpus:
        return [TargetMachine(machine.gpu or "this CPU", machine)]
    return [TargetMachine(gpu.key, gpu.seated_in(machine), gpu) for gpu in dict.fromkeys(gpus)]


def _unknown(memory_gb: float) -> Gpu:
    """A card of which only the memory is known; it is supposed to compute bf16, as all do since Ampere."""
    if memory_gb > 1000:
        raise UserError(f"a card of {memory_gb:g} GB", hint="--vram-gb takes gigabytes, such as 24")
    return Gpu(f"{memory_gb:g} GB", f"a card of {memory_gb:g} GB", memory_gb, (8, 0), 0.0, source="")
