"""Writes words with times as subtitles: SubRip (srt) and WebVTT (vtt)."""

from collections.abc import Sequence
from dataclasses import dataclass

from gputrain.asr.decode import TimedWord

LINE_CHARACTERS, CUE_LINES = 42, 2  # Usual limits of subtitles, among them Netflix's.
CUE_SECONDS = 7.0  # longest time that a cue is shown
LEAST_SECONDS = 1.0  # shortest time, if the next cue leaves it
PAUSE_SECONDS = 0.8  # A pause of this length ends a cue.


@dataclass(frozen=True)
class SubtitleCue:
    start: float  # seconds
    end: float
    lines: tuple[str, ...]


def cues_of(words: Sequence[TimedWord]) -> list[SubtitleCue]:
    """Groups words to cues of at most CUE_LINES lines and CUE_SECONDS, which end at pauses."""
    groups: list[list[TimedWord]] = []
    for word in words:
        group = groups[-1] if groups else []
        fits = group and word.start - group[-1].end < PAUSE_SECONDS and word.end - group[0].start <= CUE_SECONDS
        if fits and len(lines_of([*group, word])) <= CUE_LINES:
            group.append(word)
        else:
            groups.append([word])
    cues = []
    for at, group in enumerate(groups):
        begin, end = group[0].start, max(group[-1].end, group[0].start + LEAST_SECONDS)
        if at + 1 < len(groups):
            end = max(group[-1].end, min(end, groups[at + 1][0].start))
        cues.append(SubtitleCue(begin, end, tuple(lines_of(group))))
    return cues


def lines_of(words: Sequence[TimedWord]) -> list[str]:
    """Breaks words into lines of at most LINE_CHARACTERS; a longer word is a line of its own."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word.word) <= LINE_CHARACTERS:
            lines[-1] += f" {word.word}"
        else:
            lines.append(word.word)
    return lines


def srt(words: Sequence[TimedWord]) -> str:
    """Returns subtitles as a SubRip file."""
    return "".join(
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{_joined(cue)}\n\n"
        for number, cue in enumerate(cues_of(words), start=1)
    )


def vtt(words: Sequence[TimedWord]) -> str:
    """Returns subtitles as a WebVTT file."""
    cues = "".join(f"\n{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{_joined(cue)}\n" for cue in cues_of(words))
    return f"WEBVTT\n{cues}"


def _joined(cue: SubtitleCue) -> str:
    return "\n".join(cue.lines)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
