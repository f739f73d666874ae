"""Gradients that are not finite: NaN or infinite, by a high learning rate, a bad batch, or fp16.

1. It never reaches the weights. `step.prepare_optimizer` sets the optimizer's `found_inf` on the device, and the fused
   step changes neither weights nor the averages of the gradients; the host does not wait to know it. Statistics of the
   batch leave the step out, too (`Phase.after_step` gets `finite`); the EMA averages the unchanged weights once more.
2. In fp16 the loss scale is halved (`optim.LossScale`). That is usual and no error, unless the scale is at its lowest;
   so the scalar `nonfinite/PHASE` of a step is 1 only if the scale could not help.
3. A save that is due after such a step is postponed to the next finite one (`saving.Saver`): a doubtful state must not
   replace a good checkpoint. A save that a stop requires is made, as the weights are those of the step before.
4. The host reads the scalars with the line of metrics, every `log_every_steps` steps. After NONFINITE_LIMIT non-finite
   steps of a phase in a row, weights and optimizers go back to the newest checkpoint that was followed by GOOD_AFTER
   finite steps, or to the oldest there is. The data goes on from the present position, so that the same batches don't
   cause the same failure.
5. The run ends with an error if there is no checkpoint, or if it has gone back ROLLBACK_LIMIT times already.
   STEADY_STEPS finite steps in a row make it forget earlier rollbacks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gputrain.engine.checkpoint import Content, intact_checkpoints
from gputrain.engine.run_folder import Run
from gputrain.errors import UserError

NONFINITE_LIMIT = 3  # Non-finite steps in a row after which the run returns to a checkpoint.
ROLLBACK_LIMIT = 3  # Rollbacks after which the run gives up.
GOOD_AFTER = 10  # Finite steps that must follow a checkpoint before a rollback prefers it.
STEADY_STEPS = 1000  # Finite steps in a row after which earlier rollbacks no longer count.


class Rollback(NamedTuple):
    """A decision to go back to a checkpoint."""

    cause: str
    last_finite: int  # The last step whose gradients were all finite.
    number: int  # How many rollbacks there have been, with this one.

    def checkpoint(self, run: Run, kind: str) -> Content:
        """Returns the newest checkpoint that was followed by enough finite steps, or else the oldest one, from the
        leader. Raises UserError if there is none, or if going back did not help before."""
        found, problem = None, "going back did not help"
        if self.number <= ROLLBACK_LIMIT:
            found = run.group.from_leader(lambda: self._good_checkpoint(run, kind))
            problem = "there is no checkpoint to go back to"
        if found is None:
            raise UserError(
                f"{self.cause}, and {problem}",
                hint="lower --learning-rate, lengthen --warmup-steps, or train in fp32 with --precision tf32",
            )
        return found

    def _good_checkpoint(self, run: Run, kind: str) -> Content | None:
        oldest: Content | None = None
        for content in intact_checkpoints(run.folder, kind):
            if oldest is None or content["progress"]["step"] < oldest["progress"]["step"]:
                oldest = content
            if oldest["progress"]["step"] + GOOD_AFTER <= self.last_finite:
                break
        return oldest


@dataclass
class NonfiniteSteps:
    """Counts of the steps with non-finite gradients."""

    latest: dict[str, Tensor] = field(default_factory=dict)  # By phase, on the device: 1 if the last step was one.
    in_a_row: dict[str, int] = field(default_factory=dict)  # By phase; part of every checkpoint.
    finite_in_a_row: int = 0  # Steps in a row in which the gradients of every phase were finite.
    rollbacks: int = 0

    @property
    def postpones_saves(self) -> bool:
        """True if the last step had a non-finite gradient. The host waits for the device here."""
        return any(bool(flag) for flag in self.latest.values())

    def watch(self, rows: Sequence[dict[str, float]], done: int) -> Rollback | None:
        """Counts the last steps, up to step number `done`, with these scalars. Returns whether the run must go back;
        the steps after the one that shows it are not counted."""
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            if cause := self._count(row):
                self.rollbacks += 1
                return Rollback(cause, step - max(self.in_a_row.values()), self.rollbacks)
            self.finite_in_a_row = 0 if any(self.in_a_row.values()) else self.finite_in_a_row + 1
            if self.finite_in_a_row >= STEADY_STEPS:
                self.rollbacks = 0
        return None

    def forget(self) -> None:
        """Counts anew, after a checkpoint was loaded."""
        self.latest.clear()
        self.in_a_row.clear()
        self.finite_in_a_row = 0

    def _count(self, row: dict[str, float]) -> str:
        """Returns a description of the phase that became unstable with this step, or an empty string."""
        for name, value in row.items():
            if name.startswith("nonfinite/"):
                phase = name.removeprefix("nonfinite/")
                self.in_a_row[phase] = streak = self.in_a_row.get(phase, 0) + 1 if value else 0
                if streak >= NONFINITE_LIMIT:
                    prefix = f"loss/{phase}/"
                    terms = [n.removeprefix(prefix) for n in row if n.startswith(prefix) and not math.isfinite(row[n])]
                    what = f"its {', '.join(terms)} too" if terms else "though its losses are"
                    return f"the gradient of the {phase} was not finite in {streak} steps in a row ({what})"
        return ""
