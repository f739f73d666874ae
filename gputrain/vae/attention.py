"""Single-head attention of any width, in memory that is linear in the number of tokens.

torch's flash and cuDNN kernels for CUDA support heads of up to 256 channels, and the autoencoder's has 512. torch
chooses among its other kernels by GPU, dtype and build, down to one that materialises all T x T scores: 17 GB at 2048
pixels. This implementation computes the scores of a block of queries at a time, and recomputes them in the backward
pass (arXiv:2112.05682), so it takes the same memory on every GPU, and fake tensors show that memory to the planner.

Shape suffixes: B items, T tokens, I queries of a block, C channels.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 2**26  # Maximum number of scores in a block: 256 MB in fp32; 4 pictures of 512 pixels fit into one block.


class ScoreArithmetic(NamedTuple):
    """The functions between the products of attention in blocks: `IN_PLACE`, or compiled versions that do not overwrite
    their inputs, which compiled code would have to write back."""

    powers: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def compiled(cls, compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "ScoreArithmetic":
        return cls(compile(_powers), compile(_score_gradients))


def _powers(
    products_BIT: Tensor, scale: float, dtype: torch.dtype, *, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the exponentials of the scores above the largest of their query in `dtype`, their sums, and the logarithm
    of the sum of the exponentials of the scores. `products_BIT` are the scores before scaling, whose memory is used if
    the function works `in_place`."""
    scores_BIT = products_BIT.mul_(scale) if in_place else products_BIT * scale
    largest_BI1 = scores_BIT.amax(dim=2, keepdim=True)
    powers_BIT = scores_BIT.sub_(largest_BI1).exp_()
    sums_BI1 = powers_BIT.sum(dim=2, keepdim=True)
    return powers_BIT.to(dtype), sums_BI1, sums_BI1.log() + largest_BI1


def _score_gradients(
    products_BIT: Tensor, log_sums_BI1: Tensor, weighted_BIT: Tensor, mean_BI1: Tensor, scale: float,
    dtype: torch.dtype, *, in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the shares of the values in each result and the gradient of the products, both in `dtype`. The memory of
    the first and the third argument is used if the function works `in_place`.

    The gradient of a softmax's input is its output times (gradient of the output - weighted mean of it).
    """
    shares_BIT = (products_BIT.mul_(scale) if in_place else products_BIT * scale).sub_(log_sums_BI1).exp_()
    factors = shares_BIT.to(dtype, copy=True)
    apart_BIT = weighted_BIT.sub_(mean_BI1) if in_place else weighted_BIT - mean_BI1
    return factors, shares_BIT.mul_(apart_BIT).mul_(scale).to(dtype)


IN_PLACE = ScoreArithmetic(partial(_powers, in_place=True), partial(_score_gradients, in_place=True))


def attention(q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, arithmetic: ScoreArithmetic | None = IN_PLACE) -> Tensor:
    """Returns softmax(q k^T / sqrt(C)) v, (B, T, C), in blocks, or with None by torch's own function."""
    if arithmetic is None:
        return F.scaled_dot_product_attention(q_BTC.unsqueeze(1), k_BTC.unsqueeze(1), v_BTC.unsqueeze(1)).squeeze(1)
    return _in_blocks(q_BTC, k_BTC, v_BTC, arithmetic)


class _BlockwiseAttention(torch.autograd.Function):
    """Scores, their exponentials and all sums are in fp32 at least; the factors of products have the dtype of the
    inputs, as in the fused kernels."""

    @staticmethod
    def forward(ctx: Any, q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, arithmetic: ScoreArithmetic) -> Tensor:
        out_BTC = torch.empty_like(q_BTC)
        log_sums_BT1 = q_BTC.new_empty((*q_BTC.shape[:2], 1), dtype=_exact_dtype(q_BTC))
        scale = q_BTC.shape[2] ** -0.5
        with torch.autocast(q_BTC.device.type, enabled=False):
            for rows in _blocks(q_BTC):
                products_BIT = _product(q_BTC[:, rows], k_BTC.mT)
                powers_BIT, sums_BI1, log_sums_BI1 = arithmetic.powers(products_BIT, scale, v_BTC.dtype)
                del products_BIT
                out_BTC[:, rows] = _product(powers_BIT, v_BTC).div_(sums_BI1)
                log_sums_BT1[:, rows] = log_sums_BI1
                del powers_BIT
        ctx.save_for_backward(q_BTC, k_BTC, v_BTC, out_BTC, log_sums_BT1)
        ctx.arithmetic = arithmetic
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor | None, ...]:
        q_BTC, k_BTC, v_BTC, out_BTC, log_sums_BT1 = ctx.saved_tensors
        grad_q_BTC = torch.empty_like(q_BTC)
        grad_k_BTC, grad_v_BTC = (torch.zeros_like(x_BTC, dtype=_exact_dtype(x_BTC)) for x_BTC in (k_BTC, v_BTC))
        scale = q_BTC.shape[2] ** -0.5
        with torch.autocast(q_BTC.device.type, enabled=False):
            for rows in _blocks(q_BTC):
                grad_BIC = grad_BTC[:, rows]
                mean_BI1 = (grad_BIC * out_BTC[:, rows].to(_exact_dtype(q_BTC))).sum(dim=2, keepdim=True)
                products_BIT, weighted_BIT = _product(q_BTC[:, rows], k_BTC.mT), _product(grad_BIC, v_BTC.mT)
                shares_BIT, grad_scores_BIT = ctx.arithmetic.gradients(
                    products_BIT, log_sums_BT1[:, rows], weighted_BIT, mean_BI1, scale, q_BTC.dtype
                )
                del products_BIT, weighted_BIT
                grad_v_BTC += _product(shares_BIT.mT, grad_BIC)
                grad_q_BTC[:, rows] = _product(grad_scores_BIT, k_BTC)
                grad_k_BTC += _product(grad_scores_BIT.mT, q_BTC[:, rows])
                del shares_BIT, grad_scores_BIT
        return grad_q_BTC, grad_k_BTC.to(k_BTC.dtype), grad_v_BTC.to(v_BTC.dtype), None


_in_blocks: Callable[..., Tensor] = _BlockwiseAttention.apply


def _blocks(q_BTC: Tensor) -> Iterator[slice]:
    """Yields blocks of queries with at most SCORES scores over all items, and at least one query."""
    B, T, _ = q_BTC.shape
    step = max(1, SCORES // (B * T))
    return (slice(start, min(start + step, T)) for start in range(0, T, step))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b of two batches of matrices, accumulated in fp32 at least."""
    dtype = _exact_dtype(a)
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if type(a) is Tensor and not a.is_cuda:  # Only CUDA has the product of 16-bit factors with a result in fp32.
        return torch.bmm(a.to(dtype), b.to(dtype))
    return torch.bmm(a, b, out_dtype=dtype)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
