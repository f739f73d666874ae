"""Reports on recordings with known faults."""

import re
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import soxr

from gputrain.errors import UserError
from gputrain.vocoder.prepare import VocoderPrepareConfig, prepare_sound, validate_sounds
from gputrain.vocoder.store import VocoderStore
from tests.vocoder.test_prepare import tone

pytest.importorskip("parselmouth")

RATE = 16000


def silence(seconds: float, rate: int = RATE) -> np.ndarray:
    return np.zeros(round(seconds * rate), np.float32)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "low").mkdir()
    (folder / "high").mkdir()
    soundfile.write(folder / "low/a.wav", np.concatenate([silence(0.3), tone(1.0, RATE, 110), silence(0.2)]), RATE)
    soundfile.write(folder / "low/b.wav", tone(2.0, 8000, 120), 8000)
    soundfile.write(folder / "high/c.flac", tone(1.0, RATE, 440), RATE)
    clipped = (6 * tone(1.0, RATE, 330)).clip(-1, 1)
    soundfile.write(folder / "high/d.wav", clipped, RATE)
    noise = 0.1 * np.random.default_rng(0).normal(size=RATE)
    soundfile.write(folder / "e.wav", noise, RATE)
    (folder / "high/again.wav").write_bytes((folder / "high/d.wav").read_bytes())
    soundfile.write(folder / "silent.wav", silence(1), RATE)
    soundfile.write(folder / "nan.wav", np.full(800, np.nan, np.float32), RATE, subtype="FLOAT")
    (folder / "cut.flac").write_bytes((folder / "high/c.flac").read_bytes()[:50])
    (folder / "empty.wav").write_bytes(b"")
    (folder / "notes.txt").write_text("x")
    return folder


def test_recordings_in_numbers(recordings):
    seen = []
    report = validate_sounds(recordings, progress=lambda *at: seen.append(at))
    total = report.total
    assert total.recordings == 5
    assert total.hours == pytest.approx(6.5 / 3600)
    assert total.rates == {8000: 1, 16000: 4}
    assert (total.seconds.min, total.seconds.median, total.seconds.max) == (1.0, 1.0, 2.0)
    assert seen[-1] == (9, 9)  # Each content is read once.
    assert report.ignored == {".txt": ["notes.txt"]}
    assert {refusal.path: refusal.reason for refusal in report.refused} == {
        "cut.flac": "unreadable", "empty.wav": "unreadable", "high/d.wav": "duplicate", "nan.wav": "unreadable",
        "silent.wav": "silent",
    }  # fmt: skip
    assert not report.prepared


def test_silence_is_measured_at_both_ends(recordings):
    found = validate_sounds(recordings).total
    assert found.silent_share == pytest.approx(0.5 / 6.5, abs=0.01)
    assert found.silent_ends == pytest.approx(0.5 / 6.5, abs=0.01)


def test_silence_is_fifty_decibels_below_the_loudest(tmp_path):
    loud = tone(1.0, RATE)
    soundfile.write(tmp_path / "a.wav", np.concatenate([loud, 1e-3 * loud, 1e-2 * loud, loud]), RATE, subtype="FLOAT")
    assert validate_sounds(tmp_path).total.silent_share == pytest.approx(0.25, abs=0.01)


def test_shares_are_weighted_by_duration(recordings):
    """Of 3.5 seconds, half a second is silent; two seconds have a pitch throughout, and one second is noise."""
    assert validate_sounds(recordings).total.voiced_share == pytest.approx(5 / 6.5, abs=0.04)


def test_the_range_of_a_glide(tmp_path):
    """An octave up: 5 % of it lies below the reported low end, and 5 % above the high one."""
    glide_hz = 110 * 2.0 ** np.linspace(0, 1, 2 * RATE)
    phase = 2 * np.pi * np.cumsum(glide_hz) / RATE
    soundfile.write(tmp_path / "a.wav", 0.2 * sum(np.sin(k * phase) / k for k in range(1, 6)), RATE)
    expected = (110 * 2**0.05, 110 * 2**0.95)
    assert validate_sounds(tmp_path).total.pitch_hz == pytest.approx(expected, rel=0.005)


def test_clipping_is_measured_and_named(recordings):
    report = validate_sounds(recordings)
    clipped = np.abs(6 * tone(1.0, RATE, 330)) >= 1
    assert list(report.clipped) == ["high/again.wav"]  # It is sorted before d.wav.
    assert report.clipped["high/again.wav"] == pytest.approx(clipped.mean(), abs=2e-3)
    assert report.total.clipped == 1
    assert report.total.clipped_share == pytest.approx(clipped.mean() / 6.5, abs=1e-3)


def test_findings_say_what_to_act_on(recordings, tmp_path):
    said = " | ".join(validate_sounds(recordings, sampling_rate=16000).findings)
    assert "5 files are left out" in said
    assert "1 of 5 recordings has less than 16000 Hz" in said
    assert "train at 8000 Hz" in said
    assert "of sound is little" in said
    assert "1 recording is clipped" in said
    assert "% is silence" not in said
    assert "of the frames are voiced" not in said
    assert "less than" not in " ".join(validate_sounds(recordings, sampling_rate=8000).findings)
    soundfile.write(
        tmp_path / "a.wav", np.concatenate([0.1 * np.random.default_rng(0).normal(size=RATE), silence(2)]), RATE
    )
    said = " | ".join(validate_sounds(tmp_path).findings)
    assert "67 % is silence" in said
    assert "of the frames are voiced" in said


def test_recordings_with_a_pitch_outside_of_the_limits_are_named(tmp_path):
    """After the options that the finding prints, the store holds the pitch, and the finding is gone."""
    (tmp_path / "in").mkdir()
    for hz in (33, 220, 700, 1300):
        soundfile.write(tmp_path / f"in/{hz}.wav", tone(1.0, RATE, hz), RATE)
    recipe = VocoderPrepareConfig(RATE, 160, "parselmouth")
    (said,) = [line for line in validate_sounds(tmp_path / "in").findings if "pitch" in line]
    prepare_sound(tmp_path / "in", tmp_path / "narrow", recipe)
    assert said in validate_sounds(tmp_path / "narrow").findings
    assert said.startswith("2 recordings have a pitch outside of 40 to 1100 Hz")
    assert re.search(r"1300.wav \(1299 to 1\d+ Hz\), 33.wav \(33 to 33 Hz\)", said)
    low, high = map(float, re.search(r"prepare-data --f0-min (\d+) --f0-max (\d+) finds", said).groups())
    prepare_sound(tmp_path / "in", tmp_path / "wide", replace(recipe, f0_min=low, f0_max=high))
    assert not [line for line in validate_sounds(tmp_path / "wide").findings if "pitch" in line]
    for clip, _, pitch_F in VocoderStore.open(tmp_path / "wide"):
        assert np.median(pitch_F) == pytest.approx(float(clip.path.removesuffix(".wav")), rel=0.01)


def test_the_advice_on_silence_is_gone_after_it_was_followed(tmp_path):
    (tmp_path / "in").mkdir()
    parts = [silence(2), tone(0.5, RATE), silence(3), tone(0.5, RATE), silence(1)]
    soundfile.write(tmp_path / "in/a.wav", np.concatenate(parts), RATE)
    said = " ".join(validate_sounds(tmp_path / "in").findings)
    trim_db = float(re.search(r"86 % is silence: prepare-data --trim-db (\d+) trims", said)[1])
    prepare_sound(tmp_path / "in", tmp_path / "out", VocoderPrepareConfig(RATE, 160, "parselmouth", trim_db=trim_db))
    said = " ".join(validate_sounds(tmp_path / "out").findings)
    assert "--trim-db" not in said
    assert "75 % is silence within recordings: where it is digital silence, training draws no crops" in said


def test_where_nothing_can_be_used(tmp_path):
    soundfile.write(tmp_path / "silent.wav", silence(1), RATE)
    report = validate_sounds(tmp_path)
    assert report.total is None
    assert "nothing here can be trained on" in report.findings
    with pytest.raises(UserError, match="no such folder"):
        validate_sounds(tmp_path / "nowhere")
    (tmp_path / "silent.wav").unlink()
    with pytest.raises(UserError, match="no recording in it"):
        validate_sounds(tmp_path)


def test_a_prepared_store(recordings, tmp_path):
    prepare_sound(recordings, tmp_path / "store", VocoderPrepareConfig(RATE, 201, "parselmouth"))
    report, source = validate_sounds(tmp_path / "store", sampling_rate=RATE), validate_sounds(recordings)
    assert report.prepared
    assert report.total.rates == {RATE: 5}
    assert report.total.hours == pytest.approx(
        source.total.hours, rel=1e-9
    )  # The padding of the last frame does not count.
    assert report.refused == source.refused
    assert report.total.voiced_share == pytest.approx(source.total.voiced_share, abs=0.03)
    assert list(report.clipped) == ["high/again.wav"]


def test_recordings_that_lack_the_treble_of_their_rate_are_named(tmp_path):
    """Noise has all frequencies: resampled to 44.1 kHz it has those of its former rate, and a store tells the same."""
    noise = np.random.default_rng(0).normal(size=44100) / 10
    (tmp_path / "in").mkdir()
    for rate in (16000, 22050, 28000, 44100, 48000):
        soundfile.write(tmp_path / f"in/{rate}.wav", soxr.resample(noise[: 2 * rate], rate, 44100), 44100)
    rising = soxr.resample(noise, 16000, 44100) + 1e-4 * np.random.default_rng(1).normal(size=121551)
    soundfile.write(tmp_path / "in/hiss.flac", rising, 44100, subtype="PCM_24")
    # Hum and a constant offset stand out of a spectrum as steeply, but it has all frequencies.
    soundfile.write(tmp_path / "in/hum.wav", noise / 50 + 0.3 + 0.5 * np.sin(np.arange(44100) / 140), 44100)
    report = validate_sounds(tmp_path / "in")
    limits = {"16000.wav": 8000, "22050.wav": 11025, "28000.wav": 14000, "hiss.flac": 8000}
    assert report.narrow == pytest.approx(limits, rel=0.06)
    said = " ".join(report.findings)
    assert re.search(r"4 of 7 recordings hold nothing above 7.\d* to 13.\d* kHz, such as 16000.wav, although", said)
    assert "or train at 16000 Hz" in said
    prepare_sound(tmp_path / "in", tmp_path / "store", VocoderPrepareConfig(44100, 512, "parselmouth"))
    assert validate_sounds(tmp_path / "store").narrow == pytest.approx(limits, rel=0.06)
    assert "16000.wav" not in validate_sounds(tmp_path / "in", sampling_rate=16000).narrow
