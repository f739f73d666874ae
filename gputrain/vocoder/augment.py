"""What is done to crops on the device, before a step: other loudness, other speed. All of it is drawn for the whole
batch at once.

Shapes: B items, T samples of a crop, R samples that were read for it (R >= T where it may be played faster), F frames.
"""

import torch
from torch import Tensor

from gputrain.audio.mel import play_at

QUIETEST, LOUDEST = -3.0, 3.0  # natural logarithms of the factors by which a volume changes


def change_volume(wave_BT: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """A `share` of the items at another loudness, from a twentieth to as loud as fits full scale."""
    peak_B = wave_BT.abs().amax(dim=1) + 1e-5
    highest_B = (-peak_B.log()).clamp(max=LOUDEST)
    chosen_B, at_B = _drawn(wave_BT, draws), _drawn(wave_BT, draws)
    change_B = QUIETEST + (highest_B - QUIETEST) * at_B
    return wave_BT * torch.where(chosen_B < share, change_B, 0.0).exp()[:, None]


def change_key(
    wave_BR: Tensor, f0_BR: Tensor, frames: int, share: float, slowest: float, fastest: float, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Crops (B, T) of `frames` and their pitch (B, F): a `share` of the items is played at another speed, which changes
    pitch and formants together, as on a tape."""
    hop_size = wave_BR.shape[1] // f0_BR.shape[1]
    chosen_B, at_B = _drawn(wave_BR, draws), _drawn(wave_BR, draws)
    speed_B = torch.where(chosen_B < share, slowest + (fastest - slowest) * at_B, 1.0)
    wave_BT = play_at(wave_BR, speed_B, frames * hop_size, fastest=fastest)
    return wave_BT, speed_B[:, None] * _pitch_at(f0_BR, speed_B, frames)


def _pitch_at(f0_BR: Tensor, speed_B: Tensor, frames: int) -> Tensor:
    """The pitch in the middle of each frame: on a line between voiced neighbours, that of the nearer one elsewhere."""
    at_BF = (torch.arange(frames, device=f0_BR.device, dtype=f0_BR.dtype) + 0.5) * speed_B[:, None] - 0.5
    at_BF = at_BF.clamp(0, f0_BR.shape[1] - 1)
    before_BF = at_BF.floor().long()
    after_BF = (before_BF + 1).clamp(max=f0_BR.shape[1] - 1)
    share_BF = at_BF - before_BF
    low_BF, high_BF = f0_BR.gather(1, before_BF), f0_BR.gather(1, after_BF)
    nearer_BF = torch.where(share_BF < 0.5, low_BF, high_BF)
    return torch.where((low_BF > 0) & (high_BF > 0), torch.lerp(low_BF, high_BF, share_BF), nearer_BF)


def _drawn(like_BT: Tensor, draws: torch.Generator) -> Tensor:
    """B numbers in [0, 1), of the same random numbers whatever the precision."""
    return torch.rand(len(like_BT), generator=draws, device=like_BT.device).to(like_BT.dtype)
