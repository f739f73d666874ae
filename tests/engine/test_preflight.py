"""What is said before the first step: batches larger than the data set, and the disk space that checkpoints take."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gputrain.config import read_file
from gputrain.engine.saving import kept_checkpoints
from gputrain.engine.schedule import RunProgress, Saving, Schedule, StepSchedule
from tests.tables import each_row
from tests.toy import BATCH, ITEMS, ToyRecipe, quiet, train_toy

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(autouse=True)
def lines(caplog):
    caplog.set_level(logging.INFO, "gputrain")
    return caplog


def schedule(steps: int = 2, **others) -> Schedule:
    return Schedule(**{"batch_size": BATCH, "num_epochs": 10, "max_steps": steps, "warmup_steps": 0, **others})


def test_a_batch_larger_than_the_data_set_is_said(tmp_path, caplog):
    train_toy(ToyRecipe(schedule(accumulation_steps=4)), quiet(tmp_path / "fits"))
    assert "repeats" not in caplog.text
    train_toy(ToyRecipe(schedule(accumulation_steps=5)), quiet(tmp_path / "not"))
    assert f"a step takes 40 items, and the data set has {len(ITEMS)}: every step repeats some of them" in caplog.text


def test_the_disk_space_of_checkpoints_is_that_of_the_files(tmp_path, caplog):
    train_toy(ToyRecipe(schedule(8)), quiet(tmp_path, checkpoint_every_steps=1, keep_checkpoints=3))
    (line,) = [line for line in caplog.messages if line.startswith(f"run folder: {tmp_path}; checkpoints up to")]
    words = line.replace("(", "").split()
    count, each_gb = int(words[words.index("GB") + 1]), float(words[words.index("of") + 1])
    files = {path.stat().st_ino: path.stat().st_size for path in tmp_path.glob("checkpoint_*.pt")}
    # The last and the previous one are two of the three that are kept here, and one is being written.
    assert len(files) <= count <= len(files) + 3
    # A checkpoint of a few kilobytes is mostly the frame of its file; the tensors are a part of it.
    assert 0 < each_gb * 1e9 < max(files.values())


@pytest.mark.parametrize(("free", "warns"), [(1, True), (10**12, False), (0, False)])
def test_a_disk_that_is_too_small_is_said_before_the_training(free, warns, tmp_path, caplog, monkeypatch):
    total = 10**13 if free else 0  # Some network drives report 0 of 0 bytes.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(total, 0, free))
    with pytest.raises(RuntimeError, match="here"):
        train_toy(ToyRecipe(schedule()), quiet(tmp_path), source=lambda first, last: raising())
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("keep fewer with --keep-checkpoints" in message for message in warned) is warns


def raising():
    raise RuntimeError("here")
    yield


@each_row(
    (
        {"checkpoint_every_epochs": 0, "evaluate_every_epochs": 0},
        3,
    ),  # The last, the previous and the one being written.
    ({"checkpoint_every_epochs": 0}, 4),  # And the best.
    ({"checkpoint_every_epochs": 5, "keep_checkpoints": 8}, 4 + 8),
    ({"checkpoint_every_epochs": 50, "keep_checkpoints": 8}, 4 + 3),
    ({"checkpoint_every_epochs": 0, "checkpoint_every_steps": 10, "keep_checkpoints": 8}, 4 + 8),
    ({"checkpoint_every_epochs": 0, "checkpoint_every_steps": 10, "keep_checkpoints": 0}, 4 + 20),
    (
        {"checkpoint_every_epochs": 0, "checkpoint_every_steps": 10, "permanent_start": 100, "permanent_interval": 40},
        4 + 2 + 3,
    ),
)
def test_number_of_checkpoints_on_the_disk(saving, count):
    """200 steps in 100 epochs of two."""
    steps = StepSchedule(Schedule(batch_size=2, num_epochs=100), RunProgress(items=4))
    assert kept_checkpoints(Saving(**saving), steps) == count


def test_max_steps_of_one_command_does_not_end_the_next(tmp_path, caplog):
    """Its value is in the hint how to resume, and not in config.yaml."""
    train_toy(ToyRecipe(schedule(2)), quiet(tmp_path))
    assert "max_steps" not in read_file(tmp_path / "config.yaml")
    train_toy(ToyRecipe(schedule(2)), quiet(tmp_path, resume_from="auto"))
    assert "nothing is left to do: the run has made its 2 steps; a higher --max-steps, or none, goes on" in caplog.text
    assert Path(tmp_path / "checkpoint_last.pt").exists()
