"""Numbers as they are written: groups of three digits, decimal signs, Roman numerals."""

import re
from dataclasses import dataclass

# 1 000 000 or 1.000.000 or 1,000,000, each with decimals or without; 1000000; 3,14.
NUMBER = (
    r"(?:[0-9]{1,3}(?:(?: [0-9]{3}){1,7}|(?:\.[0-9]{3}){1,7}|(?:,[0-9]{3}){1,7})(?![0-9])(?:[.,][0-9]+)?"
    r"|[0-9]+(?:[.,][0-9]+)?)"
)
_ROMAN_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_ROMAN = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


@dataclass(frozen=True)
class Written:
    """A number by its digits: `fraction` are those behind the decimal sign, "" where there is none."""

    whole: str
    fraction: str = ""


def parse_number(written: str, decimal: str) -> Written:
    """Read what NUMBER matched; `decimal` is the language's own decimal sign, "," or ".".

    A sign that could be either, as in 1.234 and 1,234, groups unless it is the language's own; 1,000 always groups.
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
    """Value of a well-formed Roman numeral, 0 of anything else."""
    if not _ROMAN.fullmatch(numeral):
        return 0
    values = [_ROMAN_VALUES[char] for char in numeral]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))
