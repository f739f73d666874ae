"""Reads a file of transcripts, a table with any usual separator or JSON, into rows of values by column, and tells what
each column holds. Imports no torch."""

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gputrain.errors import UserError
from gputrain.fetch.datasets import UNUSABLE
from gputrain.serialization import read_json

TranscriptColumn = Literal[
    "audio", "speaker", "text", "normalized", "start", "end", "duration", "channel", "language", "split", "weight",
    "exclude", "include", "status", "other",
]  # fmt: skip
TranscriptColumns = tuple[TranscriptColumn, ...]
# A row by the names of its columns, or the reason why it cannot be read.
Row: TypeAlias = dict[str, Any] | str

LJSPEECH: TranscriptColumns = ("audio", "text", "normalized")
PIPER: TranscriptColumns = ("audio", "speaker", "text")
# Names of columns of a header and keys of JSON, in any case and with blanks or hyphens for underscores. Of several
# columns for one thing, the value of the first one here that is filled is used: a path rather than an identifier.
HEADINGS: Mapping[TranscriptColumn, Sequence[str]] = {
    "audio": (
        "audio", "audio_filepath", "audio_file", "audio_path", "wav", "file", "file_name", "path", "wav_file",
        "wav_path", "wav_filename", "filename", "filepath", "file_path", "recording", "audio_filename", "wav_name",
        "id", "clip", "utterance_id", "utt_id",
    ),
    "text": (
        "text", "transcript", "transcription", "sentence", "raw_text", "raw_transcription", "utterance", "txt",
        "text_original",
    ),
    "normalized": (
        "normalized", "normalised", "normalized_text", "normalised_text", "normalized_transcription",
        "normalized_transcript", "text_normalized",
    ),
    "speaker": ("speaker", "speaker_name", "speaker_id", "client_id", "voice"),
    "start": (
        "offset", "start", "start_time", "start_seconds", "start_sec", "start_s", "begin", "begin_time",
        "begin_seconds", "begin_sec", "begin_s", "seg_start", "segment_start",
    ),
    "end": (
        "end", "end_time", "end_seconds", "end_sec", "end_s", "stop", "stop_time", "stop_seconds", "stop_sec", "stop_s",
        "seg_end", "segment_end",
    ),
    "duration": ("duration", "duration_seconds", "duration_sec", "duration_s"),
    # They change what a line means: gputrain/speech/utterances.py honours or refuses them.
    "channel": ("channel", "channel_selector", "channel_id"),
    "language": ("language", "lang", "locale", "language_code", "lang_code", "language_id", "lang_id"),
    "split": ("split", "subset", "set", "partition"),
    "weight": ("weight", "sample_weight", "sampling_weight", "num_repeats", "repeats"),
    "exclude": UNUSABLE,
    "include": ("is_valid", "valid", "keep", "include", "accepted", "usable", "approved"),
    "status": ("status", "review_status", "answer", "verdict", "decision"),
}  # fmt: skip
ROLES: Mapping[str, TranscriptColumn] = {name: role for role, names in HEADINGS.items() for name in names}
PREFERENCE = {name: place for place, name in enumerate(ROLES)}
MEANINGS: TranscriptColumns = ("channel", "language", "split", "weight", "exclude", "include", "status")
SEPARATORS = ("|", "\t", ";", ",")
QUOTED = (";", ",")  # Separators that also occur in texts, which are quoted for this reason.
SIGNS = ("|", "a tab", ";", "a comma")
MOST_LINES = 50  # maximum number of lines of a quoted cell
ALIKE = 0.5  # minimum share of a text's words that its normalised form contains
LONGER = 1.2  # words by which texts are longer than the names of speakers, at least
LENGTH = re.compile(r"\d+[.,:]\d+ ?(s|sec|seconds)?")  # a text that is a length
DISAGREEING_SECONDS = 0.1  # accepted difference between an end and a duration
COLUMNS_HINT = (
    "name each column, in order: audio, text, normalized, speaker, start, end, duration, channel, language, split, or "
    "other for an ignored one"
)


# ------------------------------------------------------------------------------------------------------------- columns


def _heading(name: str) -> str:
    return re.sub(r"[ -]", "_", name.strip('" ').lower())


@lru_cache(4096)
def role_of(name: str) -> TranscriptColumn:
    """Returns what a column or key of a name holds."""
    return ROLES.get(_heading(name), "other")


def roles_of(names: Iterable[str]) -> dict[str, TranscriptColumn]:
    """Returns what columns or keys hold, by their names, in the order in which they are preferred."""
    preferred = sorted(names, key=lambda name: PREFERENCE.get(_heading(name), len(PREFERENCE)))
    return {name: role_of(name) for name in preferred}


def is_header(cells: Iterable[str]) -> bool:
    """Returns True if the cells of a line are names of columns, among them those of recordings and texts."""
    roles = {role_of(cell) for cell in cells}
    return "audio" in roles and not roles.isdisjoint({"text", "normalized"})


def check_units(where: str, names: Iterable[str]) -> None:
    """Raises UserError if columns or keys give times in another unit than seconds."""
    for name in names:
        time = re.fullmatch(r"(\w+?)[_\[(]+(ms|msec|milliseconds|samples|frames)[\])]*", _heading(name))
        if time and role_of(time[1]) in ("start", "end", "duration"):
            raise UserError(
                f"{where}: {name} is not in seconds", hint="give start, end or duration in seconds, or drop the column"
            )


def columns_of(file: Path, rows: Sequence[Sequence[str]]) -> TranscriptColumns:
    """Detects the columns of a table without a header from most lines. Raises UserError if they are ambiguous."""
    count = Counter(map(len, rows)).most_common(1)[0][0] if rows else 0
    rows = [row for row in rows if len(row) == count]
    if count > 3 and not any(row[-1] for row in rows):  # Every line ends with a separator.
        return columns_of(file, [row[:-1] for row in rows])
    found: TranscriptColumns | None = ("audio", "text") if count == 2 else _of_three(rows) if count == 3 else None
    if found and 2 * sum(bool(LENGTH.fullmatch(row[found.index("text")])) for row in rows) <= len(rows):
        return found
    if count < 2:
        fault = f"no line has 2 columns or more with {' or '.join(SIGNS)} between them" if rows else "no line"
        raise UserError(f"{file}: {fault}", hint="expected a line for each recording, such as NAME|TEXT")
    example = " | ".join(cell[:40] for cell in rows[0])
    names = ",".join(["audio", "text", *["other"] * (count - 2)])
    raise UserError(
        f"{file}: without a header, nothing tells what its {count} columns hold, such as {example}",
        hint=f"{COLUMNS_HINT}, such as --transcript-columns {names}",
    )


def _of_three(rows: Sequence[Sequence[str]]) -> TranscriptColumns | None:
    """Recognises LJSpeech, whose third column says the same as the second, and Piper, whose second names a speaker of
    several lines."""
    seconds, thirds = [row[1] for row in rows], [row[2] for row in rows]
    filled = [(second, third) for second, third in zip(seconds, thirds, strict=True) if second and third]
    if not any(thirds):
        return LJSPEECH
    if filled and sum(_shared(second, third) for second, third in filled) / len(filled) >= ALIKE:
        return LJSPEECH
    longer = sum(len(third.split()) - len(second.split()) for _, second, third in rows) / len(rows)
    # Names of speakers are shorter than texts, and fewer; what depends on a repeated sentence is as frequent as that.
    names = len(set(seconds))
    return PIPER if longer >= LONGER and names < min(len(rows), len(set(thirds))) else None


def _shared(text: str, normalised: str) -> float:
    """Returns the share of a text's words that its normalised form contains."""
    words, others = (set(re.findall(r"\w+", side.lower())) for side in (text, normalised))
    return len(words & others) / len(words) if words else 1.0


# --------------------------------------------------------------------------------------------------------------- times


def span_of(start: object, end: object, duration: object) -> tuple[float, float] | None:
    """Returns the first second of an utterance in its recording, and the end, which is infinite if neither an end nor
    a duration is given; None for the whole recording.

    Raises ValueError, with the fault as text, if they are no times, or disagree.
    """
    begin, stop, seconds = (_seconds(*pair) for pair in (("start", start), ("end", end), ("duration", duration)))
    if begin is not None and begin < 0:
        raise ValueError(f"begins at {begin:g} seconds, before its recording")
    seconds = seconds if (seconds, begin, stop) != (0, None, None) else None  # NeMo writes 0 for an unknown duration.
    begin = begin or 0.0
    if seconds is not None and stop is None:
        stop = begin + seconds
    if stop is None:
        return (begin, math.inf) if begin else None
    if stop <= begin:
        raise ValueError(f"begins at {begin:g} seconds and ends at {stop:g}")
    if seconds is not None and abs(stop - begin - seconds) > DISAGREEING_SECONDS:
        raise ValueError(f"{begin:g} to {stop:g} seconds are no duration of {seconds:g} seconds")
    return begin, stop


def _seconds(name: str, value: object) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = math.nan if isinstance(value, bool) else float(str(value).replace(",", "."))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ValueError(f"its {name} {str(value)[:20]!r} is no number of seconds")
    return seconds


# ------------------------------------------------------------------------------------------------------------- tables


def first_cells(line: str, separator: str) -> list[str]:
    """Returns the cells of a line that is read alone."""
    return (_by_csv(line, separator) if separator in QUOTED else None) or _plain(line, separator)


def records(
    lines: Sequence[str], separator: str, width: int, is_row: Callable[[Sequence[str]], bool]
) -> Iterator[tuple[int, list[str] | str]]:
    """Yields the number of the first line and the cells of each record of a table with `width` columns, or a fault.

    Between `|` and tabs, quotes are usually letters of the text, so that the rules of CSV hold where only they give the
    columns, or a quote is doubled. A quoted cell may have several lines, none of which `is_row` takes for a row: a
    quote that is not closed costs its own line alone.
    """
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        at += 1
        if not line.strip():
            continue
        cells: list[str] | str = _plain(line, separator)
        if '"' in line:
            by_rules = _by_csv(line, separator)
            is_literal = separator not in QUOTED and '""' not in line and _fits(cells, width)
            all_quoted = all(cell[:1] == cell[-1:] == '"' for cell in cells)
            if by_rules is None:
                cells, at = _over_lines(lines, at - 1, separator, width, is_row) or (cells, at)
                if separator in QUOTED and at == number:
                    cells = "a quote is not closed, or not doubled within the quotes"
            elif all_quoted or not is_literal:
                cells = by_rules
        yield number, cells


def _over_lines(
    lines: Sequence[str], first: int, separator: str, width: int, is_row: Callable[[Sequence[str]], bool]
) -> tuple[list[str], int] | None:
    """Returns the cells of a record of several lines, and the place after it."""
    for end in range(first + 1, min(first + MOST_LINES, len(lines))):
        if lines[end].count('"') % 2 == 0 and is_row(_plain(lines[end], separator)):
            return None
        cells = _by_csv("\n".join(lines[first : end + 1]), separator)
        if cells is not None and _fits(cells, width):
            return cells, end + 1
    return None


def _by_csv(record: str, separator: str) -> list[str] | None:
    """Returns the cells of a record by the rules of CSV, or None if its quotes break them."""
    try:
        (cells,) = csv.reader([record], delimiter=separator, strict=True, skipinitialspace=True)
    except (csv.Error, ValueError):
        return None
    return [cell.strip() for cell in cells]


def _plain(line: str, separator: str) -> list[str]:
    return [cell.strip() for cell in line.split(separator)]


def _fits(cells: Sequence[str], width: int) -> bool:
    """Returns True if a row has as many cells as the table, but for empty ones at its end."""
    return len(cells) >= width and not any(cells[width:])


# --------------------------------------------------------------------------------------------------------------- JSON


def holds_json(text: str) -> bool:
    """Returns True if a text begins as JSON does, whatever its file is called."""
    return bool(re.match(r'\s*(\{\s*["}]|\[\s*[\[{\]])', text))


def json_object(line: str) -> dict[str, Any] | None:
    """Returns the object of a text in JSON, which a comma may follow; None for anything else."""
    try:
        row = read_json(line.strip().rstrip(","))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def json_rows(text: str) -> list[tuple[str, Row]]:
    """Returns the objects of JSON lines, of a list, or the only one, each with its place."""
    try:
        content = read_json(text)
    except (ValueError, RecursionError):
        lines = [(f"line {number}", line) for number, line in enumerate(text.split("\n"), start=1)]
        rows = [(where, json_object(line)) for where, line in lines if line.strip() not in ("", "[", "]")]
    else:
        objects = content if isinstance(content, list) else [content]
        rows = [(f"entry {number}", row if isinstance(row, dict) else None) for number, row in enumerate(objects, 1)]
    return [(where, "not a JSON object, or one with a key twice" if row is None else row) for where, row in rows]
