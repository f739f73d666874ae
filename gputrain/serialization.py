"""Parses YAML and JSON strictly, and reads JSON values back into the dataclasses that they were written from."""

import dataclasses
import functools
import json
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml

from gputrain.errors import UserError

T = TypeVar("T")

TRAIN_AGAIN = "train again, or use the version that wrote it"
LONGEST_NUMBER = 1000  # Characters of a whole number.
LARGEST_CONTENT = 100_000  # Values of a YAML file, with aliases expanded.


def from_json(kind: type[T], value: Any, where: str = "the file") -> T:
    """Returns a JSON value as the dataclass `kind`, whose fields may be dataclasses, lists, tuples of one type, dicts,
    literals, unions, numbers, texts and booleans.

    A key may be missing if its field has a default. Raises ValueError for any other difference, and names its place.
    """
    made: T = converted(kind, value, where)
    return made


def from_row(kind: type[T], row: Any) -> T:
    """Returns a row of a store as the dataclass `kind`, of which it must have all fields. Raises ValueError."""
    if not isinstance(row, dict) or row.keys() != {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        raise ValueError("other fields")
    return from_json(kind, row)


def unreadable(path: Path | str, remedy: str, fault: str = "damaged") -> UserError:
    """Returns the error for a file of gputrain whose version, fields or values are not those that it writes."""
    return UserError(f"{path}: {fault}, or written by another version of gputrain", hint=remedy)


def converted(kind: Any, value: Any, where: str, *, reads_texts: bool = False) -> Any:
    """Returns a value as `kind`, strictly: a bool is not a number, and 3.7 is not a whole number. With `reads_texts`, a
    number may be written as a text, as on the command line. Raises ValueError, or OverflowError for a large number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        return _first_that_fits(arguments, value, where)
    if origin in (tuple, list):
        items = value if isinstance(value, (list, tuple)) else _refuse(value, where)
        return origin(
            converted(arguments[0], item, f"{where}[{index}]", reads_texts=reads_texts)
            for index, item in enumerate(items)
        )
    if origin is dict:
        pairs = value if isinstance(value, dict) else _refuse(value, where)
        return {name: converted(arguments[1], item, f"{where}: {name}") for name, item in pairs.items()}
    if origin is Literal:
        return value if value in arguments else _refuse(value, where)
    if reads_texts and kind in (int, float) and isinstance(value, str):
        return kind(value)
    is_name = isinstance(kind, type) and issubclass(kind, str) and kind is not str
    accepted = (str, Path) if is_name else {float: (float, int), Path: (Path, str)}.get(kind, kind)
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        _refuse(value, where)
    if (kind is Path or is_name) and "\0" in str(value):
        _refuse(value, where)
    return None if value is None else kind(value)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = {name for name, field in fields.items() if (field.default, field.default_factory) == missing}
    if not isinstance(value, dict) or not required <= value.keys() <= fields.keys():
        _refuse(value, where)
    hints = _hints(kind)
    return kind(**{name: converted(hints[name], item, f"{where}: {name}") for name, item in value.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _first_that_fits(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return converted(kind, value, where)
        except ValueError:
            continue
    _refuse(value, where)


def _refuse(value: Any, where: str) -> NoReturn:
    raise ValueError(f"{where} is {str(value)[:60]!r}, which is not valid")


def is_fingerprint(text: object) -> bool:
    """Returns True for hexadecimal digits, by which sources are identified."""
    return isinstance(text, str) and bool(re.fullmatch("[0-9a-f]{1,64}", text))


def read_json(text: str) -> Any:
    """Parse JSON. Raises ValueError if it is not valid, or a mapping holds a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        for key in made if len(made) < len(pairs) else ():
            if sum(key == other for other, _ in pairs) > 1:
                raise ValueError(f"the key {key!r} stands there twice: keep one of them")
        return made

    return json.loads(text, object_pairs_hook=unique)


class PlainLoader(yaml.SafeLoader):
    """Reads times and dates as texts: YAML 1.1 makes 1110 of 18:30 and 3842 of 64:2, which are base 60 to it."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Returns the text of a date or of a number with a colon, and the value of any other node."""
        kind = node.tag.rpartition(":")[2]
        if kind == "timestamp" or (kind in ("int", "float") and ":" in node.value):
            return node.value
        if kind == "int" and len(node.value) > LONGEST_NUMBER:  # Python writes none of more than 4300 digits.
            raise ValueError(f"line {node.start_mark.line + 1}: a number of {len(node.value)} characters")
        return super().construct_object(node, deep)


def read_yaml(text: str) -> Any:
    """Parse YAML. Raises YAMLError or ValueError if it is not valid, a mapping holds a key twice, or aliases expand to
    more than LARGEST_CONTENT values."""
    loader = PlainLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, counted: dict[int, float]) -> float:
    """Count the values of a node, those of aliases each time that they are repeated."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = math.inf  # An alias within its own anchor has no end.
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<" and first.setdefault(key.value, key) is not key:
                line = key.start_mark.line + 1
                raise ValueError(f"the key {key.value!r} stands there twice, again in line {line}: keep one of them")
            parts += [key, value]
    total = 1 + sum(_count(part, counted) for part in parts)
    if total > LARGEST_CONTENT:
        raise ValueError("aliases repeat too many values")
    counted[id(node)] = total
    return total
