"""Translates configurations written for Coqui's trainer, including keys without an equivalent option.

Most keys of a file are aliases of our options (config.SPELLINGS), and sections are flattened. The keys of
coqui_keys.yaml have no effect, which is logged, or contradict the training, which is an error. Imports no torch.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.config import read_table
from gputrain.errors import UserError
from gputrain.stored import from_json
from gputrain.tts.config import SPELLINGS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """A key with a single supported value, which needs no option; other values are errors."""

    why: str
    value: Any = None  # None: any


# Aliases of keys that are too similar to other options to be flags.
FURTHER_SPELLINGS = {
    "output_path": "output_dir", "lr_gen": "learning_rate", "lr_disc": "learning_rate",
    "compile_model": "use_torch_compile", "allow_tf32": "enable_tf32",
}  # fmt: skip


@functools.cache
def settled_keys() -> dict[str, Settled]:
    """Returns the keys of coqui_keys.yaml, which have no effect or contradict the training."""
    return {key: from_json(Settled, facts) for key, facts in read_table("gputrain.tts", "coqui_keys.yaml").items()}


def translate_coqui(content: dict[str, object], source: Path) -> dict[str, object]:
    """Returns a file's keys and values as options of train-tts. Raises UserError that lists all unsupported ones."""
    made: dict[str, object] = {}
    keys: dict[str, str] = {}  # Coqui key by option name
    problems: list[str] = []
    for name, value in opened(content, source).items():
        settled = settled_keys().get(name)
        if settled is None:
            for key, translated in _turned(name, value, source).items():
                first = keys.setdefault(SPELLINGS.get(key, key), key)
                if made.setdefault(first, translated) != translated:
                    problems.append(f"{first} is {made[first]!r} and {name} is {translated!r}: both are one setting")
        elif settled.value is None or _same(settled.value, value):
            log.info("%s: %s has no effect: %s", source, name, settled.why)
        else:
            problems.append(f"{name} is {value!r}: {settled.why}")
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}", hint="change these keys, or remove them")
    return made


def opened(content: Mapping[str, object], source: Path) -> dict[str, object]:
    """Flattens sections; their key `name` becomes the section's name. Raises UserError for conflicting values."""
    made: dict[str, object] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise UserError(f"{source}: {name!r} is not a valid key", hint="keys are words")
        inner = opened(value, source) if isinstance(value, dict) else {name: value}
        for key, inner_value in inner.items():
            key = name if key == "name" else key
            if key in made and made[key] != inner_value:
                raise UserError(f"{source}: {key} is {made[key]!r} and {inner_value!r}", hint="keep one of them")
            made[key] = inner_value
    return made


def _turned(name: str, value: Any, source: Path) -> dict[str, object]:
    """Translates a key and its value to options of train-tts."""
    if name == "memory_format" and value in ("channels_last", "contiguous_format"):
        return {"channels_last": value == "channels_last"}
    if name == "betas" and isinstance(value, list) and len(value) == 2:
        return {"beta1": value[0], "beta2": value[1]}
    if name == "grad_clip" and isinstance(value, list) and len(set(map(str, value))) == 1:
        return {"gradient_clip": value[0]}  # The list holds the generator's and the discriminators' value.
    if name in ("scheduler", "lr_scheduler", "lr_scheduler_gen", "lr_scheduler_disc"):
        if value != "ExponentialLR":
            raise UserError(
                f"{source}: {name} is {value!r}", hint="learning_rate_schedule is constant, cosine or exponential"
            )
        return {"learning_rate_schedule": "exponential"}
    return {FURTHER_SPELLINGS.get(name, name): value}


def _same(settled: object, value: object) -> bool:
    if isinstance(settled, str) and isinstance(value, str):
        return settled.lower() == value.lower()
    return settled is value
