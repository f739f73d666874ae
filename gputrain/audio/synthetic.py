"""Synthetic speech and singing for demos without recordings: curves of pitch, resonances and noises, which WORLD
synthesises (Morise et al. 2016, https://doi.org/10.1587/transinf.2015EDP7457).

Shapes: T samples, P points of control (CONTROL_HZ a second), R resonances, N frequencies.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gputrain.files import write_wav

Floats: TypeAlias = NDArray[np.floating[Any]]
Resonances: TypeAlias = tuple[float, float, float]  # Hz

CONTROL_HZ = 200  # Rate of the curves of pitch, resonances and loudness.
PEAK = 0.7  # Loudest sample of a clip, relative to full scale.
LEAST_TONE = 0.03  # Below it there are noises alone.
ROOM = 1e-3  # Loudness of the constant background noise, relative to that of a voice.
GLIDE_SECONDS = 0.06  # Duration of transitions between the sounds of speech.
FALL_SEMITONES = 4.0  # Fall of the pitch over a sentence.
SCALE = (0, 2, 4, 7, 9, 12)  # Pentatonic scale of melodies, in semitones above the lowest note.
# The resonances above 3 kHz are those of a uniform tube of 17 cm, 1000 Hz apart.
UPPER_HZ = np.arange(3500.0, 12000.0, 1000.0)
BANDWIDTHS_HZ = np.array([80.0, 90, 120, *(0.05 * UPPER_HZ)])
WHO = "bola", "ona", "ota", "shoir", "singlim", "doʻstim", "qizim", "ustoz", "ayol", "nabiram"
DID = "keldi", "oldi", "kuldi", "yozdi", "topdi", "soʻradi", "uxladi", "chopdi", "toʻxtadi"


class FormantVoice(NamedTuple):
    lowest_hz: float  # Lowest note.
    mouth: float  # Factor of its resonances relative to those of men (Peterson and Barney 1952).
    breath: float  # Loudness of its noise relative to its tone.
    vibrato_hz: float
    vibrato_semitones: float


VOICES = (
    FormantVoice(110, 1.00, 0.02, 5.2, 0.30),
    FormantVoice(165, 1.08, 0.05, 5.8, 0.45),
    FormantVoice(220, 1.17, 0.03, 5.5, 0.40),
    FormantVoice(294, 1.25, 0.08, 6.2, 0.20),
)


class FormantSound(NamedTuple):
    """A segment of a clip with constant resonances."""

    seconds: float
    resonances_hz: Resonances
    tone: float = 0.0  # Loudness of the voice, 0 to 1.
    noise: Resonances = (0.0, 1.0, 0.0)  # Centre and width in Hz, and loudness.
    semitones: float = 0.0  # Pitch above the voice's lowest note.


S, SH, F, H = (7000.0, 1500.0, 0.5), (3300.0, 1000.0, 0.5), (6000.0, 4000.0, 0.15), (1500.0, 1500.0, 0.15)
# Resonances of vowels are close to those of men in Peterson and Barney 1952 (https://doi.org/10.1121/1.1906875); those
# of consonants are targets for their neighbours' transitions, by place of articulation: lips, teeth, palate, throat.
LIPS, TEETH, PALATE = (300.0, 900.0, 2200.0), (300.0, 1700.0, 2600.0), (300.0, 2000.0, 2300.0)
THROAT, REST = (500.0, 1100.0, 2400.0), (500.0, 1500.0, 2500.0)
VOWELS = {
    "a": FormantSound(0.13, (720, 1500, 2500), 1.0), "e": FormantSound(0.12, (500, 1850, 2500), 0.9),
    "i": FormantSound(0.10, (280, 2250, 3000), 0.8), "o": FormantSound(0.14, (600, 950, 2450), 1.0),
    "oʻ": FormantSound(0.13, (440, 780, 2400), 0.9), "u": FormantSound(0.11, (300, 900, 2250), 0.8),
}  # fmt: skip
CONSONANTS = {
    "m": FormantSound(0.09, (250, 950, 2100), 0.45), "n": FormantSound(0.08, (250, 1500, 2500), 0.45),
    "ng": FormantSound(0.09, (250, 2000, 2400), 0.45), "l": FormantSound(0.08, (380, 1200, 2700), 0.6),
    "r": FormantSound(0.07, (450, 1350, 1750), 0.4), "y": FormantSound(0.08, (270, 2300, 3000), 0.6),
    "v": FormantSound(0.08, LIPS, 0.4, F), "z": FormantSound(0.09, TEETH, 0.35, S),
    "gʻ": FormantSound(0.09, THROAT, 0.4, H), "f": FormantSound(0.10, LIPS, 0.0, F),
    "s": FormantSound(0.12, TEETH, 0.0, S), "sh": FormantSound(0.12, PALATE, 0.0, SH),
    "x": FormantSound(0.10, THROAT, 0.0, H), "h": FormantSound(0.07, THROAT, 0.0, H), " ": FormantSound(0.09, REST),
}  # fmt: skip
# Each is silence or a murmur, and then its release.
STOPS = {
    "b": FormantSound(0.03, LIPS, 0.4, F), "d": FormantSound(0.03, TEETH, 0.4, S),
    "g": FormantSound(0.03, PALATE, 0.4, H), "j": FormantSound(0.06, PALATE, 0.4, SH),
    "p": FormantSound(0.03, LIPS, 0.0, F), "t": FormantSound(0.03, TEETH, 0.0, S),
    "k": FormantSound(0.03, PALATE, 0.0, H), "q": FormantSound(0.03, THROAT, 0.0, H),
    "ch": FormantSound(0.08, PALATE, 0.0, SH),
}  # fmt: skip
SOUNDS: dict[str, list[FormantSound]] = {
    **{letter: [sound] for letter, sound in (VOWELS | CONSONANTS).items()},
    **{letter: [FormantSound(0.06, sound.resonances_hz, sound.tone / 2), sound] for letter, sound in STOPS.items()},
}


def write_speech(folder: Path, clips: int, rate_hz: int) -> None:
    """Writes up to `clips` different sentences (16-bit wav) into `folder`/wavs and their texts into
    `folder`/metadata.csv, in LJSpeech's format. The first clips do not depend on the number of clips. Raises UserError
    if one cannot be written."""
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    texts = sentences()[:clips]
    for number, text in enumerate(texts, start=1):
        write_wav(folder / f"wavs/{number:03}.wav", say(text, rate_hz, np.random.default_rng(number)), rate_hz)
    lines = [f"{number:03}|{text.capitalize()}.\n" for number, text in enumerate(texts, start=1)]
    (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")


def sentences() -> list[str]:
    """Returns short Uzbek sentences, each once, in a mixed order."""
    made = [" ".join(words) for words in product(WHO, DID)]
    return [made[place] for place in np.random.default_rng(0).permutation(len(made))]


def letters(text: str) -> list[str]:
    """Splits a text into keys of SOUNDS, some of which have two letters."""
    return re.findall("|".join(sorted(SOUNDS, key=len, reverse=True)), text)


def say(text: str, rate_hz: int, draws: np.random.Generator, voice: FormantVoice = VOICES[0]) -> Floats:
    """Returns the speech (T,) of a text in the letters of SOUNDS, with peak PEAK."""
    tempo, rest = draws.uniform(0.93, 1.08), FormantSound(0.04, REST)
    sounds = [rest, *(sound for letter in letters(text) for sound in SOUNDS[letter]), rest]
    falls = np.linspace(FALL_SEMITONES, 0, len(sounds)).tolist()
    spoken = [
        sound._replace(seconds=sound.seconds * tempo * draws.uniform(0.93, 1.07), semitones=fall)
        for sound, fall in zip(sounds, falls, strict=True)
    ]
    return _at_peak(_rendered(spoken, voice._replace(vibrato_semitones=0.0), GLIDE_SECONDS, rate_hz, draws)[0])


def write_clips(folder: Path, numbers: Iterable[int], rate_hz: int, seconds: tuple[float, float] = (2.0, 5.0)) -> None:
    """Writes clips of singing with these numbers (16-bit wav, lengths between `seconds`, alternating VOICES) into
    `folder`. A clip depends only on its number. Raises UserError if one cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        draws = np.random.default_rng(number)
        turn, voice = divmod(number, len(VOICES))
        wave_T, _ = sing(VOICES[voice], draws.uniform(*seconds), rate_hz, draws)
        write_wav(folder / f"voice_{voice + 1}_{turn + 1:02}.wav", wave_T, rate_hz)


def sing(voice: FormantVoice, seconds: float, rate_hz: int, draws: np.random.Generator) -> tuple[Floats, Floats]:
    """Returns a random melody (T,) with peak PEAK, half of whose notes follow a consonant, and its pitch (P,) in Hz, 0
    where nothing is sung."""
    notes: list[FormantSound] = []
    while sum(note.seconds for note in notes) < seconds + 0.1:  # Sounds are rounded to points of control.
        vowel = VOWELS[str(draws.choice(list(VOWELS)))]._replace(semitones=float(draws.choice(SCALE)))
        if draws.random() < 0.5:
            noise = CONSONANTS[str(draws.choice(["s", "sh", "f", "h"]))].noise
            notes.append(vowel._replace(seconds=draws.uniform(0.08, 0.16), tone=0.0, noise=noise))
        notes.append(vowel._replace(seconds=draws.uniform(0.25, 0.8), tone=draws.uniform(0.5, 1.0)))
    wave_T, pitch_P = _rendered(notes, voice, 0.12, rate_hz, draws)
    return _at_peak(wave_T[: int(seconds * rate_hz)]), pitch_P


def _rendered(
    sounds: Sequence[FormantSound], voice: FormantVoice, glide_seconds: float, rate_hz: int, draws: np.random.Generator
) -> tuple[Floats, Floats]:
    """Returns the wave (T,) of sounds, and its pitch (P,) in Hz, 0 where there is no tone."""
    import pyworld

    points = [round(sound.seconds * CONTROL_HZ) for sound in sounds]

    def curve(values: object, over_seconds: float) -> Floats:
        return _smooth(np.repeat(np.array(values, float), points, axis=0), over_seconds)

    vibrato_P = np.sin(2 * np.pi * voice.vibrato_hz * np.arange(sum(points)) / CONTROL_HZ)
    unrest_P = _smooth(draws.normal(0, 0.3, sum(points)), 0.1)
    semitones_P = curve([sound.semitones for sound in sounds], 0.12) + voice.vibrato_semitones * vibrato_P + unrest_P
    tone_P = curve([sound.tone for sound in sounds], glide_seconds / 2)
    pitch_P = np.where(tone_P > LEAST_TONE, voice.lowest_hz * 2 ** (semitones_P / 12), 0.0)
    hz_N = np.fft.rfftfreq(pyworld.get_cheaptrick_fft_size(rate_hz), 1 / rate_hz)
    lower_PR = curve([sound.resonances_hz for sound in sounds], glide_seconds)
    upper_PR = np.broadcast_to(UPPER_HZ, (len(lower_PR), len(UPPER_HZ)))
    gain_PN = tone_P[:, None] * mouth_gain(hz_N, voice.mouth * np.concatenate([lower_PR, upper_PR], axis=1))
    voiced_PN = np.square(gain_PN / np.maximum(hz_N, voice.lowest_hz))  # Folds and lips take 6 dB an octave.
    voiced_PN *= (pitch_P > 0)[:, None] / voiced_PN[pitch_P > 0].mean()
    noise_SN = [
        loudness * np.exp(-(((hz_N - centre) / width) ** 2))
        for centre, width, loudness in (sound.noise for sound in sounds)
    ]
    noise_PN = np.square(curve(noise_SN, glide_seconds / 3)) + np.square(voice.breath * gain_PN) + ROOM**2
    # WORLD takes the power of voice and noise together, and the share of the noise in the amplitude.
    power_PN = voiced_PN + noise_PN
    wave_T = pyworld.synthesize(pitch_P, power_PN, np.sqrt(noise_PN / power_PN), rate_hz, 1000 / CONTROL_HZ)
    return np.asarray(wave_T), pitch_P


def mouth_gain(hz_N: Floats, resonances_PR: Floats) -> Floats:
    """Returns the gain (P, N) of a cascade of resonators, each with a gain of 1 at 0 Hz (Klatt 1980,
    https://doi.org/10.1121/1.383940)."""
    square_PN = np.ones((len(resonances_PR), len(hz_N)))
    for hz_P1, bandwidth_hz in zip(resonances_PR.T[..., None], BANDWIDTHS_HZ, strict=True):
        square_PN *= (1 - (hz_N / hz_P1) ** 2) ** 2 + (bandwidth_hz * hz_N / hz_P1**2) ** 2
    return np.asarray(1 / np.sqrt(square_PN))


def _smooth(values_P: Floats, over_seconds: float) -> Floats:
    """Returns each column (P or PR) smoothed by a Hann window of `over_seconds`, with constant ends."""
    from scipy.ndimage import convolve1d

    window = np.hanning(int(over_seconds * CONTROL_HZ) // 2 * 2 + 3)
    smoothed: Floats = convolve1d(values_P, window / window.sum(), axis=0, mode="nearest")
    return smoothed


def _at_peak(wave_T: Floats) -> Floats:
    made_T: Floats = wave_T * (PEAK / np.abs(wave_T).max())
    return made_T
