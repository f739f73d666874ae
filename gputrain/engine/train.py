"""How gputrain trains: read this page first.

A model brings a Recipe (recipe.py): groups of phases, one phase for each optimizer. `update()` makes one optimizer step
of every phase on one batch, in as many micro-batches as memory requires; `train()` repeats it, and logs, samples,
evaluates, saves and stops between the steps (between_steps.py).

The result of a step does not depend on how its batch was split:
- a term is a sum over its items divided by the count of the whole batch, so the parts add up to the mean;
- `Recipe.prepare` draws the noise of a step for the whole batch from (seed, step), and `split` divides it;
- several ranks, one for each GPU, compute parts of the same batch, and their sums are added up (distributed.py);
- where shapes are fixed, a CUDA graph of the same kernels takes the place of `gradients()`, or of what it does with a
  part of the loss that has fixed shapes (graphs.py);
- what a loss knows of the whole batch (an adaptive weight, a moving average) comes from the step before: a loss yields
  statistics without gradient, and `Phase.after_step` receives their sums over the batch.
"""

import functools
import logging
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from gputrain.engine.between_steps import BetweenSteps
from gputrain.engine.history import recorded
from gputrain.engine.memory_check import MemoryCheck
from gputrain.engine.metrics import Metrics
from gputrain.engine.preflight import warn_of_surprises
from gputrain.engine.profiler import profiling
from gputrain.engine.recipe import (
    Batch,
    BatchStat,
    ChainGradients,
    FixedShapes,
    Phase,
    PhaseSums,
    Recipe,
    Scalars,
    StepGroup,
    Together,
    Yielded,
    add_value,
)
from gputrain.engine.run_dir import Run
from gputrain.engine.saving import write_plan
from gputrain.engine.schedule import StepSchedule
from gputrain.engine.state import TrainState
from gputrain.errors import UserError, first_line
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import (
    Runtime,
    compiler_failure,
    is_out_of_memory,
    random_state,
    release_memory,
    set_random_state,
)

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    open_batches: Callable[[int, int], Generator[Any, None, None]],
    steps: StepSchedule,
    run: Run,
    runtime: Runtime,
    console: Console,
) -> None:
    """Train to the end of the schedule. `open_batches(first, last)` yields the batches of those steps, in order.

    Raises Stopped, with everything saved, when a signal asks for it.
    """
    state = TrainState.begin(recipe, steps.schedule, runtime, run)
    check = MemoryCheck(state, run, steps.start.step + 1)
    write_plan(state, run)
    warn_of_surprises(state, run, steps)
    state.progress = steps.start
    first, end = steps.start.step, steps.stop_step
    if run.saving.ends_early(steps.start):
        log.info("nothing is left to do: the run has ended early; a higher --early-stopping-patience goes on")
        return
    if first >= end and not (steps.start.evaluation_due and run.saving.evaluates):
        beyond = "; a higher --max-steps, or none, goes on" if end < steps.last_step else ""
        log.info("nothing is left to do: the run has made its %d steps%s", end, beyond)
        return
    with (
        recorded(run, steps, state),
        Metrics(
            run.folder, console, runtime, unit=recipe.unit, first_step=first, last_step=end, group=run.group
        ) as metrics,
        profiling(run.folder / "profile" if run.saving.profile else None, runtime.device) as stepped,
        Monitor(runtime.device) as monitor,
        run.stop,
        closing(open_batches(first, max(first, end))) as batches,
    ):
        between = BetweenSteps(state, run, steps, metrics, monitor)
        between.begin()
        with between.saved_whatever_comes():
            for step in range(first, end):
                if between.ends_early:
                    break
                with run.stop.ends_waiting():
                    loaded = metrics.next(batches)
                if step == first:
                    dry_run_later_peak(state, loaded, step, check)
                with check.watching(step):
                    batch = prepare(recipe, loaded, step)
                    state.group.reseed(steps.schedule.seed, step)
                    scalars = update(state, batch, step, steps.learning_rate(step))
                recipe.average(step)
                state.progress = steps.progress_at(step + 1, state.progress)
                state.is_consistent = True
                if step == first:
                    run.has_started()
                metrics.add(scalars, recipe.size(batch), recipe.flops(batch, step))
                stepped()
                between.after_step()


def update(state: TrainState, batch: Batch, step: int, learning_rate: float) -> Scalars:
    """Make one optimizer step of every phase. Returns scalars by name, on the device."""
    scalars: Scalars = {}
    batch = state.graphs.placed(batch)
    for group in state.recipe.step_groups:
        sums = accumulate(state, group, batch, step)
        add_up_over_ranks(state, group, sums)
        for phase in group.phases:
            if not sums[phase.name].losses:  # The phase starts at a later step.
                continue
            norm, finite = prepare_optimizer(state, phase, learning_rate * phase.lr_scale)
            state.is_consistent = False
            phase.optimizer.step()
            phase.optimizer.zero_grad(set_to_none=True)
            state.shards.exchange_weights(phase)
            phase.after_step(sums[phase.name].statistics, finite)
            scalars |= finish_step(state, phase, sums[phase.name], norm, finite)
    return scalars


def add_up_over_ranks(state: TrainState, group: StepGroup, sums: dict[str, PhaseSums]) -> None:
    """Replace the gradients, losses and statistics of this rank's part of the batch by those of the whole batch."""
    gradients = [p.grad for phase in group.phases for p in phase.parameters() if p.grad is not None]
    state.group.add_up(gradients, [named for one in sums.values() for named in (one.losses, one.statistics)])


def prepare_optimizer(state: TrainState, phase: Phase, learning_rate: float) -> tuple[Tensor, Tensor]:
    """Have the optimizer clip its gradients, and skip the step if they are not finite.

    Returns the norm of the gradients, which contains the loss scale, and whether it is finite.

    The fused optimizer divides gradients by grad_scale and skips the step where found_inf is set. Unscaling, clipping
    and the guard against non-finite gradients therefore cost neither a pass over the gradients nor a device sync.
    """
    optimizer: Any = phase.optimizer
    gradients = [p.grad for p in phase.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    finite = norm < math.inf  # False for NaN. Unlike isfinite, it is one kernel.
    limit = norm / state.gradient_clip if state.gradient_clip else torch.zeros_like(norm)
    optimizer.grad_scale = limit.clamp(min=state.loss_scale(phase.name)).float()
    optimizer.found_inf = (~finite).float()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    state.shards.keep_own_gradients(phase)
    if any(p.grad is not None and p not in optimizer.state for p in phase.parameters()):
        allocate_optimizer_state(phase)
    return norm, finite


def finish_step(state: TrainState, phase: Phase, sums: PhaseSums, norm: Tensor, finite: Tensor) -> Scalars:
    """Adjust the loss scale, and return the scalars of a phase's step by name."""
    scale = state.loss_scale(phase.name)
    scalars = {f"loss/{phase.name}/{name}": value for name, value in sums.losses.items()}
    scalars |= {f"statistics/{phase.name}/{name}": value for name, value in sums.statistics.items()}
    scalars[f"gradient_norm/{phase.name}"] = norm / scale
    # In fp16 a non-finite gradient is an error only if the loss scale cannot be lowered any further.
    scalars[f"nonfinite/{phase.name}"] = (~finite & (scale <= 1)).float()
    state.nonfinite[phase.name] = scalars[f"nonfinite/{phase.name}"]
    if state.scales_losses:
        state.loss_scales[phase.name].adjust(finite)
    return scalars


def accumulate(state: TrainState, group: StepGroup, batch: Batch, step: int) -> dict[str, PhaseSums]:
    """Accumulate the gradients of the whole batch over its micro-batches. Returns the sums of each phase by name.

    When memory runs out, nothing has stepped yet: the gradients are dropped and the same items are tried in smaller
    parts, or first with the memory of the CUDA graphs. When the compiler fails, they are tried without it. Raises
    UserError when a single item does not fit.
    """
    recipe, device, name = state.recipe, state.runtime.device, group.name
    items = recipe.size(batch)
    random = random_state(device)
    while True:
        micro_batch = min(items, state.micro_batch[name])
        parts = math.ceil(items / micro_batch)
        try:
            compute = functools.partial(split_gradients, state, group, batch, parts, step)
            return state.graphs.gradients(group, batch, parts, step, compute)
        except Exception as error:
            failure, cause = compiler_failure(error), first_line(error)
            if is_out_of_memory(error):
                failure = ""
            elif not failure:
                set_random_state(random, device)
                raise
        # This is outside the except block, because the traceback keeps the tensors of the failed part alive.
        gave_way = state.graphs.gave_way()
        if micro_batch == 1 and not failure and not gave_way:
            raise UserError(
                f"out of memory in the {name}'s step with a single item ({device}): {cause}",
                hint="a smaller picture or clip, --gradient-checkpointing, a smaller preset, or a larger GPU",
            )
        drop_gradients(group)
        release_memory()
        set_random_state(random, device)
        if failure:
            state.runtime.stop_compiling(failure)
        if failure or gave_way:
            continue
        state.micro_batch[name] = micro_batch  # The planned size may exceed the number of items.
        state.shrink(name, "out of memory", step)


def gradients(state: TrainState, group: StepGroup, parts: Sequence[Batch], step: int) -> dict[str, PhaseSums]:
    """Add the gradients of a group's losses over `parts` to its parameters. Returns the sums of each phase by name.

    Every term is back-propagated the moment it is yielded, so terms without a common graph are never in memory
    together.
    """
    unfreeze_only(group, state.recipe)
    sums = {phase.name: PhaseSums() for phase in group.phases}
    # One autocast around all parts keeps its 16-bit copies of the weights from part to part.
    with group.step_context(), state.runtime.autocast():
        for part in parts:
            back_propagate(state, group, group.loss(part, step), sums)
    return sums


def back_propagate(state: TrainState, group: StepGroup, terms: Iterable[Yielded], sums: dict[str, PhaseSums]) -> None:
    """Back-propagate each term before the next is computed, and add its value to the sums of its phase."""
    first, device = group.name, state.runtime.device.type
    partly_frozen = {phase.name for phase in group.phases if phase.frozen}
    for term in terms:
        with torch.autocast(device, enabled=False):
            if isinstance(term, ChainGradients):  # These gradients contain the loss scale already.
                torch.autograd.backward(term.tensors, term.gradients)
            elif isinstance(term, FixedShapes):
                for name, added in back_propagate_fixed(state, group, term).items():
                    sums[name].add(added)
            elif isinstance(term, BatchStat):
                add_value(sums[term.phase or first].statistics, term.name, term.value.detach())
            else:
                together = term.terms if isinstance(term, Together) else (term,)
                values = []
                for one in together:
                    phase = one.phase or first
                    factor = one.weight * state.loss_scale(phase)
                    value = one.value if isinstance(factor, float) and factor == 1 else one.value * factor
                    if value.requires_grad or phase not in partly_frozen:  # All that it depends on may be frozen.
                        values.append(value)
                    add_value(sums[phase].losses, one.name, one.value.detach())
                if values:
                    inputs = [leaf for one in together for leaf in one.inputs] or None
                    torch.autograd.backward(values, inputs=inputs, retain_graph=together[-1].keeps_graph)


def back_propagate_fixed(state: TrainState, group: StepGroup, part: FixedShapes) -> dict[str, PhaseSums]:
    """Back-propagate a part of fixed shapes, kernel by kernel or as a CUDA graph, and the gradients of its inputs.
    Returns its sums."""

    def compute(copies: Sequence[Tensor]) -> dict[str, PhaseSums]:
        sums = {phase.name: PhaseSums() for phase in group.phases}
        with part.context(), state.runtime.autocast():
            back_propagate(state, group, part.loss(*copies, *part.constants), sums)
        return sums

    sums, gradients = state.graphs.gradients_of_part(group, part, compute)
    reached = [(tensor, found) for tensor, found in zip(part.inputs, gradients, strict=True) if found is not None]
    if reached:
        torch.autograd.backward([tensor for tensor, _ in reached], [found for _, found in reached])
    return sums


def split_gradients(state: TrainState, group: StepGroup, batch: Batch, parts: int, step: int) -> dict[str, PhaseSums]:
    """Add the gradients of a batch in so many parts, which a graph splits itself, as their tensors are made then."""
    return gradients(state, group, state.recipe.split(batch, parts), step)


def unfreeze_only(group: StepGroup, recipe: Recipe) -> None:
    """Have the modules of this group require gradients, but for frozen parameters, and no others."""
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


def prepare(recipe: Recipe, loaded: Any, step: int) -> Batch:
    """Return the batch of a step on the device. When memory runs out, unused memory is released and it is retried."""
    try:
        return recipe.prepare(loaded, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return recipe.prepare(loaded, step)


def dry_run_later_peak(state: TrainState, loaded: Any, first: int, check: MemoryCheck) -> None:
    """Dry-run the step that takes the most memory if it comes later than the first one. On a GPU it runs again, to be
    measured without what only a first pass takes."""
    step = state.recipe.peak_memory_step(first)
    if step == first:
        return
    dry_run(state, loaded, step)
    if state.runtime.device.type == "cuda":
        check.step = step
        with check.watching(step):
            dry_run(state, loaded, step)


def dry_run(state: TrainState, loaded: Any, step: int) -> None:
    """Compute the gradients of a later step that takes more memory, without stepping, so that what does not fit shows
    now. The optimizers allocate their state and change no weight."""
    recipe, device = state.recipe, state.runtime.device
    random = random_state(device)
    batch = prepare(recipe, loaded, step)
    for group in recipe.step_groups:
        accumulate(state, group, batch, step)
        for phase in group.phases:
            state.shards.keep_own_gradients(phase)
            allocate_optimizer_state(phase)
        drop_gradients(group)
    set_random_state(random, device)


def allocate_optimizer_state(phase: Phase) -> None:
    """Have the optimizer allocate its state for the parameters with gradients, without changing a weight.

    When memory runs out, unused memory is released and it is retried.
    """
    known = set(phase.optimizer.state)
    try:
        _step_without_effect(phase.optimizer)
        return
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    for parameter in set(phase.optimizer.state) - known:  # Their state may be incomplete.
        del phase.optimizer.state[parameter]
    release_memory()
    _step_without_effect(phase.optimizer)


def _step_without_effect(optimizer: Any) -> None:
    """Step as after a non-finite gradient: no weight, no average and no count of steps changes."""
    found_inf = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = found_inf
