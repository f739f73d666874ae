"""The measures that can choose a run's best checkpoint: which one each chooses, and how far their orders agree."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrain.kinds import kinds
from gputrain.report.metric_names import format_value, style_of
from gputrain.report.records import RunRecord

LEAST_EVALUATIONS = 3  # Of two, a rank correlation is 1 or -1.


class Selector(NamedTuple):
    """A measure on held-out data, the step and value that it chooses, and its rank correlation with each measure of the
    table, as texts."""

    title: str
    step: int
    value: str
    correlations: list[str]


def selectors_of(record: RunRecord) -> list[Selector]:
    """Returns the measures of a run with their rank correlations over its evaluations after the first step, oriented
    such that 1 means the same order from the best to the worst; none if there are fewer than two measures."""
    kind = kinds().get(record.kind)
    names = [f"eval/{name}" for name in kind.selectors] if kind else []
    series = {name: dict(point for point in record.series(name) if point[0]) for name in names}
    steps = sorted({step for values in series.values() for step in values})
    series = {name: values for name, values in series.items() if len(values) == len(steps)}
    if len(series) < 2 or len(steps) < LEAST_EVALUATIONS:
        return []
    merits = {
        name: [values[step] if style_of(name).better == "higher" else -values[step] for step in steps]
        for name, values in series.items()
    }
    found = []
    for name, own in merits.items():
        best, style = steps[int(np.argmax(own))], style_of(name)
        correlations = [rank_correlation(own, other) for other in merits.values()]
        texts = ["–" if one is None else f"{one:.2f}" for one in correlations]
        found.append(Selector(style.title, best, format_value(series[name][best], style.unit), texts))
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation, with mean ranks for equal values; None if all values of a side are equal."""
    own, others = _ranks(one), _ranks(other)
    return float(np.corrcoef(own, others)[0, 1]) if np.ptp(own) and np.ptp(others) else None


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks
