"""The train-asr command with small recognisers: stopping, resuming, ending early, initial weights, invalid input."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from gputrain.asr import architecture
from gputrain.asr.config import TrainAsr
from gputrain.asr.data import fill_buckets, recogniser_architecture
from gputrain.asr.evaluate import HeldOutSpeech
from gputrain.asr.kind import AsrWork
from gputrain.asr.load import load_recogniser
from gputrain.config import assemble
from gputrain.errors import UserError
from gputrain.fetch.hub import cache_folder
from gputrain.speech.buckets import open_speech
from gputrain.speech.error_rates import Edits, ErrorRate
from gputrain.speech.store import SpeechStore
from gputrain.speech.text.vocabulary import Vocabulary
from tests.asr.models import SIZES, run_folder, small_preset, tiny_model, transformers_folder
from tests.asr.stores import LETTERS, spelled_clips, write_store
from tests.cli.test_torchrun import torchrun
from tests.command import gputrain_here
from tests.speech.trainings import SpeechTraining, read_checkpoint, rows
from tests.tables import slow
from tests.vae.test_recipe import assert_same
from tests.vocoder.conftest import flags

pytestmark = pytest.mark.usefixtures("flops_known")

TINY: dict[str, Any] = {
    "preset": "tiny", "batch_size": 4, "max_padding": 0.2, "held_out_share": 0.2, "learning_rate": 1e-3,
    "log_every_steps": 1,
    "device": "cpu", "num_workers": 0, "num_epochs": 0, "num_steps": 8, "warmup_steps": 2, "evaluate_every_steps": 0,
    "sample_every_steps": 0, "checkpoint_every_minutes": 0, "mask_time_length": 2, "plan": False,
}  # fmt: skip
KEPT = {"evaluate_every_steps": 2, "checkpoint_every_steps": 2, "keep_checkpoints": 0}
VARIANT = {"ema_decay": 0.9, "layer_drop": 0.3, "freeze_encoder_steps": 3, "hidden_dropout": 0.1}


@pytest.fixture(scope="module", autouse=True)
def _small():
    with small_preset():
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return write_store(tmp_path_factory.mktemp("speech") / "store", spelled_clips(20))


train = SpeechTraining(AsrWork(), TrainAsr, fill_buckets, TINY)


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, store, **VARIANT, **KEPT)
    return folder


@pytest.mark.parametrize("stop", [2, slow(4)])
def test_stopped_and_resumed_a_run_is_the_undisturbed_one_bit_for_bit(undisturbed, store, tmp_path, stop):
    """Before and after the step from which the encoder trains."""
    halfway = train(tmp_path, store, **VARIANT, **KEPT, max_steps=stop)
    assert_same(halfway["modules"], read_checkpoint(undisturbed / f"checkpoint_step_{stop}.pt")["modules"])
    resumed = train(tmp_path, store, **VARIANT, **KEPT, resume_from="auto")
    whole = read_checkpoint(undisturbed / "checkpoint_last.pt")
    for part in ("modules", "optimizers", "random", "facts"):
        assert_same(resumed[part], whole[part])


def test_a_run_is_read_and_reports_error_rates(undisturbed):
    recogniser = load_recogniser(undisturbed, torch.device("cpu"))
    assert recogniser.vocabulary.symbols[3:] == tuple(LETTERS)
    evaluations = [row for row in rows(undisturbed) if "eval/cer" in row]
    assert [row["step"] for row in evaluations] == [2, 4, 6, 8]  # Random weights are not evaluated.
    for row in evaluations:
        assert 0 <= row["eval/cer_low"] <= row["eval/cer"] <= row["eval/cer_high"]
        assert row["eval/score"] == pytest.approx(1 - row["eval/cer"])
        assert 0 <= row["eval/blank_share"] <= 1
    steps = [row for row in rows(undisturbed) if "loss/recogniser/ctc" in row]
    assert len(steps) == 8
    assert all(row["statistics/recogniser/infinite"] == 0 for row in steps)
    rates = [row["learning_rate"] for row in steps]
    assert rates[:2] == [5e-4, 1e-3]
    assert rates[-1] < 0.2 * max(rates)  # tri-stage


def test_transcripts_stand_next_to_their_references(store, tmp_path, monkeypatch):
    monkeypatch.setattr("gputrain.asr.evaluate.SHOWN_CLIPS", 2)
    train(tmp_path, store, num_steps=1)
    _, text = [path.read_text() for path in sorted((tmp_path / "samples").glob("transcripts_*.txt"))]  # Step 0 and 1.
    held_out = {clip.normalized for clip in open_speech(store, 0.2, kind="asr").parts.held_out}
    shown = [line.removeprefix("text: ") for line in text.splitlines() if line.startswith("text: ")]
    assert len(shown) == 2
    assert set(shown) <= held_out
    assert text.count("read: ") == 2
    # The report plays the recordings, and finds them by their captions.
    captions = json.loads((tmp_path / "samples/captions.json").read_text())
    opened = open_speech(store, 0.2, kind="asr")
    for number, line in enumerate(line for line in text.splitlines() if line.startswith("clip: ")):
        wave, rate_hz = soundfile.read(tmp_path / f"samples/clip_{number + 1}_reference.wav", dtype="int16")
        (clip,) = [one for one in opened.parts.held_out if one.normalized == shown[number]]
        assert captions[f"clip_{number + 1}"] == f"{line.removeprefix('clip: ')}: {shown[number]}"
        assert rate_hz == 16_000
        assert np.abs(wave.astype(int) - opened.store.wave(clip)).max() <= 1


# -------------------------------------------------------------------------------------------------- ending early


@pytest.mark.slow
def test_training_ends_early_and_a_resumed_one_ends_at_the_same_step(store, tmp_path, caplog):
    """With a learning rate of almost nothing no evaluation is better than the first."""
    still = {**KEPT, "learning_rate": 1e-12, "early_stopping_patience": 2, "num_steps": 20}
    with caplog.at_level(logging.INFO):
        ended = train(tmp_path / "whole", store, **still)
    assert ended["progress"]["step"] == 6
    assert "ends early after step 6" in caplog.text
    for stop in (3, 4):
        folder = tmp_path / f"stopped_{stop}"
        halfway = train(folder, store, **still, max_steps=stop)
        assert halfway["progress"]["evaluations_since_best"] == stop // 2 - 1
        resumed = train(folder, store, **still, resume_from="auto")
        assert_same(resumed["modules"], ended["modules"])
        assert resumed["progress"] == ended["progress"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = train(tmp_path / "whole", store, **still, resume_from="auto")
    assert again["progress"] == ended["progress"]
    assert "nothing is left to do" in caplog.text
    longer = train(tmp_path / "whole", store, **{**still, "early_stopping_patience": 3}, resume_from="auto")
    assert longer["progress"]["step"] == 8


@pytest.mark.slow
def test_two_ranks_end_early_at_the_step_of_one_process(store, tmp_path):
    """Rank 0 evaluates and decides; the other one ends with it. A resumed run has nothing to do."""
    changes = {**TINY, **KEPT, "preset": "base", "learning_rate": 1e-12, "early_stopping_patience": 1, "num_steps": 20}
    # The command knows no smaller presets, so that this run continues a small model.
    changes["init_from"] = str(run_folder(tmp_path / "model", SpeechStore.open(store).format.vocabulary))
    ended = train(tmp_path / "alone", store, **changes)
    assert ended["progress"]["step"] == 4
    values = {**changes, "data_path": store, "output_dir": tmp_path / "together"}
    for said_at_the_end in ("ends early after step 4", "nothing is left to do"):
        launcher = torchrun("train-asr", *flags(values), "--resume-from", "auto")
        said = launcher.communicate(timeout=250)[0]
        assert launcher.returncode == 0, said
        assert said.count(said_at_the_end) == 1
    together = read_checkpoint(tmp_path / "together" / "checkpoint_last.pt")
    assert {**together["progress"], "best_score": 0} == {**ended["progress"], "best_score": 0}
    assert together["progress"]["best_score"] == pytest.approx(ended["progress"]["best_score"], abs=1e-6)


@pytest.mark.slow
def test_two_folders_of_which_one_counts_thrice(store, tmp_path, caplog):
    clips = [(f"other_{name}", wave, text) for name, wave, text in spelled_clips(10, seed=1)]
    folders = store, write_store(tmp_path / "other", clips)
    train.assert_second_folder_counts_thrice(open_speech(folders, 0.2, kind="asr"), folders, tmp_path, caplog)


def test_early_stopping_needs_evaluations():
    with pytest.raises(UserError, match="nothing is evaluated"):
        assemble(TrainAsr, {**TINY, "data_path": ".", "early_stopping_patience": 2, "evaluate_every_epochs": 0})


# ------------------------------------------------------------------------------------------------ initial weights


def test_a_folder_of_transformers_gives_weights_and_rows_of_its_symbols(store, tmp_path, caplog):
    """Symbols are in another order there, in capitals, and one is missing."""
    vocabulary = Vocabulary("en", ("<pad>", "<unk>", "E", "|", "C", "X", "A", "B"), delimiter=3, upper=True)
    folder = transformers_folder(tmp_path / "model", vocabulary, normalizes=False)
    theirs = load_recogniser(folder, torch.device("cpu")).model.state_dict()
    with caplog.at_level(logging.INFO):
        content = train(tmp_path / "run", store, init_from=str(folder), learning_rate=1e-9, num_steps=1, warmup_steps=0)
    assert "1 of 8 symbols are new: 'd'" in caplog.text
    assert content["facts"]["normalizes"] is False
    ours = content["modules"]["recogniser"]
    expected = [0, 1, 3, 6, 7, 4, None, 2]  # <pad> <unk> | a b c d e
    for row, old in enumerate(expected):
        if old is not None:
            assert (ours["lm_head.weight"][row] - theirs["lm_head.weight"][old]).abs().max() < 1e-7
    for name, tensor in theirs.items():
        if not name.startswith("lm_head"):
            assert (ours[name] - tensor).abs().max() < 1e-7, name


def test_a_preset_beside_another_model_is_said_to_have_no_effect(caplog):
    both = {"preset": "base", "init_from": "some/model"}
    for changes, warns in ((both, True), ({"preset": "base"}, False), ({"init_from": "some/model"}, False)):
        caplog.clear()
        AsrWork().completed(assemble(TrainAsr, {"data_path": ".", **changes}))
        assert ("preset base has no effect: the architecture is that of some/model" in caplog.text) == warns


@pytest.mark.slow
def test_a_run_resumes_without_the_model_that_it_began_with(store, tmp_path):
    folder = transformers_folder(tmp_path / "model", normalizes=False)
    changes = {"init_from": str(folder), "num_steps": 4, "adapters": "lora"}
    undisturbed = train(tmp_path / "whole", store, **changes)
    train(tmp_path / "run", store, **changes, max_steps=2)
    shutil.rmtree(folder)
    resumed = train(tmp_path / "run", store, **changes, resume_from="auto")
    assert_same(resumed["modules"], undisturbed["modules"])
    assert resumed["facts"] == undisturbed["facts"]


def test_training_begins_from_a_name_of_the_hub(store, tmp_path, hub):
    folder = transformers_folder(tmp_path / "model", normalizes=False)
    theirs = load_recogniser(folder, torch.device("cpu")).model.state_dict()
    for other in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "README.md", "adapter.uzb.bin"):
        (folder / other).write_bytes(b"no weights")
    hub.add("ann/model", folder)
    changes = {"init_from": "ann/model", "learning_rate": 1e-9, "warmup_steps": 0}
    architecture = recogniser_architecture(assemble(TrainAsr, {"data_path": ".", **changes}), None, 12)
    assert architecture["hidden_size"] == SIZES["hidden_size"]
    assert "config.json" in hub.fetched()
    assert "model.safetensors" not in hub.fetched()  # A plan needs no weights.
    made = train(tmp_path / "run", store, **changes, num_steps=2, max_steps=1)
    assert made["config"]["init_from"] == "ann/model"
    for name, tensor in theirs.items():
        if not name.startswith("lm_head"):
            assert (made["modules"]["recogniser"][name] - tensor).abs().max() < 1e-7, name
    described = {path.name for path in folder.glob("*.json")}
    assert hub.fetched() == {"model.safetensors", *described}
    hub.server.files.clear()
    shutil.rmtree(cache_folder())  # A resumed run needs neither the Hub nor the cache.
    train(tmp_path / "run", store, **changes, num_steps=2, resume_from="auto")


@pytest.mark.parametrize("adapters", [slow("none"), "lora"])
def test_another_run_gives_weights(store, tmp_path, adapters):
    first = run_folder(tmp_path / "first", Vocabulary("en", ("<pad>", "<unk>", "|", *LETTERS)))
    content = train(
        tmp_path / "second", store, init_from=str(first), adapters=adapters, learning_rate=1e-9, num_steps=1,
        warmup_steps=0,
    )  # fmt: skip
    ours = content["modules"]["recogniser"]
    theirs = read_checkpoint(first / "checkpoint_last.pt")["modules"]["recogniser"]
    assert all((ours[name] - tensor).abs().max() < 1e-7 for name, tensor in theirs.items())
    assert any("lora_up" in name for name in ours) == (adapters == "lora")
    merged = load_recogniser(tmp_path / "second", torch.device("cpu")).model.state_dict()
    assert merged.keys() == theirs.keys()


def test_a_name_that_cannot_be_read_is_an_error(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no such file or folder; as a name on the Hub: offline"):
        train(tmp_path / "run", store, init_from="nobody/no-such-model")
    for name in ("./no-such-model", "no-such-model", str(tmp_path / "nothing")):  # None of them is a name of the Hub.
        with pytest.raises(UserError) as raised:
            train(tmp_path / "run", store, init_from=name)
        assert raised.value.message == f"{name}: no such file or folder"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a run of train-asr nor"):
        train(tmp_path / "run", store, init_from=str(tmp_path / "empty"))
    assert not (tmp_path / "run" / "checkpoint_last.pt").exists()


def test_resuming_with_another_vocabulary_is_an_error(store, tmp_path):
    train(tmp_path / "run", store, num_steps=2, max_steps=1)
    clips = [(name, wave, text + "f") for name, wave, text in spelled_clips(20)]
    other = write_store(tmp_path / "other", clips)
    with pytest.raises(UserError, match="text changed"):
        train(tmp_path / "run", other, num_steps=2, resume_from="auto")


def test_train_asr_from_the_command_line(store, tmp_path):
    values = {**TINY, "num_steps": 2, "evaluate_every_steps": 1, "data_path": store, "output_dir": tmp_path / "run"}
    flags = [f"--no-{name}" if value is False else (f"--{name}", value) for name, value in values.items()]
    words = [word for flag in flags for word in (flag if isinstance(flag, tuple) else (flag,))]
    done = gputrain_here("train-asr", *words)
    assert done.returncode == 0, done.stderr
    assert "tensorboard --logdir" in done.stdout
    last = next(line for line in done.stderr.splitlines() if line.startswith("step 2/2"))
    assert " blank " in last
    assert " | cer " in last
    assert gputrain_here("train-asr", "--data-path", tmp_path, "--output-dir", tmp_path / "other").returncode == 2


# -------------------------------------------------------------------------------------------- figures and their words


def test_error_rates_have_intervals_of_resampled_clips():
    rate = ErrorRate.of([Edits(10, 1)] * 50 + [Edits(10, 0)] * 50)
    assert rate.value == 0.05
    # The standard error of the mean of a hundred draws of 0 or 0.1 is 0.005.
    assert rate.low == pytest.approx(0.05 - 1.96 * 0.005, abs=0.002)
    assert rate.high == pytest.approx(0.05 + 1.96 * 0.005, abs=0.002)


def test_a_recogniser_that_stops_writing_is_told(store, caplog):
    """One that has not written yet is not: it is normal at first."""
    data = {"data_path": str(store), "held_out_share": 0.5}
    settings, speech = assemble(TrainAsr, data), open_speech(store, 0.5, "asr")
    held_out, model = HeldOutSpeech(speech, settings, normalizes=True), tiny_model(speech.store.format.vocabulary)
    for blank_bias, told in ((100.0, 0), (-100.0, 0), (100.0, 1)):
        with torch.no_grad():
            model.lm_head.bias[speech.store.format.vocabulary.blank] = blank_bias
        held_out.evaluate(model, torch.device("cpu"))
        assert caplog.text.count("collapsed: the recogniser writes nothing any more") == told


def test_batches_have_little_padding(tmp_path):
    """The default limit is 2 %, for clips of 0.3 to 1 s."""
    store = write_store(tmp_path / "store", spelled_clips(200))
    settings = assemble(TrainAsr, {"data_path": str(store), "batch_size": 8})
    buckets = fill_buckets(settings, open_speech(store, 0.05, kind="asr"))
    assert buckets.padding <= 0.02
    assert len(buckets.clips) / len(buckets) > 4


@pytest.mark.slow
def test_it_learns(tmp_path, monkeypatch):
    """Tones stand for letters; after a minute, held-out words are read."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "conv_dim": (16, 16, 32, 32, 32, 32, 32)}
    monkeypatch.setitem(architecture.PRESETS, "tiny", {**architecture.PRESETS["tiny"], **sizes})
    store = write_store(tmp_path / "store", spelled_clips(200))
    train(
        tmp_path / "run", store, num_steps=600, batch_size=8, learning_rate=2e-3, warmup_steps=50,
        evaluate_every_steps=200,
        mask_time_prob=0.0, log_every_steps=50,
    )  # fmt: skip
    rates = [row["eval/cer"] for row in rows(tmp_path / "run") if "eval/cer" in row]
    assert rates[-1] < 0.05
