"""Detects the columns of a transcript table. Imports no torch."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from gputrain.errors import UserError
from gputrain.fetch.datasets import UNUSABLE

TranscriptColumn = Literal[
    "audio", "speaker", "text", "normalized", "start", "end", "duration", "channel", "language", "split", "weight",
    "exclude", "include", "status", "other",
]  # fmt: skip
TranscriptColumns = tuple[TranscriptColumn, ...]

LJSPEECH: TranscriptColumns = ("audio", "text", "normalized")
PIPER: TranscriptColumns = ("audio", "speaker", "text")
AUDIO_KEYS = ("audio", "audio_filepath", "audio_file", "audio_path", "wav", "file", "file_name", "path")
TEXT_KEYS = ("text", "transcript", "transcription", "sentence")
SPEAKER_KEYS = ("speaker", "speaker_name", "speaker_id")
START_KEYS = (
    "offset", "start", "start_time", "start_seconds", "start_sec", "start_s", "begin", "begin_time", "begin_seconds",
    "begin_sec", "begin_s", "seg_start", "segment_start",
)  # fmt: skip
END_KEYS = (
    "end", "end_time", "end_seconds", "end_sec", "end_s", "stop", "stop_time", "stop_seconds", "stop_sec", "stop_s",
    "seg_end", "segment_end",
)  # fmt: skip
DURATION_KEYS = ("duration", "duration_seconds", "duration_sec", "duration_s")
IDENTIFIERS = ("id", "clip", "utterance_id", "utt_id")  # They name a recording where no other column does.
# Names of columns of a header, in any case and with blanks or hyphens for underscores.
HEADINGS: Mapping[str, TranscriptColumn] = {
    **dict.fromkeys((*AUDIO_KEYS, "wav_file", "wav_path", "wav_filename", "filename", "filepath"), "audio"),
    **dict.fromkeys((*IDENTIFIERS, "file_path", "recording", "audio_filename", "wav_name"), "audio"),
    **dict.fromkeys((*TEXT_KEYS, "raw_text", "raw_transcription", "utterance", "txt", "text_original"), "text"),
    **dict.fromkeys(("normalized", "normalised", "normalized_text", "normalised_text"), "normalized"),
    **dict.fromkeys(("normalized_transcription", "normalized_transcript", "text_normalized"), "normalized"),
    **dict.fromkeys((*SPEAKER_KEYS, "client_id", "voice"), "speaker"),
    **dict.fromkeys(START_KEYS, "start"), **dict.fromkeys(END_KEYS, "end"), **dict.fromkeys(DURATION_KEYS, "duration"),
    # They change what a line means: gputrain/speech/utterances.py honours or refuses them.
    **dict.fromkeys(("channel", "channel_selector", "channel_id"), "channel"),
    **dict.fromkeys(("language", "lang", "locale", "language_code", "lang_code", "language_id", "lang_id"), "language"),
    **dict.fromkeys(("split", "subset", "set", "partition"), "split"),
    **dict.fromkeys(("weight", "sample_weight", "sampling_weight", "num_repeats", "repeats"), "weight"),
    **dict.fromkeys(UNUSABLE, "exclude"),
    **dict.fromkeys(("is_valid", "valid", "keep", "include", "accepted", "usable", "approved"), "include"),
    **dict.fromkeys(("status", "review_status", "answer", "verdict", "decision"), "status"),
}  # fmt: skip
MEANINGS: tuple[TranscriptColumn, ...] = ("channel", "language", "split", "weight", "exclude", "include", "status")
ALIKE = 0.5  # minimum share of a text's words that its normalised form contains
LONGER = 1.2  # words by which texts are longer than the names of speakers, at least
SIGNS = ("|", "a tab", ";", "a comma")
LENGTH = re.compile(r"\d+[.,:]\d+ ?(s|sec|seconds)?")  # a text that is a length
COLUMNS_HINT = (
    "name each column, in order: audio, text, normalized, speaker, start, end, duration, channel, language, split, or "
    "other for an ignored one"
)
DISAGREEING_SECONDS = 0.1  # accepted difference between an end and a duration


def header_of(cells: Sequence[str]) -> TranscriptColumns | None:
    """Returns the columns named by a header line, or None if it is not a header. The first of equal columns is used,
    but a path rather than an identifier."""
    names = [_heading(cell) for cell in cells]
    has_path = any(HEADINGS.get(name) == "audio" and name not in IDENTIFIERS for name in names)
    named: list[TranscriptColumn] = []
    for name in names:
        kind = "other" if has_path and name in IDENTIFIERS else HEADINGS.get(name, "other")
        named.append("other" if kind in named else kind)
    if "normalized" in named and "text" not in named:
        named[named.index("normalized")] = "text"
    return tuple(named) if {"audio", "text"} <= set(named) else None


@lru_cache(4096)
def role_of(name: str) -> TranscriptColumn:
    """Returns what a column or key of a name holds."""
    return HEADINGS.get(_heading(name), "other")


def text_keys_of(row: Iterable[str]) -> tuple[str, ...]:
    """Returns the keys of a JSON object that may have its text: the usual ones, then those that are names of columns of
    a table, of which the normalised form comes first."""
    named = {kind: [key for key in row if role_of(key) == kind] for kind in ("normalized", "text")}
    return (*TEXT_KEYS, *named["normalized"], *named["text"])


def speaker_keys_of(row: Iterable[str]) -> tuple[str, ...]:
    return (*SPEAKER_KEYS, *(key for key in row if role_of(key) == "speaker"))


def _heading(name: str) -> str:
    return re.sub(r"[ -]", "_", name.strip('" ').lower())


def check_units(where: str, names: Sequence[str]) -> None:
    """Raises UserError if columns or keys give times in another unit than seconds."""
    for name in names:
        time = re.fullmatch(r"(\w+?)[_\[(]+(ms|msec|milliseconds|samples|frames)[\])]*", _heading(name))
        if time and HEADINGS.get(time[1]) in ("start", "end", "duration"):
            raise UserError(
                f"{where}: {name} is not in seconds", hint="give start, end or duration in seconds, or drop the column"
            )


def span_of(start: object, end: object, duration: object) -> tuple[float, float] | None:
    """Returns the first second of an utterance in its recording, and the end, which is infinite if neither an end nor
    a duration is given; None for the whole recording.

    Raises ValueError, with the fault as text, if they are no times, or disagree.
    """
    if all(one is None or (isinstance(one, float) and math.isnan(one)) for one in (start, end, duration)):
        return None  # Python writes NaN for what is missing in a table.
    begin, stop, seconds = (_seconds(*one) for one in (("start", start), ("end", end), ("duration", duration)))
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


def columns_of(file: Path, rows: Sequence[Sequence[str]]) -> TranscriptColumns:
    """Detects the columns from most lines. Raises UserError if they are ambiguous."""
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
    raise UserError(
        f"{file}: without a header, nothing tells what its {count} columns hold, such as {example}",
        hint=f"{COLUMNS_HINT}, such as --transcript-columns {','.join(_suggested(rows))}",
    )


def _suggested(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns columns for an example: the one with the most words has the texts."""
    words = [sum(len(row[at].split()) for row in rows if not LENGTH.fullmatch(row[at])) for at in range(len(rows[0]))]
    text = max(range(1, len(words)), key=lambda at: words[at])
    return ["audio", *("text" if at == text else "other" for at in range(1, len(words)))]


def _of_three(rows: Sequence[Sequence[str]]) -> TranscriptColumns | None:
    """Recognises LJSpeech, whose third column says the same as the second, Piper, whose second names a speaker of
    several lines, and Mimic's recordings, whose third is the number of letters of the second."""
    seconds, thirds = [row[1] for row in rows], [row[2] for row in rows]
    whole = [(second, third) for second, third in zip(seconds, thirds, strict=True) if second and third]
    if not any(thirds):
        return LJSPEECH
    if all(third == str(len(second)) for second, third in whole) and whole:
        return ("audio", "text", "other")
    if whole and sum(_shared(second, third) for second, third in whole) / len(whole) >= ALIKE:
        return LJSPEECH
    longer = sum(len(third.split()) - len(second.split()) for _, second, third in rows) / len(rows)
    # Names of speakers are shorter than texts, and fewer; what depends on a repeated sentence is as frequent as that.
    names = len(set(seconds))
    return PIPER if longer >= LONGER and names < min(len(rows), len(set(thirds))) else None


def _shared(text: str, normalised: str) -> float:
    """Returns the share of a text's words that its normalised form contains."""
    words, others = (set(re.findall(r"\w+", each.lower())) for each in (text, normalised))
    return len(words & others) / len(words) if words else 1.0
