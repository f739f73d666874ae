"""One step of a training: the gradients of a batch, in as many micro-batches as memory requires, and the optimizers.

The result of a step does not depend on how its batch was split:
- a term is a sum over its items divided by the count of the whole batch, so the parts add up to the mean;
- `Recipe.prepare` draws the noise of a step for the whole batch from (seed, step), and `split` divides it;
- several ranks, one for each GPU, compute parts of the same batch, and their sums are added up (distributed.py);
- what a loss knows of the whole batch (an adaptive weight, a moving average) comes from the step before: a loss yields
  statistics without gradient, and `Phase.after_step` receives their sums over the batch.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gputrain.engine.out_of_memory import REMEDY, FailedAttempt, retried, retried_once
from gputrain.engine.recipe import (
    Batch,
    BatchStat,
    ChainGradients,
    JointTerms,
    Phase,
    PhaseSums,
    Recipe,
    Scalars,
    StepGroup,
    Sums,
    Yielded,
    add_value,
)
from gputrain.engine.state import TrainState
from gputrain.errors import UserError
from gputrain.hw.runtime import random_state, release_memory, set_random_state


def update(state: TrainState, batch: Batch, step: int, learning_rate: float) -> Scalars:
    """Make one optimizer step of every phase. Returns scalars by name, on the device."""
    scalars: Scalars = {}
    for group in state.recipe.step_groups:
        sums = accumulate(state, group, batch, step)
        all_reduce_sums(state, group, sums)
        for phase in group.phases:
            if not sums[phase.name].losses:  # The phase starts at a later step.
                continue
            norm, finite = prepare_optimizer(state, phase, learning_rate * phase.lr_scale)
            # From here to the end of the last phase, generator and discriminators belong to different steps: what ends
            # the run in between must not save them. `train` sets it back.
            state.is_consistent = False
            phase.optimizer.step()
            # None takes no memory, and the next backward pass writes its gradients instead of adding to zeros.
            phase.optimizer.zero_grad(set_to_none=True)
            # Statistics reach a loss one step late, in its next step: within a step they would be known only after the
            # last micro-batch, and the result would depend on the split.
            phase.after_step(sums[phase.name].statistics, finite)
            scalars |= finish_step(state, phase, sums[phase.name], norm, finite)
    return scalars


def accumulate(state: TrainState, group: StepGroup, batch: Batch, step: int) -> Sums:
    """Accumulate the gradients of the whole batch over its micro-batches. Returns the sums of each phase by name.

    When memory runs out, nothing has stepped yet: the gradients are dropped and the same items are tried in smaller
    parts, or first with memory that the state can free. When the compiler fails, they are tried without it. Raises
    UserError when a single item does not fit.
    """
    recipe, device, name = state.recipe, state.runtime.device, group.name
    items = recipe.size(batch)
    random = random_state(device)  # A second attempt draws the dropout of the first, so that the result is the same.
    compute = state.gradients or gradients

    def attempt() -> Sums:
        return compute(state, group, batch, math.ceil(items / min(items, state.micro_batch[name])), step)

    def make_room(failure: FailedAttempt) -> None:
        micro_batch = min(items, state.micro_batch[name])  # The planned size may exceed the number of items.
        has_freed = state.free_memory()
        if micro_batch == 1 and not failure.of_compiler and not has_freed:
            raise UserError(
                f"out of memory in the {name}'s step with a single item ({device}): {failure.cause}",
                hint=REMEDY,
            )
        drop_gradients(group)
        if failure.of_compiler:
            state.runtime.stop_compiling(failure.cause)
        elif not has_freed:
            state.micro_batch[name] = micro_batch
            state.shrink(name, "out of memory", step)

    return retried(attempt, make_room, lambda: set_random_state(random, device), without_compiler=True)


def gradients(state: TrainState, group: StepGroup, batch: Batch, parts: int, step: int) -> Sums:
    """Add the gradients of a group's losses over a batch, in so many parts, to its parameters. Returns the sums of each
    phase by name.

    Every term is back-propagated the moment it is yielded, so terms without a common graph are never in memory
    together.
    """
    unfreeze_only(group, state.recipe)
    sums = {phase.name: PhaseSums() for phase in group.phases}
    # One autocast around all parts keeps its 16-bit copies of the weights from part to part.
    with group.step_context(), state.runtime.autocast():
        for part in state.recipe.split(batch, parts):
            back_propagate(state, group, group.loss(part, step), sums)
    return sums


def back_propagate(state: TrainState, group: StepGroup, terms: Iterable[Yielded], sums: Sums) -> None:
    """Back-propagate each term before the next is computed, and add its value to the sums of its phase."""
    first, device = group.name, state.runtime.device.type
    partly_frozen = {phase.name for phase in group.phases if phase.frozen}
    for yielded in terms:
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            # Gradients that were gathered on a detached copy go on through the graph that made it, once for all terms.
            # They contain the loss scale already.
            if isinstance(yielded, ChainGradients):
                torch.autograd.backward(yielded.tensors, yielded.gradients)
                continue
            if isinstance(yielded, BatchStat):
                add_value(sums[yielded.phase or first].statistics, yielded.name, yielded.value.detach())
                continue
            joint = yielded.terms if isinstance(yielded, JointTerms) else (yielded,)
            values = []
            for term in joint:
                phase = term.phase or first
                factor = term.weight * state.loss_scale(phase)
                value = term.value if isinstance(factor, float) and factor == 1 else term.value * factor
                if value.requires_grad or phase not in partly_frozen:  # All that it depends on may be frozen.
                    values.append(value)
                add_value(sums[phase].losses, term.name, term.value.detach())
            # Now, and not with the sum of all terms: this frees the graph before the next term builds its own. Each
            # discriminator's graph stands alone in memory.
            if values:
                torch.autograd.backward(values)


def unfreeze_only(group: StepGroup, recipe: Recipe) -> None:
    """Have the modules of this group require gradients, but for frozen parameters, and no others.

    The generator's loss goes through the discriminators: without this, their weights would get gradients, too.
    """
    for module in recipe.modules.values():
        module.requires_grad_(False)
    for phase in group.phases:
        for module in phase.modules:
            module.requires_grad_(True)
        for parameter in phase.frozen:
            parameter.requires_grad_(False)


def drop_gradients(group: StepGroup) -> None:
    for phase in group.phases:
        phase.optimizer.zero_grad(set_to_none=True)


def all_reduce_sums(state: TrainState, group: StepGroup, sums: Sums) -> None:
    """Replace the gradients, losses and statistics of this rank's part of the batch by those of the whole batch."""
    found = [parameter.grad for parameter in group.parameters() if parameter.grad is not None]
    state.rank_group.all_reduce(
        found, [named for of_phase in sums.values() for named in (of_phase.losses, of_phase.statistics)]
    )


def prepare_optimizer(state: TrainState, phase: Phase, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Have the optimizer clip its gradients, and skip the step if they are not finite.

    Returns the norm of the gradients, which contains the loss scale, and whether it is finite.

    The fused optimizer divides gradients by grad_scale and skips the step where found_inf is set. Unscaling, clipping
    and the guard against non-finite gradients therefore cost neither a pass over the gradients nor a device sync.
    """
    optimizer: Any = phase.optimizer
    found = [parameter.grad for parameter in phase.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(found, foreach=True)
    finite = norm < math.inf  # False for NaN. Unlike isfinite, it is one kernel.
    limit = norm / state.gradient_clip if state.gradient_clip else torch.zeros_like(norm)
    # Both stay on the device: an `if norm.isfinite()` would wait for it in every step. The fused kernels read them.
    optimizer.grad_scale = limit.clamp(min=state.loss_scale(phase.name)).float()
    optimizer.found_inf = (~finite).float()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if any(weight.grad is not None and weight not in optimizer.state for weight in phase.parameters()):
        allocate_optimizer_state(phase)  # In advance, as a step that runs out of memory half way cannot be repeated.
    return norm, finite


def allocate_optimizer_state(phase: Phase) -> None:
    """Have the optimizer allocate its state for the parameters with gradients, without changing a weight.

    When memory runs out, unused memory is released and it is retried.
    """
    known = set(phase.optimizer.state)

    def again() -> None:
        for parameter in set(phase.optimizer.state) - known:  # Their state may be incomplete.
            del phase.optimizer.state[parameter]
        release_memory()
        _step_without_effect(phase.optimizer)

    retried_once(lambda: _step_without_effect(phase.optimizer), again)


def _step_without_effect(optimizer: Any) -> None:
    """Step as after a non-finite gradient: no weight, no average and no count of steps changes."""
    found_inf = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = found_inf


def finish_step(state: TrainState, phase: Phase, sums: PhaseSums, norm: Tensor, finite: Tensor) -> Scalars:
    """Adjust the loss scale, and return the scalars of a phase's step by name."""
    scale = state.loss_scale(phase.name)
    scalars = {f"loss/{phase.name}/{name}": value for name, value in sums.losses.items()}
    scalars |= {f"statistics/{phase.name}/{name}": value for name, value in sums.statistics.items()}
    scalars[f"gradient_norm/{phase.name}"] = norm / scale
    # In fp16 a non-finite gradient is an error only if the loss scale cannot be lowered any further.
    scalars[f"nonfinite/{phase.name}"] = (~finite & (scale <= 1)).float()
    state.nonfinite.latest[phase.name] = scalars[f"nonfinite/{phase.name}"]
    if state.scales_losses:
        state.loss_scales[phase.name].adjust(finite)
    return scalars
