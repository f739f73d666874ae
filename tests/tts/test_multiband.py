"""The multi-band head compared with torch.istft, and the filter bank with its input."""

import math

import pytest
import torch
from torch import Tensor

from gputrain.tts.decoder import FilterBank, InverseSTFT
from tests.tables import each_row


@each_row((16, 4), (20, 5))
def test_the_inverse_transform_is_that_of_torch(n_fft: int, hop_size: int) -> None:
    torch.manual_seed(0)
    for frames in (2, 9, 40):
        magnitude = torch.randn(2, 4, n_fft // 2 + 1, frames).exp()
        phase = math.pi * torch.randn(2, 4, n_fft // 2 + 1, frames).sin()
        ours_BKL = InverseSTFT(4, n_fft, hop_size)(magnitude, phase)
        theirs = torch.istft(
            torch.polar(magnitude, phase).flatten(0, 1), n_fft, hop_size, window=torch.hann_window(n_fft)
        )
        assert ours_BKL.shape == (2, 4, hop_size * (frames - 1))
        assert (ours_BKL.flatten(0, 1) - theirs).abs().max() < 1e-5


def decibels(part: Tensor, of: Tensor) -> float:
    return 10 * math.log10(part.square().mean() / of.square().mean())


def analysis(bank: FilterBank, wave_B1T: Tensor) -> Tensor:
    """Returns the bands of a wave from low to high, (B, K, L), L = T // K."""
    return torch.nn.functional.conv1d(wave_B1T, bank.filters, stride=bank.bands, padding=bank.taps // 2)


def test_bands_make_the_wave_that_they_came_of() -> None:
    """White noise is reconstructed with an error of -64 dB, except at its ends."""
    torch.manual_seed(0)
    wave_B1T = torch.randn(2, 1, 8192)
    bank = FilterBank(4)
    bands_BKL = analysis(bank, wave_B1T)
    back_B1T = bank(bands_BKL)
    assert bands_BKL.shape == (2, 4, 2048)
    assert back_B1T.shape == wave_B1T.shape
    middle = (..., slice(200, -200))
    assert decibels((back_B1T - wave_B1T)[middle], wave_B1T[middle]) == pytest.approx(-64.0, abs=0.3)


@each_row(*range(4))
def test_a_tone_lies_in_its_band(band: int) -> None:
    """A band has the amplitude of the wave, 70 dB above the other bands."""
    cycles = (band + 0.5) / 8  # per sample, in the middle of the band
    tone_B1T = torch.sin(2 * math.pi * cycles * torch.arange(8192.0))[None, None]
    bands_KL = analysis(FilterBank(4), tone_B1T)[0, :, 50:-50]
    assert decibels(bands_KL[band], tone_B1T) == pytest.approx(0, abs=0.1)
    assert max(decibels(bands_KL[other], tone_B1T) for other in range(4) if other != band) < -70
