"""Dataclasses from JSON: what they were written from comes back, and everything else is refused with its place."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from gputrain.serialization import from_json, read_yaml
from tests.tables import each_row


@dataclass(frozen=True)
class Inner:
    size: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    value: bool | int | float | str
    inner: Inner
    several: tuple[Inner, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    anything: Any = None


WHOLE = Outer("n", "b", 0.5, Inner(3), (Inner(1, 0.25), Inner(2)), {"x": 1}, [None, {"y": [1]}])


@each_row(True, 1, 0.5, "text")
def test_what_was_written_comes_back(value):
    written = {**asdict(WHOLE), "value": value}
    found = from_json(Outer, json.loads(json.dumps(written)))
    assert asdict(found) == written
    assert type(found.value) is type(value)
    assert found.several == WHOLE.several


def test_fields_with_defaults_may_be_missing_and_a_whole_number_may_be_a_float():
    assert from_json(Inner, {"size": 1, "share": 2}) == Inner(1, 2.0)
    assert from_json(Inner, {"size": 1}) == Inner(1)


@each_row(
    ({"inner": {"size": 1.5}}, "inner: size is '1.5'"),
    ({"inner": {"size": True}}, "inner: size is 'True'"),
    ({"inner": {}}, "inner is '{}'"),
    ({"inner": {"size": 1, "more": 2}}, "inner is "),
    ({"several": [{"size": 1}, 2]}, r"several\[1\] is '2'"),
    ({"several": "ab"}, "several is 'ab'"),
    ({"counts": {"x": "1"}}, "counts: x is '1'"),
    ({"kind": "c"}, "kind is 'c'"),
    ({"name": None}, "name is 'None'"),
    ({"value": None}, "value is 'None'"),
)
def test_what_differs_is_refused_with_its_place(change, place):
    with pytest.raises(ValueError, match=f"^f: {place}.*not valid"):
        from_json(Outer, {**json.loads(json.dumps(asdict(WHOLE))), **change}, "f")


@each_row(
    ("18:30", "18:30"), ("64:2", "64:2"), ("2027-01-31 18:30", "2027-01-31 18:30"), ("2027-01-31", "2027-01-31"),
    ("1:30.5", "1:30.5"), ("1110", 1110), ("0.5", 0.5), ("[1:30, 2]", ["1:30", 2]),
)  # fmt: skip
def test_times_and_dates_in_yaml_are_texts_without_quotes(text, value):
    assert read_yaml(f"key: {text}") == {"key": value}


@each_row("0x" + "f" * 5000, "-0x" + "f" * 5000, "0b" + "1" * 20_000, "9" * 5000)
def test_numbers_that_python_cannot_write_are_refused_by_their_line(text):
    with pytest.raises(ValueError, match=r"line 2: a number of \d{4,5} characters"):
        read_yaml(f"kind: vae\nbatch_size: {text}")
