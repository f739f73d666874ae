"""Finds and checks the recordings of a folder. Sources are only read. Shape suffix: T samples."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gputrain.audio.io import BLOCK, FFMPEG_SUFFIXES, Samples, read_sound, resample, trim
from gputrain.engine.data import FULL_SCALE, fingerprint
from gputrain.engine.preparation import (
    PrepareReport,
    RefusedItem,
    SourceTree,
    check_input_folder,
    find_duplicates,
    scan,
    source_files,
    why_unreadable,
)
from gputrain.errors import UserError

SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3", ".aif", ".aiff", ".au", ".w64", ".caf"}
OTHER_SUFFIXES = FFMPEG_SUFFIXES  # Without ffmpeg, such files are listed as unreadable.
SILENCE = 1e-3  # Peak below which a recording is silent: 60 dB below full scale.
NEAR_FULL_SCALE = (FULL_SCALE - 1) / FULL_SCALE
FRAME_SECONDS = 0.01  # Window of the measurement of loudness.
HEADROOM = 0.99  # Highest peak after loudness normalisation, relative to full scale.


RefusalReason = Literal[
    "malformed", "no sound", "ambiguous sound", "no transcript", "doubled transcript", "no speaker", "unreadable",
    "duplicate", "silent", "clipped", "unknown symbols", "too short", "too long", "fewer frames than symbols",
    "odd speaking rate", "outside the recording", "overlapping subtitles", "text differs",
]  # fmt: skip


def rms(wave_T: Samples) -> float:
    """Returns the root mean square of a wave, summed in float64 without a copy of the whole."""
    return math.sqrt(sum(float(np.square(block_T, dtype=np.float64).sum()) for block_T in blocks(wave_T)) / len(wave_T))


def blocks(wave_T: Samples) -> Iterator[Samples]:
    """Yields a wave in pieces, so that computing with it needs no copy of the whole."""
    for begin in range(0, len(wave_T), BLOCK):
        yield wave_T[begin : begin + BLOCK]


@dataclass(frozen=True, kw_only=True)
class SoundPrepareReport(PrepareReport):
    hours: float


class DecodedRecording(NamedTuple):
    """A recording ready to be stored, with facts about its source."""

    wave_T: Samples
    source_hz: int
    clipped_share: float  # Share of source samples at full scale.
    remark: str  # What was unusual about its scale or channels, if anything.


class LoudFrames(NamedTuple):
    """Frames of a wave that are not a pause."""

    hop: int  # Samples of a frame.
    frames: int  # All frames of the wave.
    loud: npt.NDArray[np.int64]  # Numbers of the loud ones.


def decode_recording(
    folder: Path, path: str, sampling_rate: int | None = None, *, trim_db: float = 0.0, loudness_db: float = 0.0
) -> DecodedRecording | RefusedItem:
    """Reads `path` in `folder`, resamples it, trims both ends and normalises its loudness; None and 0 dB switch a step
    off.

    Returns the reason for leaving it out if it cannot be read or is silent.
    """
    try:
        wave_T, source_hz = read_sound(folder / path, remarks := [])
    except UserError as error:
        return RefusedItem(path, "unreadable", error.message.removeprefix(f"{folder / path}: "))
    clipped = clipped_share(wave_T)
    # The source, half a gigabyte an hour, is released here.
    wave_T = resample(wave_T, source_hz, sampling_rate or source_hz)
    peak = peak_of(wave_T)
    if peak < SILENCE:
        return RefusedItem(path, "silent", f"its peak is {peak:.2g} of full scale")
    if trim_db:
        wave_T = trim(wave_T, trim_db)
    if loudness_db:
        wave_T = wave_T * min(10 ** (loudness_db / 20) / rms(wave_T), HEADROOM / peak)
    return DecodedRecording(wave_T, source_hz, clipped, "; ".join(remarks))


def remarks_on(recordings: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a sentence about recordings that were changed as they were read, from paths and remarks; or none."""
    changed = [f"{path}: {remark}" for path, remark in recordings if remark]
    if not changed:
        return []
    more = f"; and {len(changed) - 2} more" if len(changed) > 2 else ""
    are = "recording is" if len(changed) == 1 else "recordings are"
    return [f"{len(changed)} {are} not stored as they were recorded: {'; '.join(changed[:2])}{more}"]


def clipped_share(wave_T: Samples) -> float:
    """Returns the share of samples at full scale."""
    return int((wave_T >= NEAR_FULL_SCALE).sum() + (wave_T <= -NEAR_FULL_SCALE).sum()) / len(wave_T)


def peak_of(wave_T: Samples) -> float:
    """Returns the largest magnitude of a wave without a copy of it."""
    return max(float(wave_T.max()), -float(wave_T.min()))


def loud_frames(wave_T: Samples, rate_hz: int, below_db: float) -> LoudFrames:
    """Returns the frames of FRAME_SECONDS whose power is at most `below_db` below that of the loudest."""
    hop = max(1, min(round(FRAME_SECONDS * rate_hz), len(wave_T)))
    frames_FT = wave_T[: len(wave_T) // hop * hop].reshape(-1, hop)
    power_F = np.einsum("ft,ft->f", frames_FT, frames_FT)
    return LoudFrames(hop, len(power_F), np.flatnonzero(power_F > 10 ** (-below_db / 10) * power_F.max(initial=0.0)))


def scan_recordings(folder: Path, *, may_be_empty: bool = False) -> SourceTree:
    """Finds the recordings of a folder tree by their suffixes. Raises UserError if the folder is missing, or holds no
    recording."""
    check_input_folder(folder, "recordings")
    tree = scan(folder, SUFFIXES | OTHER_SUFFIXES)
    if not tree.paths and not may_be_empty:
        others = ", ".join(f"{count} {suffix}" for suffix, count in Counter(tree.ignored).most_common(5))
        raise UserError(
            f"{folder}: no recording in it{f', but other files: {others}' if others else ''}",
            hint=f"looked for {', '.join(sorted(SUFFIXES))}, and with ffmpeg {', '.join(sorted(OTHER_SUFFIXES))}",
        )
    return tree


def fingerprints(folder: Path, paths: Iterable[str], refused: list[RefusedItem]) -> dict[str, str]:
    """Returns fingerprints by path; unreadable files and duplicates of earlier files are added to `refused`."""
    found: dict[str, str] = {}
    files = source_files(folder, paths, refused)
    for file in files:
        try:
            found[file.path] = fingerprint(folder / file.path)
        except OSError as error:
            refused.append(RefusedItem(file.path, "unreadable", why_unreadable(folder / file.path, error)))
    repeats = find_duplicates(folder, [file for file in files if file.path in found], found)
    refused += repeats.values()
    return {path: content for path, content in found.items() if path not in repeats}
