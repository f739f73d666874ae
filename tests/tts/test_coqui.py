"""Configurations in Coqui's format: translation of each key, contradictions, and unsupported values."""

import json
import logging
import operator
import re
from pathlib import Path

import pytest
import yaml

from gputrain.cli.options import read_defaults
from gputrain.config import assemble, read_file, to_yaml
from gputrain.errors import UserError
from gputrain.tts.config import PlanTts, TrainTts
from gputrain.tts.coqui import known_keys, translate_coqui
from gputrain.tts.kind import KIND
from tests.tables import each_row

# The user's settings for an RTX 4090, in sections.
USERS = {
    "project": {"name": "uzbek-tts-rtx4090", "run_name": "vits-rtx4090"},
    "training": {
        "batch_size": 64, "eval_batch_size": 16, "num_loader_workers": 6, "pin_memory": True, "mixed_precision": True,
        "epochs": 200,
    },
    "optimizer": {"name": "AdamW", "lr": 0.0002, "betas": [0.8, 0.99], "weight_decay": 0.01, "gradient_clip_val": 1.0},
    "scheduler": {"name": "ExponentialLR", "gamma": 0.9999},
    "logging": {"log_interval": 50, "save_interval": 500, "eval_interval": 500, "dashboard_logger": "tensorboard"},
    "output": {"save_step": 500, "save_n_checkpoints": 8, "save_best_after": 5000},
    "evaluation": {"test_delay_epochs": 3, "num_audio_samples": 8, "run_eval": True},
    "rtx4090_optimizations": {
        "torch_compile": True, "compile_model": True, "memory_format": "channels_last", "cudnn_benchmark": True,
        "tf32": True, "deterministic": False,
    },
}  # fmt: skip
HONOURED = [
    ("schedule.batch_size", 64), ("data.eval_batch_size", 16), ("hardware.num_workers", 6),
    ("hardware.precision", "mixed"), ("schedule.num_epochs", 200), ("schedule.learning_rate", 0.0002),
    ("schedule.beta1", 0.8), ("schedule.beta2", 0.99), ("schedule.weight_decay", 0.01),
    ("schedule.gradient_clip", 1.0), ("schedule.learning_rate_schedule", "exponential"), ("schedule.gamma", 0.9999),
    ("saving.log_every_steps", 50), ("saving.checkpoint_every_steps", 500), ("saving.evaluate_every_steps", 500),
    ("saving.keep_checkpoints", 8), ("saving.best_after", 5000), ("saving.samples_after_epochs", 3),
    ("data.num_audio_samples", 8), ("hardware.use_torch_compile", True), ("hardware.channels_last", True),

]  # fmt: skip
REASONS = {
    "project": "identified by its folder", "run_name": "identified by its folder", "pin_memory": "pinned memory",
    "optimizer": "VITS is trained with AdamW", "dashboard_logger": "TensorBoard is always written",
    "run_eval": "evaluate_every_steps 0", "cudnn_benchmark": "many lengths", "deterministic": "bit for bit",
}  # fmt: skip


def made_of(content: object, folder: Path) -> dict[str, object]:
    """Returns options as the command reads them from a file with this content."""
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return read_defaults(path, TrainTts, translate_coqui)


def settings(content: object, folder: Path) -> TrainTts:
    return assemble(TrainTts, {**made_of(content, folder), "data_path": "./data/preprocessed"})


def refusal(content: object, folder: Path) -> UserError:
    with pytest.raises(UserError) as raised:
        made_of(content, folder)
    return raised.value


@pytest.fixture
def whole(tmp_path: Path) -> TrainTts:
    return settings(USERS, tmp_path)


@each_row(*HONOURED)
def test_each_of_the_users_keys_is_honoured(whole, path, value):
    """In a file of the user's, and in the profile that contains the same settings."""
    profile = assemble(TrainTts, {**read_defaults(KIND.shipped / "vits_rtx4090.yaml", TrainTts), "data_path": "."})
    assert profile.model.preset == "high"
    assert len(profile.data.test_sentences) == profile.data.num_audio_samples
    for source in (whole, profile):
        found = operator.attrgetter(path)(source)
        assert found == value
        assert type(found) is type(value)


def test_keys_without_effect_are_logged_and_no_others(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gputrain"):
        settings(USERS, tmp_path)
    messages = [record.getMessage() for record in caplog.records]
    said = {}
    for message in messages:
        names, why = message.removeprefix(f"{tmp_path / 'config.yaml'}: ").split(" no effect: ")
        said |= dict.fromkeys(re.findall(r"\w+", names.rsplit(" ", 1)[0].replace(" and ", ", ")), why)
    assert said.keys() == REASONS.keys()
    for name, why in REASONS.items():
        assert why in said[name]


def test_no_key_of_the_users_is_lost():
    """All keys are options or spellings of them, or are in the table."""
    keys = {key for section in USERS.values() for key in section if key != "name"}
    spellings = TrainTts.spellings.keys() | {"batch_size", "eval_batch_size", "mixed_precision", "tf32", "weight_decay",
        "gamma", "num_audio_samples"}  # fmt: skip
    assert keys <= spellings | known_keys().keys()


def test_a_file_without_sections_and_a_plan_are_read_alike(tmp_path, whole):
    flat = {key: value for section in USERS.values() for key, value in section.items() if key != "name"}
    assert settings(flat, tmp_path) == whole
    planned = assemble(PlanTts, read_defaults(tmp_path / "config.yaml", PlanTts, translate_coqui))
    assert planned.schedule == whole.schedule


def test_other_keys_of_coquis(tmp_path):
    made = settings(
        {
            "output_path": "voices", "lr_gen": 1e-4, "lr_disc": 1e-4, "grad_clip": [5.0, 5.0], "print_step": 25,
            "lr_scheduler_gen": "ExponentialLR", "lr_scheduler_disc": "ExponentialLR", "allow_tf32": False,
            "lr_scheduler_gen_params": {"gamma": 0.999}, "lr_scheduler_disc_params": {"gamma": 0.999},
            "memory_format": "contiguous_format", "num_eval_loader_workers": 2, "test_sentences": ["salom", "xayr"],
        },
        tmp_path,
    )  # fmt: skip
    assert made.saving.output_dir == Path("voices")
    assert (made.schedule.learning_rate, made.schedule.gradient_clip, made.schedule.gamma) == (1e-4, 5.0, 0.999)
    assert (made.saving.log_every_steps, made.hardware.precision, made.hardware.channels_last) == (25, "fp32", False)
    assert made.data.test_sentences == ("salom", "xayr")


@each_row(({"lr_gen": 2e-4, "lr_disc": 1e-4}, 2e-4, 0.5), ({"lr_gen": 1e-4, "lr_disc": 1e-4, "lr": 3e-4}, 1e-4, 1.0))
def test_both_networks_have_the_rates_of_the_file(tmp_path, rates, learnt, share):
    schedule = settings(rates, tmp_path).schedule
    assert (schedule.learning_rate, schedule.discriminator_rate) == (learnt, share)
    schedule = settings({"optimizer_params": {"betas": [0.7, 0.98]}}, tmp_path).schedule
    assert schedule.betas == schedule.discriminator_betas == (0.7, 0.98)


def test_a_run_s_own_file_goes_through_unchanged(tmp_path, whole):
    assert settings(to_yaml(whole), tmp_path) == whole
    path = tmp_path / "config.yaml"
    assert translate_coqui(read_file(path), path) == read_file(path)


WRITTEN = Path(__file__).parents[1] / "data" / "coqui_vits.json"  # By Coqui's own classes, for its LJSpeech recipe.


def test_the_file_that_coqui_writes_beside_a_voice_is_read(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "gputrain"):
        made = assemble(TrainTts, {**read_defaults(WRITTEN, TrainTts, translate_coqui), "data_path": "speech"})
    assert (made.model.preset, made.model.encoder_dropout, made.model.duration_dropout) == ("high", 0.1, 0.5)
    schedule = made.schedule
    assert (schedule.batch_size, schedule.num_epochs, schedule.seed, schedule.gradient_clip) == (32, 1000, 54321, 1000)
    assert (schedule.learning_rate, schedule.learning_rate_schedule, schedule.gamma) == (2e-4, "exponential", 0.999875)
    assert (schedule.beta1, schedule.beta2, schedule.eps, schedule.weight_decay) == (0.8, 0.99, 1e-9, 0.01)
    hardware = made.hardware
    assert (hardware.precision, hardware.num_workers) == ("fp16", 8)
    saving = made.saving
    assert (saving.checkpoint_every_steps, saving.keep_checkpoints, saving.samples_after_epochs) == (10_000, 5, 0)
    assert (made.losses.mel_weight, made.losses.kl_weight, made.losses.duration_weight) == (45.0, 1.0, 1.0)
    assert made.data.held_out_share == 0.01
    assert len(made.data.test_sentences) == 5
    assert made.data.test_sentences[1] == "Be a voice, not an echo."
    text = caplog.text
    for ignored in ("use_phonemes", "characters", "print_eval", "last_epoch has", "datasets", "lr has"):
        assert ignored in text, ignored
    assert "hidden_channels" not in text  # It is as ours.


@each_row(
    ("model_args", "hidden_channels", 256, "hidden_channels is 256: preset high has the architecture of VITS"),
    ("model_args", "use_d_vector_file", True, "use_d_vector_file is True and False"),
    ("model_args", "freeze_PE", True, "freeze_PE is True: every part of a voice is trained"),
    ("model_args", "resblock_kernel_sizes_decoder", [3, 5, 7], "resblock_kernel_sizes_decoder is [3, 5, 7]: preset"),
    ("audio", "hop_length", 300, "hop_length is 300: the spectrograms are those of VITS"),
    ("", "optimizer", "RAdam", "optimizer is 'RAdam'"),
    ("", "lr_scheduler_gen", "NoamLR", "lr_scheduler_gen is 'NoamLR'"),
    ("", "scheduler_after_epoch", False, "scheduler_after_epoch is False: the learning rate falls once an epoch"),
    ("", "use_noise_augment", True, "use_noise_augment is True"),
)
def test_what_coqui_can_and_gputrain_cannot_is_refused(tmp_path, section, key, value, said):
    content = json.loads(WRITTEN.read_text())
    (content[section] if section else content)[key] = value
    assert said in refusal(content, tmp_path).message


def test_speakers_of_a_file_of_coquis_may_stand_there_twice(tmp_path):
    """Its trainer counts the speakers in model_args only."""
    content = json.loads(WRITTEN.read_text())
    content["model_args"] |= {"num_speakers": 109, "use_speaker_embedding": True, "speakers_file": "speakers.pth"}
    content["characters"]["vocab_dict"] = {"a": 1, "batch_size": 2}
    content["test_sentences"] = [["Hello.", "p225", None, "en"], "Bye."]
    assert settings(content, tmp_path).data.test_sentences == ("Hello.", "Bye.")
    assert settings(content, tmp_path).schedule.batch_size == 32


@each_row(
    ({"save_interval": 500, "save_step": 1000}, "save_step is 1000: both set checkpoint_every_steps"),
    ({"lr": 1e-4, "optimizer": {"learning_rate": 2e-4}}, "lr is 0.0001 and learning_rate is 0.0002"),
    ({"a": {"gamma": 0.9}, "b": {"gamma": 0.99}}, "gamma is 0.9 and 0.99"),
    ({"pin_memory": False}, "pin_memory is False: data for a GPU is always read into pinned memory"),
    ({"deterministic": True}, "deterministic is True: repeating a run bit for bit is promised on the CPU alone"),
    ({"optimizer": "RAdam"}, "optimizer is 'RAdam': VITS is trained with AdamW"),
    ({"model": {"name": "tacotron2"}}, "model is 'tacotron2': VITS"),
    ({"scheduler": {"name": "StepLR"}}, "scheduler is 'StepLR'"),
    ({"pin_memory": 1}, "pin_memory is 1"),
    ({"memory_format": "nhwc"}, "unknown key 'memory_format'"),
    ({"save_intervall": 500}, "unknown key 'save_intervall'"),
    ({"training": {"batch_sise": 3}}, "unknown key 'batch_sise'"),
    ({"batch_size": None}, "batch_size is null"),
    ({"training": None}, "unknown key 'training'"),
    ({"lr": "fast"}, "lr is 'fast', expected a number"),
    ({"grad_clip": [5.0, 1.0]}, "grad_clip is [5.0, 1.0], expected a number"),
    ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
    ({"mixed_precision": "yes please"}, "mixed_precision is 'yes please', expected true or false"),
    ({"training": {1: 2}}, "1 is not a valid key"),
    ("- batch_size\n", "expected a mapping of keys to values"),
    ("a: [", "not valid YAML"),
)
def test_what_cannot_be_is_said(tmp_path, content, said):
    error = refusal(content, tmp_path)
    assert error.message.startswith(str(tmp_path / "config.yaml"))
    assert said in error.message


def test_a_near_miss_is_pointed_out_and_all_problems_are_listed_at_once(tmp_path):
    assert refusal({"save_intervall": 500}, tmp_path).hint == "did you mean 'save_interval'?"
    problems = refusal({"pin_memory": False, "deterministic": True, "log_interval": 5, "log_every_steps": 6}, tmp_path)
    for name in ("pin_memory", "deterministic", "log_every_steps"):
        assert f"{name} is" in problems.message
    assert problems.hint == "docs/coqui_keys.md explains each key"
