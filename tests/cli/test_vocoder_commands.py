"""The vocoder's commands as typed: errors with their messages and exit codes, and the result of a tiny run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gputrain.audio.store import PITCHES
from gputrain.cli import ui
from gputrain.data_in.split import MANIFEST
from gputrain.vocoder.store import JOURNAL
from tests.tables import each_row
from tests.vocoder.conftest import TINY, flags, hummed

pytestmark = pytest.mark.usefixtures("flops_known")

QUIET = {"evaluate_every_steps": 0, "sample_every_steps": 0, "checkpoint_every_steps": 0, "max_steps": 1}


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Path:
    return hummed(tmp_path_factory.mktemp("prepared") / "notes")


def training(store: Path, **changes: object) -> list[str]:
    """Return the words of a training of one step."""
    values = {"data_path": str(store), **TINY, **QUIET, "output_dir": "run", **changes}
    return ["train-vocoder", *flags(values)]


def refused(typed, words: list[str], *said: str) -> None:
    code, printed = typed(*words)
    assert code == ui.USER_ERROR == 2, printed
    for part in said:
        assert part in printed
    assert not Path("run", "checkpoint_last.pt").exists()


# ------------------------------------------------------------------------------------------------------- the sound


def test_sound_of_another_rate_or_hop(typed, notes):
    refused(
        typed, training(notes, audio_sample_rate=22050),
        "prepared with audio_sample_rate 16000, and the model has 22050 Hz", "--audio-sample-rate 22050",
    )  # fmt: skip
    refused(
        typed, training(notes, hop_size=128, upsample_rates=[16, 8], upsample_kernel_sizes=[32, 16]),
        "prepared with hop_size 64, and the model has 128 samples",
        "train with --hop-size 64, or prepare recordings for it: gputrain prepare-data --kind vocoder --hop-size 128",
    )  # fmt: skip


def test_a_crop_longer_than_every_clip(typed, notes):
    refused(
        typed, training(notes, crop_mel_frames=304), "a crop of 304 frames is longer than every clip",
        "--crop-mel-frames 296",
    )  # fmt: skip


def test_no_sound_and_sound_half_prepared(typed, notes, tmp_path):
    refused(typed, training(tmp_path / "gone"), "gone: no such folder", "prepare-data --kind vocoder")
    unfinished = tmp_path / "unfinished"
    shutil.copytree(notes, unfinished)
    (unfinished / MANIFEST).rename(unfinished / JOURNAL)
    refused(typed, training(unfinished), "unfinished: its preparation was not finished")
    (unfinished / JOURNAL).rename(unfinished / MANIFEST)
    (unfinished / PITCHES).write_bytes((unfinished / PITCHES).read_bytes()[:-4])
    refused(typed, training(unfinished), "bytes, expected", "prepare the recordings again, into another folder")


def test_sound_without_a_pitch_is_a_warning(typed, tmp_path):
    store = hummed(tmp_path / "unvoiced", voiced=False)
    code, printed = typed(*training(store, evaluate_every_steps=1))
    assert code == 0
    assert "warning: 0.0 % of the frames have a pitch" in printed
    row = json.loads(Path("run", "metrics.jsonl").read_text().splitlines()[-1])
    assert np.isfinite(row["eval/score"])


def test_a_single_clip_serves_as_both(typed, tmp_path):
    store = hummed(tmp_path / "single", clips=1)
    code, printed = typed(*training(store, val_num=1))
    assert code == 0
    assert "warning: all data are of one file, which is used both for training and for evaluation" in printed
    assert "clips for training: 1 (1 s), held out: 1" in printed


def test_a_single_held_out_clip_is_a_warning(typed, tmp_path):
    store = hummed(tmp_path / "three", clips=3)
    code, printed = typed(*training(store, val_num=1))
    assert code == 0
    assert "warning: only 1 of 3 clips is held out" in printed
    assert "--val-num 8" in printed
    code, printed = typed(*training(store, val_num=2, output_dir="other"))
    assert code == 0
    assert "held out: every" not in printed


# ----------------------------------------------------------------------------------------------------- the settings


@each_row(
    ({"pc_aug": True}, "pc_aug needs mini_nsf"),
    ({"upsample_rates": [8, 4]}, "make 32 samples of a frame, and hop_size is 64"),
    ({"discriminators": "msd,cqt"}, "discriminators is 'msd,cqt', expected a list"),
    ({"fmax": 9000}, "mel bands from 40 to 9000 Hz do not fit below half of 16000 Hz"),
    ({"init_from": "gone.ckpt"}, "gone.ckpt: no such file or folder"),
    ({"resume_from": "gone.pt"}, "gone.pt: no such checkpoint"),
    ({"gamma": 0.99}, "gamma 0.99 has no effect with learning_rate_schedule"),
    ({"checkpoint_every_steps": 0, "permanent_start": 8}, "permanent_start 8 has no effect"),
)
def test_settings_that_cannot_be(typed, notes, changes, said):
    refused(typed, training(notes, **changes), said)
