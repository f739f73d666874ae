"""The train commands as a user types them, in this process, on a fake card."""

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gputrain.engine.train
from gputrain.bench.runner import BenchResult, BenchRow, NotMeasured, Settings
from gputrain.cli.app import main
from gputrain.planner import calibrate
from tests.fake_cuda.device import Copies, FakeCard, fake_cuda, switches


@dataclass
class Ran:
    """What became of a command."""

    code: int
    folder: Path
    card: FakeCard
    steps: list[Copies] = field(default_factory=list)  # Copies of each step's update.
    switches: dict[str, bool] = field(default_factory=dict)  # State of torch's switches at the end.
    children: list[dict[str, Any]] = field(default_factory=list)  # figures of the calibration's child programs

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return found


def train(folder: Path, *words: object, **card: Any) -> Ran:
    """`gputrain WORDS... --output-dir FOLDER` on a card of its own."""
    with fake_cuda(**card) as found, mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder / "cache")}):
        ran = Ran(-1, folder / "run", found)
        with _counted_updates(ran), _children_here(ran), _logging_kept():
            typed = ["gputrain", *map(str, words), "--output-dir", str(ran.folder)]
            with mock.patch.object(sys, "argv", typed):
                try:
                    main()
                except SystemExit as ended:
                    ran.code = int(ended.code or 0)
                ran.switches = switches()
    return ran


@contextlib.contextmanager
def _counted_updates(ran: Ran) -> Iterator[None]:
    update = gputrain.engine.train.update

    def watched(*arguments: Any) -> Any:
        with ran.card.watched() as copies:
            scalars = update(*arguments)
        ran.steps.append(copies)
        return scalars

    with mock.patch.object(gputrain.engine.train, "update", watched):
        yield


@contextlib.contextmanager
def _children_here(ran: Ran) -> Iterator[None]:
    """Run the programs of child processes in this one, from the text of their command line to that of their answer, on
    a card where CUDA has not started yet."""

    def measure_row(row: BenchRow, child: Any, minutes: float) -> BenchResult:
        program, kind = importlib.import_module(child[-2]), child[-1]
        settings: Settings = json.loads(json.dumps(row.settings))
        card = ran.card
        with fake_cuda(card.name, card.capability, card.memory_gb, compiled=True) as own:
            try:
                figures = json.loads(json.dumps(program.measure_request(kind, settings)))
            except NotMeasured as error:
                return BenchResult(row.label, row.settings, reason=str(error))
        ran.children.append({"figures": figures, "card": own, "settings": settings})
        return BenchResult(row.label, row.settings, figures)

    with mock.patch.object(calibrate, "measure_row", measure_row):
        yield


@contextlib.contextmanager
def _logging_kept() -> Iterator[None]:
    log = logging.getLogger("gputrain")
    handlers, propagate, level = log.handlers, log.propagate, log.level
    log.handlers = list(handlers)
    try:
        yield
    finally:
        log.handlers, log.propagate, log.level = handlers, propagate, level
