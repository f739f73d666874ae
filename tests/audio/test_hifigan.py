"""Layers of HiFi-GAN compared with torch's own."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gputrain.audio.hifigan import ResBlock, leaky_relu


def test_leaky_relu_equals_torchs_and_keeps_its_output_alone() -> None:
    x = torch.randn(3, 1000, requires_grad=True)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = leaky_relu(x, 0.1)
    assert [tensor.data_ptr() for tensor in kept] == [out.data_ptr()]
    expected = F.leaky_relu(x, 0.1)
    assert torch.equal(out, expected)
    weights = torch.randn(3, 1000)
    assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, expected)))


def test_resblock_is_a_sum_of_its_pairs() -> None:
    torch.manual_seed(0)
    block, x = ResBlock(4, 3, (1, 3)), torch.randn(2, 4, 30)
    expected = x
    for dilated, plain, dilation in zip(block.convs1, block.convs2, (1, 3), strict=True):
        first = F.conv1d(
            F.leaky_relu(expected, 0.1), dilated.compute_weight(), dilated.bias, padding="same", dilation=dilation
        )
        expected = expected + F.conv1d(F.leaky_relu(first, 0.1), plain.compute_weight(), plain.bias, padding="same")
    assert torch.allclose(block(x), expected, atol=1e-6)
