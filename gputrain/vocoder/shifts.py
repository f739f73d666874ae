"""Pitch-controllable training (pc_aug): synthesis at another pitch than that of the mel, as in openvpi's
PC-NSF-HiFiGAN.

There is no recording of a mel at another pitch, but there are two consistency conditions (shifts in semitones):
- a shift by c and, from the log-mel of the result, by -c gives the recording;
- a shift by a and, from the log-mel of the result, by c - a equals a shift by c at once.

Shapes: B items of a part, S of them shifted, W = B + 3 S waves, 1 channel, T samples, M mel bands, F frames.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gputrain.vocoder.generator import Noise

Vocoder = Callable[[Tensor, Tensor, Noise], Tensor]  # Maps mel (B, M, F), f0 (B, F) and noise to waves (B, 1, T).
EACH = 3  # Additional waves for each shifted item.


@dataclass(frozen=True)
class Shifts:
    """The shifted items of a batch, or a part of it, and their shifts."""

    places: tuple[int, ...]  # The S indices in the part.
    items_S: Tensor  # The same on the device, so that no step waits for a copy.
    once_S1: Tensor  # Shifts c, in semitones.
    half_S1: Tensor  # Shifts a.
    noise: Noise  # Noise of 3 S waves, the three of an item together.

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


def shifted_places(items: int, count: int, device: torch.device) -> tuple[tuple[int, ...], Tensor]:
    """Returns `count` evenly spread indices, on the CPU and on the device; equal parts differ by at most one."""
    places = tuple(number * items // count for number in range(count))
    return places, torch.arange(count, device=device) * items // max(1, count)


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


def _joined(*noises: Noise) -> Noise:
    return Noise(*(torch.cat(tensors) for tensors in zip(*noises, strict=True)))
