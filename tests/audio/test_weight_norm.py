"""Weight and spectral normalisation compared with torch's own and with singular values."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gputrain.audio.discriminators import multi_scale
from gputrain.audio.weight_norm import WeightNormed, cached_weights
from tests.tables import each_row


@each_row(
    (nn.Conv1d(6, 4, 5, stride=2, padding=2, dilation=2, groups=2), torch.randn(2, 6, 20)),
    (nn.Conv2d(3, 4, (5, 1), stride=(3, 1), padding=(2, 0)), torch.randn(2, 3, 20, 4)),
    (nn.ConvTranspose1d(6, 4, 5, stride=2, padding=2, output_padding=1), torch.randn(2, 6, 20)),
)
def test_weight_norm_equals_torchs(conv: nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d, x: Tensor) -> None:
    ours = WeightNormed(conv)
    assert torch.allclose(ours(x), conv(x), atol=1e-6)  # The initial weight is unchanged.
    reference = nn.utils.parametrizations.weight_norm(conv)
    with torch.no_grad():
        ours.weight_g.mul_(1.5)
    reference.load_state_dict(ours.state_dict())  # torch accepts the older names.
    assert torch.allclose(ours(x), reference(x), atol=1e-6)
    ours(x).square().sum().backward()
    reference(x).square().sum().backward()
    theirs = reference.parametrizations.weight
    for made, expected in ((ours.weight_g, theirs.original0), (ours.weight_v, theirs.original1)):
        assert torch.allclose(made.grad, expected.grad, rtol=1e-4, atol=1e-4)


@each_row(((5, 1),), ((3, 9),))
def test_weight_norm_keeps_channels_last(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = WeightNormed(nn.Conv2d(6, 4, size)).double()
    placed = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    assert plain.compute_weight().is_contiguous()
    assert placed.compute_weight().is_contiguous(memory_format=torch.channels_last)
    for made in (plain, placed):
        with cached_weights(made):
            made(torch.ones(2, 6, 20, 20, dtype=torch.float64)).square().sum().backward()
    assert torch.allclose(placed.weight_g.grad, plain.weight_g.grad, rtol=1e-12)
    assert torch.allclose(placed.weight_v.grad, plain.weight_v.grad, rtol=1e-12, atol=1e-12)


def small(dtype=torch.float64):
    torch.manual_seed(0)
    return multi_scale(16).to(dtype)


def test_spectral_norm_is_refreshed_only_when_asked():
    discriminators = small()
    first = discriminators.discriminators[0].convs[2]
    before = {name: tensor.clone() for name, tensor in discriminators.state_dict().items()}
    discriminators.train()
    for discriminator in discriminators:
        discriminator(0.3 * torch.randn(4, 1, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert all(torch.equal(tensor, before[name]) for name, tensor in discriminators.state_dict().items())
    first.weight_orig.data.copy_(torch.randn(first.weight_orig.shape, generator=torch.Generator().manual_seed(5)))
    for _ in range(300):
        discriminators.refresh_spectral_norms()
    assert torch.linalg.svdvals(first.compute_weight().flatten(1))[0].item() == pytest.approx(1, rel=1e-6)


def test_spectral_norm_is_exact_under_autocast():
    conv = small(torch.float32).discriminators[0].convs[2]
    with torch.autocast("cpu", torch.bfloat16):
        cast = conv.compute_weight()
    assert torch.equal(cast, conv.compute_weight())
