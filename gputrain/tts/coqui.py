"""Configurations of voices that were written for Coqui's trainer: what becomes of keys that are no options of ours.

Most of a file's keys are further spellings of our options (config.SPELLINGS), and sections are opened. What is left
here has nothing left to do, which the user is told, or contradicts what is done, which is an error. Imports no torch.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """A key of which one value is what is done anyway, and every other cannot be had."""

    value: object  # None: any
    why: str


BY_THE_DATA = "the prepared data say it; give it to prepare-data --kind voice"
THE_FOLDER = "a run is known by its folder; --output-dir names it"
SETTLED: Mapping[str, Settled] = {
    "pin_memory": Settled(True, "what goes to a GPU is always read into pinned memory"),
    "cudnn_benchmark": Settled(True, "the fastest convolutions are always looked for on a GPU"),
    "cudnn_enable": Settled(True, "cuDNN is always used on a GPU"),
    "cudnn_deterministic": Settled(False, "repeating a run bit for bit is promised on the CPU alone"),
    "deterministic": Settled(False, "repeating a run bit for bit is promised on the CPU alone"),
    "non_deterministic": Settled(True, "repeating a run bit for bit is promised on the CPU alone"),
    "run_eval": Settled(True, "evaluate_steps 0 switches evaluation off"),
    "save_checkpoints": Settled(True, "no run goes without checkpoints"),
    "optimizer": Settled("AdamW", "AdamW is what VITS is trained with"),
    "project_name": Settled(None, THE_FOLDER),
    "run_name": Settled(None, THE_FOLDER),
    "run_description": Settled(None, THE_FOLDER),
    "dashboard_logger": Settled("tensorboard", "TensorBoard is always written"),
    "sample_rate": Settled(None, BY_THE_DATA),
    "sampling_rate": Settled(None, BY_THE_DATA),
    "language": Settled(None, BY_THE_DATA),
    "num_eval_loader_workers": Settled(None, "evaluation reads by itself, ahead of nothing"),
}


def translate(content: dict[str, object], source: Path) -> dict[str, object]:
    """A file's keys and values as options of train-tts. Raises UserError, listing all that cannot be had."""
    made: dict[str, object] = {}
    problems: list[str] = []
    for name, value in opened(content, source).items():
        settled = SETTLED.get(name)
        if settled is None:
            made |= _turned(name, value, source)
        elif settled.value is None or _same(settled.value, value):
            log.info("%s: %s has nothing left to do: %s", source, name, settled.why)
        else:
            problems.append(f"{name} {value!r}: {settled.why}")
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}", hint="take these keys out")
    return made


def opened(content: Mapping[str, object], source: Path) -> dict[str, object]:
    """The keys of all sections beside those of none. Raises UserError where two say something different."""
    made: dict[str, object] = {}
    for name, value in content.items():
        for key, inner in opened(value, source).items() if isinstance(value, dict) else [(name, value)]:
            if key in made and made[key] != inner:
                raise UserError(f"{source}: {key} is {made[key]!r} and {inner!r}", hint="keep one of them")
            made[key] = inner
    return made


def _turned(name: str, value: Any, source: Path) -> dict[str, object]:
    """Options of ours for a key whose values are of another form than ours."""
    if name == "memory_format" and value in ("channels_last", "contiguous_format"):
        return {"channels_last": value == "channels_last"}
    if name == "betas" and isinstance(value, list) and len(value) == 2:
        return {"beta1": value[0], "beta2": value[1]}
    if name in ("scheduler", "lr_scheduler", "lr_scheduler_gen", "lr_scheduler_disc"):
        if value != "ExponentialLR":
            raise UserError(
                f"{source}: {name} is {value!r}", hint="learning_rate_schedule is constant, cosine or exponential"
            )
        return {"learning_rate_schedule": "exponential"}
    return {name: value}


def _same(settled: object, value: object) -> bool:
    if isinstance(settled, str) and isinstance(value, str):
        return settled.lower() == value.lower()
    return settled is value
