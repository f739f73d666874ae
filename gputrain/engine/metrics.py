"""Metrics of a training: to the progress line, TensorBoard and metrics.jsonl.

The scalars of a step stay on the device and are read once every `log_every_steps` steps, so that the steps between do
not wait for them.
"""

import contextlib
import functools
import io
import itertools
import json
import logging
import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text
from torch import Tensor

from gputrain.engine.distributed import RankGroup
from gputrain.engine.run_folder import METRICS, MetricsRow, append_line, blocks, lines_from, row_of
from gputrain.engine.stop import format_duration
from gputrain.files import replace_file, write_text, write_wav
from gputrain.formatting import format_rate
from gputrain.heartbeat import Heartbeat, step_text
from gputrain.hw.runtime import Runtime, synchronize
from gputrain.samples import Report, Sheet, SoundSample

log = logging.getLogger(__name__)

T = TypeVar("T")
CAPTIONS = "captions.json"  # The captions of the sounds in samples/, by name.
REFERENCE = "_reference"  # The end of the name of a recording in samples/.
LAYOUT_KEY = "gputrain"  # The key of a sheet's layout in its PNG file.
FIRST_STEPS = 3  # Steps by whose time the remaining time is estimated before the first line of metrics.
RECENT_LINES = 20  # Lines of metrics over which speed and remaining time are averaged.


class Metrics:
    """Collects the scalars of the steps and writes them. A write error causes a warning and does not end the run."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        runtime: Runtime,
        *,
        unit: str,
        first_step: int,
        last_step: int | None,
        group: RankGroup | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Open the metrics of a run folder. Only the leader of a `group` of ranks writes and shows them. A last step of
        None is not known yet. The `heartbeat` has what the progress line says."""
        self.folder, self.console, self.runtime, self.unit, self.last_step = folder, console, runtime, unit, last_step
        self.group, self.heartbeat = group or RankGroup(), heartbeat or Heartbeat()
        self.path = folder / METRICS
        self.refused: set[str] = set()
        self.referenced: set[str] = set()  # Sounds whose recording TensorBoard has.
        self.latest: dict[str, float] = {}  # The last line that `write` has logged.
        self.headline = ""  # The numbers of the last evaluation that the progress line shows.
        self.board: Any = None
        # Metrics that an earlier attempt wrote for the following steps are removed.
        end = first_step + 1 if first_step else 0
        self._attempt("logs", functools.partial(self._open_board, end))
        self._attempt("metrics.jsonl", functools.partial(self._keep_lines, end, lambda row: False))
        self.bar = Bar(console, hidden=not self.group.leads)
        self.done = self.heartbeat.step = first_step
        self.heartbeat.last_step = last_step
        self.task = self.bar.add_task(self.step_text, total=last_step, completed=first_step, left="")
        self.pace, self.started = Pace(), time.monotonic()
        self.paused_seconds = 0.0
        self.step_ends = [self.started]  # When the first steps have ended, on a clock that stands still in pauses.
        self._open_window()

    def __enter__(self) -> "Metrics":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        self.bar.keep_last_line()
        if self.board is not None:
            self._attempt("logs", self.board.close)

    def next(self, batches: Iterator[T]) -> T:
        """Returns the next batch, and measures the time that it takes to arrive."""
        began = time.monotonic()
        batch = next(batches)
        self.waited_seconds += time.monotonic() - began
        return batch

    def add(self, scalars: dict[str, Tensor], items: int, flops: float) -> None:
        """Add the scalars of one step, which stay on the device, its number of items and its FLOPs (0: unknown)."""
        self.window.append(scalars)
        self.items += items
        self.flops += flops
        self.done += 1
        self.heartbeat.note("step", self.done)
        if len(self.step_ends) <= FIRST_STEPS:
            synchronize(self.runtime.device)
            self.step_ends.append(time.monotonic() - self.paused_seconds)
        self.move_bar()

    @property
    def first_step_seconds(self) -> float | None:
        """The time of one of the first steps, with its batch; None before they are made. It is their median: the first
        may compile, and another program may disturb one."""
        took = [end - start for start, end in itertools.pairwise(self.step_ends)]
        return statistics.median(took) if len(took) == FIRST_STEPS else None

    @property
    def step_text(self) -> str:
        return step_text(self.done, self.last_step)

    def expect(self, last_step: int) -> None:
        """Show this last step from now on."""
        self.last_step = self.heartbeat.last_step = last_step
        self.bar.update(self.task, total=last_step)

    def move_bar(self) -> str:
        """Show the steps that are done and, once it is known, the time that is left, which is returned."""
        left, seconds = "", self.first_step_seconds
        if self.last_step is not None and (self.pace.windows or seconds):
            steps = self.last_step - self.done
            seconds = self.pace.seconds_left(self.last_step, self.done) if self.pace.windows else steps * (seconds or 0)
            if ends_at := self.heartbeat.ends_at:
                until = datetime.fromisoformat(ends_at) - datetime.now(timezone.utc)
                seconds = min(seconds, max(0.0, until.total_seconds()))
            self.heartbeat.seconds_left, left = seconds, f"{format_duration(seconds)} left"
        self.bar.update(self.task, completed=self.done, description=self.step_text, left=left)
        return left

    def write(self, step: int, epoch: int, further: dict[str, float], *, alone: bool = False) -> list[dict[str, float]]:
        """Log the means over the steps since the last call, and return the scalars of each of these steps.

        The host waits for the device here. If other ranks cannot answer any more, this one
        writes `alone`, as if all had as many items.
        """
        self.done = step
        rows, count = _read(self.window), self.group.ranks.count
        items, flops = (self.items * count, self.flops * count) if alone else self.group.total(self.items, self.flops)
        seconds = time.monotonic() - self.window_started
        means = {name: _mean(row[name] for row in rows if name in row) for name in sorted({n for r in rows for n in r})}
        speed = {
            f"speed/{self.unit}_per_second": items / seconds,
            "speed/seconds_per_step": seconds / max(1, len(rows)),
            "data/wait_share": self.waited_seconds / seconds,
        }
        if flops:
            speed["speed/tflops"] = flops / seconds / 1e12
            if (share := self.runtime.peak_share(flops / seconds / count)) is not None:
                speed["speed/peak_share"] = share
        self.pace.add(step, max(1, len(rows)), seconds, items, flops)
        self.latest = {**means, **speed, **further}
        self._put(step, epoch, self.latest)
        with contextlib.suppress(OSError):  # A closed terminal must not end a run.
            self._show(epoch, self.latest)
        self._open_window()
        return rows

    def report(self, step: int, epoch: int, group: str, report: Report) -> None:
        """Log an evaluation or samples under `group`/; pictures, sounds and texts are also written to samples/. A sheet
        shows the step, and its file contains the places of its parts."""
        if report.scalars:
            self._put(step, epoch, {f"{group}/{name}": value for name, value in report.scalars.items()})
        samples = self.folder / "samples"
        for name, shown in report.pictures.items():
            drawn = shown.draw(f"step {step}") if isinstance(shown, Sheet) else None
            image = drawn.image if drawn else Image.fromarray(shown.cpu().numpy())  # type: ignore[union-attr]
            layout = {"step": step, **drawn.layout} if drawn else {}
            path = samples / f"{name}_step_{step:08d}.png"
            self._attempt("samples", functools.partial(_save_png, image, layout, path))
            self._plot("add_image", f"{group}/{name}", np.array(image), step, dataformats="HWC")
        for name, sound in report.sounds.items():
            self._attempt("samples", functools.partial(_save_wav, sound, samples / f"{name}_step_{step:08d}.wav"))
            self._plot("add_audio", f"{group}/{name}", sound.wave_T, step, sound.rate_hz)
            if sound.reference_T is not None:
                self._add_reference(group, name, SoundSample(sound.reference_T, sound.rate_hz), step)
        for name, recording in report.recordings.items():
            self._add_reference(group, name, recording, step)
        heard = {**report.sounds, **report.recordings}
        captions = {name: sound.caption for name, sound in heard.items() if sound.caption}
        if captions:
            content = json.dumps(captions, indent=2, ensure_ascii=False)
            self._attempt("samples", functools.partial(write_text, samples / CAPTIONS, content))
        for name, text in report.texts.items():
            self._attempt("samples", functools.partial(_save_text, text, samples / f"{name}_step_{step:08d}.txt"))
            self._plot("add_text", f"{group}/{name}", f"```\n{text}\n```", step)
        if report.headline:
            self.headline = " ".join(f"{name} {100 * report.scalars[name]:.1f} %" for name in report.headline)

    def _add_reference(self, group: str, name: str, reference: SoundSample, step: int) -> None:
        """Write a recording, such as one that a sound should be like. It is the same at every step: TensorBoard gets it
        once."""
        path = self.folder / "samples" / f"{name}{REFERENCE}.wav"
        self._attempt("samples", functools.partial(_save_wav, reference, path))
        if name not in self.referenced:
            self.referenced.add(name)
            self._plot("add_audio", f"{group}/{name}{REFERENCE}", reference.wave_T, step, reference.rate_hz)

    @contextlib.contextmanager
    def paused(self, doing: str = "saving") -> Iterator[None]:
        """Exclude the time of the block, such as sampling, from the speed of the steps; the bar shows what is done."""
        synchronize(self.runtime.device)  # Earlier steps may still be running.
        began = time.monotonic()
        self.bar.update(self.task, description=f"{self.step_text}, {doing}")
        try:
            with self.heartbeat.doing(doing):
                yield
        finally:
            seconds = time.monotonic() - began
            self.window_started += seconds
            self.paused_seconds += seconds
            self.bar.update(self.task, description=self.step_text)

    def _open_window(self) -> None:
        self.window: list[dict[str, Tensor]] = []
        self.window_started = time.monotonic()
        self.waited_seconds = 0.0
        self.items = 0
        self.flops = 0.0

    def _put(self, step: int, epoch: int, values: dict[str, float]) -> None:
        row = {"step": step, "epoch": epoch, "seconds": round(time.monotonic() - self.started, 3)}
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({**row, **numbers}) + "\n"
        self._attempt("metrics.jsonl", functools.partial(append_line, line.encode(), self.path))
        for name, value in values.items():
            self._plot("add_scalar", name, value, step)

    def _plot(self, method: str, *values: Any, **options: Any) -> None:
        """Write to TensorBoard. After a write error its writer is unusable and is replaced by a new one, so that only
        the data in between is missing."""

        def write() -> None:
            if self.board is None:
                self._open_board(None)
            try:
                getattr(self.board, method)(*values, **options)
            except OSError:
                failed, self.board = self.board, None
                with contextlib.suppress(OSError):
                    failed.close()
                raise

        self._attempt("logs", write)

    def _open_board(self, purge_step: int | None) -> None:
        # Importing TensorBoard takes a second, which commands that do not train avoid.
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(self.folder / "logs"), purge_step=purge_step)

    def _show(self, epoch: int, values: dict[str, float]) -> None:
        if not self.group.leads:
            return
        losses = format_losses({n.removeprefix("loss/"): v for n, v in values.items() if n.startswith("loss/")})
        rate = format_rate(self.pace.items_per_second, self.unit)
        if "speed/tflops" in values:
            rate += f", {self.pace.flops_per_second / 1e12:.3g} TFLOPS"
            share = self.runtime.peak_share(self.pace.flops_per_second / self.group.ranks.count)
            rate += "" if share is None else f" ({100 * share:.0f} % of peak)"
        memory = f"{values.get('memory/peak_gb', 0):.1f} GB{' RAM' * (self.runtime.device.type == 'cpu')}"
        shares = {
            n.split("/")[-1]: v for n, v in values.items() if n.startswith("statistics/") and n.endswith("_share")
        }
        losses += "".join(f" {name.removesuffix('_share')} {100 * share:.0f} %" for name, share in shares.items())
        losses += f" | {self.headline}" if self.headline else ""
        line = f"epoch {epoch} | {losses} | {rate} | {memory} | data {100 * values['data/wait_share']:.0f} %"
        self.bar.last_line = line
        left = self.move_bar()
        if not self.console.is_terminal:
            self.console.print(f"{self.step_text} | {line} | {left}", soft_wrap=True)

    def _attempt(self, what: str, write: Callable[[], object]) -> None:
        """Write, or warn once, because a full disk must not end the training."""
        if not self.group.leads:
            return
        try:
            write()
        except OSError as error:
            if what not in self.refused:
                self.refused.add(what)
                log.warning(
                    "%s cannot be written (%s); training continues", self.folder / what, error.strerror or error
                )

    def forget_report(self, step: int, group: str) -> None:
        """Remove the line of a report that is to be made again."""

        def is_another(row: MetricsRow) -> bool:
            return row["step"] != step or not any(name.startswith(f"{group}/") for name in row)

        self._attempt("metrics.jsonl", functools.partial(self._keep_lines, step, is_another))

    def _keep_lines(self, first_step: int, is_kept: Callable[[MetricsRow], bool]) -> None:
        """Remove all other lines from a step on, and damaged ones there. What stands before is not read."""
        if not self.path.exists():
            return
        start, lines = lines_from(self.path, first_step)
        kept = [line for line in lines if (row := row_of(line)) is not None and is_kept(row)]
        if kept and kept != lines:
            with self.path.open("rb") as file:
                replace_file(self.path, chain(blocks(file, start), kept))
        elif kept != lines:
            os.truncate(self.path, start)


def _read(window: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Copy the scalars of several steps to the host in one transfer."""
    if not window:
        return []
    values = iter(torch.stack([v.float() for row in window for v in row.values()]).tolist())
    return [{name: next(values) for name in row} for row in window]


def _mean(values: Iterator[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _save_wav(sound: SoundSample, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    write_wav(path, sound.wave_T.cpu().numpy(), sound.rate_hz)


def _save_text(text: str, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    write_text(path, text)


def _save_png(image: Image.Image, layout: dict[str, Any], path: Path) -> None:
    """Write a picture atomically: whoever watches samples/ sees that it is new, and never half of it."""
    path.parent.mkdir(exist_ok=True)
    info, content = PngInfo(), io.BytesIO()
    if layout:
        info.add_itxt(LAYOUT_KEY, json.dumps(layout, ensure_ascii=False))
    image.save(content, "PNG", pnginfo=info)
    replace_file(path, [content.getvalue()])


# ---------------------------------------------------------------------------------------------------- the progress line


class TimeLeft(ProgressColumn):
    """The time that is left. Before that is known, it shows the time that has passed, so that something moves."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["left"] or format_duration(task.elapsed or 0.0))


class Bar(Progress):
    """The progress bar, with the last metrics on the lines below. It is shown on terminals only.

    The time that is left comes from the caller: Rich's own estimate knows none if a step takes half a minute.
    """

    def __init__(self, console: Console, *, hidden: bool = False) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeLeft())
        self.last_line = ""
        super().__init__(*columns, console=console, disable=hidden or not console.is_terminal, transient=True)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.last_line)

    def keep_last_line(self) -> None:
        """Print what the bar has shown last, which it has removed from the terminal."""
        task = self.tasks[0]
        if not self.disable and self.last_line:
            with contextlib.suppress(OSError):  # The terminal may be closed.
                self.console.print(Text(f"{task.description} | {self.last_line}"))


@dataclass
class Window:
    """The steps of one line of metrics."""

    ended: float  # On the clock of time.monotonic.
    step: int
    count: int  # Of its steps.
    seconds: float  # Without samples, evaluations and saves.
    items: float
    flops: float


@dataclass
class Pace:
    """The last lines of metrics, from which the speed and the remaining time are estimated."""

    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=RECENT_LINES))

    def add(self, step: int, count: int, seconds: float, items: float, flops: float) -> None:
        self.windows.append(Window(time.monotonic(), step, count, seconds, items, flops))

    @property
    def items_per_second(self) -> float:
        return sum(window.items for window in self.windows) / sum(window.seconds for window in self.windows)

    @property
    def flops_per_second(self) -> float:
        return sum(window.flops for window in self.windows) / sum(window.seconds for window in self.windows)

    def seconds_left(self, last_step: int, done: int) -> float:
        """Return the time from step `done` to the last one, at the rate of the last lines, with the evaluations and
        saves among them; with a single line, at its own rate."""
        first, now = self.windows[0], self.windows[-1]
        seconds_per_step = now.seconds / now.count
        if now.step > first.step:
            seconds_per_step = (now.ended - first.ended) / (now.step - first.step)
        return (last_step - done) * seconds_per_step


def format_losses(losses: Mapping[str, float]) -> str:
    """Return the losses as text. A name gets its phase as a prefix only if several phases use it."""
    held = Counter(name.split("/")[-1] for name in losses)
    names = {name: name if held[name.split("/")[-1]] > 1 else name.split("/")[-1] for name in losses}
    return " ".join(f"{names[name]} {loss:.4g}" for name, loss in losses.items())
