"""Writes how a recogniser learns: error rates on its training clips and on held-out ones, by step.

    python benchmarks/asr_learning_curve.py --run RUN --data STORE [--every 1000] [--cpu-seconds S]

RUN is a run of train-asr with `--keep-checkpoints 0`, STORE its data. Each kept checkpoint_step_N.pt whose step is a
multiple of `--every`, and the last one, transcribe all training clips greedily; error rates on held-out clips come from
metrics.jsonl. Writes benchmarks/results/asr_learning_curve.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from gputrain import __version__
from gputrain.asr.evaluate import rates_of, recognise_clips
from gputrain.asr.load import load_recogniser
from gputrain.engine.checkpoint import LAST
from gputrain.speech.buckets import open_speech
from gputrain.speech.config import ENCODER_RATE

SETTINGS = (
    "batch_size", "num_steps", "learning_rate", "learning_rate_schedule", "warmup_steps", "mask_time_prob", "seed",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--cpu-seconds", type=float, default=0.0, help="CPU time of the training, if it is known.")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    last = torch.load(given.run / LAST, map_location="cpu", weights_only=True)
    config, end = last["config"], int(last["progress"]["step"])
    speech = open_speech(given.data, config["held_out_share"], kind="asr")
    train = speech.parts.train
    steps = [step for step in range(given.every, end, given.every) if _kept(given.run, step).exists()]
    training: list[dict[str, Any]] = []
    for step, path in [*((step, _kept(given.run, step)) for step in steps), (end, given.run / LAST)]:
        recogniser = load_recogniser(path, torch.device("cpu"))
        rates = rates_of(list(recognise_clips(recogniser, speech.store, train, batch_size=16)))
        training.append({"step": step, **rates})
        print(training[-1], flush=True)
    held_out = [
        {"step": row["step"], **{name: row[f"eval/{name}"] for name in ("cer", "cer_low", "cer_high", "wer")}}
        for row in map(json.loads, (given.run / "metrics.jsonl").read_text().splitlines())
        if "eval/cer" in row
    ]
    report = {
        "command": "python benchmarks/asr_learning_curve.py --run RUN --data STORE", "gputrain": __version__,
        "torch": torch.__version__, "threads": 1, "cpu_seconds_of_training": given.cpu_seconds,
        "preset": config["preset"], "weights": sum(t.numel() for t in last["modules"]["recogniser"].values()),
        "settings": {name: config[name] for name in SETTINGS},
        "clips": {"training": len(train), "held_out": len(speech.parts.held_out)},
        "hours_of_training": sum(clip.samples for clip in train) / ENCODER_RATE / 3600,
        "training": training, "held_out": held_out,
    }  # fmt: skip
    given.output_dir.mkdir(parents=True, exist_ok=True)
    (given.output_dir / "asr_learning_curve.json").write_text(json.dumps(report, indent=1) + "\n")


def _kept(run: Path, step: int) -> Path:
    return run / f"checkpoint_step_{step}.pt"


if __name__ == "__main__":
    main()
