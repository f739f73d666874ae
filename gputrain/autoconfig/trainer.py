"""Arguments of transformers' Trainer, and a callback that watches the memory while it trains.

transformers is imported only if the caller has one of its objects or asks for one.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from gputrain.autoconfig.clips import BucketSampler
from gputrain.autoconfig.recovery import MOST_ITEMS, Parts
from gputrain.autoconfig.settings import import_transformers
from gputrain.errors import UserError
from gputrain.hw.monitor import Monitor
from gputrain.hw.runtime import release_memory

log = logging.getLogger(__name__)


def memory_callback(parts: Parts) -> Any:
    """Returns a TrainerCallback that watches and logs the device's memory. Raises UserError without transformers."""

    class MemoryCallback(import_transformers().TrainerCallback):  # type: ignore[misc]
        """Warns when memory is short, and relieves it when it has nearly run out, at most once between two logs."""

        watches_memory = True

        def __init__(self) -> None:
            self.monitor: Monitor | None = None
            self.handled = ""

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.close()
            self.monitor = Monitor(args.device).__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            pressure = self.monitor.pressure() if self.monitor else ""
            if pressure and pressure != self.handled:
                relieve(pressure, parts, state.global_step, args.train_batch_size)
                self.handled = pressure

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if self.monitor and logs is not None:
                figures = self.monitor.figures()
                logs.update(figures)
                if state.log_history:
                    state.log_history[-1].update(figures)
            self.handled = ""

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.close()

        def close(self) -> None:
            if self.monitor:
                self.monitor.__exit__(None, None, None)
                self.monitor = None

    return MemoryCallback()


def relieve(pressure: str, parts: Parts, step: int, micro_batch_size: int) -> None:
    """Warns; if memory has nearly run out, releases cached memory and makes micro-batches smaller."""
    if pressure == "warn":
        log.warning("step %d: more than 90 %% of the memory is in use", step)
        return
    release_memory()
    items = parts.size or micro_batch_size
    if items > 1:
        parts.halve(step, items, "more than 95 % of the memory in use")


@contextlib.contextmanager
def batched_by_length(trainer: Any, sampler: BucketSampler) -> Iterator[None]:
    """Has the trainer read the batches of the sampler, each of which says how many of its clips fit at once.

    Raises UserError if the trainer's arguments are not those for whole batches.
    """
    arguments = trainer.args
    share, several = sampler.batch_size // sampler.ranks.count, sampler.ranks.count > 1
    if (arguments.train_batch_size, arguments.gradient_accumulation_steps) != (share, 1):
        raise UserError(
            f"batches by length have {share} clips{' on each GPU' if several else ''}, and the trainer was made for "
            f"{arguments.train_batch_size} x {arguments.gradient_accumulation_steps}",
            hint="make its TrainingArguments with **config.training_arguments(by_length=True)",
        )
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")

    def load() -> Any:
        workers = arguments.dataloader_num_workers
        loader: DataLoader[Any] = EpochLoader(
            NumberedItems(trainer.train_dataset),
            batch_sampler=sampler,
            collate_fn=LimitingCollator(collate, sampler),
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and arguments.device.type == "cuda",
            persistent_workers=arguments.dataloader_persistent_workers and workers > 0,
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
        )
        # accelerate would divide the batches among the processes once more.
        return loader if several else trainer.accelerator.prepare(loader)

    trainer.get_train_dataloader = load
    try:
        yield
    finally:
        vars(trainer).pop("get_train_dataloader", None)


class EpochLoader(DataLoader[Any]):
    """DataLoader that passes on the epoch to its sampler of batches."""

    def set_epoch(self, epoch: int) -> None:
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


class NumberedItems(torch.utils.data.Dataset[tuple[int, Any]]):
    """The items of a dataset with their indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self._dataset[number]


class LimitingCollator:
    """Collates numbered items, and adds to a batch how many of them fit at once."""

    def __init__(self, collate: Callable[[list[Any]], Any], sampler: BucketSampler) -> None:
        self._collate, self._sampler = collate, sampler

    def __call__(self, numbered: list[tuple[int, Any]]) -> Any:
        numbers, items = zip(*numbered, strict=True)
        batch = self._collate(list(items))
        batch[MOST_ITEMS] = self._sampler.micro_batch_size(numbers)
        return batch


@contextlib.contextmanager
def watched_first(trainer: Any) -> Iterator[None]:
    """Moves callbacks that watch memory before those that write logs, so that their figures are written too."""
    handler = trainer.callback_handler
    order = list(handler.callbacks)
    watching = [callback for callback in order if getattr(callback, "watches_memory", False)]
    handler.callbacks[:] = [*watching, *(callback for callback in order if callback not in watching)]
    try:
        yield
    finally:
        handler.callbacks[:] = order
        for callback in watching:
            callback.close()
