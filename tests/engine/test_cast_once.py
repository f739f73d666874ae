"""Weights that are cast once in a step, against those that autocast casts in every pass."""

import pytest
import torch
from torch import Tensor, nn

from gputrain.audio.discriminators import vits_discriminators
from gputrain.audio.weight_norm import cached_weights, shared_weights
from gputrain.engine import optim
from gputrain.engine.optim import layer_weights, weights_cast_once


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 1))


def waves(step: int) -> Tensor:
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))


def passes(model: nn.Module) -> None:
    """Two micro-batches, the second of which calls one layer twice."""
    with torch.autocast("cpu", torch.bfloat16):
        model(waves(0)).sum().backward()
        (model(waves(1)) * model(waves(2))).sum().backward()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in found)
    return found


@pytest.mark.parametrize("bucket", [1, 60, 10**6])
def test_gradients_are_those_of_autocast_bit_for_bit(monkeypatch, bucket):
    monkeypatch.setattr(optim, "BUCKET_NUMBERS", bucket)
    plain, shared = network(), network()
    kept = list(shared.parameters())
    slots = layer_weights([shared])
    assert len(slots) == 6  # The norm's weights stay in fp32.
    plain[4].weight.grad, shared[4].weight.grad = torch.ones(1, 5), torch.ones(1, 5)  # From an earlier micro-batch.
    passes(plain)
    with weights_cast_once(slots, torch.bfloat16):
        assert shared[0].weight.dtype == torch.bfloat16
        passes(shared)
    assert all(ours is theirs for ours, theirs in zip(shared.parameters(), kept, strict=True))
    for ours, theirs in zip(gradients(shared), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_fails_leaves_the_weights_and_no_gradient():
    model = network()
    kept = list(model.parameters())

    def fail() -> None:
        with weights_cast_once(layer_weights([model]), torch.bfloat16):
            passes(model)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        fail()
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), kept, strict=True))
    assert model[0].weight.grad is None


def test_frozen_and_excepted_layers():
    model = network()
    model[0].requires_grad_(False)
    with weights_cast_once(layer_weights([model], without_autocast=[model[4]]), torch.bfloat16):
        assert model[4].weight.dtype == torch.float32
        passes(model)
    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None
    with weights_cast_once(layer_weights([model]), torch.float32):
        assert model[3].weight.dtype == torch.float32


def test_normed_weights_are_cast_too():
    """Weight norm itself stays in fp32."""
    found = []
    for shared in (False, True):
        torch.manual_seed(0)
        discriminator = list(vits_discriminators(4))[1]
        wave_B1T = torch.randn(2, 1, 64)
        context = shared_weights(discriminator, dtype=torch.bfloat16) if shared else cached_weights(discriminator)
        with context, torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                discriminator(wave_B1T)[0].float().sum().backward()
            dtypes = {discriminator.convs[1].made.dtype, discriminator.convs[1].bias.dtype}
        assert dtypes == {torch.bfloat16 if shared else torch.float32}
        found.append(gradients(discriminator))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
