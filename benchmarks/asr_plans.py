"""Plans for fine-tuning Wav2Vec2 at the sizes of XLS-R on three cards, predicted on fake tensors, for docs/planning.md.

    python benchmarks/asr_plans.py --output-dir benchmarks/results

Needs transformers, no weights and no GPU. The model comes from a configuration; the waveform encoder is frozen, layer
drop and SpecAugment are off (they choose by value), the loss is the mean of all log-probabilities in fp32, the
optimizer fused AdamW, the precision 16 bit by CUDA's rules of autocast. GB is 1e9 bytes.
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
from gputrain.planner.microbatch import MemoryBudget, MemoryModel, budget_gb, fit
from gputrain.planner.predict import predict_training_memory
from gputrain.planner.roofline import DeviceRates, StepCost

# hidden size, layers, width of the feed-forward layers
SIZES = {"300M": (1024, 24, 4096), "1B": (1280, 48, 5120)}
CARDS = ("t4", "l4", "a100-40")
SECONDS = (5, 8, 30)
BATCH = 32


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
                yield {"size": size, "seconds": seconds, **plan(card, lines)}


def plan(card: str, lines: dict[bool, MemoryModel]) -> dict[str, Any]:
    gpu = find_gpu(card)
    budget = MemoryBudget(budget_gb(gpu.memory_gb), DeviceRates.published(gpu, tf32=True))
    found = fit(BATCH, lines.__getitem__, budget)
    most = {
        name: max((clips for clips in range(1, 129) if budget.takes(lines[repeated], clips)), default=0)
        for name, repeated in (("most_clips", False), ("most_clips_checkpointed", True))
    }
    return {"gpu": card, **found.to_json(), **most, "one_clip_gb": lines[False].peak_gb(1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("."), help="folder for asr_plans.json")
    folder = parser.parse_args().output_dir
    began = time.perf_counter()
    heads = ("model", "clips", "card", "parts", "checkpointed", "peak GB", "may use", "most clips", "checkpointed")
    print("  ".join(heads))
    made = []
    for row in plans():
        made.append(row)
        parts = f"{row['accumulation_steps']} x {row['micro_batch_size']}" if row["fits"] else "none"
        cells = (row["size"], f"{row['seconds']} s", row["gpu"], parts, row["checkpointing"])
        figures = (f"{row['predicted_peak_gb']:.1f}", f"{row['budget_gb']:.1f}")
        most = (row["most_clips"], row["most_clips_checkpointed"])
        shown = zip(heads, (*cells, *figures, *most), strict=True)
        print("  ".join(str(cell).rjust(len(head)) for head, cell in shown), flush=True)
    versions = {"gputrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = {
        "title": "Wav2Vec2 at the sizes of XLS-R, batch 32, 16 bit: predicted on fake tensors, not measured",
        "machine": f"{platform.machine()}, {platform.system()}", "versions": versions,
        "seconds": round(time.perf_counter() - began, 1), "rows": made,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asr_plans.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
