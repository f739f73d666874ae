"""What is said before the first step: batches larger than the data set, and the disk space that checkpoints take."""

import logging
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from gputrain.config import read_file
from gputrain.engine.schedule import Schedule
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


def test_the_size_of_a_checkpoint_is_that_of_its_file(tmp_path, caplog):
    train_toy(ToyRecipe(schedule(8)), quiet(tmp_path))
    (line,) = [line for line in caplog.messages if line.startswith(f"run folder: {tmp_path}; a checkpoint takes")]
    size_gb = float(line.split(" takes ")[1].split()[0])
    # A checkpoint of a few kilobytes is mostly the frame of its file; the tensors are a part of it.
    assert 0 < size_gb * 1e9 < (tmp_path / "checkpoint_last.pt").stat().st_size


@pytest.mark.parametrize(("free", "warns"), [(1, True), (10**12, False), (0, False)])
def test_a_disk_that_is_too_small_is_said_before_the_training(free, warns, tmp_path, caplog, monkeypatch):
    total = 10**13 if free else 0  # Some network drives report 0 of 0 bytes.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(total, 0, free))
    with pytest.raises(RuntimeError, match="here"):
        train_toy(ToyRecipe(schedule()), quiet(tmp_path), source=lambda first, last: raising())
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("GB free: free some space" in message for message in warned) is warns


def raising():
    raise RuntimeError("here")
    yield


def test_max_steps_of_one_command_does_not_end_the_next(tmp_path, caplog):
    """Its value is in the hint how to resume, and not in config.yaml."""
    train_toy(ToyRecipe(schedule(2)), quiet(tmp_path))
    assert "max_steps" not in read_file(tmp_path / "config.yaml")
    train_toy(ToyRecipe(schedule(2)), quiet(tmp_path, resume_from="auto"))
    assert "nothing is left to do: the run has made its 2 steps; a higher --max-steps, or none, goes on" in caplog.text
    assert Path(tmp_path / "checkpoint_last.pt").exists()
