"""Additions to gradients of an earlier micro-batch, which the first micro-batch of a step does not launch."""

import pytest
import torch
from torch import nn

from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.planner.time.fusion import kernel_costs
from gputrain.planner.time.roofline import DeviceRates, KernelCost, StepCost
from tests.planner.predictions import StepTotals, kernels_of, totals_of

RATES = DeviceRates(1e14, 1e13, 1e12, multiprocessors=100, launch_seconds=4e-6, least_seconds=2e-6)


def kernels_of_a_pass(*, earlier: bool) -> tuple[KernelCost, ...]:
    """The kernels of a pass through a compiled layer and one that is not, with or without an earlier micro-batch."""
    timeline = MemoryTimeline()
    with on_fake_tensors():
        compiled, plain, x = nn.Linear(16, 32), nn.Linear(32, 8), torch.empty(4, 16, requires_grad=True)
        compiled.forward = timeline.in_region(compiled.forward)  # type: ignore[method-assign]
        parameters = [*compiled.parameters(), *plain.parameters()]
        if earlier:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            timeline.log.note_gradients(parameter.grad for parameter in parameters)
        with timeline.watching():
            plain(torch.relu(compiled(x))).square().sum().backward()
            if earlier:  # A second gradient of the same micro-batch is added in every micro-batch.
                plain.weight.grad.add_(torch.empty_like(plain.weight))
    return kernel_costs(timeline.log.operators)


def test_a_first_micro_batch_has_the_kernels_of_a_step_without_gradients():
    alone, added = kernels_of_a_pass(earlier=False), kernels_of_a_pass(earlier=True)
    first = [kernel for kernel in added if not kernel.accumulates]
    assert first[-1].name == "add_"
    assert first[-1].bytes == 3 * 8 * 32 * 4
    assert [(one.name, one.bytes, one.launches) for one in first[:-1]] == [
        (one.name, one.bytes, one.launches) for one in alone
    ]
    adding = [kernel for kernel in added if kernel.accumulates]
    assert sorted(kernel.bytes for kernel in adding) == [3 * 4 * size for size in (8, 32, 8 * 32, 16 * 32)]


def test_a_step_adds_once_less_than_it_has_micro_batches():
    """A kernel and an addition take 4 microseconds each, as their launches do."""
    kernel, adding = KernelCost("mm", 1, 0, 0, 0, 1, False), KernelCost("add_", 1, 0, 0, 0, 1, False, True)
    cost = StepCost((kernel, adding), (kernel, adding), 8, (kernel,))
    assert [totals_of(cost, 8, passes).kernels for passes in (1, 3)] == [2, 1 + 3 + 2]
    assert StepTotals.of(kernels_of(cost, 8, 2)).kernels == 4
    one, three = (cost.seconds(RATES, 8, passes) for passes in (1, 3))
    assert one == pytest.approx(2 * (4e-6 + 2e-6))
    assert three == pytest.approx(6e-6 + 2 * (2 * 4e-6 + 2e-6) + 6e-6)
