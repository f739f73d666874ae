"""Arguments of transformers' Trainer, and a callback that watches the memory while it trains.

transformers is imported only if the caller has one of its objects or asks for one.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from gputrain.autoconfig.recovery import Parts
from gputrain.autoconfig.settings import import_transformers
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
