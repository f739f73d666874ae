"""Requests to a training of the toy at certain steps, without a race."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from gputrain.engine.callbacks import requests
from gputrain.engine.callbacks.requests import Request, Requests, send
from tests.toy import batches
from tests.waiting import wait_until


class Asking:
    """Batches of the toy. Before that of a step, a request is sent, and the training has taken it up."""

    def __init__(self, folder: Path, wanted: Mapping[int, tuple], source=batches) -> None:
        self.folder, self.wanted, self.source = folder, wanted, source

    def __call__(self, first: int, last: int) -> Iterator[Tensor]:
        for step, x_BD in enumerate(self.source(first, last), start=first):
            if step in self.wanted:
                before = len(TAKEN)
                send(self.folder, *self.wanted[step])
                wait_until(lambda before=before: len(TAKEN) > before, f"request {self.wanted[step]} of step {step}")
            yield x_BD


TAKEN: list[Request] = []  # The requests that the trainings of this process have taken up.
take_up = Requests.take_up


def note_and_take_up(self: Requests, request: Request) -> None:
    try:
        take_up(self, request)
    finally:
        TAKEN.append(request)


def note_requests(monkeypatch) -> None:
    """Have trainings look for requests all the time, and note those that they have taken up."""
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(Requests, "take_up", note_and_take_up)
