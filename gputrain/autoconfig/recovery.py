"""Training by `transformers.Trainer` that survives running out of memory, with the batch and the result it had.

The trainer is known by its methods alone; transformers is not imported.
"""

import contextlib
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gputrain.autoconfig.settings import Split
from gputrain.errors import UserError
from gputrain.hw.runtime import is_out_of_memory, random_state, release_memory, set_random_state

Reduction = Literal["items", "labels", "sum"]
IGNORED = -100  # label that no loss counts
LIKE = 0.01  # relative difference up to which two losses are taken for the same; bf16 rounds by a few thousandths

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """How many items go through the device at once; 0: as many as the trainer gives."""

    size: int = 0
    history: list[Split] = field(default_factory=list)

    def halve(self, step: int, items: int, cause: str) -> None:
        """From `items` at once to half of them, rounded up."""
        self.size = -(-items // 2)
        self.history.append(Split(step, items, self.size, cause))
        log.warning("step %d: %s; %d items at once instead of %d, the batch stays", step, cause, self.size, items)


def split(inputs: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """A batch in parts of at most `size` items, as equal as can be. Raises UserError for inputs that have no row for
    each item."""
    items = count_items(inputs)
    count = -(-items // size)
    edges = [items * number // count for number in range(count + 1)]
    return [rows(inputs, slice(start, stop)) for start, stop in pairwise(edges)]


def count_items(inputs: Mapping[str, Any]) -> int:
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)


def rows(inputs: Mapping[str, Any], which: Any) -> dict[str, Any]:
    items = count_items(inputs)
    taken: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, list) and len(value) == items:
            taken[name] = np.array(value, dtype=object)[which].tolist()
        elif not isinstance(value, Tensor) or not value.ndim:
            taken[name] = value
        elif len(value) == items:
            taken[name] = value[which]
        else:
            raise UserError(
                f"out of memory, and the input {name} has {len(value)} rows for {items} items, so it cannot be split",
                hint="use a smaller per_device_train_batch_size",
            )
    return taken


# ----------------------------------------------------------------------------------------------------- recovery


@contextlib.contextmanager
def recovering(trainer: Any, parts: Parts, reduction: Reduction | None = None) -> Iterator[None]:
    """While it lasts, the trainer's steps survive running out of memory; its own methods are put back afterwards.

    Raises UserError where several processes train together, and for memory that no smaller part would save.
    """
    if trainer.accelerator.num_processes > 1:
        raise UserError(
            "recovery works on one process, and several train here: one that stops would leave the others waiting",
            hint="call trainer.train() itself",
        )
    recovery = Recovery(trainer, parts, reduction)
    names = ("training_step", "compute_loss", "model_accepts_loss_kwargs")
    own = {name: vars(trainer)[name] for name in names if name in vars(trainer)}
    trainer.training_step, trainer.compute_loss = recovery.training_step, recovery.compute_loss
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory outside the steps, in the optimizer or in an evaluation: {_first_line(error)}",
            hint="a smaller per_device_eval_batch_size helps an evaluation; else use a smaller model or optimizer",
        ) from error
    finally:
        for name in names:
            vars(trainer).pop(name, None)
        vars(trainer).update(own)


class Recovery:
    """Stands in for a trainer's `training_step` and `compute_loss`.

    The trainer gives one micro-batch after the other, and steps when its batch is full. If one does not fit, nothing
    has stepped yet: the gradients are dropped, and everything that this step has had so far goes through again in
    smaller parts, with the random numbers it had. What comes later goes in the smaller parts at once.
    """

    def __init__(self, trainer: Any, parts: Parts, reduction: Reduction | None) -> None:
        self.trainer, self.parts = trainer, parts
        self._whole_step: Callable[..., Tensor] = trainer.training_step
        self._whole_loss: Callable[..., Any] = trainer.compute_loss
        self._possible: list[Reduction] = [reduction] if reduction else ["items", "labels", "sum"]
        self._weight = 1.0  # of the part that is on its way
        self._at_once = 0  # its items
        self._step = -1  # of the optimizer, that the following belong to
        self._had: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []  # micro-batches with what came along
        self._random: RandomStates | None = None  # as the step began
        self._failure = ""
        self._scaled = False  # whether it is known how the trainer adds up micro-batches

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Tensor:
        """Forward and backward of one micro-batch, as the trainer's own; the loss is that of the whole of it."""
        step = self.trainer.state.global_step
        if step != self._step:
            self._step, self._had, self._random = step, [], RandomStates.now(self.trainer.args.device)
        self._had.append((inputs, more, named))
        loss = self._attempt(model, self._had[-1:])
        while loss is None:  # outside the except block, whose traceback would keep the failed part alive
            self._make_room(model)
            loss = self._attempt(model, self._had)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        found = self._whole_loss(model, inputs, *more, **named)
        if self._weight == 1:
            return found
        return (found[0] * self._weight, *found[1:]) if isinstance(found, tuple) else found * self._weight

    def _attempt(self, model: Any, micro_batches: list[Any]) -> Tensor | None:
        """The loss of the last one; None where memory ran out."""
        loss = None
        try:
            for inputs, more, named in micro_batches:
                loss = self._in_parts(model, inputs, more, named)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._failure, loss = _first_line(error), None
        finally:
            self._weight = 1.0
        return loss

    def _in_parts(self, model: Any, inputs: Any, more: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        items = count_items(inputs)
        self._at_once = items
        if not self._scaled:
            self._keep_scale(model, inputs, more, named)
        if not 0 < self.parts.size < items:
            return self._whole_step(model, inputs, *more, **named)
        parts = split(inputs, self.parts.size)
        total = None
        for part, weight in zip(parts, self._weights(model, inputs, parts, more, named), strict=True):
            self._weight, self._at_once = weight, count_items(part)
            loss = self._whole_step(model, part, *more, **named)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _make_room(self, model: Any) -> None:
        """Drop what the failed attempt has left, and halve the parts."""
        model.zero_grad(set_to_none=True)
        release_memory()
        assert self._random
        self._random.restore(self.trainer.args.device)
        if self._at_once <= 1:
            raise UserError(
                f"out of memory with a single item at once: {self._failure}",
                hint="train on shorter clips, with gradient checkpointing, or a smaller model",
            )
        self.parts.halve(self._step, self._at_once, "out of memory")

    def _keep_scale(self, model: Any, inputs: Any, more: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Have the trainer take the mean of micro-batches where each gives a mean.

        It adds up the losses of models that take any keyword, as it tells them by what to divide. Some do not listen,
        such as those trained by CTC in transformers 5, whose gradients would grow with the number of micro-batches.
        """
        trainer = self.trainer
        adds_up = trainer.model_accepts_loss_kwargs and getattr(trainer, "loss_is_scaled_for_ga", None) is None
        told = self._told(model, inputs, more, named)
        if trainer.args.gradient_accumulation_steps > 1 and adds_up and told and trainer.compute_loss_func is None:
            try:
                deaf = count_items(inputs) > 1 and "sum" not in self._ask(model, inputs, more, named)
            except UserError:  # how its loss is taken cannot be told; then neither that it is taken wrongly
                deaf = False
            if deaf:
                log.warning("each micro-batch gives its mean, and the trainer would add them up: taking their mean")
                trainer.model_accepts_loss_kwargs = False
        self._scaled = True

    # ------------------------------------------------------------------------------------------------- weights

    def _weights(
        self, model: Any, inputs: Any, parts: list[dict[str, Any]], more: tuple[Any, ...], named: dict[str, Any]
    ) -> list[float]:
        """By which the losses of parts add up to the loss of the whole."""
        found = [shares(reduction, inputs, parts) for reduction in self._possible]
        if any(not np.allclose(found[0], other) for other in found[1:]):
            self._possible = self._ask(model, inputs, more, named)
            found = [shares(reduction, inputs, parts) for reduction in self._possible]
        return found[0]

    def _ask(self, model: Any, inputs: Any, more: tuple[Any, ...], named: dict[str, Any]) -> list[Reduction]:
        """Let the loss itself say how it is taken over a batch: of two items together, and of each alone.

        The two differ in their labels as much as any, and nothing is drawn by chance. Raises UserError where the loss
        of the two is no sum over them, as where items are compared with each other.
        """
        labels = count_labels(inputs)
        two = [int(labels.argmin()), int(labels.argmax())] if labels.min() < labels.max() else [0, 1]
        alone = [rows(inputs, slice(one, one + 1)) for one in two]
        together = rows(inputs, two)
        random_states = RandomStates.now(self.trainer.args.device)
        model.eval()
        try:
            whole, *single = (self._loss_of(model, batch, more, named) for batch in (together, *alone))
        finally:
            model.train()
            random_states.restore(self.trainer.args.device)
        sums = {r: float(np.dot(shares(r, together, alone), single)) for r in self._possible}
        best = min(sums, key=lambda r: abs(sums[r] - whole))
        if not abs(sums[best] - whole) <= LIKE * abs(whole):
            raise UserError(
                f"out of memory, and the loss cannot be taken in parts: of two items it is {whole:.6g}, of each alone "
                f"{single[0]:.6g} and {single[1]:.6g}",
                hint="use a smaller per_device_train_batch_size, or say loss_reduction= if it falls by chance",
            )
        return [r for r in self._possible if np.isclose(sums[r], sums[best])]

    def _told(self, model: Any, inputs: Any, more: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """What the trainer says of the whole step, if it counts its labels."""
        bound = inspect.signature(self._whole_step).bind(model, inputs, *more, **named)
        count = bound.arguments.get("num_items_in_batch")
        return {} if count is None else {"num_items_in_batch": count}

    def _loss_of(self, model: Any, inputs: Any, more: tuple[Any, ...], named: dict[str, Any]) -> float:
        told = self._told(model, inputs, more, named)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            loss = self._whole_loss(model, self.trainer._prepare_inputs(inputs), **told)
        return float(loss.mean())  # over the cards of a DataParallel


def count_labels(inputs: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Labels of each item that a loss counts."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return np.ones(count_items(inputs), dtype=np.int64)
    return np.asarray((labels != IGNORED).flatten(1).sum(1).cpu(), dtype=np.int64)


def shares(reduction: Reduction, whole: Mapping[str, Any], parts: list[dict[str, Any]]) -> list[float]:
    """Weights of the parts' losses in that of the whole."""
    if reduction == "sum":
        return [1.0] * len(parts)
    if reduction == "items":
        return [count_items(part) / count_items(whole) for part in parts]
    return [float(count_labels(part).sum() / max(1, count_labels(whole).sum())) for part in parts]


@dataclass(frozen=True)
class RandomStates:
    """Of every generator that a step may draw from."""

    of_torch: dict[str, Tensor]
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls, device: torch.device) -> "RandomStates":
        return cls(random_state(device), np.random.get_state(), random.getstate())

    def restore(self, device: torch.device) -> None:
        set_random_state(self.of_torch, device)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
