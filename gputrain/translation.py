"""Translates configuration files of other programs: each of their keys becomes options of ours, has no effect, or is
refused.

A table in YAML lists the keys of a program. The first word of an entry is its kind, a function of this module (or of
the program's own) with the other words as arguments; its value is the name of the key, or a list of names. Imports no
torch.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gputrain.config import read_table
from gputrain.errors import UserError

log = logging.getLogger(__name__)

Command = Literal["train", "prepare"]
Values = Mapping[str, object]  # The values of a whole file; nested keys are joined by dots.

BOTH: tuple[Command, ...] = ("train", "prepare")
TRAIN: tuple[Command, ...] = ("train",)
NOTHING = object()  # Marks keys for which null is an error.


@dataclass(frozen=True)
class NoEffect:
    """Marks a key as without effect. The reason is logged, as a warning if something is lost."""

    why: str
    is_lost: bool = False
    is_ours: bool = False  # Whether the value asks for what is done anyway.


Outcome = dict[str, object] | NoEffect
ConvertValue = Callable[[Any, Values], Outcome]


@dataclass(frozen=True)
class Key:
    """A key of another program. `turn` returns our options for its value and the whole file, or raises UserError with
    the reason against the value and a remedy."""

    name: str
    convert_value: ConvertValue
    options: Sequence[str] = ()  # Options that it may become.
    words: str = ""  # Description of the result for a page of documentation.
    remark: str = ""
    values: Sequence[object] = ()  # The supported values of a key without an option; none: all.
    null_is: object = NOTHING  # Value that null stands for.
    of: Sequence[Command] = TRAIN
    fate: Literal["honoured", "met"] = "honoured"

    @property
    def is_ignored(self) -> bool:
        """Returns whether the key has no effect with any value."""
        return self.fate == "met" and not self.values and not self.options

    def outcome(self, file: Values) -> Outcome:
        """Returns what the key becomes in a file. Raises UserError that names the key and its value."""
        value = file[self.name]
        if value is None and self.null_is is NOTHING:
            raise UserError(f"{self.name} is null", hint="leave the key out for its default; off is 0 or false")
        value = self.null_is if value is None else value
        try:
            return self.convert_value(value, file)
        except UserError as error:
            raise UserError(f"{self.name} is {value!r}: {error.message}", hint=error.hint) from None


def same_value(name: str, option: str = "", **facts: Any) -> Key:
    """Returns a key whose value is that of our option (default name: the last part of the key)."""
    option = option or name.rpartition(".")[2]
    return Key(name, lambda value, file: {option: value}, (option,), **facts)


def choice(
    name: str,
    choices: Mapping[Any, dict[str, object]],
    why: str,
    instead: str,
    prefix: str = "",
    **facts: Any,
) -> Key:
    """Returns a key with few values, with or without `prefix`, each of which stands for options; others are
    refused."""

    def convert_value(value: Any, file: Values) -> Outcome:
        value = value.removeprefix(prefix) if isinstance(value, str) else value
        if not isinstance(value, (str, int)) or isinstance(value, bool) or value not in choices:
            raise UserError(why, hint=instead)
        return choices[value]

    names = {option for options in choices.values() for option in options}
    values: dict[str, Any] = {}  # The first of equivalent values.
    for value, options in choices.items():
        values.setdefault(as_typed(options), value)
    words = "; ".join(f"`{value}`: {options}" for options, value in values.items())
    remark = f"Anything else is refused: {why}."
    return Key(name, convert_value, sorted(names), words, remark, **facts)


def as_typed(options: Mapping[str, object]) -> str:
    """Returns options as they are written in a file."""
    return ", ".join(
        f"`{option}: {str(value).lower() if isinstance(value, bool) else value}`" for option, value in options.items()
    )


def fixed_behaviour(
    name: str,
    why: str,
    values: Sequence[object] = (),
    otherwise: str = "",
    instead: str = "",
    is_lost: bool = False,
    **facts: Any,
) -> Key:
    """Returns a key that asks for our fixed behaviour: with these values, or with any if none are given. `is_lost`:
    the value asks for something else, which gets lost with a warning."""

    def convert_value(value: Any, file: Values) -> Outcome:
        if values and not any(_equal(supported, value) for supported in values):
            raise UserError(otherwise or why, hint=instead or "change the key, or leave it out")
        return NoEffect(why, is_lost, is_ours=bool(values) and not is_lost)

    words = f"At {' or '.join(f'`{format_yaml_value(value)}`' for value in values)}: {why}" if values else why
    because = "" if otherwise in ("", why) else f": {otherwise}"
    remark = f"Anything else is refused{because}." if values else ""
    remark += " A warning is logged." if is_lost else ""
    return Key(name, convert_value, words=words, remark=remark, values=tuple(values), fate="met", **facts)


def _equal(supported: object, value: object) -> bool:
    if isinstance(supported, str) and isinstance(value, str):
        return supported.lower() == value.lower()
    return isinstance(supported, bool) == isinstance(value, bool) and supported == value


def format_yaml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def read_keys(
    package: str,
    table: str,
    converters: Iterable[ConvertValue],
    kinds: Mapping[str, Callable[..., Key | list[Key]]] | None = None,
) -> dict[str, Key]:
    """Returns the keys of a table by name, in its order. `turns` are the functions that an entry `computed: NAME` calls
    `by` name, and `kinds` are the program's own kinds of entries."""
    by_name = {convert_value.__name__: convert_value for convert_value in converters}

    def computed(name: str, by: str, **facts: Any) -> Key:
        return Key(name, by_name[by], **facts)

    made: Mapping[str, Callable[..., Key | list[Key]]] = {
        "same": same_value, "computed": computed, "chosen": choice, "met": fixed_behaviour, **(kinds or {})
    }  # fmt: skip
    known: dict[str, Key] = {}
    for row in read_table(package, table):
        kind = next(iter(row))
        names = row.pop(kind)
        for name in names if isinstance(names, list) else [names]:
            keys = made[kind](name, **row)
            known |= {key.name: key for key in (keys if isinstance(keys, list) else [keys])}
    return known


@dataclass(frozen=True)
class File:
    """All keys of a file, nested ones joined by dots, with the file of each: it may have base files."""

    values: dict[str, object]
    origins: dict[str, Path]


def translated(
    file: File,
    source: Path,
    outcome: Callable[[str], Outcome],
    *,
    page: str,
    names: Mapping[str, str] | None = None,
    is_whole: bool,
) -> dict[str, object]:
    """Returns the options that the keys of a file become by `outcome`. Raises UserError that lists all refused keys,
    and refers to `page`.

    `names` are our option's names by their spellings, of which two are the same option. Of a file that `is_whole`, as
    the program itself writes it, keys that ask for what is done anyway are not logged.
    """
    made: dict[str, object] = {}
    written: dict[str, tuple[str, str]] = {}  # By option: the key, and how the option was spelled.
    without_effect: dict[tuple[Path, NoEffect], list[str]] = {}
    problems: list[tuple[Path, UserError]] = []
    for name in file.values:
        try:
            options = outcome(name)
        except UserError as error:
            problems.append((file.origins[name], error))
            continue
        if isinstance(options, NoEffect):
            if not (options.is_ours and is_whole):
                without_effect.setdefault((file.origins[name], options), []).append(name)
            continue
        for option, value in options.items():
            ours = (names or {}).get(option, option)
            first, spelled = written.setdefault(ours, (name, option))
            if made.setdefault(spelled, value) != value:
                message = f"{first} is {file.values[first]!r} and {name} is {file.values[name]!r}: both set {ours}"
                problems.append((file.origins[name], UserError(message, hint="keep one of them")))
    if problems:
        raise _together(problems, source, page)
    for (path, reason), keys in without_effect.items():
        level = logging.WARNING if reason.is_lost else logging.INFO
        log.log(level, "%s: %s no effect: %s", path, _with_verb(keys), reason.why)
    return made


def _with_verb(names: list[str]) -> str:
    """Returns "a has", or "a, b and c have"."""
    return f"{names[0]} has" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} have"


def _together(problems: list[tuple[Path, UserError]], source: Path, page: str) -> UserError:
    if len(problems) == 1:
        path, error = problems[0]
        return UserError(f"{path}: {error.message}", hint=error.hint)
    lines = [f"{source}: {len(problems)} keys cannot be translated"]
    for path, error in problems:
        where = "" if path == source else f"{path}: "
        lines.append(f"  {where}{error.message}" + (f" ({error.hint})" if error.hint else ""))
    return UserError("\n".join(lines), hint=f"{page} explains each key")
