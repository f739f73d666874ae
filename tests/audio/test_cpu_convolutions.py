"""The forms of convolutions that are faster on a CPU, against torch's convolutions in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gputrain.audio import cpu_convolutions
from gputrain.audio.cpu_convolutions import (
    applies,
    as_product,
    faster_on_cpu,
    pointwise,
    upsampled_by_product,
    with_samples_as_channels,
)
from gputrain.audio.discriminators import multi_period, multi_scale, vits_discriminators
from gputrain.audio.weight_norm import WeightNormed
from gputrain.planner.fake_runtime import on_fake_tensors

# The layer, and the shape of its input. Lengths leave remainders at stride and at two output samples.
LAYERS = {
    "product over a wave": (nn.Conv1d(512, 1024, 5, padding=2), (2, 512, 13)),
    "product over rows of three columns": (nn.Conv2d(128, 136, (5, 1), (3, 1), padding=(2, 0)), (2, 128, 20, 3)),
    "product without padding": (nn.Conv2d(128, 136, (3, 1), bias=False), (1, 128, 9, 2)),
    "two output samples as channels": (nn.Conv1d(128, 128, 41, 2, padding=20, groups=4), (2, 128, 61)),
    "the same, of an even length": (nn.Conv1d(128, 256, 41, 2, padding=20, groups=16), (1, 128, 64)),
    "one output sample": (nn.Conv1d(64, 256, 41, 4, padding=20, groups=16), (2, 64, 83)),
    "upsampling": (nn.ConvTranspose1d(512, 256, 16, 8, padding=4), (2, 512, 7)),
    "upsampling by an odd surplus": (nn.ConvTranspose1d(512, 512, 9, 4, 3, output_padding=1, bias=False), (1, 512, 5)),
    "one tap, channels first": (nn.Conv1d(6, 4, 1), (2, 6, 9)),
}
FORMS = {"product": as_product, "upsampling": upsampled_by_product, "one tap": pointwise}  # By first words.


def convolution_of(layer: nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d) -> Callable[..., Tensor]:
    """Returns torch's function of input, weight and bias."""
    return lambda *given: torch.func.functional_call(layer, {"weight": given[1], "bias": given[2]}, given[0])


def results(function: Callable[..., Tensor], x: Tensor, *weights: Tensor | None) -> list[Tensor]:
    """Returns the output, and the gradients of its squares' sum with respect to input, weight and bias."""
    leaves = [x, *(weight for weight in weights if weight is not None)]
    made = function(x, *weights)
    return [made, *torch.autograd.grad(made.square().sum(), leaves)]


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_the_convolution(name):
    layer, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    fast = faster_on_cpu(layer)
    form = next((form for words, form in FORMS.items() if name.startswith(words)), with_samples_as_channels)
    assert getattr(fast, "func", fast) is form
    expected = results(convolution_of(layer), x, layer.weight, layer.bias)
    found = results(fast, x, layer.weight, layer.bias)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12 * float(torchs.detach().abs().max()))


def test_one_tap_over_channels_that_are_last_in_memory_leaves_them_so():
    layer = nn.Conv1d(6, 4, 1).double()
    x_LBC = torch.randn(9, 2, 6, dtype=torch.float64, requires_grad=True)
    expected = results(lambda x, *weights: layer(x.permute(1, 2, 0)), x_LBC, layer.weight, layer.bias)
    found = results(lambda x, *weights: pointwise(x.permute(1, 2, 0), *weights), x_LBC, *layer.parameters())
    assert found[0].permute(2, 0, 1).is_contiguous()
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("items", "form"), [(1, "mm"), (2, "conv_transpose1d")])
def test_upsampling_is_a_product_only_from_few_positions(monkeypatch, items, form):
    monkeypatch.setattr(cpu_convolutions, "MOST_UPSAMPLED", 5)
    layer, x = nn.ConvTranspose1d(512, 256, 16, 8, padding=4), torch.randn(items, 512, 5)
    with torch.profiler.profile() as profile:
        found = faster_on_cpu(layer)(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)
    assert f"aten::{form}" in {event.key for event in profile.key_averages()}


def test_many_items_take_several_products(monkeypatch):
    layer, x = nn.Conv2d(128, 128, (3, 1), padding=(1, 0)).double(), torch.randn(5, 128, 6, 2, dtype=torch.float64)
    expected = results(layer._conv_forward, x.requires_grad_(), layer.weight, layer.bias)
    monkeypatch.setattr(cpu_convolutions, "PRODUCT_COLUMNS", 24)  # Two items.
    found = results(faster_on_cpu(layer), x, layer.weight, layer.bias)
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("most_rows", [0, 1 << 20])
def test_products_with_a_row_or_a_column_for_each_position(monkeypatch, most_rows):
    layer = nn.Conv2d(128, 136, (5, 1), (3, 1), padding=(2, 0)).double()
    x = torch.randn(3, 128, 20, 3, dtype=torch.float64, requires_grad=True)
    expected = results(layer._conv_forward, x, layer.weight, layer.bias)
    monkeypatch.setattr(cpu_convolutions, "MOST_ROWS", most_rows)
    found = results(faster_on_cpu(layer), x, layer.weight, layer.bias)
    assert found[0].is_contiguous()
    for ours, torchs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("items", "form"), [(2, "addmm"), (3, "convolution")])
def test_rows_of_many_columns_are_a_product_only_if_they_are_few(items, form):
    layer, x = nn.Conv2d(128, 128, (5, 1), padding=(2, 0)), torch.randn(items, 128, 10, 11)  # 110 positions an item
    with torch.profiler.profile() as profile:
        found = faster_on_cpu(layer)(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)
    assert f"aten::{form}" in {event.key for event in profile.key_averages()}


def test_gradients_that_nothing_asks_for_are_not_computed():
    layer, x = nn.Conv1d(512, 1024, 5, padding=2), torch.randn(1, 512, 16, requires_grad=True)
    made = faster_on_cpu(layer)(x, layer.weight, layer.bias).sum()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch.autograd.grad(made, x)
    assert counter.get_total_flops() == 2 * 1024 * 512 * 5 * 16  # One product, not two.


def fast_layers(discriminators: nn.Module) -> list[str]:
    forms = (layer.convolve_on_cpu for layer in discriminators.modules() if isinstance(layer, WeightNormed))
    return [form.func.__name__ for form in forms if form]


def test_the_slow_layers_of_the_stock_discriminators_have_another_form():
    with torch.device("meta"):
        periods, scales, voice = multi_period([3], 32), multi_scale(128), vits_discriminators()
    assert fast_layers(periods) == ["as_product"] * 3  # 128 -> 512 -> 1024 -> 1024
    assert fast_layers(voice)[:4] == ["with_samples_as_channels"] * 3 + ["as_product"]
    # Of a scale's seven layers two with a stride of 2, one of 4, and the last.
    assert fast_layers(scales) == (["with_samples_as_channels"] * 3 + ["as_product"]) * 3


def test_other_layers_keep_torchs_convolution():
    others = (
        nn.Conv1d(1024, 1024, 5, padding=4, dilation=2),
        nn.Conv1d(1024, 1024, 41, padding=20, groups=16),
        nn.Conv1d(128, 128, 11, padding=5),
        nn.Conv1d(1024, 1024, 41, 4, padding=20, groups=256),
        nn.Conv2d(128, 128, (5, 3), padding=(2, 1)),
        nn.Conv2d(2048, 1024, 1),
        nn.ConvTranspose1d(256, 128, 16, 8),
        nn.ConvTranspose1d(1024, 1024, 16, 8, groups=2),
        nn.ConvTranspose1d(1024, 512, 16, 8, dilation=2),
        nn.Conv1d(128, 128, 1, stride=2),
        nn.Conv1d(128, 128, 1, groups=2),
    )
    assert [faster_on_cpu(layer) for layer in others] == [None] * len(others)


def test_only_values_on_a_cpu_take_another_form():
    assert applies(torch.zeros(1))
    assert applies(torch.zeros(1, dtype=torch.float64))
    assert not applies(torch.zeros(1, dtype=torch.bfloat16))
    assert not applies(torch.zeros(1, device="meta"))
    with on_fake_tensors():
        assert not applies(torch.zeros(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not applies(torch.zeros(1))
