"""Measure the load of `gputrain watch` with many long runs: seconds of CPU of reading them and of following them.

    python benchmarks/watch_load.py --runs 100 --rows 100000

Writes runs with 25 metrics and an evaluation every 500 steps (6 GB with these counts, removed afterwards), and reads
them as `gputrain watch` does, in this process. Prints a table and writes benchmarks/results/watch_load_DEVICE.json.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gputrain.engine.history import HISTORY
from gputrain.engine.metrics import METRICS
from gputrain.engine.run_folder import CONFIG
from gputrain.hw.probe import machine_facts
from gputrain.report.media import MediaBudget
from gputrain.report.page import chart_groups, make_page
from gputrain.report.records import RunReader, read_run

MOST_ROWS = 2_000  # Lines of a run that `gputrain watch` keeps, besides evaluations.
EVALUATED_STEPS = 500


def line(step: int, seconds: float, **values: float) -> bytes:
    return (json.dumps({"step": step, "epoch": step // 1000, "seconds": seconds, **values}) + "\n").encode()


def lines(count: int) -> list[bytes]:
    draws, made = random.Random(0), []
    names = [f"loss/model/{number}" for number in range(16)] + [f"gradient_norm/{number}" for number in range(4)]
    names += ["speed/images_per_second", "speed/seconds_per_step", "memory/peak_gb", "data/wait_share", "learning_rate"]
    for step in range(1, count + 1):
        made.append(line(step, step / 5, **{name: draws.uniform(1, 2) for name in names}))
        if step % EVALUATED_STEPS == 0:
            made.append(line(step, step / 5, **{"eval/psnr_db": draws.uniform(20, 30), "eval/ssim": draws.random()}))
    return made


def write_runs(folder: Path, runs: int, rows: int) -> list[Path]:
    """Writes runs of another machine that are training now."""
    content = b"".join(lines(rows))
    start = {"event": "start", "time": datetime.now(timezone.utc).isoformat(), "step": 0, "last_step": 2 * rows}
    start |= {"host": "elsewhere", "process": 1}
    folders = [folder / f"run_{number}" for number in range(runs)]
    for number, run in enumerate(folders):
        run.mkdir()
        (run / METRICS).write_bytes(content)
        (run / HISTORY).write_text(json.dumps(start) + "\n", encoding="utf-8")
        (run / CONFIG).write_text(f"kind: vae\ndata_path: photos\nseed: {number}\n", encoding="utf-8")
    return folders


def append(folders: Sequence[Path], step: int) -> None:
    for folder in folders:
        with (folder / METRICS).open("ab") as file:
            file.write(lines(1)[0].replace(b'"step": 1,', b'"step": %d,' % step))


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def read_load(folders: Sequence[Path], rows: int) -> dict[str, float]:
    readers: list[RunReader] = []

    def refresh(*, tail_only: bool = True) -> None:
        for reader in readers:
            reader.refresh(tail_only=tail_only)

    def first_look() -> None:
        readers.extend(RunReader(folder, most_rows=MOST_ROWS) for folder in folders)
        refresh()

    found = {"first look at all runs": cpu_seconds(first_look)}
    found["nothing new in all runs"] = cpu_seconds(refresh)
    append(folders, rows + 1)
    found["a new line in all runs"] = cpu_seconds(refresh)
    found["one run, read whole"] = cpu_seconds(readers[0].refresh)
    append(folders, rows + 2)
    found["a new line in all runs, one read whole"] = cpu_seconds(refresh)
    record = readers[0].record
    found["all curves of one run"] = cpu_seconds(lambda: chart_groups([record]))
    found["report of one run"] = cpu_seconds(lambda: make_page([read_run(folders[0])], MediaBudget.of(30)))
    tracemalloc.start()
    reader = RunReader(folders[-1], most_rows=MOST_ROWS)
    reader.refresh()
    found["megabytes of one run, read whole"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="the disk to write to; default: that of temporary files")
    args = parser.parse_args()
    machine = machine_facts("cpu")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folders = write_runs(Path(name), args.runs, args.rows)
        found = read_load(folders, args.rows)
    for title, value in found.items():
        print(f"{title:45} {f'{value:.2f} MB' if title.startswith('megabytes') else f'{1e3 * value:.1f} ms'}")
    result: dict[str, Any] = {
        "command": f"python benchmarks/watch_load.py {' '.join(sys.argv[1:])}", "machine": machine,
        "cpu_seconds": {title: round(value, 5) for title, value in found.items()},
    }  # fmt: skip
    device = re.sub(r"\W+", "_", machine["device"].lower())
    path = Path(__file__).parent / "results" / f"watch_load_{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
