"""Reports on the recordings of a folder, or on a store of prepared sound.

Shapes: T samples, F frames.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from gputrain.audio import prepare as audio_prepare
from gputrain.audio.f0 import compile_tracker, default_method, f0, voiced
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.store import WAVES, Pitch
from gputrain.engine.data import Progress, no_progress
from gputrain.engine.preparation import (
    DataReport,
    RefusedItem,
    ValueRange,
    check_input_folder,
    read_quarantine,
    run_jobs,
    sorted_refusals,
)
from gputrain.engine.stop import format_duration
from gputrain.figures import counted
from gputrain.vocoder.store import VocoderStore

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
    bandwidth_hz: float  # The recording holds nothing above it.
    remark: str = ""  # What was unusual about its scale or channels, if anything.


@dataclass(frozen=True)
class FolderStats:
    """Statistics of the recordings of a folder; shares are weighted by duration."""

    recordings: int
    hours: float
    rates: dict[int, int]  # Number of recordings by rate in Hz.
    seconds: ValueRange
    clipped_share: float
    clipped: int  # Number of recordings above CLIPPED_SHARE.
    silent_share: float
    leading_seconds: ValueRange
    trailing_seconds: ValueRange
    voiced_share: float
    pitch_hz: tuple[float, float] | None  # Lowest and highest common pitch.


@dataclass(frozen=True, kw_only=True)
class SoundReport(DataReport):
    """Report on a folder. `total` covers all usable recordings, `folders` those in each folder of the tree. `findings`
    are recommendations as text."""

    prepared: bool
    total: FolderStats | None
    folders: dict[str, FolderStats]
    clipped: dict[str, float]  # Clipped files, with their share of samples at full scale.
    narrow: dict[str, float]  # Files that lack the treble which their rate promises, with their bandwidth in Hz.
    findings: list[str]


def validate_sounds(
    input_dir: Path, sampling_rate: int = 44100, *, num_workers: int = 0, progress: Progress = no_progress
) -> SoundReport:
    """Decodes every recording of a folder tree in full, or reads a prepared store; its refusals are those of its
    preparation. `sampling_rate` is that of the training, in Hz.

    Raises UserError if the folder is missing or holds no recording, or the store is damaged.
    """
    check_input_folder(input_dir, "recordings, or the prepared sound")
    prepared = (input_dir / WAVES).is_file()
    found, refused, ignored = (_in_store if prepared else _in_tree)(input_dir, num_workers, progress)
    by_folder: dict[str, list[RecordingStats]] = {}
    for finding in found:
        by_folder.setdefault(str(PurePosixPath(finding.path).parent), []).append(finding)
    clipped = {finding.path: finding.clipped_share for finding in found if finding.clipped_share > CLIPPED_SHARE}
    narrow = {
        one.path: one.bandwidth_hz
        for one in found
        if audio_prepare.is_narrow(one.bandwidth_hz, one.rate_hz, sampling_rate)
    }
    total = _summary(found) if found else None
    return SoundReport(
        input_dir=str(input_dir),
        prepared=prepared,
        total=total,
        folders={folder: _summary(members) for folder, members in sorted(by_folder.items())},
        clipped=clipped,
        narrow=narrow,
        ignored=ignored,
        refused=sorted_refusals(refused),
        findings=[
            *_findings(total, len(refused), sampling_rate, narrow),
            *audio_prepare.remarks_on((one.path, one.remark) for one in found),
        ],
    )


Found = tuple[list[RecordingStats], list[RefusedItem], dict[str, int]]


def _in_tree(folder: Path, num_workers: int, progress: Progress) -> Found:
    tree = audio_prepare.scan_recordings(folder)
    refused = list(tree.refused)
    jobs = [(folder, path) for path in audio_prepare.fingerprints(folder, tree.paths, refused)]
    compile_tracker(default_method())  # It tells how long that takes, which the workers can't.
    results: list[RecordingStats | RefusedItem] = []
    run_jobs(examine, jobs, num_workers, results.append, progress)
    refused += [result for result in results if isinstance(result, RefusedItem)]
    return [result for result in results if isinstance(result, RecordingStats)], refused, tree.ignored


def _in_store(folder: Path, num_workers: int, progress: Progress) -> Found:
    store = VocoderStore.open(folder)
    jobs = [VocoderStore(folder, store.format, [clip]) for clip in store.clips]  # Each is sent to a worker process.
    found: list[RecordingStats] = []
    run_jobs(examine_clip, jobs, num_workers, found.append, progress)
    return found, read_quarantine(folder), {}


def examine(job: tuple[Path, str]) -> RecordingStats | RefusedItem:
    """Decodes a recording and tracks the pitch of its middle. Runs in a worker process."""
    folder, path = job
    decoded = audio_prepare.decode_recording(folder, path)
    if isinstance(decoded, RefusedItem):
        return decoded
    wave_T, rate_hz, _, remark = decoded
    tracked = round(TRACKED_SECONDS * rate_hz)
    begin = max(0, (len(wave_T) - tracked) // 2)
    middle_T = wave_T[begin : begin + tracked]
    found = _finding(path, wave_T, rate_hz, f0(middle_T, rate_hz, _hop(rate_hz)), len(middle_T) / rate_hz)
    return replace(found, remark=remark)


def examine_clip(store: VocoderStore) -> RecordingStats:
    """Returns the statistics of the only clip of a store, whose pitch is known."""
    ((clip, wave_T, f0_F),) = store
    rate_hz = store.format.sampling_rate
    unit_T = from_int16(wave_T[: clip.samples])
    return _finding(clip.path, unit_T, rate_hz, f0_F, clip.samples / rate_hz)


def _finding(path: str, wave_T: Samples, rate_hz: int, f0_F: Pitch, tracked_seconds: float) -> RecordingStats:
    hop, frames, loud = audio_prepare.loud_frames(wave_T, rate_hz, SILENT_DB)
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (frames, frames)
    pitch_hz = f0_F[voiced(f0_F)]
    low_hz, high_hz = np.percentile(pitch_hz, (5, 95)) if len(pitch_hz) else (0.0, 0.0)
    return RecordingStats(
        path=path,
        rate_hz=rate_hz,
        seconds=len(wave_T) / rate_hz,
        clipped_share=audio_prepare.clipped_share(wave_T),
        silent_share=1 - len(loud) / frames,
        leading_seconds=first * hop / rate_hz,
        trailing_seconds=(frames - last) * hop / rate_hz,
        tracked_seconds=tracked_seconds,
        voiced_share=float(voiced(f0_F).mean()) if len(f0_F) else 0.0,
        low_hz=float(low_hz),
        high_hz=float(high_hz),
        bandwidth_hz=audio_prepare.bandwidth_of(wave_T, rate_hz),
    )


def _hop(rate_hz: int) -> int:
    return max(1, round(audio_prepare.FRAME_SECONDS * rate_hz))


def _summary(found: Sequence[RecordingStats]) -> FolderStats:
    seconds = [finding.seconds for finding in found]
    return FolderStats(
        recordings=len(found),
        hours=sum(seconds) / 3600,
        rates=dict(sorted(Counter(finding.rate_hz for finding in found).items())),
        seconds=ValueRange.of(seconds),
        clipped_share=_mean((finding.clipped_share, finding.seconds) for finding in found),
        clipped=sum(finding.clipped_share > CLIPPED_SHARE for finding in found),
        silent_share=_mean((finding.silent_share, finding.seconds) for finding in found),
        leading_seconds=ValueRange.of([finding.leading_seconds for finding in found]),
        trailing_seconds=ValueRange.of([finding.trailing_seconds for finding in found]),
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


def _findings(total: FolderStats | None, refused: int, sampling_rate: int, narrow: dict[str, float]) -> Iterator[str]:
    if refused:
        yield f"{counted(refused, 'file is', 'files are')} left out: repair what you need"
    if total is None:
        yield "nothing here can be trained on"
        return
    low = sum(count for rate_hz, count in total.rates.items() if rate_hz < sampling_rate)
    if low:
        lower = f"{low} of {counted(total.recordings, 'recording')} {'has' if low == 1 else 'have'} less than"
        yield (
            f"{lower} {sampling_rate} Hz and no treble, and the vocoder learns to produce none; leave them out, or "
            f"train at {min(total.rates)} Hz"
        )
    if narrow:
        lacking = audio_prepare.lacking_treble(narrow, total.recordings, sampling_rate)
        yield (
            f"{lacking}; the vocoder learns no treble from them: leave them out, or train at "
            f"{audio_prepare.rate_for(min(narrow.values()))} Hz"
        )
    if total.hours < FEW_HOURS:
        duration = format_duration(3600 * total.hours)
        yield f"{duration} of sound is little: enough for fine-tuning, not to train from scratch"
    if total.clipped:
        clipped = counted(total.clipped, "recording is", "recordings are")
        yield f"{clipped} clipped, and the vocoder learns the distortion; record them again at a lower level"
    if total.silent_share > MUCH_SILENCE:
        yield f"{100 * total.silent_share:.0f} % is silence: prepare-data --trim-db 50 trims it at both ends"
    if total.voiced_share < FEW_VOICED:
        yield (
            f"only {100 * total.voiced_share:.0f} % of the frames are voiced; the recordings may hold no voice, or one "
            "outside of 40 to 1100 Hz (--f0-min, --f0-max)"
        )
