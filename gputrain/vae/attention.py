"""Attention in a single head of any width, in memory that grows with the number of tokens and not with its square.

Of torch's fused kernels for CUDA, flash and cuDNN's take heads of a width of up to 256, and the autoencoder has one of
512. What is left is chosen by card, dtype and build, down to one that makes all T x T scores: 17 GB of them at 2048
pixels. Here the scores of some queries at a time are made, and made again in the backward pass (arXiv:2112.05682), so
that every card takes the same memory, which the planner's run on shapes sees.

Shape suffixes: B items, T tokens, I of them that ask at once, C channels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 2**26  # of a block at the most: 256 MB in fp32; all of them up to 512 pixels with 4 pictures at once


def attention(q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, *, fused: bool) -> Tensor:
    """softmax(q k^T / sqrt(C)) v as (B, T, C), by torch's fused kernel or in blocks. On the CPU, the fused kernel takes
    heads of any width and makes no T x T scores."""
    if fused:
        return F.scaled_dot_product_attention(q_BTC.unsqueeze(1), k_BTC.unsqueeze(1), v_BTC.unsqueeze(1)).squeeze(1)
    return _in_blocks(q_BTC, k_BTC, v_BTC)


class _BlockwiseAttention(torch.autograd.Function):
    """Scores, their exponentials and all sums are in fp32 at least; the factors of products in the dtype that came in,
    as in the fused kernels."""

    @staticmethod
    def forward(ctx: Any, q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor) -> Tensor:
        out_BTC = torch.empty_like(q_BTC)
        log_sums_BT1 = q_BTC.new_empty((*q_BTC.shape[:2], 1), dtype=_exact_dtype(q_BTC))
        with torch.autocast(q_BTC.device.type, enabled=False):
            for rows in _blocks(q_BTC):
                scores_BIT = _scores(q_BTC[:, rows], k_BTC)
                largest_BI1 = scores_BIT.amax(dim=2, keepdim=True)
                powers_BIT = scores_BIT.sub_(largest_BI1).exp_()
                sums_BI1 = powers_BIT.sum(dim=2, keepdim=True)
                out_BTC[:, rows] = _product(powers_BIT.to(v_BTC.dtype), v_BTC).div_(sums_BI1)
                log_sums_BT1[:, rows] = sums_BI1.log_().add_(largest_BI1)
                del scores_BIT, powers_BIT
        ctx.save_for_backward(q_BTC, k_BTC, v_BTC, out_BTC, log_sums_BT1)
        return out_BTC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTC, k_BTC, v_BTC, out_BTC, log_sums_BT1 = ctx.saved_tensors
        grad_q_BTC = torch.empty_like(q_BTC)
        grad_k_BTC, grad_v_BTC = (torch.zeros_like(x_BTC, dtype=_exact_dtype(x_BTC)) for x_BTC in (k_BTC, v_BTC))
        with torch.autocast(q_BTC.device.type, enabled=False):
            for rows in _blocks(q_BTC):
                shares_BIT = _scores(q_BTC[:, rows], k_BTC).sub_(log_sums_BT1[:, rows]).exp_()
                grad_v_BTC += _product(shares_BIT.to(v_BTC.dtype).mT, grad_BTC[:, rows])
                # The gradient of a softmax is its output times how far its own gradient is from their mean.
                mean_BI1 = (grad_BTC[:, rows] * out_BTC[:, rows].to(_exact_dtype(q_BTC))).sum(dim=2, keepdim=True)
                shares_BIT *= _product(grad_BTC[:, rows], v_BTC.mT).sub_(mean_BI1)
                grad_scores_BIT = shares_BIT.mul_(q_BTC.shape[2] ** -0.5).to(q_BTC.dtype)
                del shares_BIT
                grad_q_BTC[:, rows] = _product(grad_scores_BIT, k_BTC)
                grad_k_BTC += _product(grad_scores_BIT.mT, q_BTC[:, rows])
                del grad_scores_BIT
        return grad_q_BTC, grad_k_BTC.to(k_BTC.dtype), grad_v_BTC.to(v_BTC.dtype)


_in_blocks: Callable[..., Tensor] = _BlockwiseAttention.apply


def _blocks(q_BTC: Tensor) -> Iterator[slice]:
    """Stretches of queries whose scores, of all items, are at most SCORES; one query at the least."""
    B, T, _ = q_BTC.shape
    step = max(1, SCORES // (B * T))
    return (slice(start, min(start + step, T)) for start in range(0, T, step))


def _scores(q_BIC: Tensor, k_BTC: Tensor) -> Tensor:
    return _product(q_BIC, k_BTC.mT).mul_(q_BIC.shape[2] ** -0.5)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two batches of matrices, summed and returned in fp32 at least; 16-bit factors on CUDA alone."""
    dtype = _exact_dtype(a)
    return torch.bmm(a, b) if a.dtype == dtype else torch.bmm(a, b, out_dtype=dtype)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
