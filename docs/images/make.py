"""Makes the pictures of this folder from real runs: help pages, a training on a terminal, and its report.

`make images`, or `python docs/images/make.py` from the root of the repository; it needs tmux and Chromium, and takes a
few minutes on a CPU. The terminals have 80 columns, and their pictures are the characters and colours that tmux holds.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from gputrain.kinds import kinds

HERE = Path(__file__).parent
COLUMNS, ROWS, TALL = 80, 64, 1000  # ROWS of a help page are shown.
LARGEST_BYTES = 150_000
TRAINING = (
    "train-vae --data-path photos --output-dir run --preset fast --image-size 64 --batch-size 2 "
    "--num-epochs 0 --num-steps 60 --evaluate-every-epochs 0 --evaluate-every-steps 10 --sample-every-steps 20"
)


class Terminal:
    """A terminal of 80 columns, in which commands are typed."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.name = f"gputrain-images-{rows}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        shell = f"env PS1='$ ' PATH={shlex.quote(path)} COLORTERM=truecolor bash --norc --noprofile"
        self._tmux("new-session", "-d", "-s", self.name, "-x", str(COLUMNS), "-y", str(rows), "-c", str(folder), shell)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout

    def type(self, line: str) -> None:
        self._tmux("send-keys", "-t", self.name, line, "Enter")

    def screen(self) -> str:
        """Returns what the terminal shows, with the escape codes of its colours."""
        return self._tmux("capture-pane", "-t", self.name, "-e", "-p").rstrip()

    def wait_for(self, pattern: str, seconds: float = 600) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, Text.from_ansi(self.screen()).plain, re.MULTILINE):
            if time.monotonic() > end:
                raise TimeoutError(f"{pattern} was not shown:\n{self.screen()}")
            time.sleep(0.3)

    def close(self) -> None:
        self._tmux("kill-session", "-t", self.name)


def save_terminal(screen: str, path: Path, title: str) -> None:
    """Writes a terminal as SVG, in the reader's own monospaced font."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(screen), soft_wrap=True)
    frame = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    frame = frame.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    path.write_text(console.export_svg(title=title, code_format=frame), encoding="utf-8")
    check_size(path)


def check_size(path: Path) -> None:
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
    if path.stat().st_size > LARGEST_BYTES:
        raise ValueError(f"{path} has more than {LARGEST_BYTES} bytes")


def make_help() -> None:
    for name, words in (("help", "--help"), ("help_train_vae", "train-vae --help")):
        terminal = Terminal(HERE, TALL)
        terminal.type(f"clear; gputrain {words}; echo END")
        terminal.wait_for("^END", 120)
        lines = terminal.screen().split("\n")
        shown = [line for line in lines if not line.startswith(("$", "END"))][:ROWS]
        terminal.close()
        save_terminal("\n".join(shown), HERE / f"{name}.svg", f"gputrain {words}")


def make_training(folder: Path) -> Path:
    """Takes the screen in the middle of a training, and returns the folder of the run when it has ended."""
    kinds()["vae"].demo.make_source(folder)
    (folder / "photos").symlink_to(folder / kinds()["vae"].demo.source)
    terminal = Terminal(folder, 30)
    terminal.type(f"clear; gputrain {TRAINING}; echo END")
    terminal.wait_for(r"held-out at step 30")
    time.sleep(4)
    save_terminal(terminal.screen(), HERE / "training.svg", "gputrain train-vae --data-path photos ...")
    terminal.wait_for("^END")
    terminal.close()
    return folder / "run"


def make_report(run: Path) -> None:
    path = HERE / "report.png"
    subprocess.run(
        [sys.executable, "-m", "tests.report.browser", run / "report.html", path, "1200", "light", "1700"], check=True
    )
    with Image.open(path) as shot:
        shot.convert("RGB").resize((900, round(900 * shot.height / shot.width)), Image.Resampling.LANCZOS).quantize(
            96
        ).save(path, optimize=True)
    check_size(path)


if __name__ == "__main__":
    make_help()
    with tempfile.TemporaryDirectory() as name:
        make_report(make_training(Path(name)))
