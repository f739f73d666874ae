"""How gputrain trains: read this page first.

A model brings a Recipe: one Phase an optimizer (a generator, a discriminator), whose loss yields terms. `update()`
makes one step of every phase on one batch of the user's, in as many micro-batches as the memory asks for; `train()`
repeats it, and logs, samples, evaluates, saves and stops between the steps. Phases take their turns, or gather their
gradients in one turn where they have passes through a network in common.

The result of a step does not depend on how its batch was split:
- a term is a sum over its items divided by the count of the whole batch, so the shares of the parts add up to the mean;
- `Recipe.prepare` draws the noise of a step for the whole batch, from (seed, step) alone, and `split` divides it;
- what a loss knows of the batch as a whole (an adaptive weight, a moving average) comes from the step before: a phase
  yields statistics as terms without gradient, and `settle` takes their sums over the batch once the step is made.
"""

import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn

from gputrain.engine.between_steps import BetweenSteps
from gputrain.engine.metrics import Metrics, Report
from gputrain.engine.profiler import profiling
from gputrain.engine.run_dir import Run, TrainState
from gputrain.engine.schedule import StepSchedule
from gputrain.errors import UserError
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import (
    Runtime,
    compiler_failure,
    is_out_of_memory,
    random_state,
    release_memory,
    set_random_state,
)

Batch = Any  # a recipe's own class; only its recipe looks inside
Scalars = dict[str, Tensor]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Term:
    """A part's share of a loss of the whole batch; back-propagated, times `weight`. The metrics show it unweighted."""

    name: str
    value: Tensor
    weight: float | Tensor = 1.0
    of: str = ""  # the phase of the turn that it belongs to; without a word the first
    inputs: Sequence[Tensor] = ()  # leaves that the gradient is for; without a word all that ask for one
    keeps_graph: bool = False  # for a term to come


@dataclass(frozen=True)
class BatchStat:
    """A part's share of a figure of the whole batch, without a graph. Its sum over the parts goes to `settle`."""

    name: str
    value: Tensor
    of: str = ""  # the phase of the turn that it belongs to


@dataclass(frozen=True)
class ChainGradients:
    """Gradients that earlier terms gathered on detached copies of `tensors`, to be carried on through their graph."""

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]


Yielded = Term | BatchStat | ChainGradients


@dataclass(frozen=True)
class Phase:
    """What one optimizer does in a step: `modules` learn and everything else is frozen while `loss` runs.

    `loss` is pure: it computes; it neither steps nor logs. A phase without one is of the turn of the phase before it,
    whose loss yields the terms of both and is run with the modules of both unfrozen.
    """

    name: str
    modules: tuple[nn.Module, ...]
    optimizer: torch.optim.Optimizer
    loss: Callable[[Batch, int], Iterator[Yielded]] | None
    settle: Callable[[Scalars, Tensor], None] = lambda statistics, finite: None  # for the next step, if all is finite
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # what all parts of a step share
    rate: float = 1.0  # of the course's learning rate

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]


class Recipe(Protocol):
    """A model to train, as the engine sees it."""

    kind: str  # "vae", "vocoder", "voice"
    unit: str  # what an item is, in the plural: "images"
    phases: list[Phase]
    modules: dict[str, nn.Module]  # what a checkpoint holds beside the optimizers

    def prepare(self, loaded: Any, step: int) -> Batch: ...  # on the device, with the noise of this step
    def size(self, batch: Batch) -> int: ...  # items in it
    def flops(self, batch: Batch, step: int) -> float: ...  # of a step on it, forward and backward; 0: unknown
    def peak_memory_step(self, step: int) -> int: ...  # the first from `step` on that takes the most memory
    def split(self, batch: Batch, parts: int) -> list[Batch]: ...  # each part knows the counts of the whole
    def average(self, step: int) -> None: ...  # moving averages, once every phase has stepped
    def sample(self) -> Report: ...  # what a person would look at
    def evaluate(self) -> Report: ...  # held-out figures; "score" is what the best checkpoint has most of


StepGroup = list[
    Phase
]  # phases whose gradients are gathered together: one with a loss, and those without that follow it


def step_groups(phases: Sequence[Phase]) -> list[StepGroup]:
    found: list[StepGroup] = []
    for phase in phases:
        if phase.loss:
            found.append([phase])
        else:
            found[-1].append(phase)
    return found


@dataclass
class PhaseSums:
    """What a phase's loss has come to, summed over the parts of the batch."""

    losses: Scalars = field(default_factory=dict)
    statistics: Scalars = field(default_factory=dict)


def update(state: TrainState, batch: Batch, step: int, learning_rate: float) -> Scalars:
    """Make one optimizer step of every phase. Returns scalars by name, on the device."""
    scalars: Scalars = {}
    for group in step_groups(state.recipe.phases):
        gathered = accumulate(state, group, batch, step)
        for phase in group:
            if gathered[phase.name].losses:  # else its time has not come
                scalars |= make_step(state, phase, gathered[phase.name], learning_rate)
    return scalars


def make_step(state: TrainState, phase: Phase, gathered: PhaseSums, learning_rate: float) -> Scalars:
    """Have the optimizer step with the gradients that were gathered: clipped, and only where they are finite."""
    optimizer: Any = phase.optimizer
    scale = state.loss_scale(phase.name)
    gradients = [p.grad for p in phase.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    finite = norm.isfinite()
    # The fused optimizer divides by grad_scale and makes no step where found_inf is set: unscaling, clipping and the
    # guard against non-finite gradients cost neither a pass over them nor a wait for the device.
    limit = norm / state.gradient_clip if state.gradient_clip else torch.zeros_like(norm)
    optimizer.grad_scale = limit.clamp(min=scale).float()
    optimizer.found_inf = (~finite).float()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * phase.rate
    if any(p.grad is not None and p not in optimizer.state for p in phase.parameters()):
        allocate_state(phase)
    state.whole = False
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    phase.settle(gathered.statistics, finite)
    scalars = {f"loss/{phase.name}/{name}": value for name, value in gathered.losses.items()}
    scalars |= {f"statistics/{phase.name}/{name}": value for name, value in gathered.statistics.items()}
    scalars[f"gradient_norm/{phase.name}"] = norm / scale
    scalars[f"nonfinite/{phase.name}"] = (~finite & (scale <= 1)).float()
    state.nonfinite[phase.name] = scalars[f"nonfinite/{phase.name}"]
    if state.scales_losses:
        state.loss_scales[phase.name].adjust(finite)
    return scalars


def accumulate(state: TrainState, group: StepGroup, batch: Batch, step: int) -> dict[str, PhaseSums]:
    """Gather the gradients of the whole batch, part by part. Returns what each phase's loss has come to.

    When memory runs out, nothing has stepped yet: the gradients are dropped and the same items tried in smaller parts.
    When the compiler fails, they are tried without it.
    Raises UserError when it runs out with a single item.
    """
    recipe, device, name = state.recipe, state.runtime.device, group[0].name
    items = recipe.size(batch)
    random = random_state(device)
    freeze_all_but(group, recipe)
    while True:
        micro_batch = min(items, state.micro_batch[name])
        try:
            return backward(state, group, recipe.split(batch, math.ceil(items / micro_batch)), step)
        except Exception as error:
            failure = compiler_failure(error)
            if is_out_of_memory(error):
                failure = ""
            elif not failure:
                set_random_state(random, device)
                raise
        # Outside the except block, because the traceback pins the tensors of the failed part.
        if micro_batch == 1 and not failure:
            raise UserError(
                f"out of memory in the {name}'s step with a single item ({device})",
                hint="a smaller picture or clip, --gradient-checkpointing, a smaller preset, or a larger GPU",
            )
        drop_gradients(group)
        release_memory()
        set_random_state(random, device)
        if failure:
            state.runtime.stop_compiling(failure)
            continue
        state.micro_batch[name] = micro_batch  # which may be more than there are items
        state.shrink(name, "out of memory", step)


def backward(state: TrainState, group: StepGroup, parts: list[Batch], step: int) -> dict[str, PhaseSums]:
    """Back-propagate every term the moment it is yielded, so that terms without a common graph never stand together."""
    first, device = group[0], state.runtime.device.type
    assert first.loss is not None
    gathered = {phase.name: PhaseSums() for phase in group}
    # One autocast around all parts keeps its 16-bit copies of the weights from part to part.
    with first.around(), state.runtime.autocast():
        for part in parts:
            for term in first.loss(part, step):
                with torch.autocast(device, enabled=False):
                    if isinstance(term, ChainGradients):  # its gradients carry the scale already
                        torch.autograd.backward(term.tensors, term.gradients)
                        continue
                    phase = term.of or first.name
                    if isinstance(term, BatchStat):
                        sums = gathered[phase].statistics
                    else:
                        sums = gathered[phase].losses
                        value = term.value * term.weight * state.loss_scale(phase)
                        inputs = term.inputs or None
                        torch.autograd.backward(value, inputs=inputs, retain_graph=term.keeps_graph)
                    sums[term.name] = sums.get(term.name, 0) + term.value.detach()
    return gathered


def prepare(recipe: Recipe, loaded: Any, step: int) -> Batch:
    """The batch of a step on the device. When memory runs out, what lies unused is given back and it is tried again."""
    try:
        return recipe.prepare(loaded, step)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return recipe.prepare(loaded, step)


def dry_run(state: TrainState, loaded: Any, step: int) -> None:
    """Go through a step that comes later and takes more memory, without making it: what does not fit shows now.

    The optimizers make their state, and move nothing.
    """
    recipe, device = state.recipe, state.runtime.device
    random = random_state(device)
    batch = prepare(recipe, loaded, step)
    for group in step_groups(recipe.phases):
        accumulate(state, group, batch, step)
        for phase in group:
            allocate_state(phase)
        drop_gradients(group)
    set_random_state(random, device)


def allocate_state(phase: Phase) -> None:
    """Have the optimizer allocate its state for the parameters with gradients, and move nothing.

    When memory runs out, what lies unused is given back and it is tried again.
    """
    known = set(phase.optimizer.state)
    try:
        _step_without_effect(phase.optimizer)
        return
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    for parameter in set(phase.optimizer.state) - known:  # whose state may be incomplete
        del phase.optimizer.state[parameter]
    release_memory()
    _step_without_effect(phase.optimizer)


def _step_without_effect(optimizer: Any) -> None:
    """As after a gradient that was not finite: no weight, no average and no count of steps changes."""
    found_inf = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = torch.ones((), device=optimizer.param_groups[0]["params"][0].device)
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = found_inf


def freeze_all_but(group: StepGroup, recipe: Recipe) -> None:
    for module in recipe.modules.values():
        module.requires_grad_(False)
    for phase in group:
        for module in phase.modules:
            module.requires_grad_(True)


def drop_gradients(group: StepGroup) -> None:
    for phase in group:
        phase.optimizer.zero_grad(set_to_none=True)


def train(
    recipe: Recipe,
    open_batches: Callable[[int, int], Generator[Any, None, None]],
    steps: StepSchedule,
    run: Run,
    runtime: Runtime,
    console: Console,
) -> None:
    """Train to the end of the course. `open_batches(first, last)` gives the batches of those steps, in their order.

    Raises Stopped, with everything saved, when a signal asks for it.
    """
    state = TrainState.begin(recipe, steps.schedule, runtime, run)
    state.progress = steps.start
    first, end = steps.start.step, steps.stop_step
    if first >= end:
        log.info("nothing is left to do: the run has made its %d steps", end)
        return
    with (
        Metrics(run.folder, console, runtime, unit=recipe.unit, first_step=first, last_step=end) as metrics,
        profiling(run.folder / "profile" if run.saving.profile else None, runtime.device) as stepped,
        Monitor(runtime.device) as monitor,
        run.stop,
        closing(open_batches(first, end)) as batches,
    ):
        between = BetweenSteps(state, run, steps, metrics, monitor)
        between.begin()
        with between.saved_whatever_comes():
            for step in range(first, end):
                with run.stop.ends_waiting():
                    loaded = metrics.next(batches)
                if step == first and (heaviest := recipe.peak_memory_step(step)) > step:
                    dry_run(state, loaded, heaviest)
                batch = prepare(recipe, loaded, step)
                scalars = update(state, batch, step, steps.learning_rate(step))
                recipe.average(step)
                state.progress = steps.progress_at(step + 1, state.progress.best_score)
                state.whole = True
                if step == first:
                    run.has_started()
                metrics.add(scalars, recipe.size(batch), recipe.flops(batch, step))
                stepped()
                between.after_step()
