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
    # Groups step one after the other: the forward passes of a later group see the weights that an earlier one has just
    # changed. Phases that must learn from the same forward passes belong to one group.
    for group in state.recipe.step_groups:
        sums = accumulate(state, group, batch, step)
        # Ranks meet only here, after the last backward pass: one that has run out of memory and repeated its part in
        # smaller micro-batches makes the others wait, and no exchange within a backward pass is left half done.
        all_reduce_sums(state, group, sums)
        for phase in group.phases:
            # A phase without losses starts at a later step. It has no gradients yet, and its optimizer counts no step.
            if not sums[phase.name].losses:
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
    compute = state.gradients or gradients  # A CUDA graph computes the same gradients, where one is planned.

    def attempt() -> Sums:
        # Parts are as equal as possible: a batch of 8 in micro-batches of at most 3 is 3, 3 and 2 items. Nothing is
        # divided by their number, since each term is a share of the whole batch already.
        return compute(state, group, batch, math.ceil(items / min(items, state.micro_batch[name])), step)

    def make_room(failure: FailedAttempt) -> None:
        micro_batch = min(items, state.micro_batch[name])  # The planned size may exceed the number of items.
        # CUDA graphs keep the memory of a whole step. Without them, the same micro-batch may fit.
        has_freed = state.free_memory()
        if micro_batch == 1 and not failure.of_compiler and not has_freed:
            raise UserError(
                f"out of memory in the {name}'s step with a single item ({device}): {failure.cause}",
                hint=REMEDY,
            )
        # Parts that were done before the failure have added their gradients, and the next attempt starts from none.
        drop_gradients(group)
        if failure.of_compiler:
            state.runtime.stop_compiling(failure.cause)
        elif not has_freed:
            # It stays halved for the rest of the run, as the next batch would run out of memory again.
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
    # Gradients of all parts gather in `grad` of the parameters, from one optimizer step to the next. The parts of a
    # batch are computed one after the other, and only one of them has its activations in memory. One autocast around
    # all parts keeps its 16-bit copies of the weights from part to part.
    with group.step_context(), state.runtime.autocast():
        for part in state.recipe.split(batch, parts):
            back_propagate(state, group, group.loss(part, step), sums)
    return sums


def back_propagate(state: TrainState, group: StepGroup, terms: Iterable[Yielded], sums: Sums) -> None:
    """Back-propagate each term before the next is computed, and add its value to the sums of its phase."""
    first, device = group.name, state.runtime.device.type
    partly_frozen = {phase.name for phase in group.phases if phase.frozen}
    for yielded in terms:
        # Backward passes run outside of autocast: their operators have the types of the forward pass already.
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            # Gradients that were gathered on a detached copy go on through the graph that made it, once for all terms.
            # They contain the loss scale already.
            if isinstance(yielded, ChainGradients):
                torch.autograd.backward(yielded.tensors, yielded.gradients)
                continue
            # The loss cannot use a statistic of the whole batch before its last part: `after_step` gets the sum.
            if isinstance(yielded, BatchStat):
                add_value(sums[yielded.phase or first].statistics, yielded.name, yielded.value.detach())
                continue
            joint = yielded.terms if isinstance(yielded, JointTerms) else (yielded,)
            values = []
            for term in joint:
                phase = term.phase or first
                # Weight and loss scale enter here, so that metrics show the loss as the paper defines it. A factor of
                # 1 costs no kernel.
                factor = term.weight * state.loss_scale(phase)
                value = term.value if isinstance(factor, float) and factor == 1 else term.value * factor
                # In a partly frozen phase, all that a term depends on may be frozen. Elsewhere, a term without a graph
                # is a mistake of the recipe, and its backward pass raises.
                if value.requires_grad or phase not in partly_frozen:
                    values.append(value)
                # Detached, as the sum of the metrics would keep the graphs of all parts alive otherwise.
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
    # The norm is that of the whole batch, as all micro-batches and ranks have added their gradients by now. Clipping
    # each part would make the result depend on the split.
    found = [parameter.grad for parameter in phase.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(found, foreach=True)
    finite = norm < math.inf  # False for NaN. Unlike isfinite, it is one kernel.
    # The gradients contain the loss scale s, and so does their norm n. With a clip of c, dividing by s removes the
    # scale, and dividing by n / c removes it and clips; the larger divisor is the right one. If n is NaN, so is the
    # divisor, but found_inf keeps it from the weights.
    limit = norm / state.gradient_clip if state.gradient_clip else torch.zeros_like(norm)
    # Both stay on the device: an `if norm.isfinite()` would wait for it in every step. The fused kernels read them.
    optimizer.grad_scale = limit.clamp(min=state.loss_scale(phase.name)).float()
    optimizer.found_inf = (~finite).float()
    # The rate is a function of the step, set anew each time, so that resuming needs no scheduler.
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if any(weight.grad is not None and weight not in optimizer.state for weight in phase.parameters()):
        allocate_optimizer_state(phase)  # In advance, as a step that runs out of memory half way cannot be repeated.
    return norm, finite


def allocate_optimizer_state(phase: Phase) -> None:
    """Have the optimizer allocate its state for the parameters with gradients, without changing a weight.

    When memory runs out, unused memory is released and it is retried.
    """
    # torch allocates the averages of a parameter when it first steps. A step without effect does it here, where it can
    # still be repeated.
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
    # All values are tensors on the device and sums over the whole batch, which do not depend on the split.
    scalars = {f"loss/{phase.name}/{name}": value for name, value in sums.losses.items()}
    scalars |= {f"statistics/{phase.name}/{name}": value for name, value in sums.statistics.items()}
    scalars[f"gradient_norm/{phase.name}"] = norm / scale
    # In fp16 a non-finite gradient is an error only if the loss scale cannot be lowered any further.
    scalars[f"nonfinite/{phase.name}"] = (~finite & (scale <= 1)).float()
    state.nonfinite.latest[phase.name] = scalars[f"nonfinite/{phase.name}"]
    # The scale changes after the step that used it. It halves after a non-finite gradient, and doubles after many
    # finite ones, on the device, without the host knowing.
    if state.scales_losses:
        state.loss_scales[phase.name].adjust(finite)
    return scalars
