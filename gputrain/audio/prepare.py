"""Finds and checks the recordings of a folder. Sources are only read. Shape suffix: T samples."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gputrain.audio.io import BLOCK, Samples, read_sound, resample, trim
from gputrain.data_in.containers import FFMPEG_SOUNDS, READ, SOUNDS, hint_of_others
from gputrain.data_in.preparation import (
    Companions,
    PrepareReport,
    RefusedItem,
    SourceTree,
    check_input_folder,
    find_duplicates,
    format_counts,
    scan,
    source_files,
    why_unreadable,
)
from gputrain.data_in.split import fingerprint
from gputrain.errors import UserError
from gputrain.files import FULL_SCALE
from gputrain.formatting import counted

SILENCE = 1e-3  # Peak below which a recording is silent: 60 dB below full scale.
NEAR_FULL_SCALE = (FULL_SCALE - 1) / FULL_SCALE
FRAME_SECONDS = 0.01  # Window of the measurement of loudness.
BAND_HZ = 250.0  # Width of the bands in which the spectrum is looked at.
SPECTRUM_SAMPLES = 2048  # Samples of a spectrum.
SPECTRUM_SECONDS = 30.0  # Length of the middle part of a recording whose spectrum is looked at.
EMPTY_DB = -112.0  # Power of an empty band, relative to full scale: 8 dB above that of rounding to 16 bits.
EDGE_DB = 20.0  # Least step of the spectrum from the bands below an edge to all bands above it.
# Lowest edge: that of telephone speech. Below, spectra of hum, of a constant offset and of low notes fall as steeply.
LOWEST_EDGE_HZ = 3000.0
NARROW = 0.8  # Share of the usual bandwidth, half the sampling rate, below which treble is missing.
USUAL_RATES = (8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000)  # Hz
HEADROOM = 0.99  # Highest peak after loudness normalisation, relative to full scale.


RefusalReason = Literal[
    "malformed", "no sound", "ambiguous sound", "no transcript", "doubled transcript", "no speaker", "unreadable",
    "duplicate", "silent", "clipped", "unknown symbols", "too short", "too long", "fewer frames than symbols",
    "odd speaking rate", "outside the recording", "overlapping subtitles", "text differs", "excluded", "other split",
    "other language", "further track",
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
    findings: tuple[str, ...] = ()


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
    remarks: list[str] = []
    try:
        wave_T, source_hz = read_sound(folder / path, remarks)
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


def bandwidth_of(wave_T: Samples, rate_hz: int) -> float:
    """Returns the frequency in Hz above which a recording holds nothing, or half its rate.

    Resampling from a lower rate and lossy compression leave rounding errors above it, or, where noise was added later,
    a spectrum that falls steeply and does not rise again.
    """
    length = round(SPECTRUM_SECONDS * rate_hz)
    begin = max(0, (len(wave_T) - length) // 2)
    middle_T = wave_T[begin : begin + length]
    window_T = np.hanning(SPECTRUM_SAMPLES)
    frames_FT = middle_T[: len(middle_T) // SPECTRUM_SAMPLES * SPECTRUM_SAMPLES].reshape(-1, SPECTRUM_SAMPLES)
    if not len(frames_FT):
        return rate_hz / 2
    power = np.zeros(SPECTRUM_SAMPLES // 2 + 1)
    for frame_T in frames_FT:
        power += np.square(np.abs(np.fft.rfft(frame_T * window_T)))
    power *= 2 / len(frames_FT) / SPECTRUM_SAMPLES / np.square(window_T).sum()
    bands = (np.fft.rfftfreq(SPECTRUM_SAMPLES, BAND_HZ / rate_hz)).astype(int)
    level_db = 10 * np.log10(np.bincount(bands, power)[: int(rate_hz / 2 / BAND_HZ)] + 1e-30)
    filled = np.flatnonzero(level_db > EMPTY_DB)
    if not len(filled) or filled[-1] < 4:
        return rate_hz / 2
    # The band beside an edge belongs to the slope of a filter.
    above_db = np.maximum.accumulate(level_db[::-1])[::-1]
    lowest = round(LOWEST_EDGE_HZ / BAND_HZ)
    steps_db = [float(level_db[at - 4 : at - 1].min() - above_db[at + 1]) for at in range(lowest, len(level_db) - 1)]
    edges = [lowest + int(np.argmax(steps_db))] if steps_db and max(steps_db) >= EDGE_DB else []
    return float(min([*edges, filled[-1] + 1]) * BAND_HZ)


def is_narrow(bandwidth_hz: float, source_hz: int, rate_hz: int) -> bool:
    """Returns True if a recording lacks treble that its own rate and the rate of a training promise."""
    return bandwidth_hz < NARROW * min(source_hz, rate_hz) / 2


def lacking_treble(narrow: Mapping[str, float], recordings: int, rate_hz: int) -> str:
    """Returns the beginning of a sentence about recordings whose bandwidths in Hz are given by path."""
    low, high = min(narrow.values()) / 1000, max(narrow.values()) / 1000
    above = f"{low:g} kHz" if low == high else f"{low:g} to {high:g} kHz"
    example = f", such as {next(iter(narrow))}" if recordings > 1 else ""
    hold = f"{len(narrow)} of {counted(recordings, 'recording')} {'holds' if len(narrow) == 1 else 'hold'}"
    return (
        f"{hold} nothing above {above}{example}, although the rate promises it at {rate_hz} Hz: resampled from a lower "
        "rate, or compressed"
    )


def rate_for(bandwidth_hz: float) -> int:
    """Returns the lowest usual rate in Hz that holds sound of a bandwidth."""
    return next((rate for rate in USUAL_RATES if rate / 2 >= bandwidth_hz), USUAL_RATES[-1])


# The instruments of a song beside its voice, and further microphones.
FURTHER_TRACKS = Companions(
    "further track",
    re.compile(
        r"(?:instrument|no_vocals)_(.+)|(.*?)[-_. (]*(?:mic[2-9]|inst|instrumentals?|accompaniment|karaoke|backing|"
        r"no[-_ ]?vocals|drums|bass|other|mixture)\)?", re.IGNORECASE,
    ),
    re.compile(r"vocals?_(.+)|(.*?)[-_. (]*(?:mic1|vocals?|vox|acapella)\)?(?:[-_ ]*\([^()]*\))*", re.IGNORECASE),
)  # fmt: skip


def scan_recordings(
    folder: Path, exclude: Sequence[str] = (), companions: Companions | None = None, *, may_be_empty: bool = False
) -> SourceTree:
    """Finds the recordings of a folder tree by their suffixes, as `preparation.scan` does. Raises UserError if the
    folder is missing, or holds no recording."""
    check_input_folder(folder, "recordings")
    tree = scan(folder, SOUNDS | FFMPEG_SOUNDS, exclude, companions)
    if not tree.paths and not may_be_empty:
        others = format_counts(tree.ignored)
        raise UserError(
            f"{folder}: no recording in it{f', but other files: {others}' if others else ''}",
            hint=hint_of_others(tree.ignored)
            or f"looked for {', '.join(sorted(SOUNDS))}, and with ffmpeg {', '.join(sorted(FFMPEG_SOUNDS))}; read "
            f"are {READ}",
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
