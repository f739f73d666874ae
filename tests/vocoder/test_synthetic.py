"""Made-up singing beside what it is made of: the pitch, the resonances and the noises that were asked for."""

import numpy as np
import pytest
import scipy.signal
import soundfile

from gputrain.audio.f0 import f0, voiced
from gputrain.vocoder import synthetic
from gputrain.vocoder.synthetic import Score, Sung

RATE_HZ = 22050
SCHWA_HZ = np.array([500.0, 1500, 2500, *synthetic.UPPER_HZ])
VOICE = synthetic.Voice(220, 1.0, 0.0, 5.0, 0.0)


def held(pitch_hz, *, tone=1.0, consonant=-1, seconds=1.0):
    """A score on which nothing moves."""
    points = round(seconds * synthetic.CONTROL_HZ)
    consonants_C = np.arange(len(synthetic.CONSONANTS)) == consonant
    return Score(
        np.full(points, float(pitch_hz)), np.full(points, tone), np.tile(SCHWA_HZ, (points, 1)),
        np.tile(consonants_C, (points, 1)).astype(float),
    )  # fmt: skip


def magnitudes(wave_T):
    """Amplitudes of whole Hz, of a second."""
    return 2 * np.abs(np.fft.rfft(wave_T)) / len(wave_T)


def test_the_same_numbers_give_the_same_clips_whichever_others_there_are(tmp_path):
    synthetic.write_clips(tmp_path / "one", range(6), RATE_HZ, (0.5, 1.5))
    synthetic.write_clips(tmp_path / "two", [5, 1], RATE_HZ, (0.5, 1.5))
    names = [f"voice_{number}.wav" for number in ("1_01", "1_02", "2_01", "2_02", "3_01", "4_01")]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in ("voice_2_01.wav", "voice_2_02.wav"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    waves = [soundfile.read(tmp_path / "one" / name)[0] for name in names]
    assert all(0.5 * RATE_HZ <= len(wave_T) <= 1.5 * RATE_HZ for wave_T in waves)
    assert len({len(wave_T) for wave_T in waves}) == 6
    assert [np.abs(wave_T).max() for wave_T in waves] == pytest.approx([synthetic.PEAK] * 6, abs=1 / 32768)


def test_the_mouth_is_a_cascade_of_resonators():
    hz_N = np.array([0.0, 300, 500, 1000, 4000, 9000])
    expected_N = np.ones(len(hz_N), complex)
    for resonance_hz, bandwidth_hz in zip(SCHWA_HZ, synthetic.BANDWIDTHS_HZ, strict=True):
        square = resonance_hz**2
        expected_N *= scipy.signal.freqs([square], [1, bandwidth_hz, square], hz_N)[1]
    found_N = synthetic.mouth(hz_N, SCHWA_HZ)
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-12)
    assert found_N[0] == 1
    np.testing.assert_allclose(synthetic.mouth(hz_N, np.tile(SCHWA_HZ, (3, 1, 1)))[1], found_N, rtol=1e-12)


def test_harmonics_are_the_mouths_and_none_folds_back():
    lines = magnitudes(synthetic.harmonics(held(3600), RATE_HZ, RATE_HZ))
    at_hz = np.array([3600, 7200, 10800])
    fades = [1, 1, (RATE_HZ / 2 - 10800) / synthetic.FADE_HZ]
    expected = np.abs(synthetic.mouth(at_hz.astype(float), SCHWA_HZ)) / [1, 2, 3] * fades
    np.testing.assert_allclose(lines[at_hz], expected, rtol=1e-6)
    lines[at_hz] = 0
    assert lines.max() < 1e-6 * expected.max()  # 14400 Hz would fold to 7650


def test_between_points_of_control_the_loudness_goes_straight():
    still = held(200)
    rising = still._replace(tone_P=np.linspace(0, 1, len(still.tone_P)))
    at_T = np.minimum(np.arange(RATE_HZ) / RATE_HZ * synthetic.CONTROL_HZ, len(still.tone_P) - 1)
    rise_T = np.interp(at_T, np.arange(len(still.tone_P)), rising.tone_P)
    before_T = at_T < len(still.tone_P) - 1
    found_T, full_T = (synthetic.harmonics(score, RATE_HZ, RATE_HZ) for score in (rising, still))
    np.testing.assert_allclose(found_T[before_T], (rise_T * full_T)[before_T], atol=1e-9)


def test_the_pitch_is_that_of_the_melody():
    notes = [Sung(0.8, 0, 2, 1.0, -1), Sung(0.3, 7, 2, 0.0, 0), Sung(0.9, 7, 0, 1.0, -1)]
    score = synthetic.glided(VOICE, notes, np.random.default_rng(0))
    wave_T = synthetic.harmonics(score, 2 * RATE_HZ, RATE_HZ)
    found_F = f0(wave_T, RATE_HZ, 256, "parselmouth")
    at_F = (np.arange(len(found_F)) + 0.5) * 256 / RATE_HZ
    asked_F = np.interp(at_F * synthetic.CONTROL_HZ, np.arange(len(score.pitch_P)), score.pitch_P)
    still_F = voiced(found_F) & ((at_F < 0.7) | (at_F > 1.2))
    assert np.abs(1200 * np.log2(found_F[still_F] / asked_F[still_F])).max() < 20
    assert voiced(found_F)[(at_F > 0.1) & (at_F < 0.7)].all()
    assert not voiced(found_F)[(at_F > 0.9) & (at_F < 1.0)].any()
    assert np.median(asked_F[at_F < 0.6]) == pytest.approx(220, rel=0.02)
    assert np.median(asked_F[at_F > 1.4]) == pytest.approx(220 * 2 ** (7 / 12), rel=0.02)


@pytest.mark.parametrize(("consonant", "centre_hz"), [(0, 7000), (1, 3300)])
def test_a_consonant_is_noise_where_it_should_be(consonant, centre_hz):
    draws = np.random.default_rng(0)
    wave_T = synthetic.noise(VOICE, held(200, tone=0.0, consonant=consonant), RATE_HZ, RATE_HZ, draws)
    power = magnitudes(wave_T) ** 2
    assert np.average(np.arange(len(power)), weights=power) == pytest.approx(centre_hz, rel=0.03)
    hush_T = synthetic.noise(VOICE, held(200, tone=0.0), RATE_HZ, RATE_HZ, draws)
    assert hush_T.std() == pytest.approx(synthetic.ROOM * np.sqrt(3 / 8 * 2), rel=0.05)


def test_smoothing_keeps_what_is_still_and_halves_a_step_at_its_middle():
    step_P = np.repeat([1.0, 3.0], 100)
    smoothed_P = synthetic.smooth(step_P, 0.1)
    assert smoothed_P[[0, 80, 120, 199]] == pytest.approx([1, 1, 3, 3])
    assert smoothed_P[99] + smoothed_P[100] == pytest.approx(4)
    assert (np.diff(smoothed_P) >= -1e-12).all()
    both_PR = synthetic.smooth(np.stack([step_P, 0 * step_P + 5], axis=1), 0.1)
    np.testing.assert_allclose(both_PR, np.stack([smoothed_P, 0 * step_P + 5], axis=1))
