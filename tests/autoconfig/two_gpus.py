"""A training by transformers' Trainer with a configuration, in one process or under torchrun.

usage: python -m tests.autoconfig.two_gpus OUTPUT [--memory-ends]

Both have the same batches. The last process runs out of memory once, if asked to. Process 0 writes the weights and how
many clips each pass had.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.inputs import BatchGuess, output_loss
from gputrain.autoconfig.memory_models import MemoryModels
from gputrain.autoconfig.optimal import Planner
from gputrain.autoconfig.settings import OptimalConfig
from gputrain.hw.probe import Machine

RATE = 16000


class MeanOfClips(nn.Module):
    """The mean over clips of a squared error; its passes are counted. Memory runs out once, after so many passes, in
    the first one of several clips."""

    def __init__(self, fails_after: int = sys.maxsize) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        self.passes: list[tuple[int, int]] = []  # Clips and samples of each.
        self.fails_after = fails_after

    def forward(self, input_values, labels):
        if torch.is_grad_enabled():
            self.passes.append(tuple(input_values.shape))
            if len(self.passes) > self.fails_after and len(input_values) > 1:
                self.fails_after = sys.maxsize
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        features = torch.stack([input_values.double().sum(1) * scale / RATE for scale in (1, 2, 3, 4)], dim=1).sin()
        return {"loss": (self.layer(features) - labels[:, :1]).square().sum(1).mean()}


def collate(items):
    longest = max(len(item["input_values"]) for item in items)
    rows = [np.pad(item["input_values"], (0, longest - len(item["input_values"]))) for item in items]
    return {
        "input_values": torch.from_numpy(np.stack(rows)),
        "labels": torch.tensor([item["labels"] for item in items]).double(),
    }


def configuration(gpus: int) -> OptimalConfig:
    """Returns settings for so many GPUs, which share batches of 8 clips."""
    shared = {
        "target_batch_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // gpus,
        "fp16": False, "bf16": False, "gradient_checkpointing": False, "dataloader_num_workers": 0,
        "max_duration_seconds": 0.9, "over_long": "chunk", "streaming": False, "predicted_peak_gb": 1.0,
        "budget_gb": 1.0, "device": "small", "reasons": {}, "gpus": gpus,
    }  # fmt: skip
    return OptimalConfig(**shared)


def waves(lengths: Iterable[float]) -> list[dict]:
    """Returns items with waves of these seconds, which are their labels."""
    draws = np.random.default_rng(4)
    return [{"input_values": draws.normal(size=round(s * RATE)).astype(np.float32), "labels": [s]} for s in lengths]


def planner_of(lengths: Any, free_gb: float = 8) -> Planner:
    """Returns a planner for clips of these seconds, and a model of a few bytes."""
    found = MemoryModels(
        nn.Linear(1, 1), output_loss, [BatchGuess(lambda B, s: torch.empty(B, 1), "")], "fp32", "adamw", None
    )
    machine = Machine(system="Linux", cpu_cores=2, ram_gb=16, ram_free_gb=free_gb)
    return Planner(machine, profile_dataset(lengths), found, "")


def main(output: Path, memory_ends: bool) -> None:
    from transformers import Trainer, TrainingArguments

    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    lengths = np.random.default_rng(3).uniform(0.05, 0.9, 86)
    manager = planner_of(lengths)
    config = configuration(processes)
    clips = manager.prepare(waves(lengths), config)
    model = MeanOfClips(5 if memory_ends and rank == processes - 1 else sys.maxsize)
    arguments = TrainingArguments(
        str(output.parent / "trainer"), max_steps=25, learning_rate=0.05, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", seed=5, max_grad_norm=0.5,
        **({"ddp_backend": "gloo"} if processes > 1 else {}),
        **config.training_arguments(by_length=True) | {"optim": "sgd"},
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=clips, data_collator=collate)
    manager.train_with_recovery(trainer, config=config)
    made = {"weights": model.layer.weight.detach(), "passes": model.passes, "limit": manager.limit.items}
    torch.save(made, output.with_suffix(f".{rank}.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--memory-ends" in sys.argv)
