"""Convolutions along one dimension by minimal filtering, against torch's in fp64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gputrain.audio import winograd_1d
from gputrain.audio.discriminators import multi_period, vits_discriminators
from gputrain.audio.hifigan import ResBlock, mean_of_blocks
from gputrain.audio.weight_norm import (
    WeightNormed,
    detached_weights,
    gradient_leaves,
    shared_weights,
    weights_made_once,
)
from gputrain.audio.winograd_1d import WinogradConvolution, reordered, winograd_form
from gputrain.engine import minimal_filtering
from gputrain.hw.runtime import has_mkl
from gputrain.planner.fake_runtime import on_fake_tensors

# The layer, and the shape of its input: lengths that are no multiple of a tile or of the dilation, and less than one.
LAYERS = {
    "three taps": (nn.Conv1d(6, 4, 3, padding=1), (2, 6, 21)),
    "four taps without padding": (nn.Conv1d(4, 6, 4, bias=False), (3, 4, 17)),
    "five taps": (nn.Conv1d(5, 7, 5, padding=2), (1, 5, 3)),
    "two parts": (nn.Conv1d(6, 4, 7, padding=3), (2, 6, 30)),
    "two whole parts": (nn.Conv1d(3, 5, 8, padding=1), (2, 3, 19)),
    "three parts, dilated": (nn.Conv1d(4, 4, 11, padding=15, dilation=3), (2, 4, 40)),
    "dilated, short": (nn.Conv1d(4, 4, 5, padding=10, dilation=5), (1, 4, 7)),
    "rows of three columns": (nn.Conv2d(6, 4, (5, 1), padding=(2, 0)), (2, 6, 13, 3)),
    "rows, two parts": (nn.Conv2d(4, 5, (7, 1), padding=(1, 0)), (3, 4, 12, 2)),
}


def form_of(layer: nn.Conv1d | nn.Conv2d) -> WinogradConvolution:
    dilation = layer.dilation[0]
    assert isinstance(layer.padding, tuple)
    return WinogradConvolution(layer.kernel_size[0], layer.padding[0] // dilation, dilation)


def both(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Returns output and gradients of input, weight and bias, ours in `dtype` and torch's in fp64."""
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).to(dtype)
    torch.manual_seed(0)
    given = torch.randn(shape, dtype=dtype)
    form, exact = form_of(layer), copy.deepcopy(layer).double()
    found = []
    for module, x in ((layer, given), (exact, given.double())):
        x.requires_grad_()
        transformed = form.transformed_weight(module.weight)
        made = form.convolve(x, transformed, module.bias) if module is layer else module(x)
        grad = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=dtype).to(made.dtype)
        found.append([made, *torch.autograd.grad(made, [x, *module.parameters()], grad)])
    return found[0], found[1]


def errors(ours: list[Tensor], expected: list[Tensor]) -> list[float]:
    assert [one.shape for one in ours] == [one.shape for one in expected]
    return [((one - other).norm() / other.norm()).item() for one, other in zip(ours, expected, strict=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_and_gradients_equal_torchs_in_fp64(name):
    ours, expected = both(name, torch.float64)
    assert max(errors(ours, expected)) < 1e-13
    assert ours[0].is_contiguous()


@pytest.mark.parametrize("name", LAYERS)
def test_rounding_in_fp32_is_amplified_little(name):
    # Rounding once has a relative error of 2^-24. The transforms amplify it by the norms of their rows: of inputs up to
    # 8, of outputs 1 to 9 and less than 4 on average, of taps about 1.
    assert max(errors(*both(name, torch.float32))) < 4 * 8 * 2**-24


def test_weights_are_transformed_in_blocks(monkeypatch):
    layer = nn.Conv1d(5, 6, 11).double()
    given = torch.randn(3, 7, 6, 5, dtype=torch.float64)

    def gradient() -> Tensor:
        return torch.autograd.grad(WinogradConvolution(11, 0).transformed_weight(layer.weight), layer.weight, given)[0]

    whole = gradient()
    monkeypatch.setattr(minimal_filtering, "BLOCK", 20)  # 30 weights of a tap, in 6 rows.
    torch.testing.assert_close(gradient(), whole, rtol=1e-14, atol=1e-14)


def test_gradients_that_nothing_asks_for_are_not_computed():
    form, x, weight = WinogradConvolution(5, 2), torch.randn(1, 8, 16, requires_grad=True), torch.randn(4, 8, 5)
    transformed = form.transformed_weight(weight).requires_grad_()
    for asked, products in (([x], 1), ([transformed], 1), ([x, transformed], 2)):
        made = form.convolve(x, transformed, None).sum()
        with torch.profiler.profile() as profile:
            torch.autograd.grad(made, asked)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts.get("aten::bmm", 0) + counts.get("aten::baddbmm_", 0) == products


@pytest.mark.parametrize("name", [name for name in LAYERS if "rows" not in name])
def test_channels_that_are_last_in_memory_stay_so(name):
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).double()
    torch.manual_seed(0)
    x, form, found = torch.randn(shape, dtype=torch.float64, requires_grad=True), form_of(layer), []
    for last in (False, True):
        read = reordered(x, channels_last=True) if last else x
        made = form.convolve(read, form.transformed_weight(layer.weight), layer.bias)
        back = reordered(made, channels_last=False) if last else made
        (gradient,) = torch.autograd.grad(back.square().sum(), x, retain_graph=True)
        (of_read,) = torch.autograd.grad(made, read, torch.ones_like(made), retain_graph=True)
        assert {made.stride(1) == 1, read.stride(1) == 1, of_read.stride(1) == 1} == {last}
        assert back.is_contiguous()
        assert gradient.is_contiguous()
        found.append([back, gradient])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dilations", [(1,), (1, 3)])
def test_residual_blocks_with_transformed_weights_are_those_of_torch(monkeypatch, dilations):
    monkeypatch.setattr(winograd_1d, "LEAST_CHANNELS", 4)
    monkeypatch.setattr(winograd_1d, "has_mkl", lambda: True)
    torch.manual_seed(0)
    blocks = nn.ModuleList(ResBlock(6, kernel, dilations) for kernel in (3, 7, 11)).double()
    x, found = torch.randn(2, 6, 29, dtype=torch.float64, requires_grad=True), []
    for winograd in (False, True):
        blocks.zero_grad()
        with weights_made_once(blocks, winograd=winograd):
            assert winograd_layers(blocks) == (6 * len(dilations) if winograd else 0)
            made = mean_of_blocks(blocks, x, checkpointing=winograd)
            assert made.is_contiguous()
            (gradient,) = torch.autograd.grad(made.square().sum(), x, retain_graph=True)
            made.square().sum().backward()
        found.append([made, gradient, *(parameter.grad.clone() for parameter in blocks.parameters())])
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11 * float(expected.detach().abs().max()))


def test_only_layers_that_save_enough_have_the_form():
    with torch.device("meta"):
        faster = (
            nn.Conv2d(1024, 1024, (5, 1), padding=(2, 0)),
            nn.Conv1d(192, 384, 5, padding=2),
            nn.Conv1d(256, 256, 11, padding=15, dilation=3),
        )
        others = (
            nn.Conv2d(512, 1024, (5, 1), stride=(3, 1), padding=(2, 0)),
            nn.Conv1d(1024, 1024, 41, padding=20),
            nn.Conv1d(1024, 1024, 5, groups=2),
            nn.Conv1d(128, 128, 11, padding=5),
            nn.Conv1d(1024, 1024, 1),
            nn.Conv1d(256, 256, 5, padding=3, dilation=2),
            nn.Conv1d(256, 256, 5, padding="same"),
            nn.Conv2d(128, 128, (5, 3), padding=(2, 1)),
            nn.Conv2d(512, 512, (5, 1), dilation=(2, 1)),
            nn.ConvTranspose1d(512, 256, 16, 8),
        )
    assert [winograd_form(layer) is not None for layer in faster] == [has_mkl()] * len(faster)
    assert [winograd_form(layer) for layer in others] == [None] * len(others)
    if has_mkl():
        assert winograd_form(faster[2]) == WinogradConvolution(11, 5, 3)
        narrow = [nn.Conv1d(channels, channels, 7, padding=3) for channels in (120, 128)]
        assert [winograd_form(layer, channels_last=True) is not None for layer in narrow] == [False, True]


def winograd_layers(module: nn.Module) -> int:
    return sum(isinstance(layer, WeightNormed) and layer.made_transformed for layer in module.modules())


def test_a_step_in_fp32_transforms_the_weights_of_wide_layers(monkeypatch):
    """The gradients of two passes are those of torch's convolutions."""
    monkeypatch.setattr(winograd_1d, "LEAST_SAVED", 16)
    monkeypatch.setattr(winograd_1d, "has_mkl", lambda: True)
    torch.manual_seed(0)
    discriminator = multi_period([3], 2).discriminators[0].double()
    waves = torch.randn(2, 1, 1, 500, dtype=torch.float64)
    found = []
    for winograd in (False, True):
        discriminator.zero_grad()
        with weights_made_once(discriminator, winograd=winograd):
            assert winograd_layers(discriminator) == winograd
            for wave in waves:
                discriminator(wave)[0].square().mean().backward()
        found.append([parameter.grad.clone() for parameter in discriminator.parameters()])
    assert winograd_layers(discriminator) == 0
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def test_frozen_layers_with_transformed_weights_pass_gradients_on(monkeypatch):
    monkeypatch.setattr(winograd_1d, "LEAST_SAVED", 16)
    monkeypatch.setattr(winograd_1d, "has_mkl", lambda: True)
    discriminator = multi_period([3], 2).discriminators[0]
    wave = torch.randn(1, 1, 300, requires_grad=True)
    with weights_made_once(discriminator, winograd=True):
        weights = detached_weights(discriminator)
        torch.func.functional_call(discriminator, weights, (wave,))[0].square().mean().backward()
        assert len(gradient_leaves(discriminator)) > len(list(discriminator.parameters()))
        assert all(leaf.grad is None for leaf in gradient_leaves(discriminator))
    assert float(wave.grad.norm()) > 0


def test_weights_are_transformed_in_fp32_steps_on_a_cpu_alone(monkeypatch):
    monkeypatch.setattr(winograd_1d, "LEAST_CHANNELS", 16)
    monkeypatch.setattr(winograd_1d, "has_mkl", lambda: True)
    block = ResBlock(16, 3, (1, 3))
    with shared_weights(block, dtype=torch.float32):
        assert winograd_layers(block) == 4
    with shared_weights(block, dtype=torch.float32, winograd=False):  # As a compiled step.
        assert winograd_layers(block) == 0
    with shared_weights(block, dtype=torch.bfloat16):
        assert winograd_layers(block) == 0
    with weights_made_once(block):
        assert winograd_layers(block) == 0
    with on_fake_tensors():
        fake = ResBlock(16, 3, (1, 3))
        with shared_weights(fake, dtype=torch.float32):
            assert winograd_layers(fake) == 0


def test_the_widest_layers_of_the_stock_discriminators_have_the_form():
    with torch.device("meta"):
        modules = [*multi_period([3], 32).modules(), *vits_discriminators().modules()]
    forms = [layer.winograd_form for layer in modules if isinstance(layer, WeightNormed)]
    # The last layer before the output of each: one of the vocoder's, six of the voice's.
    assert [form for form in forms if form] == [WinogradConvolution(5, 2)] * (7 if has_mkl() else 0)
