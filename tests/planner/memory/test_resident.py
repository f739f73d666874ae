"""The meter of memory that compares predictions with real steps, against arithmetic."""

import pytest
import torch

from gputrain.engine.memory_check import MeasuredPeak
from gputrain.planner.memory.predict import predict_step, watched_peak
from tests.planner.step_counts import of_vae, plan_of


def test_the_meter_against_arithmetic():
    """8 MB are in memory, 3 of them are freed before the peak, at which there are two more tensors of 4 MB."""
    kept = torch.empty(5_000_064, dtype=torch.uint8)
    standing = [kept, torch.empty(3_000_064, dtype=torch.uint8)]
    found = MeasuredPeak()

    def work(held: list[torch.Tensor]) -> None:
        del held[1:]
        for _ in range(3):
            first = torch.zeros(1_000_064)
            second = first + 1
            del first, second
        torch.zeros(10)

    with watched_peak(found, list(standing)):
        work(standing)
    rounded = 5_000_192 + 2 * 4_000_256
    assert found.allocated_gb == pytest.approx(rounded / 1e9, rel=1e-6)
    assert found.reserved_gb == found.allocated_gb
    with watched_peak(found):
        torch.zeros(10)
    assert found.allocated_gb == pytest.approx(rounded / 1e9, rel=1e-6)  # the peak of both


def test_gradients_of_one_group_end_before_those_of_the_next():
    """At the peak, in the autoencoder's step, the discriminator has no gradients, nor in the steps after the first."""
    found = {}
    for weight in (0.0, 0.5):
        settings, work = of_vae(preset="fast", image_size=128, batch_size=4, adversarial_weight=weight)
        target = work.target(settings)
        found[weight] = predict_step(target, plan_of(settings, work), micro_batch_size=4).parts["gradients"]
    assert found[0.5] == pytest.approx(found[0.0], rel=1e-6)
