"""Translates configurations written for Coqui's trainer, including keys without an equivalent option.

Most keys of a file are aliases of our options (config.SPELLINGS), and sections are flattened. The keys of
coqui_keys.yaml have no effect, which is logged, or contradict the training, which is an error. The config.json that
Coqui's trainer writes beside a VITS voice can be read as it is. Imports no torch.
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
    """A key with a single supported value, which needs no option; other values but null are errors."""

    why: str
    value: Any = None  # None: any


# Aliases of keys that are too similar to other options to be flags.
FURTHER_SPELLINGS = {
    "output_path": "output_dir", "lr_gen": "learning_rate", "lr_disc": "discriminator_learning_rate",
    "compile_model": "use_torch_compile", "allow_tf32": "enable_tf32", "training_seed": "seed",
    "run_eval_steps": "evaluate_steps", "eval_split_size": "held_out_share", "mel_loss_alpha": "mel_weight",
    "kl_loss_alpha": "kl_weight", "dur_loss_alpha": "duration_weight", "dropout_p_text_encoder": "encoder_dropout",
    "dropout_p_duration_predictor": "duration_dropout",
}  # fmt: skip
SCHEDULERS = ("scheduler", "lr_scheduler", "lr_scheduler_gen", "lr_scheduler_disc")
# Keys whose null is Coqui's default.
NULLABLE = {*SCHEDULERS, "run_eval_steps"}
RATES_OF_NETWORKS = {"lr_gen", "lr_disc"}  # Beside them, Coqui's VITS does not use `lr`.


@functools.cache
def settled_keys() -> dict[str, Settled]:
    """Returns the keys of coqui_keys.yaml, which have no effect or contradict the training."""
    return {key: from_json(Settled, facts) for key, facts in read_table("gputrain.tts", "coqui_keys.yaml").items()}


def translate_coqui(content: dict[str, object], source: Path) -> dict[str, object]:
    """Returns a file's keys and values as options of train-tts. Raises UserError that lists all unsupported ones."""
    written_by_coqui = "model_args" in content
    made: dict[str, object] = {"preset": "high"} if written_by_coqui else {}
    keys: dict[str, str] = {}  # Coqui key by option name
    without_effect: dict[str, list[str]] = {}  # Keys by the reason.
    problems: list[str] = []
    values = opened(content, source)
    if RATES_OF_NETWORKS & values.keys() and "lr" in values:
        del values["lr"]
        without_effect["VITS uses lr_gen and lr_disc"] = ["lr"]
    for name, value in values.items():
        settled = settled_keys().get(name)
        if settled is None:
            for key, translated in _turned(name, value, values, source).items():
                first = keys.setdefault(SPELLINGS.get(key, key), key)
                if made.setdefault(first, translated) != translated:
                    problems.append(f"{first} is {made[first]!r} and {name} is {translated!r}: both are one setting")
        elif settled.value is None or value is None or _same(settled.value, value):
            if settled.value is None or not written_by_coqui:  # Coqui writes some eighty keys with our values.
                without_effect.setdefault(settled.why, []).append(name)
        else:
            problems.append(f"{name} is {value!r}: {settled.why}")
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}", hint="change these keys, or remove them")
    for why, names in without_effect.items():
        log.info("%s: %s no effect: %s", source, _with_verb(names), why)
    return made


def _with_verb(names: list[str]) -> str:
    """Returns "a has", or "a, b and c have"."""
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} have"


def opened(content: Mapping[str, object], source: Path) -> dict[str, object]:
    """Flattens sections; their key `name` becomes the section's name. Raises UserError for conflicting values."""
    made: dict[str, object] = {}
    for name, value in content.items():
        if not isinstance(name, str):
            raise UserError(f"{source}: {name!r} is not a valid key", hint="keys are words")
        is_whole = not isinstance(value, dict) or (_has_no_effect(name) and "name" not in value)
        inner = {name: value} if is_whole else opened(value, source)  # type: ignore[arg-type]
        for key, inner_value in inner.items():
            key = name if key == "name" else key
            if key in made and made[key] != inner_value and not _has_no_effect(key):
                raise UserError(f"{source}: {key} is {made[key]!r} and {inner_value!r}", hint="keep one of them")
            made[key] = inner_value
    return made


def _has_no_effect(name: str) -> bool:
    """Returns True for keys that are ignored with every value."""
    settled = settled_keys().get(name)
    return settled is not None and settled.value is None


def _turned(name: str, value: Any, values: Mapping[str, object], source: Path) -> dict[str, object]:
    """Translates a key and its value to options of train-tts; `values` holds all keys of the file."""
    if value is None and name in NULLABLE:
        return {}
    if name == "precision" and value in ("fp16", "bf16"):
        return {"use_bf16": value == "bf16"} if values.get("mixed_precision") else {}
    if name == "test_delay_epochs" and value == -1:  # Coqui's default: from the first epoch on.
        return {name: 0}
    if name == "test_sentences" and isinstance(value, list):  # Beside a text may stand a speaker and a language.
        return {name: [one[0] if isinstance(one, list) and one else one for one in value]}
    if name == "memory_format" and value in ("channels_last", "contiguous_format"):
        return {"channels_last": value == "channels_last"}
    if name == "betas" and isinstance(value, list) and len(value) == 2:
        return {"beta1": value[0], "beta2": value[1]} | {f"discriminator_beta{n}": value[n - 1] for n in (1, 2)}
    if name == "grad_clip" and isinstance(value, list) and len(set(map(str, value))) == 1:
        return {"gradient_clip": value[0]}  # The list holds the generator's and the discriminators' value.
    if name in SCHEDULERS:
        if value != "ExponentialLR":
            raise UserError(
                f"{source}: {name} is {value!r}", hint="learning_rate_schedule is constant, cosine or exponential"
            )
        return {"learning_rate_schedule": "exponential"}
    return {FURTHER_SPELLINGS.get(name, name): value}


def _same(settled: object, value: object) -> bool:
    if isinstance(settled, str) and isinstance(value, str):
        return settled.lower() == value.lower()
    return isinstance(settled, bool) == isinstance(value, bool) and settled == value
