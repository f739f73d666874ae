"""Makes the pictures of this folder from real runs: help pages, a training on a terminal and in a browser, its report.

`make images`, or `python -m docs.images.make` from the root of the repository; it needs tmux and Chromium, and takes a
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
from tests.report.browser import Browser

HERE = Path(__file__).parent
COLUMNS, ROWS, TALL = 80, 64, 1000  # ROWS of a help page are shown.
GAP, SCREEN = 20, 844  # Pixels between two screens, and their height.
LARGEST_BYTES = 250_000
TRAINING = (
    "train-vae --data-path photos --output-dir run --preset fast --image-size 128 --batch-size 2 --num-epochs 0 "
    "--num-steps 300 --evaluate-every-epochs 0 --evaluate-every-steps 20 --sample-every-steps 50 "
    "--sample-pictures shown/chelsea_00.png,shown/astronaut_00.png,shown/coffee_01.png"
)
NOT_TRAINED = ("astronaut", "chelsea", "coffee")  # Photographs of which the samples show parts.
SHOWN_STEP = 200  # The pictures of the training are taken after its evaluation.


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
    """Takes terminal and browser in the middle of a training, and returns the folder of the run when it has ended."""
    kinds()["vae"].demo.make_source(folder)
    (folder / "photos").symlink_to(folder / kinds()["vae"].demo.source)
    (folder / "shown").mkdir()
    for path in sorted((folder / "photos").iterdir()):
        if path.name.startswith(NOT_TRAINED):
            path.rename(folder / "shown" / path.name)
    terminal = Terminal(folder, 30)
    terminal.type(f"clear; gputrain {TRAINING}; echo END")
    terminal.wait_for(rf"held-out at step {SHOWN_STEP}", 1800)
    time.sleep(4)
    save_terminal(terminal.screen(), HERE / "training.svg", "gputrain train-vae --data-path photos ...")
    make_watch(folder)
    terminal.wait_for("^END", 1800)
    terminal.close()
    return folder / "run"


def make_watch(folder: Path) -> None:
    """Takes the page of the training on a wide screen and, with a sample opened, on a phone."""
    words = [sys.executable, "-m", "gputrain", "watch", "run", "--port", "0"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server, Browser() as browser:
        assert server.stdout
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        shots = []
        for width, dark in ((1280, False), (390, True)):
            browser.open(address, width, dark=dark, height=SCREEN)
            if dark:
                browser.run("document.querySelector('.made button').click()")
            time.sleep(2)
            path = folder / f"{width}.png"
            browser.screenshot(path, height=SCREEN)
            shots.append(Image.open(path).convert("RGB"))
        server.terminate()
    both = Image.new("RGB", (sum(shot.width for shot in shots) + GAP, SCREEN), "#c9d1d9")
    both.paste(shots[0])
    both.paste(shots[1], (shots[0].width + GAP, 0))
    save_picture(both, HERE / "watch.png", 1200)


def make_report(run: Path) -> None:
    path = run / "report.png"
    with Browser() as browser:
        browser.open(run / "report.html", 1200)
        browser.screenshot(path, height=1700)
    save_picture(Image.open(path).convert("RGB"), HERE / "report.png", 900)


def save_picture(shot: Image.Image, path: Path, width: int) -> None:
    size = (width, round(width * shot.height / shot.width))
    shot.resize(size, Image.Resampling.LANCZOS).quantize(192).save(path, optimize=True)
    check_size(path)


if __name__ == "__main__":
    make_help()
    with tempfile.TemporaryDirectory() as name:
        make_report(make_training(Path(name)))
