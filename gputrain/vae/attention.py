"""Single-head attention of any width, in memory that is linear in the number of tokens.

torch's flash and cuDNN kernels for CUDA support heads of up to 256 channels, and the autoencoder's has 512. torch
chooses among its other kernels by GPU, dtype and build, down to one that materialises all T x T scores: 17 GB at 2048
pixels. This implementation computes the scores of a block of queries at a time, and recomputes them in the backward
pass (arXiv:2112.05682), so it takes the same memory on every GPU, and fake tensors show that memory to the planner.

Shape suffixes: B items, T tokens, I queries of a block, C channels.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SCORES = 2**26  # Maximum number of scores in a block: 256 MB in fp32; 4 pictures of 512 pixels fit into one block.


def attention(q_BTC: Tensor, k_BTC: Tensor, v_BTC: Tensor, *, fused: bool) -> Tensor:
    """Returns softmax(q k^T / sqrt(C)) v, (B, T, C), by torch's fused kernel or in blocks. On the CPU, the fused kernel
    supports heads of any width and does not materialise T x T scores."""
    if fused:
        return F.scaled_dot_product_attention(q_BTC.unsqueeze(1), k_BTC.unsqueeze(1), v_BTC.unsqueeze(1)).squeeze(1)
    return _in_blocks(q_BTC, k_BTC, v_BTC)


class _BlockwiseAttention(torch.autograd.Function):
    """Scores, their exponentials and all sums are in fp32 at least; the factors of products have the dtype of the
    inputs, as in the fused kernels."""

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
                # The gradient of a softmax's input is its output times (gradient of the output - weighted mean of it).
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
    """Yields blocks of queries with at most SCORES scores over all items, and at least one query."""
    B, T, _ = q_BTC.shape
    step = max(1, SCORES // (B * T))
    return (slice(start, min(start + step, T)) for start in range(0, T, step))


def _scores(q_BIC: Tensor, k_BTC: Tensor) -> Tensor:
    return _product(q_BIC, k_BTC.mT).mul_(q_BIC.shape[2] ** -0.5)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b of two batches of matrices, accumulated in fp32 at least; 16-bit factors need CUDA."""
    dtype = _exact_dtype(a)
    return torch.bmm(a, b) if a.dtype == dtype else torch.bmm(a, b, out_dtype=dtype)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
