"""Singing that is made up: voices that glide over melodies and vowels, for a demo without a recording at hand.

A voice is a source and a filter (Fant 1960): pulses of the vocal folds, or noise, through the resonances of a mouth.
The pulses are summed from their harmonics up to half of the sampling rate, so that nothing folds back.

Shapes: T samples, P points of control (CONTROL_HZ a second), R resonances, K harmonics, N frequencies and F pieces of a
transform, and `...` any.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrain.engine.wav import write_wav

Floats = NDArray[np.floating[Any]]

CONTROL_HZ = 200  # at which pitch, vowel and loudness are drawn
WINDOW = 512  # samples of a piece of noise; a piece begins at the middle of the one before
SCALE = (0, 2, 4, 7, 9, 12)  # semitones above the lowest note: pentatonic, where every order is a melody
PEAK = 0.7  # of full scale, of a clip's loudest sample
ROOM = 1e-3  # loudness of the noise that is always there, beside a tone's
FADE_HZ = 500.0  # below half of the sampling rate, over which harmonics fade
# The first three resonances of vowels, men's: Peterson and Barney 1952, table II (https://doi.org/10.1121/1.1906875).
VOWELS_HZ = ((270, 2290, 3010), (530, 1840, 2480), (730, 1090, 2440), (570, 840, 2410), (300, 870, 2240))
# Those above are of an even tube of 17 cm, 1000 Hz apart.
UPPER_HZ = np.arange(3500.0, 12000.0, 1000.0)
BANDWIDTHS_HZ = np.array([80.0, 90, 120, *(0.05 * UPPER_HZ)])
# Noises of consonants, s, sh, f and h: where they are strongest, how wide they are, in Hz, and their loudness.
CONSONANTS = ((7000, 1500, 0.5), (3300, 1000, 0.5), (6000, 4000, 0.15), (1500, 1500, 0.15))


@dataclass(frozen=True)
class Voice:
    lowest_hz: float  # the note that its melodies are counted from
    mouth: float  # how much higher its resonances are than those of men
    breath: float  # loudness of its noise beside its tone
    vibrato_hz: float
    vibrato_semitones: float


VOICES = (
    Voice(110, 1.00, 0.02, 5.2, 0.30),
    Voice(165, 1.08, 0.05, 5.8, 0.45),
    Voice(220, 1.17, 0.03, 5.5, 0.40),
    Voice(294, 1.25, 0.08, 6.2, 0.20),
)


class Sung(NamedTuple):
    """A stretch of a clip, with one note, one vowel, and a tone or a consonant or neither."""

    seconds: float
    semitones: int
    vowel: int
    tone: float  # loudness, 0 to 1
    consonant: int  # one of CONSONANTS, or -1


class Score(NamedTuple):
    """What is sung; all of it glides."""

    pitch_P: Floats  # Hz
    tone_P: Floats  # loudness, 0 to 1
    resonances_PR: Floats  # Hz
    consonants_PC: Floats  # loudness of each of CONSONANTS


def write_clips(folder: Path, numbers: Iterable[int], rate_hz: int, seconds: tuple[float, float] = (2.0, 5.0)) -> None:
    """Put clips of these numbers (wav of 16 bits, each between two lengths, VOICES in turn) into `folder`.

    A clip follows from its number, whichever others there are. Raises UserError if one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        draws = np.random.default_rng(number)
        turn, voice = divmod(number, len(VOICES))
        wave_T = sing(VOICES[voice], draws.uniform(*seconds), rate_hz, draws)
        write_wav(folder / f"voice_{voice + 1}_{turn + 1:02}.wav", wave_T, rate_hz)


def sing(voice: Voice, seconds: float, rate_hz: int, draws: np.random.Generator) -> Floats:
    """A melody that is drawn: `seconds` of samples, PEAK at the most. In less than half a second may be no tone."""
    score = glided(voice, melody(seconds, draws), draws)
    tone_T = harmonics(score, int(seconds * rate_hz), rate_hz)
    tone_T /= np.sqrt(np.square(tone_T).mean())
    wave_T = tone_T + noise(voice, score, len(tone_T), rate_hz, draws)
    wave_T *= PEAK / np.abs(wave_T).max()
    return wave_T


def melody(seconds: float, draws: np.random.Generator) -> list[Sung]:
    """Notes, half of them after a consonant and some after a breath, for `seconds` or a little longer."""
    notes: list[Sung] = []
    while sum(note.seconds for note in notes) < seconds:
        semitones, vowel = int(draws.choice(SCALE)), int(draws.integers(len(VOWELS_HZ)))
        if draws.random() < 0.15:
            notes.append(Sung(draws.uniform(0.1, 0.25), semitones, vowel, 0.0, -1))
        if draws.random() < 0.5:
            consonant = int(draws.integers(len(CONSONANTS)))
            notes.append(Sung(draws.uniform(0.08, 0.16), semitones, vowel, 0.0, consonant))
        notes.append(Sung(draws.uniform(0.25, 0.8), semitones, vowel, draws.uniform(0.5, 1.0), -1))
    return notes


def glided(voice: Voice, notes: list[Sung], draws: np.random.Generator) -> Score:
    """The notes of a voice as curves: portamento, vibrato, a pitch that is never quite still, and moving lips."""
    points = [round(note.seconds * CONTROL_HZ) for note in notes]

    def curve(values: Any, over_seconds: float) -> Floats:
        return smooth(np.repeat(np.array(values, float), points, axis=0), over_seconds)

    seconds_P = np.arange(sum(points)) / CONTROL_HZ
    vibrato_P = voice.vibrato_semitones * np.sin(2 * np.pi * voice.vibrato_hz * seconds_P)
    unrest_P = smooth(draws.normal(0, 0.3, len(seconds_P)), 0.1)
    semitones_P = curve([note.semitones for note in notes], 0.12) + vibrato_P + unrest_P
    vowels_PR = voice.mouth * curve([VOWELS_HZ[note.vowel] for note in notes], 0.15)
    upper_PR = np.broadcast_to(voice.mouth * UPPER_HZ, (len(vowels_PR), len(UPPER_HZ)))
    return Score(
        pitch_P=voice.lowest_hz * 2 ** (semitones_P / 12),
        tone_P=curve([note.tone for note in notes], 0.06),
        resonances_PR=np.concatenate([vowels_PR, upper_PR], axis=1),
        consonants_PC=curve([np.arange(len(CONSONANTS)) == note.consonant for note in notes], 0.04),
    )


def smooth(values_P: Floats, over_seconds: float) -> Floats:
    """Each column (P or PR) averaged under a Hann window so long; the ends go on as they are."""
    window = np.hanning(int(over_seconds * CONTROL_HZ) // 2 * 2 + 3)
    padded = np.pad(values_P.T, [(0, 0)] * (values_P.ndim - 1) + [(len(window) // 2,) * 2], mode="edge")
    smoothed: Floats = np.apply_along_axis(np.convolve, -1, padded, window / window.sum(), "valid").T
    return smoothed


def mouth(hz: Floats, resonances_R: Floats) -> NDArray[np.complex128]:
    """Its complex gain at frequencies (P or N) with resonances (PR, or F1R for a gain FN): resonators one after
    another, each with a gain of 1 at 0 Hz (Klatt 1980, https://doi.org/10.1121/1.383940)."""
    gain = np.ones(np.broadcast_shapes(hz.shape, resonances_R.shape[:-1]), complex)
    for number, bandwidth_hz in enumerate(BANDWIDTHS_HZ):
        resonance_hz = resonances_R[..., number]
        gain /= 1 - (hz / resonance_hz) ** 2 + 1j * bandwidth_hz * hz / resonance_hz**2
    return gain


def harmonics(score: Score, samples: int, rate_hz: int) -> Floats:
    """The tone (T): folds and lips together take 6 dB an octave from the harmonics of a pulse."""
    at_T = np.arange(samples) / rate_hz * CONTROL_HZ
    pitch_T = np.interp(at_T, np.arange(len(score.pitch_P)), score.pitch_P)
    turn_T = np.exp(2j * np.pi * np.cumsum(pitch_T) / rate_hz)
    before_T = np.minimum(at_T.astype(int), len(score.pitch_P) - 2)
    part_T = at_T - before_T
    wave_T, power_T = np.zeros(samples), np.ones(samples, complex)
    for number in range(1, int(rate_hz / 2 / score.pitch_P.min()) + 1):
        hz_P = number * score.pitch_P
        heard_P = score.tone_P * np.clip((rate_hz / 2 - hz_P) / FADE_HZ, 0, 1) / number
        gain_P = heard_P * mouth(hz_P, score.resonances_PR)
        power_T *= turn_T
        wave_T += ((gain_P[before_T] + part_T * np.diff(gain_P)[before_T]) * power_T).real
    return wave_T


def noise(voice: Voice, score: Score, samples: int, rate_hz: int, draws: np.random.Generator) -> Floats:
    """Breath and consonants (T): pieces of white noise with the spectrum of their moment, laid over each other."""
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
