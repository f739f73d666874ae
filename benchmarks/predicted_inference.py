"""Predicted time of inference on five cards, by the settings that `gputrain bench ... --inference` compares. Nothing is
measured.

    python benchmarks/predicted_inference.py [--output-dir benchmarks/results] [CASE ...]

A vocoder of 512 channels makes ten seconds, as many as `vocode` makes at once; voices speak five. The kernels are those
of an H100; for the other cards the same ones are taken. Rates are those of predicted_steps.py.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from gputrain.bench import runner, step_bench
from gputrain.bench.runner import BenchRow
from gputrain.bench.step_bench import inference_kernels
from gputrain.config import assemble
from gputrain.hw.gpus import find_gpu
from gputrain.hw.plan import decide
from gputrain.hw.probe import Machine, machine_facts
from gputrain.planner.time.roofline import DeviceRates, StepTotals, busy_seconds
from gputrain.tts.config import BenchTts, PlannedSpeech, TrainTts
from gputrain.tts.data import size_of, speaking
from gputrain.tts.kind import TtsWork
from gputrain.vocoder.config import BenchVocoder, TrainVocoder
from gputrain.vocoder.data import synthesis
from gputrain.vocoder.kind import VocoderWork

CARDS = ("h100", "rtx5090", "rtx4090", "l4", "t4")
CLIP_SECONDS, CHUNK_SECONDS, CHUNK_FRAMES = 5.0, 10.0, 861
CASES = ("vocoder", "high", "medium", "fast")


def rows_of(case: str) -> list[BenchRow]:
    """Returns the rows of `gputrain bench` for one item."""
    shared = {"batch_size": 1, "inference": True, "device": "cuda"}
    if case == "vocoder":
        vocoder = assemble(BenchVocoder, {**shared, "crop_mel_frames": CHUNK_FRAMES})
        return step_bench.bench_rows(VocoderWork(), vocoder)
    voice = assemble(BenchTts, {**shared, "preset": case, "clip_seconds": CLIP_SECONDS})
    return step_bench.bench_rows(TtsWork(), voice)


def predicted(case: str, row: BenchRow) -> dict[str, object]:
    """Returns launches, GB and TFLOP of a row, and its milliseconds by card."""
    settings: Any = assemble(TrainVocoder if case == "vocoder" else TrainTts, row.settings["train"])
    build = partial(synthesis, settings)
    if case != "vocoder":
        build = partial(speaking, settings, size_of(PlannedSpeech(), CLIP_SECONDS))
    plan = decide(find_gpu("h100").installed_in(Machine(system="Linux", cpu_cores=8)), settings.hardware)
    kernels = inference_kernels(build, plan)
    rates = {card: DeviceRates.published(find_gpu(card), tf32=bool(plan.tf32.value)) for card in CARDS}
    ms = {card: round(1e3 * busy_seconds(kernels, rate), 2) for card, rate in rates.items() if rate}
    return {"case": case, "label": row.label, **StepTotals.of(kernels)._asdict(), "predicted_ms": ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for case in options.cases or CASES:
        for row in rows_of(case):
            rows.append(predicted(case, row))
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "title": f"Predicted time of {CHUNK_SECONDS:g} s of a vocoder and {CLIP_SECONDS:g} s of a voice, not measured",
        **machine_facts("cpu"), "command": runner.command_line("python benchmarks/predicted_inference.py"),
        "rows": rows,
    }  # fmt: skip
    runner.open_folder(options.output_dir)
    runner.write_json(options.output_dir / "predicted_inference.json", report)


if __name__ == "__main__":
    main()
