"""Reads JSON values back into the dataclasses that they were written from, strictly."""

import dataclasses
import types
import typing
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

T = TypeVar("T")


def from_json(kind: type[T], value: Any, where: str = "the file") -> T:
    """Returns a JSON value as the dataclass `kind`, whose fields may be dataclasses, lists, tuples of one type, dicts,
    literals, unions, numbers, texts and booleans.

    A key may be missing if its field has a default. Raises ValueError for any other difference, and names its place.
    """
    made: T = _convert(kind, value, where)
    return made


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        return _first_that_fits(arguments, value, where)
    if origin in (tuple, list):
        items = value if isinstance(value, list) else _refuse(value, where)
        return origin(_convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        pairs = value if isinstance(value, dict) else _refuse(value, where)
        return {name: _convert(arguments[1], item, f"{where}: {name}") for name, item in pairs.items()}
    if origin is Literal:
        return value if value in arguments else _refuse(value, where)
    if type(value) is not kind and not (kind is float and type(value) is int):
        _refuse(value, where)
    return None if value is None else kind(value)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = {name for name, field in fields.items() if (field.default, field.default_factory) == missing}
    if not isinstance(value, dict) or not required <= value.keys() <= fields.keys():
        _refuse(value, where)
    hints = typing.get_type_hints(kind)
    return kind(**{name: _convert(hints[name], item, f"{where}: {name}") for name, item in value.items()})


def _first_that_fits(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return _convert(kind, value, where)
        except ValueError:
            continue
    _refuse(value, where)


def _refuse(value: Any, where: str) -> NoReturn:
    raise ValueError(f"{where} is {str(value)[:60]!r}, which is not valid")
