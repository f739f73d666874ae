"""Consoles, the progress bar, and the exit with an error. Data goes to stdout, messages to stderr."""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gputrain.errors import Stopped, UserError
from gputrain.hw.ranks import Ranks

DONE, INTERNAL_ERROR, USER_ERROR, RESUMABLE = 0, 1, 2, 75

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class LineHandler(logging.Handler):
    """Prints log records as lines on stderr, above a progress bar if there is one. Of several ranks, all but the leader
    only print what concerns them alone."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def emit(self, record: logging.LogRecord) -> None:
        if not self.ranks.leads and not getattr(record, "each_rank", False):
            return
        label = "" if record.levelno <= logging.INFO else f"[yellow]{record.levelname.lower()}:[/] "
        with contextlib.suppress(OSError):  # A closed terminal must not end a run.
            err.print(f"{_rank_prefix(self.ranks)}{label}{escape(record.getMessage())}", soft_wrap=True)


def run(program: Callable[[], object]) -> NoReturn:
    """Run the command line and exit: 0 done, 1 internal error, 2 user error, 75 stopped and resumable."""
    log = logging.getLogger("gputrain")
    log.setLevel(logging.INFO)
    ranks = Ranks.launched(os.environ)
    log.handlers, log.propagate = [LineHandler(ranks)], False
    out.quiet = not ranks.leads
    try:
        program()
    except UserError as error:
        sys.exit(_print_end("error", error.message, error.hint, USER_ERROR))
    except Stopped as error:
        code = _print_end("stopped", error.message, error.hint, RESUMABLE)
        # To torchrun every code but 0 is a failure, after which it would start the ranks again.
        sys.exit(DONE if ranks.restarts_left > 0 else code)
    except KeyboardInterrupt:
        sys.exit(_print_end("stopped", "interrupted", "run the same command again to go on", RESUMABLE))
    except Exception:
        traceback.print_exc()
        message = "internal error of gputrain"
        sys.exit(_print_end("error", message, "please report it with the lines above", INTERNAL_ERROR))
    sys.exit(DONE)


def _print_end(label: str, message: str, hint: str, code: int) -> int:
    ranks = Ranks.launched(os.environ)
    if label == "stopped" and not ranks.leads:
        return code
    with contextlib.suppress(OSError):
        err.print(f"{_rank_prefix(ranks)}[bold red]{label}:[/] {escape(message)}", soft_wrap=True)
        if hint:
            err.print(f"{_rank_prefix(ranks)}[bold]hint:[/] {escape(hint)}", soft_wrap=True)
    return code


def _rank_prefix(ranks: Ranks) -> str:
    return "" if ranks.leads else f"rank {ranks.index}: "


class TerminalBar:
    """A progress bar on a terminal, and nothing elsewhere: `with TerminalBar("preparing") as bar: work(bar.update)`."""

    def __init__(self, title: str) -> None:
        self.progress = Progress(
            TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=err, transient=True, disable=not err.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task(title, total=None)

    def __enter__(self) -> "TerminalBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)
