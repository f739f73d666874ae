"""Options of the `gputrain bench` commands. Imports no torch."""

import dataclasses
from typing import Any, get_type_hints

from gputrain.config import config, flatten, leaves, opt
from gputrain.hw.plan import NOT_PLANNED, Cards


@config(panel="Benchmark")
class BenchOptions:
    untimed_steps: int = opt(default=3, help="Steps before the timed ones.", min=1)
    steps: int = opt(default=10, help="Timed steps of a row. The median is reported.", min=1)
    row_minutes: float = opt(default=10, help="Time limit of a row, in minutes.", min=0.01)


def bench_settings(plan: type) -> type:
    """Returns the options of a kind's benchmark, made from those of its plan: those of measuring take the place of the
    GPUs. None is required, since synthetic data are measured."""
    groups = {name: group for name, group in get_type_hints(plan).items() if hasattr(group, "__panel__")}
    groups = {name: group for name, group in groups.items() if group is not Cards} | {"bench": BenchOptions}
    made: Any = dataclasses.make_dataclass(
        plan.__name__.replace("Plan", "Bench"),
        [(name, group, group()) for name, group in groups.items()],
        namespace={name: getattr(plan, name) for name in ("kind", "spellings") if hasattr(plan, name)},
        frozen=True,
        kw_only=True,
    )
    made.__panel__, made.rare_panels = "Benchmark", NOT_PLANNED
    found: type = made
    return found


def measured_training(settings: Any, train: type) -> dict[str, Any]:
    """Returns the options of the measured train command, without its folders and what it begins with."""
    left_out = {"resume_from", "init_from"}
    values = {name: value for name, value in flatten(settings).items() if name in leaves(train).keys() - left_out}
    return {**values, "data_path": "."}


def data_options(settings: Any, train: type) -> dict[str, Any]:
    """Returns the options of the synthetic data, such as the length of a clip."""
    others = leaves(train).keys() | leaves(BenchOptions).keys()
    return {name: value for name, value in flatten(settings).items() if name not in others}
