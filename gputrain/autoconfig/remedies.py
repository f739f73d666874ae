"""The error for a model that does not fit, with what would help. GB is 1e9 bytes."""

import math

from gputrain.autoconfig.memory_models import MemoryModels
from gputrain.errors import UserError
from gputrain.hw.gpus import known_gpus
from gputrain.hw.probe import Machine
from gputrain.planner.memory.fit import MemoryBudget

SHORTEST_SECONDS = 1.0  # Shortest length that clips are cut to unless the user asks for less.


def does_not_fit(
    memory_models: MemoryModels,
    machine: Machine,
    budget: MemoryBudget,
    seconds: float,
    fitting: float,
    can_checkpoint: bool,
) -> UserError:
    """Returns the error for a step of one item that does not fit; its hint names what helps, the easiest first."""
    repeats = can_checkpoint
    memory_model = memory_models.memory_model(seconds, repeats)
    need_gb, fixed_gb = budget.margin * memory_model.peak_gb(1), budget.margin * memory_model.peak_gb(0)
    name = type(memory_models.model).__name__
    item = f"one item{f' of {seconds:.1f} s' if seconds else ''}{' with gradient checkpointing' if repeats else ''}"
    remedies = []
    if fitting >= SHORTEST_SECONDS:
        remedies.append(f"clips of at most {fitting:.1f} s fit (max_duration_seconds)")
    if memory_models.precision == "fp32" and _fits_in_16_bit(memory_models, budget, seconds, repeats):
        remedies.append("it fits with 16 bit, on a GPU that supports it")
    if fixed_gb > budget.budget_gb:
        most = sum(p.numel() for p in memory_models.model.parameters()) * budget.budget_gb / fixed_gb
        remedies.append(
            f"weights, gradients and optimizer state alone take {fixed_gb:.3g} GB: a model of about "
            f"{most / 1e6:.3g} M parameters would be the largest"
        )
    share = budget.budget_gb / (machine.gpu_memory_gb or machine.ram_gb or math.inf)
    able = [card for card in known_gpus().values() if memory_models.precision == "fp32" or card.fp16_tflops]
    cards = [card for card in able if share * card.memory_gb >= need_gb]
    if cards:
        card = min(cards, key=lambda card: card.memory_gb)
        remedies.append(f"the smallest known GPU that it fits is {card.name}, {card.memory_gb:g} GB ({card.key})")
    return UserError(
        f"{name} does not fit {machine.gpu or 'this machine'}: {item} takes {need_gb:.3g} GB, which is "
        f"{need_gb - budget.budget_gb:.3g} GB more than the available {budget.budget_gb:.3g} GB",
        hint="; or ".join(remedies) or "it fits no known GPU: train a smaller model",
    )


def _fits_in_16_bit(of: MemoryModels, budget: MemoryBudget, seconds: float, checkpointing: bool) -> bool:
    if of.unpredictable:
        return False
    other = MemoryModels(of.model, of.loss, of.make_batch, "bf16", of.optimizer, None)
    return budget.margin * other.step(1, seconds, checkpointing).reserved_gb <= budget.budget_gb
