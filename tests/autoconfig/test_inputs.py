"""Inputs of models that are not ours, by their configurations; and the loss on what they give."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import (
    BertConfig,
    Speech2TextConfig,
    ViTConfig,
    Wav2Vec2BertConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from gputrain.autoconfig.dataset import profile_dataset
from gputrain.autoconfig.inputs import batch_maker, output_loss, profile_weights
from gputrain.errors import UserError
from tests.tables import each_row

CLIPS = [2.0, 8.0]
PICTURES = [Image.new("RGB", (64, 48))] * 3
TEXTS = [{"input_ids": [1] * count, "labels": 0} for count in (5, 9)]


def model(name: str, config):
    return SimpleNamespace(main_input_name=name, config=config)


@each_row(
    ("input_values", Wav2Vec2Config(), CLIPS, {"input_values": (3, 64_000)}),
    (
        "input_features", WhisperConfig(num_mel_bins=128), CLIPS,
        {"input_features": (3, 128, 3000), "decoder_input_ids": (3, 448)},  # always 30 s
    ),
    ("input_features", Wav2Vec2BertConfig(), CLIPS, {"input_features": (3, 200, 160)}),
    (
        "input_features", Speech2TextConfig(), CLIPS,
        {"input_features": (3, 400, 80), "decoder_input_ids": (3, 1024)},
    ),
    ("pixel_values", ViTConfig(image_size=32), PICTURES, {"pixel_values": (3, 3, 32, 32)}),
    ("pixel_values", SimpleNamespace(num_channels=3), PICTURES, {"pixel_values": (3, 3, 48, 64)}),
    ("input_ids", BertConfig(), TEXTS, {"input_ids": (3, 9)}),
    ("input_ids", BertConfig(), [torch.zeros(4)], {"input_ids": (3, 512)}),
    ("input_ids", BertConfig(max_position_embeddings=100), [torch.zeros(4)], {"input_ids": (3, 100)}),
)  # fmt: skip
def test_batches_of_three_items_of_four_seconds(name, config, data, shapes):
    make, _ = batch_maker(model(name, config), profile_dataset(data))
    batch = make(3, 4.0)
    assert {key: tuple(value.shape) for key, value in batch.items()} == shapes
    assert all(value.is_meta for value in batch.values())
    assert all((value.dtype == torch.long) == ("ids" in key) for key, value in batch.items())


@each_row(
    ([{"audio": {"array": [0.0] * 4000, "sampling_rate": 8000}}], (3, 32_000)),
    (PICTURES, (3, 3, 48, 64)),
    ([(torch.zeros(2, 7, dtype=torch.float16), 1)], (3, 2, 7)),
)
def test_other_models_get_what_the_items_are(data, shape):
    make, _ = batch_maker(nn.Linear(1, 1), profile_dataset(data))
    assert tuple(make(3, 4.0).shape) == shape


def test_other_models_get_items_by_name():
    make, said = batch_maker(nn.Linear(1, 1), profile_dataset([{"x": torch.zeros(2, 5), "mask": torch.ones(5)}]))
    assert {name: tuple(value.shape) for name, value in make(3, 0.0).items()} == {"x": (3, 2, 5), "mask": (3, 5)}
    assert said == "x (2, 5), mask (5,)"


@each_row(
    ("input_values", Wav2Vec2Config(), PICTURES, "takes input_values, and the dataset contains pictures"),
    ("pixel_values", ViTConfig(), CLIPS, "takes pixel_values, and the dataset contains audio"),
    ("input_ids", BertConfig(), CLIPS, "takes input_ids, and the dataset contains audio"),
    ("input_features", SimpleNamespace(), CLIPS, "cannot be guessed"),
    ("point_clouds", SimpleNamespace(), CLIPS, "point_clouds cannot be guessed"),
)
def test_what_cannot_be_guessed_asks_for_a_batch(name, config, data, message):
    with pytest.raises(UserError, match=message) as error:
        batch_maker(model(name, config), profile_dataset(data))
    assert "batch=" in error.value.hint


def test_the_loss_on_what_a_model_gives():
    x = torch.tensor([[1.0, 3.0]], requires_grad=True)
    uniform = torch.zeros(2, 4, requires_grad=True)
    assert output_loss(lambda batch: SimpleNamespace(logits=uniform), x).item() == pytest.approx(1.386294)  # log 4
    assert output_loss(lambda batch: {"logits": uniform}, x).item() == pytest.approx(1.386294)
    assert output_loss(lambda x: [x, {"more": 2 * x}], x).item() == pytest.approx(5 + 20)
    assert output_loss(lambda x, y: x * y, {"x": x, "y": 2}).item() == pytest.approx(20)
    with pytest.raises(UserError, match="nothing that has a gradient"):
        output_loss(lambda x: x.detach(), x)


def test_weights_are_counted():
    layers = nn.Sequential(
        nn.Linear(10, 20, bias=False), nn.Linear(20, 30, bias=False), nn.BatchNorm1d(30, affine=False)
    )
    layers[0].weight.requires_grad_(False)
    found = profile_weights(layers.half(), moments=2)
    assert (found.parameters, found.trainable) == (800, 600)
    assert found.weights_gb == pytest.approx((800 * 2 + 60 * 2 + 8) / 1e9)  # The norm's counts are among them.
    assert (found.gradients_gb, found.optimizer_gb) == pytest.approx((1200 / 1e9, 2400 / 1e9))
