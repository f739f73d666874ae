"""Measures compared with other implementations, or with known properties of the audio."""

import math

import numpy as np
import pytest
import scipy.fft

from gputrain.audio.config import Mel
from gputrain.audio.metrics import mel_cepstral_distortion
from gputrain.errors import UserError
from gputrain.speech.error_rates import Edits, character_edits, word_edits
from gputrain.tts import measures
from gputrain.tts.measures import compare, plain
from tests.tables import each_row

RATE = 16000
MEL = Mel(RATE, 40, 160, 640, 1024, 40, 8000)


def tone(hz: float, seconds: float = 1.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def syllables(tempo: float = 1.0) -> np.ndarray:
    """Returns four vowels: harmonics of 120 Hz with different resonances, with durations for this tempo."""
    parts = []
    for formant_hz, seconds in ((500, 0.3), (1500, 0.2), (900, 0.4), (2500, 0.25)):
        at = np.arange(round(seconds / tempo * RATE)) / RATE
        harmonics = np.arange(1, 50)[:, None]
        loudness = 1 / (1 + ((120 * harmonics - formant_hz) / 200) ** 2)
        parts.append((loudness * np.sin(2 * np.pi * 120 * harmonics * at)).sum(axis=0))
    return (0.05 * np.concatenate(parts)).astype(np.float32)


def cheapest_by_trying(cost: np.ndarray) -> float:
    """Returns the smallest sum of costs over all monotonic paths."""
    last = cost.shape[0] - 1, cost.shape[1] - 1

    def rest(at: tuple[int, int]) -> float:
        ways = [(at[0] + down, at[1] + right) for down, right in ((1, 1), (0, 1), (1, 0))]
        ways = [way for way in ways if way[0] <= last[0] and way[1] <= last[1]]
        return float(cost[at]) + (min(rest(way) for way in ways) if ways else 0.0)

    return rest((0, 0))


def test_a_sound_is_at_no_distance_from_itself():
    wave = syllables()
    found = compare(wave, wave, MEL, f0_method="parselmouth", floor_hz=60, ceiling_hz=400)
    assert found.mcd_db == 0
    assert found.pitch.rmse_cents == 0
    assert found.pitch.both > 100
    assert found.duration_ratio == 1


def test_a_slower_reading_is_near_and_other_sounds_are_far():
    """After warping, the same vowels at 0.8 of the tempo differ only at transitions."""
    real, slow = syllables(), syllables(0.8)
    found = compare(slow, real, MEL, f0_method="parselmouth", floor_hz=60, ceiling_hz=400)
    assert found.duration_ratio == pytest.approx(1.25, abs=1e-3)
    real_MF, slow_MF = (measures.log_mel_of(wave, MEL) for wave in (real, slow))
    unwarped_db = mel_cepstral_distortion(slow_MF[:, : real_MF.shape[1]], real_MF)
    assert found.mcd_db < 1.5
    assert unwarped_db > 4 * found.mcd_db
    assert compare(slow[::-1].copy(), real, MEL, f0_method="swift-f0").mcd_db > 4 * found.mcd_db
    assert found.pitch.rmse_cents < 10


def test_the_path_is_the_cheapest_of_all():
    draw = np.random.default_rng(0)
    for _ in range(5):
        made_MF, real_MF = (draw.normal(size=(40, frames)) for frames in (6, 5))
        made_P, real_P = measures.warping_path(made_MF, real_MF)
        steps = set(zip(np.diff(made_P).tolist(), np.diff(real_P).tolist(), strict=True))
        assert (made_P[0], real_P[0], made_P[-1], real_P[-1]) == (0, 0, 5, 4)
        assert steps <= {(1, 1), (1, 0), (0, 1)}
        made_CF, real_CF = (scipy.fft.dct(mel, axis=0)[1:26] / 40 for mel in (made_MF, real_MF))
        cost = np.sqrt(((made_CF[:, :, None] - real_CF[:, None]) ** 2).sum(axis=0))
        assert cost[made_P, real_P].sum() == pytest.approx(cheapest_by_trying(cost), rel=1e-5)
        mcd_db = mel_cepstral_distortion(made_MF[:, made_P], real_MF[:, real_P])
        assert mcd_db == pytest.approx(10 * math.sqrt(2) / math.log(10) * cost[made_P, real_P].mean(), rel=1e-5)


def test_equal_sums_prefer_the_diagonal_step_and_then_the_next_column():
    rows_P, columns_P = measures.cheapest_path(np.zeros((3, 5)))
    assert list(zip(rows_P.tolist(), columns_P.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)]
    for shape in ((1, 1), (1, 4), (4, 1)):
        rows_P, columns_P = measures.cheapest_path(np.ones(shape))
        assert rows_P.tolist() == (list(range(4)) if shape[0] == 4 else [0] * shape[1])
        assert columns_P.tolist() == (list(range(4)) if shape[1] == 4 else [0] * shape[0])


def test_a_semitone_is_100_cents():
    real, made = tone(200), tone(200 * 2 ** (1 / 12), 1.1)
    found = compare(made, real, MEL, f0_method="parselmouth", floor_hz=80, ceiling_hz=500)
    assert found.pitch.rmse_cents == pytest.approx(100, abs=1)
    assert found.duration_ratio == pytest.approx(1.1)


def test_less_than_a_frame_is_an_error():
    with pytest.raises(UserError, match="the made sound has 10 samples, less than a frame of 160"):
        compare(tone(200)[:10], tone(200), MEL)


def test_the_gain_of_an_alignment_over_an_even_one():
    scores_FS = np.zeros((8, 4), np.float32)
    durations = np.array([1, 1, 1, 5])
    assert measures.alignment_gain(scores_FS, durations) == 0
    scores_FS[np.arange(8), np.repeat(np.arange(4), durations)] = 2.0
    # The uniform alignment is 0 0 1 1 2 2 3 3, the found one 0 1 2 3 3 3 3 3: frames 0, 6 and 7 are equal.
    assert measures.alignment_gain(scores_FS, durations) == pytest.approx(2 - 2 * 3 / 8)


def test_error_rates_are_those_of_jiwer():
    jiwer = pytest.importorskip("jiwer")
    draw = np.random.default_rng(0)
    for _ in range(100):
        written, recognised = (
            " ".join(draw.choice(list("abc"), int(draw.integers(1, 5)))) + " x" * int(draw.integers(0, 9))
            for _ in range(2)
        )
        words, characters = word_edits(written, recognised), character_edits(written, recognised)
        assert words.rate == pytest.approx(jiwer.wer(written, recognised))
        assert characters.rate == pytest.approx(jiwer.cer(written, recognised))


@each_row(
    ("a b c d", "a b c d", Edits(4)),
    ("a b c d", "a c d", Edits(4, 1)),
    ("a b c d", "a b b c d", Edits(4, 1)),
    ("a b c d", "a x c d", Edits(4, 1)),
    ("a b", "", Edits(2, 2)),
    ("", "a b", Edits(0, 2)),
)
def test_words_left_out_and_words_said_twice(written, recognised, expected):
    assert word_edits(written, recognised) == expected
    assert (Edits(1, 1) + expected).length == expected.length + 1


def test_no_text_has_no_rate():
    assert Edits(0, 2).rate is None


@each_row(
    (" Hello,  World! ", "hello world"),
    ("Don't -- “stop”.", "don't stop"),
    ("O\u2018zbekiston, g\u02bboz; tong\u2019", "o'zbekiston g'oz tong"),
    ("Привет, мир!", "привет мир"),
    ("Cafe\u0301 12", "caf\u00e9 12"),
    ("...", ""),
)
def test_plain_words(text, expected):
    assert plain(text) == expected
