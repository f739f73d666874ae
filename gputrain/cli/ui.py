"""Consoles, the progress bar, and the exit with an error. Data goes to stdout, messages to stderr."""

import codecs
import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NoReturn

from rich import markup
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status

from gputrain.caches import provide_home
from gputrain.engine.stop import COMMAND_CLOCK, format_duration, interrupt_at_signals, leave_at_signals
from gputrain.errors import Stopped, UserError, missing_package, without_secrets
from gputrain.formatting import format_number
from gputrain.hw.ranks import Ranks

DONE, INTERNAL_ERROR, USER_ERROR, NOT_PASSED, RESUMABLE = 0, 1, 2, 3, 75

# Errors that full or failing disks cause, and those of names and permissions; neither is a defect of the program.
DISK_ERRNOS = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}
USERS_ERRNOS = DISK_ERRNOS | {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.ENODEV,
}  # fmt: skip
LINE_SECONDS = 30.0  # Time between lines of progress where no bar is drawn.
SPEED_SECONDS = 3600.0  # The time that is left follows from the items of this time: some take minutes each.
# Everything that changes a terminal or cannot be written as UTF-8. Continuation lines of a message are indented, which
# distinguishes them from a line break in the name of a file.
UNPRINTABLE = re.compile(r"(?!\n  )[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class PipeConsole(Console):
    """A console that becomes quiet if the program that reads its output ends, as `head` does: a command goes on without
    it, and its files and its exit code are as usual.

    FORCE_COLOR, which notebooks and build servers set, colours what goes to a pipe and makes no terminal of it: a bar
    could not be redrawn there, and would fill the output with its copies."""

    def __init__(self, **options: Any) -> None:
        stream = options.get("file") or (sys.stderr if options.get("stderr") else sys.stdout)
        if stream is None or not stream.isatty():
            color = "standard" if os.environ.get("FORCE_COLOR") else None
            options = {"force_terminal": False, "color_system": color, **options}
        super().__init__(**options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Show a text while something works, with a spinner that every encoding has."""
        return LineStatus(status, console=self, **{"spinner": "line", **options})


class LineStatus(Status):
    """A text beside a spinner on a terminal, and elsewhere a line at an update every half minute."""

    def start(self) -> None:
        super().start()
        self.line_at = time.monotonic() + LINE_SECONDS

    def update(self, status: RenderableType | None = None, **options: Any) -> None:
        super().update(status, **options)
        if status and not self.console.is_terminal and time.monotonic() >= self.line_at:
            self.line_at = time.monotonic() + LINE_SECONDS
            self.console.print(status, soft_wrap=True)


class Escaped:
    """Replaces what the encoding of a standard stream lacks by the escapes of JSON, whose lines keep their meaning."""

    def __init__(self) -> None:
        self.replaced = False

    def __call__(self, error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        self.replaced = True
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def prepare_streams(environment: Mapping[str, str]) -> Escaped:
    """Let no print fail, whatever the encoding of standard output and standard error: a terminal gets escapes for what
    it lacks, and what is redirected is UTF-8 as every file of this program, unless PYTHONIOENCODING says otherwise.

    Returns what tells whether the data on standard output needed escapes.
    """
    of_data = Escaped()
    for stream, name, escaped in ((sys.stdout, "data", of_data), (sys.stderr, "messages", Escaped())):
        codecs.register_error(f"gputrain_{name}", escaped)
        if isinstance(stream, io.TextIOWrapper):  # Otherwise it is closed, or that of a test.
            encoding, _, errors = environment.get("PYTHONIOENCODING", "").partition(":")
            chosen = errors if errors and stream is sys.stdout else f"gputrain_{name}"
            stream.reconfigure(encoding=encoding or (None if stream.isatty() else "utf-8"), errors=chosen)
    return of_data


def discard(file: IO[str]) -> None:
    """Send what is still written to a standard stream to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


out = PipeConsole(highlight=False)
err = PipeConsole(stderr=True, highlight=False)


def escape(text: str) -> str:
    """Return a text that consoles print as it is, on one line: names of files may contain markup, line breaks and
    bytes that are no UTF-8."""
    return markup.escape(UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text))


def one_line(text: str) -> str:
    """Return a name as `escape` does, and on one line even if its line breaks are followed by spaces."""
    return escape(text.replace("\n", "\\n"))


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
        text = record.getMessage()
        if not getattr(record, "has_token", False):  # The address of a page is of no use without its token.
            text = without_secrets(text)
        with contextlib.suppress(OSError):  # A closed terminal must not end a run.
            err.print(f"{_rank_prefix(self.ranks)}{label}{escape(text)}", soft_wrap=True)


def run(program: Callable[[], object]) -> NoReturn:
    """Run the command line and exit: 0 done, 1 internal error, 2 user error, 75 stopped and resumable."""
    COMMAND_CLOCK.start()
    escaped = prepare_streams(os.environ)
    ranks = Ranks.launched(os.environ)
    if not ranks.under_torchrun:  # A rank that waits for another one could not react before torchrun's patience ends.
        interrupt_at_signals(RESUMABLE)
    log = logging.getLogger("gputrain")
    log.setLevel(logging.INFO)
    log.handlers, log.propagate = [LineHandler(ranks)], False
    provide_home()
    out.quiet = not ranks.leads
    code = _outcome(program, ranks)
    if escaped.replaced:
        log.warning(
            "standard output is %s, which lacks some of the characters: they are written as \\uXXXX; "
            "PYTHONIOENCODING=utf-8 writes them all", sys.stdout.encoding
        )  # fmt: skip
    try:
        if sys.stdout is not None:  # None if the shell has closed it.
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)  # Otherwise the interpreter tries to write it again at its end, and exits with 120.
    except (OSError, ValueError):
        pass
    leave_at_signals(code)
    sys.exit(code)


def _outcome(program: Callable[[], object], ranks: Ranks) -> int:
    """Run the command line, print how it ended if it has failed or was stopped, and return the exit code."""
    try:
        program()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        # The help page's own console exits with 1 if nobody reads the page to its end.
        return DONE if isinstance(ended.__context__, BrokenPipeError) else ended.code
    except UserError as error:
        return _print_end("error", error.message, error.hint, USER_ERROR)
    except Stopped as error:
        code = _print_end("stopped", error.message, error.hint, RESUMABLE)
        # To torchrun every code but 0 is a failure, after which it would start the ranks again.
        return DONE if ranks.restarts_left > 0 else code
    except KeyboardInterrupt as error:
        return _print_end("stopped", str(error) or "interrupted", "run the same command again", RESUMABLE)
    except OSError as error:
        described = describe(error)
        return _print_end("error", *described, USER_ERROR) if described else _print_defect()
    except ModuleNotFoundError as error:
        # torch raises the error of a data worker again, with nothing but its text.
        named = re.search(r"No module named '([^']+)'", str(error))
        module = error.name or (named[1] if named else "gputrain")
        if "." in module or module == "gputrain":  # A part of an installed package is missing.
            return _print_defect()
        missing = missing_package(module)
        return _print_end("error", missing.message, missing.hint, USER_ERROR)
    except Exception:
        return _print_defect()
    return DONE


def describe(error: OSError) -> tuple[str, str] | None:
    """Return the message and the hint for an error of the user's files or of standard output, None for any other."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    if names and error.errno in USERS_ERRNOS:
        return f"{' -> '.join(names)}: {error.strerror}", "name another file or folder, or see to its disk"
    if names or error.errno not in DISK_ERRNOS:
        return None
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.close()  # Otherwise the interpreter tries to write it again at its end.
    return f"the output cannot be written: {error.strerror}", "see to the disk, or to where the output goes"


def _print_defect() -> int:
    with contextlib.suppress(OSError):
        traceback.print_exc()
    return _print_end("error", "internal error of gputrain", "please report it with the lines above", INTERNAL_ERROR)


def _print_end(label: str, message: str, hint: str, code: int) -> int:
    ranks = Ranks.launched(os.environ)
    if label == "stopped" and not ranks.leads:
        return code
    with contextlib.suppress(OSError):
        err.print(f"{_rank_prefix(ranks)}[bold red]{label}:[/] {escape(without_secrets(message))}", soft_wrap=True)
        if hint:
            err.print(f"{_rank_prefix(ranks)}[bold]hint:[/] {escape(without_secrets(hint))}", soft_wrap=True)
    return code


def _rank_prefix(ranks: Ranks) -> str:
    return "" if ranks.leads else f"rank {ranks.index}: "


class TerminalBar:
    """A progress bar on a terminal, and elsewhere a line every half minute: `with TerminalBar("preparing") as bar:
    work(bar.update)`.

    It shows the time that has passed, and the time that is left, which counts from the first item and not from the
    loading of models before.
    """

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic, *, shown: bool = True) -> None:
        self.clock, self.title = clock, title
        self.line_at = clock() + LINE_SECONDS  # Time of the next line where no bar is drawn.
        self.draws_lines = shown and not err.is_terminal
        self.progress = Progress(
            TextColumn(title), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn(),
            TimeRemainingColumn(), console=err, transient=True, disable=not (shown and err.is_terminal),
            get_time=clock, speed_estimate_period=SPEED_SECONDS,
        )  # fmt: skip
        self.task = self.progress.add_task(title, total=None, count="")

    def __enter__(self) -> "TerminalBar":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def update(self, done: float, total: int | None) -> None:
        """Show that `done` items of `total` are done, which may be unknown; parts of an item count."""
        count = f"{int(done)}" if total is None else f"{int(done)}/{total}"
        self.progress.update(self.task, completed=done, total=total, count=count)
        if self.draws_lines and self.clock() >= self.line_at:
            self.line_at = self.clock() + LINE_SECONDS
            task = self.progress.tasks[0]
            left = "" if task.time_remaining is None else f", {format_duration(task.time_remaining)} left"
            err.print(f"{self.title}: {count}, {format_duration(task.elapsed or 0.0)}{left}", soft_wrap=True)


class TerminalOutput:
    """The output of a kind's own command (kinds.CommandOutput), on the terminal or where it is redirected to."""

    @contextlib.contextmanager
    def progress(self, title: str, *, shown: bool = True) -> Iterator[Callable[[float, int], None]]:
        with TerminalBar(title, shown=shown) as bar:
            yield bar.update

    def data(self, text: str) -> None:
        out.print(escape(text), soft_wrap=True)

    def message(self, text: str) -> None:
        err.print(text, soft_wrap=True)

    def figures(self, title: str, figures: Mapping[str, object]) -> None:
        print_figures(title, figures)


def print_figures(title: str, figures: Mapping[str, object]) -> None:
    out.print(f"[bold]{one_line(title)}[/]")
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        shown = format_number(value, 4) if isinstance(value, float) else str(value)
        out.print(f"  {name:<{width}}  {one_line(shown)}", soft_wrap=True)
