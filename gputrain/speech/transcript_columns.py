"""Detects the columns of a transcript table. Imports no torch."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from gputrain.errors import UserError

TranscriptColumn = Literal["audio", "speaker", "text", "normalized", "other"]
TranscriptColumns = tuple[TranscriptColumn, ...]

LJSPEECH: TranscriptColumns = ("audio", "text", "normalized")
PIPER: TranscriptColumns = ("audio", "speaker", "text")
HEADINGS: Mapping[str, TranscriptColumn] = {
    **dict.fromkeys(("id", "audio", "audio_file", "audio_filepath", "audio_path", "wav", "wav_file"), "audio"),
    **dict.fromkeys(("file", "filename", "file_name", "file_path", "path", "clip", "utterance_id"), "audio"),
    **dict.fromkeys(("text", "transcript", "transcription", "sentence", "raw_text"), "text"),
    **dict.fromkeys(("normalized", "normalised", "normalized_text", "normalised_text"), "normalized"),
    **dict.fromkeys(("normalized_transcription", "normalized_transcript"), "normalized"),
    **dict.fromkeys(("speaker", "speaker_name", "speaker_id", "client_id", "voice"), "speaker"),
}  # fmt: skip
ALIKE = 0.5  # minimum share of a text's words that its normalised form contains
REPEATED = 0.5  # minimum share of lines whose speaker occurs in another line
COLUMNS_HINT = "use --transcript-columns audio,text,normalized or audio,speaker,text (other: an ignored column)"


def header_of(cells: Sequence[str]) -> TranscriptColumns | None:
    """Returns the columns named by a header line, or None if it is not a header. The first of equal columns is used."""
    named: list[TranscriptColumn] = []
    for cell in cells:
        kind = HEADINGS.get(cell.strip('" ').lower().replace(" ", "_"), "other")
        named.append("other" if kind in named else kind)
    if "normalized" in named and "text" not in named:
        named[named.index("normalized")] = "text"
    return tuple(named) if {"audio", "text"} <= set(named) else None


def columns_of(file: Path, rows: Sequence[Sequence[str]]) -> TranscriptColumns:
    """Detects the columns from most lines. Raises UserError if they are ambiguous."""
    count = Counter(map(len, rows)).most_common(1)[0][0] if rows else 0
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
