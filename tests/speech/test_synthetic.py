"""Synthetic speech: durations, acoustic properties of its sounds, and agreement with its transcript."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from gputrain.audio.formants import PEAK
from gputrain.speech.synthetic import (
    EDGE_SECONDS,
    NONE,
    SOUNDS,
    SPEAKERS,
    TEMPO,
    letters,
    say,
    sentences,
    stressed,
    write_speech,
)
from gputrain.speech.text.frontend import frontend
from tests.tables import each_row

RATE_HZ = 16000


def said(text: str) -> np.ndarray:
    """Returns the samples of a text between its silent edges."""
    edge = round(EDGE_SECONDS * RATE_HZ)
    return say(text, RATE_HZ, np.random.default_rng(1))[edge:-edge]


def middle(letter: str, between: str = "a") -> np.ndarray:
    """Returns the samples of a letter between two others, by their durations: tempo varies by 15 % at most."""
    wave = said(between + letter + between)
    seconds = [sum(sound.seconds for sound in SOUNDS[one]) for one in (between, letter, between)]
    whole, before = sum(seconds), seconds[0]
    inner = (before + 0.3 * seconds[1]) / whole, (before + 0.7 * seconds[1]) / whole
    return wave[round(inner[0] * len(wave)) : round(inner[1] * len(wave))]


def periodicity(wave: np.ndarray) -> float:
    """Returns the highest autocorrelation at periods of 80 to 200 Hz: 1 for a periodic signal."""
    lags = range(RATE_HZ // 200, RATE_HZ // 80)
    pairs = [(wave[lag:], wave[:-lag]) for lag in lags]
    return max(float(a @ b / np.sqrt((a @ a) * (b @ b))) for a, b in pairs)


def centre_hz(wave: np.ndarray) -> float:
    """Returns the centre of gravity of the power spectrum."""
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2
    return float((np.fft.rfftfreq(len(wave), 1 / RATE_HZ) * power).sum() / power.sum())


def resonance_hz(wave: np.ndarray, near_hz: float) -> float:
    """Returns the peak near a frequency of the spectrum, without spectral tilt and smoothed over the harmonics."""
    size = 4096
    hz = np.fft.rfftfreq(size, 1 / RATE_HZ)
    power = np.abs(hz * np.fft.rfft(wave * np.hanning(len(wave)), size)) ** 2
    envelope = np.convolve(power, np.hanning(round(250 / RATE_HZ * size)), "same")
    inside = (hz > 0.75 * near_hz) & (hz < 1.25 * near_hz)
    return float(hz[inside][envelope[inside].argmax()])


@each_row(("a", 720, 1500), ("i", 280, 2250), ("o", 600, 950), ("u", 300, 900))
def test_vowels_resound_where_they_should(vowel: str, first: float, second: float) -> None:
    wave = said(vowel * 3)
    steady = wave[len(wave) // 4 : -len(wave) // 4]
    assert resonance_hz(steady, first) == pytest.approx(first, abs=60)
    assert resonance_hz(steady, second) == pytest.approx(second, abs=60)


def test_folds_sound_in_vowels_and_not_in_s() -> None:
    assert min(periodicity(said(vowel * 3)[2000:2800]) for vowel in "aeiou") > 0.9
    assert periodicity(middle("s")) < 0.5
    assert centre_hz(middle("s")) > 5000
    assert 2300 < centre_hz(middle("sh")) < 4300
    assert centre_hz(middle("m")) < 700


def test_a_stop_is_silent_and_then_bursts() -> None:
    wave = said("ata")
    hop = RATE_HZ // 200
    loudness = np.array([np.square(wave[at : at + hop]).mean() for at in range(0, len(wave) - hop, hop)]) ** 0.5
    inner = loudness[len(loudness) // 4 : -len(loudness) // 4]
    quietest = int(inner.argmin())
    assert inner[quietest] < 0.03 * loudness.max()
    burst = inner[quietest : quietest + 10].argmax() + quietest
    assert inner[burst] > 10 * inner[quietest]


def test_a_sentence_is_as_long_as_its_letters() -> None:
    keys = letters("doʻstim choy oldi")
    assert keys == ["d", "oʻ", "s", "t", "i", "m", " ", "ch", "o", "y", " ", "o", "l", "d", "i"]
    seconds = sum(sound.seconds for letter in keys for sound in SOUNDS[letter])
    wave = said("doʻstim choy oldi")
    assert TEMPO[0] * 0.93 * seconds < len(wave) / RATE_HZ < TEMPO[1] * 1.07 * seconds
    assert np.abs(wave).max() == pytest.approx(PEAK)
    assert [place for place in range(len(keys)) if stressed(keys, place)] == [4, 8, 14]


def test_clips_and_their_transcript(tmp_path: Path) -> None:
    write_speech(tmp_path / "few", 3, RATE_HZ)
    write_speech(tmp_path / "more", 5, RATE_HZ)
    rows = [line.split("|") for line in (tmp_path / "more" / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    assert [name for name, _ in rows] == ["001", "002", "003", "004", "005"]
    reader = frontend("uz")
    assert [reader.normalize(text) for _, text in rows] == [f"{text}." for text in sentences()[:5]]
    for name in ("001", "002", "003"):
        few, more = (tmp_path / folder / "wavs" / f"{name}.wav" for folder in ("few", "more"))
        assert few.read_bytes() == more.read_bytes()
    sound, rate_hz = soundfile.read(tmp_path / "more/wavs/004.wav")
    assert rate_hz == RATE_HZ
    assert 0.6 < len(sound) / rate_hz < 2.2


def test_speakers_take_turns_and_differ_in_pitch(tmp_path: Path) -> None:
    write_speech(tmp_path, 8, RATE_HZ, speakers=4)
    rows = [line.split("|") for line in (tmp_path / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    assert [name for _, name, _ in rows] == 2 * list(SPEAKERS)
    assert [text.lower().rstrip(".") for _, _, text in rows] == sentences()[:8]
    for _, name, _ in rows[:4]:
        wave = say("aaaa", RATE_HZ, np.random.default_rng(1), SPEAKERS[name])
        steady = wave[len(wave) // 3 : -len(wave) // 3]
        periods = [float(steady[lag:] @ steady[:-lag]) / (len(steady) - lag) for lag in range(40, RATE_HZ // 90)]
        pitch_hz = RATE_HZ / (40 + int(np.argmax(periods)))
        # The pitch falls by 4 semitones from the lowest note and 4 above it, and the accent raises it by up to 3.
        assert SPEAKERS[name].lowest_hz < pitch_hz < SPEAKERS[name].lowest_hz * 2 ** (5 / 12), name


def test_every_sentence_is_said_by_every_speaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputrain.speech.synthetic.sentences", lambda: ["ota keldi", "ona kuldi"])
    write_speech(tmp_path, 99, RATE_HZ, speakers=2)
    rows = [line.split("|") for line in (tmp_path / "metadata.csv").read_text(encoding="utf-8").splitlines()]
    assert [(name, text) for _, name, text in rows] == [
        ("Anvar", "Ota keldi."), ("Lola", "Ona kuldi."), ("Lola", "Ota keldi."), ("Anvar", "Ona kuldi.")
    ]  # fmt: skip


def test_every_sentence_has_sounds_for_all_its_letters() -> None:
    made = sentences()
    assert len(made) == len(set(made)) == 90
    assert all(letter in SOUNDS for text in made for letter in letters(text))
    reader = frontend("uz")
    assert not any(reader.unknown(reader.normalize(text)) for text in made)
    voiceless = [letter for letter, sounds in SOUNDS.items() if not any(sound.tone for sound in sounds)]
    assert set(voiceless) == {"f", "s", "sh", "x", "h", "p", "t", "k", "q", "ch", " "}
    assert all(sound.noise != NONE or sound.tone or letter == " " for letter in "fsxhv" for sound in SOUNDS[letter])
