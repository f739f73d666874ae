"""Memory-efficient layers compared with plain ones, which autograd differentiates."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from gputrain.vae import memory_efficient_layers as efficient
from gputrain.vae import model as upsampling
from gputrain.vae import norm_arithmetic as arithmetic

LAYOUTS = [torch.contiguous_format, torch.channels_last]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])


def layers(dtype: torch.dtype = torch.float32, kernel: int = 3) -> tuple[nn.GroupNorm, nn.Conv2d]:
    norm = nn.GroupNorm(4, 8, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight, mean=1.0)
    nn.init.normal_(norm.bias)
    return norm, nn.Conv2d(8, 6, kernel, padding=kernel // 2).to(dtype)


def picture(*shape: int, dtype: torch.dtype = torch.float32, layout: torch.memory_format = LAYOUTS[0]) -> Tensor:
    """Returns values with a nonzero mean, which a normalisation must remove."""
    return (torch.randn(shape, dtype=torch.float64) * 2 + 1).to(dtype).contiguous(memory_format=layout)


def norm_silu_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d) -> Tensor:
    return efficient.norm_silu_conv(efficient.Features(x), norm, conv, arithmetic.EAGER)[0].added()


def upsample_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    return upsampling.upsample_conv(x, conv).added()


def plain_norm_silu_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d) -> Tensor:
    return conv(F.silu(norm(x)))


def plain_upsample_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    return conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def gradients(function: Callable[..., Tensor], x: Tensor, *modules: nn.Module) -> list[Tensor]:
    """Returns the output, and the gradients of a weighted sum of it for the input and all parameters."""
    x = x.detach().requires_grad_()
    parameters = [p for module in modules for p in module.parameters()]
    out = function(x, *modules)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], weights)]


def difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of each tensor."""
    assert len(ours) == len(reference)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, reference, strict=True))


@layouts
def test_equal_to_plain_layers(layout: torch.memory_format) -> None:
    for kernel in (1, 3, 5):
        norm, conv = layers(kernel=kernel)
        x = picture(2, 8, 5, 7, layout=layout)
        ours = gradients(norm_silu_conv, x, norm, conv)
        assert difference(ours, gradients(plain_norm_silu_conv, x, norm, conv)) < 1e-6
    conv = nn.Conv2d(8, 6, 3, padding=1)
    assert difference(gradients(upsample_conv, x, conv), gradients(plain_upsample_conv, x, conv)) < 1e-6


def test_input_of_any_strides() -> None:
    """A crop, and the unusual strides that attention gives a single item."""
    norm, conv = layers(torch.float64)
    cropped = picture(2, 8, 7, 9, dtype=torch.float64)[:, :, 1:-1, 2:-1]
    turned = picture(1, 30, 8, dtype=torch.float64).transpose(1, 2).view(1, 8, 5, 6)
    for x in (cropped, turned):
        ours = gradients(norm_silu_conv, x, norm, conv)
        assert difference(ours, gradients(plain_norm_silu_conv, x, norm, conv)) < 1e-13
        ours = gradients(upsample_conv, x, conv)
        assert difference(ours, gradients(plain_upsample_conv, x, conv)) < 1e-13


def test_gradcheck() -> None:
    norm, conv = layers(torch.float64)
    x = picture(2, 8, 3, 2, dtype=torch.float64).requires_grad_()
    parameters = [*norm.parameters(), *conv.parameters()]
    assert gradcheck(lambda x, *_: norm_silu_conv(x, norm, conv), (x, *parameters))
    assert gradcheck(lambda x, *_: upsample_conv(x, conv), (x, *conv.parameters()))


def test_each_choice_of_frozen_parameters() -> None:
    norm, conv = layers(torch.float64)
    leaves = [picture(2, 8, 4, 4, dtype=torch.float64), *norm.parameters(), *conv.parameters()]
    for needed in itertools.product([False, True], repeat=5):
        for leaf, needs in zip(leaves, needed, strict=True):
            leaf.requires_grad_(needs)
        found = []
        for function in (norm_silu_conv, plain_norm_silu_conv):
            for leaf in leaves:
                leaf.grad = None
            out = function(leaves[0], norm, conv)
            assert out.requires_grad == any(needed)
            if any(needed):
                out.square().sum().backward()
            found.append([leaf.grad for leaf in leaves])
        assert [grad is not None for grad in found[0]] == list(needed)
        for ours, reference in zip(*found, strict=True):
            if reference is not None:
                torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_frozen_convolution_costs_no_weight_gradient() -> None:
    norm, conv = layers()
    x = picture(1, 8, 4, 4).requires_grad_()
    one = 2 * 4 * 4 * 8 * 6 * 9  # FLOP of the convolution
    for frozen, expected in ((False, 3 * one), (True, 2 * one)):
        conv.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            norm_silu_conv(x, norm, conv).sum().backward()
        assert counter.get_total_flops() == expected
        up = upsample_conv(x, conv)
        with FlopCounterMode(display=False) as counter:
            up.sum().backward()
        assert counter.get_total_flops() == (1 if frozen else 2) * 2 * 16 * 4 * 4 * 8 * 6
    norm.requires_grad_(False)
    conv.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        norm_silu_conv(x.detach(), norm, conv).sum().backward()
    assert counter.get_total_flops() == 2 * one


@layouts
def test_memory_format_is_kept(layout: torch.memory_format) -> None:
    for autocast in (False, True):
        norm, conv = layers()
        x = picture(2, 8, 4, 6, layout=layout).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outs = [norm_silu_conv(x, norm, conv), upsample_conv(x, conv)]
        for out in outs:
            assert out.stride() == torch.empty(out.shape).contiguous(memory_format=layout).stride()
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert grad.stride() == x.stride()


def test_autocast_is_followed_as_closely_as_by_stock_layers() -> None:
    norm, conv = layers()
    exact_norm, exact_conv = layers(torch.float64)
    exact_norm.load_state_dict(norm.state_dict())
    exact_conv.load_state_dict(conv.state_dict())
    for dtype in (torch.bfloat16, torch.float32):
        x = picture(2, 8, 16, 16, dtype=dtype)
        exact = gradients(plain_norm_silu_conv, x.double(), exact_norm, exact_conv)
        exact_up = gradients(plain_upsample_conv, x.double(), exact_conv)
        with torch.autocast("cpu", torch.bfloat16):
            ours, ours_up = gradients(norm_silu_conv, x, norm, conv), gradients(upsample_conv, x, conv)
            stock, stock_up = gradients(plain_norm_silu_conv, x, norm, conv), gradients(plain_upsample_conv, x, conv)
        assert [t.dtype for t in ours] == [torch.bfloat16, dtype, *[torch.float32] * 4]
        # Eight roundings to bf16 at most: casts of input and weights, norm, silu, convolution and, in backward,
        # sums over two pictures, for which oneDNN has no kernel that sums in fp32 on a CPU without AVX-512.
        # torch's own layers round less often from 2.15 on.
        for found, other, right in ((ours, stock, exact), (ours_up, stock_up, exact_up)):
            ours_error, stock_error = difference(found, right), difference(other, right)
            assert ours_error < 2 * stock_error
            assert max(ours_error, stock_error) < 8 * 2**-8


def test_gradients_of_taps_are_summed_in_fp32() -> None:
    """In bf16, each of the three small values would vanish in a sum with the large one."""
    grad = torch.tensor([1] + 15 * [2**-9], dtype=torch.bfloat16).view(1, 1, 4, 4)
    assert upsampling._undoubled(grad).max().item() == 1 + 3 * 2**-9


def test_upsampling_takes_four_ninths_of_the_arithmetic() -> None:
    conv, x_BChw = torch.nn.Conv2d(8, 6, 3, padding=1), torch.randn(1, 8, 32, 32)
    with FlopCounterMode(display=False) as counter:
        upsample_conv(x_BChw, conv)
    with FlopCounterMode(display=False) as plain_count:
        plain_upsample_conv(x_BChw, conv)
    assert counter.get_total_flops() / plain_count.get_total_flops() == pytest.approx(4 / 9)


def kept_by(step: Callable[[], Tensor]) -> list[Tensor]:
    """Collects the tensors that autograd keeps for the backward pass."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return kept


def test_nothing_is_kept_but_input_statistics_and_parameters() -> None:
    norm, conv = layers()
    x = picture(2, 8, 4, 4, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_by(lambda: norm_silu_conv(x, norm, conv)) + kept_by(lambda: upsample_conv(x, conv))
    mine = {p.data_ptr() for p in (x, *norm.parameters(), *conv.parameters())}
    statistics = [tensor for tensor in kept if tensor.data_ptr() not in mine]
    assert [(s.shape, s.dtype) for s in statistics] == [((2, 4), torch.float32)] * 2


@layouts
def test_arithmetic_equals_that_of_atens_kernels(layout: torch.memory_format) -> None:
    norm, _ = layers(torch.float64)
    x = picture(3, 8, 4, 5, dtype=torch.float64, layout=layout)
    x[1] += 30
    grad = torch.randn(3, 8, 4, 5, dtype=torch.float64).contiguous(memory_format=layout)
    out, mean, rstd = torch.native_group_norm(x, norm.weight, norm.bias, 3, 8, 20, 4, norm.eps)
    expected = torch.ops.aten.native_group_norm_backward(
        grad, x, mean, rstd, norm.weight, 3, 8, 20, 4, [True, True, True]
    )
    torch.testing.assert_close(arithmetic._statistics(x, 4, norm.eps), (mean, rstd), rtol=1e-11, atol=0)
    scale, shift = arithmetic._coefficients(mean, rstd, norm.weight, norm.bias)
    ours = arithmetic._normalised(x, scale, shift)
    torch.testing.assert_close(ours, out, rtol=0, atol=1e-11)
    assert ours.stride() == x.stride()
    *found, _ = arithmetic._norm_gradients(grad, x, scale, mean, rstd, norm.weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert found[0].stride() == x.stride()


def test_statistics_stay_exact_under_a_large_mean() -> None:
    x = picture(1, 8, 64, 64) + 300
    _, rstd = arithmetic._statistics(x, 4, 1e-6)
    exact = x.double().view(1, 4, -1).var(-1, correction=0).add(1e-6).rsqrt()
    assert (rstd / exact - 1).abs().max() < 1e-5


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_pictures_are_those_of_fp64(layout: torch.memory_format, dtype: torch.dtype) -> None:
    """A sum has 64 terms, whose absolute values are together at most 3 times the largest result: 3 * 64 * 2**-24 =
    1.2e-5. With products rounded to 16 bits, errors would be some 1e-4 in fp16 and 1e-3 in bf16."""
    x, grad = (picture(2, 8, 8, 8, dtype=dtype, layout=layout) for _ in range(2))
    weight, bias, offset = torch.randn(3, 8)
    mean, rstd = arithmetic._statistics_uncast(x, 4, 1e-6, offset)
    exact = arithmetic._statistics(x.double(), 4, 1e-6, offset.double())
    torch.testing.assert_close((mean.double(), rstd.double()), exact, rtol=1.2e-5, atol=1.2e-5)
    scale, shift = arithmetic._coefficients(mean, rstd, weight, bias, offset)
    y = arithmetic._normalised_in(dtype, x, scale, shift)
    torch.testing.assert_close(y, arithmetic._normalised(x.float(), scale, shift).to(dtype), rtol=0, atol=0)
    grad_y = torch.ops.aten.silu_backward(grad, y)
    statistics = (scale.double(), mean.double(), rstd.double(), weight.double(), offset.double())
    expected = arithmetic._norm_gradients(grad_y.double(), x.double(), *statistics)
    found = arithmetic._gradients_in_place(grad, x, scale, shift, mean, rstd, weight, offset, active_dtype=dtype)
    assert found[0] is grad
    assert torch.equal(found[4], F.silu(y))
    for ours, theirs in zip(found[1:4], expected[1:], strict=True):
        assert (ours.double() - theirs).abs().max() < 1.2e-5 * theirs.abs().max()
    assert (found[0].double() - expected[0]).abs().max() < torch.finfo(dtype).eps * expected[0].abs().max()


def test_no_gradient_of_the_gradient() -> None:
    norm, conv = layers()
    x = picture(1, 8, 4, 4).requires_grad_()
    (grad,) = torch.autograd.grad(norm_silu_conv(x, norm, conv).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
