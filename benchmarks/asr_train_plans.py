"""Plans of train-asr for the user's scenarios on three GPUs, from the options alone, for docs/evidence/recognisers.md.

    python benchmarks/asr_train_plans.py [--output-dir benchmarks/results]

XLS-R 300M and 1B, full fine-tuning with a frozen feature encoder and LoRA, clips of 8 and 30 s, 32 clips a step. Needs
no GPU and no weights. Writes asr_train_plans.json and prints the rows of the table. GB is 1e9 bytes.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from gputrain import __version__
from gputrain.asr.config import PlanAsr
from gputrain.asr.kind import AsrWork
from gputrain.config import assemble
from gputrain.planner.model_planner import CardPlan, plan_cards

CARDS = ["t4", "l4", "a100-40"]


def plans() -> Iterator[CardPlan]:
    for preset, seconds, adapters in itertools.product(("xls-r-300m", "xls-r-1b"), (8, 30), ("none", "lora")):
        values = {"preset": preset, "adapters": adapters, "clip_seconds": seconds, "max_batch_audio_ratio": 1.0,
                  "batch_size": 32, "gpu": CARDS}  # fmt: skip
        yield from plan_cards(AsrWork(), assemble(PlanAsr, values))


def table_row(plan: CardPlan) -> str:
    """Returns the row of the table in docs/evidence/recognisers.md."""
    names, fit = plan.columns, plan.fit
    choice, speed = "does not fit | ", " | "
    if fit.fits:
        choice = f"{fit.micro_batch_size} x {fit.accumulation_steps} | {'on' if fit.checkpointing else 'off'}"
        step = fit.predicted_seconds_per_step
        assert step is not None, "the rates of these cards are published"
        speed = f"{step:.3g} | {names['batch_size'] / step:.3g}"
    cells = (
        plan.gpu, names["model"], names["adapters"], f"{names['seconds']:g} s", choice,
        f"{fit.predicted_peak_gb:.1f} of {fit.budget_gb:.1f} GB", speed,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().output_dir
    rows = []
    for plan in plans():
        found = plan.to_json()
        del found["reasons"]
        rows.append(found)
        print(table_row(plan), flush=True)
    report = {
        "command": "python benchmarks/asr_train_plans.py", "gputrain": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "measured": False, "plans": rows,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asr_train_plans.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
