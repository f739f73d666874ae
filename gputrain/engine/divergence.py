"""A warning when a loss diverges, from the scalars that the metrics have read anyway."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

HISTORY = 50  # Number of steps of the median; short enough for losses that rise slowly by nature, such as KL.
LEAST_HISTORY = 10
FACTOR = 5.0  # A loss is out of bounds above this multiple of its median.
IN_A_ROW = 3  # Steps out of bounds before a warning, so that a single unusual batch causes none.
CALM = 20  # Steps within bounds after which a loss can cause another warning.


@dataclass
class LossWatch:
    """Keeps the last values of every loss, and warns once when a loss rises far above them.

    The next warning for the same loss requires CALM steps within bounds: either as low as before, or at a level that
    has lasted so long that it has become the median.
    """

    history: dict[str, deque[float]] = field(default_factory=dict)
    above: dict[str, int] = field(default_factory=dict)  # Consecutive steps out of bounds.
    warned_at: dict[str, int] = field(default_factory=dict)  # Last step out of bounds after a warning.

    def watch(self, rows: Sequence[dict[str, float]], done: int) -> None:
        """Check the scalars of the last steps, up to step number `done`."""
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            for name, value in row.items():
                if name.startswith("loss/") and math.isfinite(value):  # Non-finite values have their own guard.
                    self._look(name.removeprefix("loss/"), value, step)

    def _look(self, name: str, value: float, step: int) -> None:
        before = self.history.setdefault(name, deque(maxlen=HISTORY))
        if len(before) >= LEAST_HISTORY:
            median = statistics.median(map(abs, before))
            self.above[name] = self.above.get(name, 0) + 1 if abs(value) > FACTOR * median > 0 else 0
            is_new = step - self.warned_at.get(name, -CALM) >= CALM
            if self.above[name] >= IN_A_ROW:
                self.warned_at[name] = step
            if self.above[name] == IN_A_ROW and is_new:
                log.warning(
                    "the loss %s is %.4g at step %d, %.0f times its median of the last %d steps (%.4g): the training "
                    "may diverge; if it stays there, go back to an earlier checkpoint with a lower --learning-rate",
                    name, value, step, abs(value) / median, len(before), median,
                )  # fmt: skip
        before.append(value)
