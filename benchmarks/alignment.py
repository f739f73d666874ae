"""Monotonic alignment search: ours against the Cython code that VITS and its descendants use, in one run.

usage: python benchmarks/alignment.py [--device cpu] [--threads 1 2] [--smoke]

The peer is the package monotonic-alignment-search, called as a training calls it: scores on the device go in, a dense
path on the device comes out. Ours gives durations: in Triton on a GPU (`ours`) and by numba on the CPU, which on a GPU
is the way it goes without Triton (`ours-cpu`). Scores are random and items of full length. Rows are fresh processes, in
turn: peer, ours, peer, ours, ...; a side's figures are medians over its rows, and each row of ours also says whether
its durations are the peer's. The peer shares items among the threads of OpenMP where it was built so, ours among as
many threads as torch has. Writes benchmarks/results/alignment_DEVICE.json. Exits with 1 where paths differ.

Shapes: B items, T frames, S symbols.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchResult, BenchRow, Settings
from gputrain.tts import align

SIZES = ((64, 151, 430), (64, 301, 860))  # items, symbols, frames: clips of 5 and 10 s at 22.05 kHz
SMOKE_SIZES = ((2, 5, 9),)
MEDIANS = ("seconds_per_step", "cpu_seconds_per_step", "peak_gb")
PEER = "monotonic-alignment-search"


def main() -> None:
    options = parse()
    runner.open_folder(options.output_dir)
    results: list[BenchResult] = []
    for result in runner.measure_rows(rows(options), (sys.executable, __file__), minutes=options.row_minutes):
        results.append(result)
        print(line(result), flush=True)
        write(options, results)
    for comparison in summaries(results):
        print(comparison["size"], comparison["threads"] or "", comparison["ratios"])
    if not all(result.figures.get("equal", True) for result in results):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--threads", type=int, nargs="+", help="on a CPU: 1 2; on a GPU those of torch")
    parser.add_argument("--rounds", type=int, default=3, help="rows of each side")
    parser.add_argument("--steps", type=int, default=20, help="timed searches of a row")
    parser.add_argument("--row-minutes", type=float, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that the script works")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    options.threads = options.threads or ([0] if options.device == "cuda" else [1, 2])
    if options.smoke:
        options.rounds, options.steps = 1, 1
    return options


def rows(options: argparse.Namespace) -> Iterator[BenchRow]:
    sides = ("peer", "ours", "ours-cpu") if options.device == "cuda" else ("peer", "ours")
    sizes = SMOKE_SIZES if options.smoke else SIZES
    for _, size, threads, side in product(range(options.rounds), sizes, options.threads, sides):
        label = f"{'x'.join(map(str, size))}{f', {threads} threads' if threads else ''}: {side}"
        settings = {"size": size, "threads": threads, "side": side, "device": options.device, "steps": options.steps}
        yield BenchRow(label, settings)


# In the child ---------------------------------------------------------------------------------------------------------


def measure(settings: Settings) -> dict[str, Any]:
    """The figures of a row."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    items, symbols, frames = settings["size"]
    scores_BTS = torch.randn(items, frames, symbols, generator=torch.Generator().manual_seed(0)).to(device)
    counts = torch.full((items,), symbols), torch.full((items,), frames)
    step = {"peer": by_peer, "ours": by_ours, "ours-cpu": by_ours_on_cpu}[settings["side"]](scores_BTS, *counts)
    figures: dict[str, Any] = dict(step_bench.time_steps(step, device, warmup=2, steps=settings["steps"]))
    if settings["side"] != "peer":
        figures["equal"] = torch.equal(step(), by_peer(scores_BTS, *counts)().sum(dim=2).long())
    if settings["side"] == "ours" and device.type == "cuda" and align.triton_search() is None:
        raise runner.NotMeasured("Triton does not work here")
    return figures


def by_peer(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Callable[[], Tensor]:
    """Its scores lie symbols by frames, and so does its mask."""
    try:
        from monotonic_alignment_search import maximum_path
    except ImportError:
        raise runner.NotMeasured(f"pip install {PEER}") from None
    scores_BST = scores_BTS.mT.contiguous()
    mask_BST = torch.ones_like(scores_BST)
    return lambda: maximum_path(scores_BST, mask_BST)


def by_ours(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Callable[[], Tensor]:
    return lambda: align.search(scores_BTS, symbols_B, frames_B)


def by_ours_on_cpu(scores_BTS: Tensor, symbols_B: Tensor, frames_B: Tensor) -> Callable[[], Tensor]:
    return lambda: align.search(scores_BTS.cpu(), symbols_B, frames_B).to(scores_BTS.device)


# The results ----------------------------------------------------------------------------------------------------------


def write(options: argparse.Namespace, results: Sequence[BenchResult]) -> None:
    machine = next((dict(result.machine) for result in results if result.machine), {})
    if not machine:
        return
    del machine["threads"]  # each row has its own
    name = "alignment_smoke" if options.smoke else "alignment"
    content = {
        **machine,
        "command": runner.command_line("python benchmarks/alignment.py"),
        "peer": {"package": PEER, "version": peer_version(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        "comparisons": summaries(results),
    }
    runner.write_json(runner.result_path(options.output_dir, name, str(machine["device"])), content)


def peer_version() -> str | None:
    try:
        return version(PEER)
    except PackageNotFoundError:
        return None


def summaries(results: Sequence[BenchResult]) -> list[dict[str, Any]]:
    """For each size and number of threads: medians of the sides, and each by the peer's."""
    groups: dict[tuple[str, int], dict[str, list[BenchResult]]] = {}
    for result in results:
        size = "x".join(map(str, result.settings["size"]))
        groups.setdefault((size, result.settings["threads"]), {}).setdefault(result.settings["side"], []).append(result)
    made = []
    for (size, threads), by_side in groups.items():
        sides = {side: summary(of_side) for side, of_side in by_side.items()}
        peer = sides["peer"]
        ratios = {
            side: {key: figures[key] / peer[key] for key in MEDIANS if key in figures and peer.get(key)}
            for side, figures in sides.items()
            if side != "peer"
        }
        made.append({"size": size, "threads": threads, "sides": sides, "ratios": ratios})
    return made


def summary(results: Sequence[BenchResult]) -> dict[str, Any]:
    measured = [result.figures for result in results if result.figures]
    found: dict[str, Any] = {"rows": len(measured)}
    for key in MEDIANS:
        if values := [figures[key] for figures in measured if key in figures]:
            found[key] = statistics.median(values)
    if measured:
        found["seconds_of_rows"] = [figures["seconds_per_step"] for figures in measured]
        found |= {key: measured[-1][key] for key in ("first_step_seconds", "equal") if key in measured[-1]}
    reasons = dict.fromkeys(result.reason for result in results if result.reason)
    return found | ({"reasons": list(reasons)} if reasons else {})


def line(result: BenchResult) -> str:
    if not result.figures:
        return f"{result.label:<34} not measured: {result.reason}"
    shown = ", ".join(f"{key} {result.figures[key]:.4g}" for key in MEDIANS if key in result.figures)
    return f"{result.label:<34} {shown}{'' if result.figures.get('equal', True) else ', PATHS DIFFER'}"


if __name__ == "__main__" and not runner.answer(measure):
    main()
