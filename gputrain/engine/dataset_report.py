"""Types that preparations of data and reports on data share: progress, refused items, spreads of values."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Progress = Callable[[int, int], None]  # Arguments: items done, items in all.


def silent(done: int, total: int) -> None:
    """Reports no progress."""


class RefusedItem(Protocol):
    """A file that is left out, and why."""

    @property
    def path(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest value."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Returns the spread of values. Raises ValueError where there are none."""
        return cls(min(values), statistics.median(values), max(values))


def spread_of(values: Sequence[float]) -> Spread | None:
    """Returns the spread of values, or None where there are none."""
    return Spread.of(values) if values else None
