"""Runs the parts of a subcommand of benchmarks/gpu.sh, the most important first, and prints one table at the end.

All parts share one process, the worker, so that torch's import, the start of CUDA and compiled code are paid once. A
part that fails leaves the others be. A part that reaches its limit, or crashes the process or its CUDA context, ends
the worker, and a new one goes on with the next part. After each part, and whenever a part notes a figure, the results
are written, so that a run that is killed keeps what it has found.

In the output folder are NAME.json, NAME.log (what the parts print) and tracebacks.txt, which all subcommands share.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.data import data_folder
from gputrain.bench.runner import NotMeasured, command_line, open_folder
from gputrain.errors import UserError, first_line

Figures = dict[str, Any]
STATES = {"ok": "ok", "failed": "FAILED", "cut off": "CUT OFF", "not run": "not run"}
TRACEBACKS, PLACE = "tracebacks.txt", ".place"  # PLACE: where a part is when it is cut off, which the worker writes.
SUMMARY = "summary"  # The figure that a line of the table shows, if a part has it.
LEAST_SECONDS = 3.0  # With less time left, a part does not begin.
GRACE_SECONDS = 10.0  # Time of a worker to end after its limit.
THREADS = 4  # Of products on the CPU.
NEW_WORKER = 9  # Exit code of a worker whose CUDA context is of no use any more.
WIDTH = 170  # Characters of a line of the table.
SHOWN_LINES = 14  # Lines of a traceback that are printed before the table.


@dataclass(frozen=True)
class Part:
    """A question to the GPU. `ask` returns figures; it raises NotMeasured if this device cannot answer."""

    name: str
    seconds: float  # Limit of its time.
    ask: Callable[["Context"], Figures]
    needs: tuple[str, ...] = ()  # Modules of packages without which it cannot run.
    in_smoke: bool = True  # False: a smoke test leaves it out, unless it is named.


@dataclass
class Result:
    """What came of a part."""

    name: str
    state: str = ""  # "": not begun; "running", or one of STATES.
    began: float = 0.0  # On the clock of time.time.
    limit: float = 0.0  # Seconds that it had.
    seconds: float = 0.0
    reason: str = ""
    figures: Figures = field(default_factory=dict)

    def line(self) -> str:
        known = ", ".join(f"{key} {short(value)}" for key, value in self.figures.items() if flat(value))
        shown = "; ".join(filter(None, (self.reason, str(self.figures.get(SUMMARY, known)))))
        return f"{STATES[self.state]:<8}{self.name:<34}{self.seconds:>6.1f} s  {' '.join(shown.split())}"[:WIDTH]


def flat(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not (isinstance(value, str) and len(value) > 80)


def short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass
class Report:
    """The results, and the file that holds them."""

    path: Path
    machine: Figures = field(default_factory=dict)
    command: str = ""
    results: list[Result] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Report":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, found["machine"], found["command"], [Result(**one) for one in found["parts"]])

    def write(self) -> None:
        """Replaces the file at once, so that a reader never finds half of it."""
        content = {"command": self.command, "machine": self.machine, "parts": [asdict(one) for one in self.results]}
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        aside.replace(self.path)

    def table(self, seconds: float) -> str:
        states = [one.state for one in self.results]
        counts = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        device = self.machine.get("device", "an unknown device")
        head = f"{self.path.stem} on {device}, torch {self.machine.get('torch', 'unknown')}: {counts}, {seconds:.0f} s"
        return "\n".join([head, *(one.line() for one in self.results)])


@dataclass
class Context:
    """What a part gets."""

    smoke: bool
    scratch: Path  # An empty folder of this worker, which is deleted at its end.
    data: Path  # Prepared data, as `gpu.sh prepare` makes them; need not exist.
    output: Path
    note: Callable[[Figures], None]  # Adds to the figures of the part, and writes them.
    ends: float = 0.0  # When the part is cut off, on the clock of time.time.

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def seconds_left(self) -> float:
        return self.ends - time.time()


@dataclass(frozen=True)
class Subcommand:
    name: str
    about: str | None
    seconds: int  # Default limit of all parts together.
    parts: Callable[[bool], Sequence[Part]]  # Takes whether it is a smoke test.
    needs_data: bool = False


def main(subcommand: Subcommand) -> None:
    """Runs all parts in workers, or is a worker itself. Exits with 1 if a part failed or was cut off."""
    parser = argparse.ArgumentParser(
        f"gpu.sh {subcommand.name}", description=subcommand.about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=Path(os.environ.get("OUT", "gpu_results")))
    parser.add_argument("--seconds", type=int, default=subcommand.seconds, help="limit of all parts together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, to see that the parts work")
    parser.add_argument("--data", type=Path, default=Path(".gpu_data"), help="folder that `gpu.sh prepare` has made")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts whose names contain one of these")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="parts whose names contain none of these")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)  # This process is a worker.
    options = parser.parse_args()
    chosen = subcommand.parts(options.smoke)
    if options.only:
        chosen = [part for part in chosen if any(words in part.name for words in options.only)]
        if not chosen:
            parser.error(f"no part is called {' or '.join(options.only)}")
    elif options.smoke:
        chosen = [part for part in chosen if part.in_smoke]
    chosen = [part for part in chosen if not any(words in part.name for words in options.skip)]
    if options.until:
        work(subcommand.name, chosen, options)
        return
    report = Report(options.output_dir / f"{subcommand.name}.json", command=command_line(f"gpu.sh {subcommand.name}"))
    report.results = [Result(part.name) for part in chosen]
    try:
        open_folder(options.output_dir)
        report.write()
        (options.output_dir / TRACEBACKS).touch()
    except UserError as error:
        sys.exit(error.message)
    began = time.time()
    with (
        data_folder(options.data, few=options.smoke)
        if subcommand.needs_data
        else contextlib.nullcontext(options.data) as data
    ):
        report = supervise(report, [*sys.argv[1:], "--data", str(data)], began + options.seconds)
    print_tracebacks(options.output_dir / TRACEBACKS, began)
    print("\n" + report.table(time.time() - began), flush=True)
    sys.exit(any(one.state in ("failed", "cut off") for one in report.results))


# ------------------------------------------------------------------------------------------------------ the supervisor


def supervise(report: Report, words: Sequence[str], until: float) -> Report:
    """Starts workers, with these words on their command lines, until every part has been tried or the time is over.
    Returns what was found."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    path, problem = report.path, ""
    while not problem and any(not one.state for one in report.results):
        begun = len([one for one in report.results if one.state])
        try:
            ending = run_worker(words, path.with_suffix(".log"), until)
        except KeyboardInterrupt:
            ending = problem = "stopped by a signal"
        report = Report.read(path)
        for one in report.results:
            if one.state == "running":
                end_of_worker(one, ending, path)
        report.write()  # The next worker reads it.
        if not problem and len([one for one in report.results if one.state]) == begun:
            problem = f"no worker begins ({ending}): {_last_line(path.with_suffix('.log'))}"
    for one in report.results:
        if not one.state:
            one.state, one.reason = "not run", problem or "no time was left"
    report.write()
    path.with_suffix(PLACE).unlink(missing_ok=True)
    return report


def end_of_worker(result: Result, ending: str, path: Path) -> None:
    """Notes what became of the part in which a worker has ended. At a limit, the worker has written where it was."""
    seconds = time.time() - result.began
    result.seconds = round(seconds, 1)
    place = path.with_suffix(PLACE)
    if seconds < result.limit:
        result.state, result.reason = "failed", f"the process: {ending}"
        return
    result.state = "cut off"
    if place.exists() and (text := place.read_text(encoding="utf-8", errors="replace")):
        write_traceback(path, result.name, text)


def write_traceback(path: Path, part: str, text: str) -> None:
    with path.with_name(TRACEBACKS).open("a", encoding="utf-8") as file:
        file.write(f"\n== {path.stem}: {part} at {time.time()}\n{text}")


def run_worker(words: Sequence[str], log: Path, until: float) -> str:
    """Runs a worker. Returns how it ended; its children end with it."""
    module = sys.modules["__main__"].__spec__
    assert module is not None  # The subcommands are run by `python -m`.
    command = [sys.executable, "-m", module.name, *words, "--until", str(until)]
    reads, writes = os.pipe()  # It closes when this process ends, for whatever reason, and the worker ends too.
    with log.open("ab") as output:
        worker = subprocess.Popen(
            command, stdin=reads, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
        )  # fmt: skip
    try:
        code = worker.wait(max(0.0, until + GRACE_SECONDS - time.time()))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        for end in (reads, writes):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    if code is None:
        return "limit"
    return f"code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def print_tracebacks(path: Path, since: float) -> None:
    """Prints the end of each traceback that was written since then."""
    sections = path.read_text(encoding="utf-8", errors="replace").split("\n== ")
    for section in sections[1:]:
        head, _, text = section.partition("\n")
        if float(head.rpartition(" ")[2]) >= since:
            print(f"\n== {head.rpartition(' at ')[0]}\n" + "\n".join(text.rstrip().splitlines()[-SHOWN_LINES:]))


# ---------------------------------------------------------------------------------------------------------- the worker


def work(name: str, parts: Sequence[Part], options: argparse.Namespace) -> None:
    """Runs the parts that have not begun yet, in this process."""
    end_with_supervisor()
    import torch

    from gputrain.hw.probe import machine_facts, probe

    probe()  # It asks for expandable segments before CUDA starts.
    # The references on the CPU are tiny, and other processes compile: many threads would wait for each other.
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; --smoke tries the parts on the CPU")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    report = Report.read(options.output_dir / f"{name}.json")
    report.machine = machine_facts("cpu" if options.smoke else "cuda")
    by_name = {part.name: part for part in parts}
    for result in report.results:
        if not result.state:
            run_part(by_name[result.name], result, report, options)
            if result.state == "failed" and not options.smoke and context_is_broken():
                sys.exit(NEW_WORKER)
    sys.stdout.flush()
    os._exit(0)  # Without waiting for processes that a part has left, such as those that predict.


def run_part(part: Part, result: Result, report: Report, options: argparse.Namespace) -> None:
    """Runs a part within its limit. Past it, everything's place is written and this process ends."""
    began = time.time()
    slowly = 10 if options.smoke else 1  # A CPU that other tests use too.
    limit = min(slowly * part.seconds, options.until - began)
    if missing := [module for module in part.needs if find_spec(module) is None]:
        result.state, result.reason = "not run", f"not installed: {', '.join(missing)}"
        report.write()
        return
    if limit < min(LEAST_SECONDS, part.seconds):
        result.state, result.reason = "not run", "no time was left"
        report.write()
        return

    def note(figures: Figures) -> None:
        result.figures.update(figures)
        result.seconds = round(time.time() - began, 1)
        report.write()

    result.state, result.began, result.limit = "running", began, limit
    print(f"\n== {part.name} (at most {limit:.0f} s)", flush=True)
    note({})
    try:
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gputrain-"))
            place = stack.enter_context(report.path.with_suffix(PLACE).open("w", encoding="utf-8"))
            faulthandler.dump_traceback_later(limit, exit=True, file=place)
            stack.callback(faulthandler.cancel_dump_traceback_later)
            context = Context(options.smoke, Path(scratch), options.data, options.output_dir, note, began + limit)
            result.figures.update(part.ask(context))
            result.state = "ok"
    except NotMeasured as reason:
        result.state, result.reason = "not run", str(reason)
    except (Exception, SystemExit) as error:
        result.state, result.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
        write_traceback(report.path, part.name, traceback.format_exc())
    note({})
    clean_up()


def clean_up() -> None:
    """Leaves the next part a process as the first one had it. It is called when no traceback keeps tensors alive."""
    import torch

    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.set_per_process_memory_fraction(1.0)
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def context_is_broken() -> bool:
    """Returns whether CUDA refuses all further work, as after an illegal memory access."""
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(8, device="cuda").sum().item() != 8)
    except RuntimeError as error:
        print(f"CUDA is of no use any more ({first_line(error)}); the next part gets a new process", flush=True)
        return True


def end_with_supervisor() -> None:
    """Ends this process when its supervisor ends, whose end of the pipe is this process's standard input."""
    import threading

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
