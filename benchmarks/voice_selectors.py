"""Compares the measures that can choose the best checkpoint of a voice over the checkpoints of short trainings.

usage: python benchmarks/voice_selectors.py --data PREPARED --recogniser MODEL [--dnsmos FOLDER] [--steps 120]

PREPARED is a folder that `gputrain prepare-data --kind tts --audio-sample-rate 16000` has filled. A small `fast` voice
with narrow discriminators trains by the command's own code, and is evaluated ten times on held-out clips. FOLDER holds
sig_bak_ovr.onnx of DNSMOS P.835 (Reddy et al. 2022, arXiv:2110.01763), as the package speechmos has it: its overall
score of the first 9.01 s of the repeated wave becomes the graph of one score that `--mos-predictor` takes. Prints the
rank correlations of the measures, their mean and 95 % interval over the seeds, and writes voice_selectors.json.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from race import interval
from rich.console import Console

from gputrain.config import assemble
from gputrain.hw.probe import machine_facts
from gputrain.report.page import rank_correlation, selectors_of
from gputrain.report.records import read_run
from gputrain.session import train_model
from gputrain.tts import architecture
from gputrain.tts.config import TrainTts
from gputrain.tts.work import TtsWork

SMALL = {"hidden_channels": 96, "latent_channels": 96, "encoder_filter_channels": 384, "encoder_layers": 4,
         "upsample_initial_channel": 128}  # fmt: skip
DNSMOS_SAMPLES = 144160
MEASURES = {"mcd_sl_db": -1, "cer": -1, "mos": 1}  # 1: higher is better


def one_score(folder: Path, target: Path) -> Path:
    """Writes DNSMOS as a graph from a wave [samples] at 16 kHz to its overall score [1]."""
    import onnx
    from onnx import TensorProto, compose, helper, numpy_helper

    network = compose.add_prefix(onnx.load(folder / "sig_bak_ovr.onnx"), "dnsmos_")
    graph = network.graph
    constants = {
        "repeats": [100], "begin": [0], "end": [DNSMOS_SAMPLES], "row": [1, DNSMOS_SAMPLES], "overall": [2], "one": [1],
    }  # fmt: skip
    nodes = [
        helper.make_node("Tile", ["wave", "repeats"], ["tiled"]),
        helper.make_node("Slice", ["tiled", "begin", "end"], ["cut"]),
        helper.make_node("Reshape", ["cut", "row"], [graph.input[0].name]),
        *graph.node,
        helper.make_node("Gather", [graph.output[0].name, "overall"], ["scores"], axis=1),
        helper.make_node("Reshape", ["scores", "one"], ["score"]),
    ]
    made = helper.make_graph(
        nodes, "one_score",
        [helper.make_tensor_value_info("wave", TensorProto.FLOAT, ["samples"])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [1])],
        [*graph.initializer, *(numpy_helper.from_array(torch.tensor(v).numpy(), k) for k, v in constants.items())],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=network.opset_import, ir_version=network.ir_version)
    helper.set_model_props(model, {"sampling_rate": "16000"})
    onnx.save(model, target)
    return target


def trained(args: argparse.Namespace, seed: int) -> Path:
    folder: Path = args.work_dir / f"seed_{seed}"
    if not (folder / "report.html").exists():
        values: dict[str, Any] = {
            "data_path": str(args.data), "output_dir": str(folder), "seed": seed, "preset": "fast", "batch_size": 2,
            "discriminator_channels": 8, "num_epochs": 0, "num_steps": args.steps, "held_out_share": 0.1,
            "evaluate_every_steps": args.steps // 10, "eval_clips": args.clips, "recogniser": args.recogniser,
            "best_by": "cer", "device": "cpu", "plan": False, "num_workers": 0, "max_padding": 0.2, "ema_decay": 0.98,
            "checkpoint_every_steps": 0, "sample_every_steps": 0, "resume_from": "auto",
        }  # fmt: skip
        if args.dnsmos:
            values["mos_predictor"] = str(one_score(args.dnsmos, args.work_dir / "dnsmos.onnx"))
        train_model(TtsWork(), assemble(TrainTts, values), Console(stderr=True))
    return folder


def correlations(folder: Path) -> dict[str, Any]:
    record = read_run(folder)
    record.kind = record.kind or "tts"
    series = {name: [value for step, value in record.series(f"eval/{name}") if step] for name in MEASURES}
    series = {name: values for name, values in series.items() if values}
    pairs = {
        f"{one} and {other}": rank_correlation(
            [MEASURES[one] * value for value in series[one]], [MEASURES[other] * value for value in series[other]]
        )
        for one, other in itertools.combinations(series, 2)
    }
    chosen = {one.title: [one.step, one.value] for one in selectors_of(record)}
    recorded: dict[str, Any] = {
        name: points[0][1] for name in ("eval/recorded_cer", "eval/recorded_mos") if (points := record.series(name))
    }
    return {"correlations": pairs, "chosen": chosen, "series": series, **recorded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recogniser", required=True)
    parser.add_argument("--dnsmos", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--work-dir", type=Path, default=Path("voice_selectors"))
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    architecture.PRESETS["fast"] = {**architecture.PRESETS["fast"], **SMALL}
    found = {str(seed): correlations(trained(args, seed)) for seed in args.seeds}
    for pair in next(iter(found.values()))["correlations"]:
        values = [one["correlations"][pair] for one in found.values() if one["correlations"][pair] is not None]
        mean, margin = (sum(values) / len(values) if values else math.nan), interval(values)
        print(f"{pair}: {mean:.2f}{f' +- {margin:.2f}' if margin is not None else ''} ({len(values)} seeds)")
    result = {
        "command": f"python benchmarks/voice_selectors.py {' '.join(sys.argv[1:])}", "torch": torch.__version__,
        "machine": machine_facts("cpu"), "seeds": found,
    }  # fmt: skip
    path = Path(__file__).parent / "results" / "voice_selectors.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
