"""Tiny trainings of every kind as processes: their data, their command lines, and how two runs are compared."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # The first step of an optimizer imports it.
from PIL import Image
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

from gputrain.asr import data as asr_data  # noqa: F401 (every process would import it)
from gputrain.cli import app
from gputrain.tts import data as tts_data  # noqa: F401
from gputrain.vae import data as vae_data  # noqa: F401
from gputrain.vocoder import data as vocoder_data  # noqa: F401
from tests.asr import test_train as recognisers
from tests.asr.models import small_preset
from tests.asr.stores import spelled_clips, write_store
from tests.comparison import differing
from tests.tts import test_train as voices
from tests.vocoder import conftest as vocoders

KINDS = ("vae", "vocoder", "tts", "asr")
EVERY_STEP = 1e-9  # Minutes between saves.
COMPARED = ("modules", "optimizers", "random", "progress", "loss_scales")  # Parts of a checkpoint.
LAST, PARTIAL = "checkpoint_last.pt", "checkpoint_last.pt.partial"
SAVING: dict[str, Any] = {
    "checkpoint_every_epochs": 0, "checkpoint_every_steps": 7, "keep_checkpoints": 2, "evaluate_every_epochs": 0,
    "evaluate_every_steps": 10,
    "sample_every_steps": 0, "log_every_steps": 1, "plan": False, "device": "cpu",
}  # fmt: skip
PICTURES: dict[str, Any] = {
    "preset": "flux", "channels": [32, 32], "z_channels": 4, "image_size": 24, "batch_size": 2,
    "num_epochs": 1000, "adversarial_weight": 0.5, "discriminator_start": 4, "discriminator_channels": 16,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "vae": {**PICTURES, **SAVING},
    "vocoder": {**vocoders.TINY, **SAVING, "num_valid_plots": 1, "discriminators": ["fast_mrd", "msd"]},
    "tts": {**voices.TINY, **SAVING, "eval_clips": 1, "num_audio_samples": 0},
    "asr": {
        **recognisers.TINY,
        **SAVING,
        **recognisers.VARIANT,
        "num_steps": 1000,
        "eval_clips": 2,
    },
}


def make_data(kind: str, folder: Path) -> Path:
    """Writes data from arithmetic, and returns their folder."""
    if kind == "vocoder":
        return vocoders.hummed(folder)
    if kind == "tts":
        return voices.spoken(folder, speakers=("ann", "bob"))
    if kind == "asr":
        return write_store(folder, spelled_clips(20))
    folder.mkdir(parents=True)
    for number in range(12):
        coarse = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((48, 48), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return folder


def words(kind: str, data: Path, folder: Path, steps: int, **changes: object) -> list[str]:
    """Returns a command line of at most `steps` steps that resumes what there is."""
    values = {
        **OPTIONS[kind], "data_path": data, "output_dir": folder, "max_steps": steps, "resume_from": "auto",
        "checkpoint_every_minutes": EVERY_STEP, "num_workers": 0, **changes,
    }  # fmt: skip
    return [f"train-{kind}", *vocoders.flags(values)]


def command(line: Sequence[str]) -> None:
    """Runs a command line in this process to its end, with small presets of voices and recognisers."""
    sys.argv = ["gputrain", *line]
    torch.set_num_threads(1)
    with voices.small_presets(), small_preset():
        app.main()


class TinyRun:
    """A command line in a process and a group of its own, whose messages go to a file. The process is forked from one
    that has imported everything, which saves seconds each time."""

    def __init__(self, line: Sequence[str], log: Path) -> None:
        self.log = log
        log.write_bytes(b"")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.process = context.Process(target=_start, args=(line, log))
        self.process.start()
        self.began = self._wait_for_its_first_line()

    def _wait_for_its_first_line(self) -> float:
        while not self.log.stat().st_size and self.process.exitcode is None:
            time.sleep(0.001)
        return time.monotonic()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_over(self) -> bool:
        return self.process.exitcode is not None

    def wait_until(self, seconds: float, also: Callable[[], bool] = lambda: True) -> None:
        """Waits for a moment after the first line, and for a condition then, or for the end of the process."""
        while not self.is_over and (time.monotonic() < self.began + seconds or not also()):
            time.sleep(0.0005)

    def send(self, number: int, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def children(self) -> dict[int, str]:
        """Returns the command lines of the child processes by their numbers."""
        found = {}
        for place in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(place.read_text().rpartition(")")[2].split()[1]) == self.pid:
                    found[int(place.parent.name)] = place.with_name("cmdline").read_text()
        return found

    def workers(self) -> list[int]:
        """Returns the data workers: the child processes, without multiprocessing's tracker of resources."""
        return [pid for pid, line in self.children().items() if "resource_tracker" not in line]

    def wait(self, seconds: float = 120) -> tuple[int, str]:
        """Returns the exit code, which is negative after a deadly signal, and the messages."""
        self.process.join(seconds)
        if not self.is_over:
            self.send(signal.SIGKILL, group=True)
            self.process.join()
            raise AssertionError(f"the run hangs:\n{self.log.read_text()[-3000:]}")
        assert self.process.exitcode is not None
        return self.process.exitcode, self.log.read_text()


def _start(line: Sequence[str], log: Path) -> None:
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    command(line)


def finish(line: Sequence[str], log: Path) -> tuple[int, str]:
    return TinyRun(line, log).wait()


def logged(folder: Path) -> dict[tuple[int, str], object]:
    """Returns the losses and held-out figures by step and name, without those of time."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("loss/", "eval/", "gradient_norm/")
    return {
        (row["step"], name): row[name] for row in rows for name in row if name.startswith(kept) and name != "eval/rtf"
    }


def differences(cut: Path, straight: Path) -> list[str]:
    """Returns what differs between a disturbed run and an undisturbed one."""
    found = []
    names, others = ({path.name for path in folder.glob("checkpoint_*")} for folder in (cut, straight))
    if names != others:
        found.append(f"files: {sorted(names ^ others)}")
    for name in sorted(names & others - {"checkpoint_previous.pt"}):
        one, other = (torch.load(folder / name, weights_only=True) for folder in (cut, straight))
        found += [f"{name}: {part}" for part in COMPARED if differing(one[part], other[part])]
    one, other = logged(cut), logged(straight)
    odd = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    return found + ([f"metrics.jsonl: {len(odd)} values, such as {odd[0]}"] if odd else [])


if __name__ == "__main__":
    command(sys.argv[1:])
