"""The upsampling convolution of a CPU against torch's convolution of the doubled picture."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.vae import upsample_conv_cpu
from gputrain.vae.upsample_conv_cpu import upsample_convolve, upsample_convolve_backward

SHAPES = [(2, 5, 3, 6, 7), (1, 1, 1, 1, 1), (3, 2, 4, 1, 5), (1, 4, 2, 9, 1)]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """Returns the convolution of the doubled picture, and the gradients of the picture, the weight and the bias."""
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, weight.new_zeros(len(weight)))]
    out = F.conv2d(F.interpolate(leaves[0], scale_factor=2.0), leaves[1], leaves[2], padding=1)
    found = torch.autograd.grad(out, leaves, grad)
    return [out.detach() if bias is None else out.detach() + bias[:, None, None], *found]


def values(B: int, C: int, K: int, h: int, w: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (B, C, h, w), (K, C, 3, 3), (K,), (B, K, 2 * h, 2 * w)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pixels", [1, 14, 2048], ids=["a row", "two rows", "all"])
def test_equal_in_parts_of_any_size(shape: tuple[int, ...], pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upsample_conv_cpu, "PART_PIXELS", pixels)
    x, weight, bias, grad = values(*shape)
    for added in (bias, None):
        found = [upsample_convolve(x, weight, added), *upsample_convolve_backward(grad, x, weight, (True, True, True))]
        torch.testing.assert_close(found, reference(x, weight, added, grad), rtol=1e-12, atol=1e-12)


def test_only_what_is_needed() -> None:
    x, weight, _, grad = values(2, 3, 4, 5, 6)
    _, *expected = reference(x, weight, None, grad)
    for needs in itertools.product([False, True], repeat=3):
        found = upsample_convolve_backward(grad, x, weight, needs)
        assert tuple(one is not None for one in found) == needs
        for one, same in zip(found, expected, strict=True):
            if one is not None:
                torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)


def test_error_in_fp32() -> None:
    """Sums of taps and of products round a few times more than torch's convolution, whose error of the norm is below
    1e-6 for these sizes: 9 x 64 products are summed in fp32, whose rounding unit is 6e-8."""
    exact = values(1, 64, 64, 16, 16)
    x, weight, bias, grad = (one.float() for one in exact)
    found = [upsample_convolve(x, weight, bias), *upsample_convolve_backward(grad, x, weight, (True, True, True))]
    for one, same in zip(found, reference(*exact), strict=True):
        assert one.dtype == torch.float32
        assert (one.double() - same).norm() < 1e-6 * same.norm()
