"""AdamW with averages of 8 bits, against codes and updates that numpy computes one by one in another way."""

import bisect
import math

import numpy as np
import pytest
import torch
from torch import nn

from gputrain.engine import adamw_8bit
from gputrain.engine.adamw_8bit import BLOCK, BlockCode, EightBitAdamW, code_values, has_8bit_state, moment_bytes
from gputrain.engine.checkpoint import tensor_bytes
from gputrain.engine.optim import FusedAdamW, adamw
from gputrain.engine.state import load_optimizer
from tests.fake_cuda.device import fake_cuda
from tests.tables import each_row

LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.98), 1e-8, 0.1


@each_row((True, 0.0071), (False, 0.0036))
def test_numbers_become_the_nearest_codes(signed, most):
    """`most` is half of the widest gap between codes: 0.9 / 64 and 0.9 / 128 in the highest power of ten."""
    values = code_values(signed=signed)
    assert list(values) == sorted(set(values))
    assert (len(values), values[-1]) == (256, 1)
    assert (0.0 in values) == signed
    draws = np.random.default_rng(0)
    numbers_KW = draws.normal(size=(40, BLOCK)) * 10 ** draws.uniform(-8, 3, size=(40, BLOCK))
    numbers_KW = numbers_KW if signed else np.abs(numbers_KW)
    code = BlockCode(torch.zeros((), dtype=torch.float64), signed=signed)
    codes_N, scale_K = code.encoded_(torch.from_numpy(numbers_KW.copy()))
    assert (codes_N.dtype, scale_K.dtype) == (torch.uint8, torch.float32)
    decoded_KW = code.decoded(codes_N, scale_K.double()).numpy()
    largest_K1 = np.abs(numbers_KW).max(axis=1, keepdims=True)
    error_KW = np.abs(decoded_KW - numbers_KW) / largest_K1
    nearest_KW = np.abs(np.array(values) - (numbers_KW / largest_K1)[..., None]).min(axis=-1)
    assert error_KW.max() <= most
    assert np.abs(error_KW - nearest_KW).max() < 1e-6
    large_KW = np.abs(numbers_KW / largest_K1) > 0.1  # In the highest power of ten, the error is below 7 or 3.5 %.
    assert (error_KW / np.abs(numbers_KW / largest_K1))[large_KW].max() < 10 * most


class Reference:
    """AdamW of one parameter in float64, whose averages are rounded to codes number by number after each step."""

    def __init__(self, weight: np.ndarray, decay: float, *, eight_bit: bool) -> None:
        self.weight, self.decay, self.eight_bit = weight.astype(np.float64), decay, eight_bit
        self.mean, self.square, self.steps = np.zeros_like(self.weight), np.zeros_like(self.weight), 0

    def step(self, gradient: np.ndarray) -> None:
        self.steps += 1
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * gradient**2
        mean, square = self.mean / (1 - BETAS[0] ** self.steps), self.square / (1 - BETAS[1] ** self.steps)
        self.weight = self.weight * (1 - LR * self.decay) - LR * mean / (np.sqrt(square) + EPS)
        if self.eight_bit:
            self.mean, self.square = rounded(self.mean, signed=True), rounded(self.square, signed=False)


def rounded(numbers: np.ndarray, *, signed: bool) -> np.ndarray:
    values, made = code_values(signed=signed), []
    for block in numbers.reshape(-1, BLOCK):
        scale = float(np.float32(np.abs(block).max()))
        for number in block / (scale or 1):
            at = bisect.bisect_left(values, number)
            near = values[max(0, at - 1) : at + 1]
            made.append(scale * min(near, key=lambda one: abs(one - number)))
    return np.array(made).reshape(numbers.shape)


def test_a_step_is_that_of_a_reference_that_rounds_one_by_one(monkeypatch):
    """With slices that divide and gather parameters, gradients that are missing or not finite, and small parameters,
    which keep averages of full precision."""
    monkeypatch.setattr(adamw_8bit, "LEAST_NUMBERS", 512)
    monkeypatch.setattr(adamw_8bit, "SLICE_NUMBERS", 768)
    draws = np.random.default_rng(0)
    sizes = [(8, 64), (20, 64), (3, 5), (512,), (7, 100)]
    weights = [nn.Parameter(torch.from_numpy(draws.normal(size=size))) for size in sizes]
    assert [has_8bit_state(weight) for weight in weights] == [True, True, False, True, False]
    theirs = [
        Reference(weight.detach().numpy(), DECAY * (weight.ndim > 1), eight_bit=has_8bit_state(weight))
        for weight in weights
    ]
    optimizer = adamw(weights, learning_rate=LR, weight_decay=DECAY, betas=BETAS, algorithm=EightBitAdamW)
    for step in range(6):
        before = [weight.detach().clone() for weight in weights]
        for index, (weight, reference) in enumerate(zip(weights, theirs, strict=True)):
            gradient = draws.normal(size=weight.shape) * 10.0 ** draws.integers(-5, 2, size=weight.shape)
            is_given = (step + index) % 4 != 3
            weight.grad = torch.from_numpy(4 * gradient) if is_given else None
            if is_given and step == 2:
                weight.grad.view(-1)[7] = math.nan
            elif is_given:
                reference.step(gradient)
        state = {index: {**one} for index, one in optimizer.state_dict()["state"].items()}
        state = {index: {name: value.clone() for name, value in one.items()} for index, one in state.items()}
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(step == 2))
        optimizer.step()
        if step == 2:
            assert all(map(torch.equal, weights, before))
            after = optimizer.state_dict()["state"]
            assert all(
                torch.equal(value, after[index][name]) for index in state for name, value in state[index].items()
            )
    for weight, reference in zip(weights, theirs, strict=True):
        assert np.abs(weight.detach().numpy() - reference.weight).max() < 1e-6  # torch's fused kernel rounds as much


def test_a_gradient_far_below_the_largest_of_its_block_makes_no_large_step():
    """With a code of zero for averages of squares, the last steps would be 50 learning rates long."""
    weight = nn.Parameter(torch.zeros(16, 256))
    optimizer = adamw([weight], learning_rate=LR, weight_decay=0.0, betas=BETAS, algorithm=EightBitAdamW)
    for step in range(8):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 1e-6 if step < 5 else 0.0)
        weight.grad[:, 0] = 1.0
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) < 1.1 * LR


def test_a_quadratic_is_minimised_as_by_adamw():
    distances = []
    for algorithm in (FusedAdamW, EightBitAdamW):
        draws = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(32, 128, generator=draws))
        curvature = 10 ** (2 * torch.rand(32, 128, generator=draws) - 2)
        optimizer = adamw([weight], learning_rate=0.05, weight_decay=0.0, betas=BETAS, algorithm=algorithm)
        start = float((curvature * weight.detach() ** 2).sum())
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 200)
            weight.grad = curvature * (2 * weight.detach() + 0.5 * torch.randn(32, 128, generator=draws))
            optimizer.step()
        distances.append(float((curvature * weight**2).sum().detach()) / start)
    assert distances[0] < 0.02
    assert distances[1] == pytest.approx(distances[0], rel=0.1)


@each_row((FusedAdamW, EightBitAdamW), (EightBitAdamW, FusedAdamW))
def test_a_state_of_other_precision_is_begun_anew_with_a_warning(caplog, first, second):
    weights = [nn.Parameter(torch.randn(48, 128)), nn.Parameter(torch.randn(5))]
    before, after = (
        adamw(weights, learning_rate=LR, weight_decay=0.0, betas=BETAS, algorithm=algorithm)
        for algorithm in (first, second)
    )
    for weight in weights:
        weight.grad = torch.randn(weight.shape)
    before.step()
    load_optimizer("recogniser", after, {"recogniser": before.state_dict()})
    assert not after.state
    assert "trained with AdamW of another precision" in caplog.text


def stepped(optimizer, weights):
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return optimizer


def test_the_size_of_the_averages_is_known_before_they_are():
    weights = [nn.Parameter(torch.randn(48, 128)), nn.Parameter(torch.randn(50, 100)), nn.Parameter(torch.randn(5))]
    optimizer = stepped(
        adamw(weights, learning_rate=LR, weight_decay=0.0, betas=BETAS, algorithm=EightBitAdamW), weights
    )
    for weight in weights:
        held = {name: value for name, value in optimizer.state[weight].items() if name != "step"}
        assert moment_bytes(optimizer, weight) == tensor_bytes(held)
    assert moment_bytes(optimizer, weights[0]) == 48 * 128 * (2 + 2 / 64)


def test_a_step_copies_nothing_between_device_and_host():
    with fake_cuda(capability=(7, 5), memory_gb=16) as card:
        weights = [nn.Parameter(torch.ones(48, 128, device="cuda")), nn.Parameter(torch.ones(5, device="cuda"))]
        optimizer = adamw(weights, learning_rate=LR, weight_decay=DECAY, betas=BETAS, algorithm=EightBitAdamW)
        optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device="cuda") for _ in range(2))
        stepped(optimizer, weights)  # The first step places the values of the codes.
        with card.watched() as copies:
            stepped(optimizer, weights)
        assert optimizer.state[weights[0]]["exp_avg"].device.type == "cuda"
        assert not copies.made
