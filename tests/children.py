"""Training runs of the toy in processes of their own, forked from one that has imported all that they need."""

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


class Child:
    """A run of the toy, whose steps take 20 ms at least, as the command line would start it."""

    def __init__(self, folder: Path, schedule: Schedule, **saving: object) -> None:
        self.talk = folder.with_suffix(f".{time.monotonic_ns()}.stderr")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.process = context.Process(target=_train, args=(self.talk, folder, schedule, saving))
        self.process.start()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> tuple[int | None, str]:
        """The exit code and what the child has said on stderr, once it has ended."""
        self.process.join(60)
        return self.process.exitcode, self.talk.read_text()


def _train(talk: Path, folder: Path, schedule: Schedule, saving: dict[str, object]) -> None:
    os.dup2(os.open(talk, os.O_WRONLY | os.O_CREAT), 2)
    recipe = toy.ToyRecipe(schedule, adversarial_from=3)
    ui.run(lambda: toy.train_toy(recipe, toy.quiet(folder, log_freq=1, **saving), _slow_batches))


def _slow_batches(first: int, last: int) -> Iterator[Tensor]:
    for x_BD in toy.batches(first, last):
        time.sleep(0.02)
        yield x_BD
