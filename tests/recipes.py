"""What the engine promises of every recipe, checked on the training states of a kind of model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from gputrain.engine.state import TrainState
from gputrain.engine.step import update

Load = Callable[[int], Any]  # Returns the loaded items of a step.


def go_on(state: TrainState, load: Load, steps: range, lr: float = 1e-3) -> None:
    for step in steps:
        update(state, state.recipe.prepare(load(step), step), step, lr)
        state.recipe.average(step)


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    modules = state.recipe.modules.items()
    return {f"{n}.{k}": v.clone() for n, module in modules for k, v in module.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def assert_split_changes_nothing(
    whole: TrainState, split: TrainState, load: Load, steps: range, within: float = 1e-11
) -> None:
    """Two states in float64 have the same weights after the same steps, and others than before."""
    start = weights(whole)
    for state in (whole, split):
        go_on(state, load, steps)
    assert largest_difference(start, weights(whole)) > 1e-3
    assert largest_difference(weights(whole), weights(split)) < within


def assert_resumed_is_undisturbed(
    begin: Callable[[], TrainState], load: Load, *, steps: int, stop: int, dropout: float = 0.0
) -> None:
    """A state that is restored after `stop` steps goes on bit for bit, dropout's global random numbers included."""
    undisturbed, first, second = (begin() for _ in range(3))
    for state in (undisturbed, first, second):
        for module in state.recipe.modules.values():
            for layer in module.modules():
                if isinstance(layer, torch.nn.Dropout):
                    layer.p = dropout
    torch.manual_seed(1)
    go_on(undisturbed, load, range(steps))
    torch.manual_seed(1)
    go_on(first, load, range(stop))
    snapshot = first.snapshot()
    torch.manual_seed(99)
    second.restore(snapshot)
    go_on(second, load, range(stop, steps))
    assert largest_difference(weights(undisturbed), weights(second)) == 0


def assert_out_of_memory_changes_nothing(
    whole: TrainState, short: TrainState, load: Load, name: str, is_too_large: Callable[[Any], bool]
) -> None:
    """In the second of three steps, memory runs out after the term of this name while a batch is too large."""
    (group,) = short.recipe.step_groups

    def loss(batch: Any, step: int) -> Any:
        for term in group.loss(batch, step):
            yield term
            if step == 1 and is_too_large(batch) and getattr(term, "name", "") == name:
                torch.empty(10**15)  # No machine has a petabyte, so this raises the allocator's own error.

    short.recipe.step_groups = [dataclasses.replace(group, loss=loss)]
    for state in (whole, short):
        go_on(state, load, range(3))
    assert largest_difference(weights(whole), weights(short)) < 1e-11
