"""Reports on the recordings of a folder, or on a store of prepared sound.

Shapes: T samples, F frames.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from gputrain.audio import prepare as audio_prepare
from gputrain.audio.f0 import compile_tracker, default_method, f0, voiced
from gputrain.audio.io import Samples, from_int16, read_sound
from gputrain.audio.prepare import RefusedRecording
from gputrain.audio.store import WAVES
from gputrain.engine.data import Progress, Spread, in_processes, silent
from gputrain.errors import UserError
from gputrain.vocoder.store import Pitch, VocoderStore

FRAME_SECONDS = 0.01  # Window of the loudness measurement, and hop of the pitch tracked here.
SILENT_DB = 50.0  # Threshold of a pause, below the loudest frame.
TRACKED_SECONDS = 30.0  # Length of the middle part of a recording whose pitch is tracked.
CLIPPED_SHARE = 1e-4  # Share of samples at full scale for a file to be listed; a single peak there is allowed.
FEW_HOURS = 1.0
FEW_VOICED = 0.2  # Share.
MUCH_SILENCE = 0.4  # Share.


@dataclass(frozen=True)
class RecordingStats:
    """Statistics of a decoded recording with mixed channels, or of a clip of a store."""

    path: str
    rate_hz: int
    seconds: float
    clipped_share: float  # Share of samples at full scale.
    silent_share: float  # Share of frames SILENT_DB below the loudest.
    leading_seconds: float  # Silence at the beginning.
    trailing_seconds: float
    tracked_seconds: float
    voiced_share: float
    low_hz: float  # 5th percentile of the pitch; 0 without voiced frames.
    high_hz: float  # 95th percentile.


@dataclass(frozen=True)
class FolderStats:
    """Statistics of the recordings of a folder; shares are weighted by duration."""

    recordings: int
    hours: float
    rates: dict[int, int]  # Number of recordings by rate in Hz.
    seconds: Spread
    clipped_share: float
    clipped: int  # Number of recordings above CLIPPED_SHARE.
    silent_share: float
    leading_seconds: Spread
    trailing_seconds: Spread
    voiced_share: float
    pitch_hz: tuple[float, float] | None  # Lowest and highest common pitch.


@dataclass(frozen=True)
class SoundReport:
    """Report on a folder. `total` covers all usable recordings, `folders` those in each folder of the tree. `findings`
    are recommendations as text."""

    input_dir: str
    prepared: bool
    total: FolderStats | None
    folders: dict[str, FolderStats]
    clipped: dict[str, float]  # Clipped files, with their share of samples at full scale.
    ignored: dict[str, int]  # Number of other files, by suffix.
    refused: list[RefusedRecording]
    findings: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def validate_sounds(
    input_dir: Path, sampling_rate: int = 44100, *, num_workers: int = 0, progress: Progress = silent
) -> SoundReport:
    """Decodes every recording of a folder tree in full, or reads a prepared store; its refusals are those of its
    preparation. `sampling_rate` is that of the training, in Hz.

    Raises UserError if the folder is missing or holds no recording, or the store is damaged.
    """
    if not input_dir.is_dir():
        raise UserError(f"{input_dir}: no such folder", hint="name a folder of recordings, or of prepared sound")
    prepared = (input_dir / WAVES).is_file()
    found, refused, ignored = (_in_store if prepared else _in_tree)(input_dir, num_workers, progress)
    by_folder: dict[str, list[RecordingStats]] = {}
    for finding in found:
        by_folder.setdefault(str(PurePosixPath(finding.path).parent), []).append(finding)
    clipped = {finding.path: finding.clipped_share for finding in found if finding.clipped_share > CLIPPED_SHARE}
    total = _summary(found) if found else None
    return SoundReport(
        input_dir=str(input_dir),
        prepared=prepared,
        total=total,
        folders={folder: _summary(members) for folder, members in sorted(by_folder.items())},
        clipped=clipped,
        ignored=ignored,
        refused=sorted(refused, key=lambda refusal: refusal.path),
        findings=list(_in_words(total, len(refused), sampling_rate)),
    )


Found = tuple[list[RecordingStats], list[RefusedRecording], dict[str, int]]
ValidationJob = TypeVar("ValidationJob")
ValidationResult = TypeVar("ValidationResult")


def _in_tree(folder: Path, num_workers: int, progress: Progress) -> Found:
    paths, ignored = audio_prepare.scan(folder)
    if not paths:
        raise audio_prepare.no_recording(folder, ignored)
    refused: list[RefusedRecording] = []
    jobs = [(folder, path) for path in audio_prepare.fingerprints(folder, paths, refused)]
    compile_tracker(default_method())  # It tells how long that takes, which the workers can't.
    results = _all_of(examine, jobs, num_workers, progress)
    refused += [result for result in results if isinstance(result, RefusedRecording)]
    return [result for result in results if isinstance(result, RecordingStats)], refused, dict(ignored)


def _in_store(folder: Path, num_workers: int, progress: Progress) -> Found:
    store = VocoderStore.open(folder)
    jobs = [VocoderStore(folder, store.format, [clip]) for clip in store.clips]  # Each is sent to a worker process.
    found = _all_of(examine_clip, jobs, num_workers, progress)
    return found, audio_prepare.read_quarantine(folder), {}


def _all_of(
    function: Callable[[ValidationJob], ValidationResult],
    jobs: Sequence[ValidationJob],
    num_workers: int,
    progress: Progress,
) -> list[ValidationResult]:
    results = []
    with closing(in_processes(function, jobs, num_workers)) as made:
        for result in made:
            results.append(result)
            progress(len(results), len(jobs))
    return results


def examine(job: tuple[Path, str]) -> RecordingStats | RefusedRecording:
    """Decodes a recording and tracks the pitch of its middle. Runs in a worker process."""
    folder, path = job
    try:
        wave_T, rate_hz = read_sound(folder / path)
    except UserError as error:
        return RefusedRecording(path, "unreadable", error.message.removeprefix(f"{folder / path}: "))
    peak = audio_prepare.peak_of(wave_T)
    if peak < audio_prepare.SILENCE:
        return RefusedRecording(path, "silent", f"its peak is {peak:.2g} of full scale")
    tracked = round(TRACKED_SECONDS * rate_hz)
    begin = max(0, (len(wave_T) - tracked) // 2)
    middle_T = wave_T[begin : begin + tracked]
    return _finding(path, wave_T, rate_hz, f0(middle_T, rate_hz, _hop(rate_hz)), len(middle_T) / rate_hz)


def examine_clip(store: VocoderStore) -> RecordingStats:
    """Returns the statistics of the only clip of a store, whose pitch is known."""
    ((clip, wave_T, f0_F),) = store
    rate_hz = store.format.sampling_rate
    unit_T = from_int16(wave_T[: clip.samples])
    return _finding(clip.path, unit_T, rate_hz, f0_F, clip.samples / rate_hz)


def _finding(path: str, wave_T: Samples, rate_hz: int, f0_F: Pitch, tracked_seconds: float) -> RecordingStats:
    hop = min(_hop(rate_hz), len(wave_T))
    frames_FT = wave_T[: len(wave_T) // hop * hop].reshape(-1, hop)
    power_F = np.einsum("ft,ft->f", frames_FT, frames_FT)
    loud = np.flatnonzero(power_F > 10 ** (-SILENT_DB / 10) * power_F.max())
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (len(power_F), len(power_F))
    pitch_hz = f0_F[voiced(f0_F)]
    low_hz, high_hz = np.percentile(pitch_hz, (5, 95)) if len(pitch_hz) else (0.0, 0.0)
    return RecordingStats(
        path=path,
        rate_hz=rate_hz,
        seconds=len(wave_T) / rate_hz,
        clipped_share=audio_prepare.clipped_share(wave_T),
        silent_share=1 - len(loud) / len(power_F),
        leading_seconds=first * hop / rate_hz,
        trailing_seconds=(len(power_F) - last) * hop / rate_hz,
        tracked_seconds=tracked_seconds,
        voiced_share=float(voiced(f0_F).mean()) if len(f0_F) else 0.0,
        low_hz=float(low_hz),
        high_hz=float(high_hz),
    )


def _hop(rate_hz: int) -> int:
    return max(1, round(FRAME_SECONDS * rate_hz))


def _summary(found: Sequence[RecordingStats]) -> FolderStats:
    seconds = [finding.seconds for finding in found]
    return FolderStats(
        recordings=len(found),
        hours=sum(seconds) / 3600,
        rates=dict(sorted(Counter(finding.rate_hz for finding in found).items())),
        seconds=Spread.of(seconds),
        clipped_share=_mean((finding.clipped_share, finding.seconds) for finding in found),
        clipped=sum(finding.clipped_share > CLIPPED_SHARE for finding in found),
        silent_share=_mean((finding.silent_share, finding.seconds) for finding in found),
        leading_seconds=Spread.of([finding.leading_seconds for finding in found]),
        trailing_seconds=Spread.of([finding.trailing_seconds for finding in found]),
        voiced_share=_mean((finding.voiced_share, finding.tracked_seconds) for finding in found),
        pitch_hz=_pitch_range(found),
    )


def _pitch_range(found: Sequence[RecordingStats]) -> tuple[float, float] | None:
    """Returns the pitch range in Hz without the lowest and the highest 5 % of recordings, because trackers err."""
    pitched = [finding for finding in found if finding.voiced_share]
    if not pitched:
        return None
    low_hz, high_hz = [finding.low_hz for finding in pitched], [finding.high_hz for finding in pitched]
    return float(np.percentile(low_hz, 5)), float(np.percentile(high_hz, 95))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _in_words(total: FolderStats | None, refused: int, sampling_rate: int) -> Iterator[str]:
    if refused:
        yield f"{refused} files would be left out: repair them, or accept that"
    if total is None:
        yield "nothing here can be trained on"
        return
    low = sum(count for rate_hz, count in total.rates.items() if rate_hz < sampling_rate)
    if low:
        yield (
            f"{low} of {total.recordings} recordings have less than {sampling_rate} Hz: resampled, they lack treble, "
            f"and the vocoder learns to produce none; leave them out, or train at {min(total.rates)} Hz"
        )
    if total.hours < FEW_HOURS:
        yield f"{60 * total.hours:.0f} minutes of sound are few: enough for fine-tuning, not for training from scratch"
    if total.clipped:
        yield (
            f"{total.clipped} recordings are clipped, and the vocoder learns the distortion; record them again at a "
            "lower level"
        )
    if total.silent_share > MUCH_SILENCE:
        yield f"{100 * total.silent_share:.0f} % is silence: prepare-data --trim-db 50 trims it at both ends"
    if total.voiced_share < FEW_VOICED:
        yield (
            f"only {100 * total.voiced_share:.0f} % of the frames are voiced; the recordings may hold no voice, or one "
            "outside of 40 to 1100 Hz (--f0-min, --f0-max)"
        )
