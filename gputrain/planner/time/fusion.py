"""A model of what a compiler makes of a region: elementwise operators and reductions become few kernels.

It is a model of inductor, not inductor: its kernels and bytes are compared with those that inductor generates for a
card in tests/fake_cuda. Within a region, elementwise operators that depend on each other are one kernel, which computes
again whatever it needs, so that their results are neither written nor read. A reduction ends a kernel, except one of
short rows; those of one tensor are in one. Products, convolutions and a few more keep their own kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby

from gputrain.planner.time.operators import NORMALISATIONS, REDUCTIONS, Operator
from gputrain.planner.time.roofline import KernelCost


def fused(operators: Sequence[Operator]) -> list[Operator]:
    """Returns the kernels of a step in which every region is compiled."""
    last_read = {storage: index for index, operator in enumerate(operators) for storage in operator.reads}
    last_written = {storage: index for index, operator in enumerate(operators) for storage in operator.writes}
    results = {storage for storage, index in last_written.items() if index >= last_read.get(storage, -1)}
    made: list[Operator] = []
    for region, numbered in groupby(enumerate(operators), key=lambda pair: pair[1].region):
        pairs = list(numbered)
        if region is None:
            made += [operator for _, operator in pairs]
            continue
        end = pairs[-1][0]
        read_later = {storage for storage, index in last_read.items() if index > end}
        # Autograd adds to gradients of an earlier micro-batch outside of what is compiled.
        additions = [operator for _, operator in pairs if operator.accumulates]
        read_later.update(storage for operator in additions for storage in operator.reads)
        if compiled := [operator for _, operator in pairs if not operator.accumulates]:
            made += _region_kernels(compiled, read_later | results)
        made += additions
    return made


def kernel_costs(operators: Sequence[Operator]) -> tuple[KernelCost, ...]:
    """Returns the costs of the kernels of a step, in which every region is compiled."""
    kept = [field_.name for field_ in fields(KernelCost)]
    return tuple(KernelCost(**{name: getattr(kernel, name) for name in kept}) for kernel in fused(operators))


@dataclass
class _Fusion:
    """A kernel of a region, while it is being composed."""

    index: int  # Position of its first operator.
    reads: dict[int, float] = field(default_factory=dict)
    writes: dict[int, float] = field(default_factory=dict)
    sixteen_bit: bool = False


def _region_kernels(operators: Sequence[Operator], read_later: set[int]) -> list[Operator]:
    """Returns the kernels of a region; `read_later` are the storages that are read after it, or that remain.

    The kernels of a region are numbered by level: an operator's level is one more than that of a product or a reduction
    that it depends on.
    """
    operators = _with_reductions(operators)
    made_by: dict[int, int] = {}  # Operator that made a storage.
    level: list[int] = []
    sources: list[dict[int, float]] = []  # What a kernel must read to compute an operator's result.
    group = _Groups(len(operators))
    reductions: dict[tuple[int, int], int] = {}  # The first one of a level, by each of its largest inputs.
    needed = read_later | {storage for operator in operators if not operator.fusible for storage in operator.reads}
    for index, operator in enumerate(operators):
        makers = {storage: made_by.get(storage) for storage in operator.reads}
        ends = {
            s: m is not None and (not operators[m].fusible or _is_reduction(operators[m])) for s, m in makers.items()
        }
        depth = max((level[m] + ends[s] for s, m in makers.items() if m is not None), default=0)
        found: dict[int, float] = {}
        for storage, size in operator.reads.items():
            maker = makers[storage]
            in_memory = maker is None or ends[storage] or (level[maker] < depth and storage in needed)
            found.update({storage: size} if maker is None or in_memory else sources[maker])
        level.append(depth)
        sources.append(found)
        for storage in operator.reads:
            maker = made_by.get(storage)
            if maker is not None and operator.fusible and operators[maker].fusible and level[maker] == depth:
                group.join(index, maker)
        if _is_reduction(operator):
            whole = max(found.values(), default=0.0)
            for storage in (storage for storage, size in found.items() if size == whole):
                group.join(index, reductions.setdefault((depth, storage), index))
        made_by.update(dict.fromkeys(operator.writes, index))
    fusions: dict[int, _Fusion] = {}
    kernels: list[tuple[int, Operator]] = []
    for index, operator in enumerate(operators):
        if not operator.fusible:
            kernels.append((index, operator))
            continue
        kept = {s: size for s, size in operator.writes.items() if s in needed or _is_reduction(operator)}
        if not kept:
            continue
        fusion = fusions.setdefault(group.of(index), _Fusion(index))
        fusion.reads.update(sources[index])
        fusion.writes.update(kept)
        fusion.sixteen_bit |= operator.sixteen_bit
    kernels += [
        (fusion.index, Operator("fused", fusion.reads, fusion.writes, sixteen_bit=fusion.sixteen_bit))
        for fusion in fusions.values()
    ]
    name = operators[0].region.name if operators[0].region else ""
    for _, kernel in kernels:
        if kernel.fusible:
            kernel.name = name
    return [kernel for _, kernel in sorted(kernels, key=lambda pair: pair[0])]


def _is_reduction(operator: Operator) -> bool:
    return operator.name in REDUCTIONS and not operator.of_rows


def _with_reductions(operators: Sequence[Operator]) -> list[Operator]:
    """Returns the operators, with each normalisation as a reduction and an elementwise function."""
    made: list[Operator] = []
    for number, operator in enumerate(operators):
        if operator.name not in NORMALISATIONS:
            made.append(operator)
            continue
        few = {-1 - number: 0.0}  # The reduction's result, whose few bytes do not matter.
        made.append(Operator("sum", operator.reads, few, region=operator.region))
        elementwise = replace(operator, name="normalise", reads={**operator.reads, **few}, launches=1, passes=1)
        made.append(elementwise)
    return made


class _Groups:
    """Disjoint sets of the numbers below `count`."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def of(self, index: int) -> int:
        while self.parent[index] != index:
            index = self.parent[index]
        return index

    def join(self, first: int, second: int) -> None:
        self.parent[self.of(first)] = self.of(second)
