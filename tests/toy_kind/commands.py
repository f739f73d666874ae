"""Runs every command of the toy kind in one process, as a user types them: `python -m tests.toy_kind.commands FOLDER`.

Prints a list of the commands with their exit codes and output, in JSON. The toy kind must be installed: its folder is
on the path of this process and of those that it starts.
"""

import json
import math
import sys
from pathlib import Path

from tests.command import gputrain_here

POINTS = 24


def main(folder: Path) -> None:
    tables, data, run = folder / "tables", folder / "points", folder / "run"
    tables.mkdir()
    lines = [f"{x},{math.sin(2 * x)}\n" for x in (2 * place / POINTS - 1 for place in range(POINTS))]
    (tables / "sine.csv").write_text("".join(lines))
    train = [
        "--data-path", data, "--output-dir", run, "--batch-size", 8, "--num-epochs", 40, "--learning-rate", 0.05,
        "--warmup-steps", 0, "--device", "cpu", "--num-workers", 0, "--evaluate-every-epochs", 10, "--eval-first",
    ]  # fmt: skip
    done = []
    for words in (
        ["--help"],
        ["validate", "--kind", "curve", "--input-dir", tables],
        ["prepare-data", "--kind", "curve", "--input-dir", tables, "--output-dir", data, "--decimals", 4],
        ["train-curve", *train],
        ["train-curve", "--config", run / "config.yaml", "--resume-from", "auto", "--num-epochs", 44],
        ["plan", "train-curve", "--gpu", "t4", "--json"],
        ["bench", "train-curve", "--steps", 1, "--untimed-steps", 1, "--device", "cpu", "--output-dir", folder],
        ["evaluate", "--model", run, "--data-path", data, "--json", folder / "figures.json", "--max-points", 12],
        ["evaluate", "--model", run, "--data-path", data, "--max-clips", 2],
        ["export", "--model", run, "--output-dir", folder / "export", "--format", "weights", "--name", "sine"],
        ["trace", "--model", run, "--at", 0.5],
        ["report", run, "--output-file", folder / "report.html"],
    ):
        ended = gputrain_here(*words)
        done.append({"command": words[0], "code": ended.returncode, "out": ended.stdout, "err": ended.stderr})
    print(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
