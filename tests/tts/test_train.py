"""train-tts as a whole, with small voices: stopping and going on, the run folder, fine-tuning, what a run refuses."""

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from gputrain.config import assemble, flatten, read_file
from gputrain.errors import UserError
from gputrain.planfile import PlanFile
from gputrain.tts import architecture, recipe
from gputrain.tts.config import TrainTts
from gputrain.tts.data import open_speech
from gputrain.tts.store import Clip, Format, Recording, SoundFormat, Writer
from gputrain.tts.text.frontend import frontend
from gputrain.tts.train import fill_buckets, train_tts
from tests.tts.speech import RATE_HZ, hum
from tests.vae.test_recipe import assert_same

HOP = 256
SIZES: dict[str, Any] = {
    "hidden_channels": 8, "latent_channels": 8, "speaker_channels": 8, "encoder_layers": 1,
    "encoder_filter_channels": 8, "posterior_layers": 2, "flow_layers": 1, "flow_couplings": 2, "duration_flows": 2,
    "upsample_initial_channel": 16, "resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1, 2),),
}  # fmt: skip
TINY: dict[str, Any] = {
    "preset": "fast", "discriminator_channels": 8, "batch_size": 3, "max_padding": 0.2, "batch_room": 2.0,
    "held_out_share": 0.2, "learning_rate": 1e-3, "ema_decay": 0.9, "num_audio_samples": 1, "log_freq": 1,
    "num_workers": 0, "device": "cpu", "plan": False,
}  # fmt: skip
QUIET = {"evaluate_steps": 0, "checkpoint_steps": 0, "save_samples_freq": 0}
KEPT = {"evaluate_steps": 2, "save_samples_freq": 2, "samples_after_epochs": 1, "best_after": 4}
TEXTS = ("so it is said", "an owl", "two words and more", "it is late", "yes", "no more", "we go", "all is well")


@contextlib.contextmanager
def small_presets() -> Iterator[None]:
    """Voices that a step takes no time of, as sizes are data."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in architecture.PRESETS.items():
            patch.setitem(architecture.PRESETS, name, {**sizes, **SIZES})
        patch.setattr(recipe, "SEGMENT_FRAMES", 8)
        yield


def spoken(folder: Path, *, speakers: tuple[str, ...] = ("ann",), long: float = 0, texts=TEXTS, language="en") -> Path:
    """A store of hums of 0.35 to 0.9 s, one for each text; and where asked, of one of so many seconds."""
    writer = Writer(folder, SoundFormat(RATE_HZ, 40.0, 0.0))
    clips = []
    lengths = [0.04 * len(text) + 0.25 for text in texts]
    for number, (text, seconds) in enumerate(zip(texts, [*lengths[:-1], long or lengths[-1]], strict=True)):
        wave = (32767 * hum(seconds, hz=110 + 20 * number)).astype(np.int16)
        print_of = f"{number * 30:02x}" + 30 * "0"
        placed = writer.add(Recording(f"{number}.wav", print_of, 0, len(wave), RATE_HZ, 0.0, []), wave)
        speaker = number % len(speakers)
        clips.append(Clip(placed.path, print_of, placed.first_sample, placed.samples, text, text, speaker))
    reader = frontend(language, texts=texts) if language == "characters" else frontend(language)
    writer.finish(Format(reader, RATE_HZ, HOP, speakers), clips)
    return folder


def train(folder: Path, store: Path, **changes: object) -> dict[str, Any]:
    """Train as the command does, and give what the last checkpoint holds."""
    values = {**TINY, "data_dir": str(store), **changes, "output_dir": str(folder)}
    train_tts(assemble(TrainTts, values), Console(quiet=True))
    return read_checkpoint(folder / "checkpoint_last.pt")


def read_checkpoint(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(content: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, state in content["modules"].items() for key, value in state.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


def assert_same_training(one: dict[str, Any], other: dict[str, Any]) -> None:
    for part in ("modules", "optimizers", "loss_scales", "random", "progress", "facts"):
        assert_same(one[part], other[part])


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return spoken(tmp_path_factory.mktemp("speech") / "store", speakers=("ann", "bob"))


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory) -> Path:
    """Eight steps, with a checkpoint of each second."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, store, **KEPT, checkpoint_steps=1, keep_checkpoints=0, max_steps=8)
    return folder


def test_time(undisturbed):
    for row in rows(undisturbed): print(row)
    print(sorted(p.name for p in undisturbed.rglob("*")))
