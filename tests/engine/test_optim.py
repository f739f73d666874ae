"""Optimizer pieces against arithmetic done by hand."""

import pytest
import torch
from torch import nn

from gputrain.engine.optim import Ema, FusedAdamW, LossScale, adamw
from gputrain.planner.memory.timeline import MemoryTimeline


def test_adamw_decays_weights_but_not_biases():
    layer = nn.Linear(3, 2)
    optimizer = adamw(layer.parameters(), learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.99))
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(layer.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before["bias"])


def test_our_adamw_is_that_of_torch_bit_for_bit():
    """With steps that are not finite, parameters without a gradient, and a state that is loaded on the way."""
    torch.manual_seed(0)
    sizes = [(7, 5), (5,), (3, 2, 4), (1,)]
    ours, theirs = ([nn.Parameter(torch.ones(size)) for size in sizes] for _ in range(2))
    how = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-9, "weight_decay": 0.01, "fused": True}
    one, other = FusedAdamW(ours, **how), torch.optim.AdamW(theirs, **how)
    for step in range(8):
        if step == 4:
            saved = one.state_dict()
            one = FusedAdamW(ours, **how)
            one.load_state_dict(saved)
        gradients = [None if (step + index) % 5 == 0 else torch.randn(size) for index, size in enumerate(sizes)]
        for parameters, optimizer in ((ours, one), (theirs, other)):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(step == 3))
            optimizer.step()
        assert all(map(torch.equal, ours, theirs))
        for mine, their in zip(ours, theirs, strict=True):
            assert one.state[mine].keys() == other.state[their].keys()
            assert all(torch.equal(value, other.state[their][name]) for name, value in one.state[mine].items())
    assert sorted(float(state["step"]) for state in one.state.values()) == [5, 5, 6, 7]


def test_steps_are_counted_by_one_kernel():
    parameters = [nn.Parameter(torch.ones(size)) for size in ((3, 2), (4,), (2, 2))]
    optimizer = adamw(parameters, learning_rate=0.1, weight_decay=0.1, betas=(0.9, 0.99))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    optimizer.step()
    timeline = MemoryTimeline()
    with timeline.watching():
        optimizer.step()
    assert [operator.name for operator in timeline.log.operators] == ["add_", "_fused_adamw_", "_fused_adamw_", "sub_"]


def test_loss_scale_halves_and_doubles():
    scale = LossScale(start=8.0, growth_interval=2)
    yes, no = torch.tensor(True), torch.tensor(False)
    seen = []
    for finite in (yes, yes, yes, no, yes, yes, no, no, no, no, no, no):
        scale.adjust(finite)
        seen.append(float(scale.scale))
    assert seen == [8, 16, 16, 8, 8, 16, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(("decay", "least"), [(0.9, 0.0), (0.5, 0.0), (0.9, 0.6), (0.5, 0.6)])
def test_ema_is_the_recurrence(decay, least):
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    ema = Ema(model, average, decay, least)
    expected = model.weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 2, generator=torch.Generator().manual_seed(step)))
        ema.update(model, step)
        rate = min(decay, max(least, (1 + step) / (10 + step)))
        expected = rate * expected + (1 - rate) * model.weight
    assert torch.allclose(ema.average.weight, expected, atol=1e-5)
    assert not ema.average.weight.requires_grad
