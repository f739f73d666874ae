"""The fake card itself: what it lets pass, and what it refuses as torch does on a real one."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tests.fake_cuda.device import UNAVAILABLE, fake_cuda
from tests.tables import each_row

pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)


class Doubled(torch.autograd.Function):
    """Doubles its input; its backward pass returns a given tensor."""

    @staticmethod
    def forward(ctx, x, wrong):
        ctx.wrong = wrong
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return (torch.ones(grad.shape) if ctx.wrong else 2 * grad), None


def test_backward_passes_run_on_fake_tensors_of_the_device():
    with fake_cuda():
        conv = nn.Conv2d(8, 4, 3, padding=1).to("cuda").to(memory_format=torch.channels_last)
        x = torch.randn(2, 8, 16, 16).to("cuda").contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = Doubled.apply(conv(x), False)
        assert (y.dtype, y.device, y.is_cuda) == (torch.bfloat16, torch.device("cuda", 0), True)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.float().mean().backward()
        gradient = conv.weight.grad
        assert (gradient.dtype, gradient.device) == (torch.float32, torch.device("cuda", 0))
        assert gradient.stride() == conv.weight.stride()


def test_tensors_of_two_devices_are_refused_in_forward_and_backward_passes():
    with fake_cuda():
        x = torch.randn(4, 3, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        y = Doubled.apply(x @ torch.ones(3, 2, device="cuda"), True).sum()
        with pytest.raises(RuntimeError, match="same device"):
            y.backward()


@each_row(
    (lambda x: x.sum().item(), "device to host"),
    (lambda x: x.tolist(), "device to host"),
    (lambda x: bool(x.sum() > 0), "device to host"),
    (lambda x: x.cpu(), "device to host"),
    (lambda x: x.to("cpu"), "device to host"),
    (lambda x: torch.arange(x.max(), device="cuda"), "device to host"),
    (lambda x: torch.ones(3).to(x.device), "host to device"),
    (lambda x: torch.tensor([1.0, 2.0], device="cuda"), "host to device"),
    (lambda x: x.new_tensor([1.0]), "host to device"),
    (lambda x: x[[0, 1]], "host to device"),
    (lambda x: x * torch.tensor(2.0), ""),  # A number is an argument of the kernel.
    (lambda x: x.new_zeros(3), ""),
    (lambda x: torch.where(x > 0, x, 0.0).sum(), ""),
)
def test_copies_between_the_sides_are_noted(read, direction):
    with fake_cuda() as card:
        x = torch.zeros(3, device="cuda")
        with card.watched() as copies:
            read(x)
        assert {copy.direction for copy in copies.made} == ({direction} if direction else set())


def test_torch_is_as_before_when_the_block_is_left():
    state = torch.get_rng_state()
    with fake_cuda():
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(3)
    assert not torch.cuda.is_available()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.zeros(2).sum().item() == 0
