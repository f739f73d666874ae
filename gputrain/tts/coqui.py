"""Translates configurations written for Coqui's trainer by `gputrain.translation`.

Most keys of a file are spellings of our options (config.SPELLINGS), and sections are flattened; the others are in
coqui_keys.yaml. The config.json that Coqui's trainer writes beside a VITS voice can be read as it is. Imports no torch.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gputrain.errors import UserError
from gputrain.translation import File, Key, NoEffect, Outcome, Values, read_keys, translated
from gputrain.tts.config import SPELLINGS


def translate_coqui(content: dict[str, object], source: Path) -> dict[str, object]:
    """Returns a file's keys and values as options of train-tts. Raises UserError that lists all unsupported ones."""
    written_by_coqui = "model_args" in content
    values = opened(content, source)

    def outcome(name: str) -> Outcome:
        key = known_keys().get(name)
        return key.outcome(values) if key else {name: values[name]}

    made = translated(
        File(values, dict.fromkeys(values, source)),
        source,
        outcome,
        page="docs/coqui_keys.md",
        names=SPELLINGS,
        is_whole=written_by_coqui,
    )
    return {"preset": "high", **made} if written_by_coqui else made


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
    key = known_keys().get(name)
    return key is not None and key.is_ignored


def evaluations(value: Any, file: Values) -> Outcome:
    return {} if value is None else {"evaluate_every_steps": value}


def schedule(value: Any, file: Values) -> Outcome:
    if value is None:  # Coqui's default.
        return {}
    if value != "ExponentialLR":
        raise UserError(
            "no other scheduler is supported", hint="learning_rate_schedule is constant, cosine or exponential"
        )
    return {"learning_rate_schedule": "exponential"}


def rate_of_both(value: Any, file: Values) -> Outcome:
    return NoEffect("VITS uses lr_gen and lr_disc") if {"lr_gen", "lr_disc"} & file.keys() else {"lr": value}


def sixteen_bits(value: Any, file: Values) -> Outcome:
    """Returns the precision. Coqui's has no effect without mixed precision."""
    return {"precision": value} if file.get("mixed_precision", True) or value not in ("fp16", "bf16") else {}


def delay(value: Any, file: Values) -> Outcome:
    return {"test_delay_epochs": 0 if value == -1 else value}  # Coqui's default is -1: from the first epoch on.


def sentences(value: Any, file: Values) -> Outcome:
    """Returns the texts. Beside one may stand a speaker and a language."""
    if isinstance(value, list):
        value = [text[0] if isinstance(text, list) and text else text for text in value]
    return {"test_sentences": value}


def layout(value: Any, file: Values) -> Outcome:
    if value not in ("channels_last", "contiguous_format"):
        return {"memory_format": value}
    return {"channels_last": value == "channels_last"}


def momenta(value: Any, file: Values) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        return {"betas": value}
    return {f"{whose}beta{n}": value[n - 1] for whose in ("", "discriminator_") for n in (1, 2)}


def clipping(value: Any, file: Values) -> Outcome:
    """Returns the value. A list holds the generator's and the discriminators'."""
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        return {"gradient_clip": value[0]}
    return {"grad_clip": value}


TURNS = (evaluations, schedule, rate_of_both, sixteen_bits, delay, sentences, layout, momenta, clipping)


@functools.cache
def known_keys() -> dict[str, Key]:
    """Returns the keys of coqui_keys.yaml by name. Null is Coqui's default where a key has one supported value."""
    keys = read_keys("gputrain.tts", "coqui_keys.yaml", TURNS)
    supported = {name: next(iter(key.values), None) for name, key in keys.items() if key.fate == "met"}
    return keys | {name: replace(keys[name], null_is=value) for name, value in supported.items()}
