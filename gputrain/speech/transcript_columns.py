"""Detects the columns of a transcript table. Imports no torch."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from gputrain.errors import UserError

TranscriptColumn = Literal["audio", "speaker", "text", "normalized", "start", "end", "duration", "other"]
TranscriptColumns = tuple[TranscriptColumn, ...]

LJSPEECH: TranscriptColumns = ("audio", "text", "normalized")
PIPER: TranscriptColumns = ("audio", "speaker", "text")
AUDIO_KEYS = ("audio", "audio_filepath", "audio_file", "audio_path", "wav", "file", "file_name", "path")
TEXT_KEYS = ("text", "transcript", "transcription", "sentence")
SPEAKER_KEYS = ("speaker", "speaker_name", "speaker_id")
START_KEYS = ("offset", "start", "start_time", "start_seconds", "start_sec", "start_s", "begin", "begin_time")
END_KEYS = ("end", "end_time", "end_seconds", "end_sec", "end_s", "stop", "stop_time")
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
}  # fmt: skip
ALIKE = 0.5  # minimum share of a text's words that its normalised form contains
REPEATED = 0.5  # minimum share of lines whose speaker occurs in another line
COLUMNS_HINT = (
    "use --transcript-columns audio,text,normalized or audio,speaker,text (also start, end, duration, and "
    "other for an ignored column)"
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


def text_keys_of(row: Iterable[str]) -> tuple[str, ...]:
    """Returns the keys of a JSON object that may have its text: the usual ones, then those that are names of columns of
    a table, of which the normalised form comes first."""
    named = {kind: [key for key in row if HEADINGS.get(_heading(key)) == kind] for kind in ("normalized", "text")}
    return (*TEXT_KEYS, *named["normalized"], *named["text"])


def speaker_keys_of(row: Iterable[str]) -> tuple[str, ...]:
    return (*SPEAKER_KEYS, *(key for key in row if HEADINGS.get(_heading(key)) == "speaker"))


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
    if count > 3 and not any(row[-1] for row in rows if len(row) == count):  # Every line ends with a separator.
        return columns_of(file, [row[:-1] for row in rows if len(row) == count])
    if count == 2:
        return ("audio", "text")
    if count != 3:
        what = "no line" if not rows else f"lines of {count} column{'s' if count > 1 else ''}"
        raise UserError(f"{file}: {what}, expected 2 or 3 with a separator between them", hint=COLUMNS_HINT)
    columns = _of_three([row for row in rows if len(row) == 3])
    if columns is None:
        raise UserError(f"{file}: its second column may hold texts or speakers", hint=COLUMNS_HINT)
    return columns


def _of_three(rows: Sequence[Sequence[str]]) -> TranscriptColumns | None:
    """Distinguishes LJSpeech, whose third column repeats the second, from Piper, whose second names a few speakers."""
    if not any(third for _, _, third in rows):
        return LJSPEECH
    whole = [(second, third) for _, second, third in rows if second and third]
    if not whole:
        return PIPER if any(third for _, _, third in rows) else LJSPEECH
    if sum(_shared(second, third) for second, third in whole) / len(whole) >= ALIKE:
        return LJSPEECH
    if len({second for second, _ in whole}) <= (1 - REPEATED) * len(whole):
        return PIPER
    if sum(" " in second for second, _ in whole) > len(whole) / 2:
        return LJSPEECH  # Speakers would not have so many distinct names.
    # Piper's first column names files as they are, LJSpeech's without their suffix.
    with_suffix = sum(bool(re.search(r"\.[A-Za-z]\w{1,3}$", first)) for first, _, _ in rows)
    return {len(rows): PIPER, 0: LJSPEECH}.get(with_suffix)


def _shared(text: str, normalised: str) -> float:
    """Returns the share of a text's words that its normalised form contains."""
    words, others = (set(re.findall(r"\w+", each.lower())) for each in (text, normalised))
    return len(words & others) / len(words) if words else 1.0
