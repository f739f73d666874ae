"""Prepared data and a run of two steps of each kind of model, made once for all tests that only read them."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from gputrain.data_in.split import MANIFEST
from gputrain.vae.config import VaePrepareConfig
from gputrain.vae.prepare import prepare_images
from gputrain.vocoder.store import JOURNAL
from tests.asr.stores import spelled_clips, write_store
from tests.command import gputrain_here
from tests.tts import test_train as voices
from tests.vae.test_recipe import SMALL
from tests.vocoder import conftest as vocoders

SETTINGS: dict[str, dict[str, Any]] = {
    "vae": {**SMALL, "batch_size": 2, "held_out_share": 0.25, "warmup_steps": 0, "evaluate_every_epochs": 0,
            "device": "cpu", "plan": False},
    "vocoder": {**vocoders.TINY, "crop_mel_frames": 16, "batch_size": 2},
    "tts": voices.TINY,
}  # fmt: skip
QUIET = {
    "num_workers": 0,
    "evaluate_every_steps": 0,
    "sample_every_steps": 0,
    "num_epochs": 0,
    "num_steps": 4,
    "max_steps": 2,
}


def pictures(folder: Path) -> Path:
    """Prepares four pictures of noise."""
    source = folder.with_name("pictures")
    source.mkdir()
    for number in range(4):
        levels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(levels).save(source / f"{number}.png")
    prepare_images(source, folder, VaePrepareConfig(target_size=24, min_size=8))
    return folder


DATA: dict[str, Callable[[Path], Path]] = {
    "vae": pictures,
    "vocoder": lambda folder: vocoders.hummed(folder, clips=3, seconds=0.6),
    "tts": lambda folder: voices.spoken(folder, speakers=("ann", "bob"), texts=voices.TEXTS[:5]),
    "asr": lambda folder: write_store(folder, spelled_clips(4)),
}


@functools.cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="small_runs_")


@functools.cache
def prepared(kind: str) -> Path:
    """Returns a folder of prepared data. It is only read."""
    folder = Path(temporary().name, kind)
    folder.mkdir()
    return DATA[kind](folder / "data")


def interrupted(kind: str, folder: Path) -> Path:
    """Makes prepared data in a folder those of a preparation that was interrupted before its end."""
    if kind == "vocoder":
        (folder / MANIFEST).rename(folder / JOURNAL)
    else:
        (folder / MANIFEST).unlink()
    return folder


@functools.cache
def small_run(kind: str) -> Path:
    """Returns a folder that holds a run in `run`, trained two of four steps on the data beside it: `run/config.yaml`
    names them relative to the folder. It is only read."""
    folder, before = prepared(kind).parent, Path.cwd()
    settings = {**SETTINGS[kind], **QUIET, "data_path": "data", "output_dir": "run"}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    os.chdir(folder)
    try:
        with voices.small_presets():
            done = gputrain_here(f"train-{kind}", "--config", "settings.yaml")
    finally:
        os.chdir(before)
    assert done.returncode == 0, done.stderr
    return folder
