"""Colours of spectrograms. Shape suffixes: M mel bands, F frames, H x W pixels, 3 colours."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BAND_PIXELS = 2  # Height of a mel band.
GAP_PIXELS = 4
# The colours are black, violet, red, orange and pale yellow. CIELAB's lightness rises evenly, so that equal steps look
# equal, and the picture is readable in grey too.
ANCHORS_LAB = (
    (0, 0, 0), (12.5, 14, -22), (25, 34, -33), (37.5, 48, -16), (50, 52, 12),
    (62.5, 44, 38), (75, 24, 52), (87.5, 2, 48), (98, -6, 18),
)  # fmt: skip


def coloured(share_MF: Tensor) -> Tensor:
    """Returns values from 0 to 1 as a picture (HW3, uint8), H = BAND_PIXELS * M, with the last band at the top."""
    index_MF = (share_MF.clamp(0, 1) * 255).round().long().flip(0).repeat_interleave(BAND_PIXELS, dim=0)
    return torch.from_numpy(colour_map())[index_MF]


@cache
def colour_map() -> NDArray[np.uint8]:
    """Returns 256 colours (256, 3), evenly from dark to light."""
    from skimage.color import lab2rgb

    anchors = np.array(ANCHORS_LAB, dtype=np.float64)
    at = np.linspace(0, len(anchors) - 1, 256)
    lab = np.stack([np.interp(at, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    colours: NDArray[np.uint8] = np.rint(255 * lab2rgb(lab)).astype(np.uint8)
    return colours
