"""Each metric compared with another implementation, with known signals, and under growing damage."""

import math
import warnings

import numpy as np
import pytest
import scipy.fft
import scipy.signal
import soxr

from gputrain.audio import metrics
from gputrain.audio.config import Mel
from tests.tables import each_row

RATE = 16000
MEL = Mel(RATE, 40, 160, 640, 1024, 40, 8000)


def voice(seconds: float = 1.0, hz: float = 150.0) -> np.ndarray:
    """Returns decaying harmonics with a vibrato and a pause at the end."""
    at = np.arange(round(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(hz * (1 + 0.02 * np.sin(2 * np.pi * 5 * at))) / RATE
    wave = sum(np.sin(k * phase) / k for k in range(1, 15)) * (at < 0.8 * seconds)
    return (0.2 * wave).astype(np.float32)


def noisy(wave: np.ndarray, loudness: float) -> np.ndarray:
    return (wave + loudness * np.random.default_rng(0).normal(size=len(wave))).astype(np.float32)


def stft_by_scipy(wave: np.ndarray, fft_size: int, hop: int, window: int) -> np.ndarray:
    """Returns magnitudes with centred windows and reflected ends."""
    around = (fft_size - window) // 2
    hann = np.pad(scipy.signal.get_window("hann", window), (around, fft_size - window - around))
    padded = np.pad(wave.astype(np.float64), fft_size // 2, mode="reflect")
    frames = [padded[at : at + fft_size] * hann for at in range(0, len(wave) + 1, hop)]
    return np.maximum(np.abs(np.fft.rfft(frames)), 1e-4)


@each_row(1e-4, 1e-2, 0.3)
def test_multi_resolution_stft_by_another_way(loudness):
    real, made = voice(), noisy(voice(), loudness)
    expected = []
    for sizes in ((1024, 120, 600), (2048, 240, 1200), (512, 50, 240)):
        ours, theirs = (stft_by_scipy(wave, *sizes) for wave in (made, real))
        convergence = np.sqrt(((theirs - ours) ** 2).sum() / (theirs**2).sum())
        expected.append(convergence + np.abs(np.log(ours) - np.log(theirs)).mean())
    assert metrics.multi_resolution_stft(made, real) == pytest.approx(np.mean(expected), rel=1e-4)


def test_multi_resolution_stft_is_the_published_one():
    """The expected value is that of MultiResolutionSTFTLoss() of auraloss 0.4.0 for the same pair."""
    at = np.arange(8000)
    real, made = (0.5 * np.sin(0.02 * at)).astype(np.float32), (0.4 * np.sin(0.021 * at)).astype(np.float32)
    assert metrics.multi_resolution_stft(made, real) == pytest.approx(0.50242, rel=3e-5)


@each_row(1, 600, 1025)
def test_short_waves_are_followed_by_silence(samples):
    real, made = voice()[:samples], noisy(voice()[:samples], 0.1)
    longer = [np.pad(wave, (0, 2048 - samples)) for wave in (made, real)]
    assert metrics.multi_resolution_stft(made, real) == metrics.multi_resolution_stft(*longer) > 0


def test_mel_cepstral_distortion_by_scipys_cosine_transform():
    ours, theirs = (metrics.log_mel_of(wave, MEL) for wave in (noisy(voice(), 0.01), voice()))
    cepstra = [scipy.fft.dct(log_mel.astype(np.float64), axis=0) / len(log_mel) for log_mel in (ours, theirs)]
    difference = (cepstra[0] - cepstra[1])[1:26]
    expected = np.mean(10 / np.log(10) * np.sqrt(2 * (difference**2).sum(axis=0)))
    assert metrics.mel_cepstral_distortion(ours, theirs) == pytest.approx(expected, rel=1e-9)


@each_row(8, 40, 128)
def test_mel_cepstral_distortion_is_the_root_mean_square_difference_in_decibels(bands):
    """The spectra are as smooth as its coefficients; a constant factor in loudness does not count."""
    theirs = np.random.default_rng(0).normal(size=(bands, 5))
    place = math.pi * (np.arange(bands) + 0.5) / bands
    smooth = (0.3 * np.cos(2 * place) - 0.1 * np.cos(7 * place))[:, None]
    decibels = 20 * np.log10(np.exp(smooth))
    found = metrics.mel_cepstral_distortion(theirs + smooth + 2.0, theirs)
    assert found == pytest.approx(math.sqrt((decibels**2).mean()), rel=1e-9)
    assert metrics.mel_cepstral_distortion(theirs + 2.0, theirs) == pytest.approx(0, abs=1e-9)


def test_mel_distance_of_a_louder_sound():
    """Half the loudness is ln 2 less above the floor; in every second frame, the mean is half of that."""
    real = noisy(voice(), 0.05)
    ours, theirs = (metrics.log_mel_of(wave, MEL) for wave in (0.5 * real, real))
    assert metrics.mel_distance(ours, theirs) == pytest.approx(math.log(2), rel=1e-5)
    ours[:, ::2] = theirs[:, ::2]
    assert metrics.mel_distance(ours, theirs) == pytest.approx(math.log(2) / 2, rel=1e-5)


def test_pitches_that_are_known():
    asked = np.array([0, 0, 100, 200, 200, 400, 300, 0], np.float32)
    made = np.array([0, 90, 100, 100, 200 * 2 ** (1 / 12), 0, 0, 0], np.float32)
    match = metrics.pitch_match(made, asked)
    assert (match.both, match.asked_only, match.made_only) == (3, 2, 1)
    assert match.rmse_cents == pytest.approx(math.sqrt((0 + 1200**2 + 100**2) / 3), rel=1e-6)
    precision, recall = 3 / 4, 3 / 5
    assert match.voicing_f1 == pytest.approx(2 * precision * recall / (precision + recall))


def test_matches_of_clips_add_up_to_that_of_all_their_frames():
    rng = np.random.default_rng(0)
    made, asked = (rng.uniform(80, 400, 50) * (rng.random(50) < 0.6) for _ in range(2))
    parts = [metrics.pitch_match(made[part], asked[part]) for part in (slice(0, 13), slice(13, 50))]
    total, whole = parts[0] + parts[1], metrics.pitch_match(made, asked)
    assert total.both == whole.both > 5
    for name in ("rmse_cents", "voicing_f1"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_without_a_voice_there_is_no_figure_of_pitch():
    nothing, voice = np.zeros(5, np.float32), np.full(5, 100, np.float32)
    match = metrics.pitch_match(nothing, nothing)
    assert (match.rmse_cents, match.voicing_f1) == (None, None)
    match = metrics.pitch_match(nothing, voice)
    assert (match.rmse_cents, match.voicing_f1) == (None, 0.0)


def test_equal_sounds_are_at_no_distance_and_damage_counts():
    real = voice()
    levels = (0.0, 3e-4, 3e-3, 3e-2, 0.3)

    def all_of(made):
        log_mels = [metrics.log_mel_of(wave, MEL) for wave in (made, real)]
        return (
            metrics.multi_resolution_stft(made, real),
            metrics.mel_distance(*log_mels),
            metrics.mel_cepstral_distortion(*log_mels),
        )

    rows = np.array([all_of(noisy(real, level)) for level in levels])
    assert (rows[0] == 0).all()
    assert (np.diff(rows, axis=0) > 0).all()


def test_pesq_falls_with_damage_and_is_that_of_its_package():
    package = pytest.importorskip("pesq")
    real = voice(2.0)
    made = noisy(real, 1e-2)
    values = [metrics.pesq(noisy(real, level), real, RATE) for level in (0.0, 1e-3, 1e-2, 0.1)]
    assert values[0] == pytest.approx(4.644, abs=1e-3)  # This is the maximum.
    assert (np.diff(values) < 0).all()
    assert values[2] == pytest.approx(package.pesq(RATE, real, made, "wb"), abs=1e-6)
    slow = [soxr.resample(wave, 12000, RATE) for wave in (real, made)]
    assert metrics.pesq(made, real, 12000) == pytest.approx(package.pesq(RATE, *slow, "wb"), abs=1e-6)
    assert metrics.pesq(real[:3000], real[:3000], RATE) is None
    assert metrics.pesq(real, np.zeros_like(real), RATE) is None
    assert metrics.pesq(np.zeros_like(real), real, RATE) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metrics.pesq(np.zeros_like(real), np.zeros_like(real), RATE) is None


def test_without_its_package_there_is_no_pesq(monkeypatch):
    monkeypatch.setattr(metrics, "is_installed", lambda name: False)
    assert metrics.pesq(voice(), voice(), RATE) is None
