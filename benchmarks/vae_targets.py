"""Measures steps of the image VAE on a GPU against targets of time and memory.

usage: python benchmarks/vae_targets.py V2 V1 V5 [--smoke]

V1  flux at five sizes, with exact batches, on a GPU limited to 32 GB: peak memory, with the largest micro-batch of
    those tried that stays within the row's limit
V2  flux, 16 pictures of 1024 px, bf16, compiled: seconds per step and share of the GPU's matrix-product rate
V5  fast, 16 pictures of 1024 px, bf16, compiled: seconds per step

The limits of V1 hold on any GPU, the targets of V2 and V5 on an H100. What is missed is reported as MISSED.

Each row is a new process on synthetic pictures. Writes benchmarks/results/vae_TARGET_DEVICE.json after every row.
`--smoke` runs the same on any machine at a tiny size to test the script.
"""

import argparse
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gputrain.bench import runner
from gputrain.bench.runner import BenchReport, BenchResult, BenchRow, Settings
from gputrain.bench.step_bench import StepBench
from gputrain.config import assemble
from gputrain.hw.plan import decide
from gputrain.hw.probe import probe
from gputrain.hw.runtime import apply, memory_gb
from gputrain.vae.bench import begin_bench
from gputrain.vae.config import TrainVae

CARD_GB = 32
CONTEXT_GB = 0.6  # GPU memory of the driver and its libraries
# Pixels, pictures per step, limit of the peak in GB, and the first micro-batch, which is halved while it takes more.
V1 = ((512, 32, 18, 8), (768, 24, 22, 6), (1024, 16, 26, 4), (1536, 8, 28, 2), (2048, 4, 30, 1))
TARGETS = ("V1", "V2", "V5")
MOST_SECONDS = {"V2": 1.85, "V5": 0.24}  # A step on an H100 takes no longer.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="V1|V2|V5")
    parser.add_argument("--smoke", action="store_true", help="a tiny size, on any machine")
    parser.add_argument("--row-minutes", type=float, default=5)
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not (torch.cuda.is_available() or options.smoke):
        print("no GPU: nothing measured (--smoke tries the script at a tiny size)")
        return
    runner.open_folder(options.output_dir)
    for target in options.targets:
        report = BenchReport(f"target {target}", "images", runner.command_line("python benchmarks/vae_targets.py"))
        child = (sys.executable, __file__)
        for result in runner.measure_rows(rows(target, options.smoke), child, minutes=options.row_minutes):
            report.results.append(result)
            print(line(target, result), flush=True)
            path = runner.result_path(options.output_dir, f"vae_{target.lower()}", report.device)
            runner.write_json(path, report.to_json())


def rows(target: str, smoke: bool) -> list[BenchRow]:
    if target == "V1":
        return [
            row(f"flux {size} px x {batch}", smoke, image_size=size, batch_size=batch, micro_batch_size=at_once,
                gradient_checkpointing=True, use_torch_compile=False, limit_gb=limit)
            for size, batch, limit, at_once in (V1[:2] if smoke else V1)
        ]  # fmt: skip
    if target == "V2":
        return [row("flux 1024 px x 16", smoke, image_size=1024, batch_size=16, micro_batch_size=4)]
    return [row("fast 1024 px x 16", smoke, preset="fast", image_size=1024, batch_size=16)]


def row(label: str, smoke: bool, *, limit_gb: float = 0, **train: Any) -> BenchRow:
    """Returns a row for the child. Other settings have train-vae's defaults for this machine."""
    train = {"data_path": ".", "use_torch_compile": True, **train}
    if smoke:
        label, size = f"(tiny) {label}", max(16, train["image_size"] // 32)
        train |= {"channels": [32, 32], "image_size": size, "use_torch_compile": False, "device": "cpu"}
    device = "cpu" if smoke else "cuda"
    return BenchRow(label, {"train": train, "limit_gb": limit_gb, "steps": 3, "warmup_steps": 2, "device": device})


def measure(settings: Settings) -> dict[str, Any]:
    """Measures time, rates and peak memory of a row in the child, with a micro-batch within the limit, if any."""
    train = assemble(TrainVae, settings["train"])
    runtime = apply(decide(probe(), train.hardware))
    limit_gb = settings["limit_gb"]
    if limit_gb and runtime.device.type == "cuda":
        total_gb = torch.cuda.get_device_properties(runtime.device).total_memory / 1e9
        torch.cuda.set_per_process_memory_fraction(min(1.0, (CARD_GB - CONTEXT_GB) / total_gb))
    with tempfile.TemporaryDirectory() as folder:
        bench: Any = begin_bench(train, runtime, Path(folder))
        if limit_gb:
            keep_to(limit_gb, bench)
        figures = bench.measure(warmup=settings["warmup_steps"], steps=settings["steps"])
    return {**figures, "limit_gb": limit_gb} if limit_gb else figures


def keep_to(limit_gb: float, bench: StepBench) -> None:
    """Halves the micro-batch until a step's peak is within the limit. Out of memory, the engine halves it itself."""
    device, micro_batch = bench.runtime.device, bench.state.micro_batch
    while True:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        bench.step()
        if memory_gb(device)["memory/peak_gb"] <= limit_gb or max(micro_batch.values()) == 1:
            return
        for phase, items in micro_batch.items():
            micro_batch[phase] = math.ceil(items / 2)


def line(target: str, result: BenchResult) -> str:
    if not result.figures:
        return f"{target}  {result.label:<24} not measured: {result.reason}"
    figures = result.figures
    seconds, peak_gb = figures["seconds_per_step"], figures["peak_gb"]
    share = f"{figures['share_of_product']:.0%} of a product, " if "share_of_product" in figures else ""
    most = MOST_SECONDS.get(target) if "H100" in str(result.machine.get("device")) else None
    return (
        f"{target}  {result.label:<24} {seconds:.3g} s a step "
        f"(roofline {figures['predicted_seconds_per_step']:.3g}{kept(seconds, most, 'target')}), "
        f"{figures['tflops']:.3g} TFLOPS, {share}"
        f"peak {peak_gb:.1f} GB{kept(peak_gb, figures.get('limit_gb'), 'limit')}, "
        f"{figures['micro_batch_size']} at once, first step {figures['first_step_seconds']:.0f} s"
    )


def kept(value: float, most: float | None, word: str) -> str:
    """Returns the largest allowed value, if there is one, and whether it is kept."""
    return "" if most is None else f", {word} {most:g}: {'met' if value <= most else 'MISSED'}"


if __name__ == "__main__" and not runner.answer(measure):
    main()
