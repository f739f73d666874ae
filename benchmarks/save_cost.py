"""Measure what saving costs a training: the time that steps wait for a save, and the time that a run takes longer.

    python benchmarks/save_cost.py --steps 120 --every 20

Two runs of the same steps, one of which keeps a checkpoint every `--every` steps. The model is a stack of linear layers
whose checkpoint (weights and both averages of AdamW) has about `--megabytes`. Prints one line of JSON. `waiting` is
the time between two steps that saving takes; `in_all` is the difference of the runs' durations, in which the
thread that writes also competes with the steps for the CPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from gputrain.engine.callbacks import StepLoop
from gputrain.engine.optim import adamw
from gputrain.engine.recipe import Phase, StepGroup, Term
from gputrain.engine.run_folder import Run
from gputrain.engine.schedule import Saving, Schedule, StepSchedule, begin
from gputrain.engine.train import train
from gputrain.hw.plan import Hardware, decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply
from gputrain.samples import Report

LAYERS, BATCH, BYTES_OF_A_WEIGHT = 6, 8, 12  # A weight and two averages in fp32.
SAVE_EVERY_SECONDS = 600  # The default of --checkpoint-every-minutes.


class Stack:
    """A recipe of linear layers that reproduce their input."""

    kind, unit = "stack", "items"

    def __init__(self, width: int, schedule: Schedule, device: torch.device) -> None:
        self.width, self.device = width, device
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(device)
        optimizer = adamw(self.layers.parameters(), learning_rate=0.0, weight_decay=0.0, betas=(0.9, 0.99))
        self.modules: dict[str, nn.Module] = {"layers": self.layers}
        self.step_groups = [StepGroup((Phase("layers", (self.layers,), optimizer),), self.loss)]

    def prepare(self, loaded: Tensor, step: int) -> Tensor:
        return loaded.to(self.device)

    def size(self, batch: Tensor) -> int:
        return len(batch)

    def flops(self, batch: Tensor, step: int) -> float:
        return 0.0

    def peak_memory_step(self, step: int) -> int:
        return step

    def split(self, batch: Tensor, parts: int) -> list[Tensor]:
        return list(batch.tensor_split(parts))

    def loss(self, batch: Tensor, step: int) -> Iterator[Term]:
        yield Term("l2", (self.layers(batch) - batch).square().sum() / BATCH)

    def average(self, step: int) -> None:
        pass

    def sample(self) -> Report:
        return Report()

    def evaluate(self) -> Report:
        return Report({"score": 0.0})


def timed_run(folder: Path, given: argparse.Namespace, every: int) -> dict[str, Any]:
    """Train, and return the seconds of the steps after the first, and of every wait for a save but the last."""
    folder.mkdir()
    torch.manual_seed(0)
    schedule = Schedule(batch_size=BATCH, num_epochs=0, num_steps=given.steps, warmup_steps=0, ema_decay=0)
    saving = Saving(
        output_dir=folder, checkpoint_every_steps=every, keep_checkpoints=1, checkpoint_every_minutes=0,
        sample_every_steps=0,
        evaluate_every_epochs=0, checkpoint_every_epochs=0, log_every_steps=10,
    )  # fmt: skip
    runtime = apply(decide(probe(), Hardware(use_torch_compile=False)))
    width = int((given.megabytes * 1e6 / BYTES_OF_A_WEIGHT / LAYERS) ** 0.5)
    recipe: Any = Stack(width, schedule, runtime.device)
    steps = StepSchedule(schedule, begin(None, BATCH, new_stage=False))
    moments: list[float] = []
    waits: list[float] = []
    save = StepLoop.save

    def timed_save(*arguments: Any, **named: Any) -> None:
        began = time.monotonic()
        save(*arguments, **named)
        waits.append(time.monotonic() - began)

    def batches(first: int, last: int) -> Iterator[Tensor]:
        for _ in range(first, last):
            moments.append(time.monotonic())
            yield torch.randn(BATCH, width)

    StepLoop.save = timed_save  # type: ignore[method-assign]
    try:
        train(recipe, batches, steps, Run(folder, saving, {}, ""), runtime, Console(quiet=True))
    finally:
        StepLoop.save = save  # type: ignore[method-assign]
    size_gb = (folder / "checkpoint_last.pt").stat().st_size / 1e9
    return {"seconds": moments[-1] - moments[1], "waits": waits[:-1], "size_gb": size_gb, "device": runtime.device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--folder", type=Path, help="the disk to write to; default: that of temporary files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        plain = timed_run(Path(name) / "plain", given, 0)
        saved = timed_run(Path(name) / "saved", given, given.every)
    count = len(saved["waits"])
    if not count:
        sys.exit("no checkpoint was saved between the steps: --every must be below --steps")
    step = plain["seconds"] / (given.steps - 2)
    longer = (saved["seconds"] - plain["seconds"]) / count
    waiting = statistics.mean(saved["waits"])
    figures = {
        "device": str(saved["device"]),
        "checkpoint_gb": round(saved["size_gb"], 3),
        "seconds_per_step": round(step, 4),
        "saves": count,
        "waiting_seconds_per_save": round(waiting, 4),
        "waiting_seconds_of_each": [round(wait, 3) for wait in saved["waits"]],
        "waiting_share": round(waiting / (given.every * step), 4),
        "in_all_seconds_per_save": round(longer, 4),
        "in_all_share": round(longer / (given.every * step), 4),
        "waiting_share_every_ten_minutes": round(waiting / SAVE_EVERY_SECONDS, 6),
        "in_all_share_every_ten_minutes": round(longer / SAVE_EVERY_SECONDS, 6),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
