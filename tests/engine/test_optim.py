"""Optimizer pieces against arithmetic done by hand."""

import pytest
import torch
from torch import nn

from gputrain.engine.optim import Ema, LossScale, adamw


def test_adamw_decays_weights_but_not_biases():
    layer = nn.Linear(3, 2)
    optimizer = adamw(layer.parameters(), learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.99))
    before = {n: p.detach().clone() for n, p in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(layer.weight, before["weight"] * (1 - 0.1 * 0.5))
    assert torch.equal(layer.bias, before["bias"])


def test_fused_adamw_divides_and_skips_as_update_relies_on():
    """grad_scale and found_inf are how a step is unscaled, clipped and guarded without a pass over the gradients."""
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    fused = adamw([ours], learning_rate=0.1, weight_decay=0.0, betas=(0.9, 0.99))
    plain = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0, betas=(0.9, 0.99), fused=False)
    ours.grad, theirs.grad = torch.tensor([4.0, 8.0]), torch.tensor([1.0, 2.0])
    fused.grad_scale, fused.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    fused.step()
    plain.step()
    assert torch.allclose(ours, theirs)
    stepped = ours.detach().clone()
    ours.grad = torch.tensor([float("nan"), 1.0])
    fused.found_inf = torch.tensor(1.0)
    fused.step()
    assert torch.equal(ours, stepped)
    assert fused.state[ours]["step"] == 1


def test_loss_scale_halves_and_doubles():
    scale = LossScale(start=8.0, growth_interval=2)
    yes, no = torch.tensor(True), torch.tensor(False)
    seen = []
    for finite in (yes, yes, yes, no, yes, yes, no, no, no, no, no, no):
        scale.adjust(finite)
        seen.append(float(scale.scale))
    assert seen == [8, 16, 16, 8, 8, 16, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize("decay", [0.9, 0.5])
def test_ema_is_the_recurrence(decay):
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    ema = Ema(model, average, decay)
    expected = model.weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 2, generator=torch.Generator().manual_seed(step)))
        ema.update(model, step)
        rate = min(decay, (1 + step) / (10 + step))
        expected = rate * expected + (1 - rate) * model.weight
    assert torch.allclose(ema.average.weight, expected, atol=1e-5)
    assert not ema.average.weight.requires_grad
