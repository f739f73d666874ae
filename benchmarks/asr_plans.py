"""Plans for fine-tuning Wav2Vec2 at the sizes of XLS-R on three cards, for docs/evidence/wav2vec2_scenarios.md.

    python -m benchmarks.asr_plans --output-dir benchmarks/results

Needs transformers, no weights and no GPU. The model comes from a configuration; the waveform encoder is frozen, layer
drop and SpecAugment are off (they choose by value), the loss is the mean of all log-probabilities in fp32, the
optimizer fused AdamW, the precision 16 bit by CUDA's rules of autocast. Micro-batch and checkpointing are chosen by the
time of a step that a roofline predicts on fake tensors (docs/evidence/predicted_time.md). Prints the rows of the table.
GB is 1e9 bytes.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from gputrain import __version__
from gputrain.hw.gpus import find_gpu
from gputrain.planner.memory.fit import Fit, MemoryBudget, MemoryModel, budget_gb, fit
from gputrain.planner.memory.torch_model import predict_training_memory
from gputrain.planner.time.roofline import DeviceRates, StepCost

# hidden size, layers, width of the feed-forward layers
SIZES = {"300M": (1024, 24, 4096), "1B": (1280, 48, 5120)}
CARDS = ("t4", "l4", "a100-40")
SECONDS = (5, 8, 30)
BATCH = 32
CLAIMS = {("300M", "t4"): 8, ("1B", "l4"): 4, ("1B", "a100-40"): 8}  # Micro-batches of the page that is checked.
SPEECH_HOURS = 100  # Amount of speech that the hours of an epoch are for.


def model_of(size: str) -> Wav2Vec2ForCTC:
    hidden, layers, inner = SIZES[size]
    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=inner,
        feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True, hidden_dropout=0.1, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    return model.train()


def loss(model: nn.Module, waves: Tensor) -> Tensor:
    return -torch.log_softmax(model(waves).logits.float(), -1).mean()


def memory_model(size: str, seconds: int, checkpointing: bool) -> MemoryModel:
    one, two = (
        predict_training_memory(
            model_of(size), loss, torch.empty(clips, 16000 * seconds, device="meta"), precision="bf16",
            checkpointing=checkpointing, expandable_segments=True,
        )
        for clips in (1, 2)
    )  # fmt: skip
    return MemoryModel.through(
        one.parts, two.parts, two.flops - one.flops, StepCost(one.micro_batch, two.micro_batch, 2, one.update)
    )


def plans() -> Iterator[dict[str, Any]]:
    for size in SIZES:
        for seconds in SECONDS:
            lines = {checkpointing: memory_model(size, seconds, checkpointing) for checkpointing in (False, True)}
            for card in CARDS:
                yield plan(size, seconds, card, lines)


def plan(size: str, seconds: int, card: str, lines: dict[bool, MemoryModel]) -> dict[str, Any]:
    gpu = find_gpu(card)
    budget = MemoryBudget(budget_gb(gpu.memory_gb), DeviceRates.published(gpu, tf32=True))
    found = fit(BATCH, lines.__getitem__, budget)
    most = {
        name: max((clips for clips in range(1, 129) if budget.fits(lines[repeated], clips)), default=0)
        for name, repeated in (("most_clips", False), ("most_clips_checkpointed", True))
    }
    row = {
        "size": size,
        "seconds": seconds,
        "gpu": card,
        **found.to_json(),
        **most,
        "one_clip_gb": lines[False].peak_gb(1),
    }
    if found.fits:
        row |= predicted_speed(found, seconds) | {"predicted_least_seconds_per_step": least_seconds(lines, budget)}
    if claimed := CLAIMS.get((size, card)):
        row["claim"] = step_in_parts(claimed, lines, budget)
    return row


def predicted_speed(found: Fit, seconds: int) -> dict[str, float]:
    """Returns the clips a second, and the hours of an epoch of SPEECH_HOURS in clips of so many seconds."""
    step = found.predicted_seconds_per_step
    assert step is not None, "the rates of these cards are published"
    return {
        "predicted_clips_per_second": BATCH / step,
        "predicted_epoch_hours": SPEECH_HOURS / seconds / BATCH * step,
    }


def least_seconds(lines: dict[bool, MemoryModel], budget: MemoryBudget) -> float:
    """Returns the least predicted time of a step over all micro-batches that fit, with and without checkpointing."""
    sizes = [size for size in range(1, BATCH + 1) if BATCH % size == 0]
    times = [budget.seconds(line, size, BATCH) for line in lines.values() for size in sizes if budget.fits(line, size)]
    return min(time for time in times if time is not None)


def step_in_parts(size: int, lines: dict[bool, MemoryModel], budget: MemoryBudget) -> dict[str, Any]:
    """Returns the peak and the time of a step in micro-batches of this size, checkpointed only if it does not fit
    otherwise."""
    checkpointing = not budget.fits(lines[False], size)
    line = lines[checkpointing]
    return {
        "micro_batch_size": size,
        "checkpointing": checkpointing,
        "fits": budget.fits(line, size),
        "predicted_peak_gb": line.peak_gb(size),
        "predicted_seconds_per_step": budget.seconds(line, size, BATCH),
    }


def table_row(row: dict[str, Any]) -> str:
    """Returns the row of the table in docs/evidence/wav2vec2_scenarios.md."""
    parts, speed = "none", "- | - | -"
    if row["fits"]:
        parts = f"{row['micro_batch_size']} x {row['accumulation_steps']}"
        figures = (row["predicted_seconds_per_step"], row["predicted_clips_per_second"], row["predicted_epoch_hours"])
        speed = " | ".join(f"{figure:.3g}" for figure in figures)
    claim = "-"
    if "claim" in row:
        asked = row["claim"]
        claim = f"{asked['micro_batch_size']} x {BATCH // asked['micro_batch_size']}: "
        claim += f"{asked['predicted_seconds_per_step']:.3g} s" if asked["fits"] else "does not fit"
        claim += ", checkpointed" if asked["fits"] and asked["checkpointing"] else ""
    cells = (
        row["size"], f"{row['seconds']} s", row["gpu"].upper(), f"{row['budget_gb']:.1f}", parts,
        "yes" if row["checkpointing"] else "no", f"{row['predicted_peak_gb']:.1f}", speed,
        f"{row['most_clips']} / {row['most_clips_checkpointed']}", claim,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("."), help="folder for asr_plans.json")
    folder = parser.parse_args().output_dir
    began = time.perf_counter()
    made = []
    for row in plans():
        made.append(row)
        print(table_row(row), flush=True)
    versions = {"gputrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = {
        "title": "Wav2Vec2 at the sizes of XLS-R, batch 32, 16 bit: predicted on fake tensors, not measured",
        "command": "python -m benchmarks.asr_plans --output-dir benchmarks/results",
        "machine": f"{platform.machine()}, {platform.system()}", "versions": versions,
        "seconds": round(time.perf_counter() - began, 1), "speech_hours_of_an_epoch": SPEECH_HOURS, "rows": made,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asr_plans.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
