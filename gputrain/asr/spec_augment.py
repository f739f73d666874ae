"""SpecAugment and layer drop of a step, drawn for the whole batch from (seed, step).

transformers draws them inside the forward pass from numpy's and torch's global random state, so that they would depend
on how a batch is split.

Shapes: B clips, T frames, C channels, N positions.
"""

import numpy as np
import torch
from torch import Tensor

from gputrain.engine.distributed import BatchDraws


def masked_spans(draws: BatchDraws, counts_B: Tensor, most: int, *, share: float, length: int) -> Tensor:
    """Returns which of N = `most` positions lie in a masked span, boolean (items of this rank, N).

    An item of n positions, out of `counts_B` of this rank's items, has `share * n / length` spans at different starts,
    rounded up or down at random, as many as fit; they may overlap (Baevski et al. 2020, arXiv:2006.11477, appendix B).
    """
    starts_B1 = counts_B[:, None] - (length - 1)
    scores_BN = draws.normal(most, dtype=torch.float32)
    position_N = torch.arange(most, device=counts_B.device)
    scores_BN = scores_BN.masked_fill(position_N >= starts_B1, -torch.inf)
    spans_B1 = (share / length * counts_B[:, None] + draws.uniform()[:, None]).floor()
    spans_B1 = torch.minimum(spans_B1, starts_B1).clamp(min=0)
    ranks_BN = scores_BN.argsort(dim=1, descending=True, stable=True).argsort(dim=1, stable=True)
    begun_BN = (ranks_BN < spans_B1).cumsum(dim=1)
    ended_BN = torch.nn.functional.pad(begun_BN, (length, 0))[:, :most]
    return begun_BN > ended_BN


def dropped_layers(seed: int, step: int, layers: int, share: float) -> frozenset[int]:
    """Returns the layers that a step leaves out, each with the probability `share`."""
    if not share:
        return frozenset()
    # numpy guarantees that raw words do not change between versions (NEP 19).
    words = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(3, step))).random_raw(layers)
    return frozenset(np.flatnonzero((words >> np.uint64(11)) * 2.0**-53 < share).tolist())
