"""Reads subtitles next to long recordings, as people and other programs write them, and writes words with times as
subtitles: SubRip (.srt) and WebVTT (.vtt)."""

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import PurePosixPath
from typing import NamedTuple

SUBTITLES = (".srt", ".vtt")  # The first is read if both are there.
OVERLAP_SECONDS = 0.1  # accepted overlap of neighbours
JOINED_SECONDS = 1.0  # longest gap between parts of a sentence
SENTENCE_END = re.compile(r"[.!?…。！？؟।]+[\"'»”’)\]]*$")
_TIME = r"(?:(\d{1,3}):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}(?:\s.*)?")
_VOICE = re.compile(r"<v(?:\.[^\s>]*)?\s+([^>]+)>")
_WORD_TIME = re.compile(r"<\d{1,2}:\d{2}[:.]\d")  # Captions by machines repeat lines, and time each word.
_TAG = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")
_SOUND = re.compile(r"\[[^\[\]]*\]|\([^()]*\)|♪+")  # Descriptions of sounds are not spoken.


_LABEL = re.compile(r"(-?\d+(?:[.,]\d+)?)\t(-?\d+(?:[.,]\d+)?)(?:\t(.*))?")
_FREQUENCIES = re.compile(r"\\\t-?\d.*")  # Audacity's line below a label of a range of frequencies.
# Forms that are not read: a TextGrid of Praat, JSON, times in samples (TIMIT) or 100 ns (HTK); and clocks in lines.
_OTHER = re.compile(r'\s*(File type = "ooTextFile"|ooTextFile|\{\s*["}]|\[\s*[\[{\]]|0[ \t]+\d{3,}\s|start\tend\ttext)')
_CLOCK = re.compile(r"(?:^|\t)\s*[\[(]?\d{1,3}:\d{2}(:\d{2})?([.,:]\d{1,3})?([\])\s-]|$)")
LABELS, CUES, OTHER = "a label track", "subtitles", "a form with times that is not read"


class SubtitleFault(NamedTuple):
    line: int
    detail: str


@dataclass(frozen=True)
class Subtitle:
    """A subtitle, or several that were joined. Times are in seconds from the beginning of the recording."""

    begin: float
    end: float
    text: str
    line: int  # Line of its times in the file.
    speaker: str = ""


def parse_subtitles(content: str) -> tuple[list[Subtitle], list[SubtitleFault]]:
    """Returns the subtitles of a file's content, and its faults: lines of times that cannot be read, subtitles without
    a duration, and those without words."""
    cues, faults = list[Subtitle](), list[SubtitleFault]()
    is_rolling = bool(_WORD_TIME.search(content))
    shown: list[str] = []
    lines = content.split("\n")
    starts = [place for place, line in enumerate(lines) if "-->" in line]
    for start, following in pairwise([*starts, len(lines)]):
        written = list(takewhile(bool, lines[start + 1 : following]))
        if written and start + 1 + len(written) == following < len(lines) and written[-1].strip().isdigit():
            written.pop()  # It is the number of the next subtitle, without an empty line before it.
        number, times = start + 1, _TIMES.fullmatch(lines[start])
        if times is None:
            faults.append(SubtitleFault(number, f"no times in {lines[start].strip()[:60]!r}"))
            continue
        begin, end = _seconds(times.groups()[:4]), _seconds(times.groups()[4:])
        plain = [_plain(line) for line in written]
        fresh = [line for line in plain if line not in shown] if is_rolling else plain
        shown = [line for line in plain if line]
        text, raw = (" ".join(" ".join(part).split()) for part in (fresh, written))
        if end <= begin:
            faults.append(SubtitleFault(number, f"ends at {end:.2f} seconds, and begins at {begin:.2f}"))
        elif text:
            voice = _VOICE.search(raw)
            cues.append(Subtitle(begin, end, text, number, voice[1].strip() if voice else ""))
        elif not is_rolling:
            faults.append(SubtitleFault(number, f"no words in {raw[:60]!r}"))
    return cues, faults


def form_of(content: str) -> str:
    """Returns what a text file holds if it is no plain text: LABELS, CUES or OTHER; "" for plain text."""
    lines = [line for line in content.split("\n") if line.strip()]
    if lines and all(_LABEL.fullmatch(line) or _FREQUENCIES.fullmatch(line) for line in lines):
        return LABELS
    if any(_TIMES.fullmatch(line) for line in lines):
        return CUES
    timed = sum(bool(_CLOCK.search(line)) for line in lines)
    return OTHER if _OTHER.match(content) or (timed > 1 and 3 * timed >= len(lines)) else ""


def parse_labels(content: str) -> tuple[list[Subtitle], list[SubtitleFault]]:
    """Returns the labels of a track as Audacity exports it, and its faults: labels of a point, and those without words.
    A line is the start and the end in seconds, and the text, separated by tabs."""
    cues, faults = list[Subtitle](), list[SubtitleFault]()
    for number, line in enumerate(content.split("\n"), start=1):
        if label := _LABEL.fullmatch(line):
            begin, end = (float(time.replace(",", ".")) for time in label.groups()[:2])
            if end <= begin:
                faults.append(SubtitleFault(number, f"a point at {begin:.2f} seconds, without an end"))
            elif text := " ".join((label[3] or "").split()):
                cues.append(Subtitle(begin, end, text, number))
            else:
                faults.append(SubtitleFault(number, f"no words from {begin:.2f} to {end:.2f} seconds"))
    return cues, faults


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, thousandths = parts
    whole = 3600 * int(hours or 0) + 60 * int(minutes or 0) + int(seconds or 0)
    return (1000 * whole + int((thousandths or "0").ljust(3, "0"))) / 1000


def _plain(line: str) -> str:
    """Returns a line without tags, entities and descriptions of sounds."""
    return " ".join(_SOUND.sub(" ", html.unescape(_TAG.sub("", line))).split())


def split_overlapping(cues: Sequence[Subtitle]) -> tuple[list[Subtitle], list[SubtitleFault]]:
    """Returns the subtitles in the order of their times, without those that overlap others."""
    ordered = sorted(cues, key=lambda cue: (cue.begin, cue.end))
    clash: dict[int, SubtitleFault] = {}
    latest: int | None = None  # The subtitle that ends last among those before.
    for place, cue in enumerate(ordered):
        if latest is not None:
            other = ordered[latest]
            if cue.begin < other.end - OVERLAP_SECONDS:
                both = f"until {other.end:.2f} seconds, and line {cue.line} begins at {cue.begin:.2f}"
                clash.setdefault(latest, SubtitleFault(other.line, f"lasts {both}"))
                clash.setdefault(place, SubtitleFault(cue.line, f"line {other.line} lasts {both}"))
        if latest is None or cue.end > ordered[latest].end:
            latest = place
    return [cue for place, cue in enumerate(ordered) if place not in clash], list(clash.values())


def join_sentences(cues: Sequence[Subtitle], max_seconds: float) -> list[Subtitle]:
    """Joins neighbours of one speaker until a sentence ends, a longer gap follows, or they would be too long."""
    joined: list[Subtitle] = []
    for cue in cues:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.speaker == cue.speaker
            and cue.begin - last.end <= JOINED_SECONDS
            and cue.end - last.begin <= max_seconds
            and not SENTENCE_END.search(last.text)
        ):
            joined[-1] = replace(last, end=max(last.end, cue.end), text=f"{last.text} {cue.text}")
        else:
            joined.append(cue)
    return joined


def files_by_recording(paths: Sequence[str], files: Sequence[str], language: str) -> dict[str, list[str]]:
    """Returns the files of each recording that has any, of one kind: NAME.txt for NAME.wav, NAME.srt or
    NAME.LANGUAGE.srt, or one of a name that differs in capitals if no recording has it.

    Subtitles without a language come before those with one, of which the given language comes first. Several files are
    returned only if their languages differ and none is the given one.
    """
    known: dict[str, dict[str, str]] = {}  # Files by their name without suffixes, and by their language.
    for file in sorted(files, key=lambda name: PurePosixPath(name).suffix.lower()):
        bare = PurePosixPath(file).with_suffix("")
        known.setdefault(bare.as_posix(), {}).setdefault("", file)
        if bare.suffix and file.lower().endswith(SUBTITLES):
            known.setdefault(bare.with_suffix("").as_posix(), {}).setdefault(bare.suffix[1:].lower(), file)
    stems = {path: PurePosixPath(path).with_suffix("").as_posix() for path in paths}
    folded: dict[str, list[str]] = {}
    for stem in known.keys() - set(stems.values()):
        folded.setdefault(stem.casefold(), []).append(stem)
    found: dict[str, list[str]] = {}
    for path, stem in stems.items():
        others = folded.get(stem.casefold(), [])
        by_tag = known.get(stem) or (known[others[0]] if len(others) == 1 else {})
        chosen = next((by_tag[tag] for tag in ("", language.lower()) if tag in by_tag), None)
        if by_tag:
            found[path] = [chosen] if chosen else sorted(by_tag.values())
    return found


# -------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class TimedWord:
    """A word of a transcript, with its times in seconds."""

    word: str
    start: float
    end: float


LINE_CHARACTERS, CUE_LINES = 42, 2  # Usual limits of subtitles, among them Netflix's.
CUE_SECONDS = 7.0  # longest time that a cue is shown
LEAST_SECONDS = 1.0  # shortest time, if the next cue leaves it
PAUSE_SECONDS = 0.8  # A pause of this length ends a cue.


class SubtitleCue(NamedTuple):
    start: float  # seconds
    end: float
    lines: list[str]


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
        cues.append(SubtitleCue(begin, end, lines_of(group)))
    return cues


def lines_of(words: Sequence[TimedWord]) -> list[str]:
    """Breaks words into lines of at most LINE_CHARACTERS; a longer word is a line of its own."""
    text = " ".join(word.word for word in words)
    return textwrap.wrap(text, LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def srt(words: Sequence[TimedWord]) -> str:
    """Returns subtitles as a SubRip file."""
    return "".join(f"{number}\n{_written(cue, ',')}\n" for number, cue in enumerate(cues_of(words), start=1))


def vtt(words: Sequence[TimedWord]) -> str:
    """Returns subtitles as a WebVTT file."""
    return "WEBVTT\n" + "".join(f"\n{_written(cue, '.')}" for cue in cues_of(words))


def _written(cue: SubtitleCue, point: str) -> str:
    return "\n".join((f"{_clock(cue.start, point)} --> {_clock(cue.end, point)}", *cue.lines, ""))


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
