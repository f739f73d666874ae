"""Synthetic singing: voices that glide over melodies and vowels, for demos without recordings.

Shapes: T samples, P points of control (CONTROL_HZ a second), R resonances.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gputrain.audio import formants
from gputrain.audio.formants import CONSONANTS, CONTROL_HZ, Floats, FormantVoice, Score, smooth
from gputrain.engine.data import write_wav

SCALE = (0, 2, 4, 7, 9, 12)  # Pentatonic scale, in semitones above the lowest note.
# The first three formants of men's vowels: Peterson and Barney 1952, table II (https://doi.org/10.1121/1.1906875).
VOWELS_HZ = ((270, 2290, 3010), (530, 1840, 2480), (730, 1090, 2440), (570, 840, 2410), (300, 870, 2240))


VOICES = (
    FormantVoice(110, 1.00, 0.02, 5.2, 0.30),
    FormantVoice(165, 1.08, 0.05, 5.8, 0.45),
    FormantVoice(220, 1.17, 0.03, 5.5, 0.40),
    FormantVoice(294, 1.25, 0.08, 6.2, 0.20),
)


class NoteSegment(NamedTuple):
    """A segment of a clip with one note, one vowel, and a tone, a consonant or neither."""

    seconds: float
    semitones: int
    vowel: int
    tone: float  # Loudness, 0 to 1.
    consonant: int  # Index into CONSONANTS, or -1.


def write_clips(folder: Path, numbers: Iterable[int], rate_hz: int, seconds: tuple[float, float] = (2.0, 5.0)) -> None:
    """Writes clips with these numbers (16-bit wav, lengths between `seconds`, alternating VOICES) into `folder`.

    A clip depends only on its number. Raises UserError if one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        draws = np.random.default_rng(number)
        turn, voice = divmod(number, len(VOICES))
        wave_T = sing(VOICES[voice], draws.uniform(*seconds), rate_hz, draws)
        write_wav(folder / f"voice_{voice + 1}_{turn + 1:02}.wav", wave_T, rate_hz)


def sing(voice: FormantVoice, seconds: float, rate_hz: int, draws: np.random.Generator) -> Floats:
    """Returns `seconds` of a random melody with peak formants.PEAK. Less than half a second may contain no tone."""
    score = glided(voice, melody(seconds, draws), draws)
    return formants.rendered(voice, score, int(seconds * rate_hz), rate_hz, draws)


def melody(seconds: float, draws: np.random.Generator) -> list[NoteSegment]:
    """Draws notes, half of them after a consonant and some after a breath, for `seconds` or a little longer."""
    notes: list[NoteSegment] = []
    while sum(note.seconds for note in notes) < seconds:
        semitones, vowel = int(draws.choice(SCALE)), int(draws.integers(len(VOWELS_HZ)))
        if draws.random() < 0.15:
            notes.append(NoteSegment(draws.uniform(0.1, 0.25), semitones, vowel, 0.0, -1))
        if draws.random() < 0.5:
            consonant = int(draws.integers(len(CONSONANTS)))
            notes.append(NoteSegment(draws.uniform(0.08, 0.16), semitones, vowel, 0.0, consonant))
        notes.append(NoteSegment(draws.uniform(0.25, 0.8), semitones, vowel, draws.uniform(0.5, 1.0), -1))
    return notes


def glided(voice: FormantVoice, notes: list[NoteSegment], draws: np.random.Generator) -> Score:
    """Returns the notes of a voice as curves with portamento, vibrato, random pitch variation and vowel transitions."""
    points = [round(note.seconds * CONTROL_HZ) for note in notes]

    def curve(values: Any, over_seconds: float) -> Floats:
        return smooth(np.repeat(np.array(values, float), points, axis=0), over_seconds)

    seconds_P = np.arange(sum(points)) / CONTROL_HZ
    vibrato_P = voice.vibrato_semitones * np.sin(2 * np.pi * voice.vibrato_hz * seconds_P)
    unrest_P = smooth(draws.normal(0, 0.3, len(seconds_P)), 0.1)
    semitones_P = curve([note.semitones for note in notes], 0.12) + vibrato_P + unrest_P
    vowels_PR = voice.mouth * curve([VOWELS_HZ[note.vowel] for note in notes], 0.15)
    return Score(
        pitch_P=voice.lowest_hz * 2 ** (semitones_P / 12),
        tone_P=curve([note.tone for note in notes], 0.06),
        resonances_PR=formants.with_upper(vowels_PR, voice.mouth),
        consonants_PC=curve([np.arange(len(CONSONANTS)) == note.consonant for note in notes], 0.04),
    )
