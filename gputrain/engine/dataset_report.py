"""Shared by preparations of data and reports on data: progress, refused items, spreads of values, digests."""

import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

Progress = Callable[[float, int], None]  # Arguments: items done, parts of one included, and items in all.


def silent(done: float, total: int) -> None:
    """Reports no progress."""


@dataclass
class StepProgress:
    """Reports the progress of work in steps, the first of them at once: `next()` is called after each."""

    progress: Progress
    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self.progress(0, self.total)

    def next(self) -> None:
        self.done += 1
        self.progress(self.done, self.total)


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


def digests(**parts: Iterable[object]) -> dict[str, dict[str, Any]]:
    """Returns the number of items and a digest of their descriptions, in order, for each part of the data."""
    found = {}
    for name, items in parts.items():
        digest, count = hashlib.blake2b(digest_size=16), 0
        for item in items:
            digest.update(description_of(item).encode("utf-8", "surrogatepass") + b"\n")
            count += 1
        found[name] = {"items": count, "digest": digest.hexdigest()}
    return found


def description_of(item: object) -> str:
    """Returns the description of an item for `digests`, without the name of its class, because checkpoints hold digests
    from when the class had another name."""
    if not is_dataclass(item):
        return repr(item)
    return f"Clip({', '.join(f'{part.name}={getattr(item, part.name)!r}' for part in fields(item))})"
