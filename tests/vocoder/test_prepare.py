"""Preparing real files of any rate, bit depth and format; refused files; continuing an interrupted run."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from gputrain.audio.config import Sound
from gputrain.audio.prepare import FURTHER_TRACKS, scan_recordings
from gputrain.audio.store import PITCHES, WAVES
from gputrain.data_in.preparation import QUARANTINE
from gputrain.errors import UserError
from gputrain.vocoder.prepare import VocoderPrepareConfig, prepare_sound, validate_sounds, vocoder_prepare_config
from gputrain.vocoder.store import JOURNAL, MANIFEST, VocoderStore

RECIPE = VocoderPrepareConfig(sampling_rate=16000, hop_size=160, f0_method="parselmouth")


def tone(seconds: float, rate: int, hz: float = 220.0, loud: float = 0.3):
    """Returns a voice-like sound: decaying harmonics at a steady pitch."""
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
    store = VocoderStore.open(tmp_path / "store")
    assert [clip.path for clip in store.clips] == ["a.wav", "b.flac", "deep/c.ogg", "deep/d.wav", "e.mp3"]
    assert (report.made, report.kept, report.ignored) == (5, 0, {".txt": ["notes.txt"]})
    assert report.hours == pytest.approx(sum(c.samples for c in store.clips) / 16000 / 3600)
    lengths = {clip.path: clip.samples / 16000 for clip in store.clips}
    assert lengths["a.wav"] == pytest.approx(0.5, abs=1e-3)
    assert lengths["deep/d.wav"] == pytest.approx(0.305, abs=1e-3)
    for clip, wave, pitch in store:
        middle = pitch[10:20]
        assert np.abs(1200 * np.log2(middle / 220)).max() < 20, clip.path  # The limit is in cents.
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
    recipe = VocoderPrepareConfig(16000, 160, "parselmouth", trim_db=40, loudness_db=-20)
    prepare_sound(folder, tmp_path / "out", recipe)
    ((clip, wave, _),) = VocoderStore.open(tmp_path / "out")
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
    assert [clip.path for clip in VocoderStore.open(tmp_path / "out").clips] == ["a.wav", "b.wav"]
    soundfile.write(folder / "a.wav", tone(0.4, 16000), 16000)
    with pytest.raises(UserError, match=r"holds another version of a\.wav"):
        prepare_sound(folder, tmp_path / "out", RECIPE)
    assert len(VocoderStore.open(tmp_path / "out").clips) == 2  # The refusal leaves the store as it was.


def test_sound_that_is_odd_and_kept(tmp_path):
    """The files are clipped, unvoiced, or have rates that divide neither each other nor the hop."""
    folder = tmp_path / "in"
    folder.mkdir()
    clipped = (6 * tone(0.5, 16000)).clip(-1, 1)
    soundfile.write(folder / "clipped.wav", clipped, 16000)
    soundfile.write(folder / "noise.wav", 0.1 * np.random.default_rng(0).normal(size=8000), 16000)
    soundfile.write(folder / "odd.wav", tone(0.5, 11025, 200), 11025, subtype="PCM_24")
    prepare_sound(folder, tmp_path / "out", VocoderPrepareConfig(16000, 201, "parselmouth"))
    found = {clip.path: (clip, wave, f0) for clip, wave, f0 in VocoderStore.open(tmp_path / "out")}
    _, wave, _ = found["clipped.wav"]
    assert np.array_equal(wave[:8000] == 32767, clipped == 1)
    assert not found["noise.wav"][2].any()
    clip, _, f0 = found["odd.wav"]
    assert clip.samples == -(-len(tone(0.5, 11025)) * 16000 // 11025)
    assert clip.frames == len(f0) == -(-clip.samples // 201)
    assert np.abs(1200 * np.log2(f0[8:-8] / 200)).max() < 10


def test_sound_of_no_length_is_refused(recordings, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    soundfile.write(folder / "header.wav", np.empty(0, np.float32), 16000)
    soundfile.write(folder / "one.wav", np.full(1, 0.5, np.float32), 16000)
    (folder / "cut.flac").write_bytes((recordings / "b.flac").read_bytes()[:60])
    report = prepare_sound(folder, tmp_path / "out", RECIPE)
    assert [(refusal.path, refusal.reason) for refusal in report.refused] == [
        ("cut.flac", "unreadable"), ("header.wav", "unreadable"),
    ]  # fmt: skip
    ((clip, wave, f0),) = VocoderStore.open(tmp_path / "out")
    assert (clip.path, clip.samples, len(wave), f0.tolist()) == ("one.wav", 1, 160, [0.0])


def test_the_range_of_the_pitch(recordings, tmp_path):
    """A tone of 220 Hz is not found above 300 Hz, and another range makes another store."""
    higher = vocoder_prepare_config(
        Sound(audio_sample_rate=16000, hop_size=160, f0_method="parselmouth", f0_min=300, f0_max=900)
    )
    assert (higher.f0_min, higher.f0_max) == (300, 900)
    prepare_sound(recordings, tmp_path / "out", higher)
    store = VocoderStore.open(tmp_path / "out")
    assert (store.format.f0_min, store.format.f0_max) == (300, 900)
    for clip, _, f0 in store:
        assert ((f0 == 0) | (f0 > 300)).all(), clip.path
    prepare_sound(
        recordings, tmp_path / "lower", VocoderPrepareConfig(16000, 160, "parselmouth", f0_min=60, f0_max=150)
    )
    for clip, _, f0 in VocoderStore.open(tmp_path / "lower"):
        assert (f0 < 151).all(), clip.path
    with pytest.raises(UserError, match=r"f0_min 300, f0_max 900, not .* f0_min 40"):
        prepare_sound(recordings, tmp_path / "out", RECIPE)


HOUR = """
import resource, sys
from pathlib import Path
from gputrain.vocoder.prepare import VocoderPrepareConfig, prepare_sound
report = prepare_sound(Path(sys.argv[1]), Path(sys.argv[2]), VocoderPrepareConfig(44100, 512, "parselmouth"))
print(report.hours, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is asked of Linux")
def test_an_hour_takes_two_gigabytes(tmp_path):
    """An hour of float32 is 0.64 GB, and at most two copies exist at once. Tracking it at once took 4.7 GB."""
    (tmp_path / "in").mkdir()
    minute = np.concatenate([tone(20, 44100, hz) for hz in (110, 220, 440)])
    with soundfile.SoundFile(tmp_path / "in/hour.wav", "w", 44100, 1, "PCM_16") as file:
        for _ in range(60):
            file.write(minute)
    command = [sys.executable, "-c", HOUR, str(tmp_path / "in"), str(tmp_path / "out")]
    hours, peak_gb = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert hours == 1
    assert peak_gb < 2.1
    ((_, _, f0),) = VocoderStore.open(tmp_path / "out")
    at = (np.arange(len(f0)) + 0.5) * 512 / 44100 % 60
    inside = np.abs(at % 20 - 10) < 9.8  # Transitions between tones are excluded.
    asked = np.array([110, 220, 440])[(at // 20).astype(int)]
    assert np.abs(1200 * np.log2(f0[inside] / asked[inside])).max() < 5


def test_folders_that_will_not_do(recordings, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        prepare_sound(tmp_path / "nowhere", tmp_path / "out", RECIPE)
    with pytest.raises(UserError, match="one contains the other"):
        prepare_sound(recordings, recordings / "out", RECIPE)
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match="no recording in it"):
        prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE)
    (tmp_path / "in" / "empty.wav").write_bytes(b"")
    with pytest.raises(UserError, match="none of 1 files holds usable sound"):
        prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE)


def test_further_tracks_of_a_recording_are_left_out_and_named(tmp_path):
    names = (
        "a_vocals",
        "a_inst",
        "b (Vocal)",
        "b (Instrumental)",
        "c_inst",
        "p1_mic1",
        "p1_mic2",
        "d/vocals",
        "d/karaoke",
        "e/vocals",
        "e/drums",
        "e/mixture",
        "vocal_f.wav_10",
        "instrument_f.wav_10",
        "g_(Vocals)_(No Reverb)",
        "g_(Instrumental)",
    )
    for number, name in enumerate(names):
        path = tmp_path / "in" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone(0.1, 16000, 200 + number), 16000)
    tree = scan_recordings(tmp_path / "in", companions=FURTHER_TRACKS)
    assert {item.path: (item.reason, item.detail) for item in tree.refused} == {
        "a_inst.wav": ("further track", "belongs to a_vocals.wav"),
        "b (Instrumental).wav": ("further track", "belongs to b (Vocal).wav"),
        "d/karaoke.wav": ("further track", "belongs to d/vocals.wav"),
        "e/drums.wav": ("further track", "belongs to e/vocals.wav"),
        "e/mixture.wav": ("further track", "belongs to e/vocals.wav"),
        "g_(Instrumental).wav": ("further track", "belongs to g_(Vocals)_(No Reverb).wav"),
        "instrument_f.wav_10.wav": ("further track", "belongs to vocal_f.wav_10.wav"),
        "p1_mic2.wav": ("further track", "belongs to p1_mic1.wav"),
    }
    assert len(scan_recordings(tmp_path / "in").paths) == len(names)  # To be transcribed, say.
    report = prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE, exclude=("d",))
    assert (report.made, report.ignored) == (7, {"excluded by d": ["d/karaoke.wav", "d/vocals.wav"]})
    with pytest.raises(UserError, match=r"out holds c_inst\.wav, which is left out now or not in"):
        prepare_sound(tmp_path / "in", tmp_path / "out", RECIPE, exclude=("c_*",))
    with pytest.raises(UserError, match="exclude does nothing with prepared data"):
        validate_sounds(tmp_path / "out", exclude=("d",))
