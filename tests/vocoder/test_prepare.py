"""Preparing real files: any rate, depth and kind; what is refused, and going on where a run was cut off."""

import json

import numpy as np
import pytest
import soundfile

from gputrain.errors import UserError
from gputrain.vocoder.prepare import QUARANTINE, Recipe, prepare_sound
from gputrain.vocoder.store import JOURNAL, MANIFEST, PITCHES, WAVES, Store

RECIPE = Recipe(sampling_rate=16000, hop_size=160, f0_method="parselmouth")


def tone(seconds: float, rate: int, hz: float = 220.0, loud: float = 0.3):
    """A voice-like sound: harmonics that fall off, at a steady pitch."""
    time = np.arange(round(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * hz * k * time) / k for k in range(1, 8))
    return (loud * wave / np.abs(wave).max()).astype(np.float32)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    pytest.importorskip("parselmouth")
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "deep").mkdir()
    soundfile.write(folder / "a.wav", tone(0.5, 44100), 44100)
    soundfile.write(folder / "b.flac", np.stack([tone(0.4, 16000), tone(0.4, 16000)], 1), 16000)
    soundfile.write(folder / "deep/c.ogg", tone(0.5, 22050), 22050)
    soundfile.write(folder / "deep/d.wav", tone(0.305, 8000), 8000, subtype="PCM_U8")
    soundfile.write(folder / "e.mp3", tone(0.5, 32000), 32000)
    soundfile.write(folder / "silent.wav", np.zeros(8000, np.float32), 16000)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "broken.flac").write_bytes(b"fLaC" + bytes(100))
    soundfile.write(folder / "nan.wav", np.full(8000, np.nan, np.float32), 16000, subtype="FLOAT")
    (folder / "repeated.wav").write_bytes((folder / "a.wav").read_bytes())
    (folder / "notes.txt").write_text("x")
    return folder


def test_files_of_every_kind(recordings, tmp_path):
    report = prepare_sound(recordings, tmp_path / "store", RECIPE)
    store = Store.open(tmp_path / "store")
    assert [clip.path for clip in store.clips] == ["a.wav", "b.flac", "deep/c.ogg", "deep/d.wav", "e.mp3"]
    assert (report.made, report.kept, report.ignored) == (5, 0, {".txt": 1})
    assert report.hours == pytest.approx(sum(c.samples for c in store.clips) / 16000 / 3600)
    lengths = {clip.path: clip.samples / 16000 for clip in store.clips}
    assert lengths["a.wav"] == pytest.approx(0.5, abs=1e-3)
    assert lengths["deep/d.wav"] == pytest.approx(0.305, abs=1e-3)
    for clip, wave, pitch in store:
        middle = pitch[10:20]
        assert np.abs(1200 * np.log2(middle / 220)).max() < 20, clip.path  # cents
        assert len(wave) == 160 * len(pitch) >= clip.samples > 160 * (len(pitch) - 1)
        assert np.abs(wave).max() / 32768 == pytest.approx(0.3, rel=0.1)
    reasons = {refusal.path: refusal.reason for refusal in report.refused}
    assert reasons == {
        "broken.flac": "unreadable", "empty.wav": "unreadable", "nan.wav": "unreadable", "repeated.wav": "duplicate",
        "silent.wav": "silent",
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "store" / QUARANTINE).read_text().splitlines()]
    assert [row["path"] for row in rows] == sorted(reasons)


def test_trimming_and_loudness(recordings, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    quiet = np.concatenate([np.zeros(8000, np.float32), tone(0.5, 16000, loud=0.02), np.zeros(4000, np.float32)])
    soundfile.write(folder / "a.wav", quiet, 16000, subtype="FLOAT")
    recipe = Recipe(16000, 160, "parselmouth", trim_db=40, loudness_db=-20)
    prepare_sound(folder, tmp_path / "out", recipe)
    ((clip, wave, _),) = Store.open(tmp_path / "out")
    assert clip.samples / 16000 == pytest.approx(0.5, abs=0.15)
    loud = wave[: clip.samples] / 32768
    assert 20 * np.log10(np.sqrt(np.mean(loud**2))) == pytest.approx(-20, abs=1.5)


def test_a_run_that_was_cut_off_goes_on(recordings, tmp_path):
    class Cut(Exception):
        pass

    def cut(done: int, total: int) -> None:
        if done == 3:
            raise Cut

    with pytest.raises(Cut):
        prepare_sound(recordings, tmp_path / "store", RECIPE, progress=cut)
    assert (tmp_path / "store" / JOURNAL).exists()
    report = prepare_sound(recordings, tmp_path / "store", RECIPE)
    assert report.made + report.kept == 5
    assert report.kept >= 1
    prepare_sound(recordings, tmp_path / "once", RECIPE)
    for name in (WAVES, PITCHES, MANIFEST, QUARANTINE):
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()
    again = prepare_sound(recordings, tmp_path / "store", RECIPE)
    assert (again.made, again.kept) == (0, 5)


def test_more_recordings_are_added_and_changed_ones_noticed(recordings, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    soundfile.write(folder / "a.wav", tone(0.3, 16000), 16000)
    prepare_sound(folder, tmp_path / "out", RECIPE)
    soundfile.write(folder / "b.wav", tone(0.3, 16000, hz=330), 16000)
    report = prepare_sound(folder, tmp_path / "out", RECIPE)
    assert (report.made, report.kept) == (1, 1)
    assert [clip.path for clip in Store.open(tmp_path / "out").clips] == ["a.wav", "b.wav"]
    soundfile.write(folder / "a.wav", tone(0.4, 16000), 16000)
    with pytest.raises(UserError, match=r"holds a\.wav as it is no longer"):
        prepare_sound(folder, tmp_path / "out", RECIPE)


def test_folders_that_will_not_do(recordings, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        prepare_sound(tmp_path / "nowhere", tmp_path / "out", RECIPE)
    with pytest.raises(UserError, match="one holds the other"):
        prepare_sound(recordings, recordings / "out", RECIPE)
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="no recording in it"):
        prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE)
    (tmp_path / "in" / "empty.wav").write_bytes(b"")
    with pytest.raises(UserError, match="none of 1 files holds usable sound"):
        prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE)
