"""Clips of different lengths: the longest to train on, and micro-batches by length. Pure functions without torch.

Lengths are in seconds, memory in GB (1e9 bytes).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gputrain.errors import UserError

OverLong = Literal["chunk", "refuse"]
Seconds = npt.NDArray[np.float64]

OUTLIER_SHARE = 0.01  # Maximum share of the clips that counts as outliers.
OUTLIER_FACTOR = 1.5  # Factor on the longest of the other clips above which outliers are cut.
BUCKETS = 6
ROUNDING = 1e-3  # Share of a limit by which a clip may be longer: a header and the decoded sound differ by as much.


def checked(lengths: Sequence[float] | Seconds) -> Seconds:
    """Returns the lengths as an array. Raises UserError if there are none, and for one that is not positive, with its
    number."""
    seconds = np.asarray(lengths, dtype=np.float64).reshape(-1)
    if not len(seconds):
        raise UserError("the dataset is empty", hint="give it at least one item")
    wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds > 0)))
    if len(wrong):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(
            f"clip {wrong[0]}{more}: a length of {seconds[wrong[0]]:g} seconds", hint="leave empty clips out"
        )
    return seconds


@dataclass(frozen=True)
class LengthCurve:
    """GB that an item adds to a step's peak: constant + linear * seconds + quadratic * seconds ** 2, all >= 0."""

    constant: float
    linear: float
    quadratic: float

    @classmethod
    def through(cls, gb_by_seconds: Mapping[float, float]) -> "LengthCurve":
        """Returns the curve through one, two or three lengths.

        Activations grow with the length, and attention scores, if they are kept, with its square. A negative
        coefficient comes from rounding; then the curve is the lowest line from the origin that no point lies above.
        """
        seconds, gb = np.array(sorted(gb_by_seconds.items())).T
        steepest = cls(0.0, max(0.0, float(np.max(gb / seconds))), 0.0)
        if len(seconds) == 1:
            return steepest
        found = np.linalg.solve(np.vander(seconds, increasing=True), gb)
        if np.any(found < 0):
            return steepest
        constant, linear, quadratic = (*map(float, found), 0.0)[:3]
        return cls(constant, linear, quadratic)

    def item_gb(self, seconds: float) -> float:
        return self.constant + self.linear * seconds + self.quadratic * seconds**2

    def longest(self, gb: float) -> float:
        """Returns the seconds of an item that adds `gb`; 0 if even the shortest adds more."""
        spare = gb - self.constant
        if spare <= 0:
            return 0.0
        if self.linear == self.quadratic == 0:
            return math.inf
        # This form of the quadratic formula loses no digits if the quadratic term is small.
        return 2 * spare / (self.linear + math.sqrt(self.linear**2 + 4 * self.quadratic * spare))


@dataclass(frozen=True)
class LengthLimit:
    """The longest clip to train on; `clips_over` and `hours_share` describe the longer ones."""

    seconds: float
    clips_over: int
    hours_share: float
    reason: str


def limit_length(
    lengths: Seconds, over_long: OverLong, *, asked_seconds: float = 0.0, fitting_seconds: float = math.inf
) -> LengthLimit:
    """Returns the longest clip to train on: `asked_seconds` (0: not asked), or the longest of the data.

    It is shorter if a clip of that length does not fit (`fitting_seconds` does), or if it is far longer than 99 % of
    the clips: those few would make all micro-batches smaller.
    """
    longest, most = float(lengths.max()), float(np.quantile(lengths, 1 - OUTLIER_SHARE, method="inverted_cdf"))
    seconds, why = longest, "the longest clip of the data"
    if asked_seconds:
        seconds, why = min(longest, asked_seconds), f"asked for at most {asked_seconds:.1f} s"
    elif longest > OUTLIER_FACTOR * most:  # If there are less than a hundred clips, `most` is the longest.
        seconds, why = most, f"{1 - OUTLIER_SHARE:.0%} of the clips are no longer, and the longest has {longest:.1f} s"
    if seconds > fitting_seconds:
        seconds = math.floor(100 * fitting_seconds) / 100
        why = "a longer clip does not fit even alone, with gradient checkpointing"
    over = is_over(lengths, seconds)
    share = float(lengths[over].sum() / lengths.sum())
    if over.any():
        what = "are cut into pieces of equal length" if over_long == "chunk" else "are left out"
        why += f"; {over.sum()} longer of {len(lengths)} clips, {share:.1%} of the hours, {what}"
    return LengthLimit(seconds, int(over.sum()), share, why)


def is_over(seconds: Any, limit_seconds: float) -> Any:
    """Returns whether a clip, or each of several, is longer than a limit allows. This is the one rule for all."""
    return seconds > limit_seconds * (1 + ROUNDING)


def piece_count(seconds: float, limit_seconds: float) -> int:
    """Returns the fewest pieces of equal length of a clip none of which is over the limit."""
    if not limit_seconds:
        return 1
    count = max(1, math.ceil(seconds / (limit_seconds * (1 + ROUNDING))))
    return count + bool(is_over(seconds / count, limit_seconds))


def pieces(lengths: Seconds, limit_seconds: float, over_long: OverLong) -> Seconds:
    """Returns the lengths to train on: longer clips are cut into the fewest pieces of equal length, or left out."""
    counts = np.array([piece_count(float(seconds), limit_seconds) for seconds in lengths], dtype=np.int64)
    if over_long == "refuse":
        kept: Seconds = lengths[counts == 1]
        return kept
    return np.repeat(lengths / counts, counts)


@dataclass(frozen=True)
class Bucket:
    """Clips longer than `over_seconds`, up to `to_seconds`, and their micro-batch size."""

    over_seconds: float
    to_seconds: float
    clips: int
    micro_batch_size: int


def make_buckets(
    lengths: Seconds,
    item_gb: Callable[[float], float],
    spare_gb: float,
    batch_size: int,
    count: int = BUCKETS,
    *,
    smallest: int = 1,
    longest: float = 0.0,
) -> tuple[Bucket, ...]:
    """Returns buckets of clips by length, with about the same number of clips in each.

    `item_gb(seconds)`: memory that an item adds to the peak, more for longer ones; `spare_gb`: memory for all items. A
    micro-batch divides the batch, so that accumulation keeps it exactly, and has at least `smallest` items. The last
    bucket is for clips of up to `longest`, also if the examined ones are shorter. Raises UserError if the longest clip
    does not fit alone.
    """
    edges = np.unique(np.quantile(lengths, np.arange(1, count + 1) / count, method="inverted_cdf"))
    edges[-1] = max(edges[-1], longest)
    found: list[Bucket] = []
    below = 0.0
    for edge in edges.tolist():
        sizes = [m for m in range(smallest, batch_size + 1) if batch_size % m == 0 and m * item_gb(edge) <= spare_gb]
        if not sizes:
            raise UserError(
                f"a clip of {edge:.1f} s adds {item_gb(edge):.2f} GB, and {spare_gb:.2f} GB are left for it",
                hint="train on shorter clips",
            )
        inside = int(np.count_nonzero((lengths > below) & (lengths <= edge)))
        found.append(Bucket(below, edge, inside, sizes[-1]))
        below = edge
    return tuple(found)
