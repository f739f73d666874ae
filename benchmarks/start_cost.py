"""CPU-seconds before a training's first step: planning, the whole start, and compiling; on one core, without a GPU.

usage: python benchmarks/start_cost.py [--only plan|start|compile ...] [--tree NAME=CHECKOUT ...] [--rounds 1]

plan     planning of each published configuration for an H100, as the train command does it: with an empty cache, and
         once more with what the first call has left in it. Imports don't count.
start    from the command to the first step of a training on the CPU, with the imports: until a batch is given to
         `update()`. The data are prepared beforehand by the first checkout.
compile  what torch.compile and Triton do for a step on an H100, on shapes: the time within torch's compiler, and that
         of Triton for one configuration of every kernel.

Every figure is that of a process of its own, with its children, in turns over the checkouts (default: this one). The
machine should do nothing else meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CARD = "h100"
FAST = ("--preset", "fast", "--image-size", "256", "--batch-size", "4")
STARTS: dict[str, tuple[str, ...]] = {
    "vae fast 256 px x 4": ("train-vae", "--data-path", "vae", *FAST),
    "vae flux 256 px x 2": ("train-vae", "--data-path", "vae", "--image-size", "256", "--batch-size", "2"),
    "vocoder standard": ("train-vocoder", "--data-path", "vocoder", "--config", "base_hifi_gpu.yaml"),
    "voice fast": ("train-tts", "--data-path", "tts", "--preset", "fast"),
    "recogniser tiny": ("train-asr", "--data-path", "asr", "--preset", "tiny"),
}
PLANS = ("vae fast 256 px x 4", "vae flux 512 px x 8", "vae flux 1024 px x 16", "vocoder standard", "vocoder optimised",
         "voice high, 64 x 4.7 s", "XLS-R 300M, 8 x 8 s")  # fmt: skip
COMPILED = ("vae flux 512 px x 8", "vocoder standard", "voice high, 64 x 4.7 s")


def planned(name: str) -> tuple[Any, Any]:
    """Returns the settings of a published configuration, as for `gputrain plan`, and the work of its kind."""
    from tests.planner import step_counts as cases

    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "vae fast 256 px x 4": partial(cases.of_vae, preset="fast", image_size=256, batch_size=4),
        "vae flux 512 px x 8": partial(cases.of_vae, **cases.FLUX),
        "vae flux 1024 px x 16": partial(cases.of_vae, preset="flux", image_size=1024, batch_size=16),
        "vocoder standard": partial(cases.of_shipped, "base_hifi_gpu"),
        "vocoder optimised": partial(cases.of_shipped, "base_hifi_rtx5090_optimized"),
        "voice high, 64 x 4.7 s": partial(cases.of_voice, **cases.HIGH),
        "XLS-R 300M, 8 x 8 s": partial(cases.of_recogniser, **cases.XLS_R),
    }
    return makers[name]()


# -------------------------------------------------------------------------------------- in a process for each figure


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def plan(name: str) -> dict[str, float]:
    import torch

    from gputrain.hw.gpus import find_gpu
    from gputrain.hw.probe import Machine
    from gputrain.planner.model_planner import ModelPlanner, memory_budget
    from gputrain.planner.time.roofline import DeviceRates

    torch.set_num_threads(1)
    settings, work = planned(name)
    gpu = find_gpu(CARD)
    assert gpu is not None
    machine = gpu.installed_in(Machine(system="Linux", cpu_cores=8))
    began = cpu_seconds()
    switches = work.decide(machine, settings.hardware)
    budget = memory_budget(machine, switches, settings.hardware, DeviceRates.published(gpu, tf32=True))
    keeps = {"keeps": True} if "keeps" in vars(ModelPlanner) else {}  # Earlier checkouts keep nothing.
    _, found = ModelPlanner(work, **keeps).plan(settings, switches, budget)
    return {"cpu_seconds": cpu_seconds() - began, "peak_gb": found.predicted_peak_gb}


def start(name: str) -> dict[str, float]:
    """Runs a train command up to its first step, and ends this process there."""
    from gputrain.cli.app import command_line
    from gputrain.engine import train

    began = time.time()

    def first_step(*arguments: object, **named: object) -> None:
        print(json.dumps({"cpu_seconds": cpu_seconds(), "seconds": time.time() - began}), flush=True)
        os._exit(0)

    train.update = first_step  # type: ignore[assignment]
    command_line().main(args=[*STARTS[name], "--output-dir", tempfile.mkdtemp(), "--device", "cpu"])
    raise SystemExit("the command made no step")


def compiling(name: str) -> dict[str, float]:
    import torch
    import torch._dynamo.convert_frame as frames
    import torch._inductor.compile_fx as inductor
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.fake_cuda import inductor_target

    torch.set_num_threads(1)
    record = inductor_target.target((9, 0))
    spent, within = 0.0, False

    def timed(owner: Any, function: str) -> None:
        original = getattr(owner, function)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal spent, within
            if within:
                return original(*arguments, **named)
            began, within = cpu_seconds(), True
            try:
                return original(*arguments, **named)
            finally:
                spent, within = spent + cpu_seconds() - began, False

        setattr(owner, function, call)

    for owner, function in ((frames, "_compile"), (inductor, "compile_fx"), (inductor, "compile_fx_inner")):
        timed(owner, function)
    settings, work = planned(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        inductor_target.run_step(work.target(settings), settings.schedule.batch_size, CARD, settings.hardware)
    kernels = {kernel.source: kernel for graph in record.graphs for kernel in graph.kernels.values()}
    began = cpu_seconds()
    for kernel in kernels.values():
        inductor_target.cubin(kernel, (9, 0))
    triton = cpu_seconds() - began
    graphs = float(len(record.graphs))
    return {"cpu_seconds": spent + triton, "torch": spent, "triton": triton, "graphs": graphs, "kernels": len(kernels)}


CHILDREN: dict[str, Callable[[str], dict[str, float]]] = {"plan": plan, "start": start, "compile": compiling}
CASES = {"plan": PLANS, "start": tuple(STARTS), "compile": COMPILED}


# ------------------------------------------------------------------------------------------------------- the figures


def measured(part: str, name: str, tree: Path, data: Path, caches: Path) -> dict[str, float]:
    """Returns what a child process of a checkout finds, or raises SystemExit with the end of what it printed."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    environment = {**os.environ, "PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(caches), "OMP_NUM_THREADS": "1",
                   **folders}  # fmt: skip
    command = [sys.executable, "-W", "ignore", __file__, "--child", part, name]
    done = subprocess.run(command, cwd=data, env=environment, capture_output=True, text=True, check=False)
    try:
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        sys.exit(f"{part}, {name}, {tree}: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return found


def prepare(tree: Path, data: Path) -> None:
    command = [sys.executable, "-m", "gpu.data", str(data)]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'benchmarks'}"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def rows_of(part: str, name: str, trees: dict[str, Path], data: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each checkout, with the medians of the rounds."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for label, tree in trees.items():
            with tempfile.TemporaryDirectory() as caches:
                for cache in ("cold",) if part == "compile" else ("cold", "warm"):
                    found.setdefault((label, cache), []).append(measured(part, name, tree, data, Path(caches)))
    return [
        {"part": part, "case": name, "tree": label, "cache": cache,
         **{key: round(median(one[key] for one in each), 3) for key in each[0]}}
        for (label, cache), each in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--case", default="", help="cases whose names contain this")
    parser.add_argument("--tree", nargs="+", default=[f"now={ROOT}"], metavar="NAME=CHECKOUT")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of `gpu.sh prepare`; default: made for this run")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        part, name = options.child
        print(json.dumps(CHILDREN[part](name)), flush=True)
        return
    trees = {label: Path(tree).resolve() for label, _, tree in (one.partition("=") for one in options.tree)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data.resolve() if options.data else Path(scratch) / "data"
        if not options.data:
            prepare(next(iter(trees.values())), data)
        for part in options.only:
            for name in (one for one in CASES[part] if options.case in one):
                for row in rows_of(part, name, trees, data, options.rounds):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if options.output:
        from gputrain.bench.runner import command_line
        from gputrain.hw.probe import machine_facts

        report = {"title": "CPU-seconds before the first step", **machine_facts("cpu"),
                  "command": command_line("python benchmarks/start_cost.py"), "rows": rows}  # fmt: skip
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
