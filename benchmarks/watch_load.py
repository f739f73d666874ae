"""Measure the load of `gputrain watch` with many long runs: seconds of CPU of reading them and of following them.

    python benchmarks/watch_load.py --runs 100 --rows 100000

Writes runs with 25 metrics and an evaluation every 500 steps (6 GB with these counts, removed afterwards), and reads
them as `gputrain watch` does, in this process. Prints a table and writes benchmarks/results/watch_load_DEVICE.json.
"""

import argparse
import json
import random
import re
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from gputrain.engine.run_folder import CONFIG, HISTORY, METRICS
from gputrain.hw.probe import machine_facts
from gputrain.report.media import LiveMedia, MediaBudget
from gputrain.report.page import chart_groups, make_page
from gputrain.report.records import RunReader, read_run
from gputrain.watch.pages import Pages
from gputrain.watch.runs import MOST_ROWS, Runs, id_of

EVALUATED_STEPS = 500
MEGABYTES = "memory of one run, read whole"


def write_runs(folder: Path, runs: int, rows: int) -> list[Path]:
    """Writes runs of another machine that are training now."""
    draws, lines = random.Random(0), []
    names = [f"loss/model/{number}" for number in range(16)] + [f"gradient_norm/{number}" for number in range(4)]
    names += ["speed/images_per_second", "speed/seconds_per_step", "memory/peak_gb", "data/wait_share", "learning_rate"]
    for step in range(1, rows + 1):
        row = {"step": step, "epoch": step // 1000, "seconds": step / 5}
        lines.append(row | {name: round(draws.uniform(1, 2), 4) for name in names})
        if step % EVALUATED_STEPS == 0:
            lines.append(row | {"eval/psnr_db": draws.uniform(20, 30), "eval/ssim": draws.random()})
    content = "".join(json.dumps(row) + "\n" for row in lines)
    start = {"event": "start", "time": datetime.now(timezone.utc).isoformat(), "step": 0, "last_step": 2 * rows}
    folders = [folder / f"run_{number}" for number in range(runs)]
    for run in folders:
        run.mkdir()
        (run / METRICS).write_text(content, encoding="utf-8")
        (run / HISTORY).write_text(json.dumps({**start, "host": "elsewhere", "process": 1}) + "\n", encoding="utf-8")
        (run / CONFIG).write_text("kind: vae\ndata_path: photos\n", encoding="utf-8")
    return folders


def append(folders: Sequence[Path], step: int) -> None:
    for folder in folders:
        with (folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "seconds": step / 5, "loss/model/0": 1.5}) + "\n")


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def load(folders: Sequence[Path], step: int) -> Iterator[tuple[str, float]]:
    """Yields what was done with names of figures, and the seconds of CPU or the megabytes that it took."""
    runs = Runs([folders[0].parent])
    pages, id = Pages(runs, LiveMedia()), id_of(folders[0])
    yield "first look at all runs", cpu_seconds(lambda: runs.look())
    yield "overview", cpu_seconds(lambda: pages.page([]))
    yield "reading on, nothing new", cpu_seconds(runs.read)
    append(folders, step := step + 1)
    yield "reading on, a new line in every run", cpu_seconds(runs.read)
    yield "reading one run whole", cpu_seconds(lambda: runs.touch([id]))
    yield "page of one run", cpu_seconds(lambda: pages.page([id]))
    for page, ids in (("overview", []), ("page of one run", [id])):
        update = partial(pages.update, ids, [hash for hash, _ in pages.update(ids, ())["parts"].values()])
        yield f"update of the {page}, nothing new", cpu_seconds(update)
        append(folders, step := step + 1)
        runs.read()
        yield f"update of the {page}, a new line in every run", cpu_seconds(update)
    yield "all curves of one run", cpu_seconds(lambda: chart_groups([runs.record(id)]))
    yield "report of one run", cpu_seconds(lambda: make_page([read_run(folders[0])], MediaBudget.of(30)))
    tracemalloc.start()
    reader = RunReader(folders[-1], most_rows=MOST_ROWS)
    reader.refresh()
    yield MEGABYTES, tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="the disk to write to; default: that of temporary files")
    args = parser.parse_args()
    machine = machine_facts("cpu")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found = dict(load(write_runs(Path(name), args.runs, args.rows), args.rows))
    for title, value in found.items():
        print(f"{title:55} {f'{value:.2f} MB' if title == MEGABYTES else f'{1e3 * value:.1f} ms'}")
    command = f"python benchmarks/watch_load.py --runs {args.runs} --rows {args.rows}"
    megabytes = round(found.pop(MEGABYTES), 2)
    seconds = {title: round(value, 5) for title, value in found.items()}
    result = {"command": command, "machine": machine, "cpu_seconds": seconds, "megabytes_of_a_run": megabytes}
    device = re.sub(r"\W+", "_", machine["device"].lower())
    path = Path(__file__).parent / "results" / f"watch_load_{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
