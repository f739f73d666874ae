"""Models of transformers as folders and as names of the Hub; languages of MMS. transformers is the reference."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from gputrain.asr.config import PUBLISHED, TrainAsr
from gputrain.asr.data import init_weights, initial_normalizes, recogniser_architecture
from gputrain.asr.load import greedy_text, load_recogniser
from gputrain.asr.pretrained import is_pretrained, open_pretrained
from gputrain.asr.recipe import RecogniserRecipe
from gputrain.config import assemble
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.fetch.names import TrainedModel, kind_of, local_path
from gputrain.speech.buckets import ClipSize
from tests.asr.models import (
    VOCABULARY,
    change_json,
    in_cache_of_hub,
    mms_folder,
    run_folder,
    tiny_model,
    transformers_folder,
    written_by_transformers,
)
from tests.tables import each_row
from tests.toy import cpu_runtime

CPU = torch.device("cpu")
WAVE = (np.random.default_rng(0).normal(size=9000) * 0.1).astype(np.float32)
UZBEK = "uzb-script_latin"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of the Hub, without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def written(path):
    recogniser = load_recogniser(path, CPU)
    return greedy_text(recogniser.log_probs([WAVE])[0].numpy(), recogniser.vocabulary)


# --------------------------------------------------------------------------------------------------- languages of MMS


@each_row(
    (UZBEK, "safetensors", UZBEK), (UZBEK, "bin", UZBEK),  # Fewer symbols than English has,
    ("rus", "safetensors", "rus"), ("rus", "safetensors", None),  # and more; None: the adapter's file is named.
)  # fmt: skip
def test_the_adapter_and_the_head_of_a_language_are_loaded(tmp_path, language, form, target):
    folder = mms_folder(tmp_path / f"{language}_{form}_{target}", adapters=[language], language=target, form=form)
    expected = written_by_transformers(folder, WAVE, language) if target else None
    named = folder if target else folder / f"adapter.{language}.safetensors"
    ours = written(named)
    assert len(ours) > 4
    if expected is None:
        change_json(folder / "tokenizer_config.json", target_lang=language)
        expected = written_by_transformers(folder, WAVE, language)
    assert ours == expected


@each_row(
    ({"language": "eng", "adapters": ["rus"]}, None),  # English is the language of the main weights of MMS.
    ({"language": None, "main": UZBEK, "languages": [UZBEK]}, UZBEK),
)
def test_main_weights_are_used_where_their_language_is_known(tmp_path, changes, target):
    folder = mms_folder(tmp_path / "_".join(changes), **changes)
    ours = written(folder)
    if target:
        change_json(folder / "tokenizer_config.json", target_lang=target)
    assert ours == written_by_transformers(folder, WAVE)


def of_russian(folder):
    shutil.copy(folder / "adapter.rus.safetensors", folder / f"adapter.{UZBEK}.safetensors")


def damaged(folder):
    (folder / f"adapter.{UZBEK}.safetensors").write_bytes(b"no weights")


def without_adapter_layers(folder):
    change_json(folder / "config.json", adapter_attn_dim=None)


@each_row(
    ({"language": UZBEK}, None, "", f"no adapter of {UZBEK}", "it has none"),
    ({"language": UZBEK, "main": UZBEK}, None, "", f"no adapter of {UZBEK}", "leave only the head's language"),
    ({"language": UZBEK, "adapters": ["rus"]}, None, "", f"no adapter of {UZBEK}", "those of rus"),
    ({"language": UZBEK, "adapters": [UZBEK]}, None, "adapter.rus.safetensors", "no adapter of rus", UZBEK),
    ({"language": None, "adapters": [UZBEK]}, None, "", "vocabularies of 3 languages", "the file of its adapter"),
    ({"language": "uzb", "adapters": [UZBEK]}, None, "", "no vocabulary of uzb", f"it has {UZBEK}, eng, rus"),
    ({"language": "rus", "main": UZBEK, "languages": ["rus"]}, None, "", "no adapter of rus", "only the head"),
    ({"language": UZBEK, "adapters": ["rus"]}, of_russian, "", "writes 34 symbols, and vocab.json has 19", "one model"),
    ({"language": UZBEK, "adapters": [UZBEK]}, damaged, "", "not the adapter of a language", "again"),
    ({"language": UZBEK, "adapters": [UZBEK]}, without_adapter_layers, "", "no adapter_attn_dim", "again"),
)
def test_a_language_that_cannot_be_had_is_refused_before_weights_are_read(tmp_path, case, change, file, message, hint):
    folder = mms_folder(tmp_path / f"{hash(message)}{change}", **case)
    if change:
        change(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=message) as raised:
        open_pretrained(folder / file)
    assert hint in raised.value.hint


def test_symbols_that_are_added_to_a_language_are_rows_of_its_head(tmp_path):
    """As fine-tuning by transformers leaves it: the head has rows of special tokens, which vocab.json does not name."""
    folder = mms_folder(tmp_path / "model", adapters=[UZBEK], language=UZBEK, languages=[UZBEK])
    ids = json.loads((folder / "vocab.json").read_text())[UZBEK]
    (folder / "vocab.json").write_text(json.dumps({UZBEK: {key: at for key, at in ids.items() if at < 17}}))
    (folder / "added_tokens.json").write_text('{"[UNK]": 17, "[PAD]": 18}')
    assert load_recogniser(folder, CPU).vocabulary.symbols[-3:] == ("m", "[UNK]", "[PAD]")


# --------------------------------------------------------------------------------------------- names on the Hub


@each_row("preprocessor_config.json", "processor_config.json")
def test_a_name_is_read_as_its_folder(hub, tmp_path, file):
    folder = transformers_folder(tmp_path / file / "model", normalizes=False)
    if file == "processor_config.json":  # As transformers 5 writes it.
        features = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").unlink()
        (folder / file).write_text(json.dumps({"feature_extractor": features, "processor_class": "Wav2Vec2Processor"}))
    name = f"user/{Path(file).stem}"
    in_cache_of_hub(hub, name, folder)
    ours, named = open_pretrained(folder), open_pretrained(local_path(name, PUBLISHED), name)
    assert named.normalizes is ours.normalizes is False
    assert (named.vocabulary, named.architecture) == (ours.vocabulary, ours.architecture)
    assert written(named.folder) == written(folder) == written_by_transformers(folder, WAVE)
    weights, expected = (found.load()[0].state_dict() for found in (named, ours))
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())


def test_a_processor_config_without_a_feature_extractor_does_not_hide_the_other_file(tmp_path):
    folder = transformers_folder(tmp_path / "model", normalizes=False)
    (folder / "processor_config.json").write_text('{"processor_class": "Wav2Vec2Processor"}')
    assert open_pretrained(folder).normalizes is False
    features = {"do_normalize": True, "sampling_rate": 16000}
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": features}))
    assert open_pretrained(folder).normalizes is True


def test_a_language_of_a_model_on_the_hub(hub, tmp_path):
    folder = mms_folder(tmp_path / "mms", adapters=["rus", UZBEK], language="rus")
    in_cache_of_hub(hub, "user/mms", folder)
    for file in ("", f"/adapter.{UZBEK}.safetensors"):
        recogniser = load_recogniser(Path(f"user/mms{file}"), CPU)
        assert greedy_text(recogniser.log_probs([WAVE])[0].numpy(), recogniser.vocabulary) == written(f"{folder}{file}")
    with pytest.raises(UserError, match=r"offline, and the cache .* has no adapter\.eng\.safetensors") as raised:
        local_path("user/mms/adapter.eng.safetensors", PUBLISHED)
    assert "`gputrain fetch user/mms:adapter.eng.safetensors`" in raised.value.hint


def test_the_kind_of_a_name_in_the_cache_of_the_hub(hub, tmp_path):
    in_cache_of_hub(hub, "user/model", mms_folder(tmp_path / "mms", adapters=["rus"]))
    for name in ("user/model", "user/model/adapter.rus.safetensors"):
        assert kind_of(TrainedModel(model=name).path).name == "asr"
    for name in ("user/other", "user", "no such/name"):
        with pytest.raises(UserError, match="no such file or folder"):
            TrainedModel(model=name).path  # noqa: B018


def test_what_a_snapshot_lacks_is_said(hub, tmp_path, caplog):
    snapshot = in_cache_of_hub(hub, "user/model", transformers_folder(tmp_path / "model", normalizes=False))
    (snapshot / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert open_pretrained(local_path("user/model", PUBLISHED), "user/model").normalizes is True
    assert "user/model: no preprocessor_config.json: waves are normalised" in caplog.text
    (snapshot / "vocab.json").unlink()
    with pytest.raises(UserError, match=r"user/model: no vocab\.json"):
        load_recogniser("user/model", CPU)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"user/model: .*: offline, and the cache .* has no model\.safetensors"):
        load_recogniser("user/model", CPU)


def test_what_names_a_pretrained_model(hub, tmp_path):
    folder = transformers_folder(tmp_path / "model")
    assert is_pretrained(folder)
    assert is_pretrained(folder / "adapter.uzb-script_latin.safetensors")
    run = run_folder(tmp_path / "run")
    shutil.copy(folder / "config.json", run)  # As if it had been exported there.
    for path in (run, run / "checkpoint_last.pt", tmp_path / "nothing", Path("model")):
        assert not is_pretrained(path)


# ------------------------------------------------------------------------------------------------- weights and types


def pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 1\n")


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def no_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no weights")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_head(folder):
    tiny_model().wav2vec2.save_pretrained(folder)


@each_row(
    (pointer, "begins with b'version https:"),
    (truncated, "its weights cannot be read"),
    (no_pickle, "begins with b'no weights'"),
    (no_weights, "no weights in it"),
    (no_head, r"its weights lack lm_head\."),
    (lambda folder: change_json(folder / "config.json", vocab_size=31), "other shapes than config.json says"),
    (lambda folder: change_json(folder / "config.json", model_type="hubert"), "model of type hubert"),
    (lambda folder: change_json(folder / "config.json", model_type="wavlm"), "model of type wavlm"),
    (lambda folder: change_json(folder / "config.json", model_type="wav2vec2-bert"), "model of type wav2vec2-bert"),
    (lambda folder: change_json(folder / "config.json", add_adapter=True), "has add_adapter, layers behind"),
    (lambda folder: change_json(folder / "config.json", hidden_size="x"), "wav2vec2|cannot be read"),
    (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: not valid JSON"),
    (lambda folder: (folder / "preprocessor_config.json").write_text("{"), "preprocessor_config.json: not valid JSON"),
    (lambda folder: change_json(folder / "preprocessor_config.json", sampling_rate=8000), "reads 8000 samples"),
)
def test_folders_that_cannot_be_used(tmp_path, change, message):
    folder = transformers_folder(tmp_path / f"{hash(message)}")
    change(folder)
    with pytest.raises(UserError, match=message):
        load_recogniser(folder, CPU)


def test_a_run_of_a_model_that_is_not_trained_any_more_is_refused_by_its_type(tmp_path):
    content = checkpoint.read(run_folder(tmp_path / "run") / "checkpoint_last.pt", "asr")
    content["facts"]["architecture"]["model_type"] = "wav2vec2-bert"
    checkpoint.save(tmp_path / "run", content)
    (tmp_path / "run" / "architecture.json").write_text(json.dumps(content["facts"]["architecture"]))
    settings = {"data_path": str(tmp_path), "output_dir": str(tmp_path / "run"), "resume_from": "auto"}
    for use in (
        lambda: load_recogniser(tmp_path / "run", CPU),
        lambda: initial_normalizes(assemble(TrainAsr, {"data_path": ".", "init_from": str(tmp_path / "run")})),
        lambda: recogniser_architecture(assemble(TrainAsr, settings), None, 12),
    ):
        with pytest.raises(UserError, match="is a model of type wav2vec2-bert") as raised:
            use()
        assert str(tmp_path / "run") in raised.value.message
        assert raised.value.hint == "use wav2vec 2.0, XLS-R or MMS"


def test_a_model_that_was_only_pretrained_is_a_start(tmp_path):
    """As facebook/wav2vec2-xls-r-300m is: an encoder alone, with its layer drop, and without a tokenizer."""
    folder = transformers_folder(tmp_path / "model")
    tiny_model(seed=3).wav2vec2.save_pretrained(folder)
    change_json(folder / "config.json", layerdrop=0.1)
    (folder / "vocab.json").unlink()
    values = {"data_path": str(tmp_path), "init_from": str(folder), "learning_rate": 1e-3, "hidden_dropout": 0.25}
    settings = assemble(TrainAsr, values)
    assert initial_normalizes(settings) is True
    architecture = recogniser_architecture(settings, VOCABULARY, 12)
    assert [architecture[name] for name in ("vocab_size", "layerdrop", "hidden_dropout")] == [12, 0.0, 0.25]
    recipe = RecogniserRecipe(settings, architecture, ClipSize(30, 6), cpu_runtime())
    init_weights(recipe, str(folder), VOCABULARY)
    given = tiny_model(seed=3).state_dict()
    own = recipe.model.state_dict()
    assert len(own) == len(given) > 60
    assert all(torch.equal(own[name], given[name]) for name in own if "lm_head" not in name)


@each_row("model.safetensors", "config.json", "vocab.json")
def test_a_file_of_a_folder_means_the_folder(tmp_path, file):
    folder = transformers_folder(tmp_path / file)
    assert is_pretrained(folder / file)
    assert written(folder / file) == written(folder)


def sharded(folder):
    model = tiny_model()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def of_torch(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")


def in_half_precision(folder):
    tiny_model().half().save_pretrained(folder)


@each_row(sharded, of_torch, in_half_precision)
def test_forms_of_weights(tmp_path, change):
    folder = transformers_folder(tmp_path / change.__name__)
    # Cloned, since the tensors may be a view of the file that is written anew.
    expected = {key: tensor.clone() for key, tensor in load_recogniser(folder, CPU).model.state_dict().items()}
    change(folder)
    found = load_recogniser(folder, CPU).model.state_dict()
    error = 1e-3 if change is in_half_precision else 0.0
    assert all((found[key] - tensor).abs().max() <= error * tensor.abs().max() for key, tensor in expected.items())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_tensors_that_a_recogniser_has_no_place_for_are_named(tmp_path, caplog):
    folder = transformers_folder(tmp_path / "more")
    save_file({**tiny_model().state_dict(), "quantizer.codevectors": torch.ones(2)}, folder / "model.safetensors")
    with caplog.at_level(logging.INFO):
        open_pretrained(folder).load()
    assert f"{folder}: not used: quantizer (1)" in caplog.text


@each_row((pointer, "begins with b'version https:"), (no_weights, "no weights in it"))
def test_weights_that_are_not_there_are_said_before_a_training_is_planned(tmp_path, change, message):
    folder = transformers_folder(tmp_path / change.__name__)
    change(folder)
    settings = assemble(TrainAsr, {"data_path": str(tmp_path), "init_from": str(folder)})
    assert recogniser_architecture(settings, None, 12)["vocab_size"] == 12  # A plan needs no weights.
    with pytest.raises(UserError, match=message):
        initial_normalizes(settings)


def test_a_resumed_run_does_not_need_the_model_that_it_began_with(tmp_path):
    run = run_folder(tmp_path / "run")
    (run / "architecture.json").write_text("{}")
    values = {"data_path": str(tmp_path), "init_from": "user/gone", "resume_from": "auto", "output_dir": str(run)}
    assert initial_normalizes(assemble(TrainAsr, values)) is True
