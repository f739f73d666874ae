"""Clips of different lengths: the longest to train on, and the pieces of longer ones. Pure functions without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gputrain.errors import UserError

OverLong = Literal["chunk", "refuse"]
Seconds = npt.NDArray[np.float64]

OUTLIER_SHARE = 0.01  # Maximum share of the clips that counts as outliers.
OUTLIER_FACTOR = 1.5  # Factor on the longest of the other clips above which outliers are cut.
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
