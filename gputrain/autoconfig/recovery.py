"""Recovery of `transformers.Trainer` from running out of memory, with the same batch and the same result.

A callback watches the memory, so that it runs out less often. Only methods of the trainer are used; transformers is
imported only for the callback.
"""

import contextlib
import inspect
import itertools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gputrain.autoconfig.settings import OptimalConfig
from gputrain.engine.distributed import RankGroup
from gputrain.engine.out_of_memory import FailedAttempt, retried
from gputrain.errors import UserError, import_package
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import random_state, set_random_state

Reduction = Literal["items", "labels", "sum"]
IGNORED = -100  # Label that losses ignore.
EQUAL_LOSSES = 0.01  # Relative difference up to which two losses count as equal; bf16 rounds by a few thousandths.

log = logging.getLogger(__name__)


@dataclass
class MicroBatchLimit:
    """The maximum number of items in a micro-batch; 0: no limit. With `least` above 1 the model has layers that use
    statistics of the batch."""

    items: int = 0
    least: int = 1  # Items that a micro-batch has at least.

    def halve(self, step: int, items: int) -> None:
        """Limits micro-batches to half of `items`, rounded up."""
        self.items = max(self.least, -(-items // 2))
        same = "the statistics of BatchNorm are those of so many" if self.least > 1 else "the batch stays the same"
        log.warning("step %d: out of memory; %d items at once instead of %d; %s", step, self.items, items, same)


def split(inputs: Mapping[str, Any], size: int, least: int = 1) -> list[dict[str, Any]]:
    """Returns a batch in parts of at most `size` items, as equal as possible; larger ones rather than parts of fewer
    than `least`. Raises UserError for inputs that do not have a row for each item."""
    items = count_items(inputs)
    count = min(-(-items // size), max(1, items // least))
    edges = [items * number // count for number in range(count + 1)]
    return [select_rows(inputs, slice(start, stop)) for start, stop in itertools.pairwise(edges)]


def count_items(inputs: Mapping[str, Any]) -> int:
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), 1)


def select_rows(inputs: Mapping[str, Any], which: Any) -> dict[str, Any]:
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
def recovering(
    trainer: Any, limit: MicroBatchLimit, reduction: Reduction | None = None, config: OptimalConfig | None = None
) -> Iterator[None]:
    """Has the trainer's steps recover from running out of memory, and restores its own methods afterwards.

    Several processes may train together in the way of DDP: each recovers by itself, and then their gradients are
    averaged. Raises UserError if they divide the model, if they were planned differently by their `config`, and if
    smaller parts would not help.
    """
    processes = int(trainer.accelerator.num_processes)
    strategy = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
    if processes > 1 and not strategy.startswith("MULTI_"):
        raise UserError(
            f"recovery works in one process or with copies of the model in several, and this is {strategy}",
            hint="call trainer.train() itself",
        )
    with RankGroup.of_connected(processes) as group:
        if config is not None:
            check_agreement(group, config)
        recovery = Recovery(trainer, limit, reduction, group, config.per_device_train_batch_size if config else 0)
        with _methods_of(recovery, trainer):
            yield


@contextlib.contextmanager
def _methods_of(recovery: "Recovery", trainer: Any) -> Iterator[None]:
    """Replaces the trainer's methods within the block by those of the recovery."""
    names = ("training_step", "compute_loss", "model_accepts_loss_kwargs")
    own = {name: vars(trainer)[name] for name in names if name in vars(trainer)}
    trainer.training_step, trainer.compute_loss = recovery.training_step, recovery.compute_loss
    try:
        yield
    finally:
        for name in names:
            vars(trainer).pop(name, None)
        vars(trainer).update(own)


class MicroBatch(NamedTuple):
    """A batch as the trainer passes it, with the other arguments of its `training_step`."""

    inputs: Any
    more: tuple[Any, ...]
    named: dict[str, Any]


class Recovery:
    """Replaces a trainer's `training_step` and `compute_loss`.

    The trainer calls it with one micro-batch after the other, and steps when its batch is complete. If one does not
    fit, nothing has stepped yet: the gradients are dropped, and all micro-batches of the step so far are repeated in
    smaller parts, with the same random numbers. Later ones are split from the beginning.
    """

    def __init__(
        self, trainer: Any, limit: MicroBatchLimit, reduction: Reduction | None, group: RankGroup, most_items: int
    ) -> None:
        self.trainer, self.limit, self.group = trainer, limit, group
        self._whole_step: Callable[..., Tensor] = trainer.training_step
        self._whole_loss: Callable[..., Any] = trainer.compute_loss
        self._reductions: list[Reduction] = [reduction] if reduction else ["items", "labels", "sum"]
        self._weight = 1.0  # Weight of the current part.
        self._items_at_once = 0  # Items of the current part.
        self._most_items = most_items  # Items that fit at once by the plan; 0: no limit.
        self._step = -1  # Optimizer step that the following belong to.
        self._micro_batches: list[MicroBatch] = []
        self._restore_random = restorer_of_random(trainer.args.device)  # As at the beginning of the step.
        self._scale_is_known = False  # True once it is known how the trainer adds up micro-batches.

    def training_step(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Tensor:
        """Runs forward and backward of one micro-batch, as the trainer's own method; returns the loss of all of it."""
        step = self.trainer.state.global_step
        if self.group.ranks.count > 1:
            # Without DDP's wrapper no backward pass waits for the other processes, so that each may repeat it.
            model = self.trainer.accelerator.unwrap_model(model)
        if step != self._step:
            self._step, self._micro_batches = step, []
            self._restore_random = restorer_of_random(self.trainer.args.device)
        self._micro_batches.append(MicroBatch(inputs, more, named))
        loss = self._retried(model)
        if self.group.ranks.count > 1 and self.trainer.accelerator.sync_gradients:
            average_over_processes(self.group, model)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        found = self._whole_loss(model, inputs, *more, **named)
        if self._weight == 1:
            return found
        return (found[0] * self._weight, *found[1:]) if isinstance(found, tuple) else found * self._weight

    def _retried(self, model: Any) -> Tensor:
        """Returns the loss of the last micro-batch. If memory runs out, all of the step so far are repeated."""
        pending = self._micro_batches[-1:]

        def attempt() -> Tensor:
            try:
                return [self._in_parts(model, micro_batch) for micro_batch in pending][-1]
            finally:
                self._weight = 1.0

        def make_room(failure: FailedAttempt) -> None:
            nonlocal pending
            model.zero_grad(set_to_none=True)
            # Memory may also run out where the reduction of the loss is found, which the limit does not make smaller.
            items = min(self._items_at_once, self.limit.items or self._items_at_once)
            if items <= self.limit.least:
                few = "a single item" if items <= 1 else f"{items} items, the fewest for BatchNorm,"
                raise UserError(
                    f"out of memory with {few} at once: {failure.cause}",
                    hint="train on shorter clips, with gradient checkpointing, or a smaller model",
                )
            self.limit.halve(self._step, items)
            pending = self._micro_batches

        return retried(attempt, make_room, self._restore_random)

    def _in_parts(self, model: Any, micro_batch: MicroBatch) -> Tensor:
        inputs, more, named = micro_batch
        items = count_items(inputs)
        self._items_at_once = items
        if not self._scale_is_known:
            self._keep_scale(model, micro_batch)
        size = min(filter(None, (self.limit.items, self._most_items, items)), default=items)
        if size == items:
            return self._whole_step(model, inputs, *more, **named)
        parts = split(inputs, size, self.limit.least)
        total = None
        for part, weight in zip(parts, self._weights(model, micro_batch, parts), strict=True):
            self._weight, self._items_at_once = weight, count_items(part)
            loss = self._whole_step(model, part, *more, **named)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _keep_scale(self, model: Any, micro_batch: MicroBatch) -> None:
        """Has the trainer average micro-batches, and processes, if each of their losses is a mean.

        The trainer adds up the losses of models that accept any keyword, because it passes them the divisor. Some
        models ignore it, such as those with a CTC loss in transformers 5; their gradients would grow with the number of
        micro-batches.
        """
        trainer = self.trainer
        adds_up = trainer.model_accepts_loss_kwargs and getattr(trainer, "loss_is_scaled_for_ga", None) is None
        counts = self._label_counts(model, micro_batch)
        several = trainer.args.gradient_accumulation_steps > 1 or self.group.ranks.count > 1
        if several and adds_up and counts and trainer.compute_loss_func is None:
            try:
                is_mean = count_items(micro_batch.inputs) > 1 and "sum" not in self._find_reduction(model, micro_batch)
            except UserError:  # The reduction is unknown, so the trainer's own scale is kept.
                is_mean = False
            if is_mean:
                log.warning(
                    "the loss of a micro-batch is a mean, and the trainer would add them up: they are averaged instead"
                )
                trainer.model_accepts_loss_kwargs = False
        self._scale_is_known = True

    # ------------------------------------------------------------------------------------------------- weights

    def _weights(self, model: Any, micro_batch: MicroBatch, parts: list[dict[str, Any]]) -> list[float]:
        """Returns the weights with which the losses of parts add up to the loss of the whole."""
        found = [shares(reduction, micro_batch.inputs, parts) for reduction in self._reductions]
        if any(not np.allclose(found[0], other) for other in found[1:]):
            self._reductions = self._find_reduction(model, micro_batch)
            found = [shares(reduction, micro_batch.inputs, parts) for reduction in self._reductions]
        return found[0]

    def _find_reduction(self, model: Any, micro_batch: MicroBatch) -> list[Reduction]:
        """Returns the reductions that explain the loss of two items together by those of each alone.

        The two items differ most in their number of labels, and dropout is off. Raises UserError if the loss is not a
        weighted sum over the items, for example if items are compared with each other.
        """
        inputs, labels = micro_batch.inputs, count_labels(micro_batch.inputs)
        two = [int(labels.argmin()), int(labels.argmax())] if labels.min() < labels.max() else [0, 1]
        alone = [select_rows(inputs, slice(item, item + 1)) for item in two]
        together = select_rows(inputs, two)
        restore_random = restorer_of_random(self.trainer.args.device)
        model.eval()
        try:
            whole, *single = (self._loss_of(model, micro_batch._replace(inputs=batch)) for batch in (together, *alone))
        finally:
            model.train()
            restore_random()
        sums = {r: float(np.dot(shares(r, together, alone), single)) for r in self._reductions}
        best = min(sums, key=lambda r: abs(sums[r] - whole))
        if not abs(sums[best] - whole) <= EQUAL_LOSSES * abs(whole):
            raise UserError(
                "out of memory, and the loss cannot be computed in parts: "
                f"of two items it is {whole:.6g}, of each alone {single[0]:.6g} and {single[1]:.6g}",
                hint="use a smaller per_device_train_batch_size, or pass loss_reduction= if the loss is random",
            )
        return [r for r in self._reductions if np.isclose(sums[r], sums[best])]

    def _label_counts(self, model: Any, micro_batch: MicroBatch) -> dict[str, Any]:
        """Returns the number of labels of the whole step, if the trainer counts them."""
        inputs, more, named = micro_batch
        bound = inspect.signature(self._whole_step).bind(model, inputs, *more, **named)
        count = bound.arguments.get("num_items_in_batch")
        return {} if count is None else {"num_items_in_batch": count}

    def _loss_of(self, model: Any, micro_batch: MicroBatch) -> float:
        counts = self._label_counts(model, micro_batch)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            loss = self._whole_loss(model, self.trainer._prepare_inputs(micro_batch.inputs), **counts)
        return float(loss.mean())  # The mean is over the GPUs of a DataParallel.


def average_over_processes(group: RankGroup, model: nn.Module) -> None:
    """Replaces gradients by their means over all processes, and buffers by those of the first, as DDP does.

    A parameter that has a gradient in some processes only counts as zero in the others.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_gradient = group.any_rank(*(parameter.grad is not None for parameter in parameters))
    gradients = []
    for parameter in itertools.compress(parameters, has_gradient):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    if gradients:
        group.all_reduce(gradients, [])
        torch._foreach_div_(gradients, group.ranks.count)
    group.broadcast(list(model.buffers()))


def check_agreement(group: RankGroup, config: OptimalConfig) -> None:
    """Raises UserError if the processes that train together have different settings of what they share."""
    shared = ("target_batch_size", "gpus", "fp16", "bf16", "max_duration_seconds", "over_long")
    first, *others = group.gather(tuple(getattr(config, name) for name in shared))
    if any(other != first for other in others):
        raise UserError(
            "the processes that train together have planned differently",
            hint="give create_optimal_config the same dataset, model and options in all of them; if their GPUs differ, "
            "the option gpu with the name of the weakest",
        )


def count_labels(inputs: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns for each item the number of labels that a loss does not ignore."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return np.ones(count_items(inputs), dtype=np.int64)
    return np.asarray((labels != IGNORED).flatten(1).sum(1).cpu(), dtype=np.int64)


def shares(reduction: Reduction, whole: Mapping[str, Any], parts: list[dict[str, Any]]) -> list[float]:
    """Returns the weights of the parts' losses in the loss of the whole."""
    if reduction == "sum":
        return [1.0] * len(parts)
    if reduction == "items":
        return [count_items(part) / count_items(whole) for part in parts]
    return [float(count_labels(part).sum() / max(1, count_labels(whole).sum())) for part in parts]


def restorer_of_random(device: torch.device) -> Callable[[], None]:
    """Returns a function that restores the present states of all random generators that a step may use."""
    of_torch, of_numpy, of_python = random_state(device), np.random.get_state(), random.getstate()

    def restore() -> None:
        set_random_state(of_torch, device)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    return restore


# -------------------------------------------------------------------------------------------------- memory in use


def memory_callback() -> Any:
    """Returns a TrainerCallback that watches and logs the device's memory. Raises UserError without transformers."""

    class MemoryCallback(import_package("transformers", "accelerate").TrainerCallback):  # type: ignore[misc]
        """Logs figures of the memory with those of the trainer, and warns where it is short, once between two logs."""

        watches_memory = True

        def __init__(self) -> None:
            self.monitor: Monitor | None = None
            self.has_warned = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.close()
            self.monitor = Monitor(args.device).__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.monitor and self.monitor.pressure() and not self.has_warned:
                log.warning("step %d: more than 90 %% of the memory is in use", state.global_step)
                self.has_warned = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if self.monitor and logs is not None:
                figures = self.monitor.figures()
                logs.update(figures)
                if state.log_history:
                    state.log_history[-1].update(figures)
            self.has_warned = False

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.close()

        def close(self) -> None:
            if self.monitor:
                self.monitor.__exit__(None, None, None)
                self.monitor = None

    return MemoryCallback()


@contextlib.contextmanager
def watched_first(trainer: Any) -> Iterator[None]:
    """Moves callbacks that watch memory before those that write logs, so that their figures are written too, and ends
    their threads also where the training fails."""
    callbacks = trainer.callback_handler.callbacks
    watching = [callback for callback in callbacks if getattr(callback, "watches_memory", False)]
    callbacks[:] = [*watching, *(callback for callback in callbacks if callback not in watching)]
    try:
        yield
    finally:
        for callback in watching:
            callback.close()
