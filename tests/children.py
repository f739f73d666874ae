"""Training runs of the toy in processes of their own, forked from one that has imported all that they need."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch._dynamo  # noqa: F401 (the first step of an optimizer imports it)
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

from gputrain.cli import ui
from gputrain.engine.schedule import Schedule
from tests import toy
from tests.waiting import HANG_SECONDS

NUMBERS = itertools.count()


class Child:
    """A run of the toy as the command line would start it. Its steps take 5 ms at least, and after `last_batch` it
    waits for one that never comes, so that it is still there whenever a test comes to disturb it."""

    def __init__(self, folder: Path, schedule: Schedule, last_batch: int, **saving: object) -> None:
        self.talk = folder.with_suffix(f".{next(NUMBERS)}.stderr")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.process = context.Process(target=_train, args=(self.talk, folder, schedule, last_batch, saving))
        self.process.start()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> tuple[int | None, str]:
        """The exit code and what the child has said on stderr, once it has ended."""
        self.process.join(HANG_SECONDS)
        return self.process.exitcode, self.talk.read_text()


def _train(talk: Path, folder: Path, schedule: Schedule, last_batch: int, saving: dict[str, object]) -> None:
    os.dup2(os.open(talk, os.O_WRONLY | os.O_CREAT), 2)

    def slow_batches(first: int, last: int) -> Iterator[Tensor]:
        for x_BD in toy.batches(first, min(last, last_batch)):
            time.sleep(0.005)
            yield x_BD
        time.sleep(10 * HANG_SECONDS)

    recipe = toy.ToyRecipe(schedule, adversarial_from=3)
    ui.run(lambda: toy.train_toy(recipe, toy.quiet(folder, log_every_steps=1, **saving), slow_batches))
