"""Compares cool-downs of one stable run with cosine runs of the same lengths.

    python benchmarks/cooldown.py --data PREPARED [--steps 200 400 800] [--seeds 1 2 3] [--work-dir FOLDER]

PREPARED is a folder that `gputrain prepare-data --kind vae` has filled. For each seed, train-vae holds the learning
rate up to the longest length; its checkpoints at four fifths of each length cool down over the last fifth (--cooldown).
Beside them stand a cosine run of each length, and the stable run at the end of each length. Figures are PSNR of
held-out pictures. Runs that exist are not repeated.
Writes benchmarks/results/cooldown.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from race import interval

from gputrain import __version__
from gputrain.hw.probe import machine_facts

SETTINGS = """
--preset fast --channels 16,32,64,64 --z-channels 8 --image-size 64 --batch-size 8 --held-out-share 0.3 --num-epochs 0
--learning-rate 1e-3 --warmup-steps 50 --evaluate-every-epochs 0 --no-eval-first --sample-every-steps 0
--checkpoint-every-epochs 0 --keep-checkpoints 0 --checkpoint-every-minutes 0 --log-every-steps 100
--num-workers 0 --no-report
"""


class Runs:
    """Trainings of one seed, each in a folder of its own."""

    def __init__(self, folder: Path, data: Path, seed: int) -> None:
        self.folder, self.data, self.seed = folder / str(seed), data, seed

    def psnr(self, name: str, *options: str) -> dict[int, float]:
        """Trains, unless it is done, and returns the held-out PSNR by step."""
        run = self.folder / name
        if not (run / "done").exists():
            given = ["--data-path", str(self.data), "--output-dir", str(run), "--seed", str(self.seed)]
            command = [sys.executable, "-m", "gputrain", "train-vae", *given, *SETTINGS.split(), *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (run / "done").touch()
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["eval/psnr_db"] for row in rows if "eval/psnr_db" in row}

    def compare(self, lengths: list[int]) -> dict[str, dict[int, float]]:
        """Returns held-out PSNR by side and length."""
        held = [4 * length // 5 for length in lengths]
        every = held[0]
        stable = self.psnr(
            "stable", "--learning-rate-schedule", "constant", "--num-steps", str(10 * lengths[-1]), "--max-steps",
            str(lengths[-1]), "--checkpoint-every-steps", str(every), "--evaluate-every-steps", str(lengths[0]),
        )  # fmt: skip
        found: dict[str, dict[int, float]] = {"stable": {length: stable[length] for length in lengths}}
        for side in ("cool-down", "cosine"):
            found[side] = {}
            for length, begin in zip(lengths, held, strict=True):
                options = ["--num-steps", str(length)]
                if side == "cool-down":
                    start = self.folder / "stable" / f"checkpoint_step_{begin}.pt"
                    options = ["--learning-rate-schedule", "constant", "--num-steps", str(10 * lengths[-1])]
                    options += ["--resume-from", str(start), "--cooldown", str(length - begin)]
                found[side][length] = self.psnr(f"{side}_{length}", *options, "--evaluate-every-steps", str(length))[
                    length
                ]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 400, 800])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "gputrain_cooldown")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    seeds = {seed: Runs(given.work_dir, given.data, seed).compare(given.steps) for seed in given.seeds}
    table: dict[str, dict[int, Any]] = {}
    for side in next(iter(seeds.values())):
        table[side] = {}
        for length in given.steps:
            values = [found[side][length] for found in seeds.values()]
            table[side][length] = {"mean": sum(values) / len(values), "interval": interval(values), "values": values}
        cells = [f"{one['mean']:.2f} ± {one['interval'] or 0:.2f}" for one in table[side].values()]
        print(f"| {side} | {' | '.join(cells)} |")
    report = {
        "command": f"python benchmarks/cooldown.py --data PREPARED --steps {' '.join(map(str, given.steps))}",
        "gputrain": __version__,
        "torch": torch.__version__, "machine": machine_facts("cpu"), "threads": torch.get_num_threads(),
        "settings": " ".join(SETTINGS.split()), "unit": "held-out PSNR in dB; interval: 95 % by Student's t",
        "psnr": table,
    }  # fmt: skip
    (given.output_dir / "cooldown.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
