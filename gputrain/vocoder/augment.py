"""Augments crops on the device before a step: loudness, speed, and other pitches than those of their mels (pc_aug).
Random numbers are drawn for the whole batch at once.

Shapes: B items of a part, S of them shifted, W = B + 3 S waves, T samples of a crop, R samples that were read for it
(R >= T if it may be played faster), F frames, M mel bands, 1 channel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.engine.distributed import BatchDraws
from gputrain.vocoder.generator import Noise

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


# ------------------------------------------------------------------------------------------------------ shifted pitches


Vocoder = Callable[[Tensor, Tensor, Noise], Tensor]  # Maps mel (B, M, F), f0 (B, F) and noise to waves (B, 1, T).
EACH = 3  # Additional waves for each shifted item.


@dataclass(frozen=True)
class Shifts:
    """The shifted items of a batch, or a part of it, and their shifts, as in openvpi's PC-NSF-HiFiGAN.

    There is no recording of a mel at another pitch, but there are two consistency conditions (shifts in semitones):
    - a shift by c and, from the log-mel of the result, by -c gives the recording;
    - a shift by a and, from the log-mel of the result, by c - a equals a shift by c at once.
    """

    places: tuple[int, ...]  # The S indices in the part.
    items_S: Tensor  # The same on the device, so that no step waits for a copy.
    once_S1: Tensor  # Shifts c, in semitones.
    half_S1: Tensor  # Shifts a.
    noise: Noise  # Noise of 3 S waves, the three of an item together.
    global_count: int  # Shifted items of the whole batch.

    def part(self, first: int, stop: int) -> "Shifts":
        low, high = (sum(place < end for place in self.places) for end in (first, stop))
        return replace(
            self,
            places=tuple(place - first for place in self.places[low:high]),
            items_S=self.items_S[low:high] - first,
            once_S1=self.once_S1[low:high],
            half_S1=self.half_S1[low:high],
            noise=Noise(*(tensor[EACH * low : EACH * high] for tensor in self.noise)),
        )


def draw_shifts(
    items: int, count: int, most: float, draws: torch.Generator, dtype: torch.dtype, noise: Callable[[int], Noise]
) -> Shifts:
    """Returns the shifts of `count` evenly spread items of a whole batch, within +-`most` semitones. `noise(n)` draws
    that of n waves. The numbers of shifted items in equal parts differ by at most one."""
    places = tuple(number * items // count for number in range(count))
    items_S = torch.arange(count, device=draws.device) * items // max(1, count)
    once_S1, half_S1 = (by.to(dtype) for by in draw_semitones(count, most, draws))
    return Shifts(places, items_S, once_S1, half_S1, noise(EACH * count), count)


def draw_semitones(count: int, most: float, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws c (S, 1) within +-`most`, and a such that both a and c - a are within +-`most`."""
    c_S1, at_S1 = (torch.rand(count, 1, generator=draws, device=draws.device) for _ in range(2))
    c_S1 = (2 * c_S1 - 1) * most
    lowest_S1, highest_S1 = c_S1.clamp(min=0) - most, c_S1.clamp(max=0) + most
    return c_S1, lowest_S1 + (highest_S1 - lowest_S1) * at_S1


def make_shifted(
    vocoder: Vocoder,
    to_mel: Callable[[Tensor], Tensor],
    mel_BMF: Tensor,
    f0_BF: Tensor,
    noise: Noise,
    shifts: Shifts,
    ceiling_hz: float,
) -> Tensor:
    """Returns waves (W, 1, T): one for each item, whose target is the recording; then the shifted items at c, at a, and
    at a and then c.

    They take two passes: the second generates the waves that are shifted twice, from `to_mel` of the first.
    """
    items = shifts.items_S
    f0_SF = f0_BF[items]
    once_SF, half_SF = ((f0_SF * 2 ** (by / 12)).clamp(max=ceiling_hz) for by in (shifts.once_S1, shifts.half_S1))
    half_noise, back_noise, twice_noise = (Noise(*(t[n::EACH] for t in shifts.noise)) for n in range(EACH))

    pitches = torch.cat([f0_BF.index_copy(0, items, once_SF), half_SF])
    first = vocoder(torch.cat([mel_BMF, mel_BMF[items]]), pitches, _joined(noise, half_noise))
    unshifted_B1T, half_S1T = first.tensor_split([len(mel_BMF)])
    once_S1T = unshifted_B1T[items]
    mels = to_mel(torch.cat([once_S1T, half_S1T]).squeeze(1))
    second = vocoder(mels, torch.cat([f0_SF, once_SF]), _joined(back_noise, twice_noise))
    back_S1T, twice_S1T = second.chunk(2)
    return torch.cat([unshifted_B1T.index_copy(0, items, back_S1T), once_S1T, half_S1T, twice_S1T])


class ComparedPairs(NamedTuple):
    """The P generated waves that have a target: B, or B + S with shifted items."""

    made_P1T: Tensor
    real_P1T: Tensor
    target_PMF: Tensor  # The log-mel of the target.


def compared_pairs(
    made_W1T: Tensor, real_B1T: Tensor, target_BMF: Tensor, shifts: Shifts, to_mel: Callable[[Tensor], Tensor]
) -> ComparedPairs:
    """Returns generated waves with what they should equal: recordings, and for those that are shifted twice, the ones
    that are shifted once. `to_mel` makes the log-mel of waves (S, 1, T)."""
    if not shifts.places:
        return ComparedPairs(made_W1T, real_B1T, target_BMF)
    twice_S1T, once_S1T = shifted_pair(made_W1T, shifts)
    return ComparedPairs(
        torch.cat([made_W1T[: len(real_B1T)], twice_S1T]),
        torch.cat([real_B1T, once_S1T]),
        torch.cat([target_BMF, to_mel(once_S1T)]),
    )


def shifted_pair(made_W1T: Tensor, shifts: Shifts) -> tuple[Tensor, Tensor]:
    """Returns the waves that are shifted twice and once, (S, 1, T) each, which should be equal."""
    _, once_S1T, _, twice_S1T = made_W1T.tensor_split([len(made_W1T) - n * len(shifts.places) for n in (3, 2, 1)])
    return twice_S1T, once_S1T


def _joined(*noises: Noise) -> Noise:
    return Noise(*(torch.cat(tensors) for tensors in zip(*noises, strict=True)))
