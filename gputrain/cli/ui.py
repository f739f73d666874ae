"""Consoles, and errors as a user sees them. Data goes to stdout, talk to stderr."""

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gputrain.errors import Stopped, UserError

if TYPE_CHECKING:
    from gputrain.hw.check import Check
    from gputrain.vae.pictures import Refusal
    from gputrain.vae.validate import ImageReport, Spread

DONE, OUR_DEFECT, USERS_INPUT, RESUMABLE = 0, 1, 2, 75

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class LineHandler(logging.Handler):
    """Log records as lines on stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        label = "" if record.levelno <= logging.INFO else f"[yellow]{record.levelname.lower()}:[/] "
        with contextlib.suppress(OSError):  # a closed terminal must not end a run
            err.print(f"{label}{escape(record.getMessage())}", soft_wrap=True)


def run(program: Callable[[], object]) -> NoReturn:
    """Run the command line and exit: 0 done, 1 a defect of ours, 2 the user's input, 75 stopped and resumable."""
    log = logging.getLogger("gputrain")
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [LineHandler()], False
    try:
        program()
    except UserError as error:
        sys.exit(_say("error", error.message, error.hint, USERS_INPUT))
    except Stopped as error:
        sys.exit(_say("stopped", error.message, error.hint, RESUMABLE))
    except KeyboardInterrupt:
        sys.exit(_say("stopped", "interrupted", "run the same command again to go on", RESUMABLE))
    except Exception:
        traceback.print_exc()
        sys.exit(_say("error", "a defect of gputrain", "please report it with the lines above", OUR_DEFECT))
    sys.exit(DONE)


def _say(label: str, message: str, hint: str, code: int) -> int:
    with contextlib.suppress(OSError):
        err.print(f"[bold red]{label}:[/] {escape(message)}", soft_wrap=True)
        if hint:
            err.print(f"[bold]hint:[/] {escape(hint)}", soft_wrap=True)
    return code


def print_figures(title: str, figures: Mapping[str, object]) -> None:
    """A block of names and values on stdout."""
    out.print(f"[bold]{escape(title)}[/]")
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        out.print(f"  {name:<{width}}  {escape(shown)}", soft_wrap=True)


def print_checks(checks: Sequence["Check"]) -> None:
    """A line for each check, with the remedy under what failed."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "[green]ok[/]    " if check.passed else "[bold red]failed[/]"
        out.print(f"{mark}  {check.name:<{width}}  {escape(check.found)}", soft_wrap=True)
        if not check.passed:
            out.print(f"        {'':<{width}}  remedy: {escape(check.remedy)}", soft_wrap=True)


def print_refusals(refused: Sequence["Refusal"], shown: int = 20) -> None:
    """Files left out, with their reasons."""
    for refusal in refused[:shown]:
        err.print(f"[yellow]{refusal.reason}:[/] {escape(refusal.path)}: {escape(refusal.detail)}", soft_wrap=True)
    if len(refused) > shown:
        err.print(f"... and {len(refused) - shown} more", soft_wrap=True)


def print_validation(report: "ImageReport") -> None:
    """What a folder of pictures holds."""

    def spread(of: "Spread | None") -> str:
        return f"{of.min:g} to {of.max:g}, half of them under {of.median:g}" if of else "-"

    figures = {
        "readable pictures": report.pictures,
        "held out": report.held_out,
        "refused": len(report.refused),
        "other files": sum(report.ignored.values()),
        "formats": ", ".join(f"{count} {name}" for name, count in report.formats.items()),
        "size": f"{report.bytes / 1e6:.1f} MB",
        "width in pixels": spread(report.width),
        "height in pixels": spread(report.height),
    }
    if report.manifest:
        odd = {name: len(paths) for name, paths in vars(report.manifest).items() if paths}
        figures["manifest"] = ", ".join(f"{count} {name}" for name, count in odd.items()) or "agrees with the files"
    print_figures(report.input_dir, figures)


class Bar:
    """A progress bar on a terminal, and nothing elsewhere: `with Bar("preparing") as bar: work(bar.update)`."""

    def __init__(self, title: str) -> None:
        self.progress = Progress(
            TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=err, transient=True, disable=not err.is_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task(title, total=None)

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)
