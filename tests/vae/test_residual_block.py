"""Residual blocks as one function, compared with plain layers, which autograd differentiates."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from gputrain.vae.memory_efficient_layers import Features
from gputrain.vae.model import ResnetBlock
from gputrain.vae.norm_arithmetic import EAGER
from tests.tables import each_row

widths = pytest.mark.parametrize("width", [8, 12])
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def block(width: int, dtype: torch.dtype = torch.float64) -> ResnetBlock:
    """Returns a block of 8 channels in and `width` out, with biases that are no smaller than what they are added to."""
    torch.manual_seed(0)
    made = ResnetBlock(8, width, 4)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(parameter, mean=1.0)
    return made.to(dtype)


def picture(items: int = 2, layout: torch.memory_format = LAYOUTS[0]) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return (torch.randn(items, 8, 6, 10, generator=draws, dtype=torch.float64) * 2 + 1).contiguous(memory_format=layout)


def passed(made: ResnetBlock, x_BCHW: Tensor) -> Tensor:
    """Returns the block's output for an input that has an offset of its own, if blocks have offsets."""
    if made.arithmetic is None:
        return made(Features(x_BCHW)).added()
    offset_C = torch.linspace(-3, 3, x_BCHW.shape[1], dtype=torch.float64)
    before = x_BCHW - offset_C.to(x_BCHW.dtype)[:, None, None]
    return made(Features(before, offset_C.to(torch.promote_types(x_BCHW.dtype, torch.float32)))).added()


def results(made: ResnetBlock, x_BCHW: Tensor) -> dict[str, Tensor]:
    """Returns the output, and the gradients of a sum with weights that differ from pixel to pixel."""
    x_BCHW = x_BCHW.detach().requires_grad_()
    made.zero_grad()
    out = passed(made, x_BCHW)
    draws = torch.Generator().manual_seed(2)
    (out.double() * torch.randn(out.shape, generator=draws, dtype=torch.float64)).sum().backward()
    gradients = {name: value.grad for name, value in made.named_parameters() if value.grad is not None}
    return {"out": out.detach(), "x": x_BCHW.grad, **{name: grad.clone() for name, grad in gradients.items()}}


def plainly(made: ResnetBlock, x_BCHW: Tensor) -> dict[str, Tensor]:
    made.arithmetic = None
    try:
        return results(made, x_BCHW)
    finally:
        made.arithmetic = EAGER


@widths
@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "nhwc"])
def test_values_and_gradients_are_those_of_plain_layers(width, layout):
    made, x_BCHW = block(width), picture(layout=layout)
    ours, plain = results(made, x_BCHW), plainly(made, x_BCHW)
    assert ours.keys() == plain.keys()
    assert len(ours) == 2 + len(list(made.parameters()))
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12 * float(value.abs().max()), msg=name)
    assert ours["out"].is_contiguous(memory_format=layout)


def test_gradients_are_those_of_differences():
    made, x_BCHW = block(12), picture(1)[:, :, :3, :3].requires_grad_()
    assert gradcheck(lambda x, *_: passed(made, x), (x_BCHW, *made.parameters()), fast_mode=True)


FROZEN = (
    ["norm1.weight", "norm1.bias", "conv1.weight", "conv1.bias"], ["conv1.bias"], ["conv2.weight", "conv2.bias"],
    ["conv_shortcut.weight"], ["conv2.bias"], ["conv_shortcut.bias"], ["norm2.weight", "norm2.bias"],
)  # fmt: skip


@each_row(*itertools.product(FROZEN, [True, False]))
def test_frozen_parameters_get_no_gradients_and_change_none(frozen, of_input):
    made, x_BCHW = block(12), picture()
    whole = results(made, x_BCHW)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    made.zero_grad()
    draws = torch.Generator().manual_seed(2)
    x_BCHW = x_BCHW.requires_grad_(of_input)
    out = passed(made, x_BCHW)
    (out * torch.randn(out.shape, generator=draws, dtype=torch.float64)).sum().backward()
    for name, parameter in made.named_parameters():
        assert (parameter.grad is None) == (name in frozen)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-12, atol=1e-12)
    assert (x_BCHW.grad is not None) == of_input


@widths
def test_under_autocast_the_error_is_that_of_plain_layers(width):
    """Beside fp64, bf16 loses no more than plain layers do, up to a factor for the few roundings in another place, and
    two units of 8 bits for gradients of eight biases, sums that cancel: from picture to picture and from processor to
    processor, plain layers lose 0.002 to 0.012 of them."""
    made, x_BCHW = block(width), picture()
    right = plainly(made, x_BCHW)
    made.float()
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = (work(made, x_BCHW.bfloat16()) for work in (results, plainly))
    assert ours["out"].dtype == plain["out"].dtype == torch.bfloat16
    for name, value in right.items():
        error, theirs = (float((found[name].double() - value).norm() / value.norm()) for found in (ours, plain))
        assert error <= 1.5 * theirs + 2 * 2**-8, name


def test_what_is_kept_is_two_inputs_and_statistics():
    """Of a picture in bf16: the inputs of the two norms, and mean and deviation of 4 groups for each of them."""
    made, x_BCHW, kept = block(8, torch.float32), picture().bfloat16().requires_grad_(), []
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda one: one):
        made(Features(x_BCHW))
    mine = {parameter.data_ptr() for parameter in made.parameters()}
    sizes = sorted(one.numel() * one.element_size() for one in kept if one.data_ptr() not in mine)
    assert sizes == [2 * 4 * 4] * 4 + [2 * x_BCHW.numel()] * 2
