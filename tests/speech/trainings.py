"""Trainings on speech as their commands make them, of small models."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gputrain.cli.options import read_defaults
from gputrain.config import assemble
from gputrain.session import train_model
from gputrain.speech.buckets import Speech
from tests.vae.test_recipe import assert_same


def read_checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("modules", "optimizers", "loss_scales", "random", "progress", "facts"):
        assert_same(one[part], other[part])


@dataclass(frozen=True)
class SpeechTraining:
    work: Any
    settings: type
    fill_buckets: Callable[..., Any]
    values: dict[str, Any]

    def __call__(self, folder: Path, store: Path, **changes: object) -> dict[str, Any]:
        """Trains as the command does, and returns the content of the last checkpoint."""
        return self.of({**self.values, "data_path": str(store), **changes, "output_dir": str(folder)})

    def of(self, values: dict[str, Any]) -> dict[str, Any]:
        train_model(self.work, assemble(self.settings, values), Console(quiet=True))
        return read_checkpoint(Path(values["output_dir"]) / "checkpoint_last.pt")

    def assert_second_folder_counts_thrice(
        self, speech: Speech, folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> dict[str, Any]:
        """Train on two folders at once, and with a stop from the run's own configuration; return the checkpoint."""
        store, other = folders
        shared = {"data_path": [str(store), f"{other}=3"], "num_epochs": 0, "num_steps": 4}
        with caplog.at_level(logging.INFO, "gputrain"):
            whole = self(tmp_path / "whole", store, **shared)
        (share,) = re.findall(r"other: (\d+) clips with weight 3: (\d+) of an epoch", caplog.text)
        assert int(share[1]) == 3 * int(share[0]) > 0
        plain = {**self.values, **shared, "data_path": [str(store), str(other)], "output_dir": "."}
        assert whole["progress"]["items"] > len(self.fill_buckets(assemble(self.settings, plain), speech))
        self(tmp_path / "parts", store, **shared, max_steps=2)
        own = read_defaults(tmp_path / "parts" / "config.yaml", self.settings)
        assert_same_training(self.of({**own, "resume_from": "auto"}), whole)
        return whole
