"""Synthetic speech and singing: resonances, noises and pitch, agreement with the transcript, and reproducible clips."""

from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import soundfile

from gputrain.audio import synthetic
from gputrain.audio.f0 import f0
from gputrain.audio.synthetic import CONTROL_HZ, PEAK, SOUNDS, VOICES, letters, say, sentences
from gputrain.speech.text.frontend import frontend
from tests.tables import each_row

RATE_HZ = 16000


def said(text: str) -> np.ndarray:
    """Returns the samples of a text between its silent edges."""
    edge = round(0.04 * RATE_HZ)
    return say(text, RATE_HZ, np.random.default_rng(1))[edge:-edge]


def middle(letter: str) -> np.ndarray:
    """Returns the samples of a letter between two others, by their durations: tempo varies by 15 % at most."""
    wave = said(f"a{letter}a")
    seconds = [sum(sound.seconds for sound in SOUNDS[one]) for one in ("a", letter, "a")]
    inner = (seconds[0] + 0.3 * seconds[1]) / sum(seconds), (seconds[0] + 0.7 * seconds[1]) / sum(seconds)
    return wave[round(inner[0] * len(wave)) : round(inner[1] * len(wave))]


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


def test_the_mouth_is_a_cascade_of_resonators() -> None:
    hz_N, resonances_R = np.array([0.0, 300, 500, 1000, 4000, 9000]), np.array([500.0, 1500, 2500, *synthetic.UPPER_HZ])
    expected_N = np.ones(len(hz_N))
    for hz, bandwidth_hz in zip(resonances_R, synthetic.BANDWIDTHS_HZ, strict=True):
        expected_N *= np.abs(scipy.signal.freqs([hz**2], [1, bandwidth_hz, hz**2], hz_N)[1])
    np.testing.assert_allclose(synthetic.mouth_gain(hz_N, resonances_R[None])[0], expected_N, rtol=1e-12)


@each_row(("a", 720, 1500), ("i", 280, 2250), ("o", 600, 950), ("u", 300, 900))
def test_vowels_resound_where_they_should(vowel: str, first: float, second: float) -> None:
    wave = said(vowel * 3)
    steady = wave[len(wave) // 4 : -len(wave) // 4]
    assert resonance_hz(steady, first) == pytest.approx(first, abs=60)
    assert resonance_hz(steady, second) == pytest.approx(second, abs=60)


def test_consonants_are_noises_and_a_stop_is_silent_before_its_burst() -> None:
    assert centre_hz(middle("s")) > 5000
    assert 2300 < centre_hz(middle("sh")) < 4300
    assert centre_hz(middle("m")) < 700
    wave, hop = said("ata"), RATE_HZ // 200
    loudness = np.array([np.square(wave[at : at + hop]).mean() for at in range(0, len(wave) - hop, hop)]) ** 0.5
    inner = loudness[len(loudness) // 4 : -len(loudness) // 4]
    quietest = int(inner.argmin())
    assert inner[quietest] < 0.03 * loudness.max()
    assert inner[quietest : quietest + 10].max() > 10 * inner[quietest]


def test_clips_and_their_transcript(tmp_path: Path) -> None:
    assert letters("doʻstim choy") == ["d", "oʻ", "s", "t", "i", "m", " ", "ch", "o", "y"]
    synthetic.write_speech(tmp_path / "few", 3, RATE_HZ)
    synthetic.write_speech(tmp_path / "more", 5, RATE_HZ)
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
    assert np.abs(sound).max() == pytest.approx(PEAK, abs=1 / 32768)


def test_every_sentence_has_sounds_for_all_its_letters() -> None:
    made = sentences()
    assert len(made) == len(set(made)) == 90
    reader = frontend("uz")
    assert all("".join(letters(text)) == text and not reader.unknown(reader.normalize(text)) for text in made)


def test_the_same_numbers_give_the_same_singing_whichever_others_there_are(tmp_path: Path) -> None:
    synthetic.write_clips(tmp_path / "one", range(6), RATE_HZ, (0.5, 1.5))
    synthetic.write_clips(tmp_path / "two", [5, 1], RATE_HZ, (0.5, 1.5))
    names = [f"voice_{number}.wav" for number in ("1_01", "1_02", "2_01", "2_02", "3_01", "4_01")]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in ("voice_2_01.wav", "voice_2_02.wav"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    waves = [soundfile.read(tmp_path / "one" / name)[0] for name in names]
    assert all(0.5 * RATE_HZ <= len(wave_T) <= 1.5 * RATE_HZ for wave_T in waves)
    assert len({len(wave_T) for wave_T in waves}) == 6
    assert [np.abs(wave_T).max() for wave_T in waves] == pytest.approx([PEAK] * 6, abs=1 / 32768)


def test_singing_has_the_pitch_that_is_returned_with_it() -> None:
    wave_T, pitch_P = synthetic.sing(VOICES[1], 4.0, RATE_HZ, np.random.default_rng(3))
    found_F = f0(wave_T, RATE_HZ, 128, "parselmouth")
    at_F = (np.arange(len(found_F)) + 0.5) * 128 / RATE_HZ * CONTROL_HZ
    asked_F = pitch_P[np.minimum(at_F.round().astype(int), len(pitch_P) - 1)]
    sung_F = (found_F > 0) & (asked_F > 0)
    assert np.percentile(np.abs(1200 * np.log2(found_F[sung_F] / asked_F[sung_F])), 90) < 30
    assert sung_F.mean() > 0.7
    assert ((found_F > 0) & (asked_F == 0)).mean() < 0.1
    lowest, highest = np.log2(pitch_P[pitch_P > 0].min() / 165) * 12, np.log2(pitch_P.max() / 165) * 12
    assert -1.5 < lowest < highest < 13.5
