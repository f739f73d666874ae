"""Tests each installed pitch tracker on sounds with a known pitch."""

import importlib.util
import sys

import numpy as np
import pytest

from gputrain.audio.f0 import (
    METHODS,
    _swift_model,
    default_method,
    f0,
    interpolated,
    pitch_beyond,
    require_tracker,
    trackable_range,
    voiced,
)
from gputrain.errors import UserError
from tests.tables import each_row

MODULES = {"parselmouth": "parselmouth", "pyworld": "pyworld", "swift-f0": "swift_f0"}
TRACKERS = [
    pytest.param(
        method,
        marks=pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"{module} is an extra"),
    )
    for method, module in MODULES.items()
]


def tone_of(pitch_hz: np.ndarray, sampling_rate: int, harmonics: int = 12) -> np.ndarray:
    """Returns a harmonic sound with this pitch at each sample, without partials above half the sampling rate."""
    phase = 2 * np.pi * np.cumsum(pitch_hz) / sampling_rate
    partials = [np.sin(h * phase) / h * (h * pitch_hz < sampling_rate / 2) for h in range(1, harmonics + 1)]
    return (0.3 * np.sum(partials, axis=0)).astype(np.float32)


def glide_hz(seconds: np.ndarray) -> np.ndarray:
    """Returns a glide that starts at 110 Hz and rises an octave per second."""
    return 110 * 2.0**seconds


def seconds_of(samples: int, sampling_rate: int) -> np.ndarray:
    return (np.arange(samples) + 0.5) / sampling_rate


def centres(wave: np.ndarray, sampling_rate: int, hop_size: int) -> np.ndarray:
    """Returns the times of the mel's frames in seconds."""
    return (np.arange(len(wave) // hop_size) + 0.5) * hop_size / sampling_rate


def cents(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return 1200 * np.log2(ours / theirs)


@pytest.mark.parametrize(("sampling_rate", "hop_size"), [(44100, 512), (16000, 201)])
@pytest.mark.parametrize("method", TRACKERS)
def test_a_glide_is_followed_at_the_centres_of_the_mels_frames(method, sampling_rate, hop_size):
    """At an octave per second, an error of 12 ms would be one of 14 cents."""
    samples = sampling_rate + 77
    wave = tone_of(glide_hz(seconds_of(samples, sampling_rate)), sampling_rate)
    found = f0(wave, sampling_rate, hop_size, method)
    assert found.shape == (samples // hop_size,)
    assert found.dtype == np.float32
    known = voiced(found)
    assert known.mean() > 0.94
    off = cents(found[known], glide_hz(centres(wave, sampling_rate, hop_size))[known])
    assert abs(off[8:-8].mean()) < 3
    assert np.abs(off[8:-8]).max() < 10
    assert np.abs(off).max() < 60  # The first and last windows contain silence.


@pytest.mark.parametrize("method", TRACKERS)
def test_an_octave_jump_is_a_jump_not_a_mistake(method):
    sampling_rate, hop_size = 16000, 160
    pitch_hz = np.where(seconds_of(16000, sampling_rate) < 0.5, 200.0, 400.0)
    found = f0(tone_of(pitch_hz, sampling_rate), sampling_rate, hop_size, method)
    assert np.abs(cents(found[8:44], 200.0)).max() < 10
    assert np.abs(cents(found[56:92], 400.0)).max() < 10


@pytest.mark.parametrize("method", TRACKERS)
def test_silence_and_noise_after_a_note_are_unvoiced(method):
    sampling_rate, hop_size = 16000, 160
    seconds = seconds_of(24000, sampling_rate)
    noise = np.random.default_rng(0).normal(0, 0.05, len(seconds)).astype(np.float32)
    note = tone_of(np.full(len(seconds), 220.0), sampling_rate)
    wave = np.where(seconds < 0.5, note, np.where(seconds < 1.0, 0, noise)).astype(np.float32)
    found = f0(wave, sampling_rate, hop_size, method)
    known = voiced(found)
    assert (found[~known] == 0).all()
    assert np.array_equal(f0(np.zeros(16000, np.float32), 16000, 160, method), np.zeros(100, np.float32))
    assert known[5:45].all()
    assert not known[58:98].any()
    assert known[104:].mean() < 0.1


@pytest.mark.parametrize("method", TRACKERS)
@each_row(0, 1, 159, 160, 500, 1199, 1200, 1201, 1700)
def test_clips_around_the_length_of_a_window(method, samples):
    """Three periods of 40 Hz are 1200 samples: shorter clips are unvoiced, longer ones are tracked."""
    wave = tone_of(np.full(samples, 220.0), 16000)
    found = f0(wave, 16000, 160, method)
    assert found.shape == (samples // 160,)
    assert samples >= 1200 or not found.any()
    assert np.isfinite(found).all()
    assert (np.abs(cents(found[voiced(found)], 220.0)) < 100).all()


@pytest.mark.parametrize("method", TRACKERS)
def test_pitch_stays_within_its_range(method):
    wave = tone_of(np.full(8000, 150.0), 16000)
    found = f0(wave, 16000, 160, method, floor_hz=60, ceiling_hz=120)
    assert (found <= 120.5).all()
    assert np.abs(cents(f0(wave, 16000, 160, method, floor_hz=60, ceiling_hz=1e6)[8:-8], 150.0)).max() < 10


@pytest.mark.parametrize("method", TRACKERS)
def test_pieces_of_a_long_sound_are_tracked_as_the_whole_is(monkeypatch, method):
    """Notes and noise of all loudnesses: 9 seconds at once, and in pieces of 2. swift-f0 has a frame of its own every
    16 ms, which lie elsewhere in a piece; the others differ in a frame that is on the edge of having a voice."""
    rate, hop, range_hz = 8000, 80, {"floor_hz": 75, "ceiling_hz": 600}
    seconds = seconds_of(9 * rate + 37, rate)
    pitch_hz = 150 * 2.0 ** (np.sin(2.1 * seconds) + 0.03 * np.sin(31 * seconds))
    loudness = np.clip(np.sin(5 * seconds), 0, 1) * np.where(seconds < 4, 1, 0.03)
    noise = np.random.default_rng(0).normal(0, 0.002, len(seconds))
    wave = (tone_of(pitch_hz, rate) * loudness + noise).astype(np.float32)
    at_once = f0(wave, rate, hop, method, **range_hz)
    monkeypatch.setattr("gputrain.audio.f0.PIECE_SECONDS", 2.0)
    monkeypatch.setattr("gputrain.audio.f0.MARGIN_SECONDS", 1.0)
    in_pieces = f0(wave, rate, hop, method, **range_hz)
    assert in_pieces.shape == at_once.shape
    both = voiced(at_once) & voiced(in_pieces)
    assert both.sum() > 200
    own_frames = method == "swift-f0"
    assert np.abs(cents(in_pieces[both], at_once[both])).max() <= (20 if own_frames else 1)
    assert (voiced(at_once) != voiced(in_pieces)).sum() <= (27 if own_frames else 1)


@pytest.mark.parametrize("method", TRACKERS)
def test_a_silent_piece_of_a_long_sound(monkeypatch, method):
    monkeypatch.setattr("gputrain.audio.f0.PIECE_SECONDS", 1.0)
    monkeypatch.setattr("gputrain.audio.f0.MARGIN_SECONDS", 0.2)
    wave = np.concatenate([np.zeros(24000), tone_of(np.full(8000, 220.0), 8000)]).astype(np.float32)
    found = f0(wave, 8000, 80, method, floor_hz=75, ceiling_hz=600)
    assert not found[:290].any()
    assert np.abs(cents(found[310:390], 220.0)).max() < 10


def test_the_reach_of_trackers():
    assert trackable_range("parselmouth", 30, 5000) == (30, 5000)
    assert trackable_range("swift-f0", 30, 5000) == (46.875, 2093.75)
    assert trackable_range("swift-f0", 60, 800) == (60, 800)


@pytest.mark.parametrize("method", TRACKERS)
def test_loudness_and_precision_change_nothing(method):
    wave = tone_of(glide_hz(seconds_of(8000, 16000)), 16000)
    found = f0(wave, 16000, 160, method)
    again = f0(wave.astype(np.float64) * 0.5, 16000, 160, method)
    assert np.abs(cents(found[8:-8], again[8:-8])).max() < 5


def test_parselmouth_is_the_default_and_pyworld_where_it_is_not_installed(monkeypatch):
    assert default_method() == ("parselmouth" if importlib.util.find_spec("parselmouth") else "pyworld")
    monkeypatch.setitem(sys.modules, "parselmouth", None)
    assert default_method() == "pyworld"
    wave = tone_of(np.full(8000, 150.0), 16000)
    assert np.array_equal(f0(wave, 16000, 160), f0(wave, 16000, 160, "pyworld"))


@pytest.mark.parametrize("method", ["parselmouth", "pyworld", "swift-f0"])
def test_a_package_that_is_not_installed_is_named_with_how_to_get_it(monkeypatch, method):
    monkeypatch.setitem(sys.modules, MODULES[method], None)
    if method == "swift-f0":
        _swift_model.cache_clear()
    package = {"parselmouth": "praat-parselmouth", "pyworld": "pyworld-prebuilt", "swift-f0": "swift-f0"}
    for call in (lambda: f0(np.ones(16000, np.float32), 16000, 160, method), lambda: require_tracker(method)):
        with pytest.raises(UserError, match=f"f0 by {method}: the package .* is not installed") as error:
            call()
        assert error.value.hint.startswith(f"pip install {package[method]}, or choose another of parselmouth, ")


@each_row(
    ({"method": "crepe"}, "unknown f0 method 'crepe'"),
    ({"floor_hz": 0.0}, "between 0 and 1100 Hz"),
    ({"floor_hz": 500.0, "ceiling_hz": 400.0}, "between 500 and 400 Hz"),
    ({"sampling_rate": 70}, "between 40 and 35 Hz at 70 Hz"),
    ({"wave": np.array([0.0, np.nan] * 8000)}, "not finite"),
)
def test_mistakes_are_told(changes, message):
    with pytest.raises(UserError, match=message) as error:
        f0(**{"wave": np.ones(16000), "sampling_rate": 16000, "hop_size": 160, "method": "pyworld", **changes})
    assert error.value.hint
    if "method" in changes:
        assert all(method in error.value.hint for method in METHODS)


def test_gaps_are_bridged_in_log_f0_and_ends_held():
    given = np.array([0, 0, 100, 0, 0, 0, 1600, 800, 0], np.float32)
    expected = [100, 100, 100, 200, 400, 800, 1600, 800, 800]
    assert np.allclose(interpolated(given), expected, rtol=1e-6)
    assert interpolated(given).dtype == np.float32
    assert np.array_equal(voiced(given), given > 0)
    assert np.array_equal(given[:3], [0, 0, 100])


@each_row(0, 1, 7)
def test_without_a_pitch_there_is_nothing_to_bridge_from(frames):
    assert np.array_equal(interpolated(np.zeros(frames, np.float32)), np.zeros(frames, np.float32))


def test_noise_has_no_pitch_beyond_the_limits_and_a_whistle_has_its_own() -> None:
    """A tracker erred on the noise; 3000 Hz are beyond the wider limits too."""
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, 44100).astype(np.float32)
    assert pitch_beyond(noise, 44100, 512, np.full(86, 50.0), 40, 1100) is None
    whistle = tone_of(np.full(44100, 3000.0), 44100, harmonics=1)
    assert pitch_beyond(whistle, 44100, 512, np.zeros(86), 40, 1100) == pytest.approx((3000, 3000), rel=0.01)
