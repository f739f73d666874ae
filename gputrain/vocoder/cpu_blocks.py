"""Element-wise functions of the fast discriminators on a CPU, in blocks of rows that stay in its cache.

torch's functions pass over all of a tensor one after the other, and on a CPU the memory limits each pass. Here a block
of rows takes all passes before the next one. Shapes: N rows, C channels, H halves of the channels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 17  # So many numbers of each operand form a block: 0.5 MB in fp32.


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields blocks of rows of all tensors, ...C, which have the same rows."""
    rows = max(1, BLOCK // max(tensor.shape[-1] for tensor in tensors))
    parts = [torch.split(tensor.view(-1, tensor.shape[-1]), rows) for tensor in tensors]
    yield from zip(*parts, strict=True)


class BlockwiseGate(torch.autograd.Function):
    """The product of two halves of the channels, each bounded by softsign: ...(2 H) to ...H. Saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        half = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], half)
        for x_NC, out_NH in blocks(x, out):
            soft_NC = x_NC.abs().add_(1)
            torch.div(x_NC, soft_NC, out=soft_NC)
            torch.mul(soft_NC[:, :half], soft_NC[:, half:], out=out_NH)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Softsign is x / (1 + |x|), its slope 1 / (1 + |x|)^2: with a and b the inverses of 1 + |x| of both halves, v
        and w, the gradients are grad a b (w a) and grad a b (v b)."""
        (x,) = ctx.saved_tensors
        half = x.shape[-1] // 2
        gradient = torch.empty_like(x)
        for x_NC, grad_NH, gradient_NC in blocks(x, grad.contiguous(), gradient):
            inverse_NC = x_NC.abs().add_(1).reciprocal_()
            common_NH = (inverse_NC[:, :half] * inverse_NC[:, half:]).mul_(grad_NH)
            inverse_NC.view(-1, 2, half).mul_(common_NH[:, None])
            torch.mul(inverse_NC[:, :half], x_NC[:, half:], out=gradient_NC[:, :half])
            torch.mul(inverse_NC[:, half:], x_NC[:, :half], out=gradient_NC[:, half:])
        return gradient


class BlockwiseUnitPower(torch.autograd.Function):
    """Divides ...C by the root of its mean square plus eps. Saves its output, which the next layer saves as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, factor = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        for x_NC, out_NC, factor_N1 in blocks(x, out, factor):
            torch.linalg.vector_norm(x_NC, dim=1, keepdim=True, out=factor_N1)
            factor_N1.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            torch.mul(x_NC, factor_N1, out=out_NC)
        ctx.save_for_backward(out, factor)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """With y the output and f the factor, the gradient is f (grad - y mean(y grad))."""
        out, factor = ctx.saved_tensors
        gradient = torch.empty_like(out)
        for out_NC, factor_N1, grad_NC, gradient_NC in blocks(out, factor, grad.contiguous(), gradient):
            mean_N1 = (out_NC * grad_NC).mean(dim=1, keepdim=True)
            torch.addcmul(grad_NC, out_NC, mean_N1, value=-1, out=gradient_NC).mul_(factor_N1)
        return gradient, None
