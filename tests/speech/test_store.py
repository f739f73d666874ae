"""The store of prepared speech: reading written data, and detection of damage."""

import json
import pickle

import numpy as np
import pytest

from gputrain.audio.store import WAVES
from gputrain.data_in.split import MANIFEST
from gputrain.errors import UserError
from gputrain.speech.store import (
    TEXT,
    Recording,
    SoundFormat,
    SpeechClip,
    SpeechFormat,
    SpeechStore,
    SpeechWriter,
    frame_count,
)
from gputrain.speech.text.frontend import frontend

SOUND = SoundFormat(16000, 40.0, 0.0)
FORMAT = SpeechFormat(frontend("en"), 16000, 256, ("ann", "bob"))


def wave(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-32768, 32768, samples).astype(np.int16)


def recording(name: str, samples: int) -> Recording:
    return Recording(name, name.encode().hex(), 0, samples, 44100, 0.25)


def clip_of(one: Recording, text: str = "so", speaker: int = 0) -> SpeechClip:
    return SpeechClip(one.path, one.fingerprint, one.first_sample, one.samples, text.upper(), text, speaker)


@pytest.fixture
def folder(tmp_path):
    writer = SpeechWriter(tmp_path, SOUND)
    placed = [
        writer.append(recording(name, length), wave(length, length)) for name, length in (("a", 700), ("b", 1300))
    ]
    inner = SpeechClip("b", "62", placed[1].first_sample + 100, 50, "Not", "not", 1)
    writer.finish(FORMAT, [clip_of(placed[0]), inner])
    return tmp_path


def test_what_is_written_is_read(folder):
    store = pickle.loads(pickle.dumps(SpeechStore.open(folder)))
    assert store.format == FORMAT
    assert store.format.frontend.ids("so") == FORMAT.frontend.ids("so")
    first, second = store.clips
    assert (store.wave(first) == wave(700, 700)).all()
    assert (store.wave(second) == wave(1300, 1300)[100:150]).all()
    assert (second.text, second.normalized, second.speaker) == ("Not", "not", 1)
    assert (folder / WAVES).stat().st_size == 2 * 2000


def test_a_folder_is_searched_for_recordings_only_to_tell_how_to_prepare_them(folder, monkeypatch):
    """Above it may lie a whole disk."""
    searched = []
    monkeypatch.setattr("gputrain.audio.store.may_hold", lambda path, media: searched.append(path))
    SpeechStore.open(folder)
    assert not searched
    (raw := folder / "raw").mkdir()
    with pytest.raises(UserError, match="raw: not prepared for asr"):
        SpeechStore.open(raw, "asr")
    assert searched == [raw]


def test_another_front_end_leaves_no_manifest_of_the_old_one(folder):
    writer = SpeechWriter(folder, SOUND)
    other = SpeechFormat(frontend("characters", texts=["abc"]), 16000, 256, ("ann", "bob"))
    with pytest.raises(KeyboardInterrupt):
        writer.finish(other, _cut_off())
    with pytest.raises(UserError, match="not finished"):
        SpeechStore.open(folder)


def _cut_off():
    """Writes clips, of which the first is left out."""
    yield clip_of(recording("a", 1))
    raise KeyboardInterrupt


def flip(folder, sample):
    content = bytearray((folder / WAVES).read_bytes())
    content[2 * sample] ^= 1
    (folder / WAVES).write_bytes(content)


def test_a_changed_bit_is_noticed_where_it_is_read(folder):
    """The clips are samples 0 to 700, and 800 to 850."""
    store = SpeechStore.open(folder)
    for sample, damaged in ((699, 0), (800, 1)):
        flip(folder, sample)
        with pytest.raises(UserError, match=r"[ab] is damaged in waves\.i16"):
            store.wave(store.clips[damaged])
        assert len(store.wave(store.clips[1 - damaged])) in (700, 50)
        flip(folder, sample)
    flip(folder, 760)  # This sample belongs to no clip.
    for clip in store.clips:
        store.wave(clip)


def test_new_texts_make_no_clips_of_damaged_sound(folder):
    flip(folder, 760)  # This sample belongs to the recording of the second clip.
    writer = SpeechWriter(folder, SOUND)
    part = SpeechClip("b", "62", 900, 60, "Not", "not", 1)
    with pytest.raises(UserError, match="b is damaged in waves"):
        writer.finish(FORMAT, [clip_of(writer.sounds[0]), part])


def test_a_clip_without_a_field_is_of_another_version(folder):
    rows = [json.loads(line) for line in (folder / MANIFEST).read_text().splitlines()]
    del rows[0]["crc32"]
    (folder / MANIFEST).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="written by another version of gputrain"):
        SpeechStore.open(folder)


def test_a_store_whose_texts_cannot_be_read_says_why(folder):
    """Voices of earlier versions had tables of letters."""
    content = json.loads((folder / TEXT).read_text())
    content["frontend"]["alphabet"] = {"sh": "ş"}
    (folder / TEXT).write_text(json.dumps(content))
    with pytest.raises(UserError, match="spellings of an alphabet table, which this version of gputrain does not read"):
        SpeechStore.open(folder)


def test_the_last_frame_may_be_short():
    assert [frame_count(samples, 256) for samples in (1, 255, 256, 257, 512)] == [1, 1, 1, 2, 2]
