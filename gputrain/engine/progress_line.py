"""The progress bar of a training, its speed over the last lines, and the time that is left."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

RECENT_LINES = 20  # Lines of metrics over which speed and remaining time are averaged.


class TimeLeft(ProgressColumn):
    """The time that is left. Before that is known, it shows the time that has passed, so that something moves."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["left"] or duration(task.elapsed or 0.0))


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
                self.console.print(Text(f"{task.description} | {self.last_line}"), soft_wrap=True)


@dataclass
class Window:
    """The steps of one line of metrics."""

    ended: float  # On the clock of time.monotonic.
    step: int
    seconds: float  # Without samples, evaluations and saves.
    items: float
    flops: float


@dataclass
class Pace:
    """The last lines of metrics, from which the speed and the remaining time are estimated."""

    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=RECENT_LINES))

    def add(self, step: int, seconds: float, items: float, flops: float) -> None:
        self.windows.append(Window(time.monotonic(), step, seconds, items, flops))

    @property
    def items_per_second(self) -> float:
        return sum(one.items for one in self.windows) / sum(one.seconds for one in self.windows)

    @property
    def flops_per_second(self) -> float:
        return sum(one.flops for one in self.windows) / sum(one.seconds for one in self.windows)

    def seconds_left(self, last_step: int, seconds_per_step: float) -> float:
        """Return the time to the last step, at the rate of the last lines, with the evaluations and saves among them.
        With a single line, `seconds_per_step` is the rate."""
        first, now = self.windows[0], self.windows[-1]
        if now.step > first.step:
            seconds_per_step = (now.ended - first.ended) / (now.step - first.step)
        return (last_step - now.step) * seconds_per_step


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "3 d 4 h", "3 h 12 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def losses_in_short(losses: Mapping[str, float]) -> str:
    """Return the losses as text. A name gets its phase as a prefix only if several phases use it."""
    held = Counter(name.split("/")[-1] for name in losses)
    names = {name: name if held[name.split("/")[-1]] > 1 else name.split("/")[-1] for name in losses}
    return " ".join(f"{names[name]} {loss:.4g}" for name, loss in losses.items())
