"""The train-tts command with small voices: stopping and resuming, the run folder, fine-tuning, invalid input."""

import contextlib
import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import Tensor

from gputrain.cli.options import read_defaults
from gputrain.config import assemble, flatten, read_file
from gputrain.engine.run_folder import PlanFile
from gputrain.errors import UserError
from gputrain.fetch.hub import cache_folder
from gputrain.speech import training as speech_training
from gputrain.speech.buckets import open_speech
from gputrain.speech.config import LanguageName
from gputrain.speech.store import Recording, SoundFormat, SpeechClip, SpeechFormat, SpeechWriter
from gputrain.speech.text.frontend import frontend
from gputrain.tts import architecture, recipe
from gputrain.tts.config import TrainTts
from gputrain.tts.coqui import translate_coqui
from gputrain.tts.data import fill_buckets
from gputrain.tts.kind import TtsWork
from tests.speech.speech import RATE_HZ, hum
from tests.speech.trainings import SpeechTraining, assert_same_training, read_checkpoint, rows
from tests.tables import each_row
from tests.tts.test_pretrained_import import tiny_piper
from tests.vae.test_recipe import assert_same

HOP = 256
SIZES: dict[str, Any] = {
    "hidden_channels": 8, "latent_channels": 8, "speaker_channels": 8, "encoder_layers": 1,
    "encoder_filter_channels": 8, "posterior_layers": 2, "flow_layers": 1, "flow_couplings": 2, "duration_flows": 2,
    "duration_layers": 1, "upsample_initial_channel": 16, "resblock_kernel_sizes": (3,),
    "resblock_dilation_sizes": ((1, 2),),
}  # fmt: skip
TINY: dict[str, Any] = {
    "preset": "fast", "discriminator_channels": 8, "batch_size": 3, "max_padding": 0.2, "max_batch_audio_ratio": 2.0,
    "held_out_share": 0.2, "learning_rate": 1e-3, "ema_decay": 0.9, "num_audio_samples": 1, "log_every_steps": 1,
    "num_workers": 0, "device": "cpu", "plan": False,
}  # fmt: skip
QUIET = {"evaluate_every_steps": 0, "checkpoint_every_steps": 0, "sample_every_steps": 0}
KEPT = {"evaluate_every_steps": 2, "sample_every_steps": 2, "samples_after_epochs": 1, "best_after": 4}
TEXTS = ("so it is said", "an owl", "two words and more", "it is late", "yes", "no more", "we go", "all is well")


@contextlib.contextmanager
def small_presets(**changes: object) -> Iterator[None]:
    """Replaces the sizes of the presets by small ones, apart from `changes`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in architecture.PRESETS.items():
            patch.setitem(architecture.PRESETS, name, {**sizes, **SIZES, **changes})
        patch.setattr(recipe, "SEGMENT_FRAMES", 8)
        patch.setattr(speech_training, "step_flops", lambda *_: 1e9)  # Counting FLOPs would take as long as ten steps.
        yield


def spoken(
    folder: Path,
    *,
    speakers: tuple[str, ...] = ("ann",),
    long: float = 0,
    texts: Sequence[str] = TEXTS,
    language: LanguageName = "en",
    rate_hz: int = RATE_HZ,
) -> Path:
    """Writes a store of hums of 0.35 to 0.9 s, one for each text, and optionally a longer one."""
    writer = SpeechWriter(folder, SoundFormat(rate_hz, 40.0, 0.0))
    clips = []
    lengths = [0.04 * len(text) + 0.25 for text in texts]
    for number, (text, seconds) in enumerate(zip(texts, [*lengths[:-1], long or lengths[-1]], strict=True)):
        wave = (32767 * hum(seconds, hz=110 + 20 * number, rate_hz=rate_hz)).astype(np.int16)
        print_of = f"{number * 30:02x}" + 30 * "0"
        placed = writer.append(Recording(f"{number}.wav", print_of, 0, len(wave), rate_hz, 0.0), wave)
        speaker = number % len(speakers)
        clips.append(SpeechClip(placed.path, print_of, placed.first_sample, placed.samples, text, text, speaker))
    reader = frontend(language, texts=texts) if language == "characters" else frontend(language)
    writer.finish(SpeechFormat(reader, rate_hz, HOP, speakers), clips)
    return folder


train = SpeechTraining(TtsWork(), TrainTts, fill_buckets, TINY)


def weights(content: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for name, state in content["modules"].items() for key, value in state.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_presets():
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return spoken(tmp_path_factory.mktemp("speech") / "store", speakers=("ann", "bob"))


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory) -> Path:
    """Trains eight steps, with three per epoch."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, store, **KEPT, checkpoint_every_steps=2, keep_checkpoints=0, max_steps=8)
    return folder


# ------------------------------------------------------------------------------------------------ stopping, going on


@pytest.mark.slow
def test_two_folders_of_which_one_counts_thrice(store, tmp_path, caplog):
    folders = store, spoken(tmp_path / "other", texts=TEXTS[::-1], speakers=("bob", "eve"))
    quiet = replace(train, values={**TINY, **QUIET})
    whole = quiet.assert_second_folder_counts_thrice(open_speech(folders, 0.2), folders, tmp_path, caplog)
    assert whole["facts"]["speakers"] == ["ann", "bob", "eve"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_within_an_epoch_and_resumed_a_run_is_the_undisturbed_one_bit_for_bit(
    undisturbed, store, tmp_path, workers
):
    changes = {**QUIET, "evaluate_every_steps": 2, "num_workers": workers}
    halfway = train(tmp_path, store, **changes, max_steps=4)
    assert halfway["progress"]["items_seen"] % halfway["progress"]["items"] == 1  # one of three buckets
    assert {"voice", "discriminators", "ema"} == halfway["modules"].keys()
    assert_same(halfway["modules"], read_checkpoint(undisturbed / "checkpoint_step_4.pt")["modules"])
    resumed = train(tmp_path, store, **changes, max_steps=8, resume_from="auto", best_after=4)
    whole = read_checkpoint(undisturbed / "checkpoint_last.pt")
    for part in ("modules", "optimizers", "loss_scales", "random", "facts"):
        assert_same(resumed[part], whole[part])
    assert {**resumed["progress"], "best_score": 0} == {**whole["progress"], "best_score": 0}
    assert distance(weights(halfway), weights(resumed)) > 1e-2
    losses = [
        {name: value for name, value in row.items() if name.startswith(("loss/", "eval/"))} for row in rows(tmp_path)
    ]
    assert losses == [
        {name: value for name, value in row.items() if name.startswith(("loss/", "eval/"))} for row in rows(undisturbed)
    ]


def test_its_own_configuration_repeats_a_run(undisturbed, tmp_path):
    values = read_defaults(undisturbed / "config.yaml", TrainTts, translate_coqui)
    written = read_checkpoint(undisturbed / "checkpoint_last.pt")["config"]
    assert flatten(assemble(TrainTts, values)) == {**written, "max_steps": 0}  # It belongs to one command.
    repeated = train.of({**values, "output_dir": str(tmp_path), "max_steps": 2})
    assert_same_training(repeated, read_checkpoint(undisturbed / "checkpoint_step_2.pt"))


@pytest.mark.slow
def test_micro_batches_give_the_same_weights(undisturbed, store, tmp_path):
    """Compares within fp32 accuracy, relative to the change of the weights; dropout would draw for each part."""
    still = {**QUIET, "encoder_dropout": 0.0, "duration_dropout": 0.0, "max_steps": 2}
    at_once = weights(train(tmp_path / "whole", store, **still))
    split = weights(train(tmp_path / "split", store, **still, micro_batch_size=1))
    later = weights(train(tmp_path / "whole", store, **{**still, "max_steps": 4, "resume_from": "auto"}))
    assert PlanFile.read(tmp_path / "split" / "plan.json").micro_batch == {"generator": 1}
    assert 0 < distance(at_once, split) < 1e-3 * distance(at_once, later)


def test_buckets_accumulate(undisturbed, store, tmp_path):
    made = train(tmp_path, store, **QUIET, accumulation_steps=2, max_steps=2)
    assert (made["progress"]["step"], made["progress"]["items_seen"], made["progress"]["items"]) == (2, 4, 3)
    assert [row["epoch"] for row in rows(tmp_path)] == [0, 1]
    one_bucket_more = read_checkpoint(undisturbed / "checkpoint_step_2.pt")
    assert distance(weights(made), weights(one_bucket_more)) > 1e-2


# ---------------------------------------------------------------------------------------------------- the run folder


def test_the_run_folder(undisturbed):
    metrics = rows(undisturbed)
    lines = [row for row in metrics if "learning_rate" in row]
    assert [row["step"] for row in lines] == [*range(1, 9)]
    assert [row["learning_rate"] for row in lines] == pytest.approx([1e-3 * 0.9999 ** (k // 3) for k in range(8)])
    for row in lines:
        assert {name for name in row if name.startswith("loss/")} == {
            "loss/discriminator/waves", "loss/generator/waves", "loss/generator/mel", "loss/generator/kl",
            "loss/generator/duration",
        }  # fmt: skip
        assert all(math.isfinite(value) for value in row.values())
    assert lines[-1]["loss/generator/mel"] < 0.95 * lines[0]["loss/generator/mel"]
    scores = {row["step"]: row["eval/score"] for row in metrics if "eval/score" in row}
    assert list(scores) == [2, 4, 6, 8]  # Random weights are not evaluated.
    best = read_checkpoint(undisturbed / "checkpoint_best.pt")["progress"]
    assert best["best_score"] == max(score for step, score in scores.items() if step >= 4)  # best_after
    assert scores[best["step"]] == best["best_score"]
    kept = {path.name for path in undisturbed.glob("checkpoint_*.pt")}
    assert kept == {f"checkpoint_{at}.pt" for at in ("last", "previous", "best", *(f"step_{n}" for n in (2, 4, 6, 8)))}
    settings = read_file(undisturbed / "config.yaml")
    assert (settings["preset"], settings["batch_size"], settings["learning_rate"]) == ("fast", 3, 1e-3)
    facts = read_checkpoint(undisturbed / "checkpoint_last.pt")["facts"]
    assert (facts["sampling_rate"], facts["hop_size"], facts["speakers"]) == (RATE_HZ, HOP, ["ann", "bob"])
    assert facts["text"] == frontend("en").to_json()


def test_samples_begin_after_the_epochs_asked_for(undisturbed):
    samples = undisturbed / "samples"
    steps = (0, 4, 6, 8)  # Before the first step, then every second one; the first epoch ends with step 3.
    assert {path.name for path in samples.iterdir()} == {
        f"{name}_step_{step:08d}.{kind}"
        for step in steps
        for name, kind in (("text_1", "wav"), ("text_1", "png"), ("recording", "png"))
    } | {"text_1_reference.wav", "captions.json"}
    wave_T, rate_hz = soundfile.read(samples / "text_1_step_00000008.wav")
    assert rate_hz == RATE_HZ
    assert len(wave_T) % HOP == 0
    assert np.isfinite(wave_T).all()
    with Image.open(samples / "recording_step_00000008.png") as picture:
        assert picture.mode == "RGB"


# ------------------------------------------------------------------------------------------------------ speech


@pytest.mark.slow
def test_a_clip_longer_than_all_the_rest_is_a_batch_of_its_own(tmp_path):
    budget = {"max_batch_audio_ratio": 1.0}
    settings = assemble(TrainTts, {**TINY, **budget, "data_path": str(spoken(tmp_path / "store", long=6.0))})
    buckets = fill_buckets(settings, open_speech(tmp_path / "store", 0.2))
    longest = int(buckets.frames_N.argmax())
    assert buckets.frames_N[longest] > buckets.batch_frames > np.sort(buckets.frames_N)[-2]
    alone = [members.tolist() for members in map(buckets.members, [(0, n) for n in range(len(buckets))])]
    assert [longest] in alone
    train(tmp_path / "run", tmp_path / "store", **QUIET, **budget, max_steps=len(buckets))
    for row in rows(tmp_path / "run"):
        assert all(math.isfinite(value) for value in row.values())


def test_batches_are_limited_by_their_sound(store):
    limits = {"max_batch_audio_ratio": 1.0, "max_padding": 0.5, "batch_size": 8}
    settings = assemble(TrainTts, {**TINY, **limits, "data_path": str(store)})
    buckets = fill_buckets(settings, open_speech(store, 0.2))
    assert buckets.batch_frames == math.ceil(8 * float(np.mean(buckets.longest_M)))
    for number in range(len(buckets)):
        frames_B = buckets.frames_N[buckets.members((0, number))]
        assert len(frames_B) * frames_B.max() <= buckets.batch_frames
    assert len(buckets) > len(fill_buckets(assemble(TrainTts, {**flatten(settings), "max_batch_audio_ratio": 4.0}),
        open_speech(store, 0.2)))  # fmt: skip


def test_another_text_at_another_rate_or_of_others_is_no_going_on(undisturbed, store, tmp_path):
    before = (undisturbed / "config.yaml").read_bytes()
    for changes, said in (
        ({"language": "uz"}, "the data's text changed since the run began"),
        ({"rate_hz": 22050}, "the data's sampling_rate changed since the run began"),
        ({"speakers": ("ann",)}, "the data's speakers changed since the run began"),
        ({"speakers": ("bob", "ann"), "language": "ru"}, "the data's text and speakers changed"),
    ):
        texts = ("а б в",) * len(TEXTS) if changes.get("language") == "ru" else TEXTS
        other = spoken(tmp_path / said.replace(" ", "_"), **{"speakers": ("ann", "bob"), "texts": texts, **changes})
        with pytest.raises(UserError) as raised:
            train(undisturbed, other, resume_from="auto", max_steps=9)
        assert raised.value.message.startswith(said)
        assert "--init-from" in raised.value.hint
    assert (undisturbed / "config.yaml").read_bytes() == before  # It still resumes the run.


def test_a_voice_begins_with_one_of_another_language(undisturbed, tmp_path, caplog):
    texts = ("salom", "xayr endi", "yaxshi", "bu kitob", "ha", "men keldim", "u ketdi", "oʻgʻil")
    uzbek = spoken(tmp_path / "store", texts=texts, language="uz", speakers=("bob", "cem"))
    with caplog.at_level(logging.INFO, "gputrain"):
        made = train(tmp_path / "run", uzbek, **QUIET, init_from=str(undisturbed), learning_rate=0.0, max_steps=1)
    given = read_checkpoint(undisturbed / "checkpoint_last.pt")["modules"]
    averaged = {name.removeprefix("average."): value for name, value in given["ema"].items()}
    for name, value in made["modules"]["voice"].items():
        if not name.startswith(("text_encoder.embedding", "speakers")):
            assert torch.equal(value, averaged[name]), name
    assert torch.equal(made["modules"]["voice"]["speakers.weight"][0], averaged["speakers.weight"][1])  # bob
    assert not torch.equal(made["modules"]["voice"]["speakers.weight"][1], averaged["speakers.weight"][0])
    assert_same(made["modules"]["discriminators"], given["discriminators"])
    assert_same({f"average.{name}": value for name, value in made["modules"]["voice"].items()}, made["modules"]["ema"])
    (message,) = [record.getMessage() for record in caplog.records if "reinitialised" in record.getMessage()]
    assert "speakers: cem" in message
    assert "symbols: " in message
    # Resuming no longer needs the other run.
    again = train(tmp_path / "run", uzbek, **QUIET, init_from="gone", resume_from="auto", max_steps=2)
    assert again["progress"]["step"] == 2


def test_a_voice_begins_with_one_of_piper_on_the_hub(store, tmp_path, hub, caplog):
    """Piper's checkpoints are in a repository of data, each with its configuration beside it."""
    folder, weight = tmp_path / "repository" / "en" / "medium", torch.rand(16, 8, 7)
    folder.mkdir(parents=True)
    shapes = {"enc_p.emb.weight": torch.rand(8, 8), "dec.conv_pre.weight": weight, "dec.conv_pre.bias": torch.rand(16)}
    voice = tiny_piper(**{f"model_g.{name}": tensor for name, tensor in shapes.items()})
    torch.save(voice, folder / "epoch=3-step=40.ckpt")
    (folder / "config.json").write_text('{"phoneme_id_map": {"_": [0], "^": [1], "$": [2], "a": [3]}}')
    (folder / "MODEL_CARD").write_text("a voice")
    hub.add("datasets/ann/voices", tmp_path / "repository")
    name = "datasets/ann/voices:en/medium"
    made = train(tmp_path / "run", store, **QUIET, init_from=name, learning_rate=0.0, max_steps=1)
    same = [tensor for tensor in made["modules"]["voice"].values() if tensor.shape == weight.shape]
    assert any(torch.equal(tensor, weight) for tensor in same)
    assert f"{name}: reinitialised: text_encoder" in caplog.text
    assert hub.fetched() == {"en/medium/epoch=3-step=40.ckpt", "en/medium/config.json"}
    assert made["config"]["init_from"] == name
    hub.server.files.clear()
    shutil.rmtree(cache_folder())  # A resumed run needs neither the Hub nor the cache.
    train(tmp_path / "run", store, **QUIET, init_from=name, resume_from="auto", max_steps=2)


# ------------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.slow
def test_a_run_says_what_it_will_take_and_how_it_goes(store, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gputrain"):
        train(tmp_path, store, **QUIET, plan=True, max_steps=1)
    plan = PlanFile.read(tmp_path / "plan.json")
    assert plan.prediction["predicted_peak_gb"] == pytest.approx(sum(plan.prediction["parts"].values()))
    assert plan.plan.micro_batch_size.value == 3
    assert f"memory: {plan.prediction['predicted_peak_gb']:.2f} of " in caplog.text
    assert "clips for training: 6 (4 s, 2 speakers), held out: 2" in caplog.text
    assert "fast voice at 16000 Hz" in caplog.text
    assert "of speech is little" in caplog.text


# ---------------------------------------------------------------------------------------------------------- bad input


@each_row(
    ({"data_path": "gone"}, "gone"),
    ({"init_from": "gone"}, "gone: no such file or folder"),
    ({"resume_from": "gone.pt"}, "gone.pt: no such checkpoint"),
    ({"test_sentences": ["中文"]}, "no symbol"),
    ({"discriminator_channels": 12}, "discriminator_channels 12 is not a multiple of 8"),
    ({"preset": "grand"}, "preset is 'grand', expected one of high, medium, fast"),
    ({"num_epochs": 0}, "num_epochs and num_steps are both 0"),
)
def test_settings_that_cannot_be(store, tmp_path, changes, said):
    with pytest.raises(UserError) as raised:
        train(tmp_path / "run", store, **{**QUIET, "max_steps": 1, **changes})
    assert said in f"{raised.value.message} {raised.value.hint}"
    assert not (tmp_path / "run" / "checkpoint_last.pt").exists()


def test_a_single_clip_serves_as_both(tmp_path, caplog):
    store = spoken(tmp_path / "store", texts=("it is late",))
    with caplog.at_level(logging.INFO, "gputrain"):
        train(tmp_path / "run", store, **{**QUIET, "evaluate_every_steps": 1}, max_steps=1)
    assert "all data are of one file" in caplog.text
    assert math.isfinite(rows(tmp_path / "run")[-1]["eval/score"])
