"""Demos: run every command of a kind of model in turn, as a user would type them, on data at hand."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from gputrain.cli import ui
from gputrain.errors import UserError
from gputrain.kinds import kinds


def run_demo(folder: Path, kind: str, run_command: Callable[[list[str]], object]) -> None:
    """Write source, data, run, export and synthesised results into `folder`. A second run does only what is missing.

    `run_command` takes the words of a gputrain command.

    Raises UserError if the folder holds something else.
    """
    demo = kinds()[kind].demo
    assert demo is not None  # The option --kind names kinds that have one.
    if folder.exists() and any(folder.iterdir()) and not (folder / demo.source).is_dir():
        raise UserError(
            f"{folder} is not empty, and holds no demo of {kind}", hint=f"--output-dir {folder.name}_{kind}, say"
        )
    began = time.monotonic()
    demo.make_source(folder)
    for line in demo.commands(folder):
        words = [str(word) for word in line]
        ui.err.print(f"\n[bold cyan]$ gputrain {shlex.join(words)}[/]", soft_wrap=True)
        run_command(words)
    ui.out.print()
    ui.print_figures(f"The demo took {time.monotonic() - began:.0f} s", demo.results(folder))
