"""Augments crops on the device before a step: loudness and speed. Random numbers are drawn for the whole batch at once.

Shapes: B items, T samples of a crop, R samples that were read for it (R >= T if it may be played faster), F frames.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.engine.distributed import BatchDraws

LOBES = 24  # Zero crossings of the resampling sinc to each side.
QUIETEST, LOUDEST = -3.0, 3.0  # Natural logarithms of the limits of the volume factor.


def change_volume(wave_BT: Tensor, share: float, draws: BatchDraws) -> Tensor:
    """Scales a `share` of the items by random factors between 1/20 and 20 that keep them within full scale."""
    peak_B = wave_BT.abs().amax(dim=1) + 1e-5
    highest_B = (-peak_B.log()).clamp(max=LOUDEST)
    chosen_B, at_B = (draws.uniform().to(wave_BT.dtype) for _ in range(2))
    change_B = QUIETEST + (highest_B - QUIETEST) * at_B
    return wave_BT * torch.where(chosen_B < share, change_B, 0.0).exp()[:, None]


def change_key(
    wave_BR: Tensor, f0_BR: Tensor, frames: int, share: float, slowest: float, fastest: float, draws: BatchDraws
) -> tuple[Tensor, Tensor]:
    """Crops (B, T) of `frames` and their pitch (B, F): a `share` of the items is played at another speed, which changes
    pitch and formants together, as on a tape."""
    hop_size = wave_BR.shape[1] // f0_BR.shape[1]
    chosen_B, at_B = (draws.uniform().to(wave_BR.dtype) for _ in range(2))
    speed_B = torch.where(chosen_B < share, slowest + (fastest - slowest) * at_B, 1.0)
    wave_BT = play_at(wave_BR, speed_B, frames * hop_size, fastest=fastest)
    return wave_BT, speed_B[:, None] * _pitch_at(f0_BR, speed_B, frames)


def _pitch_at(f0_BR: Tensor, speed_B: Tensor, frames: int) -> Tensor:
    """Returns the pitch in the middle of each frame: interpolated if both neighbours are voiced, else the nearer."""
    at_BF = (torch.arange(frames, device=f0_BR.device, dtype=f0_BR.dtype) + 0.5) * speed_B[:, None] - 0.5
    at_BF = at_BF.clamp(0, f0_BR.shape[1] - 1)
    before_BF = at_BF.floor().long()
    after_BF = (before_BF + 1).clamp(max=f0_BR.shape[1] - 1)
    share_BF = at_BF - before_BF
    low_BF, high_BF = f0_BR.gather(1, before_BF), f0_BR.gather(1, after_BF)
    nearer_BF = torch.where(share_BF < 0.5, low_BF, high_BF)
    return torch.where((low_BF > 0) & (high_BF > 0), torch.lerp(low_BF, high_BF, share_BF), nearer_BF)


def play_at(wave_BR: Tensor, speed_B: Tensor, samples: int, *, fastest: float) -> Tensor:
    """Returns the first `samples` of each wave played `speed_B` times as fast: (B, samples), padded with silence.

    Each sample is a sum over a Hann-windowed sinc (Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/
    resample/) of LOBES zero crossings a side, which is wider where the speed needs a lower cutoff. Speed 1 leaves the
    wave unchanged. No speed may be above `fastest`.
    """
    at_BT = torch.arange(samples, device=wave_BR.device, dtype=wave_BR.dtype) * speed_B[:, None]
    cutoff_B1 = speed_B[:, None].clamp(min=1).reciprocal()
    first_BT = at_BT.floor()
    reach = math.ceil(LOBES * max(1.0, fastest))
    padded_BR = F.pad(wave_BR, (reach, reach + max(0, math.ceil(samples * fastest) - wave_BR.shape[1])))
    played_BT = torch.zeros_like(at_BT)
    for offset in range(1 - reach, reach + 1):
        distance_BT = cutoff_B1 * (first_BT + offset - at_BT)
        window_BT = torch.cos(0.5 * math.pi * (distance_BT / LOBES).clamp(-1, 1)) ** 2
        sample_BT = padded_BR.gather(1, first_BT.long() + (reach + offset))
        played_BT += cutoff_B1 * torch.sinc(distance_BT) * window_BT * sample_BT
    return played_BT
