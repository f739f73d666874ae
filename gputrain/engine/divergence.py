"""A warning when a loss runs away, from the scalars that the metrics have read anyway."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

HISTORY = 50  # steps that the median is of: short enough for a loss that rises slowly by its nature, as KL does
LEAST_HISTORY = 10
FACTOR = 5.0  # times its median that a loss may be
IN_A_ROW = 3  # steps: one odd batch is none
CALM = 20  # steps within bounds, after which a loss is told of again


@dataclass
class LossWatch:
    """Knows the last values of every loss, and warns once when one leaves them far behind.

    The next warning for it comes only after CALM steps within bounds: as low as before, or where it has been for so
    long that this has become its median.
    """

    history: dict[str, deque[float]] = field(default_factory=dict)
    above: dict[str, int] = field(default_factory=dict)  # steps in a row
    told_at: dict[str, int] = field(default_factory=dict)  # the last step out of bounds of what has been told

    def watch(self, rows: Sequence[dict[str, float]], done: int) -> None:
        """Look at the scalars of the steps up to the one that made `done`."""
        for step, row in enumerate(rows, start=done - len(rows) + 1):
            for name, value in row.items():
                if name.startswith("loss/") and math.isfinite(value):  # what is not finite has a guard of its own
                    self._look(name.removeprefix("loss/"), value, step)

    def _look(self, name: str, value: float, step: int) -> None:
        before = self.history.setdefault(name, deque(maxlen=HISTORY))
        if len(before) >= LEAST_HISTORY:
            median = statistics.median(map(abs, before))
            self.above[name] = self.above.get(name, 0) + 1 if abs(value) > FACTOR * median > 0 else 0
            is_new = step - self.told_at.get(name, -CALM) >= CALM
            if self.above[name] >= IN_A_ROW:
                self.told_at[name] = step
            if self.above[name] == IN_A_ROW and is_new:
                log.warning(
                    "the loss %s is %.4g at step %d, %.0f times its median of the last %d steps (%.4g): the training "
                    "may diverge; if it stays there, go back to an earlier checkpoint with a lower --learning-rate",
                    name, value, step, abs(value) / median, len(before), median,
                )  # fmt: skip
        before.append(value)
