"""Reads a file of transcripts into rows: tables with any usual separator, by the rules of CSV, and JSON.

A row that cannot be read is a text, which says why. Imports no torch.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from gputrain.serialization import read_json
from gputrain.speech.transcript_columns import AUDIO_KEYS

SEPARATORS = ("|", "\t", ";", ",")
QUOTED = (";", ",")  # Separators that also occur in texts, which are quoted for this reason.
MOST_LINES = 50  # maximum number of lines of a quoted cell

JsonRow: TypeAlias = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- tables


def cells_of(record: str, separator: str) -> list[str] | None:
    """Returns the cells of a record by the rules of CSV, or None if its quotes break them."""
    try:
        (cells,) = csv.reader([record], delimiter=separator, strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        return None
    return [cell.strip() for cell in cells]


def plain_cells(line: str, separator: str) -> list[str]:
    return [cell.strip() for cell in line.split(separator)]


def first_cells(line: str, separator: str) -> list[str]:
    """Returns the cells of a line that is read alone."""
    return (cells_of(line, separator) if separator in QUOTED else None) or plain_cells(line, separator)


def is_declaration(line: str) -> bool:
    """Returns True for the first line by which Excel tells the separator, such as `sep=;`."""
    return re.fullmatch(r'"?sep=.?"?', line.strip(), re.IGNORECASE) is not None


def table_rows(
    lines: Sequence[str], separator: str, width: int, is_row: Callable[[Sequence[str]], bool]
) -> Iterator[tuple[int, list[str] | str]]:
    """Yields the number of the first line and the cells of each record of a table with `width` columns.

    Between `|` and tabs, quotes are usually letters of the text, so that the rules of CSV hold where only they give the
    columns, or a quote is doubled. A quoted cell may have several lines, none of which `is_row` takes for a row.
    """
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        at += 1
        if not line.strip() or is_declaration(line):
            continue
        cells: list[str] | str = plain_cells(line, separator)
        if '"' in line:
            by_rules = cells_of(line, separator)
            if by_rules is not None:
                all_quoted = all(cell[:1] == cell[-1:] == '"' for cell in cells)
                if separator in QUOTED or '""' in line or all_quoted or not _fits(cells, width):
                    cells = by_rules
            elif more := _quoted_over_lines(lines, at - 1, separator, width, is_row):
                cells, at = more
            elif separator in QUOTED:
                cells = "a quote is not closed, or not doubled within the quotes"
        yield number, cells


def _quoted_over_lines(
    lines: Sequence[str], first: int, separator: str, width: int, is_row: Callable[[Sequence[str]], bool]
) -> tuple[list[str], int] | None:
    """Returns the cells of a record of several lines, and the place after it."""
    for end in range(first + 1, min(first + MOST_LINES, len(lines))):
        alone = first_cells(lines[end], separator)
        if lines[end].count('"') % 2 == 0 and _fits(alone, width) and is_row(alone):
            return None
        cells = cells_of("\n".join(lines[first : end + 1]), separator)
        if cells is not None and _fits(cells, width):
            return cells, end + 1
    return None


def _fits(cells: Sequence[str], width: int) -> bool:
    """Returns True if a row has as many cells as the table, but for empty ones at its end."""
    return len(cells) >= width and not any(cells[width:])


# --------------------------------------------------------------------------------------------------------------- JSON


def json_rows(text: str) -> list[tuple[str, JsonRow | None]]:
    """Returns the objects of JSON lines, of a list, or of an object that names recordings or holds such a list, each
    with its place; None in place of what is no object."""
    lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    by_line = [(where, json_object(line)) for where, line in lines]
    if not lines or (by_line[0][1] is not None and (len(lines) > 1 or _names_audio(by_line[0][1]))):
        return by_line
    try:
        content = read_json(text)
    except (ValueError, RecursionError):  # What is whole of a list that is cut off.
        return [
            (where, row) for (where, row), (_, line) in zip(by_line, lines, strict=True) if line.strip() not in "[]"
        ]
    if isinstance(content, dict) and not _names_audio(content):
        lists = [value for value in content.values() if isinstance(value, list) and value]
        content = lists[0] if len(lists) == 1 else [_of_pair(name, value) for name, value in content.items()]
    rows = content if isinstance(content, list) else [content]
    return [(f"entry {number}", row if isinstance(row, dict) else None) for number, row in enumerate(rows, start=1)]


def json_object(line: str) -> JsonRow | None:
    """Returns the object of a text in JSON, which a comma may follow; None for anything else."""
    try:
        row = read_json(line.strip().rstrip(","))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _names_audio(row: JsonRow) -> bool:
    return any(key in row for key in AUDIO_KEYS)


def _of_pair(name: str, value: object) -> JsonRow | None:
    """Returns the row of a recording's name with its text, or with an object that has its text."""
    if isinstance(value, dict):
        return {"audio": name, **value}
    return {"audio": name, "text": value} if isinstance(value, str) else None


def holds_json(text: str) -> bool:
    """Returns True if a text begins as JSON does, whatever its file is called."""
    return bool(re.match(r'\s*(\{\s*["}]|\[\s*[\[{\]])', text))
