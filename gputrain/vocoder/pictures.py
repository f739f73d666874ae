"""Draws spectrograms of recordings, of their synthesis, and of the difference, in one picture.

Shape suffixes: T samples, M mel bands, F frames, H x W pixels, 3 colours.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.audio.pictures import GAP_PIXELS, coloured

DIFFERENCE_DECADES = 2.0  # Difference shown brightest: a factor of 100 in magnitude.


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Tensor:
    """Returns a uint8 picture (HW3) with a column for each clip (waves of T samples): from the top, the recording, the
    synthesised wave, and their difference. Low frequencies are at the bottom.

    `vmin` and `vmax` are the mel magnitudes that are shown darkest and brightest, as powers of ten. The difference is
    that of these powers, from 0 to DIFFERENCE_DECADES.
    """
    columns = []
    for real_T, made_T in zip(real_waves, made_waves, strict=True):
        real_MF, made_MF = (_decades(wave_T, mel) for wave_T in (real_T, made_T))
        rows = [
            coloured((real_MF - vmin) / (vmax - vmin)),
            coloured((made_MF - vmin) / (vmax - vmin)),
            coloured((real_MF - made_MF).abs() / DIFFERENCE_DECADES),
        ]
        columns.append(_joined(rows, dim=0))
    tallest = max(len(column) for column in columns)
    columns = [torch.nn.functional.pad(column, (0, 0, 0, 0, 0, tallest - len(column)), value=255) for column in columns]
    return _joined(columns, dim=1)


def _decades(wave_T: Tensor, mel: Mel) -> Tensor:
    """Returns mel magnitudes (M, F) as powers of ten."""
    return log_mel(wave_T[None].float().cpu(), mel)[0] / math.log(10)


def _joined(pictures: Sequence[Tensor], dim: int) -> Tensor:
    """Joins pictures next to each other (dim 1) or below each other (dim 0), with white gaps."""
    shape = list(pictures[0].shape)
    shape[dim] = GAP_PIXELS
    gap = torch.full(shape, 255, dtype=torch.uint8)
    return torch.cat([part for picture in pictures for part in (gap, picture)][1:], dim=dim)
