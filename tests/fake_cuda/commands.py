"""The train commands as a user types them, in this process, on a fake card."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gputrain.engine.train
from gputrain.cli.app import main
from tests.fake_cuda.device import Copies, FakeCard, fake_cuda, switches
from tests.process import process_kept


@dataclass
class Ran:
    """What became of a command."""

    code: int
    folder: Path
    card: FakeCard
    steps: list[Copies] = field(default_factory=list)  # Copies of each step's update.
    switches: dict[str, bool] = field(default_factory=dict)  # State of torch's switches at the end.
    messages: io.StringIO = field(default_factory=io.StringIO)  # Its standard error.

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return found


def train(folder: Path, *words: object, passes_gb: Sequence[float] = (), **card: Any) -> Ran:
    """`gputrain WORDS... --output-dir FOLDER` on a card of its own. Its dry runs and steps take `passes_gb` for a
    moment, in their order."""
    with fake_cuda(**card) as found, mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder / "cache")}):
        ran = Ran(-1, folder / "run", found)
        with _counted_updates(ran, iter(passes_gb)), process_kept(), contextlib.redirect_stderr(ran.messages):
            typed = ["gputrain", *map(str, words), "--output-dir", str(ran.folder)]
            with mock.patch.object(sys, "argv", typed):
                try:
                    main()
                except SystemExit as ended:
                    ran.code = int(ended.code or 0)
                ran.switches = switches()
    return ran


@contextlib.contextmanager
def _counted_updates(ran: Ran, passes_gb: Iterator[float]) -> Iterator[None]:
    update, dry_run = gputrain.engine.train.update, gputrain.engine.train.dry_run

    def watched(*arguments: Any) -> Any:
        with ran.card.watched() as copies:
            scalars = update(*arguments)
        ran.steps.append(copies)
        ran.card.allocate_for_a_moment(next(passes_gb, 0.0))
        return scalars

    def tried(*arguments: Any) -> None:
        dry_run(*arguments)
        ran.card.allocate_for_a_moment(next(passes_gb, 0.0))

    with mock.patch.multiple(gputrain.engine.train, update=watched, dry_run=tried):
        yield
