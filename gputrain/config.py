"""Declares options: one declaration serves the command line, configuration files, checks and documentation.

A field of a `@config` class, declared with `opt()`, defines the command-line option, the YAML key, the range check and
the row of the docs table:

    @config(panel="Data")
    class Data:
        image_size: int = opt(default=256, help="Side of a training crop, in pixels.", min=8)

A config class may contain others; their fields are flattened, so that `image_size` is `--image-size` on the command
line and `image_size:` in YAML at any depth. `leaves()` lists the flat fields, `assemble()` builds the nested object
from flat values, `flatten()` is its inverse.

A config class may declare further names of its fields, `spellings: ClassVar[dict[str, str]] = {"lr": "learning_rate"}`:
they are accepted as keys and flags, and are never written.

An option has a level: `--help` lists those that are declared with `opt()`, and `--help-all` those of `advanced()`, too;
those of `file_key()` are keys of a configuration file and no flags. `changed()` declares one of a base class again.

A config class may declare `switches: ClassVar[Switches]`, flags and keys that choose among the values of one option.

A config class that trains one kind of model declares it, `kind: ClassVar[str] = "vae"`. The kind is written as the
first key of a configuration file and checked when the file is read (gputrain/kinds.py).
"""

import dataclasses
import difflib
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import yaml
from typing_extensions import dataclass_transform

from gputrain.errors import UserError
from gputrain.former_options import explain_former, with_current_options
from gputrain.serialization import TRAIN_AGAIN, converted, read_json, read_yaml, unreadable

T = TypeVar("T")


class Switches(NamedTuple):
    """Names that are true or false, each with the values of `option` that it leaves if it is false and if it is true.
    The first value that all the given ones leave is taken; "" takes none."""

    option: str
    leave: Mapping[str, tuple[Sequence[str], Sequence[str]]]


class ModelName(str):
    """The path of a model, or a name by which it is published (gputrain/fetch/names.py), as the user wrote it: a path
    would change a name's slashes."""


Level = Literal["common", "advanced", "file"]
LARGEST = 2**63 - 1  # The largest number that an option takes.
LONGEST_FILE = 10_000_000  # Bytes of a configuration file.


def opt(
    *,
    default: Any = dataclasses.MISSING,
    help: str,
    level: Level = "common",
    min: float | None = None,
    max: float | None = None,
    separator: str = ",",
    choices: Sequence[str] = (),
    is_saved: bool = True,
    is_secret: bool = False,
    is_positional: bool = False,
    implied_by: Sequence[str] = (),
) -> Any:
    """Declare an option. The first sentence of `help` says what it is, with its unit, in a line of the help page;
    further sentences stand in `--help-all` and in the docs. `min` and `max` are inclusive; without a default the option
    is required.

    `separator` separates the items of a list that is written as one text. It is empty if the items are texts that may
    contain any character; then a list is the option repeated, or a sequence in a file. `choices` are the values of a
    text if they are known only when the program runs. A value that is not `is_saved` belongs to one command, and is not
    written to a run's config.yaml. One that `is_secret` is not written anywhere. One that `is_positional` is given
    without a flag. A switch that is left out is on where one of the options `implied_by` is given.
    """
    metadata = {
        "help": help, "level": level, "min": min, "max": max, "separator": separator, "choices": tuple(choices),
        "is_saved": is_saved, "is_secret": is_secret, "is_positional": is_positional, "implied_by": tuple(implied_by),
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def advanced(*, default: Any = dataclasses.MISSING, help: str, **more: Any) -> Any:
    """Declare an option that `--help-all` lists and `--help` doesn't."""
    return opt(default=default, help=help, level="advanced", **more)


def file_key(*, default: Any = dataclasses.MISSING, help: str, **more: Any) -> Any:
    """Declare a key of configuration files that is no flag, as nobody sets it from a shell."""
    return opt(default=default, help=help, level="file", **more)


def changed(base: type, name: str, *, default: Any = dataclasses.MISSING, **changes: Any) -> Any:
    """Declare an option of a base class again, with another default, or with other parts of its declaration."""
    field = base.__dataclass_fields__[name]  # type: ignore[attr-defined]
    default = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={**field.metadata, **changes})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(opt, advanced, file_key, changed))
def config(panel: str = "Options") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen, keyword-only configuration. The help page lists its options under `panel`."""

    def decorate(cls: type[T]) -> type[T]:
        made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        made.__panel__ = panel  # type: ignore[attr-defined]
        return made

    return decorate


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An option: its flat name, its type, and its path in the nested configuration."""

    name: str
    type: Any
    default: Any
    help: str
    min: float | None
    max: float | None
    panel: str
    path: tuple[str, ...]
    level: Level = "common"
    separator: str = ","
    spellings: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    is_saved: bool = True
    is_secret: bool = False
    is_positional: bool = False
    implied_by: tuple[str, ...] = ()

    @classmethod
    def switch(cls, name: str) -> "Leaf":
        return cls(name, bool, None, "", None, None, "", ())

    @property
    def clause(self) -> str:
        """The first sentence of the help, as a line of the help page has it."""
        return self.help.partition(". ")[0].removesuffix(".")

    @property
    def names(self) -> tuple[str, ...]:
        """All accepted names, its own name first."""
        return (self.name, *self.spellings)

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def flags(self) -> list[str]:
        return ["--" + name.replace("_", "-") for name in self.names]

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_list(self) -> bool:
        return get_origin(self.plain_type) is tuple

    def value_in(self, instance: object) -> Any:
        """Return the value of this option in a config object."""
        return functools.reduce(getattr, self.path, instance)

    def items(self, text: str) -> str | list[str]:
        """Return the items of a list that is written as one text; return the text of any other option unchanged."""
        if not self.is_list:
            return text
        return text.split(self.separator) if self.separator else [text]

    @property
    def plain_type(self) -> Any:
        """The type without `| None`. None as a default means that the program chooses the value."""
        if self.choices:
            return Literal[self.choices]
        options = [t for t in get_args(self.type) if t is not type(None)]
        return options[0] if get_origin(self.type) in (types.UnionType, typing.Union) else self.type


def leaves(cls: type) -> dict[str, Leaf]:
    """Return the flat fields of a config class by name, in the order of declaration."""
    return dict(_leaves(cls))


@functools.cache
def _leaves(cls: type) -> dict[str, Leaf]:
    found: dict[str, Leaf] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if hasattr(kind, "__panel__"):
            inner = {n: dataclasses.replace(v, path=(field.name, *v.path)) for n, v in _leaves(kind).items()}
        elif "help" in field.metadata:  # Other fields are no options.
            panel = getattr(cls, "__panel__", "Options")
            inner = {
                field.name: Leaf(field.name, kind, field.default, panel=panel, path=(field.name,), **field.metadata)
            }
        else:
            continue
        clash = found.keys() & inner.keys()
        assert not clash, f"{cls.__name__} declares {clash} twice"
        found |= inner
    for other, name in getattr(cls, "spellings", {}).items():
        assert other not in found, f"{cls.__name__}: the spelling {other} is a field"
        found[name] = dataclasses.replace(found[name], spellings=(*found[name].spellings, other))
    return found


def switches(cls: type) -> Switches:
    """Return the switches that a config class or one of those in it declares."""
    inner = [kind for kind in typing.get_type_hints(cls).values() if hasattr(kind, "__panel__")]
    of_inner = (found for found in map(switches, inner) if found.leave)
    return getattr(cls, "switches", None) or next(of_inner, Switches("", {}))


def without_switches(cls: type, values: Mapping[str, object], where: str = "") -> dict[str, object]:
    """Return values with that of the option of `switches` in their place. Raises UserError if they leave none."""
    option, leave = switches(cls)
    given = {name: convert(Leaf.switch(name), values[name], where) for name in leave if name in values}
    made = {name: value for name, value in values.items() if name not in given}
    left: list[Sequence[object]] = [leave[name][is_on] for name, is_on in given.items()]
    left += [[made[option]]] if option in made else []
    both = [value for value in left[0] if all(value in other for other in left)] if given else [""]
    if not both:
        names = [*(name if is_on else f"no-{name}" for name, is_on in given.items()), *made.keys() & {option}]
        raise UserError(f"{where}{' and '.join(names)} contradict each other", hint=f"drop one, or give {option} alone")
    return made | ({option: both[0]} if both[0] else {})


def assemble(cls: type[T], values: Mapping[str, object], source: str = "") -> T:
    """Build `cls` from flat values. `source` names their origin in errors.

    Raises UserError on an unknown key, a null, a value of the wrong type or out of range, or a missing required value.
    """
    given = checked(cls, values, source)
    implied = {name: True for name, leaf in leaves(cls).items() if given.keys() & leaf.implied_by}
    given = implied | given
    nested: dict[str, Any] = {}
    for leaf in leaves(cls).values():
        if leaf.name in given:
            level = nested
            for step in leaf.path[:-1]:
                level = level.setdefault(step, {})
            level[leaf.name] = given[leaf.name]
        elif leaf.required:
            where = f"{source}: " if source else ""
            raise UserError(f"{where}{leaf.name} is missing", hint=f"give {leaf.flag}, or the key in --config FILE")
    return _build(cls, nested)


def checked(cls: type, values: Mapping[str, object], source: str = "") -> dict[str, Any]:
    """Convert flat values. Each is returned under its leaf's own name, even if it is given by another spelling.

    Raises UserError as `assemble` does, except for missing values, and if one leaf is given by two names.
    """
    where = f"{source}: " if source else ""
    known = {name: leaf for leaf in leaves(cls).values() for name in leaf.names}
    written: dict[str, str] = {}
    made: dict[str, Any] = {}
    for name, value in without_switches(cls, values, where).items():
        leaf = known.get(name)
        if leaf is None:
            raise unknown_key(name, known, where, "" if "kind" in known else getattr(cls, "kind", ""))
        if leaf.name in written:
            raise UserError(f"{where}{written[leaf.name]} and {name} are one and the same key", hint="keep one of them")
        written[leaf.name] = name
        made[leaf.name] = convert(leaf, value, where, name)
    return made


def _build(cls: type[T], nested: dict[str, Any]) -> T:
    hints = typing.get_type_hints(cls)
    groups = {n: _build(t, nested.get(n, {})) for n, t in hints.items() if hasattr(t, "__panel__")}
    return cls(**{**nested, **groups})


def convert(leaf: Leaf, value: object, where: str = "", name: str = "") -> Any:
    """Convert a value of YAML, JSON or a flag to the leaf's type, strictly: a bool is not a number, 3.7 is not an int.

    `name` is the spelling that the user gave, if it is not the leaf's own name.
    """
    name = name or leaf.name
    if value is None:
        raise UserError(f"{where}{name} is null", hint="leave the key out for its default; off is 0 or false")
    try:
        given = leaf.items(value) if isinstance(value, str) else value
        made = converted(leaf.plain_type, given, name, reads_texts=True)
    except (TypeError, ValueError, OverflowError):
        shown = "not shown" if leaf.is_secret else reprlib.repr(value)
        raise UserError(f"{where}{name} is {shown}, expected {describe(leaf.plain_type)}") from None
    for number in made if isinstance(made, tuple) else (made,):
        if isinstance(number, (int, float)):
            low, high = leaf.min, leaf.max
            if (low is not None and number < low) or (high is not None and number > high) or number != number:
                expected = describe_range(low, high) or "a finite number"
                raise UserError(f"{where}{name} is {reprlib.repr(number)}, expected {expected}")
            if abs(number) > LARGEST:  # Neither torch nor the file system takes such a number.
                raise UserError(f"{where}{name} is {reprlib.repr(number)}, expected at most {LARGEST:.2g}")
    return made


def describe(kind: Any) -> str:
    """Describe a type in words, for errors and docs."""
    if get_origin(kind) is tuple:
        (item,) = {kind for kind in get_args(kind) if kind is not Ellipsis}
        chosen = get_origin(item) is Literal
        return f"a list out of {', '.join(get_args(item))}" if chosen else f"a list of {describe(item)[2:]}s"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    names: dict[Any, str] = {
        int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path",
        ModelName: "a path or name",
    }  # fmt: skip
    return names[kind]


def describe_range(low: float | None, high: float | None) -> str:
    """Return the range of a number: `at least 1`, `0 to 0.999999`, and nothing if there is none."""
    least, most = (number if number is None else format(Decimal(repr(number)), "f") for number in (low, high))
    if least is not None and most is not None:
        return f"{least} to {most}"
    return f"at least {least}" if least is not None else f"at most {most}" if most is not None else ""


def unknown_key(name: str, known: Mapping[str, object], where: str = "", kind: str = "") -> UserError:
    if former := explain_former(name, kind):
        return UserError(f"{where}{former[0]}", hint=former[1])
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
    return UserError(f"{where}unknown key {name!r}", hint=hint)


def flatten(instance: object) -> dict[str, Any]:
    """Return flat plain values (numbers, texts, booleans, lists), from which `assemble` builds an instance that is
    equal but for its secrets."""
    values = {name: leaf.value_in(instance) for name, leaf in leaves(type(instance)).items() if not leaf.is_secret}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def as_flags(instance: object, leave_out: Collection[str] = ()) -> list[str]:
    """Return the words of a command line that give an instance its values where they are not the defaults. Keys that
    are no flags are left out, and the options and groups of `leave_out`."""
    usual, words = defaults(type(instance)), []
    for name, value in flatten(instance).items():
        leaf = leaves(type(instance))[name]
        if value == usual[name] or leaf.level == "file" or {name, leaf.path[0]} & {*leave_out}:
            continue
        if isinstance(value, bool):
            words.append(leaf.flag if value else f"--no-{leaf.flag[2:]}")
        else:
            items = [str(item) for item in value] if isinstance(value, list) else [str(value)]
            items = [leaf.separator.join(items)] if leaf.separator else items
            words += [word for item in items for word in (leaf.flag, item)]
    return words


def check_stored(cls: type, values: Mapping[str, Any], source: Path) -> None:
    """Raise UserError for flat values of a checkpoint that have a key that `cls` has not, or lack one without a
    default. Others may be missing: they are options of a later version, whose defaults hold."""
    known = leaves(cls)
    for name in values.keys() - known.keys():
        if former := explain_former(name, getattr(cls, "kind", "")):
            raise UserError(f"{source}: was trained with {name} {values[name]}, and {former[0]}", hint=TRAIN_AGAIN)
    required = {name for name, leaf in known.items() if leaf.required}
    if not required <= values.keys() <= known.keys():
        raise unreadable(source, TRAIN_AGAIN)


def defaults(cls: type) -> dict[str, Any]:
    """Return the flat plain default of every leaf; None if the program chooses it, or it is required."""
    return {name: None if leaf.required else _plain(leaf.default) for name, leaf in leaves(cls).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, (Path, ModelName)) else value


def read_file(path: Path) -> dict[str, object]:
    """Read the mapping in a YAML or JSON file. Raises UserError if it is unreadable, or no mapping with text keys."""
    try:
        with path.open("rb") as file:  # A device may have no end.
            text = file.read(LONGEST_FILE + 1)
        if len(text) > LONGEST_FILE:
            raise ValueError(f"longer than {LONGEST_FILE / 1e6:g} MB")
        content = read_json(text.decode()) if path.suffix == ".json" else read_yaml(text.decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", hint="--config takes a YAML or JSON file") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{path}: not valid {'JSON' if path.suffix == '.json' else 'YAML'}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(
            f"{path}: expected a mapping of keys to values, found {type(content).__name__}",
            hint="write one `key: value` a line, such as `image_size: 512`",
        )
    return content


def read_config(path: Path, kind: str = "") -> dict[str, object]:
    """Read a configuration file as `read_file` does, which may be of a time with other options. Without a key
    `kind`, it is of the kind of model that is given."""
    content = read_file(path)
    return with_current_options(content, str(content.get("kind", kind)))


def read_table(package: str, name: str) -> Any:
    """Return the content of a YAML file that is part of a package: a table that the code needs."""
    return yaml.safe_load(files(package).joinpath(name).read_text(encoding="utf-8"))


def to_yaml(instance: object) -> str:
    """Write the configuration as YAML, with a comment above each panel; `--config` reads it back. Values of options
    that belong to one command are left out."""
    flat = flatten(instance)
    kind = getattr(instance, "kind", "") if "kind" not in flat else ""
    lines: list[str] = [f"kind: {kind}"] if kind else []
    panel = ""
    for name, leaf in leaves(type(instance)).items():
        if name in flat and leaf.is_saved:
            if leaf.panel != panel:
                panel = leaf.panel
                lines.append(f"{'' if not lines else chr(10)}# {panel}")
            lines.append(yaml.safe_dump({name: flat[name]}, width=1_000_000).rstrip())
    return "\n".join(lines) + "\n"
