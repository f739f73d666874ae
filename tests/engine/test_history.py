"""What history.jsonl says about starts, ends, changes and lost steps of a run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from gputrain import __version__
from gputrain.engine.run_folder import last_logged_step
from gputrain.errors import Stopped
from tests.engine.test_run import schedule, trained
from tests.toy import ToyRecipe, batches, quiet, train_toy


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_a_resumed_run_says_what_changed_and_how_each_part_ended(tmp_path):
    trained(tmp_path, 4, checkpoint_every_minutes=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # As if it had gone on without saving.
        file.write('{"step": 7, "epoch": 0, "seconds": 1}\n{"step": 9, "epo')
    trained(tmp_path, 8, resume_from="auto", log_every_steps=5)
    first, stopped, second, finished = rows(tmp_path)
    assert [row["event"] for row in (first, stopped, second, finished)] == ["start", "end", "start", "end"]
    assert (first["step"], first["logged_step"], first["changes"]) == (0, 0, {})
    assert stopped["step"] == 4
    assert (stopped["outcome"], stopped["message"]) == ("finished", "max_steps is reached")
    assert (second["step"], second["logged_step"]) == (4, 7)
    assert second["changes"]["log_every_steps"] == [1, 5]
    assert "resume_from" not in second["changes"]
    assert finished["step"] == 8
    machine = second["machine"]
    assert (machine["torch"], machine["gputrain"]) == (torch.__version__, __version__)
    assert second["process"] == os.getpid()
    assert first["time"] <= second["time"]


def test_a_signal_and_an_error_are_noted(tmp_path):
    def signals(first: int, last: int):
        for step, batch in enumerate(batches(first, last), start=first):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    with pytest.raises(Stopped):
        train_toy(ToyRecipe(schedule(8)), quiet(tmp_path / "a"), signals)
    _, end = rows(tmp_path / "a")
    assert end["outcome"] == "stopped"
    assert end["message"].startswith("asked to terminate after step")

    def fails(first: int, last: int):
        yield from batches(first, 2)
        raise ValueError("the disk is gone\nand more")

    with pytest.raises(ValueError, match="the disk is gone"):
        train_toy(ToyRecipe(schedule(8)), quiet(tmp_path / "b"), fails)
    _, end = rows(tmp_path / "b")
    assert (end["step"], end["outcome"], end["message"]) == (2, "failed", "the disk is gone")


def test_a_folder_that_cannot_hold_the_history_does_not_end_the_run(tmp_path, caplog):
    tmp_path.joinpath("history.jsonl").mkdir()
    trained(tmp_path, 2)
    assert "history.jsonl cannot be written" in caplog.text


def test_the_last_logged_step_is_that_of_the_last_whole_line(tmp_path):
    assert last_logged_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n' + "x" * 40000 + '\n{"step": 12}\n{"step": 13')
    assert last_logged_step(tmp_path) == 12
