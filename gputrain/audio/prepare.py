"""Finds and checks the recordings of a folder. Sources are only read. Shape suffix: T samples."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gputrain.audio.io import BLOCK, FFMPEG_SUFFIXES, Samples, read_sound, resample, trim
from gputrain.engine.data import FULL_SCALE, RefusedItem, fingerprint, read_rows
from gputrain.errors import UserError

SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".w64", ".caf"}
OTHER_SUFFIXES = FFMPEG_SUFFIXES  # Without ffmpeg, such files are listed as unreadable.
QUARANTINE = "quarantine.jsonl"
SILENCE = 1e-3  # Peak below which a recording is silent: 60 dB below full scale.
NEAR_FULL_SCALE = (FULL_SCALE - 1) / FULL_SCALE
HEADROOM = 0.99  # Highest peak after loudness normalisation, relative to full scale.


RefusalReason = Literal[
    "malformed", "no sound", "ambiguous sound", "no transcript", "doubled transcript", "no speaker", "unreadable",
    "duplicate", "silent", "clipped", "unknown symbols", "too short", "too long", "fewer frames than symbols",
    "odd speaking rate", "outside the recording", "overlapping subtitles", "text differs",
]  # fmt: skip
FORMER_REASONS: dict[str, RefusalReason] = {"foreign symbols": "unknown symbols"}  # Those of earlier versions.


@dataclass(frozen=True)
class RefusedRecording:
    """An item that is left out, with the reason. `path` is that of a file, relative to the folder that was read, or
    names a line of its transcripts."""

    path: str
    reason: RefusalReason
    detail: str


def rms(wave_T: Samples) -> float:
    """Returns the root mean square of a wave, summed in float64 without a copy of the whole."""
    return math.sqrt(sum(float(np.square(block_T, dtype=np.float64).sum()) for block_T in blocks(wave_T)) / len(wave_T))


def blocks(wave_T: Samples) -> Iterator[Samples]:
    """Yields a wave in pieces, so that computing with it needs no copy of the whole."""
    for begin in range(0, len(wave_T), BLOCK):
        yield wave_T[begin : begin + BLOCK]


@dataclass(frozen=True)
class PrepareReport:
    """Result of a preparation: recordings `made` by this run or `kept` from earlier ones, and those left out."""

    input_dir: str
    output_dir: str
    made: int
    kept: int
    hours: float
    ignored: dict[str, int]  # Number of other files, by suffix.
    refused: list[RefusedRecording]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class DecodedRecording(NamedTuple):
    """A recording ready to be stored, with facts about its source."""

    wave_T: Samples
    source_hz: int
    clipped_share: float  # Share of source samples at full scale.


def decode_recording(
    folder: Path, path: str, sampling_rate: int, *, trim_db: float = 0.0, loudness_db: float = 0.0
) -> DecodedRecording | RefusedRecording:
    """Reads `path` in `folder`, resamples it, trims both ends and normalises its loudness; 0 dB switches a step off.

    Returns the reason for leaving it out if it cannot be read or is silent.
    """
    try:
        wave_T, source_hz = read_sound(folder / path)
    except UserError as error:
        return RefusedRecording(path, "unreadable", error.message.removeprefix(f"{folder / path}: "))
    clipped = clipped_share(wave_T)
    wave_T = resample(wave_T, source_hz, sampling_rate)  # The source, half a gigabyte an hour, is released here.
    peak = peak_of(wave_T)
    if peak < SILENCE:
        return RefusedRecording(path, "silent", f"its peak is {peak:.2g} of full scale")
    if trim_db:
        wave_T = trim(wave_T, trim_db)
    if loudness_db:
        wave_T = wave_T * min(10 ** (loudness_db / 20) / rms(wave_T), HEADROOM / peak)
    return DecodedRecording(wave_T, source_hz, clipped)


def clipped_share(wave_T: Samples) -> float:
    """Returns the share of samples at full scale."""
    return int((wave_T >= NEAR_FULL_SCALE).sum() + (wave_T <= -NEAR_FULL_SCALE).sum()) / len(wave_T)


def peak_of(wave_T: Samples) -> float:
    """Returns the largest magnitude of a wave without a copy of it."""
    return max(float(wave_T.max()), -float(wave_T.min()))


def check_input_folder(folder: Path) -> None:
    if not folder.is_dir():
        fault = "is a file, expected a folder" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {fault}", hint="name the folder that holds the recordings")


def check_folders_apart(input_dir: Path, output_dir: Path) -> None:
    """Raises UserError if one folder contains the other."""
    read, written = input_dir.resolve(), output_dir.resolve()
    if read == written or read in written.parents or written in read.parents:
        raise UserError(
            f"{input_dir} and {output_dir}: one contains the other, so prepared sound would mix with sources",
            hint="choose an output folder outside the input folder",
        )


def scan(folder: Path) -> tuple[list[str], Counter[str]]:
    """Returns the sorted recordings of a tree, found by their suffixes, and counts of other files by suffix. Hidden
    files are ignored; links are followed, each folder once."""
    found, ignored = [], Counter[str]()
    seen = {os.path.realpath(folder)}
    for at, folders, names in os.walk(folder, followlinks=True):
        visible = {os.path.realpath(Path(at, name)): name for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for place, name in visible.items() if place not in seen]
        seen |= visible.keys()
        for name in names:
            path = Path(at, name)
            if name.startswith(".") or path.suffix.lower() not in SUFFIXES | OTHER_SUFFIXES:
                ignored["hidden" if name.startswith(".") else path.suffix.lower() or "none"] += 1
            else:
                found.append(path.relative_to(folder).as_posix())
    return sorted(found), ignored


def no_recording(folder: Path, ignored: Counter[str]) -> UserError:
    """Returns the error for a folder without recordings, which lists the suffixes of other files."""
    others = ", ".join(f"{count} {suffix}" for suffix, count in ignored.most_common(5))
    return UserError(
        f"{folder}: no recording in it{f', but other files: {others}' if others else ''}",
        hint=f"looked for {', '.join(sorted(SUFFIXES))}, and with ffmpeg {', '.join(sorted(OTHER_SUFFIXES))}",
    )


def faults_of(refused: Iterable[RefusedItem]) -> str:
    """Returns as text the number of files left out for each reason, and the first file with its fault."""
    refused = list(refused)
    counts = Counter(refusal.reason for refusal in refused).most_common(5)
    first = f"; {refused[0].path}: {refused[0].detail}" if refused else ""
    return ", ".join(f"{count} {reason}" for reason, count in counts) + first


def fingerprints(folder: Path, paths: Iterable[str], refused: list[RefusedRecording]) -> dict[str, str]:
    """Returns fingerprints by path; unreadable files and duplicates of earlier files are added to `refused`."""
    firsts: dict[str, str] = {}
    found: dict[str, str] = {}
    for path in paths:
        try:
            content = fingerprint(folder / path)
        except OSError as error:
            refused.append(RefusedRecording(path, "unreadable", why_unreadable(folder / path, error)))
            continue
        if (first := firsts.setdefault(content, path)) == path:
            found[path] = content
        else:
            refused.append(RefusedRecording(path, "duplicate", f"has the content of {first}"))
    return found


def read_quarantine(folder: Path) -> list[RefusedRecording]:
    """Returns the items that the preparation of a store left out."""
    path = folder / QUARANTINE
    rows = read_rows(path, ("path", "reason", "detail")) if path.is_file() else []
    return [RefusedRecording(**{**row, "reason": FORMER_REASONS.get(row["reason"], row["reason"])}) for row in rows]


def why_unreadable(path: Path, error: OSError) -> str:
    """Returns the cause as text; for a broken link, its target."""
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which is not there"
    return error.strerror or str(error)
