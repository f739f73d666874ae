"""Attention in blocks: values and gradients equal torch's, and no T x T scores are materialised."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gputrain.planner.memory.fake_runtime import on_fake_tensors
from gputrain.planner.memory.timeline import MemoryTimeline
from gputrain.vae import attention
from gputrain.vae.attention import SCORES


def drawn(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def outcome(function, leaves, dtype=torch.float64):
    """Returns the result, then the gradient of each leaf."""
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return [x.to(dtype) for x in (out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype)))]


def reference(leaves):
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return outcome(F.scaled_dot_product_attention, exact)


in_blocks = attention.attention


@pytest.mark.parametrize("scores", [1, 2 * 21 * 4, 2 * 21 * 5, 10**6])  # block: one query, some, some with a rest, all
def test_equal_to_torchs_in_fp64(monkeypatch, scores):
    monkeypatch.setattr(attention, "SCORES", scores)
    leaves = drawn((2, 21, 8), torch.float64)
    for found, expected in zip(outcome(in_blocks, leaves), reference(leaves), strict=True):
        assert (found - expected).abs().max() < 1e-13 * expected.abs().max() + 1e-15


def test_as_close_as_torchs_in_fp32(monkeypatch):
    """At the width of the autoencoder, the error against float64 is about that of the fused kernel."""
    monkeypatch.setattr(attention, "SCORES", 3 * 100 * 17)
    leaves = drawn((3, 100, 512), torch.float32)
    fused = functools.partial(attention.attention, arithmetic=None)
    triples = zip(outcome(in_blocks, leaves), outcome(fused, leaves), reference(leaves), strict=True)
    for found, torchs, expected in triples:
        assert (found - expected).norm() < 2 * (torchs - expected).norm() + 1e-7 * expected.norm()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_16_bits_round_factors_and_no_scores(monkeypatch, dtype, bits):
    """On a CPU the same numbers are multiplied in fp32 as in CUDA's products of 16-bit factors with fp32 sums."""
    monkeypatch.setattr(attention, "SCORES", 2 * 64 * 13)
    leaves = drawn((2, 64, 512), dtype)
    for found, expected in zip(outcome(in_blocks, leaves), reference(leaves), strict=True):
        assert (found - expected).norm() < 3 * 2.0**-bits * expected.norm()  # of the shares, their gradient, the result


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(
    ("items", "side", "dtype"), [(1, 192, torch.bfloat16), (2, 128, torch.float32), (16, 64, torch.bfloat16)]
)  # 1536, 1024 and 512 pixels
def test_scores_never_stand_together(items, side, dtype):
    tokens, width = side**2, 512
    timeline = MemoryTimeline()
    with on_fake_tensors(), Largest() as largest:
        leaves = [torch.empty(items, tokens, width, dtype=dtype, requires_grad=True) for _ in range(3)]
        timeline.note("activations", leaves)
        with timeline.watching():
            out = in_blocks(*leaves)
            torch.autograd.backward(out, torch.empty_like(out))
    assert largest.elements <= max(SCORES, items * tokens * width)
    flops = sum(operator.flops for operator in timeline.log.operators)
    assert flops == 2 * (2 + 5) * items * tokens**2 * width  # Two products forward, three and two again backward.
    # At most two blocks in fp32 and two in the dtype of the factors, besides tensors of (B, T, C).
    blocks = SCORES * (2 * 4 + 2 * dtype.itemsize)
    tensors = items * tokens * width * (8 * dtype.itemsize + 3 * 4)
    assert timeline.peak()[0] < blocks + tensors
