"""Runs the parts of a subcommand of benchmarks/gpu.sh, the most important first, and prints one table at the end.

The parts share one process, the worker, so that torch's import and the start of CUDA are paid once. A part that fails
leaves the others be. A part that reaches its limit, or crashes the process or its CUDA context, ends the worker, and a
new one goes on with the next part. Parts that compile have a worker each, from the beginning and beside the others, as
compiling keeps a core busy and hardly the GPU; whatever is timed is timed alone (`Context.alone`). After each part, and
whenever a part notes a figure, the results are written, so that a run that is killed keeps what it has found.

In the output folder are NAME.json, NAME.log (what the parts print) and tracebacks.txt, which all subcommands share.

In a simulation, SIMULATED_SECONDS in the environment names a JSON file with the seconds of parts, and by the clock of
the run a part takes so long, up to its limit, whatever it takes here. One that the file does not name takes no time;
"start" is what passes before the first.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
ALONE_SECONDS = 20.0  # Longest wait for another process that times something.
SAVE_SECONDS = 8.0  # Time before the limit of a part at which compiled code is written.
FILE_BYTES = 14 << 20  # Of compiled code: larger files may not come back from a machine.
LOOK_SECONDS = 0.1  # Between looks at the workers.
THREADS = 4  # Of products on the CPU.
COMPILE_THREADS = 3  # Processes of each worker that compile kernels.
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
    beside: bool = False  # True: it compiles, in a process of its own.


@dataclass
class Result:
    """What came of a part."""

    name: str
    state: str = ""  # "": not begun; "running", or one of STATES.
    began: float = 0.0  # Seconds after the beginning of the run.
    limit: float = 0.0  # Seconds that it had.
    seconds: float = 0.0
    reason: str = ""
    figures: Figures = field(default_factory=dict)

    def line(self) -> str:
        known = ", ".join(f"{key} {short(value)}" for key, value in self.figures.items() if flat(value))
        shown = "; ".join(filter(None, (self.reason, str(self.figures.get(SUMMARY, known)))))
        times = f"{self.began:>4.0f} to {self.began + self.seconds:>5.1f} s"
        return f"{STATES[self.state]:<8}{self.name:<40}{times}  {' '.join(shown.split())}"[:WIDTH]


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
    began: float = field(default_factory=time.time)
    ahead: float = 0.0  # Seconds by which the clock of a simulation is ahead.

    @classmethod
    def read(cls, path: Path) -> "Report":
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, results=[Result(**one) for one in found.pop("parts")], **found)

    def now(self) -> float:
        """Returns the seconds since the beginning of the run."""
        return time.time() - self.began + self.ahead

    def write(self) -> None:
        """Replaces the file at once, so that a reader never finds half of it."""
        parts = {"parts": [asdict(one) for one in self.results]}
        content = {name: value for name, value in vars(self).items() if name not in ("path", "results")} | parts
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        aside.replace(self.path)

    def table(self) -> str:
        states = [one.state for one in self.results]
        counts = ", ".join(f"{states.count(state)} {state}" for state in STATES if state in states)
        device = self.machine.get("device", "an unknown device")
        seconds = max(one.began + one.seconds for one in self.results)
        head = f"{self.path.stem} on {device}, torch {self.machine.get('torch', 'unknown')}: {counts}, {seconds:.0f} s"
        return "\n".join([head, *(one.line() for one in self.results)])


@dataclass
class Context:
    """What a part gets."""

    smoke: bool
    scratch: Path  # An empty folder of this worker, which is deleted at its end.
    data: Path  # What `gpu.sh prepare` has made; need not exist.
    output: Path
    note: Callable[[Figures], None]  # Adds to the figures of the part, and writes them.
    shared: Path  # A folder of all workers.
    ends: float = 0.0  # When the part is cut off, on the clock of time.time.

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def seconds_left(self) -> float:
        return self.ends - time.time()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other worker times anything. One that hangs meanwhile is not waited for."""
        import fcntl

        ends = time.time() + ALONE_SECONDS
        with (self.shared / "lock").open("w") as file:  # Closing it gives the lock back.
            while time.time() < ends:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.02)
            yield


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
    parser.add_argument("--output-dir", type=Path, metavar="DIR", default=Path(os.environ.get("OUT", "gpu_results")))
    parser.add_argument("--seconds", type=int, default=subcommand.seconds, help="limit of all parts together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, to see that the parts work")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", default=Path(".gpu_data"), help="folder that `gpu.sh prepare` has made"
    )
    parser.add_argument("--caches", type=Path, metavar="FOLDER", help="compiled code, which is read and written")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts whose names contain one of these")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="parts whose names contain none of these")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # This process is a worker, and that its file.
    options = parser.parse_args()
    chosen = subcommand.parts(options.smoke)
    if options.only:
        chosen = [part for part in chosen if any(words in part.name for words in options.only)]
        if not chosen:
            parser.error(f"no part is called {' or '.join(options.only)}")
    elif options.smoke:
        chosen = [part for part in chosen if part.in_smoke]
    chosen = [part for part in chosen if not any(words in part.name for words in options.skip)]
    if options.report:
        work(chosen, options)
        return
    report = Report(options.output_dir / f"{subcommand.name}.json", command=command_line(f"gpu.sh {subcommand.name}"))
    report.results = [Result(part.name) for part in chosen]
    try:
        for folder in filter(None, (options.output_dir, options.caches)):
            open_folder(folder)
        report.write()
        (options.output_dir / TRACEBACKS).touch()
    except UserError as error:
        sys.exit(error.message)
    with (
        data_folder(options.data, few=options.smoke)
        if subcommand.needs_data
        else contextlib.nullcontext(options.data) as data
    ):
        report.began = time.time()
        in_turn = [part.name for part in chosen if not part.beside]
        groups = [in_turn, *([part.name] for part in chosen if part.beside)]
        supervise(report, [group for group in groups if group], [*sys.argv[1:], "--data", str(data)], options.seconds)
    print_tracebacks(options.output_dir / TRACEBACKS, report.began)
    print("\n" + report.table(), flush=True)
    sys.exit(any(one.state in ("failed", "cut off") for one in report.results))


def simulated_seconds() -> dict[str, float] | None:
    """Returns the seconds of the parts in a simulation; None: this is none."""
    file = os.environ.get("SIMULATED_SECONDS")
    return dict(json.loads(Path(file).read_text(encoding="utf-8"))) if file else None


# ------------------------------------------------------------------------------------------------------ the supervisor


def supervise(report: Report, groups: Sequence[Sequence[str]], words: Sequence[str], seconds: float) -> None:
    """Runs each group of parts in a worker, with these words on its command line, until every part has been tried or
    the time is over. Writes the report whenever there is a new figure."""
    stopped: list[int] = []
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda number, frame: stopped.append(number))
    by_name, seen = {one.name: one for one in report.results}, dict[Path, int]()
    ends = (
        time.time() + GRACE_SECONDS + seconds * (1 if simulated_seconds() is None else 10)
    )  # Its clock is another one.
    with tempfile.TemporaryDirectory(prefix="gputrain-") as folder:
        workers = []
        for number, names in enumerate(groups):
            one = replace(report, path=Path(folder) / f"{number}.json", results=[by_name[name] for name in names])
            one.write()
            workers.append(Worker(one.path, report.path, words))
        while any(worker.process for worker in workers):
            time.sleep(LOOK_SECONDS)
            for worker in workers:
                worker.tend("stopped by a signal" if stopped else "no time was left" if time.time() > ends else "")
            changed = {worker.path: worker.path.stat().st_mtime_ns for worker in workers}
            for path in [path for path in changed if changed[path] != seen.get(path)]:
                found = Report.read(path)
                report.machine = report.machine or found.machine
                by_name |= {one.name: one for one in found.results}
            if changed != seen:
                seen, report.results = changed, [by_name[one.name] for one in report.results]
                report.write()


class Worker:
    """A process that runs the parts in a file, one after the other, and is started again while it makes progress. It
    ends when this process ends, whose end of the pipe is its standard input."""

    def __init__(self, path: Path, of_all: Path, words: Sequence[str]) -> None:
        """`of_all` is the file of all results."""
        self.path, self.log, self.words = path, of_all.with_suffix(".log"), words
        self.untried = len(Report.read(path).results)  # When it was started.
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        module = sys.modules["__main__"].__spec__
        assert module is not None  # The subcommands are run by `python -m`.
        # What was compiled earlier on this machine would make a cold start a warm one.
        caches = {name: str(self.path.with_name(name)) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        more = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS)}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module.name, *self.words, "--report", str(self.path)], stdin=subprocess.PIPE,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **more, **caches},
            )  # fmt: skip

    def tend(self, problem: str) -> None:
        """Sees to a process that has ended, or ends it if there is a problem. Its children end with it."""
        process = self.process
        if process is None or (process.poll() is None and not problem):
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        ending = problem or (f"code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}")
        report = Report.read(self.path)
        for one in report.results:
            if one.state == "running":
                self.end_part(one, report, ending)
        left, before = [one for one in report.results if not one.state], self.untried
        self.process, self.untried = None, len(left)
        if problem or self.untried == before:
            for one in left:
                one.state, one.reason = "not run", problem or f"no worker begins ({ending}): {_last_line(self.log)}"
        report.write()
        if self.untried and not problem and self.untried < before:
            self.start()

    def end_part(self, result: Result, report: Report, ending: str) -> None:
        """Notes what became of the part in which the process has ended. At a limit, it has written where it was."""
        if simulated_seconds() is not None:  # It was too slow here, too.
            report.ahead -= max(0.0, report.now() - result.began - result.limit)
        result.seconds = round(report.now() - result.began, 1)
        if result.seconds < result.limit:
            result.state, result.reason = "failed", f"the process: {ending}"
            return
        result.state, place = "cut off", self.path.with_suffix(PLACE)
        if place.exists() and (text := place.read_text(encoding="utf-8", errors="replace")):
            write_traceback(self.log.parent, result.name, text)


def write_traceback(output: Path, part: str, text: str) -> None:
    with (output / TRACEBACKS).open("a", encoding="utf-8") as file:
        file.write(f"\n== {part} at {time.time()}\n{text}")


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


def work(parts: Sequence[Part], options: argparse.Namespace) -> None:
    """Runs the parts of this worker's file that have not begun yet, in this process."""
    end_with_supervisor()
    import torch

    from gputrain.hw.probe import machine_facts, probe

    probe()  # It asks for expandable segments before CUDA starts.
    # The references on the CPU are tiny, and other processes compile: many threads would wait for each other.
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; --smoke tries the parts on the CPU")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    report = Report.read(options.report)
    report.machine = machine_facts("cpu" if options.smoke else "cuda")
    by_name = {part.name: part for part in parts}
    for result in [one for one in report.results if not one.state]:
        run_part(by_name[result.name], result, report, options)
        if result.state == "failed" and not options.smoke and context_is_broken():
            sys.exit(NEW_WORKER)
    sys.stdout.flush()
    os._exit(0)  # Without waiting for processes that a part has left.


def run_part(part: Part, result: Result, report: Report, options: argparse.Namespace) -> None:
    """Runs a part within its limit. Past it, everything's place is written and this process ends."""
    if (simulated := simulated_seconds()) is not None:  # What lies between parts is not counted, except a first start.
        ended = (one.began + one.seconds for one in report.results)
        report.ahead += max(simulated.get("start", 0.0), *ended) - report.now()
    result.began = round(report.now(), 1)
    slowly = 10 if options.smoke else 1  # A CPU that other tests use too.
    result.limit = min((slowly if simulated is None else 1) * part.seconds, options.seconds - result.began)
    if missing := [module for module in part.needs if find_spec(module) is None]:
        result.state, result.reason = "not run", f"not installed: {', '.join(missing)}"
        report.write()
        return
    if result.limit < min(LEAST_SECONDS, part.seconds):
        result.state, result.reason = "not run", "no time was left"
        report.write()
        return

    def note(figures: Figures) -> None:
        result.figures.update(figures)
        result.seconds = round(report.now() - result.began, 1)
        report.write()

    result.state = "running"
    print(f"\n== {part.name} (at most {result.limit:.0f} s)", flush=True)
    note({})
    seconds = result.limit if simulated is None else slowly * part.seconds
    try:
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="gputrain-"))
            place = stack.enter_context(report.path.with_suffix(PLACE).open("w", encoding="utf-8"))
            faulthandler.dump_traceback_later(seconds, exit=True, file=place)
            stack.callback(faulthandler.cancel_dump_traceback_later)
            if part.beside and options.caches:
                stack.enter_context(carried_caches(options.caches, part.name, seconds - SAVE_SECONDS))
            ends = time.time() + seconds
            context = Context(
                options.smoke, Path(scratch), options.data, options.output_dir, note, report.path.parent, ends
            )
            result.figures.update(part.ask(context))
            result.state = "ok"
    except NotMeasured as reason:
        result.state, result.reason = "not run", str(reason)
    except (Exception, SystemExit) as error:
        result.state, result.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
        write_traceback(options.output_dir, part.name, traceback.format_exc())
    if simulated is not None:
        takes = simulated.get(part.name, 0.0)
        report.ahead += min(takes, result.limit) - (report.now() - result.began)
        if takes > result.limit:
            result.state, result.reason, result.figures = "cut off", "", {}
    others = [Report.read(path).results[-1] for path in report.path.parent.glob("*.json") if path != report.path]
    working = sum(one.state in ("", "running") for one in others)
    note({"beside": working} if working else {})
    clean_up()


@contextlib.contextmanager
def carried_caches(folder: Path, name: str, seconds: float) -> Iterator[None]:
    """Loads what an earlier run of this part has compiled, and saves what is compiled within, at its end or after so
    many seconds. The files serve on another machine with the same card, torch, CUDA and Triton.

    They hold torch's own artifacts, whose keys have no paths. Triton's cache folder names its files by absolute paths,
    and is several times as large. Of what a process saves several times, torch would load only the last part.
    """
    import torch

    prefix = re.sub(r"\W+", "_", name)
    if found := sorted(folder.glob(f"{prefix}.*")):
        torch.compiler.load_cache_artifacts(zlib.decompress(b"".join(path.read_bytes() for path in found)))

    def save(*given: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        if saved := torch.compiler.save_cache_artifacts():
            content = zlib.compress(saved[0])
            for path in found:
                path.unlink()
            for start in range(0, len(content), FILE_BYTES):
                (folder / f"{prefix}.{start // FILE_BYTES}").write_bytes(content[start : start + FILE_BYTES])

    signal.signal(signal.SIGALRM, save)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) == save:
            save()


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
