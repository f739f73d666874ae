"""Synthetic singing compared with its melody; its clips are reproducible."""

import numpy as np
import pytest
import soundfile

from gputrain.audio.f0 import f0, voiced
from gputrain.audio.formants import CONTROL_HZ, PEAK, FormantVoice, harmonics
from gputrain.vocoder import synthetic
from gputrain.vocoder.synthetic import NoteSegment

RATE_HZ = 22050
VOICE = FormantVoice(220, 1.0, 0.0, 5.0, 0.0)


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
    assert [np.abs(wave_T).max() for wave_T in waves] == pytest.approx([PEAK] * 6, abs=1 / 32768)


def test_the_pitch_is_that_of_the_melody():
    notes = [NoteSegment(0.8, 0, 2, 1.0, -1), NoteSegment(0.3, 7, 2, 0.0, 0), NoteSegment(0.9, 7, 0, 1.0, -1)]
    score = synthetic.glided(VOICE, notes, np.random.default_rng(0))
    wave_T = harmonics(score, 2 * RATE_HZ, RATE_HZ)
    found_F = f0(wave_T, RATE_HZ, 256, "parselmouth")
    at_F = (np.arange(len(found_F)) + 0.5) * 256 / RATE_HZ
    asked_F = np.interp(at_F * CONTROL_HZ, np.arange(len(score.pitch_P)), score.pitch_P)
    still_F = voiced(found_F) & ((at_F < 0.7) | (at_F > 1.2))
    assert np.abs(1200 * np.log2(found_F[still_F] / asked_F[still_F])).max() < 20
    assert voiced(found_F)[(at_F > 0.1) & (at_F < 0.7)].all()
    assert not voiced(found_F)[(at_F > 0.9) & (at_F < 1.0)].any()
    assert np.median(asked_F[at_F < 0.6]) == pytest.approx(220, rel=0.02)
    assert np.median(asked_F[at_F > 1.4]) == pytest.approx(220 * 2 ** (7 / 12), rel=0.02)
