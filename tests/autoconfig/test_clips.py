"""Clips that are cut, left out and kept, and batches of similar lengths, against counting."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from gputrain.autoconfig.clips import LengthSampler, PreparedClips
from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.optimal import create_optimal_config
from gputrain.errors import UserError
from tests.autoconfig.two_gpus import RATE, MeanOfClips, collate, planner_of, waves
from tests.tables import each_row


def wave(seconds: float) -> np.ndarray:
    return np.arange(round(seconds * RATE), dtype=np.float32)


def sound(seconds: float, **others) -> dict:
    return {"audio": {"array": wave(seconds), "sampling_rate": RATE}, **others}


@each_row(False, True)
def test_long_clips_are_cut_without_losing_a_sample(keep):
    clips = PreparedClips([sound(1, speaker=3), sound(5, speaker=4)], 2, "chunk", keep_decoded=keep)
    assert clips.seconds == pytest.approx([1, 5 / 3, 5 / 3, 5 / 3])
    assert [clip["speaker"] for clip in clips] == [3, 4, 4, 4]
    parts = [clips[number]["audio"]["array"] for number in range(1, 4)]
    assert np.array_equal(np.concatenate(parts), wave(5))
    assert max(map(len, parts)) <= 2 * RATE
    assert np.array_equal(clips[0]["audio"]["array"], wave(1))


@each_row(False, True)
def test_long_clips_are_left_out(keep):
    clips = PreparedClips([sound(5), sound(1, text="a"), sound(2.001, text="b")], 2, "refuse", keep_decoded=keep)
    assert (clips.left_out, len(clips)) == (1, 2)  # A length in a header may differ by a thousandth.
    assert [clip["text"] for clip in clips] == ["a", "b"]
    with pytest.raises(UserError, match="none of 1 clips"):
        PreparedClips([sound(5)], 2, "refuse", keep_decoded=keep)


@each_row(
    (sound(5, text="two words"), "text"),
    (sound(5, labels=[1, 2]), "labels"),
    ({"input_values": wave(5), "labels": torch.tensor([1])}, "labels"),
)
def test_labels_cannot_be_cut(item, label):
    with pytest.raises(UserError, match=f"item 1 .* {label} belongs to all of it"):
        PreparedClips([sound(1), item], 2, "chunk", keep_decoded=False)


def test_every_form_of_a_sound(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros((3 * RATE, 2)), RATE)
    encoded = {"audio": {"path": str(tmp_path / "a.wav")}}
    in_bytes = {"audio": {"bytes": (tmp_path / "a.wav").read_bytes(), "path": None}}
    for item in (encoded, in_bytes, {"input_values": wave(3)}):
        for keep in (False, True):
            clips = PreparedClips([item], 2, "chunk", keep_decoded=keep)
            assert clips.seconds == [1.5, 1.5]
    (tmp_path / "b.wav").write_bytes(b"RIFF nothing")
    for damaged, name in ((tmp_path / "b.wav", r"b\.wav"), (None, "a sound")):
        item = {"audio": {"path": str(damaged)} if damaged else {"bytes": b"RIFF nothing", "path": None}}
        for read in (profile_dataset, lambda items: PreparedClips(items, 2, "chunk", keep_decoded=False)):
            with pytest.raises(UserError, match=f"{name}: "):
                read([item])
    with pytest.raises(UserError, match="without a sound"):
        PreparedClips([{"text": "a"}], 2, "chunk", keep_decoded=False)


def test_kept_clips_are_decoded_once():
    class Counted(list):
        read = 0

        def __getitem__(self, number):
            Counted.read += 1
            return super().__getitem__(number)

    clips = PreparedClips(Counted([sound(1), sound(2)]), 9, "chunk", keep_decoded=True)
    clips._dataset = None  # Nothing of it is read again.
    copy = pickle.loads(pickle.dumps(clips))
    assert Counted.read == 2
    assert np.array_equal(copy[1]["audio"]["array"], wave(2))


def test_streaming_decides_whether_clips_are_kept():
    for free_gb, kept in ((0.5, False), (8, True)):
        manager = planner_of([10.0] * 1000, free_gb)  # 0.64 GB
        config = manager.plan(4, 0.85, 0, "auto")
        assert config.streaming is not kept
        assert (manager.prepare([sound(1)], config)._kept is not None) is kept


# ------------------------------------------------------------------------------------------------------ batches


def lengths() -> np.ndarray:
    return np.random.default_rng(3).uniform(0.5, 9, 87)


def test_a_batch_has_clips_of_similar_lengths_and_an_epoch_every_clip_once():
    sampler = LengthSampler(lengths(), 8, seed=1)
    epoch = list(sampler)
    assert Counter(number for batch in epoch for number in batch) == Counter(range(87))
    assert len(epoch) == len(sampler) == 11
    assert [len(batch) for batch in epoch] == [8] * 10 + [7]
    for batch in epoch:
        seconds = lengths()[batch]
        assert list(seconds) == sorted(seconds, reverse=True)
    padded = sum(len(batch) * lengths()[batch].max() for batch in epoch)
    assert lengths().sum() > 0.8 * padded  # In batches by chance it is little more than half.
    assert list(LengthSampler(lengths(), 8, seed=1)) == epoch
    smaller = set()
    for number in range(1, 6):
        sampler.set_epoch(number)
        assert sorted(number for batch in sampler for number in batch) == list(range(87))
        smaller.add(lengths()[list(sampler)[-1]].max())
    assert len(smaller) > 2  # It is not always the same clips that stand in the smaller batch.
    assert list(sampler) != epoch


def test_a_trainer_with_batches_by_length(tmp_path):
    """Its gradients are those of the whole batch."""
    pytest.importorskip("accelerate")
    manager = planner_of(lengths() / 10)
    config = replace(manager.plan(8, 0.85, 0, "auto"), per_device_train_batch_size=4, dataloader_num_workers=0)
    clips = manager.prepare(waves(lengths() / 10), config)
    weights = {}
    for by_length in (False, True):
        model = MeanOfClips()
        common = {"max_steps": 10, "learning_rate": 0.1, "optim": "sgd", "use_cpu": True, "report_to": [],
                  "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant"}  # fmt: skip
        arguments = config.training_arguments(by_length=True)
        trainer = Trainer(
            model,
            TrainingArguments(str(tmp_path), **{**arguments, **common}),
            train_dataset=clips,
            data_collator=collate,
        )
        if by_length:
            manager.train_with_recovery(trainer, config=config)
        else:
            sampler = manager.sampler(clips, config, seed=42)
            trainer.get_train_dataloader = lambda s=sampler: DataLoader(clips, batch_sampler=s, collate_fn=collate)
            trainer.train()
        weights[by_length] = model.layer.weight.detach()
        sizes = [items for items, _ in model.passes]
        assert sum(sizes) == 80
        assert set(sizes) == ({4} if by_length else {8})
    assert (weights[True] - weights[False]).abs().max() < 1e-12
    assert (weights[True] - MeanOfClips().layer.weight).abs().max() > 1e-4
    with pytest.raises(UserError, match="batches by length have 8 clips, and the trainer was made for 2 x 4"):
        manager.train_with_recovery(
            Trainer(
                MeanOfClips(),
                TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=2,
                                  gradient_accumulation_steps=4),
                train_dataset=clips, data_collator=collate,
            ),
            config=config,
        )  # fmt: skip
    with pytest.raises(UserError, match=r"a clip of 0\.88 s is longer than the planned 0\.50 s"):
        manager.sampler(clips, replace(config, max_duration_seconds=0.5))


# ------------------------------------------------------------------------------------------------------- plans


class ManyClips(list):
    """Clips by number, with or without a column of their lengths; counts what is read."""

    def __init__(self, seconds, column=True):
        super().__init__(seconds)
        self.column_names, self.read = ["audio", "duration"] if column else [], []

    def __getitem__(self, key):
        if key == "duration":
            return list(self)
        self.read.append(key)
        seconds = super().__getitem__(key)
        return {
            "audio": {"array": np.zeros(round(seconds * 100), np.float32), "sampling_rate": 100},
            "duration": seconds,
        }


@each_row(0, 1)
def test_what_was_planned_from_a_sample_of_the_clips_is_what_all_of_them_are_prepared_for(seed):
    """The examined clips are seldom the longest: the limit holds for the others with the same tolerance."""
    lengths = np.random.default_rng(seed).uniform(3, 15, 2000)
    for most in (0.0, 15.0):
        clips = ManyClips(lengths, column=False)
        config, manager = create_optimal_config(
            clips, nn.Linear(1, 1), 4, loss=lambda m, b: m(b).sum(), batch=lambda B, s: torch.empty(B, 1), vram_gb=8,
            max_duration_seconds=most,
        )  # fmt: skip
        sampler = manager.sampler(manager.prepare(clips, config), config)
        assert sum(map(len, sampler)) >= 2000


def test_streaming_reads_no_item_of_known_length():
    clips = ManyClips([1.0, 5.0, 2.0])
    prepared = PreparedClips(clips, 2.0, "refuse", keep_decoded=False, length_column="duration")
    assert (prepared.seconds, prepared.left_out, clips.read) == ([1.0, 2.0], 1, [])
    cut = PreparedClips(clips, 2.0, "chunk", keep_decoded=False, length_column="duration")
    assert clips.read == [1]  # One item shows whether the items that are cut have labels.
    assert [len(clip["audio"]["array"]) for clip in cut] == [100, 166, 167, 167, 200]


def test_the_last_batch_is_left_out_if_it_is_too_small_for_batch_norm():
    for count, sizes in ((9, [4, 4]), (10, [4, 4, 2]), (1, [1])):
        sampler = LengthSampler([1.0] * count, 4, least_items=2)
        assert [len(batch) for batch in sampler] == sizes
        assert len(sampler) == len(sizes)


def test_clips_with_labels_are_left_out_or_refused():
    items = [sound(1.0, text="a") for _ in range(10)] + [sound(2.0, text="b")]
    config, _ = create_optimal_config(items, nn.Linear(1, 1), 2, loss=lambda m, b: m(b).sum(), max_duration_seconds=1.5,
                                      batch=lambda B, s: torch.empty(B, 1), vram_gb=8)  # fmt: skip
    assert config.over_long == "refuse"
    assert "1 longer of 11 clips" in config.reasons["over_long"]
    with pytest.raises(UserError, match=r"1 clip is longer than 1\.5 s and cannot be cut: text belongs to the whole"):
        create_optimal_config(items, nn.Linear(1, 1), 2, loss=lambda m, b: m(b).sum(), max_duration_seconds=1.5,
                              batch=lambda B, s: torch.empty(B, 1), vram_gb=8, over_long="chunk")  # fmt: skip


def test_several_gpus_share_the_batch(monkeypatch):
    made = {"loss": lambda m, b: m(b).sum(), "batch": lambda B, s: torch.empty(B, 1), "gpu": "l4"}
    config, _ = create_optimal_config([1.0] * 8, nn.Linear(1, 1), 32, gpus=4, **made)
    assert (config.gpus, config.target_batch_size) == (4, 32)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 8
    assert config.training_arguments(by_length=True)["per_device_train_batch_size"] == 8
    with pytest.raises(UserError, match="32 cannot be divided among 3 GPUs"):
        create_optimal_config([1.0] * 8, nn.Linear(1, 1), 32, gpus=3, **made)
    torchrun = {"TORCHELASTIC_RUN_ID": "a", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    assert create_optimal_config([1.0] * 8, nn.Linear(1, 1), 32, **made)[0].gpus == 2
