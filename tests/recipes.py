"""What the engine promises of every recipe, checked on the training states of a kind of model."""

import dataclasses
import math
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


def parts(state: TrainState, load: Load) -> list[int]:
    """Return the number of parts of the first step's batch in each group."""
    batch = state.recipe.prepare(load(0), 0)
    items = state.recipe.size(batch)
    return [math.ceil(items / min(items, state.micro_batch[group.name])) for group in state.recipe.step_groups]


def assert_split_changes_nothing(whole: TrainState, split: TrainState, load: Load, steps: range) -> None:
    """A state that computes each batch at once has the weights of one that splits it, in float64.

    Long clips count for more, so that a batch may be several micro-batches of as many items as it has clips.
    """
    whole.micro_batch = dict.fromkeys(whole.micro_batch, 10**6)
    assert set(parts(whole, load)) == {1}
    assert min(parts(split, load)) > 1
    assert_same_weights(whole, split, load, steps, 1e-11)


def assert_same_weights(one: TrainState, other: TrainState, load: Load, steps: range, within: float) -> None:
    """After the same steps the weights are the same, and others than before."""
    start = weights(one)
    for state in (one, other):
        go_on(state, load, steps)
    assert largest_difference(start, weights(one)) > 1e-3
    assert largest_difference(weights(one), weights(other)) < within


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
