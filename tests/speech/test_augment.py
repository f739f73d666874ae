"""Clips at other speeds and with noise: their sound, their limits, and that seed, epoch and place decide them alone."""

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from gputrain.asr.config import TrainAsr
from gputrain.asr.data import fill_buckets
from gputrain.audio.io import read_part
from gputrain.config import assemble
from gputrain.engine.data import DataWarning, Sample
from gputrain.errors import UserError
from gputrain.files import to_int16
from gputrain.hw.ranks import Ranks
from gputrain.speech.augment import ClipAugment, ClipChange, NoiseFolder
from gputrain.speech.buckets import open_speech
from gputrain.speech.frames import encoder_frames
from tests.asr.stores import spelled_clips, write_store
from tests.tables import each_row

RATE = 16000


def tone(hz: float, seconds: float, rate_hz: int = RATE, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate_hz)) / rate_hz)).astype(np.float32)


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> Path:
    """Returns a folder with a short tone of 1 kHz at 16 kHz, and a longer one of 2 kHz at 44.1 kHz in stereo, whose
    first channel is silent."""
    folder = tmp_path_factory.mktemp("noise")
    (folder / "deep").mkdir()
    soundfile.write(folder / "short.wav", tone(1000, 0.2), RATE)
    long_T = tone(2000, 3.0, 44100)
    soundfile.write(folder / "deep" / "long.flac", np.stack([0 * long_T, long_T], axis=1), 44100)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """Returns a store of which two clips would have too few frames for their texts at a higher speed."""
    dense_T = to_int16(tone(500, 720 * 12 / RATE + 0.02))
    clips = [*spelled_clips(60), *((f"dense_{number}", dense_T + number, "a" * 12) for number in range(2))]
    return write_store(tmp_path_factory.mktemp("speech") / "store", clips)


def opened(store: Path, **options):
    """Returns the speech and the buckets of a training."""
    settings = assemble(TrainAsr, {"data_path": str(store), "batch_size": 6, "preset": "tiny", **options})
    speech = open_speech((store,), 320, 0.1, kind="asr")
    return speech, fill_buckets(settings, speech)


def spectrum_peak(wave: np.ndarray, rate_hz: int = RATE) -> float:
    return float(np.abs(np.fft.rfft(wave * np.hanning(len(wave)))).argmax() * rate_hz / len(wave))


@each_row((0.9,), (1.0,), (1.1,))
def test_another_speed_changes_length_and_pitch(speed):
    wave_T = to_int16(tone(1000, 1.0))
    made_T = ClipAugment(0, RATE, 0.1).changed(wave_T, ClipChange(speed, 0, 0))
    assert made_T.dtype == np.int16
    assert len(made_T) == int(np.ceil(len(wave_T) / speed))
    assert spectrum_peak(made_T) == pytest.approx(1000 * speed, abs=2)
    assert np.array_equal(made_T, wave_T) == (speed == 1)


def test_noise_has_the_ratio_that_was_asked_for_and_is_repeated_or_cropped(noise):
    folder = NoiseFolder.open(noise, [])
    assert folder.paths == ("deep/long.flac", "short.wav")
    wave_T, found = to_int16(tone(300, 1.0, level=0.1)), set()
    for place in range(40):
        change, augment = ClipChange(1.0, 3, place), ClipAugment(5, RATE, 0.0, folder, 0.6, (5.0, 15.0))
        made_T = augment.changed(wave_T, change)
        added_T = made_T.astype(np.float64) - wave_T
        if not added_T.any():
            found.add("none")
            continue
        ratio = 10 * np.log10((wave_T.astype(np.float64) ** 2).mean() / (added_T**2).mean())
        assert 4.9 <= ratio <= 15.1
        hz = spectrum_peak(added_T)
        found.add(round(hz / 100))
        assert np.abs(added_T.reshape(10, -1)).max(axis=1).min() > 0.5 * np.abs(added_T).max()  # It is everywhere.
        assert np.array_equal(augment.changed(wave_T, change), made_T)
        assert not np.array_equal(replace(augment, seed=6).changed(wave_T, change), made_T)
    assert found == {"none", 10, 20}
    loud_T = ClipAugment(5, RATE, 0.0, folder, 1.0, (-20.0, -20.0)).changed(to_int16(tone(300, 1.0, level=0.9)), change)
    assert 32760 <= np.abs(loud_T.astype(int)).max() <= 32768  # The sum is scaled down, and not clipped.
    assert (np.abs(loud_T.astype(int)) > 32700).mean() < 0.1
    silent_T = np.zeros(RATE, np.int16)
    assert not ClipAugment(5, RATE, 0.0, folder, 1.0, (0.0, 0.0)).changed(silent_T, change).any()


def test_a_part_of_a_recording_begins_anywhere_in_it(noise):
    whole_T = read_part(noise / "deep" / "long.flac", 0.0, 3.0, 44100)
    assert len(whole_T) == 3 * 44100
    for where, begin in ((0.0, 0), (0.5, int(0.5 * (2 * 44100 + 1))), (0.999999, 2 * 44100)):
        part_T = read_part(noise / "deep" / "long.flac", where, 1.0, 44100)
        assert np.array_equal(np.abs(part_T), np.abs(whole_T[begin : begin + 44100]))
    assert len(read_part(noise / "short.wav", 0.7, 1.0, RATE)) == 3200


def test_buckets_keep_their_limits_at_every_speed_and_follow_seed_epoch_and_place(store, noise):
    options = {"speed_change": 0.2, "noise_dir": str(noise), "batch_seconds": 4.0, "seed": 3}
    speech, buckets = opened(store, **options)
    again, clips = pickle.loads(pickle.dumps(buckets)), speech.parts.train
    speeds = set()
    for epoch in (0, 1):
        seen = []
        for number in range(len(buckets)):
            batch = buckets[Sample(epoch, number)]
            members = batch.clips_B.tolist()
            seen += members
            assert len(members) <= 6
            assert batch.wave_BT.numel() <= 4.0 * RATE
            assert batch.wave_BT.shape[1] == 320 * int(batch.frames_B.max())
            assert 2 * batch.wave_BT.numel() <= buckets.item_bytes
            for member, samples, symbols in zip(
                members, batch.samples_B.tolist(), batch.symbols_B.tolist(), strict=True
            ):
                text = speech.store.format.vocabulary.ids(clips[member].normalized)
                assert symbols == len(text)
                assert encoder_frames(samples) >= speech.store.format.vocabulary.frames_needed(clips[member].normalized)
                speeds.add(round(clips[member].samples / samples, 2))
            assert all(torch.equal(one, other) for one, other in zip(batch, again[Sample(epoch, number)], strict=True))
            begin = 0
            for rank in range(2):
                part = replace(buckets, ranks=Ranks(rank, 2))[Sample(epoch, number)]
                assert part.all_frames_A.tolist() == batch.frames_B.tolist()
                first, stop = part.range_2.tolist()
                assert first == begin
                assert part.samples_B[: stop - first].tolist() == batch.samples_B[first:stop].tolist()
                width = min(part.wave_BT.shape[1], batch.wave_BT.shape[1])
                assert torch.equal(part.wave_BT[: stop - first, :width], batch.wave_BT[first:stop, :width])
                begin = stop
            assert begin == len(members)
        assert sorted(seen) == list(range(len(clips)))
    assert speeds == {0.8, 1.0, 1.2}
    assert any(clip.normalized == "a" * 12 for clip in clips)
    waves = [buckets[Sample(epoch, 0)].wave_BT for epoch in (0, 1)]
    assert waves[0].shape != waves[1].shape or not torch.equal(*waves)
    held_out = buckets.collated([0])
    assert np.array_equal(held_out.wave_BT[0, : clips[0].samples].numpy(), speech.store.wave(clips[0]))


def test_another_speed_leaves_the_size_of_a_batch(store):
    _, plain = opened(store)
    _, faster = opened(store, speed_change=0.1)
    assert plain.augment is None
    assert plain.batch_frames == faster.batch_frames
    assert len(plain) <= len(faster) <= 1.3 * len(plain) + 1


def test_noise_that_cannot_be_read_is_named_with_counts(noise, tmp_path, caplog):
    for name in ("short.wav", "deep/long.flac"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((noise / name).read_bytes())
    (tmp_path / "text.mp3").write_text("no sound")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), RATE)
    soundfile.write(tmp_path / "nan.wav", np.full(1600, np.nan, np.float32), RATE, subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        assert NoiseFolder.open(tmp_path, []).paths == ("deep/long.flac", "short.wav")
    assert "3 of 5 recordings cannot be read and are left out: empty.wav: holds no sound; nan.wav: " in caplog.text


def test_noise_that_is_damaged_behind_its_beginning_is_left_out_with_a_warning(tmp_path):
    wave_T = tone(1000, 1.0)
    wave_T[8000] = np.nan
    soundfile.write(tmp_path / "damaged.wav", wave_T, RATE, subtype="FLOAT")
    augment = ClipAugment(0, RATE, 0.0, NoiseFolder.open(tmp_path, []), 1.0, (5.0, 5.0))
    clip_T, change = to_int16(tone(300, 1.0)), ClipChange(1.0, 0, 0)
    with pytest.warns(DataWarning, match="a sample is no finite number"):
        assert np.array_equal(augment.changed(clip_T, change), clip_T)
    (tmp_path / "damaged.wav").rename(tmp_path.parent / "damaged.wav")
    tmp_path.rmdir()  # A folder that vanishes ends the training, as clips without noise would be another training.
    with pytest.raises(UserError, match="damaged"):
        augment.changed(clip_T, change)


def test_noise_that_cannot_be_used_is_refused(store, noise, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.wav").write_text("no sound")
    for given, message in (
        ({"noise_dir": str(tmp_path / "gone")}, "gone: no such folder"),
        ({"noise_dir": str(tmp_path / "empty")}, "empty: no recording in it"),
        ({"noise_dir": str(tmp_path / "bad")}, "bad: none of 1 recording can be read"),
        ({"noise_dir": str(store)}, "one contains the other"),
        ({"noise_dir": str(store.parent)}, "one contains the other"),
        ({"noise_probability": 0.3}, "noise_probability 0.3 has no effect without noise_dir"),
        ({"noise_snr_low": 30.0, "noise_dir": str(noise)}, "noise_snr_low 30 is above noise_snr_high 20"),
    ):
        with pytest.raises(UserError) as raised:
            opened(store, **given)
        assert message in raised.value.message
        assert raised.value.hint
