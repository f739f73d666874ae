"""Synthetic speech: short Uzbek sentences, synthesised letter by letter, for demos without recordings.

It is a formant synthesiser like those of the 1980s: a letter is one sound or a few, each with a periodic source,
resonances and a noise. Source, filter and noises are those of the singing in `gputrain.audio.formants`.

Shapes: T samples, P control points (CONTROL_HZ per second), R resonances, C noises.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from gputrain.audio import formants
from gputrain.audio.formants import CONSONANTS, CONTROL_HZ, Floats, FormantVoice, Score, smooth
from gputrain.engine.data import write_wav

VOICE = FormantVoice(lowest_hz=105, mouth=1.0, breath=0.02, vibrato_hz=0.0, vibrato_semitones=0.0)
# Men, women and children by their pitch and by the length of their mouths (Peterson and Barney 1952).
SPEAKERS = {
    "Anvar": VOICE,
    "Lola": FormantVoice(lowest_hz=185, mouth=1.16, breath=0.03, vibrato_hz=0.0, vibrato_semitones=0.0),
    "Jasur": FormantVoice(lowest_hz=130, mouth=1.06, breath=0.05, vibrato_hz=0.0, vibrato_semitones=0.0),
    "Nodira": FormantVoice(lowest_hz=230, mouth=1.28, breath=0.02, vibrato_hz=0.0, vibrato_semitones=0.0),
}
S, SH, F, H = range(len(CONSONANTS))
NONE = -1
TEMPO = 0.93, 1.08  # range of the random tempo factor of a sentence
EDGE_SECONDS = 0.04  # silence at both ends
FALL_SEMITONES = 4.0  # fall of the pitch over a sentence
ACCENT_SEMITONES = 3.0  # raise of the stressed vowel, the last of a word in Uzbek
GLIDE_SECONDS = 0.06  # duration of transitions between sounds

WHO = "bola", "ona", "ota", "shoir", "singlim", "doʻstim", "qizim", "ustoz", "ayol", "nabiram"
DID = "keldi", "oldi", "kuldi", "yozdi", "topdi", "soʻradi", "uxladi", "chopdi", "toʻxtadi"
VOWELS = frozenset({"a", "e", "i", "o", "u", "oʻ"})

Resonances: TypeAlias = tuple[float, float, float]  # Hz


class SpeechSound(NamedTuple):
    """A segment with constant formants."""

    seconds: float
    resonances_hz: Resonances
    tone: float = 0.0  # loudness of voicing, 0 to 1
    noise: int = NONE  # one of CONSONANTS
    loudness: float = 1.0  # loudness of the noise, relative to singing


def _stop(resonances_hz: Resonances, noise: int, tone: float = 0.0, seconds: float = 0.03) -> list[SpeechSound]:
    """Returns a stop consonant: a closure, and its release with a noise."""
    return [SpeechSound(0.06, resonances_hz, tone / 2), SpeechSound(seconds, resonances_hz, tone, noise, 1.5)]


# Resonances of vowels are close to those of men in Peterson and Barney 1952 (https://doi.org/10.1121/1.1906875); those
# of consonants are targets for their neighbours' transitions, by place of articulation: lips, teeth, palate, throat.
LIPS, TEETH, PALATE = (300.0, 900.0, 2200.0), (300.0, 1700.0, 2600.0), (300.0, 2000.0, 2300.0)
THROAT, TIP, REST = (500.0, 1100.0, 2400.0), (450.0, 1350.0, 1750.0), (500.0, 1500.0, 2500.0)
SOUNDS: dict[str, list[SpeechSound]] = {
    "a": [SpeechSound(0.13, (720, 1500, 2500), 1.0)],
    "e": [SpeechSound(0.12, (500, 1850, 2500), 0.9)],
    "i": [SpeechSound(0.10, (280, 2250, 3000), 0.8)],
    "o": [SpeechSound(0.14, (600, 950, 2450), 1.0)],
    "oʻ": [SpeechSound(0.13, (440, 780, 2400), 0.9)],
    "u": [SpeechSound(0.11, (300, 900, 2250), 0.8)],
    "m": [SpeechSound(0.09, (250, 950, 2100), 0.45)],
    "n": [SpeechSound(0.08, (250, 1500, 2500), 0.45)],
    "ng": [SpeechSound(0.09, (250, 2000, 2400), 0.45)],
    "l": [SpeechSound(0.08, (380, 1200, 2700), 0.6)],
    "r": [SpeechSound(0.03, TIP, 0.6), SpeechSound(0.02, TIP, 0.1), SpeechSound(0.03, TIP, 0.6)],
    "y": [SpeechSound(0.08, (270, 2300, 3000), 0.6)],
    "v": [SpeechSound(0.08, LIPS, 0.4, F)],
    "z": [SpeechSound(0.09, TEETH, 0.35, S, 0.6)],
    "gʻ": [SpeechSound(0.09, THROAT, 0.4, H, 1.5)],
    "f": [SpeechSound(0.10, LIPS, 0.0, F, 2.0)],
    "s": [SpeechSound(0.12, TEETH, 0.0, S)],
    "sh": [SpeechSound(0.12, PALATE, 0.0, SH)],
    "x": [SpeechSound(0.10, THROAT, 0.0, H, 2.5)],
    "h": [SpeechSound(0.07, THROAT, 0.0, H, 1.5)],
    "b": _stop(LIPS, F, 0.4),
    "d": _stop(TEETH, S, 0.4),
    "g": _stop(PALATE, H, 0.4),
    "j": _stop(PALATE, SH, 0.4, 0.06),
    "p": _stop(LIPS, F),
    "t": _stop(TEETH, S),
    "k": _stop(PALATE, H),
    "q": _stop(THROAT, H),
    "ch": _stop(PALATE, SH, 0.0, 0.08),
    " ": [SpeechSound(0.09, REST)],
}  # fmt: skip


def write_speech(folder: Path, clips: int, rate_hz: int, speakers: int = 1) -> None:
    """Writes clips (16-bit wav) into `folder`/wavs and their texts into `folder`/metadata.csv, in LJSpeech's format for
    one speaker, in Piper's for up to as many as SPEAKERS, who take turns.

    There are as many clips as asked for, but at most one of each sentence and speaker. The first clips do not depend on
    the number of clips. Raises UserError if one cannot be written.
    """
    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    texts, names = sentences(), list(SPEAKERS)[:speakers]
    lines = []
    for number in range(min(clips, len(texts) * len(names))):
        text = texts[number % len(texts)]
        name = names[(number + number // len(texts)) % len(names)]  # The next round has other speakers.
        wave_T = say(text, rate_hz, np.random.default_rng(number + 1), SPEAKERS[name])
        write_wav(folder / "wavs" / f"{number + 1:03}.wav", wave_T, rate_hz)
        lines.append("|".join([f"{number + 1:03}", *[name] * (speakers > 1), f"{text.capitalize()}.\n"]))
    (folder / "metadata.csv").write_text("".join(lines), encoding="utf-8")


def sentences() -> list[str]:
    """Returns all sentences of the words above, each once, in a mixed order."""
    made = [" ".join(words) for words in product(WHO, DID)]
    return [made[place] for place in np.random.default_rng(0).permutation(len(made))]


def letters(text: str) -> list[str]:
    """Splits a text into keys of SOUNDS, some of which have two letters."""
    found: list[str] = []
    while text:
        found.append(text[:2] if text[:2] in SOUNDS else text[:1])
        text = text[len(found[-1]) :]
    return found


def say(text: str, rate_hz: int, draws: np.random.Generator, voice: FormantVoice = VOICE) -> Floats:
    """Synthesises a text in the letters of SOUNDS: samples (T,), at most formants.PEAK."""
    keys, rest = letters(text), SpeechSound(EDGE_SECONDS, REST)
    tempo, sounds = draws.uniform(*TEMPO), [rest]
    accents = [0.0]
    for place, letter in enumerate(keys):
        accent = ACCENT_SEMITONES if stressed(keys, place) else 0.0
        for sound in SOUNDS[letter]:
            sounds.append(sound._replace(seconds=sound.seconds * tempo * draws.uniform(0.93, 1.07)))
            accents.append(accent)
    score = moving([*sounds, rest], [*accents, 0.0], draws, voice)
    return formants.rendered(voice, score, round(len(score.pitch_P) / CONTROL_HZ * rate_hz), rate_hz, draws)


def stressed(keys: Sequence[str], place: int) -> bool:
    """Returns True if the letter at a place is the last vowel of its word."""
    word = [*keys[place:], " "]
    return word[0] in VOWELS and VOWELS.isdisjoint(word[1 : word.index(" ")])


def moving(
    sounds: Sequence[SpeechSound], accents: Sequence[float], draws: np.random.Generator, voice: FormantVoice
) -> Score:
    """Converts sounds to control curves with transitions of GLIDE_SECONDS, shorter ones for noises, and a small random
    variation of the pitch."""
    points = [round(sound.seconds * CONTROL_HZ) for sound in sounds]

    def curve(values: object, over_seconds: float) -> Floats:
        return smooth(np.repeat(np.array(values, float), points, axis=0), over_seconds)

    fall_P = np.linspace(FALL_SEMITONES, 0, sum(points))
    semitones_P = fall_P + curve(accents, 0.12) + smooth(draws.normal(0, 0.3, sum(points)), 0.1)
    lower_PR = curve([sound.resonances_hz for sound in sounds], GLIDE_SECONDS)
    noises = [sound.loudness * (np.arange(len(CONSONANTS)) == sound.noise) for sound in sounds]
    return Score(
        pitch_P=voice.lowest_hz * 2 ** (semitones_P / 12),
        tone_P=curve([sound.tone for sound in sounds], GLIDE_SECONDS / 2),
        resonances_PR=formants.with_upper(lower_PR, voice.mouth),
        consonants_PC=curve(noises, GLIDE_SECONDS / 3),
    )
