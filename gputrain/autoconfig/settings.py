"""The settings that `create_optimal_config` chooses, with a reason for each, and their file.

Imports no torch. GB is 1e9 bytes.
"""

import dataclasses
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gputrain.autoconfig.lengths import OverLong
from gputrain.errors import UserError, import_package
from gputrain.serialization import from_json, unreadable

FORMAT = "gputrain optimal config 1"  # Marks the file.
TrainerOptimizer = Literal["adamw", "sgd"]  # Those that TrainingArguments has, too.
OPTIM: dict[TrainerOptimizer, str] = {"adamw": "adamw_torch", "sgd": "sgd"}  # Their names there.


@dataclass(frozen=True)
class OptimalConfig:
    """Settings for a training, under the names of `transformers.TrainingArguments` where it has them.

    `per_device_train_batch_size * gradient_accumulation_steps * gpus == target_batch_size`, exactly. `reasons` has a
    sentence for every setting. GPUs that train together all have the settings of the weakest.
    """

    target_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    fp16: bool
    bf16: bool
    gradient_checkpointing: bool
    dataloader_num_workers: int
    max_duration_seconds: float  # 0: the items are not clips.
    over_long: OverLong  # Treatment of longer clips.
    streaming: bool
    predicted_peak_gb: float
    budget_gb: float
    device: str  # The device that it is planned for.
    reasons: dict[str, str]
    length_column: str = ""  # The dataset's column of lengths, if it has one.
    gpus: int = 1  # GPUs that train together.
    drop_last: bool = False  # The last micro-batch of an epoch would have too few items for BatchNorm.
    optimizer: TrainerOptimizer = "adamw"  # The one that the memory is planned with.

    def __str__(self) -> str:
        """Returns a table of the settings with their reasons, for a terminal of 80 columns."""
        lines = [f"Settings for {self.device}"]
        for name, reason in self.reasons.items():
            value = getattr(self, name)
            head = f"{name:<28} {f'{value:.4g}' if isinstance(value, float) else value!s:<7} "
            lines += textwrap.wrap(reason, 80, initial_indent=head, subsequent_indent=" " * 37)
        return "\n".join(lines)

    def training_arguments(self, *, by_length: bool = False) -> dict[str, Any]:
        """Returns keyword arguments for the TrainingArguments of the installed transformers, 4.5x or 5.x.

        The optimizer is the planned one. `by_length`: for `Planner.train_with_recovery(trainer, config=config)`, which
        takes whole batches of clips of similar lengths, and divides them into micro-batches itself. Raises UserError if
        transformers is not installed.
        """
        accepted = inspect.signature(import_package("transformers", "accelerate").TrainingArguments).parameters
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": self.target_batch_size // self.gpus
            if by_length
            else self.per_device_train_batch_size,
            "gradient_accumulation_steps": 1 if by_length else self.gradient_accumulation_steps,
            "per_device_eval_batch_size": self.per_device_train_batch_size,
            "eval_accumulation_steps": 1,  # The memory of the GPU is not planned for the outputs of an evaluation.
            "fp16": self.fp16,
            "bf16": self.bf16,
            "dataloader_num_workers": self.dataloader_num_workers,
            "dataloader_persistent_workers": self.dataloader_num_workers > 0,
            "dataloader_drop_last": self.drop_last,
            "optim": OPTIM[self.optimizer],
        }
        checkpointing = (
            "activation_checkpointing" if "activation_checkpointing" in accepted else "gradient_checkpointing"
        )
        arguments[checkpointing] = self.gradient_checkpointing
        if self.gradient_checkpointing:
            arguments[f"{checkpointing}_kwargs"] = {"use_reentrant": False}
        return arguments


def save_config(config: OptimalConfig, path: str | Path) -> None:
    """Writes a configuration as JSON. Raises UserError if the file cannot be written."""
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(config)}, indent=2) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="save to a folder that exists") from None


def load_config(path: str | Path) -> OptimalConfig:
    """Returns a configuration that `save_config` wrote. Raises UserError if the file is missing, damaged or another."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="give the path that save_config wrote") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}", hint="save it again") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise unreadable(Path(path), "save it again with save_config", "not a configuration of gputrain")
    # Version 0.2 wrote settings of each of several GPUs, for short clips, and what had run out of memory,
    for name in ("devices", "buckets", "splits"):
        content.pop(name, None)
    if content.pop("lengths_per_second", 1.0) != 1.0:  # and used columns of lengths in other units.
        content["length_column"] = ""
    try:
        return from_json(OptimalConfig, content)
    except ValueError as error:
        raise unreadable(Path(path), "save it again with save_config", f"damaged ({error})") from None
