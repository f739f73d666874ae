"""The state of a training: what `update` changes and a checkpoint holds."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gputrain.engine.checkpoint import Content, load_modules
from gputrain.engine.distributed import RankGroup
from gputrain.engine.nonfinite import NonfiniteSteps
from gputrain.engine.optim import LossScale
from gputrain.engine.recipe import Batch, Recipe, StepGroup, Sums, phases_of
from gputrain.engine.run_folder import PLAN, PlanFile, Run
from gputrain.engine.schedule import RunProgress, Schedule
from gputrain.errors import UserError
from gputrain.hw.runtime import Runtime, random_state, set_random_state

log = logging.getLogger(__name__)


# Adds the gradients of a group's losses over a batch, in so many parts, to its parameters, as `gradients` in step.py.
GradientsFunction = Callable[["TrainState", StepGroup, Batch, int, int], Sums]


@dataclass
class TrainState:
    """The state of a recipe's training."""

    recipe: Recipe
    runtime: Runtime
    gradient_clip: float  # Largest norm of a phase's gradient; 0 is off.
    micro_batch: dict[str, int]  # Micro-batch size by the name of the step group; halved when memory runs out.
    loss_scales: dict[str, LossScale]  # By phase; they have an effect in fp16 only.
    rank_group: RankGroup = field(default_factory=RankGroup)  # The ranks that make each step together.
    gradients: GradientsFunction | None = None  # Takes the place of `gradients` in step.py, with the same result.
    # Frees memory that is kept to save time, when it has run out. Returns whether there was any.
    free_memory: Callable[[], bool] = lambda: False
    progress: RunProgress = field(default_factory=RunProgress)  # Where the weights stand.
    is_consistent: bool = True  # False while some phases of a step have changed their weights and others have not.
    nonfinite: NonfiniteSteps = field(default_factory=NonfiniteSteps)
    events: list[dict[str, Any]] = field(default_factory=list)  # Changes of the plan during the run.

    @classmethod
    def begin(cls, recipe: Recipe, schedule: Schedule, runtime: Runtime, run: Run) -> "TrainState":
        """Return the state at the start of a training, or at the checkpoint that the run was opened with."""
        groups = [group.name for group in recipe.step_groups]
        state = cls.for_measurement(recipe, runtime)
        state.gradient_clip = schedule.gradient_clip
        state.rank_group = run.group
        state.micro_batch = _micro_batch(groups, schedule, runtime, run)
        if run.resumed:
            run.warn_of_changes()
            state.restore(run.resumed)
            state.nonfinite.in_a_row = dict(run.resumed["nonfinite_in_a_row"])
        return state

    @classmethod
    def for_measurement(cls, recipe: Recipe, runtime: Runtime) -> "TrainState":
        """Return a state without a run folder or a schedule, whose gradients are not clipped."""
        scales = {phase.name: LossScale().to(runtime.device) for phase in phases_of(recipe)}
        return cls(recipe, runtime, 0.0, {}, scales)

    @property
    def scales_losses(self) -> bool:
        """True if losses are scaled so that small gradients do not underflow, which only fp16 needs."""
        return self.runtime.dtype == torch.float16

    def loss_scale(self, phase: str) -> Tensor | float:
        """Returns the factor by which the losses of a phase are multiplied and its gradients divided."""
        return self.loss_scales[phase].scale if self.scales_losses else 1.0

    def snapshot(self) -> Content:
        """Returns everything that an exact resume needs, except for the progress."""
        return {
            "kind": self.recipe.kind,
            "modules": {name: module.state_dict() for name, module in self.recipe.modules.items()},
            "optimizers": {phase.name: phase.optimizer.state_dict() for phase in phases_of(self.recipe)},
            "loss_scales": {name: scale.state_dict() for name, scale in self.loss_scales.items() if self.scales_losses},
            "random": random_state(self.runtime.device),
        }

    def restore(self, content: Content) -> None:
        """Load a snapshot. Raises UserError if it belongs to another model."""
        load_modules(self.recipe.modules, content["modules"])
        for phase in phases_of(self.recipe):
            load_optimizer(phase.name, phase.optimizer, content["optimizers"])
            if self.scales_losses and phase.name in content["loss_scales"]:  # Only a run in fp16 has some.
                self.loss_scales[phase.name].load_state_dict(content["loss_scales"][phase.name])
        set_random_state(content["random"], self.runtime.device)

    def shrink(self, group: str, cause: str, step: int) -> None:
        """Halve the micro-batch of a step group. The result of its steps does not change."""
        before = self.micro_batch[group]
        self.micro_batch[group] = after = math.ceil(before / 2)
        self.events.append({"step": step, "phase": group, "cause": cause, "from": before, "to": after})
        log.warning(
            "%s: the %s continues with micro-batches of %d instead of %d; the result of the step does not change",
            cause,
            group,
            after,
            before,
            extra={"each_rank": True},
        )


def _micro_batch(phases: list[str], schedule: Schedule, runtime: Runtime, run: Run) -> dict[str, int]:
    """Returns micro-batch sizes by step group: those of the plan, or the smaller ones that this run already needed on
    this device."""
    size = schedule.micro_batch_size or schedule.batch_size
    known, now = PlanFile.read(run.folder / PLAN) if run.resumed else None, runtime.plan
    if known is None or (known.plan.device, known.plan.micro_batch_size) != (now.device, now.micro_batch_size):
        return dict.fromkeys(phases, size)
    return {phase: min(size, known.micro_batch.get(phase, size)) for phase in phases}


def load_optimizer(name: str, optimizer: torch.optim.Optimizer, states: dict[str, Content]) -> None:
    """Load an optimizer's state; learning rates and decays come from the present configuration, not from the
    checkpoint.

    If the algorithm has changed, the optimizer starts without state, with a warning. Raises UserError if there is no
    state, or if it belongs to other parameters.
    """
    if name not in states:
        raise UserError(
            f"the checkpoint holds no optimizer of the {name}", hint="resume with the losses it was trained with"
        )
    saved, groups = states[name], optimizer.state_dict()["param_groups"]
    before, now = _algorithm(saved["param_groups"]), _algorithm(groups)
    if before != now:
        log.warning(
            "the %s was trained with %s and continues with %s: its weights are kept, and the gradient averages "
            "of %s are lost; the first hundred steps may be unstable",
            name,
            before,
            now,
            before,
        )
        return
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group["params"]) for group in groups]:
        raise UserError(f"the checkpoint's optimizer of the {name} belongs to other parameters")
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    # Fused and foreach optimizers pair the elements of a parameter and its state by their positions in memory, and
    # the saved state has the memory format (channels_last or not) of the run that saved it.
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)


def _algorithm(groups: Sequence[Content]) -> str:
    return "Muon" if any("orthogonal" in group for group in groups) else "AdamW"
