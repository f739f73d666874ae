"""Spectrograms of recordings, of what a vocoder made of them, and of the difference, in one picture.

Shape suffixes: T samples, M mel bands, F frames, H x W pixels, 3 colours.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.color import lab2rgb
from torch import Tensor

from gputrain.audio.mel import log_mel
from gputrain.vocoder.architecture import Mel

BAND_PIXELS = 2  # height of a mel band
GAP_PIXELS = 4
DIFFERENCE_DECADES = 2.0  # that is shown brightest: a magnitude of a hundred times, or of a hundredth
# Black, violet, red, orange, pale yellow: CIELAB's lightness rises evenly, so that equal steps look equal, and the
# picture reads in grey too.
ANCHORS_LAB = (
    (0, 0, 0), (12.5, 14, -22), (25, 34, -33), (37.5, 48, -16), (50, 52, 12),
    (62.5, 44, 38), (75, 24, 52), (87.5, 2, 48), (98, -6, 18),
)  # fmt: skip


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Tensor:
    """A uint8 picture (HW3): a column a clip (waves of T samples), and in it from the top the recording, what was made,
    and how far they are apart. Low frequencies are at the bottom.

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
    """Mel magnitudes (M, F) as powers of ten."""
    return log_mel(wave_T[None].float().cpu(), mel)[0] / math.log(10)


def coloured(share_MF: Tensor) -> Tensor:
    """Of values from 0 to 1: a picture (HW3, uint8), H = BAND_PIXELS * M, the last band at the top."""
    index_MF = (share_MF.clamp(0, 1) * 255).round().long().flip(0).repeat_interleave(BAND_PIXELS, dim=0)
    return torch.from_numpy(colour_map())[index_MF]


@cache
def colour_map() -> NDArray[np.uint8]:
    """256 colours (256, 3), evenly from dark to light."""
    anchors = np.array(ANCHORS_LAB, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    colours: NDArray[np.uint8] = np.rint(255 * lab2rgb(lab)).astype(np.uint8)
    return colours


def _joined(pictures: Sequence[Tensor], dim: int) -> Tensor:
    """Beside each other (1) or below each other (0), white between."""
    shape = list(pictures[0].shape)
    shape[dim] = GAP_PIXELS
    gap = torch.full(shape, 255, dtype=torch.uint8)
    return torch.cat([part for picture in pictures for part in (gap, picture)][1:], dim=dim)
