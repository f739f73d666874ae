"""Inputs of models that are not ours, by their configurations; and the loss on what they give."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from torch import nn

from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.inputs import batch_guesses, output_loss
from gputrain.autoconfig.optimal import create_optimal_config
from gputrain.errors import UserError
from gputrain.planner.memory.predict import predict_step
from gputrain.planner.memory.torch_model import measure_training_memory, model_plan, model_target
from tests.tables import each_row

CLIPS = [2.0, 8.0]
SPOKEN = [{"audio": {"array": np.zeros(16_000, np.float32), "sampling_rate": 16_000}, "text": "one"}] * 2
PICTURES = [Image.new("RGB", (64, 48))] * 3
CAPTIONED = [{"image": picture, "text": "a dog", "label": 3} for picture in PICTURES]
TEXTS = [{"input_ids": [7] * count, "label": 0} for count in (5, 9)]
TRANSLATED = [{"input_ids": [7] * a, "attention_mask": [1] * a, "labels": [8] * b} for a, b in ((9, 3), (5, 6))]
PAIRS = [{"pixel_values": torch.zeros(3, 32, 32), "input_ids": [7] * n, "attention_mask": [1] * n} for n in (4, 6)]

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**TINY, "vocab_size": 50, "max_position_embeddings": 20}
VISION = {**TINY, "image_size": 32, "patch_size": 16}
DUAL = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 8}
T5 = {"vocab_size": 50, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
BART = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH_TO_TEXT = {**BART, "input_feat_per_channel": 8, "conv_channels": 16, "max_target_positions": 30}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 30}
WAVE = {**TINY, "conv_dim": (8,) * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


def of(name: str, config: str, **settings):
    """Returns a function that builds a model of transformers."""

    def build():
        return getattr(hf, name)(getattr(hf, config)(**settings))

    build.__name__ = name
    return build


# Of each: the model, the data, and the shapes of the batch of three items, of clips of 1 s, with which it runs.
RUNS = (
    (of("T5ForConditionalGeneration", "T5Config", d_model=16, **T5), TRANSLATED,
     {"input_ids": (3, 9), "attention_mask": (3, 9), "labels": (3, 6)}),
    (of("BartForConditionalGeneration", "BartConfig", **BART), TRANSLATED,
     {"input_ids": (3, 9), "attention_mask": (3, 9), "labels": (3, 6)}),
    (of("MBartForConditionalGeneration", "MBartConfig", **BART), TRANSLATED,
     {"input_ids": (3, 9), "attention_mask": (3, 9), "labels": (3, 6)}),
    (of("PegasusForConditionalGeneration", "PegasusConfig", **BART), TRANSLATED,
     {"input_ids": (3, 9), "attention_mask": (3, 9), "labels": (3, 6)}),
    (of("MarianMTModel", "MarianConfig", **BART), TRANSLATED,
     {"input_ids": (3, 9), "attention_mask": (3, 9), "labels": (3, 6)}),
    (of("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), SPOKEN,
     {"input_features": (3, 8, 100), "labels": (3, 30)}),
    (of("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
     [{"input_features": [[0.0] * 100] * 8, "labels": [7] * 5}], {"input_features": (3, 8, 100), "labels": (3, 5)}),
    (of("CLIPModel", "CLIPConfig", **DUAL), PAIRS,
     {"pixel_values": (3, 3, 32, 32), "input_ids": (3, 6), "attention_mask": (3, 6), "return_loss": ()}),
    (of("SiglipModel", "SiglipConfig", **DUAL), PAIRS,
     {"pixel_values": (3, 3, 32, 32), "input_ids": (3, 6), "attention_mask": (3, 6), "return_loss": ()}),
    (of("BlipForConditionalGeneration", "BlipConfig", **DUAL | {"text_config": TEXT | {"encoder_hidden_size": 16}}),
     [{**item, "labels": item["input_ids"]} for item in PAIRS],
     {"pixel_values": (3, 3, 32, 32), "input_ids": (3, 6), "attention_mask": (3, 6), "labels": (3, 6)}),
    (of("Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=50, **WAVE), CLIPS, {"input_values": (3, 16_000)}),
    (of("Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=50, **WAVE),
     [{"input_values": [0.0] * 16_000, "labels": [7] * 5}], {"input_values": (3, 16_000), "labels": (3, 5)}),
    (of("ASTForAudioClassification", "ASTConfig", max_length=64, num_mel_bins=32, **TINY),
     [{"input_values": torch.zeros(64, 32), "labels": 1}], {"input_values": (3, 64, 32), "labels": (3,)}),
    (of("ViTForImageClassification", "ViTConfig", **VISION), CAPTIONED[:1],
     {"labels": (3,), "pixel_values": (3, 3, 32, 32)}),
    (of("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8], depths=[1]), PICTURES,
     {"pixel_values": (3, 3, 48, 64)}),
    (of("BertForSequenceClassification", "BertConfig", **TEXT), TEXTS, {"input_ids": (3, 9), "labels": (3,)}),
    (of("DebertaV2ForSequenceClassification", "DebertaV2Config", **TEXT),  # It chooses by the values of labels.
     [{"input_ids": [7] * 9, "attention_mask": [1] * 9, "label": 1}], {"input_ids": (3, 9), "attention_mask": (3, 9)}),
    (of("PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=2, context_length=32, d_model=16, ffn_dim=16,
        num_attention_heads=2, num_hidden_layers=1, prediction_length=8),  # Its input has a name of its own.
     [{"past_values": torch.zeros(32, 2), "future_values": torch.zeros(8, 2)}],
     {"past_values": (3, 32, 2), "future_values": (3, 8, 2)}),
    (of("GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=16, n_layer=1, n_head=2), TEXTS, {"input_ids": (3, 9)}),
    (of("MixtralForCausalLM", "MixtralConfig", vocab_size=50, num_key_value_heads=2, num_local_experts=2, **TINY),
     TEXTS, {"input_ids": (3, 9)}),
)  # fmt: skip


QUICK = (
    "PatchTSTForPrediction",
    "DebertaV2ForSequenceClassification",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "CLIPModel",
    "BertForSequenceClassification",
)


@each_row(*(row for row in RUNS if row[0].__name__ in QUICK))
def test_models_of_transformers_run_on_a_batch_of_their_data(build, data, shapes):
    runs_on_a_batch_of_its_data(build, data, shapes)


@pytest.mark.slow
@each_row(*(row for row in RUNS if row[0].__name__ not in QUICK))
def test_more_models_of_transformers_run_on_a_batch_of_their_data(build, data, shapes):
    runs_on_a_batch_of_its_data(build, data, shapes)


@pytest.mark.slow
@each_row(*(row for row in RUNS if row[0].__name__ in ("BartForConditionalGeneration", "SiglipModel", *QUICK)))
def test_the_memory_of_models_with_several_inputs_is_the_measured_one(build, data, shapes):
    model, found = build(), None
    for guess in batch_guesses(model, profile_dataset(data)):
        target = model_target(model, output_loss, lambda items, make=guess.make: make(items, 1.0), "fp32", "adamw")
        try:
            found = predict_step(target, model_plan("cpu"), micro_batch_size=3)
        except UserError:
            continue
        break
    measured = measure_training_memory(
        model, output_loss, guess.make(3, 1.0), torch.device("cpu"), precision="fp32", optimizer="adamw"
    )
    assert found.allocated_gb == pytest.approx(measured.allocated_gb, rel=0.01)


def runs_on_a_batch_of_its_data(build, data, shapes):
    with torch.device("meta"):
        model = build()
    for guess in batch_guesses(model, profile_dataset(data)):
        try:
            predict_step(
                model_target(model, output_loss, lambda items, make=guess.make: make(items, 1.0), "bf16", "adamw"),
                model_plan("cuda"), micro_batch_size=3,
            )  # fmt: skip
        except UserError:
            continue
        batch = guess.make(3, 1.0)
        assert {name: tuple(getattr(value, "shape", ())) for name, value in batch.items()} == shapes
        return
    raise AssertionError("no guess runs")


@each_row(
    ([{"audio": {"array": [0.0] * 4000, "sampling_rate": 8000}}], (3, 32_000)),
    (PICTURES, (3, 3, 48, 64)),
    ([(torch.zeros(2, 7, dtype=torch.float16), 1)], (3, 2, 7)),
    ([(PICTURES[0], 1)], (3, 3, 48, 64)),
)
def test_other_models_get_what_the_items_are(data, shape):
    guess = batch_guesses(nn.Linear(1, 1), profile_dataset(data))[-1]
    assert tuple(guess.make(3, 4.0).shape) == shape


class Two(nn.Module):
    def forward(self, picture, text, mask=None, *, scale=1.0):
        return picture, text


class Chosen(nn.Module):
    def forward(self, ids, targets=None, flag=False):
        return ids


@each_row(
    (Two(), [{"picture": torch.zeros(3, 8, 8), "text": [1, 2], "label": 1}], {"picture": (2, 3, 8, 8), "text": (2, 2)}),
    (Two(), [{"audio": SPOKEN[0]["audio"], "text": [1, 2]}], {"text": (2, 2), "picture": (2, 32_000)}),
    (Two(), [(torch.zeros(3, 8, 8), torch.zeros(5), torch.ones(5), 1)], [(2, 3, 8, 8), (2, 5), (2, 5)]),
    (Chosen(), [(torch.zeros(4), torch.zeros(4))], [(2, 4), (2, 4)]),
    (nn.Linear(1, 1), [{"x": torch.zeros(2, 5), "mask": torch.ones(5)}], {"x": (2, 2, 5), "mask": (2, 5)}),
)
def test_other_models_get_the_inputs_of_their_signature(model, data, shapes):
    batch = batch_guesses(model, profile_dataset(data))[0].make(2, 2.0)
    if isinstance(shapes, dict):
        assert {name: tuple(value.shape) for name, value in batch.items()} == shapes
    else:
        assert [tuple(value.shape) for value in batch] == shapes


def test_a_loss_of_the_users_gets_whole_items_first():
    guesses = batch_guesses(nn.Linear(4, 2), profile_dataset([(torch.zeros(4), 1)] * 3), own_loss=True)
    assert [tuple(value.shape) for value in guesses[0].make(2, 0.0)] == [(2, 4), (2,)]
    assert tuple(guesses[-1].make(2, 0.0).shape) == (2, 4)


def test_integers_have_values_and_one_of_several_items_is_masked_in_part():
    first, *_ = batch_guesses(of("CLIPModel", "CLIPConfig", **DUAL)(), profile_dataset(PAIRS))
    batch = first.make(2, 0.0)
    assert batch["input_ids"].tolist() == [[7] * 6] * 2
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert batch["pixel_values"].is_meta
    assert first.description == (
        "pixel_values (3, 32, 32), input_ids (6,), attention_mask (6,), as the items of the dataset; return_loss"
    )


@each_row(
    ("Wav2Vec2ForCTC", "Wav2Vec2Config", WAVE, PICTURES, "takes input_values, and the dataset contains pictures"),
    ("ViTModel", "ViTConfig", VISION, CLIPS, "takes pixel_values, and the dataset contains audio"),
    ("BertModel", "BertConfig", TEXT, CLIPS, "takes input_ids, and the dataset contains audio"),
)
def test_data_of_another_kind_ask_for_a_batch(name, config, settings, data, message):
    with pytest.raises(UserError, match=message) as error:
        batch_guesses(of(name, config, **settings)(), profile_dataset(data))
    assert "batch=" in error.value.hint


@each_row(
    (of("Wav2Vec2BertForCTC", "Wav2Vec2BertConfig", vocab_size=50, **TINY), CLIPS),
    (of("Speech2TextForConditionalGeneration", "Speech2TextConfig", **SPEECH_TO_TEXT), CLIPS),
    (of("CLIPModel", "CLIPConfig", **DUAL), [{"image": PICTURES[0], "text": "a dog"}]),
    (of("T5ForConditionalGeneration", "T5Config", d_model=16, **T5), [{"input_ids": [1] * 9}]),
    (of("BertForMaskedLM", "BertConfig", **TEXT), [torch.zeros(4)]),
)
def test_inputs_that_are_not_guessed_ask_for_a_batch(build, data):
    with pytest.raises(UserError) as error:
        create_optimal_config(data, build(), 2, vram_gb=1)
    assert "batch=" in error.value.hint


def test_what_cannot_be_guessed_asks_for_a_batch():
    model = nn.Linear(1, 1)
    model.main_input_name, model.config = "point_clouds", SimpleNamespace()
    with pytest.raises(UserError, match="Linear takes point_clouds, and the dataset contains audio") as error:
        batch_guesses(model, profile_dataset(CLIPS))
    assert "batch=" in error.value.hint
    with pytest.raises(UserError, match="Two takes picture, text, and the items of the dataset have x"):
        batch_guesses(Two(), profile_dataset([{"x": torch.zeros(3)}]))
    with pytest.raises(UserError, match="Two takes picture, text, and the items of the dataset have image, text"):
        batch_guesses(Two(), profile_dataset([{"image": PICTURES[0], "text": [1, 2]}]))


def test_the_loss_on_what_a_model_gives():
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    uniform = torch.zeros(2, 4, requires_grad=True)
    assert output_loss(lambda batch: SimpleNamespace(logits=uniform), x).item() == pytest.approx(1.386294)  # log 4
    assert output_loss(lambda batch: {"logits": uniform}, x).item() == pytest.approx(1.386294)
    assert output_loss(lambda batch: {"loss": x.mean(), "logits": uniform}, x).item() == 2
    assert output_loss(lambda x: [x, {"more": 2 * x}], x).item() == pytest.approx(5 + 20)
    assert output_loss(lambda x, y: x * y, {"x": x, "y": 2}).item() == pytest.approx(20)
    assert output_loss(lambda x, y: x * y, [x, 2]).item() == pytest.approx(20)
    assert output_loss(lambda batch: batch["x"], {"x": x, "label": 1}).item() == pytest.approx(5)
    with pytest.raises(UserError, match="nothing that has a gradient"):
        output_loss(lambda x: x.detach(), x)
