"""The state of the process in which the tests run."""

import contextlib
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator

from gputrain.engine.stop import CAUSES

KILLED = 9  # The exit code of a process that a test ends.


def seed_all() -> None:
    """Seed the random numbers that are drawn without a generator of their own, so that no test draws others if another
    one ran before it."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


def killed_at(function: str, work: Callable[[], object]) -> bool:
    """Do the work in a process of its own, which ends abruptly where it calls this function of the module `os`.
    Returns True if it has ended there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    try:
        setattr(os, function, lambda *args, **options: os._exit(KILLED))
        work()
    finally:
        os._exit(0)


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Restore what a training or a command line within the process of the tests changes for good: its handlers of
    signals and of log lines, and its environment. Otherwise what a test sees would depend on those before it."""
    signals = {number: signal.getsignal(number) for name in CAUSES if (number := getattr(signal, name, None))}
    log, environment = logging.getLogger("gputrain"), dict(os.environ)
    handlers, propagates, level = log.handlers[:], log.propagate, log.level
    try:
        yield
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        log.handlers, log.propagate = handlers, propagates
        log.setLevel(level)  # It also empties the loggers' caches of what is enabled.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
