"""A race of equal steps between options of train-asr, on prepared speech and unseen clips.

usage: python benchmarks/race_asr.py --data PREPARED [--steps 300] [--seeds 1 2 3] [--sides ours ours+layer_drop=0.1]

Every side is the preset `tiny` from random weights, with the options in its name ("ours" has the defaults of the race),
on one thread. After half of the steps and after all, the held-out clips are read: their error rate of characters, and
the mean CTC loss of a label, in nats. Results are one file a run in `--work-dir`, so that an interrupted race goes on
and further sides add to it, and a summary in benchmarks/results/race_asr_STEPS_DEVICE.json.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from race import OurTraining, assemble_for_cpu, interval, one_thread

from gputrain.asr.config import TrainAsr
from gputrain.asr.data import AsrTraining
from gputrain.asr.kind import AsrWork
from gputrain.asr.load import greedy_text, predict
from gputrain.bench import runner
from gputrain.files import FULL_SCALE
from gputrain.hw.probe import machine_facts
from gputrain.speech.buckets import Buckets
from gputrain.speech.config import STRIDE, encoder_frames
from gputrain.speech.error_rates import error_rates

METRICS = ("cer", "ctc_loss")


def measure(side: str, seed: int, data: Path, steps: int, batch_size: int) -> dict[str, Any]:
    """Trains a side. Returns its figures after half of the steps and after all."""
    one_thread()
    settings, runtime = assemble_for_cpu(
        TrainAsr, side, data_path=(data,), preset="tiny", batch_size=batch_size, num_steps=steps, num_epochs=0,
        learning_rate=1e-3, warmup_steps=steps // 10, held_out_share=0.2, seed=seed,
    )  # fmt: skip
    opened = AsrWork().open_data(settings)
    recipe = opened.recipe(settings, runtime)
    step_items = opened.stage(settings).step_items
    training = OurTraining(recipe, settings, runtime, replace(opened.buckets, ranks=runtime.ranks), step_items)
    points, seconds = [], 0.0
    for mark in (steps // 2, steps):
        began = time.process_time()
        while training.steps < mark:
            training.step()
        seconds += time.process_time() - began
        points.append({"steps": mark, "cpu_seconds": seconds, **evaluate(recipe.best_model, opened)})
        print(side, seed, points[-1], flush=True)
    return {"side": side, "seed": seed, "steps": steps, "batch_size": batch_size, "points": points}


@torch.no_grad()
def evaluate(model: Any, opened: AsrTraining) -> dict[str, float]:
    """Returns the error rate and the loss of all held-out clips."""
    clips, store = opened.speech.parts.held_out, opened.speech.store
    buckets, vocabulary = Buckets(store, clips, STRIDE, batch_size=16, seed=0), store.format.vocabulary
    texts: list[tuple[str, str]] = []
    total, labels = 0.0, 0
    order = sorted(range(len(clips)), key=lambda number: clips[number].samples)
    for first in range(0, len(order), 16):
        members = order[first : first + 16]
        batch = buckets.collated(members)
        frames_B = torch.tensor([encoder_frames(int(count)) for count in batch.samples_B])
        logits_BTV = predict(
            model, batch.wave_BT.float() / FULL_SCALE, batch.samples_B.tolist(), normalizes=opened.normalizes
        )
        for logits_TV, frames, member in zip(logits_BTV, frames_B.tolist(), members, strict=True):
            texts.append((clips[member].normalized, greedy_text(logits_TV[:frames].numpy(), vocabulary)))
        log_probs_TBV = F.log_softmax(logits_BTV.float(), dim=-1).transpose(0, 1)
        lengths = (frames_B, batch.symbols_B, vocabulary.blank)
        total += float(F.ctc_loss(log_probs_TBV, batch.ids_BS, *lengths, reduction="sum"))
        labels += int(batch.symbols_B.sum())
    model.train()
    return {"cer": error_rates(texts)["cer"], "ctc_loss": total / labels}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    points = []
    for at in zip(*(run["points"] for run in runs), strict=True):
        values = {name: [point[name] for point in at] for name in METRICS}
        points.append({
            "steps": at[0]["steps"], "cpu_seconds": sum(point["cpu_seconds"] for point in at) / len(at),
            **{name: {"mean": sum(v) / len(v), "interval": interval(v), "values": v} for name, v in values.items()},
        })  # fmt: skip
    return {"seeds": [run["seed"] for run in runs], "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sides", nargs="+", default=["ours"])
    parser.add_argument("--work-dir", type=Path, default=Path("race_runs"))
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    for folder in (given.work_dir, given.output_dir):
        runner.open_folder(folder)
    for seed in given.seeds:
        for side in given.sides:
            name = "".join(letter if letter.isalnum() or letter in "+-=.,_" else "_" for letter in side)
            path = given.work_dir / f"asr_{name}_{given.steps}_{seed}.json"
            if not path.exists():
                found = measure(side, seed, given.data, given.steps, given.batch_size)
                path.write_text(json.dumps(found, indent=1))
    runs = [json.loads(path.read_text()) for path in sorted(given.work_dir.glob(f"asr_*_{given.steps}_*.json"))]
    machine = machine_facts("cpu")
    sides = sorted({run["side"] for run in runs}, key=lambda side: (len(side), side))
    content = {
        **machine, "command": runner.command_line("python benchmarks/race_asr.py"), "threads": 1,
        "conditions": f"preset tiny, {given.steps} steps of batch size {given.batch_size}, a fifth of the clips unseen",
        "interval": "95 % by Student's t distribution over the seeds, +-",
        "sides": {side: summary([run for run in runs if run["side"] == side]) for side in sides},
    }  # fmt: skip
    path = runner.result_path(given.output_dir, f"race_asr_{given.steps}", str(machine["device"]))
    runner.write_json(path, content)
    for side, found in content["sides"].items():
        for point in found["points"]:
            figures = (f"{name} {point[name]['mean']:.4f} +- {point[name]['interval'] or 0:.4f}" for name in METRICS)
            print(side, point["steps"], *figures)


if __name__ == "__main__":
    main()
