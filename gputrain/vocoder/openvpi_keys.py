"""openvpi's configuration keys with the options that they become; the table of them is openvpi_keys.yaml."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gputrain.config import read_table
from gputrain.errors import UserError

Command = Literal["train", "prepare"]
Values = Mapping[str, object]  # The values of a whole file; nested keys are joined by dots.

BOTH: tuple[Command, ...] = ("train", "prepare")
TRAIN: tuple[Command, ...] = ("train",)
NOTHING = object()  # Marks keys without a value for null.


@dataclass(frozen=True)
class Ignored:
    """Marks a key as ignored; the user is warned with the reason."""

    why: str


Outcome = dict[str, object] | Ignored


@dataclass(frozen=True)
class Key:
    """A key of openvpi's files. `turn` returns our options for its value and the whole file, or raises UserError with
    the reason against the value and a remedy."""

    name: str
    turn: Callable[[Any, Values], Outcome]
    options: Sequence[str] = ()  # Options that it may become.
    words: str = ""  # Description of the result for the page.
    remark: str = ""
    null_is: object = NOTHING  # Value that null stands for; NOTHING makes null an error.
    of: Sequence[Command] = TRAIN
    fate: Literal["honoured", "met", "refused"] = "honoured"
    weak: Sequence[str] = ()  # Those of `options` that a key of their own overrides.


def same(name: str, option: str = "", **facts: Any) -> Key:
    """Returns a key whose value is that of our option (default name: the last part of the key)."""
    option = option or name.rpartition(".")[2]
    return Key(name, lambda value, file: {option: value}, (option,), **facts)


def computed(name: str, by: str, **facts: Any) -> Key:
    """Returns a key whose options the function called `by` computes."""
    return Key(name, TURNS[by], **facts)


def chosen(
    name: str,
    choices: Mapping[Any, dict[str, object]],
    why: str,
    instead: str,
    prefix: str = "",
    weak: Sequence[str] = (),
    **facts: Any,
) -> Key:
    """Returns a key with few values, with or without `prefix`, each of which stands for options; others are refused.
    The file may set options in `weak` itself."""

    def turn(value: Any, file: Values) -> Outcome:
        value = value.removeprefix(prefix) if isinstance(value, str) else value
        if not isinstance(value, (str, int)) or isinstance(value, bool) or value not in choices:
            raise UserError(why, hint=instead)
        return {option: one for option, one in choices[value].items() if not (option in weak and option in file)}

    names = {option for options in choices.values() for option in options}
    values: dict[str, Any] = {}  # The first of equivalent values.
    for value, options in choices.items():
        values.setdefault(as_typed(options), value)
    words = "; ".join(f"`{value}`: {options}" for options, value in values.items())
    remark = f"Anything else is refused: {why}."
    for option in weak:
        remark += f" A key `{option}` takes precedence."
    return Key(name, turn, sorted(names), words, remark, weak=weak, **facts)


def as_typed(options: Mapping[str, object]) -> str:
    """Returns options as they are typed on the command line."""
    flags = []
    for option, value in options.items():
        flag = option.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
    return f"`{' '.join(flags)}`"


def met(
    name: str, why: str, values: Sequence[object] = (), otherwise: str = "", instead: str = "", **facts: Any
) -> Key:
    """Returns a key that asks for our fixed behaviour: with these values, or with any if none are given."""

    def turn(value: Any, file: Values) -> Outcome:
        if values and value not in values:
            raise UserError(otherwise, hint=instead)
        return {}

    words = f"At {' or '.join(f'`{shown(value)}`' for value in values)}: {why}" if values else why
    because = "" if otherwise == why else f": {otherwise}"
    remark = f"Anything else is refused{because}." if values else ""
    return Key(name, turn, words=words, remark=remark, fate="met", **facts)


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def place(name: str, shipped: str = "", null_is: object = NOTHING) -> Key:
    """Returns a key for the place of openvpi's files, which ours does not use."""
    why = "prepare-data has --input-dir and --output-dir for it, train-vocoder --data-path"

    def turn(value: Any, file: Values) -> Outcome:
        return {} if value in ("", [], shipped) else Ignored(why)

    return Key(name, turn, words=why, remark="A warning is logged if it is set.", null_is=null_is, of=BOTH, fate="met")


def dead(name: str, shipped: object, why: str, instead: str) -> Key:
    """Returns a key that no code of openvpi's reads. Its value in their files is ignored with a warning."""

    def turn(value: Any, file: Values) -> Outcome:
        if value != shipped:
            raise UserError(why, hint=instead)
        return Ignored(why)

    return Key(name, turn, words=why, remark=f"`{shipped}`, as openvpi ships it, only logs a warning.", fate="refused")


CONSTANT = "lr_scheduler.scheduler.WarmupLR"
COSINE = "torch.optim.lr_scheduler.CosineAnnealingLR"


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
    return {"eval_first": value != 0}


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


def steps(value: Any, file: Values) -> Outcome:
    """Translates the scheduler: constant after a warm-up, or a cosine, with a warm-up if the file sets one."""
    if value not in (CONSTANT, COSINE):
        raise UserError("after a warm-up the rate is constant or follows a cosine", hint=f"one of {CONSTANT}, {COSINE}")
    if value == CONSTANT:
        return {"learning_rate_schedule": "constant"}
    warms_up = "lr_scheduler_args.warmup_steps" in file or "warmup_steps" in file
    return {"learning_rate_schedule": "cosine", **({} if warms_up else {"warmup_steps": 0})}


def least_rate(value: Any, file: Values) -> Outcome:
    """Ignores the value for a cosine with eta_min."""
    return {} if is_cosine(file) and "lr_scheduler_args.eta_min" in file else {"min_learning_rate": value}


def end_of_cosine(value: Any, file: Values) -> Outcome:
    return {"min_learning_rate": value} if is_cosine(file) else {}


def length_of_cosine(value: Any, file: Values) -> Outcome:
    ends = (file.get("max_updates"), file.get("num_steps"))
    if is_cosine(file) and value not in ends:
        raise UserError("a cosine ends where training does", hint="leave it out, or set it to max_updates")
    return {}


def is_cosine(file: Values) -> bool:
    return file.get("lr_scheduler_args.scheduler_cls") == COSINE


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
        chosen(f"{block}.optimizer_cls", choices, only, f"one of {', '.join(OPTIMIZERS)}"),
        same(f"{block}.lr", f"{prefix}learning_rate"),
        same(f"{block}.beta1", f"{prefix}beta1"),
        same(f"{block}.beta2", f"{prefix}beta2"),
        Key(f"{block}.weight_decay", decay_of_all, (decay,),
            remark="With Muon_AdamW, `muon_args.weight_decay` takes precedence."),
        Key(f"{block}.muon_args.weight_decay", decay_of_matrices, (decay,), remark=for_muon),
        Key(f"{block}.adamw_args.weight_decay", decay_of_rest, remark=f"{for_muon} Anything else is refused.",
            words="At `0`: parameters of AdamW have no decay with Muon", fate="met"),
        met(f"{block}.verbose", "nothing is printed", [False], "nothing prints it", "set it to false"),
    ]  # fmt: skip


TURNS: dict[str, Callable[[Any, Values], Outcome]] = {
    turn.__name__: turn
    for turn in (
        dilations, periods, fast_periods, clipping, kept, rate_of_all, sanity_steps, finetuning, pretrained, freezing,
        frozen, steps, least_rate, end_of_cosine, length_of_cosine,
    )
}  # fmt: skip
KINDS: dict[str, Callable[..., Key | list[Key]]] = {
    "same": same, "computed": computed, "chosen": chosen, "met": met, "place": place, "dead": dead,
    "optimizer": optimizer,
}  # fmt: skip


@functools.cache
def known_keys() -> dict[str, Key]:
    """Returns the keys by name, in the order of the table."""
    known: dict[str, Key] = {}
    for row in read_table("gputrain.vocoder", "openvpi_keys.yaml"):
        kind = next(iter(row))
        names = row.pop(kind)
        for name in names if isinstance(names, list) else [names]:
            made = KINDS[kind](name, **row)
            known |= {key.name: key for key in (made if isinstance(made, list) else [made])}
    return known
