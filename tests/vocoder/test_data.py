"""Tests the coverage of an epoch of training crops."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gputrain.engine.data import Sample, Stream, loader
from gputrain.errors import UserError
from gputrain.vocoder import store as store_module
from gputrain.vocoder.store import SoundCrops, VocoderFormat, VocoderStore, VocoderStoreWriter, open_sounds

HOP = 4
FRAMES = (100, 7, 23, 10)  # Frames of the clips.


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> VocoderStore:
    """Returns a store in which every sample is its frame's number, from 1; the pitch counts over all clips."""
    writer = VocoderStoreWriter(tmp_path_factory.mktemp("store"), VocoderFormat(16000, HOP, "pyworld"))
    for number, frames in enumerate(FRAMES):
        wave = np.repeat(np.arange(1, frames + 1), HOP).astype(np.int16)
        writer.add(f"{number}.wav", f"{number:032x}", wave, np.arange(frames, dtype=np.float32) + 1000 * number)
    writer.finish()
    return VocoderStore.open(writer.folder)


def test_an_epoch_goes_over_all_the_sound(store):
    crops = SoundCrops(store, store.clips, frames=10, seed=1)
    assert len(crops) == 10 + 1 + 2 + 1
    counts = np.zeros(100)
    for epoch in range(200):
        for item in range(10):
            wave, f0 = crops[Sample(epoch, item)]
            assert wave.shape == (10 * HOP,)
            assert wave.dtype == torch.int16
            first = int(wave[0]) - 1
            assert f0.tolist() == [max(1, frame) for frame in range(first, first + 10)]  # Frame 0 has no pitch.
            assert 9 * item <= first <= 9 * item + 10  # Each crop lies in its own segment.
            counts[first : first + 10] += 1
    # Every frame of a long clip as often as any other, but for the first and the last crop's length.
    assert counts[10:90].min() > 0.8 * counts[10:90].mean()
    assert counts[10:90].max() < 1.2 * counts[10:90].mean()


def test_a_clip_that_is_too_short_is_padded_and_not_dropped(store):
    wave, f0 = SoundCrops(store, store.clips, frames=10, seed=1)[Sample(0, 10)]
    assert wave[::HOP].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0]
    assert f0.tolist() == [1000 + i for i in range(7)] + [1006] * 3  # The source goes on in the silence.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_gives_them_in_batches(store, num_workers):
    crops = SoundCrops(pickle.loads(pickle.dumps(store)), store.clips, frames=10, seed=3)
    stream = Stream(item_count=len(crops), seed=3, batch_size=7, start_sample=0, stop_sample=14)
    batches = list(loader(crops, stream, num_workers=num_workers))
    assert [(wave.shape, f0.shape) for wave, f0 in batches] == [((7, 40), (7, 10))] * 2
    assert {wave.nbytes + f0.nbytes for wave, f0 in batches} == {7 * crops.item_bytes}


def test_what_is_held_out_is_by_content(store):
    sounds = open_sounds(store.folder, held_out_share=0.25)
    assert sorted(clip.path for clip in (*sounds.parts.train, *sounds.parts.held_out)) == [
        clip.path for clip in store.clips
    ]
    assert sounds.parts.held_out
    assert not sounds.parts.shared


def test_several_folders_are_one_store_with_weights(store, tmp_path):
    """Each crop is read from its own folder, and a clip counts by its crops: 14 of the first, 5 of the second."""
    writer = VocoderStoreWriter(tmp_path / "other", VocoderFormat(16000, HOP, "pyworld"))
    for number, frames in enumerate((50, 3)):
        wave = np.full(frames * HOP, 500 + number, dtype=np.int16)
        writer.add(f"{number}.wav", f"ff{number:030x}", wave, np.full(frames, 7.0, dtype=np.float32))
    writer.finish()
    sounds = open_sounds([store.folder, Path(f"{writer.folder}=2")], held_out=1)
    # One clip of each folder is held out, the one with the lowest fingerprint.
    assert [(clip.path, clip.frames) for clip in sounds.parts.held_out] == [("0.wav", 100), ("0.wav", 50)]
    assert [clip.frames for clip in sounds.parts.train] == [7, 23, 10, 3]
    wave, f0 = sounds.store.crop(sounds.parts.held_out[1], 20, 10)
    assert (wave.tolist(), f0.tolist()) == ([500] * 10 * HOP, [7.0] * 10)
    assert sounds.store.crop(sounds.parts.held_out[0], 20, 10)[0][::HOP].tolist() == list(range(21, 31))
    assert len(sounds.store.pitches()) == 140 + 53
    crops = SoundCrops(sounds.store, sounds.parts.train, frames=5, seed=1)
    mixture = sounds.split.mixture(crops.counts_of(sounds.split.counts))
    assert (mixture.counts, mixture.draws) == ((1 + 4 + 2, 1), (7, 2))
    drawn = pickle.loads(pickle.dumps(mixture.of(crops)))
    waves = [int(drawn[Sample(0, item)][0][0]) for item in range(len(drawn))]
    assert waves[7:] == [501, 501]
    assert max(waves[:7]) <= 23


def test_folders_of_other_settings_are_refused(store, tmp_path):
    writer = VocoderStoreWriter(tmp_path / "other", VocoderFormat(24000, HOP, "pyworld"))
    writer.add("a.wav", "0" * 32, np.ones(HOP, dtype=np.int16), np.ones(1, dtype=np.float32))
    writer.finish()
    with pytest.raises(UserError, match=rf"^{writer.folder} was prepared with sampling_rate 24000.*{store.folder}"):
        open_sounds([store.folder, writer.folder])


def with_pitch(folder: Path, *pitches: list[float]) -> VocoderStore:
    writer = VocoderStoreWriter(folder, VocoderFormat(16000, HOP, "pyworld"))
    for number, pitch in enumerate(pitches):
        f0 = np.array(pitch, dtype=np.float32)
        writer.add(f"{number}.wav", f"{len(pitch):016x}{number:016x}", np.zeros(len(f0) * HOP, np.int16), f0)
    writer.finish()
    return VocoderStore.open(writer.folder)


def test_the_pitch_of_a_source_has_no_gaps(tmp_path):
    """It goes on between voiced frames of the clip, those outside the crop too, by equal ratios, and never between
    clips. A clip without pitch has none."""
    store = with_pitch(tmp_path / "a", [0, 100, 0, 0, 800, 0], [0, 0, 0], [0, 300])
    first, second, third = store.clips
    assert store.source_pitch(first, 0, 6) == pytest.approx([100, 100, 200, 400, 800, 800])
    assert store.source_pitch(first, 2, 2) == pytest.approx([200, 400])
    assert store.source_pitch(first, 5, 3) == pytest.approx([800, 800, 800])
    assert store.source_pitch(second, 1, 4).tolist() == [0, 0, 0, 0]
    assert store.source_pitch(third, 0, 1) == pytest.approx([300])
    joined = open_sounds([with_pitch(tmp_path / "b", [50, 0]).folder, store.folder]).store
    assert joined.source_pitch(joined.clips[2], 0, 1).tolist() == [0]
    assert joined.source_pitch(joined.clips[3], 0, 1) == pytest.approx([300])
    _, f0 = SoundCrops(store, [first], frames=6, seed=1)[Sample(0, 0)]
    assert f0.tolist() == pytest.approx([100, 100, 200, 400, 800, 800])


def test_voiced_frames_are_looked_for_near_a_crop(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "NEAR_FRAMES", 3)
    store = with_pitch(tmp_path, [100, *[0] * 6, 400])
    assert store.source_pitch(store.clips[0], 3, 1) == pytest.approx([100])
    assert store.source_pitch(store.clips[0], 4, 1) == pytest.approx([400])
    assert store.source_pitch(store.clips[0], 3, 2) == pytest.approx([100 * 4 ** (3 / 7), 100 * 4 ** (4 / 7)])
    monkeypatch.setattr(store_module, "NEAR_FRAMES", 1)
    assert store.source_pitch(store.clips[0], 3, 1).tolist() == [0]


def test_no_crops_are_drawn_from_digital_silence(tmp_path):
    """Of a stem that is silent in 70 of 100 frames, all crops hold sound, in parts that begin at borders of checksums;
    a clip without such silence, and one of silence alone, have the crops of any other."""
    writer = VocoderStoreWriter(tmp_path, VocoderFormat(16000, HOP, "pyworld"))
    sounding = np.zeros(1280, bool)
    sounding[128:256] = sounding[1024:1280] = True
    for number, is_sound in enumerate((sounding, np.ones(50, bool), np.zeros(50, bool))):
        wave = np.where(np.repeat(is_sound, HOP), 7, 0).astype(np.int16)
        writer.add(f"{number}.wav", f"{number:032x}", wave, np.where(is_sound, 220, 0).astype(np.float32))
    writer.finish()
    store = VocoderStore.open(tmp_path)
    crops = SoundCrops(store, store.clips, frames=32, seed=1)
    assert [store.sounding(clip) for clip in store.clips] == [[(128, 128), (1024, 256)], [(0, 50)], [(0, 50)]]
    assert len(crops) == 4 + 8 + 1 + 1
    assert crops.counts_of([1, 2]) == (12, 2)
    assert crops.silent_share == pytest.approx(1 - (384 + 100) / 1380)
    for epoch in range(5):
        assert all(crops[Sample(epoch, item)][0].min() == 7 for item in range(12))
