"""Kill a training with SIGKILL again and again, resume it each time, and compare it with one that nobody disturbed.

    python benchmarks/kill_runs.py --kills 60 --steps 150

A third of the kills come at random moments of a run that saves nothing, a third at random moments of one that saves
after every step, and a third while a checkpoint is being written; all are counted from the first line that the process
prints. Every attempt is the same `gputrain train-vae ... --resume-from auto`. Exits with 1 if one refuses to go on, or
if checkpoints or metrics differ in the end.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

PICTURES, SIZE = 12, 32
KINDS = ("before a save", "between saves", "in a save")
COMPARED = ("modules", "optimizers", "random", "progress")  # of a checkpoint
SAVED, EVERY_STEP = "checkpoint_last.pt", 1e-9  # minutes between saves


def make_pictures(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((48, 48), Image.Resampling.BICUBIC).save(folder / f"{number}.png")


def command(pictures: Path, folder: Path, steps: int, minutes: float) -> list[str]:
    told = f"--data-path {pictures} --output-dir {folder} --max-steps {steps} --checkpoint-minutes {minutes}"
    fixed = f"""--preset flux --channels 32,32 --z-channels 4 --image-size {SIZE} --batch-size 2 --num-epochs 1000
        --adversarial-weight 0.5 --discriminator-start 4 --num-workers 0 --device cpu --no-plan --log-freq 1
        --evaluate-freq 0 --evaluate-steps 20 --checkpoint-freq {4 if minutes else 0} --keep-checkpoints 2
        --save-samples-freq 0 --resume-from auto"""
    return [sys.executable, "-m", "gputrain", "train-vae", *told.split(), *fixed.split()]


def attempt(words: list[str], log: Path, seconds: float | None = None, partial: Path | None = None) -> int:
    """Start a training, and kill it so many seconds after its first line; if asked for, as soon as a half-written
    checkpoint is seen then. Returns its exit code, which is negative if it was killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    began = None
    while seconds is not None and process.poll() is None:
        if began is None and log.stat().st_size:
            began = time.monotonic()
        if began is not None and time.monotonic() > began + seconds and (partial is None or partial.exists()):
            process.kill()
        time.sleep(0.0005 if began else 0.02)
    return process.wait()


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def logged(folder: Path) -> list[tuple[object, ...]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get("loss/autoencoder/l1"), row.get("eval/score")) for row in rows]


def differences(cut: Path, straight: Path) -> list[str]:
    found = []
    names = [path.name for path in straight.glob("checkpoint_*.pt") if path.name != "checkpoint_previous.pt"]
    for name in names:
        one, other = (torch.load(folder / name, weights_only=True) for folder in (cut, straight))
        found += [
            f"{name}: {part}" for part in ("modules", "optimizers", "progress") if not same(one[part], other[part])
        ]
    if {path.name for path in cut.glob("checkpoint_*")} != {path.name for path in straight.glob("checkpoint_*")}:
        found.append("other files")
    return found + ["metrics.jsonl"] * (logged(cut) != logged(straight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=3.0, help="latest of a random moment")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, outcomes = random.Random(given.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        pictures, cut, straight, log = top / "pictures", top / "cut", top / "straight", top / "log"
        make_pictures(pictures)
        if attempt(command(pictures, straight, given.steps, EVERY_STEP), log):
            sys.exit(log.read_text())
        for number in range(given.kills):
            kind = KINDS[3 * number // given.kills]
            partial = cut / (SAVED + ".partial") if kind == "in a save" else None
            minutes, steps = (0.0, 100 * given.steps) if kind == "before a save" else (EVERY_STEP, given.steps)
            ended = attempt(command(pictures, cut, steps, minutes), log, rng.uniform(0, given.seconds), partial)
            if kind == "before a save" and (cut / SAVED).exists():
                sys.exit("there is a checkpoint, although none was to be saved")
            outcomes[kind if ended == -signal.SIGKILL else f"ended by itself with {ended}"] += 1
            if ended not in (-signal.SIGKILL, 0):
                sys.exit(f"attempt {number} was not resumed:\n{log.read_text()}")
        ended = attempt(command(pictures, cut, given.steps, EVERY_STEP), log)
        found = differences(cut, straight) if ended == 0 else [f"exit code {ended}: {log.read_text()[-2000:]}"]
    print(f"{sum(outcomes.values())} attempts: {dict(outcomes)}; differences: {found or 'none'}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
