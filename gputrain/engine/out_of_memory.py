"""Running out of memory: the same items are computed in a form that needs less, and no result changes.

1. In the gradients of a batch (`step.accumulate`) nothing has stepped yet. The gradients are dropped and the random
   numbers restored; memory that only saves time is freed (CUDA graphs), or else the micro-batch is halved, for the rest
   of the run, and the same items are computed again. The run ends with an error if a single item does not fit.
2. Before and after the gradients (the batch on its way to the device, the state of the optimizers, Muon's
   products), unused memory is released and the work is done again, once (`retried_once`).
3. Samples and evaluations are made again after memory was freed, and are skipped if that was not enough
   (callbacks/reports.py).
4. Before memory runs out, from 95 % of the device on, unused memory is released, and if the next line of metrics finds
   it full again, the largest micro-batch is halved (`MemoryRelief`).
5. What fits nowhere ends the run. The last completed step is saved (callbacks/save.py).

Everywhere, memory is released outside of the except block, because the traceback of the error keeps the tensors of the
failed attempt alive.
"""

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from gputrain.errors import first_line
from gputrain.hw.monitor import Pressure
from gputrain.hw.runtime import compiler_failure, is_out_of_memory, release_memory

T = TypeVar("T")
log = logging.getLogger(__name__)

REMEDY = "a smaller picture or clip, --gradient-checkpointing, a smaller preset, or a larger GPU"


class FailedAttempt(NamedTuple):
    """The reason why an attempt to compute gradients has failed."""

    cause: str  # The error's message in one line.
    of_compiler: bool  # False: memory ran out.

    @classmethod
    def of(cls, error: Exception) -> "FailedAttempt | None":
        """Returns the reason if another attempt may succeed. Call it in the except block, as `is_out_of_memory`."""
        if is_out_of_memory(error):
            return cls(first_line(error), of_compiler=False)
        failure = compiler_failure(error)
        return cls(failure, of_compiler=True) if failure else None


def retried(
    attempt: Callable[[], T],
    make_room: Callable[[FailedAttempt], None],
    restore_random: Callable[[], None],
    *,
    without_compiler: bool = False,
) -> T:
    """Returns what `attempt` returns. When memory runs out, it is called again, as often as necessary, with the same
    random numbers; with `without_compiler` also when the compiler fails.

    `make_room` drops the gradients of the failed attempt and has the next one need less, or raises an error.
    """
    while True:
        try:
            return attempt()
        except Exception as error:
            failure = FailedAttempt.of(error)
            if failure is None or (failure.of_compiler and not without_compiler):
                restore_random()
                raise
        make_room(failure)
        release_memory()
        restore_random()


def retried_once(attempt: Callable[[], T], instead: Callable[[], T] | None = None) -> T:
    """Returns what `attempt` returns. When memory runs out, unused memory is released and it is called again, or the
    function that does the same with less memory."""
    try:
        return attempt()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return (instead or attempt)()


class MemoryRelief:
    """Reduces memory use when the monitor reports that the device is nearly full."""

    def __init__(self, micro_batch: Mapping[str, int], shrink: Callable[[str, str, int], None]) -> None:
        """Takes the present micro-batch sizes by step group, and the function that halves that of a group."""
        self.micro_batch, self.shrink = micro_batch, shrink
        self.warned = False
        self.times_in_a_row = 0  # Number of consecutive reports that the memory was too full.

    def relieve(self, pressure: Pressure, step: int) -> None:
        """Release unused memory first; if that was not enough, reduce the largest micro-batch."""
        if pressure == "warn" and not self.warned:
            self.warned = True
            log.warning("the device's memory is 90 % full; at 95 %, the micro-batch will be reduced")
        if pressure != "act":
            self.times_in_a_row = 0
            return
        self.times_in_a_row += 1
        release_memory()
        if self.times_in_a_row > 1 and max(self.micro_batch.values()) > 1:
            self.shrink(max(self.micro_batch, key=self.micro_batch.__getitem__), "memory 95 % full", step)
