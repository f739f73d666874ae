"""Plans of train-asr for the user's scenarios on three GPUs, predicted from the options alone, for docs/asr.md.

    python benchmarks/asr_train_plans.py [--output-dir benchmarks/results]

XLS-R 300M and 1B, full fine-tuning with a frozen feature encoder and LoRA, clips of 8 and 30 s, 32 clips a step. Needs
no GPU and no weights. Writes asr_train_plans.json and prints the rows of the table. GB is 1e9 bytes.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from gputrain import __version__
from gputrain.asr.config import PlanAsr
from gputrain.asr.plan import plan_cards
from gputrain.config import assemble

CARDS = ["t4", "l4", "a100-40"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().output_dir
    rows = []
    for preset in ("xls-r-300m", "xls-r-1b"):
        for seconds in (8, 30):
            for adapters in ("none", "lora"):
                values = {"preset": preset, "adapters": adapters, "clip_seconds": seconds, "batch_room": 1.0,
                          "batch_size": 32, "gpu": CARDS}  # fmt: skip
                for plan in plan_cards(assemble(PlanAsr, values)):
                    found = plan.to_json()
                    del found["reasons"]
                    rows.append(found)
                    chosen, fit = found["settings"], plan.fit
                    print(
                        f"| {plan.gpu} | {preset} | {adapters} | {seconds} s | "
                        + (
                            f"{fit.micro_batch_size} x {chosen['accumulation_steps']} | "
                            f"{'on' if chosen['gradient_checkpointing'] else 'off'} | "
                            if fit.fits
                            else "does not fit | | "
                        )
                        + f"{fit.predicted_peak_gb:.1f} of {fit.budget_gb:.1f} GB |",
                        flush=True,
                    )
    report = {
        "command": "python benchmarks/asr_train_plans.py", "gputrain": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "measured": False, "plans": rows,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asr_train_plans.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
