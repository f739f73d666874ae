"""Buckets: every clip once per epoch, a constant number of buckets, limits, little padding; and content of batches."""

import itertools
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gputrain.data_in.split import Mixture
from gputrain.engine.data import Sample
from gputrain.errors import UserError
from gputrain.speech.buckets import Buckets, open_speech
from gputrain.speech.buckets import buckets_of as buckets_of_speech
from gputrain.speech.config import SpeechData
from gputrain.speech.packing import cut, padding_share, shuffled_by_length
from gputrain.speech.store import (
    Recording,
    SoundFormat,
    SpeechClip,
    SpeechFormat,
    SpeechStore,
    SpeechWriter,
    frame_count,
)
from gputrain.speech.text.frontend import frontend

HOP = 100
FORMAT = SpeechFormat(frontend("en"), 16000, HOP, ("ann", "bob"))


def buckets_of(frames, batch_size: int, batch_frames: int = 0, max_padding: float = 0.02, seed: int = 0) -> Buckets:
    """Returns buckets of clips with these lengths, without samples."""
    clips = [SpeechClip(str(number), str(number), 0, length * HOP, "a", "a", 0) for number, length in enumerate(frames)]
    return Buckets(SpeechStore(Path(), FORMAT, clips), clips, HOP, batch_size, seed, batch_frames, max_padding)


def epoch_of(buckets: Buckets, epoch: int) -> list[list[int]]:
    return [buckets.members(Sample(epoch, number)).tolist() for number in range(len(buckets))]


def padded(frames, members) -> int:
    return len(members) * max(frames[member] for member in members)


FRAMES = st.lists(st.integers(1, 3000), min_size=1, max_size=60) | st.lists(
    st.sampled_from([40, 41, 42, 43, 200, 205]), min_size=1, max_size=60
)


@settings(max_examples=150)
@given(
    frames=FRAMES, batch_size=st.integers(1, 20), batch_frames=st.sampled_from([0, 1, 500, 3000, 20000]),
    max_padding=st.sampled_from([0.0, 0.02, 0.2, 0.9]), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_any_clips_under_any_limits(frames, batch_size, batch_frames, max_padding, seed):
    buckets = buckets_of(frames, batch_size, batch_frames, max_padding, seed)
    assert -(-len(frames) // batch_size) <= len(buckets) <= len(frames)
    for epoch in (0, 1, 7):
        members = epoch_of(buckets, epoch)
        assert sorted(itertools.chain(*members)) == list(range(len(frames)))
        for bucket in members:
            assert 1 <= len(bucket) <= batch_size
            assert len(bucket) == 1 or not batch_frames or padded(frames, bucket) <= batch_frames
            assert buckets.item_bytes >= 2 * HOP * padded(frames, bucket)
        padding = 1 - sum(frames) / sum(padded(frames, bucket) for bucket in members)
        assert padding <= max_padding + 1e-12
        assert epoch_of(pickle.loads(pickle.dumps(buckets)), epoch) == members


@settings(max_examples=60)
@given(frames=st.lists(st.integers(1, 60), min_size=1, max_size=9), batch_size=st.integers(1, 9), share=st.floats(0, 1))
def test_no_other_cut_with_as_little_padding_has_fewer_buckets_and_less_of_it(frames, batch_size, share):
    """Compares with every cut of a few clips. A cost per bucket finds the cuts on the convex hull."""
    frames_N = np.sort(np.array(frames))
    ends = cut(frames_N, batch_size, 0, share)
    assert padding_share(frames_N, ends) <= share
    for count in range(len(frames)):
        for inner in itertools.combinations(range(1, len(frames)), count):
            other = np.array([*inner, len(frames)])
            if np.diff(np.array([0, *other])).max() <= batch_size and len(other) <= len(ends):
                same_count = len(other) == len(ends)
                assert not same_count or padding_share(frames_N, other) >= padding_share(frames_N, ends) - 1e-12


def test_the_fewest_buckets_where_padding_allows():
    assert cut(np.array([10] * 10), 4, 0, 0.0).tolist() in ([4, 8, 10], [2, 6, 10], [3, 6, 10], [4, 7, 10])
    assert cut(np.array([10, 10, 20, 20, 20]), 5, 0, 0.0).tolist() == [2, 5]
    assert cut(np.array([10, 10, 20, 20, 20]), 5, 0, 0.2).tolist() == [5]
    assert cut(np.array([10, 10, 20, 20, 20]), 5, 40, 0.2).tolist() in ([2, 4, 5], [2, 3, 5])
    assert cut(np.array(4 * [100] + 4 * [101] + 8 * [200]), 16, 0, 0.01).tolist() == [8, 16]
    assert cut(np.array([10, 500]), 5, 40, 0.0).tolist() == [1, 2]


@settings(max_examples=100)
@given(
    frames=FRAMES, batch_size=st.integers(1, 20), batch_frames=st.sampled_from([0, 500, 3000, 20000]),
    shapes=st.integers(2, 8),
)  # fmt: skip
def test_any_clips_in_few_shapes(frames, batch_size, batch_frames, shapes):
    """Buckets of equally many clips and of one room, of which clips leave none over."""
    buckets = replace(buckets_of(frames, batch_size, batch_frames), shapes=shapes)
    for epoch in (0, 1):
        members = epoch_of(buckets, epoch)
        assert sorted(itertools.chain(*members)) == list(range(len(frames)))
        rooms = [room.frames for room in buckets.room_K]
        assert all(max(frames[one] for one in bucket) <= room for bucket, room in zip(members, rooms, strict=True))
        assert len({(len(bucket), room) for bucket, room in zip(members, rooms, strict=True)}) <= shapes
        for bucket, room in zip(members, rooms, strict=True):
            assert 1 <= len(bucket) <= batch_size
            assert len(bucket) == 1 or not batch_frames or len(bucket) * room <= batch_frames
            assert buckets.item_bytes >= 2 * HOP * len(bucket) * room
    padded_frames = sum(len(bucket) * room for bucket, room in zip(members, rooms, strict=True))
    assert buckets.padding == pytest.approx(1 - sum(frames) / padded_frames)


def test_eight_shapes_of_log_normal_lengths_take_little_padding():
    """13,100 clips of 6.5 s on average, at most 10.1, as LJSpeech's: 6 % more frames than in buckets of any shape."""
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(560), 0.35, 13100), 95, 870).astype(int).tolist()
    free = buckets_of(lengths, 64, batch_frames=int(1.5 * 64 * np.mean(lengths)))
    few = replace(free, shapes=8)
    assert (1 - free.padding) / (1 - few.padding) == pytest.approx(1.06, abs=0.02)
    assert len(few) == pytest.approx(len(free), rel=0.01)


def test_a_shape_has_room_for_the_texts_of_its_clips(folder):
    store = SpeechStore.open(folder)
    buckets = Buckets(store, store.clips, HOP, 4, seed=3, shapes=2)
    for number, room in enumerate(buckets.room_K):
        batch = buckets[Sample(0, number)]
        assert batch.ids_BS.shape[1] == room.symbols >= int(batch.symbols_B.max())
        assert batch.wave_BT.shape[1] == room.frames * HOP


def test_companions_change_from_epoch_to_epoch_and_with_the_seed():
    """2000 clips of many lengths: of the pairs that share a bucket in one epoch, few share one in the next."""
    frames = np.random.default_rng(0).normal(500, 150, 2000).clip(60, 900).astype(int).tolist()
    buckets = buckets_of(frames, 16)
    assert len(buckets) <= 1.05 * 2000 / 16

    def pairs(epoch: int, buckets: Buckets = buckets) -> set[tuple[int, int]]:
        return {pair for bucket in epoch_of(buckets, epoch) for pair in itertools.combinations(sorted(bucket), 2)}

    assert len(pairs(0) & pairs(1)) < 0.5 * len(pairs(0))
    assert pairs(0) != pairs(0, buckets_of(frames, 16, seed=1))
    assert pairs(3) == pairs(3, buckets_of(frames, 16))


def test_real_lengths_of_which_one_is_far_longer_than_the_rest():
    """Clips of 0.3 to 86 seconds, frames of 256 samples at 22050 Hz: the longest is alone in its bucket."""
    seconds = np.random.default_rng(1).lognormal(0.6, 0.7, 543).clip(0.3, 31).tolist()
    frames = [int(86.13 * length) for length in [*seconds, 86.0]]
    buckets = buckets_of(frames, 16, batch_frames=4000)
    for epoch in range(3):
        members = epoch_of(buckets, epoch)
        assert [543] in members
        assert 1 - sum(frames) / sum(padded(frames, bucket) for bucket in members) <= 0.02
        assert max(padded(frames, bucket) for bucket in members if bucket != [543]) <= 4000


@pytest.fixture
def folder(tmp_path):
    """Writes a dozen clips of two speakers."""
    writer = SpeechWriter(tmp_path, SoundFormat(16000, 40.0, 0.0))
    clips = []
    for number in range(12):
        wave = np.random.default_rng(number).integers(-9999, 9999, 1500 + 170 * number).astype(np.int16)
        print_of = f"{number * 20:02x}" + 30 * "0"
        placed = writer.append(Recording(f"{number}.wav", print_of, 0, len(wave), 16000, 0.0), wave)
        text = "ab" * (1 + number % 3)
        clips.append(SpeechClip(placed.path, print_of, placed.first_sample, placed.samples, text, text, number % 2))
    writer.finish(FORMAT, clips)
    return tmp_path


def test_a_batch_holds_its_clips_and_zeros_behind_them(folder):
    store = SpeechStore.open(folder)
    buckets = Buckets(store, store.clips, HOP, 4, seed=3, max_padding=0.5)
    for number in range(len(buckets)):
        batch = buckets[Sample(2, number)]
        assert batch.clips_B.tolist() == buckets.members(Sample(2, number)).tolist()
        assert (batch.ids_BS.dtype, batch.wave_BT.dtype) == (torch.int64, torch.int16)
        assert batch.ids_BS.shape[1] == batch.symbols_B.max()
        assert batch.wave_BT.shape[1] == HOP * batch.frames_B.max()
        for row, member in enumerate(batch.clips_B.tolist()):
            clip = store.clips[member]
            ids, wave = FORMAT.frontend.ids(clip.normalized), store.wave(clip)
            assert batch.ids_BS[row].tolist() == ids + [0] * (batch.ids_BS.shape[1] - len(ids))
            assert batch.symbols_B[row] == len(ids)
            assert (batch.wave_BT[row, : len(wave)].numpy() == wave).all()
            assert not batch.wave_BT[row, len(wave) :].any()
            assert (batch.samples_B[row], batch.frames_B[row]) == (len(wave), frame_count(len(wave), HOP))
            assert batch.speakers_B[row] == member % 2


def test_held_out_clips_depend_on_their_content(folder):
    speech = open_speech(folder, held_out_share=0.2)
    assert [clip.path for clip in speech.parts.held_out] == ["0.wav", "1.wav", "2.wav"]  # below 0x33
    assert len(speech.parts.train) == 9


@settings(max_examples=100)
@given(
    frames=FRAMES, weight=st.integers(1, 3), batch_size=st.integers(1, 20),
    batch_frames=st.sampled_from([0, 500, 20000]), max_padding=st.sampled_from([0.02, 0.5]),
)  # fmt: skip
def test_weights_keep_the_limits_and_draw_all_clips_equally_often(
    frames, weight, batch_size, batch_frames, max_padding
):
    frames = sorted(frames)
    mixture = Mixture((len(frames),), (weight,))
    buckets = replace(buckets_of(frames, batch_size, batch_frames, max_padding), mixture=mixture)
    counts = np.zeros(len(frames))
    for epoch in range(12):
        members = epoch_of(buckets, epoch)
        assert sum(map(len, members)) == len(mixture)
        assert all(len(one) <= batch_size for one in members)
        if batch_frames:
            assert all(padded(frames, one) <= batch_frames or len(one) == 1 for one in members)
        np.add.at(counts, [member for one in members for member in one], 1)
    assert (counts == 12 * weight).all()


def write_speech(folder: Path, format: SpeechFormat, level: int, seed: str, text: str = "abab") -> Path:
    writer = SpeechWriter(folder, SoundFormat(format.sampling_rate, 35.0, -23.0))
    clips = []
    for number in range(4):
        fingerprint = f"{seed}{16 * number:02x}" + "0" * 28
        wave = np.full(2000 + 100 * number, level + number, dtype=np.int16)
        placed = writer.append(Recording(f"{number}.wav", fingerprint, 0, len(wave), 16000, 0.0), wave)
        clips.append(SpeechClip(placed.path, fingerprint, placed.first_sample, placed.samples, text, text, 0))
    writer.finish(format, clips)
    return folder


def test_several_folders_of_speech(tmp_path, caplog):
    """Samples come from the clip's own folder; symbols and speakers are those of both, a same name is one speaker."""
    first = frontend("characters", texts=["abz"])
    second = frontend("characters", texts=["abc"])
    ann = write_speech(tmp_path / "ann", SpeechFormat(first, 16000, HOP, ("ann",)), 100, "f0")
    bob = write_speech(tmp_path / "bob", SpeechFormat(second, 16000, HOP, ("bob",)), 200, "f1", "cbcb")
    more = write_speech(tmp_path / "more", SpeechFormat(first, 16000, HOP, ("ann",)), 300, "f2")
    speech = open_speech([ann, Path(f"{bob}=2"), Path(f"{more}=3")])
    store = pickle.loads(pickle.dumps(speech.store))
    assert store.format.speakers == ("ann", "bob")
    assert store.format.frontend.symbols == frontend("characters", texts=["abcz"]).symbols
    assert [int(store.wave(clip)[0]) for clip in speech.parts.held_out] == [100, 200, 300]
    assert [int(store.wave(clip)[-1]) for clip in speech.parts.train] == [
        101, 102, 103, 201, 202, 203, 301, 302, 303,
    ]  # fmt: skip
    assert [clip.speaker for clip in speech.parts.train] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert speech.split.mixture().draws == (3, 6, 9)
    buckets = buckets_of_speech(speech, SpeechData(data_path=(tmp_path,), max_padding=0.5), HOP, 4, seed=0)
    batches = [buckets[Sample(1, number)] for number in range(len(buckets))]
    levels = sorted(int(wave[0]) for batch in batches for wave in batch.wave_BT)
    assert levels == [101, 102, 103, 201, 201, 202, 202, 203, 203] + [301] * 3 + [302] * 3 + [303] * 3
    # With whole weights alone, clips keep the order of the folders.
    assert [clip.first_sample for clip in open_speech(ann).parts.train] == [2000, 4100, 6300]


def test_speech_that_does_not_go_together(tmp_path, caplog):
    def prepared(name: str, speaker: str = "", language: str = "en", rate_hz: int = 16000) -> Path:
        format = SpeechFormat(frontend(language), rate_hz, HOP, (speaker,))
        return write_speech(tmp_path / name, format, 100, f"{len(list(tmp_path.iterdir())):02x}")

    plain, other = prepared("plain"), prepared("other")
    for folder, message in (
        (prepared("faster", rate_hz=22050), "plain and .*faster .* another sampling rate: 16000 and 22050"),
        (prepared("russian", language="ru"), "plain and .*russian .* another language: en and ru"),
        (named := prepared("named", speaker="ann"), "plain: the speaker has no name, and in .*/named it is ann"),
    ):
        with pytest.raises(UserError, match=message):
            open_speech([plain, folder])
    bob = prepared("bob", speaker="bob")
    with pytest.raises(UserError) as raised:  # All folders are named that the message is about, not the first alone.
        open_speech([named, plain, bob, other])
    words = f"{plain}, {other}: the speaker has no name, and in {named}, {bob} it is ann, bob"
    assert raised.value.message == words
    assert not caplog.messages
    assert open_speech([plain, other]).store.format.speakers == ("",)
    (said,) = caplog.messages
    assert said.startswith(f"{plain}, {other} name no speaker and are trained as one voice; ")


def test_the_clips_are_sorted_once_an_epoch(monkeypatch):
    sorted_epochs = []

    def counted(*arguments):
        sorted_epochs.append(arguments[-1])
        return shuffled_by_length(*arguments)

    monkeypatch.setattr("gputrain.speech.buckets.shuffled_by_length", counted)
    buckets = buckets_of(range(1, 200), 4, max_padding=0.2)
    before = [epoch_of(buckets_of(range(1, 200), 4, max_padding=0.2), epoch) for epoch in range(4)]
    sorted_epochs.clear()
    assert [epoch_of(buckets, epoch) for epoch in range(4)] == before
    for number in range(len(buckets)):  # Workers read ahead into the next epoch.
        assert buckets.members(Sample(2, number)).tolist() == before[2][number]
        assert buckets.members(Sample(3, number)).tolist() == before[3][number]
    assert sorted_epochs == [0, 1, 2, 3]
    assert len(buckets._orders) == 2
