"""Translates openvpi's configuration files by `gputrain.translation`.

`translate` follows the table of openvpi_keys.yaml, and so does docs/vocoder_keys.md. Imports no torch.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gputrain.audio.config import Sound
from gputrain.config import convert, leaves, read_file, switches, unknown_key
from gputrain.errors import UserError
from gputrain.translation import (
    BOTH,
    Command,
    File,
    Key,
    NoEffect,
    Outcome,
    Values,
    choice,
    fixed_behaviour,
    read_keys,
    same_value,
    translated,
)
from gputrain.vocoder.config import PlanVocoder

PROFILES = Path(__file__).parent / "profiles"

TRAINING, SWITCHES = leaves(PlanVocoder), switches(PlanVocoder)
PREPARATION = {**leaves(Sound), "num_workers": TRAINING["num_workers"]}
# Our options, by all their names.
OURS = {
    command: {name: leaf for leaf in known.values() for name in leaf.names}
    for command, known in {"train": TRAINING, "prepare": PREPARATION}.items()
}


@functools.cache
def blocks() -> set[str]:
    """Returns model_args, generater_optimizer_args, generater_optimizer_args.muon_args, ..."""
    return {name[:end] for name in known_keys() for end, letter in enumerate(name) if letter == "."}


def translate(content: dict[str, object], source: Path, *, of: Command) -> dict[str, object]:
    """Returns our keys and values for the content of a file of openvpi's; our keys in it are kept.

    One file serves both commands: keys of the other one are ignored. With `of="prepare"`, `kind` becomes vocoder. A
    file without keys of openvpi's is returned unchanged. Raises UserError that lists all refused keys.
    """
    file = read_with_bases(content, source)
    theirs = known_keys().keys() - TRAINING.keys() - PREPARATION.keys()
    if "base_config" not in content and not any("." in name or name in theirs for name in file.values):
        return content
    made: dict[str, object] = {"kind": "vocoder"} if of == "prepare" else {}
    made |= translated(
        file, source, lambda name: options_of(name, file.values, of), page="docs/vocoder_keys.md", is_whole=True
    )
    if of == "train":
        made.setdefault("use_stftloss", False)  # openvpi's default.
    # Discriminators follow the generator where both are given the same value, so that --learning-rate sets both.
    own = {f"discriminator_{name}": name for name in ("learning_rate", "beta1", "beta2")}
    return {name: value for name, value in made.items() if name not in own or value != made.get(own[name])}


def options_of(name: str, values: Values, of: Command) -> Outcome:
    """Returns what one key becomes, with converted values."""
    key = known_keys().get(name)
    if key is None:
        return _own(name, values[name], of)
    if of not in key.of:
        return {}
    outcome = key.outcome(values)
    if isinstance(outcome, NoEffect):
        return outcome
    return {option: convert(OURS[of][option], given, name=name) for option, given in outcome.items()}


def _own(name: str, value: object, of: Command) -> dict[str, object]:
    """Returns the option of a key that is not openvpi's."""
    if name in OURS[of]:
        leaf = OURS[of][name]
        return {leaf.name: convert(leaf, value, name=name)}
    if name in SWITCHES.leave:
        return {name: value} if of == "train" else {}  # They are checked with our other keys.
    if name in OURS["train"] or name in OURS["prepare"]:
        return {}
    block = name.partition(".")[0]
    if of == "prepare" and block not in blocks():
        return {name: value}  # prepare-data has more options and checks them.
    if of == "prepare" and block == "model_args":
        return {}
    raise unknown_key(name, {**known_keys(), **OURS["train"], **dict.fromkeys(blocks())}, kind="vocoder")


def _over(file: File, base: File) -> File:
    """Returns a file's keys and those of its base that it does not set. A key outside of a block overrides the base's
    keys in blocks that become the same option, such as `lr` and `generater_optimizer_args.lr`."""
    given = {option for name in file.values if "." not in name for option in options_of_key(name)}
    left = {
        name: value for name, value in base.values.items() if name in file.values or not given & options_of_key(name)
    }
    return File({**left, **file.values}, {**base.origins, **file.origins})


def options_of_key(name: str) -> set[tuple[Command, str]]:
    """Returns the commands and options that a key may become."""
    if key := known_keys().get(name):
        return {(command, option) for command in key.of for option in key.options}
    if name in SWITCHES.leave:
        return {("train", SWITCHES.option)}
    return {(command, OURS[command][name].name) for command in BOTH if name in OURS[command]}


def read_with_bases(content: Mapping[str, object], source: Path, chain: tuple[Path, ...] = ()) -> File:
    """Reads a file's content with that of its base files; `chain` are the files that refer to it.

    Raises UserError if a base is missing or refers back, or a block has no keys.
    """
    chain = (*chain, source.resolve())
    bases = content.get("base_config", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{source}: base_config is {bases!r}, expected a list of paths")
    below = File({}, {})
    for base in bases:
        path = _find_base(base, source)
        if path.resolve() in chain:
            raise UserError(
                f"{source}: base_config {base} refers back to this file", hint="let only one of them name the other"
            )
        below = _over(read_with_bases(read_file(path), path, chain), below)
    values = _joined({name: value for name, value in content.items() if name != "base_config"}, source)
    return _over(File(values, dict.fromkeys(values, source)), below)


def _find_base(base: str, source: Path) -> Path:
    """Looks next to the file, in its parent, in a checkout with a folder `configs` above it, and among our profiles."""
    folder = source.resolve().parent
    checkouts = [above.parent for above in (folder, *folder.parents) if above.name == "configs"]
    for place in (folder, folder.parent, *checkouts, PROFILES):
        if (place / base).is_file():
            return place / base
    raise UserError(
        f"{source}: base_config {base} does not exist",
        hint="put it next to this file, or omit base_config: every key has a default",
    )


def _joined(content: Mapping[str, object], source: Path, prefix: str = "") -> dict[str, object]:
    """Returns the keys with those of blocks joined to the block's name by a dot, which files may use too."""
    made: dict[str, object] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in blocks() - known_keys().keys() and not isinstance(value, dict):
            found = "null" if value is None else repr(value)
            raise UserError(f"{source}: {name} is {found}, expected keys and values", hint="indent them below it")
        inner = _joined(value, source, f"{name}.") if name in blocks() and isinstance(value, dict) else {name: value}
        for twice in sorted(made.keys() & inner.keys()):
            raise UserError(f"{source}: {twice} occurs twice, in its block and with a dot", hint="keep one of them")
        made |= inner
    return made


def is_fast(file: Values) -> bool:
    return "fast_task" in str(file.get("task_cls", "fast_task"))  # Our default too.


def periods(value: Any, file: Values) -> Outcome:
    """Ignores the value if the fast task has fast_mpd_periods, as openvpi does."""
    beaten = is_fast(file) and "model_args.fast_mpd_periods" in file
    return {} if beaten else {"discriminator_periods": value}


def fast_periods(value: Any, file: Values) -> Outcome:
    return {"discriminator_periods": value} if is_fast(file) else {}


def dilations(value: Any, file: Values) -> Outcome:
    if isinstance(value, str):
        return {"resblock_dilation_sizes": value}
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        raise UserError("expected a list of lists", hint="such as [[1, 3, 5], [1, 3, 5], [1, 3, 5]]")
    return {"resblock_dilation_sizes": ";".join(",".join(map(str, row)) for row in value)}


def clipping(value: Any, file: Values) -> Outcome:
    return {"gradient_clip": 0.0 if value is False else value}


def kept(value: Any, file: Values) -> Outcome:
    if value == 0:
        raise UserError("no checkpoint would be kept", hint="at least 1; -1 keeps all")
    return {"keep_checkpoints": 0 if value == -1 else value}


def rate_of_all(value: Any, file: Values) -> Outcome:
    return {"learning_rate": value, "discriminator_learning_rate": 0.0}


def sanity_steps(value: Any, file: Values) -> Outcome:
    """Translates Lightning's number of validation batches before training; 0 skips them, -1 runs all."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise UserError("expected a number of validation steps", hint="0 to start without an evaluation, otherwise 1")
    return {} if value else {"eval_first": False}


def finetuning(value: Any, file: Values) -> Outcome:
    if not isinstance(value, bool):
        raise UserError("expected true or false")
    if value and not (file.get("finetune_ckpt_path") or file.get("init_from")):
        raise UserError(
            "finetune_ckpt_path names no file", hint="name the checkpoint to start from, or set it to false"
        )
    return {}


def pretrained(value: Any, file: Values) -> Outcome:
    return {} if value == "" or file.get("finetune_enabled") is False else {"init_from": value}


def freezing(value: Any, file: Values) -> Outcome:
    if not isinstance(value, bool):
        raise UserError("expected true or false")
    if value and not file.get("frozen_params"):
        raise UserError("frozen_params names nothing", hint="such as [discriminator.mpd], or set it to false")
    return {}


def frozen(value: Any, file: Values) -> Outcome:
    """Translates the names, which openvpi reads with freezing_enabled only."""
    return {} if file.get("freezing_enabled") is False or not value else {"frozen_params": value}


OPTIMIZERS: dict[str, object] = {"torch.optim.AdamW": "adamw", "modules.optimizer.muon.Muon_AdamW": "muon"}


def optimizer(block: str, whose: str, prefix: str = "") -> list[Key]:
    """Returns the keys of the block of the generator's or the discriminators' optimizer."""
    decay = f"{prefix}weight_decay"

    def is_muon(file: Values) -> bool:
        return "Muon" in str(file.get(f"{block}.optimizer_cls", file.get("optimizer_cls", "")))

    def decay_of_all(value: Any, file: Values) -> Outcome:
        if not is_muon(file):
            return {decay: value}
        if value != 0 and f"{block}.adamw_args.weight_decay" not in file:
            raise UserError("parameters of AdamW have no decay with Muon", hint="write it as muon_args.weight_decay")
        return {} if f"{block}.muon_args.weight_decay" in file else {decay: value}

    def decay_of_matrices(value: Any, file: Values) -> Outcome:
        return {decay: value} if is_muon(file) else {}

    def decay_of_rest(value: Any, file: Values) -> Outcome:
        if is_muon(file) and value != 0:
            raise UserError("parameters of AdamW have no decay with Muon", hint="set it to 0")
        return {}

    for_muon = "Used with Muon_AdamW only."
    choices = {cls: {f"{whose}_optimizer": name} for cls, name in OPTIMIZERS.items()}
    only = "only AdamW and Muon are supported"
    return [
        choice(f"{block}.optimizer_cls", choices, only, f"one of {', '.join(OPTIMIZERS)}"),
        same_value(f"{block}.lr", f"{prefix}learning_rate"),
        same_value(f"{block}.beta1", f"{prefix}beta1"),
        same_value(f"{block}.beta2", f"{prefix}beta2"),
        Key(f"{block}.weight_decay", decay_of_all, (decay,),
            remark="With Muon_AdamW, `muon_args.weight_decay` takes precedence."),
        Key(f"{block}.muon_args.weight_decay", decay_of_matrices, (decay,), remark=for_muon),
        Key(f"{block}.adamw_args.weight_decay", decay_of_rest, remark=f"{for_muon} Anything else is refused.",
            words="At `0`: parameters of AdamW have no decay with Muon", fate="met"),
        fixed_behaviour(f"{block}.verbose", "nothing is printed", [False], "nothing prints it", "set it to false"),
    ]  # fmt: skip


TURNS = (
    dilations, periods, fast_periods, clipping, kept, rate_of_all, sanity_steps, finetuning, pretrained, freezing,
    frozen,
)  # fmt: skip


@functools.cache
def known_keys() -> dict[str, Key]:
    """Returns the keys of openvpi_keys.yaml by name."""
    return read_keys("gputrain.vocoder", "openvpi_keys.yaml", TURNS, {"optimizer": optimizer})
