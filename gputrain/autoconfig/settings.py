"""What was chosen for a training of a model that is not ours, with a reason for each choice, as a file and back.

Imports no torch. GB is 1e9 bytes.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gputrain.autoconfig.lengths import Bucket, OverLong
from gputrain.errors import UserError
from gputrain.stored import from_json

FORMAT = "gputrain optimal config 1"  # in the file, so that another is not taken for one


@dataclass(frozen=True)
class Split:
    """From this optimizer step on, what goes through the device at once was made smaller; the batch stayed."""

    step: int
    before: int  # items
    after: int
    cause: str


@dataclass(frozen=True)
class OptimalConfig:
    """Settings for a training, under the names of `transformers.TrainingArguments` where it has them.

    `per_device_train_batch_size * gradient_accumulation_steps == target_batch_size`, exactly. `reasons` has a sentence
    for every setting. `buckets` are for those who batch clips of like length; empty where lengths hardly differ.
    """

    target_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    fp16: bool
    bf16: bool
    gradient_checkpointing: bool
    dataloader_num_workers: int
    max_duration_seconds: float  # 0: the items are no clips
    over_long: OverLong  # what is to be done with longer ones
    streaming: bool
    predicted_peak_gb: float
    budget_gb: float
    device: str  # what it was planned for
    reasons: dict[str, str]
    buckets: tuple[Bucket, ...] = ()
    length_column: str = ""  # of the dataset, if it has one
    splits: tuple[Split, ...] = field(default=())  # what out-of-memory on the way has changed

    def training_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the TrainingArguments of the transformers that is installed, 4.5x or 5.x.

        Raises UserError where there is none.
        """
        from gputrain.autoconfig.trainer import training_arguments

        return training_arguments(self)


def save_config(config: OptimalConfig, path: str | Path) -> None:
    """Write it as JSON. Raises UserError where that cannot be done."""
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(config)}, indent=2) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="save to a folder that is there") from None


def load_config(path: str | Path) -> OptimalConfig:
    """Read what `save_config` has written. Raises UserError where the file is missing, damaged or another's."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="give the path that save_config wrote") from None
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON: {error}", hint="save it anew") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise UserError(f"{path}: no configuration that this gputrain has saved", hint="save it anew with save_config")
    try:
        return from_json(OptimalConfig, content, str(path))
    except ValueError as error:
        raise UserError(str(error), hint="save the configuration again") from None
