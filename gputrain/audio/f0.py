"""Tracks the fundamental frequency of a sound in the frames of its mel spectrogram.

Shapes: T frames. Frame i has its centre at sample (i + 0.5) * hop_size; f0 is in Hz, and 0 where a frame is unvoiced.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gputrain.errors import UserError, import_package, is_installed, require

Method = Literal["parselmouth", "pyworld", "swift-f0"]
Floats: TypeAlias = NDArray[Any]  # Any floating dtype.
# The range reaches from below the lowest bass to just above a soprano's high C.
FLOOR_HZ = 40.0
CEILING_HZ = 1100.0
# Ranges of trackers that cannot find every pitch, in Hz.
LIMITS_HZ: dict[Method, tuple[float, float]] = {"swift-f0": (46.875, 2093.75)}
MODULES: dict[Method, str] = {"parselmouth": "parselmouth", "pyworld": "pyworld", "swift-f0": "swift_f0"}
SILENCE = 0.03  # Praat's silence threshold, relative to the loudest sample.
PIECE_SECONDS = 120.0  # Length of a piece of a long sound; an hour at once would need gigabytes.
MARGIN_SECONDS = 4.0  # Overlap of a piece with its neighbours, which a tracker uses as context.
BEYOND_SECONDS = 10.0  # Length of a part that is tracked again with wider limits.
BEYOND_SHARE, BEYOND_LEAST = 0.1, 0.15  # Share of the frames, and seconds, that show a pitch beyond the limits.
BEYOND_FRAMES = 16  # Frames whose harmonics are looked at.
STRONG = 0.03  # Amplitude of a strong harmonic, relative to the strongest of the first eight.
LOUD = 1e-3  # Power of a loud frame relative to the loudest one.
PERIODS = 3  # Periods of the lowest pitch in a tracker's window, as in Praat's autocorrelation.


def default_method() -> Method:
    """Returns parselmouth if it is installed, otherwise pyworld."""
    return "parselmouth" if is_installed("parselmouth") else "pyworld"


def trackable_range(method: Method | None, floor_hz: float, ceiling_hz: float) -> tuple[float, float]:
    """Returns the part of this range that `f0` can find, in Hz."""
    lowest_hz, highest_hz = LIMITS_HZ.get(method or default_method(), (floor_hz, ceiling_hz))
    return max(floor_hz, lowest_hz), min(ceiling_hz, highest_hz)


def f0(
    wave: Floats,
    sampling_rate: int,
    hop_size: int,
    method: Method | None = None,
    *,
    floor_hz: float = FLOOR_HZ,
    ceiling_hz: float = CEILING_HZ,
) -> NDArray[np.float32]:
    """Returns the pitch of a mono wave (samples,), one number for each of its samples // hop_size frames.

    The wave must have the rate of the mel: resample first. A wave shorter than three periods of `floor_hz` is
    unvoiced. `method` None is `default_method()`. A wave longer than PIECE_SECONDS is tracked in overlapping pieces, so
    that memory does not grow with its length. (For an hour of speech, parselmouth gives the same pitches as at once;
    swift-f0 differs in one frame of a hundred.) Raises UserError for a method that is unknown or not installed, for an
    empty range, and for a wave with NaN.
    """
    method = method or default_method()
    if method not in METHODS:
        raise UserError(f"unknown f0 method {method!r}", hint=f"choose one of {', '.join(METHODS)}")
    ceiling_hz = min(ceiling_hz, sampling_rate / 2)
    if not 0 < floor_hz < ceiling_hz:
        raise UserError(
            f"f0 between {floor_hz:g} and {ceiling_hz:g} Hz at {sampling_rate} Hz is not a valid range",
            hint="choose a floor above 0 and a ceiling above it, and below half the sampling rate",
        )
    if not np.isfinite(wave).all():
        raise UserError("the wave holds numbers that are not finite", hint="gputrain validate lists such files")
    frames = len(wave) // hop_size
    if len(wave) * floor_hz < PERIODS * sampling_rate:
        return np.zeros(frames, np.float32)
    piece, margin = (math.ceil(seconds * sampling_rate / hop_size) for seconds in (PIECE_SECONDS, MARGIN_SECONDS))
    loudest = _peak(wave)
    found_T = np.zeros(frames, np.float32)
    for first in range(0, frames, piece):
        begin, end = max(0, first - margin), first + piece + margin
        piece_T = wave[begin * hop_size : end * hop_size if end < frames else None]
        f0_T = METHODS[method](
            piece_T, sampling_rate, hop_size, floor_hz, ceiling_hz, _peak(piece_T) / (loudest or 1.0)
        )
        found_T[first : first + piece] = f0_T[first - begin :][:piece]
    return found_T


def pitch_beyond(
    wave: Floats, sampling_rate: int, hop_size: int, f0_T: Floats, floor_hz: float, ceiling_hz: float
) -> tuple[float, float] | None:
    """Returns the common range in Hz of a pitch that was tracked between too narrow limits; None if they hold it.

    Of a pitch above its limits, a tracker finds an octave or another fraction, whose multiples alone are in the sound;
    or it finds none: if half of the loud frames have none or the lowest pitch, BEYOND_SECONDS are tracked again.
    """
    hops_TH = wave[: len(f0_T) * hop_size].reshape(-1, hop_size)
    power_T = np.einsum("th,th->t", hops_TH, hops_TH)
    is_loud = power_T > LOUD * power_T.max(initial=0.0)
    pitched = np.flatnonzero(is_loud & (f0_T > 0))[:: 1 + len(f0_T) // BEYOND_FRAMES]
    found = np.array([_by_harmonics(wave, sampling_rate, (at + 0.5) * hop_size, float(f0_T[at])) for at in pitched])
    beyond = found[found > np.maximum(ceiling_hz / 1.1, f0_T[pitched])]
    if not len(found) or len(beyond) < BEYOND_SHARE * len(found):
        doubtful = is_loud & (f0_T < 1.4 * floor_hz)
        if not doubtful.any() or doubtful.sum() < 0.5 * is_loud.sum():
            return None
        frames = round(BEYOND_SECONDS * sampling_rate / hop_size)
        first = max(0, int(np.median(np.flatnonzero(doubtful))) - frames // 2)
        part = wave[first * hop_size : (first + frames) * hop_size]
        wide_T = f0(part, sampling_rate, hop_size, floor_hz=floor_hz / 2, ceiling_hz=2 * ceiling_hz)
        differ = doubtful[first:][: len(wide_T)] & (np.abs(f0_T[first:][: len(wide_T)] - wide_T) > 0.1 * wide_T)
        frames_beyond = np.flatnonzero(
            differ & (wide_T > 0) & ((wide_T > ceiling_hz / 1.1) | (wide_T < 1.1 * floor_hz))
        )
        # The wider limits may be too narrow as well.
        beyond = np.array(
            [_by_harmonics(part, sampling_rate, (at + 0.5) * hop_size, float(wide_T[at])) for at in frames_beyond]
        )
        if len(beyond) < max(BEYOND_SHARE * len(wide_T), BEYOND_LEAST * sampling_rate / hop_size):
            return None
    low_hz, high_hz = np.percentile(beyond, (5, 95)).tolist()
    return low_hz, high_hz


def _by_harmonics(wave: Floats, sampling_rate: int, middle: float, pitch_hz: float) -> float:
    """Returns the multiple of a pitch whose multiples are all the strong harmonics of it around a sample."""
    part = wave[max(0, round(middle) - sampling_rate // 20) : round(middle) + sampling_rate // 20]
    spectrum, step_hz = np.abs(np.fft.rfft(part * np.hanning(len(part)))), sampling_rate / len(part)
    count = min(8, int(sampling_rate / 2.2 / pitch_hz))
    bands = [(int(0.95 * n * pitch_hz / step_hz), int(1.05 * n * pitch_hz / step_hz) + 2) for n in range(1, count + 1)]
    levels = [float(spectrum[begin:end].max()) for begin, end in bands]
    return pitch_hz * math.gcd(*(n for n, level in enumerate(levels, 1) if level > STRONG * max(levels)))


def _peak(wave: Floats) -> float:
    """Returns the largest distance from the mean without copying the wave, which may be an hour long."""
    mean = float(wave.mean(dtype=np.float64))
    return max(float(wave.max()) - mean, mean - float(wave.min()))


def voiced(f0_T: Floats) -> NDArray[np.bool_]:
    return np.asarray(f0_T > 0)


def interpolated(f0_T: Floats) -> NDArray[np.float32]:
    """Interpolates unvoiced gaps linearly in log f0 and holds both ends. A sound without pitch stays all zero.

    Sources of vocoders take such a pitch: openvpi's preparation makes it, and DiffSinger and OpenUtau synthesise with a
    curve that has no gaps. What is voiced, the spectrogram says.
    """
    known, gaps = np.flatnonzero(voiced(f0_T)), np.flatnonzero(~voiced(f0_T))
    filled_T = f0_T.astype(np.float32)
    filled_T[gaps] = np.exp(np.interp(gaps, known, np.log(f0_T[known]))) if len(known) else 0.0
    return filled_T


def _parselmouth(
    wave: Floats, sampling_rate: int, hop_size: int, floor_hz: float, ceiling_hz: float, loudness: float
) -> Floats:
    """Tracks by Praat's autocorrelation (Boersma 1993), with the voicing threshold common in singing synthesis."""
    praat = _imported("parselmouth")
    if not loudness:
        return np.zeros(len(wave) // hop_size)
    # Praat places as many windows as fit, a hop apart, symmetrically about the middle. So the middle of the padded
    # sound must be that of the frames, and the sound must extend beyond the windows by less than a hop.
    frames = len(wave) // hop_size
    before = round((PERIODS * sampling_rate / floor_hz - hop_size / 2) / 2)
    sound = np.zeros(2 * before + frames * hop_size)
    part = wave[: len(sound) - before]
    sound[before : before + len(part)] = part
    # The silence threshold is relative to the loudest sample of the whole sound, of which this may be a piece.
    pitch = praat.Sound(sound, sampling_rate).to_pitch_ac(
        time_step=hop_size / sampling_rate,
        silence_threshold=SILENCE / loudness,
        voicing_threshold=0.6,
        pitch_floor=floor_hz,
        pitch_ceiling=ceiling_hz,
    )
    return np.asarray(pitch.selected_array["frequency"])


def _pyworld(
    wave: Floats, sampling_rate: int, hop_size: int, floor_hz: float, ceiling_hz: float, loudness: float
) -> Floats:
    """Tracks by WORLD's DIO, refined by StoneMask (Morise et al. 2016, https://doi.org/10.1587/transinf.2015EDP7457)."""
    world = _imported("pyworld")
    frames = len(wave) // hop_size
    # DIO's frame i lies at i hops: half a hop of silence moves our frames to 1, 2, 3, ...
    sound = np.pad(wave.astype(np.float64), (hop_size // 2, hop_size))
    period_ms = 1000 * hop_size / sampling_rate
    rough, times = world.dio(sound, sampling_rate, f0_floor=floor_hz, f0_ceil=ceiling_hz, frame_period=period_ms)
    return np.asarray(world.stonemask(sound, rough, times, sampling_rate)[1 : frames + 1])


def _swift_f0(
    wave: Floats, sampling_rate: int, hop_size: int, floor_hz: float, ceiling_hz: float, loudness: float
) -> Floats:
    """Tracks by a small network, 46.9 to 2094 Hz with a frame every 16 ms, resampled to our frames.
    https://swift-f0.github.io"""
    found = _swift_model().detect(wave, sampling_rate, fmin=floor_hz, fmax=ceiling_hz)
    theirs = np.where(found.confidence >= 0.5, found.pitch_hz, 0.0)
    at = (np.arange(len(wave) // hop_size) + 0.5) * hop_size / sampling_rate
    nearest = np.rint(np.interp(at, found.timestamps, np.arange(len(theirs)))).astype(int)
    return np.where(voiced(theirs)[nearest], np.interp(at, found.timestamps, interpolated(theirs)), 0.0)


@functools.cache
def _swift_model() -> Any:
    return _imported("swift-f0").SwiftF0(threads=1)


def _imported(method: Method) -> Any:
    return import_package(MODULES[method], needed_by=f"f0 by {method}", otherwise=OTHER_METHOD)


def require_tracker(method: Method) -> None:
    """Raises UserError if a method is not installed. Imports nothing."""
    if method in MODULES:
        require(MODULES[method], needed_by=f"f0 by {method}", otherwise=OTHER_METHOD)


# Arguments: the wave, its rate, the hop, the range, and the peak of the wave relative to the whole sound.
METHODS: dict[str, Callable[[Floats, int, int, float, float, float], Floats]] = {
    "parselmouth": _parselmouth,
    "pyworld": _pyworld,
    "swift-f0": _swift_f0,
}
OTHER_METHOD = f"choose another of {', '.join(METHODS)}"
