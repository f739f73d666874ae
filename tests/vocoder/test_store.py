"""Tests that the store returns what was written, and that an interrupted preparation continues."""

import json
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.data_in.split import MANIFEST
from gputrain.errors import UserError
from gputrain.vocoder.store import VocoderFormat, VocoderStore, VocoderStoreWriter

FORMAT = VocoderFormat(sampling_rate=16000, hop_size=4, f0_method="pyworld")


def clip_of(frames: int, short: int = 0, seed: int = 0):
    """Returns int16 noise of `frames` frames, the last one incomplete, and a pitch for each frame."""
    rng = np.random.default_rng(seed)
    return rng.integers(-30000, 30000, 4 * frames - short).astype(np.int16), rng.uniform(80, 400, frames).astype("<f4")


def filled(folder, *clips):
    writer = VocoderStoreWriter(folder, FORMAT)
    for number, (wave, f0) in enumerate(clips):
        writer.add(f"{number}.wav", f"{number}", wave, f0)
    writer.finish()
    return VocoderStore.open(folder)


CLIPS = [clip_of(10, seed=1), clip_of(3, short=2, seed=2), clip_of(25, short=3, seed=3)]


def test_what_goes_in_comes_out(tmp_path):
    store = filled(tmp_path, *CLIPS)
    assert store.format == FORMAT
    assert [clip.path for clip in store.clips] == ["0.wav", "1.wav", "2.wav"]
    assert [clip.samples for clip in store.clips] == [40, 10, 97]
    for (clip, wave, f0), (wave_in, f0_in) in zip(store, CLIPS, strict=True):
        assert clip.frames == len(f0_in)
        assert np.array_equal(wave[: len(wave_in)], wave_in)
        assert not wave[len(wave_in) :].any()
        assert np.array_equal(f0, f0_in)


@settings(max_examples=50)
@given(st.integers(0, 2), st.integers(0, 30), st.integers(1, 40))
def test_a_crop_is_a_slice_and_silence_beyond_the_end(tmp_path_factory, number, first, frames):
    folder = tmp_path_factory.getbasetemp() / "crops"
    store = VocoderStore.open(folder) if folder.exists() else filled(folder, *CLIPS)
    wave_in, f0_in = CLIPS[number]
    whole = np.concatenate([wave_in, np.zeros(400, np.int16)])
    wave, f0 = store.crop(store.clips[number], first, frames)
    assert np.array_equal(wave, whole[4 * first : 4 * (first + frames)])
    assert np.array_equal(f0, np.concatenate([f0_in, np.zeros(100, np.float32)])[first : first + frames])


LONG = clip_of(300, short=1, seed=4)  # It has three checksums.


@pytest.mark.parametrize(("line", "key"), [(0, "f0_min"), (1, "checksums")])
def test_a_store_without_a_field_is_of_another_version(tmp_path, line, key):
    filled(tmp_path, LONG)
    rows = [json.loads(row) for row in (tmp_path / MANIFEST).read_text().splitlines()]
    del rows[line][key]
    (tmp_path / MANIFEST).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="written by another version of gputrain"):
        VocoderStore.open(tmp_path)


def test_lengths_must_agree(tmp_path):
    writer = VocoderStoreWriter(tmp_path, FORMAT)
    for samples in (4 * 9, 4 * 10 + 1):
        with pytest.raises(ValueError, match="not 10 frames"):
            writer.add("x.wav", "0", np.zeros(samples, np.int16), np.zeros(10, np.float32))


def test_other_processes_get_the_way_and_not_the_sound(tmp_path):
    store = filled(tmp_path, *CLIPS)
    store.crop(store.clips[0], 0, 5)
    sent = pickle.dumps(store)
    assert len(sent) < 2000
    there = pickle.loads(sent)
    assert np.array_equal(there.crop(there.clips[2], 4, 9)[0], store.crop(store.clips[2], 4, 9)[0])


def test_a_crop_of_a_long_clip_reads_the_crop_alone(tmp_path):
    """The clip takes 6 MB, and the crop 1 kB."""
    long = np.zeros(4 * 500_000, np.int16), np.zeros(500_000, np.float32)
    store = filled(tmp_path, long)
    store.crop(store.clips[0], 0, 80)
    tracemalloc.start()
    try:
        for first in range(0, 400_000, 1000):
            store.crop(store.clips[0], first, 80)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
