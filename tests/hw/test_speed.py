"""Rates have the right size."""

import itertools
from random import Random

import pytest
import torch

from gputrain.hw import speed
from gputrain.hw.speed import copied_bytes_per_second, product_flops_per_second

CPU = torch.device("cpu")


def test_the_rate_of_a_product(monkeypatch):
    """A simulated device computes 1 TFLOPS if undisturbed. It has its own clock, as this machine is shared."""
    disturbances = itertools.cycle([1.5, 1.0, 3.0])

    def time_taken(matrices, count):
        a, b, product = matrices
        assert a.shape == b.shape == product.shape
        assert a.std() == pytest.approx(1, abs=0.1)
        return 2 * len(a) ** 3 * count / 1e12 * next(disturbances)

    monkeypatch.setattr(speed, "_time", time_taken)
    assert product_flops_per_second(CPU, torch.float32) == pytest.approx(1e12)


def test_a_busy_processor_is_measured_between_the_turns_of_others(monkeypatch):
    """Another program has every other 4 ms: what takes longer than a turn is always interrupted."""
    turn, rate, random = 4e-3, 2e11, Random(0)

    def time_taken(matrices, count):
        seconds = 2 * len(matrices[0]) ** 3 * count / rate
        return seconds + turn * (random.uniform(0, 2 * turn) + seconds > turn)

    monkeypatch.setattr(speed, "_time", time_taken)
    assert product_flops_per_second(CPU, torch.float32) == pytest.approx(rate)
    assert copied_bytes_per_second(CPU) > 1e8


def test_what_is_timed():
    a, b, product = matrices = speed._matrices(64, CPU, torch.float32)
    product.zero_()
    assert 0 < speed._time(matrices, 3) < 10
    torch.testing.assert_close(product, a @ b)
    assert 1e8 < product_flops_per_second(CPU, torch.float32, seconds=0.05) < 1e14


def test_a_product_that_the_device_refuses():
    with pytest.raises(RuntimeError):
        product_flops_per_second(CPU, torch.bool, seconds=0.01)
