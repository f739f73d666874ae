"""What recordings, or a store of prepared sound, hold, and what is wrong with them.

Shapes: T samples, F frames.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from gputrain.audio.f0 import f0, voiced
from gputrain.audio.mel import Samples, read_sound
from gputrain.engine.data import in_processes, read_rows
from gputrain.engine.wav import FULL_SCALE
from gputrain.errors import UserError
from gputrain.vocoder.prepare import QUARANTINE, SILENCE, Progress, Refusal, fingerprints, no_recording, scan, silent
from gputrain.vocoder.store import WAVES, Pitch, Store

FRAME_SECONDS = 0.01  # over which loudness is taken, and the hop of a pitch that is tracked here
SILENT_DB = 50.0  # below the loudest frame: a pause
TRACKED_SECONDS = 30.0  # of a recording, its middle
NEAR_FULL_SCALE = (FULL_SCALE - 1) / FULL_SCALE
CLIPPED_SHARE = 1e-4  # of samples at full scale, above which a file is named; a peak that just fits has one
FEW_HOURS = 1.0
FEW_VOICED = 0.2  # share
MUCH_SILENCE = 0.4  # share


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest value."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Finding:
    """A recording that could be decoded, its channels mixed, or a clip of a store."""

    path: str
    rate_hz: int
    seconds: float
    clipped_share: float  # of samples at full scale
    silent_share: float  # of frames SILENT_DB below the loudest
    leading_seconds: float  # of silence
    trailing_seconds: float
    tracked_seconds: float
    voiced_share: float
    low_hz: float  # a twentieth of the voiced frames lies below; 0 without a voice
    high_hz: float  # and a twentieth above


@dataclass(frozen=True)
class Summary:
    """Of the recordings of a folder; shares are of their time."""

    recordings: int
    hours: float
    rates: dict[int, int]  # Hz, recordings
    seconds: Spread
    clipped_share: float
    clipped: int  # recordings above CLIPPED_SHARE
    silent_share: float
    leading_seconds: Spread
    trailing_seconds: Spread
    voiced_share: float
    pitch_hz: tuple[float, float] | None  # lowest and highest that is common


@dataclass(frozen=True)
class SoundReport:
    """What a folder holds. `total` is of all recordings that can be used, `folders` of those in each folder of the
    tree. `findings` says in words what a user might act on."""

    input_dir: str
    prepared: bool
    total: Summary | None
    folders: dict[str, Summary]
    clipped: dict[str, float]  # the files named, with their share of samples at full scale
    ignored: dict[str, int]  # other files, by suffix
    refused: list[Refusal]
    findings: list[str]

    @property
    def is_sound(self) -> bool:
        """Something is there, and nothing is refused."""
        return self.total is not None and not self.refused

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def validate_sounds(
    input_dir: Path, *, sampling_rate: int = 44100, num_workers: int = 0, progress: Progress = silent
) -> SoundReport:
    """Decode every recording of a folder tree in full, or read a prepared store, whose refusals are those of its
    preparation. `sampling_rate` is the one to train at, in Hz.

    Raises UserError if the folder is missing or holds no recording, or the store is damaged.
    """
    if not input_dir.is_dir():
        raise UserError(f"{input_dir}: no such folder", hint="name a folder of recordings, or of prepared sound")
    prepared = (input_dir / WAVES).is_file()
    found, refused, ignored = (_in_store if prepared else _in_tree)(input_dir, num_workers, progress)
    by_folder: dict[str, list[Finding]] = {}
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


Found = tuple[list[Finding], list[Refusal], dict[str, int]]
Job = TypeVar("Job")
Result = TypeVar("Result")


def _in_tree(folder: Path, num_workers: int, progress: Progress) -> Found:
    paths, ignored = scan(folder)
    if not paths:
        raise no_recording(folder, ignored)
    refused: list[Refusal] = []
    jobs = [(folder, path) for path in fingerprints(folder, paths, refused)]
    results = _all_of(examine, jobs, num_workers, progress)
    refused += [result for result in results if isinstance(result, Refusal)]
    return [result for result in results if isinstance(result, Finding)], refused, dict(ignored)


def _in_store(folder: Path, num_workers: int, progress: Progress) -> Found:
    store = Store.open(folder)
    jobs = [Store(folder, store.format, [clip]) for clip in store.clips]  # each is sent to another process
    found = _all_of(examine_clip, jobs, num_workers, progress)
    quarantine = folder / QUARANTINE
    rows = read_rows(quarantine, ("path", "reason", "detail")) if quarantine.is_file() else []
    return found, [Refusal(**row) for row in rows], {}


def _all_of(
    function: Callable[[Job], Result], jobs: Sequence[Job], num_workers: int, progress: Progress
) -> list[Result]:
    results = []
    with closing(in_processes(function, jobs, num_workers)) as made:
        for result in made:
            results.append(result)
            progress(len(results), len(jobs))
    return results


def examine(job: tuple[Path, str]) -> Finding | Refusal:
    """In a process of its own: decode a recording, and track the pitch of its middle."""
    folder, path = job
    try:
        wave_T, rate_hz = read_sound(folder / path)
    except UserError as error:
        return Refusal(path, "unreadable", error.message.removeprefix(f"{folder / path}: "))
    peak = max(float(wave_T.max()), -float(wave_T.min()))
    if peak < SILENCE:
        return Refusal(path, "silent", f"its peak is {peak:.2g} of full scale")
    tracked = round(TRACKED_SECONDS * rate_hz)
    begin = max(0, (len(wave_T) - tracked) // 2)
    heard_T = wave_T[begin : begin + tracked]
    return _finding(path, wave_T, rate_hz, f0(heard_T, rate_hz, _hop(rate_hz)), len(heard_T) / rate_hz)


def examine_clip(store: Store) -> Finding:
    """The same of the only clip of a store, whose pitch is known."""
    ((clip, wave_T, f0_F),) = store
    rate_hz = store.format.sampling_rate
    unit_T = np.divide(wave_T[: clip.samples], FULL_SCALE, dtype=np.float32)
    return _finding(clip.path, unit_T, rate_hz, f0_F, clip.samples / rate_hz)


def _finding(path: str, wave_T: Samples, rate_hz: int, f0_F: Pitch, tracked_seconds: float) -> Finding:
    full_scale = int((wave_T >= NEAR_FULL_SCALE).sum() + (wave_T <= -NEAR_FULL_SCALE).sum())
    hop = min(_hop(rate_hz), len(wave_T))
    frames_FT = wave_T[: len(wave_T) // hop * hop].reshape(-1, hop)
    power_F = np.einsum("ft,ft->f", frames_FT, frames_FT)
    loud = np.flatnonzero(power_F > 10 ** (-SILENT_DB / 10) * power_F.max())
    first, last = (int(loud[0]), int(loud[-1]) + 1) if len(loud) else (len(power_F), len(power_F))
    pitch_hz = f0_F[voiced(f0_F)]
    low_hz, high_hz = np.percentile(pitch_hz, (5, 95)) if len(pitch_hz) else (0.0, 0.0)
    return Finding(
        path=path,
        rate_hz=rate_hz,
        seconds=len(wave_T) / rate_hz,
        clipped_share=full_scale / len(wave_T),
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


def _summary(found: Sequence[Finding]) -> Summary:
    seconds = [finding.seconds for finding in found]
    return Summary(
        recordings=len(found),
        hours=sum(seconds) / 3600,
        rates=dict(sorted(Counter(finding.rate_hz for finding in found).items())),
        seconds=_spread(seconds),
        clipped_share=_mean((finding.clipped_share, finding.seconds) for finding in found),
        clipped=sum(finding.clipped_share > CLIPPED_SHARE for finding in found),
        silent_share=_mean((finding.silent_share, finding.seconds) for finding in found),
        leading_seconds=_spread([finding.leading_seconds for finding in found]),
        trailing_seconds=_spread([finding.trailing_seconds for finding in found]),
        voiced_share=_mean((finding.voiced_share, finding.tracked_seconds) for finding in found),
        pitch_hz=_pitch_range(found),
    )


def _pitch_range(found: Sequence[Finding]) -> tuple[float, float] | None:
    """In Hz, without the twentieth of the recordings that reach lowest, or highest: a tracker errs."""
    heard = [finding for finding in found if finding.voiced_share]
    if not heard:
        return None
    low_hz, high_hz = [finding.low_hz for finding in heard], [finding.high_hz for finding in heard]
    return float(np.percentile(low_hz, 5)), float(np.percentile(high_hz, 95))


def _spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def _in_words(total: Summary | None, refused: int, sampling_rate: int) -> Iterator[str]:
    """What a user might act on."""
    if refused:
        yield f"{refused} files would be left out: mend them, or leave them"
    if total is None:
        yield "nothing here can be trained on"
        return
    low = sum(count for rate_hz, count in total.rates.items() if rate_hz < sampling_rate)
    if low:
        yield (
            f"{low} of {total.recordings} recordings are of less than {sampling_rate} Hz: resampled, they lack treble, "
            f"and a vocoder learns to make none; leave them out, or train at {min(total.rates)} Hz"
        )
    if total.hours < FEW_HOURS:
        yield f"{60 * total.hours:.0f} minutes of sound are few: enough to fine-tune on, and not to begin from nothing"
    if total.clipped:
        yield f"{total.clipped} recordings are clipped: a vocoder learns that sound too; record them again more quietly"
    if total.silent_share > MUCH_SILENCE:
        yield f"{100 * total.silent_share:.0f} % is silence: prepare-data --trim-db 50 cuts it off at both ends"
    if total.voiced_share < FEW_VOICED:
        yield (
            f"hardly a pitch: {100 * total.voiced_share:.0f} % of the frames are voiced; this may be no voice, or one "
            "outside of 40 to 1100 Hz (--f0-min, --f0-max)"
        )
