"""A formant synthesiser for synthetic singing and speech: a source and a filter (Fant 1960).

The source is pulses of the vocal folds, or noise; the filter is the resonances of a mouth. The pulses are summed from
their harmonics up to half of the sampling rate, so that nothing folds back.

Shapes: T samples, P points of control (CONTROL_HZ a second), R resonances, N frequencies and F pieces of a transform.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
CONTROL_HZ = 200  # Rate of the curves of pitch, vowel and loudness.
WINDOW = 512  # Samples of a piece of noise; pieces overlap by half.
PEAK = 0.7  # Loudest sample of a clip, relative to full scale.
ROOM = 1e-3  # Loudness of the constant background noise, relative to a tone.
FADE_HZ = 500.0  # Width of the band below half of the sampling rate in which harmonics fade out.
# The resonances above 3 kHz are those of a uniform tube of 17 cm, 1000 Hz apart.
UPPER_HZ = np.arange(3500.0, 12000.0, 1000.0)
BANDWIDTHS_HZ = np.array([80.0, 90, 120, *(0.05 * UPPER_HZ)])
# Noises of the consonants s, sh, f and h: centre and width in Hz, and loudness.
CONSONANTS = ((7000, 1500, 0.5), (3300, 1000, 0.5), (6000, 4000, 0.15), (1500, 1500, 0.15))


@dataclass(frozen=True)
class FormantVoice:
    lowest_hz: float  # Lowest note of its melodies.
    mouth: float  # Factor of its resonances relative to those of men.
    breath: float  # Loudness of its noise relative to its tone.
    vibrato_hz: float
    vibrato_semitones: float


class Score(NamedTuple):
    """Control curves of a clip."""

    pitch_P: Floats  # Hz
    tone_P: Floats  # Loudness, 0 to 1.
    resonances_PR: Floats  # Hz
    consonants_PC: Floats  # Loudness of each of CONSONANTS.


def smooth(values_P: Floats, over_seconds: float) -> Floats:
    """Returns each column (P or PR) smoothed by a Hann window of `over_seconds`, with constant ends."""
    window = np.hanning(int(over_seconds * CONTROL_HZ) // 2 * 2 + 3)
    padded = np.pad(values_P.T, [(0, 0)] * (values_P.ndim - 1) + [(len(window) // 2,) * 2], mode="edge")
    smoothed: Floats = np.apply_along_axis(np.convolve, -1, padded, window / window.sum(), "valid").T
    return smoothed


def mouth(hz: Floats, resonances_R: Floats) -> NDArray[np.complex128]:
    """Returns the complex gain of the mouth at frequencies (P or N) with resonances (PR, or F1R for a gain FN): a
    cascade of resonators, each with a gain of 1 at 0 Hz (Klatt 1980, https://doi.org/10.1121/1.383940)."""
    gain = np.ones(np.broadcast_shapes(hz.shape, resonances_R.shape[:-1]), complex)
    for number, bandwidth_hz in enumerate(BANDWIDTHS_HZ):
        resonance_hz = resonances_R[..., number]
        gain /= 1 - (hz / resonance_hz) ** 2 + 1j * bandwidth_hz * hz / resonance_hz**2
    return gain


def harmonics(score: Score, samples: int, rate_hz: int) -> Floats:
    """Returns the tone (T): folds and lips together attenuate the harmonics of a pulse by 6 dB an octave."""
    at_T = np.arange(samples) / rate_hz * CONTROL_HZ
    pitch_T = np.interp(at_T, np.arange(len(score.pitch_P)), score.pitch_P)
    turn_T = np.exp(2j * np.pi * np.cumsum(pitch_T) / rate_hz)
    before_T = np.minimum(at_T.astype(int), len(score.pitch_P) - 2)
    part_T = at_T - before_T
    wave_T, power_T = np.zeros(samples), np.ones(samples, complex)
    for number in range(1, int(rate_hz / 2 / score.pitch_P.min()) + 1):
        hz_P = number * score.pitch_P
        loudness_P = score.tone_P * np.clip((rate_hz / 2 - hz_P) / FADE_HZ, 0, 1) / number
        gain_P = loudness_P * mouth(hz_P, score.resonances_PR)
        power_T *= turn_T
        wave_T += ((gain_P[before_T] + part_T * np.diff(gain_P)[before_T]) * power_T).real
    return wave_T


def noise(voice: FormantVoice, score: Score, samples: int, rate_hz: int, draws: np.random.Generator) -> Floats:
    """Returns breath and consonants (T): overlapping pieces of white noise, filtered by the spectrum at their time."""
    hop = WINDOW // 2
    starts_F = np.arange(0, samples, hop)
    at_F = np.minimum((starts_F * CONTROL_HZ) // rate_hz, len(score.tone_P) - 1)
    hz_N = np.fft.rfftfreq(WINDOW, 1 / rate_hz)
    breath_FN = np.abs(mouth(hz_N, score.resonances_PR[at_F, None]))
    loudness_FN = ROOM + voice.breath * score.tone_P[at_F, None] * breath_FN
    for number, (centre_hz, width_hz, loudness) in enumerate(CONSONANTS):
        shape_N = np.exp(-(((hz_N - centre_hz) / width_hz) ** 2))
        loudness_FN += loudness * score.consonants_PC[at_F, number, None] * shape_N
    spectrum_FN = np.fft.rfft(draws.normal(size=(len(at_F), WINDOW)))
    pieces = np.fft.irfft(spectrum_FN * loudness_FN) * np.hanning(WINDOW + 1)[:-1]
    wave_T = np.zeros(samples + WINDOW)
    for start, piece in zip(starts_F, pieces, strict=True):
        wave_T[start : start + WINDOW] += piece
    return wave_T[hop : hop + samples]


def rendered(voice: FormantVoice, score: Score, samples: int, rate_hz: int, draws: np.random.Generator) -> Floats:
    """Returns the sound of a score (T): a tone of unit power and its noises, with peak PEAK."""
    tone_T = harmonics(score, samples, rate_hz)
    tone_T /= np.sqrt(np.square(tone_T).mean())
    wave_T = tone_T + noise(voice, score, samples, rate_hz, draws)
    wave_T *= PEAK / np.abs(wave_T).max()
    return wave_T


def with_upper(resonances_PR: Floats, mouth: float) -> Floats:
    """Returns lower resonances with those above 3 kHz, which do not change."""
    upper_PR = np.broadcast_to(mouth * UPPER_HZ, (len(resonances_PR), len(UPPER_HZ)))
    return np.concatenate([resonances_PR, upper_PR], axis=1)
