"""Parses numbers in digits: groups of three digits, decimal signs, Roman numerals."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

# It matches 1 000 000, 1.000.000 and 1,000,000, each with or without decimals, and 1000000 and 3,14.
NUMBER = (
    r"(?:[0-9]{1,3}(?:(?: [0-9]{3}){1,7}|(?:\.[0-9]{3}){1,7}|(?:,[0-9]{3}){1,7})(?![0-9])(?:[.,][0-9]+)?"
    r"|[0-9]+(?:[.,][0-9]+)?)"
)
CLOCK = r"(?<![0-9.,:])(?:[01]?[0-9]|2[0-4])\.[0-5][0-9](?![0-9]|[.,:][0-9])"  # A time with a dot: 18.30.
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_ROMAN = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


@dataclass(frozen=True)
class Written:
    """The digits of a number: `fraction` has those after the decimal sign; empty if there is none."""

    whole: str
    fraction: str = ""


def parse_number(written: str, decimal: str) -> Written:
    """Parses a match of NUMBER; `decimal` is the decimal sign of the language, "," or ".".

    An ambiguous sign, as in 1.234 and 1,234, separates groups unless it is the language's decimal sign; in 1,000 it
    always separates groups.
    """
    ungrouped = written.replace(" ", "")
    signs = [char for char in ungrouped if char in ".,"]
    if not signs:
        return Written(ungrouped)
    head, _, tail = ungrouped.rpartition(signs[-1])
    several_alike = len(signs) > 1 and len(set(signs)) == 1
    alone = len(signs) == 1 and " " not in written and len(tail) == 3 and len(head) <= 3 and head.strip("0")
    if several_alike or (alone and (signs[0] != decimal or tail == "000")):
        return Written(head.replace(signs[-1], "") + tail)
    return Written(re.sub(r"[.,]", "", head), tail)


def roman(numeral: str) -> int:
    """Returns the value of a well-formed Roman numeral; 0 for other text."""
    if not _ROMAN.fullmatch(numeral):
        return 0
    values = [_ROMAN_VALUES[char] for char in numeral]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))


def is_spoken_whole(digits: str, scales: Sequence[object]) -> bool:
    """Returns False for digits that are read one by one: they begin with 0 or exceed the largest of the scales."""
    return len(digits) <= 3 * len(scales) and (len(digits) == 1 or not digits.startswith("0"))
