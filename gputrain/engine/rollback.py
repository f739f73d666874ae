"""Return to an earlier checkpoint when gradients stay non-finite."""

import logging
import math

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import Content
from gputrain.engine.run_dir import Run
from gputrain.engine.saving import finish_saving
from gputrain.engine.state import TrainState
from gputrain.errors import UserError

log = logging.getLogger(__name__)

NONFINITE_LIMIT = 3  # Non-finite steps in a row after which the run returns to a checkpoint.
ROLLBACK_LIMIT = 3  # Rollbacks after which the run gives up.
GOOD_AFTER = 10  # Finite steps that must follow a checkpoint before a rollback prefers it.
STEADY_STEPS = 1000  # Finite steps in a row after which earlier rollbacks no longer count.


def go_back_if_unstable(state: TrainState, rows: list[dict[str, float]], run: Run, done: int) -> None:
    """Load a good checkpoint when the gradients of a phase were not finite several times in a row. `rows` are the
    scalars of the last steps, up to step number `done`.

    The data continues from the present position, so that the same batches don't cause the same failure. Raises
    UserError if there is no checkpoint, or if earlier rollbacks did not help.
    """
    for step, row in enumerate(rows, start=done - len(rows) + 1):
        cause = _instability(state, row)
        if cause:
            _go_back(state, cause, step - max(state.nonfinite_in_a_row.values()), run)
            return
        state.finite_in_a_row = 0 if any(state.nonfinite_in_a_row.values()) else state.finite_in_a_row + 1
        if state.finite_in_a_row >= STEADY_STEPS:
            state.rollbacks = 0


def _go_back(state: TrainState, cause: str, last_finite: int, run: Run) -> None:
    """Load the newest checkpoint that was followed by enough finite steps, or else the oldest one."""
    state.rollbacks += 1
    finish_saving(state, run)
    found: Content | None = None
    problem = "there is no checkpoint to go back to"
    if state.rollbacks > ROLLBACK_LIMIT:
        problem = "going back did not help"
    else:
        found = run.group.of_leader(lambda: _good_checkpoint(run, state.recipe.kind, last_finite))
    if found is None:
        raise UserError(
            f"{cause}, and {problem}",
            hint="lower --learning-rate, lengthen --warmup-steps, or train in fp32 with --no-mixed-precision",
        )
    state.restore(found)
    state.nonfinite.clear()
    state.nonfinite_in_a_row.clear()
    state.finite_in_a_row = 0
    log.warning("%s; weights and optimizers are back at step %d", cause, found["progress"]["step"])


def _good_checkpoint(run: Run, kind: str, last_finite: int) -> Content | None:
    """Return the newest checkpoint that was followed by enough finite steps, or else the oldest one."""
    found: Content | None = None
    for content in checkpoint.readable(run.folder, kind):
        if found is None or content["progress"]["step"] < found["progress"]["step"]:
            found = content
        if found["progress"]["step"] + GOOD_AFTER <= last_finite:
            break
    return found


def _instability(state: TrainState, row: dict[str, float]) -> str:
    """Returns a description of the phase that became unstable with this step, or an empty string."""
    for name, value in row.items():
        if name.startswith("nonfinite/"):
            phase = name.removeprefix("nonfinite/")
            streak = state.nonfinite_in_a_row.get(phase, 0) + 1 if value else 0
            state.nonfinite_in_a_row[phase] = streak
            if streak >= NONFINITE_LIMIT:
                prefix = f"loss/{phase}/"
                terms = [n.removeprefix(prefix) for n in row if n.startswith(prefix) and not math.isfinite(row[n])]
                what = f"its {', '.join(terms)} too" if terms else "though its losses are"
                return f"the gradient of the {phase} was not finite in {streak} steps in a row ({what})"
    return ""
