"""Prepares recordings for training a vocoder, resampled, mixed to one channel, and stored with their pitch; and reports
on recordings, or on a store of prepared sound.

Files of any sampling rate, number of channels and bit depth are accepted. Sources are only read.

Shapes: T samples, F frames.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gputrain.audio import prepare as audio_prepare
from gputrain.audio.config import Sound
from gputrain.audio.f0 import (
    CEILING_HZ,
    FLOOR_HZ,
    default_method,
    f0,
    pitch_beyond,
    require_tracker,
    trackable_range,
    voiced,
)
from gputrain.audio.io import Samples, from_int16
from gputrain.audio.prepare import FURTHER_TRACKS, SoundPrepareReport
from gputrain.audio.store import WAVES, Pitch, Wave, check_format
from gputrain.data_in.preparation import (
    DataReport,
    RefusedItem,
    ValueRange,
    check_folders,
    check_input_folder,
    faults_of,
    nothing_usable,
    read_quarantine,
    refuse_exclude,
    run_jobs,
    sorted_refusals,
    write_quarantine,
)
from gputrain.data_in.split import MANIFEST
from gputrain.engine.stop import format_duration
from gputrain.errors import UserError
from gputrain.files import Progress, no_progress, to_int16
from gputrain.formatting import counted
from gputrain.vocoder.config import SAMPLING_RATE
from gputrain.vocoder.store import JOURNAL, VocoderFormat, VocoderStore, VocoderStoreWriter

log = logging.getLogger(__name__)

SILENT_DB = 50.0  # Threshold of a pause, below the loudest frame.
TRACKED_SECONDS = 30.0  # Length of the middle part of a recording whose pitch is tracked for a report.
CLIPPED_SHARE = 1e-4  # Share of samples at full scale for a file to be listed; a single peak there is allowed.
FEW_HOURS = 1.0
FEW_VOICED = 0.2  # Share.
MUCH_SILENCE = 0.4  # Share.


@dataclass(frozen=True)
class VocoderPrepareConfig(VocoderFormat):
    """Settings of a preparation: the format of the store, and how recordings are changed."""

    trim_db: float = 0.0  # Level below the loudest part at which both ends are trimmed, in dB; 0 is off.
    loudness_db: float = 0.0  # Root mean square of each file, in dB relative to full scale (negative); 0 keeps it.

    @property
    def format(self) -> VocoderFormat:
        return VocoderFormat(self.sampling_rate, self.hop_size, self.f0_method, self.f0_min, self.f0_max)


def vocoder_prepare_config(sound: Sound) -> VocoderPrepareConfig:
    """Returns the settings given by the options.

    Raises UserError if the chosen pitch tracker is not installed.
    """
    method = default_method() if sound.f0_method == "auto" else sound.f0_method
    require_tracker(method)
    return VocoderPrepareConfig(
        sound.audio_sample_rate or SAMPLING_RATE, sound.hop_size, method, sound.f0_min, sound.f0_max,
        sound.trim_db or 0.0, sound.loudness_db,
    )  # fmt: skip


def check_output(output_dir: Path, recipe: VocoderPrepareConfig) -> None:
    """Raises UserError if the folder holds recordings that were prepared with other settings."""
    for journal in (JOURNAL, MANIFEST):  # Of an unfinished preparation, and of a finished one.
        check_format(output_dir, journal, recipe.format)


def prepare_sound(
    input_dir: Path,
    output_dir: Path,
    recipe: VocoderPrepareConfig,
    *,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> SoundPrepareReport:
    """Puts every usable recording of a folder tree into the store `output_dir`. Run again, it prepares what is missing.

    Raises UserError if a folder is unusable, no recording is usable, or a source of the store has changed.
    """
    check_folders(input_dir, output_dir, "vocoder")
    tree = audio_prepare.scan_recordings(input_dir, exclude, FURTHER_TRACKS)
    refused = list(tree.refused)
    prints = audio_prepare.fingerprints(input_dir, tree.paths, refused)
    was_finished = (output_dir / MANIFEST).is_file()
    writer = VocoderStoreWriter(output_dir, recipe.format)
    kept = {clip.path: clip.fingerprint for clip in writer.sounds}
    for path, known in kept.items():
        if prints.get(path) != known:
            fault = f"another version of {path} than" if path in prints else f"{path}, which is left out now or not in"
            if was_finished:  # The refusal leaves a store that can be trained on.
                writer.finish()
            raise UserError(f"{output_dir} holds {fault} {input_dir}", hint="prepare into another folder")
    missing = [path for path in prints if path not in kept]

    remarks: list[tuple[str, str]] = []

    def store(made: PreparedRecording | RefusedItem) -> None:
        if isinstance(made, RefusedItem):
            refused.append(made)
        else:
            writer.add(made.path, prints[made.path], made.wave_T, made.f0_F)
            remarks.append((made.path, made.remark))

    run_jobs(
        prepare_recording, [(input_dir, path, recipe) for path in missing], num_workers, store, progress, len(kept)
    )
    for note in audio_prepare.remarks_on(remarks):
        log.warning("%s", note)
    refused = sorted_refusals(refused)
    write_quarantine(output_dir, refused)
    if not writer.sounds:
        raise nothing_usable(
            f"{input_dir}: none of {len(tree.paths)} files holds usable sound: {faults_of(refused)}", output_dir
        )
    writer.finish()
    hours = sum(clip.samples for clip in writer.sounds) / recipe.sampling_rate / 3600
    return SoundPrepareReport(
        input_dir=str(input_dir), output_dir=str(output_dir), made=len(writer.sounds) - len(kept), kept=len(kept),
        hours=hours, ignored=tree.ignored, refused=refused,
    )  # fmt: skip


class PreparedRecording(NamedTuple):
    path: str
    wave_T: Wave
    f0_F: Pitch  # The pitch of each frame.
    remark: str  # What was unusual about its scale or channels, if anything.


def prepare_recording(job: tuple[Path, str, VocoderPrepareConfig]) -> PreparedRecording | RefusedItem:
    """Decodes a recording and tracks its pitch in a worker. Returns the reason for leaving it out if it can't."""
    folder, path, recipe = job
    rate_hz, hop_size = recipe.sampling_rate, recipe.hop_size
    decoded = audio_prepare.decode_recording(
        folder, path, rate_hz, trim_db=recipe.trim_db, loudness_db=recipe.loudness_db
    )
    if isinstance(decoded, RefusedItem):
        return decoded
    wave_T, remark = decoded.wave_T, decoded.remark
    del decoded
    samples = len(wave_T)
    wave_T = np.pad(wave_T, (0, -samples % hop_size))
    pitch_F = f0(wave_T, rate_hz, hop_size, recipe.f0_method, floor_hz=recipe.f0_min, ceiling_hz=recipe.f0_max)
    stored_T = np.concatenate([to_int16(block_T) for block_T in audio_prepare.blocks(wave_T[:samples])])
    return PreparedRecording(path, stored_T, pitch_F, remark)


# ------------------------------------------------------------------------------------------------------------- reports


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
    beyond_hz: tuple[float, float] | None = None  # Common range of a pitch outside of the limits, if it has one.


@dataclass(frozen=True)
class FolderStats:
    """Statistics of all recordings of a folder; shares are weighted by duration."""

    recordings: int
    hours: float
    rates: dict[int, int]  # Number of recordings by rate in Hz.
    seconds: ValueRange
    clipped_share: float
    clipped: int  # Number of recordings above CLIPPED_SHARE.
    silent_share: float
    silent_ends: float  # Share of silence at both ends.
    voiced_share: float
    pitch_hz: tuple[float, float] | None  # Lowest and highest common pitch.


@dataclass(frozen=True, kw_only=True)
class SoundReport(DataReport):
    """Report on a folder. `total` covers all usable recordings, `findings` are recommendations as text."""

    prepared: bool
    total: FolderStats | None
    clipped: dict[str, float]  # Clipped files, with their share of samples at full scale.
    narrow: dict[str, float]  # Files that lack the treble which their rate promises, with their bandwidth in Hz.
    findings: list[str]


def validate_sounds(
    input_dir: Path,
    sampling_rate: int = 44100,
    *,
    exclude: Sequence[str] = (),
    num_workers: int = 0,
    progress: Progress = no_progress,
) -> SoundReport:
    """Decodes every recording of a folder tree in full, or reads a prepared store; its refusals are those of its
    preparation. `sampling_rate` is that of the training, in Hz.

    Raises UserError if the folder is missing or holds no recording, or the store is damaged.
    """
    check_input_folder(input_dir, "recordings, or the prepared sound")
    prepared = (input_dir / WAVES).is_file()
    if prepared:
        refuse_exclude(input_dir, exclude)
    found, refused, ignored, limits = (
        _in_store(input_dir, num_workers, progress) if prepared else _in_tree(input_dir, exclude, num_workers, progress)
    )
    lacking = [
        recording
        for recording in found
        if audio_prepare.is_narrow(recording.bandwidth_hz, recording.rate_hz, sampling_rate)
    ]
    narrow = {recording.path: recording.bandwidth_hz for recording in lacking}
    beyond = {recording.path: recording.beyond_hz for recording in found if recording.beyond_hz}
    total = _summary(found) if found else None
    return SoundReport(
        input_dir=str(input_dir),
        prepared=prepared,
        total=total,
        clipped={
            recording.path: recording.clipped_share for recording in found if recording.clipped_share > CLIPPED_SHARE
        },
        narrow=narrow,
        ignored=ignored,
        refused=sorted_refusals(refused),
        findings=[
            *_findings(total, len(refused), sampling_rate, narrow, beyond, limits),
            *audio_prepare.remarks_on((recording.path, recording.remark) for recording in found),
        ],
    )


# With the ignored files by suffix, and the limits of the pitch in Hz.
Found = tuple[list[RecordingStats], list[RefusedItem], dict[str, list[str]], tuple[float, float]]


def _in_tree(folder: Path, exclude: Sequence[str], num_workers: int, progress: Progress) -> Found:
    tree = audio_prepare.scan_recordings(folder, exclude, FURTHER_TRACKS)
    refused = list(tree.refused)
    jobs = [(folder, path) for path in audio_prepare.fingerprints(folder, tree.paths, refused)]
    results: list[RecordingStats | RefusedItem] = []
    run_jobs(examine, jobs, num_workers, results.append, progress)
    refused += [result for result in results if isinstance(result, RefusedItem)]
    found = [result for result in results if isinstance(result, RecordingStats)]
    return found, refused, tree.ignored, (FLOOR_HZ, CEILING_HZ)


def _in_store(folder: Path, num_workers: int, progress: Progress) -> Found:
    store = VocoderStore.open(folder)
    jobs = [VocoderStore(folder, store.format, [clip]) for clip in store.clips]  # Each is sent to a worker process.
    found: list[RecordingStats] = []
    run_jobs(examine_clip, jobs, num_workers, found.append, progress)
    limits = trackable_range(store.format.f0_method, store.format.f0_min, store.format.f0_max)
    return found, read_quarantine(folder), {}, limits


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
    hop = max(1, round(audio_prepare.FRAME_SECONDS * rate_hz))
    f0_F = f0(middle_T, rate_hz, hop)
    found = _stats(path, wave_T, rate_hz, f0_F, len(middle_T) / rate_hz, remark)
    return replace(found, beyond_hz=pitch_beyond(middle_T, rate_hz, hop, f0_F, FLOOR_HZ, CEILING_HZ))


def examine_clip(store: VocoderStore) -> RecordingStats:
    """Returns the statistics of the only clip of a store, whose pitch is known."""
    ((clip, wave_T, f0_F),) = store
    format, samples_T = store.format, from_int16(wave_T)
    rate_hz = format.sampling_rate
    found = _stats(clip.path, samples_T[: clip.samples], rate_hz, f0_F, clip.samples / rate_hz)
    beyond_hz = pitch_beyond(samples_T, rate_hz, format.hop_size, f0_F, format.f0_min, format.f0_max)
    return replace(found, beyond_hz=beyond_hz)


def _stats(
    path: str, wave_T: Samples, rate_hz: int, f0_F: Pitch, tracked_seconds: float, remark: str = ""
) -> RecordingStats:
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
        remark=remark,
    )


def _summary(found: Sequence[RecordingStats]) -> FolderStats:
    seconds = [recording.seconds for recording in found]
    pitched = [recording for recording in found if recording.voiced_share]
    # Without the lowest and the highest 5 % of recordings, because trackers err.
    ends_hz = [
        float(np.percentile([getattr(recording, end) for recording in pitched], share))
        for end, share in (("low_hz", 5), ("high_hz", 95))
        if pitched
    ]
    return FolderStats(
        recordings=len(found),
        hours=sum(seconds) / 3600,
        rates=dict(sorted(Counter(recording.rate_hz for recording in found).items())),
        seconds=ValueRange.of(seconds),
        clipped_share=float(np.average([recording.clipped_share for recording in found], weights=seconds)),
        clipped=sum(recording.clipped_share > CLIPPED_SHARE for recording in found),
        silent_share=float(np.average([recording.silent_share for recording in found], weights=seconds)),
        silent_ends=sum(recording.leading_seconds + recording.trailing_seconds for recording in found) / sum(seconds),
        voiced_share=float(
            np.average(
                [recording.voiced_share for recording in found],
                weights=[recording.tracked_seconds for recording in found],
            )
        ),
        pitch_hz=(ends_hz[0], ends_hz[1]) if pitched else None,
    )


def _findings(
    total: FolderStats | None,
    refused: int,
    sampling_rate: int,
    narrow: dict[str, float],
    beyond: dict[str, tuple[float, float]],
    limits: tuple[float, float],
) -> Iterator[str]:
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
    silent = f"{100 * total.silent_share:.0f} % is silence"
    if total.silent_share > MUCH_SILENCE and total.silent_ends > MUCH_SILENCE / 4:
        yield f"{silent}: prepare-data --trim-db 50 trims it at both ends"
    elif total.silent_share > MUCH_SILENCE:
        yield f"{silent} within recordings: where it is digital silence, training draws no crops"
    if beyond:
        lowest_hz, highest_hz = min(hz for hz, _ in beyond.values()), max(hz for _, hz in beyond.values())
        wider = [f" --f0-min {lowest_hz / 1.2:.0f}"] if lowest_hz < 1.1 * limits[0] else []
        wider += [f" --f0-max {highest_hz * 1.2:.0f}"] if highest_hz > 0.9 * limits[1] else []
        named = ", ".join(f"{path} ({pitch[0]:.0f} to {pitch[1]:.0f} Hz)" for path, pitch in list(beyond.items())[:3])
        yield (
            f"{counted(len(beyond), 'recording has', 'recordings have')} a pitch outside of {limits[0]:g} to "
            f"{limits[1]:g} Hz, for which another one or none is stored, such as {named}; prepare-data"
            f"{''.join(wider)} finds it, into another folder, if --f0-method can"
        )
    elif total.voiced_share < FEW_VOICED:
        yield f"only {100 * total.voiced_share:.0f} % of the frames are voiced; the recordings may hold no voice"
