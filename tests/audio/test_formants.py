"""The formant synthesiser: resonances, harmonics and noises compared with their formulas."""

import numpy as np
import pytest
import scipy.signal

from gputrain.audio import formants
from gputrain.audio.formants import FormantVoice, Score
from tests.tables import each_row

RATE_HZ = 22050
SCHWA_HZ = np.array([500.0, 1500, 2500, *formants.UPPER_HZ])
VOICE = FormantVoice(220, 1.0, 0.0, 5.0, 0.0)


def held(pitch_hz, *, tone=1.0, consonant=-1, seconds=1.0):
    """Returns a score with constant curves."""
    points = round(seconds * formants.CONTROL_HZ)
    consonants_C = np.arange(len(formants.CONSONANTS)) == consonant
    return Score(
        np.full(points, float(pitch_hz)), np.full(points, tone), np.tile(SCHWA_HZ, (points, 1)),
        np.tile(consonants_C, (points, 1)).astype(float),
    )  # fmt: skip


def magnitudes(wave_T):
    """Returns the amplitudes at whole Hz of a wave of one second."""
    return 2 * np.abs(np.fft.rfft(wave_T)) / len(wave_T)


def test_the_mouth_is_a_cascade_of_resonators():
    hz_N = np.array([0.0, 300, 500, 1000, 4000, 9000])
    expected_N = np.ones(len(hz_N), complex)
    for resonance_hz, bandwidth_hz in zip(SCHWA_HZ, formants.BANDWIDTHS_HZ, strict=True):
        square = resonance_hz**2
        expected_N *= scipy.signal.freqs([square], [1, bandwidth_hz, square], hz_N)[1]
    found_N = formants.mouth(hz_N, SCHWA_HZ)
    np.testing.assert_allclose(found_N, expected_N, rtol=1e-12)
    assert found_N[0] == 1
    np.testing.assert_allclose(formants.mouth(hz_N, np.tile(SCHWA_HZ, (3, 1, 1)))[1], found_N, rtol=1e-12)


def test_harmonics_are_the_mouths_and_none_folds_back():
    lines = magnitudes(formants.harmonics(held(3600), RATE_HZ, RATE_HZ))
    at_hz = np.array([3600, 7200, 10800])
    fades = [1, 1, (RATE_HZ / 2 - 10800) / formants.FADE_HZ]
    expected = np.abs(formants.mouth(at_hz.astype(float), SCHWA_HZ)) / [1, 2, 3] * fades
    np.testing.assert_allclose(lines[at_hz], expected, rtol=1e-6)
    lines[at_hz] = 0
    assert lines.max() < 1e-6 * expected.max()  # 14400 Hz would fold to 7650


def test_between_points_of_control_the_loudness_goes_straight():
    still = held(200)
    rising = still._replace(tone_P=np.linspace(0, 1, len(still.tone_P)))
    at_T = np.minimum(np.arange(RATE_HZ) / RATE_HZ * formants.CONTROL_HZ, len(still.tone_P) - 1)
    rise_T = np.interp(at_T, np.arange(len(still.tone_P)), rising.tone_P)
    before_T = at_T < len(still.tone_P) - 1
    found_T, full_T = (formants.harmonics(score, RATE_HZ, RATE_HZ) for score in (rising, still))
    np.testing.assert_allclose(found_T[before_T], (rise_T * full_T)[before_T], atol=1e-9)


@each_row((0, 7000), (1, 3300))
def test_a_consonant_is_noise_where_it_should_be(consonant, centre_hz):
    draws = np.random.default_rng(0)
    wave_T = formants.noise(VOICE, held(200, tone=0.0, consonant=consonant), RATE_HZ, RATE_HZ, draws)
    power = magnitudes(wave_T) ** 2
    assert np.average(np.arange(len(power)), weights=power) == pytest.approx(centre_hz, rel=0.03)
    hush_T = formants.noise(VOICE, held(200, tone=0.0), RATE_HZ, RATE_HZ, draws)
    assert hush_T.std() == pytest.approx(formants.ROOM * np.sqrt(3 / 8 * 2), rel=0.05)


def test_smoothing_keeps_what_is_still_and_halves_a_step_at_its_middle():
    step_P = np.repeat([1.0, 3.0], 100)
    smoothed_P = formants.smooth(step_P, 0.1)
    assert smoothed_P[[0, 80, 120, 199]] == pytest.approx([1, 1, 3, 3])
    assert smoothed_P[99] + smoothed_P[100] == pytest.approx(4)
    assert (np.diff(smoothed_P) >= -1e-12).all()
    both_PR = formants.smooth(np.stack([step_P, 0 * step_P + 5], axis=1), 0.1)
    np.testing.assert_allclose(both_PR, np.stack([smoothed_P, 0 * step_P + 5], axis=1))
