"""Measures how much faster two ranks on two CPU cores train than one, each with one thread, on the same batch.

    python benchmarks/rank_speed.py --data-path PICTURES

Runs of train-vae alternate: one process, then two under torchrun. The figure of a run is the median of its rates after
the first line of metrics.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = (
    "--preset flux --channels 64,64 --image-size 64 --batch-size 16 --num-epochs 0 --num-steps 8 --log-every-steps 2 "
    "--num-workers 0 --device cpu --sample-every-steps 0 --evaluate-every-epochs 0 --checkpoint-every-epochs 0 "
    "--checkpoint-every-minutes 0"
)


def images_per_second(ranks: int, data: Path, folder: Path) -> float:
    """Trains on so many ranks. Returns the rate of the whole batch."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "gputrain", "train-vae", *OPTIONS.split()]
    command += ["--data-path", str(data), "--output-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["speed/images_per_second"] for row in rows[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ratios = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one, two = (images_per_second(ranks, arguments.data_path, Path(folder) / str(ranks)) for ranks in (1, 2))
        ratios.append(two / one)
        print(f"round {number + 1}: one rank {one:.1f} images/s, two {two:.1f}: {two / one:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
