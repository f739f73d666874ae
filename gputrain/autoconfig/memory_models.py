"""Memory and FLOPs of a training step of any torch model: predicted on fake tensors, or else measured.

Gradients and optimizer state are in memory from the beginning, as they are while a batch is accumulated. A model that
needs values to run is measured in a copy, on the device that it will train on. GB is 1e9 bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gputrain.autoconfig.inputs import BatchGuess
from gputrain.autoconfig.settings import TrainerOptimizer
from gputrain.errors import UserError
from gputrain.planner.memory.fit import MemoryModel
from gputrain.planner.memory.predict import DoesNotRun, MemoryEstimate, memory_model_of, predict_step
from gputrain.planner.memory.torch_model import (
    Loss,
    Precision,
    compares_items,
    measure_training_memory,
    model_plan,
    model_target,
    refuse_unpredictable,
)


@dataclass
class MemoryModels:
    """Finds the memory of the steps of a model, of each once. The model may be measured on `device`; None: nowhere.

    The first of the guesses with which the model runs is kept. A step has at least `least_items`: a layer that uses
    statistics of the batch may not run on a single item.
    """

    model: nn.Module
    loss: Loss
    guesses: Sequence[BatchGuess]
    precision: Precision
    optimizer: TrainerOptimizer
    device: torch.device | None
    unpredictable: str = ""  # The reason why the model had to be measured.
    known: dict[tuple[int, float, bool], MemoryEstimate] = field(default_factory=dict)
    least_items: int = 1
    compares_items: bool = False  # The loss compares the items of a batch, as far as steps are known.
    _shapes: dict[tuple[int, float], list[torch.Size]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unpredictable(self.model)

    def step(self, items: int, seconds: float, checkpointing: bool = False) -> MemoryEstimate:
        """Returns the memory of a step on `items` items of a length. Raises UserError if the batch does not suit the
        model, or if the model needs values and there is no device to measure it on."""
        key = (items, seconds, checkpointing)
        if key not in self.known:
            self.known[key] = self._find(*key)
        return self.known[key]

    def _find(self, items: int, seconds: float, checkpointing: bool) -> MemoryEstimate:
        if not self.unpredictable:
            try:
                return self._with_guesses(lambda guess: self._predict(guess, items, seconds, checkpointing))
            except UserError as error:
                if self.device is None:
                    raise
                self.unpredictable = error.message
        return self._with_guesses(
            lambda guess: measure_training_memory(
                self.model,
                self.loss,
                guess.make(items, seconds),
                self.device or torch.device("cpu"),
                precision=self.precision,
                optimizer=self.optimizer,
                checkpointing=checkpointing,
            )
        )

    def _with_guesses(self, find: Callable[[BatchGuess], MemoryEstimate]) -> MemoryEstimate:
        """Returns what is found with the first guess that does not fail. Raises the error of the first of all."""
        failures: list[UserError] = []
        for guess in self.guesses:
            try:
                found = find(guess)
            except UserError as error:
                failures.append(error)
                continue
            self.guesses = [guess]
            return found
        raise failures[0]

    def _predict(self, guess: BatchGuess, items: int, seconds: float, checkpointing: bool) -> MemoryEstimate:
        on_gpu = self.device is None or self.device.type == "cuda"
        plan = model_plan("cuda" if on_gpu else "cpu")
        shapes = self._shapes.setdefault((items, seconds), [])
        target = model_target(
            self.model,
            self.loss,
            lambda items: guess.make(items, seconds),
            self.precision,
            self.optimizer,
            shapes=shapes,
        )
        try:
            return predict_step(target, plan, micro_batch_size=items, checkpointing=checkpointing)
        except DoesNotRun as error:
            raise UserError(
                error.message,
                hint="pass batch=, a function of the number of items and their seconds, and loss= if need be; if the "
                "model runs with real tensors, call this where the card is: it measures a real step",
            ) from error

    def memory_model(self, seconds: float, checkpointing: bool) -> MemoryModel:
        """Returns the line through the least number of items and twice as many, or the largest known number of this
        length."""
        least, most = self.least_items, self.most_items(seconds, checkpointing)
        few, many = (self.step(items, seconds, checkpointing) for items in (least, most))
        if most % least == 0:
            shapes_of_few, shapes_of_many = (self._shapes.get((items, seconds), []) for items in (least, most))
            self.compares_items |= compares_items(shapes_of_few, shapes_of_many, most // least)
        return memory_model_of(few, many, most, grows=False, first=least)

    def most_items(self, seconds: float, checkpointing: bool) -> int:
        """Returns the largest number of items of a length in a known step; at least twice the least."""
        known = [items for items, *rest in self.known if rest == [seconds, checkpointing]]
        return max([2 * self.least_items, *known])
