"""Tests which items pc_aug shifts, by how much, and the resulting waves."""

import itertools

import pytest
import torch

from gputrain.vocoder.augment import Shifts, draw_semitones, make_shifted, shifted_places
from gputrain.vocoder.generator import Noise
from tests.tables import each_row


@each_row((8, 4), (8, 3), (5, 5), (32, 13), (1, 1), (4, 0))
def test_places_are_spread_evenly(items, count):
    places, on_device = shifted_places(items, count, torch.device("cpu"))
    assert on_device.tolist() == list(places)
    assert len(set(places)) == count
    assert all(0 <= place < items for place in places)
    for parts in range(1, items + 1):
        ends = [items * part // parts for part in range(parts + 1)]
        held = [sum(a <= place < b for place in places) for a, b in itertools.pairwise(ends)]
        sizes = [b - a for a, b in itertools.pairwise(ends)]
        for number, size in zip(held, sizes, strict=True):
            assert abs(number - size * count / items) < 1


def test_no_shift_goes_beyond_what_is_asked_for():
    once, half = draw_semitones(20_000, 5.0, torch.Generator().manual_seed(0))
    for by in (once, half, once - half):
        assert by.abs().max() <= 5.0 + 1e-5
    assert once.mean().abs() < 0.1
    assert once.std() == pytest.approx(10 / 12**0.5, rel=0.02)  # Uniform over 10 semitones.
    assert half.abs().max() > 4.5


class Recorder:
    """A vocoder whose wave is its pitch, frame by frame, plus a hundredth of the first mel band."""

    def __init__(self):
        self.calls = []

    def __call__(self, mel_BMF, f0_BF, noise):
        self.calls.append((mel_BMF, f0_BF, noise))
        return (f0_BF + 0.01 * mel_BMF[:, 0])[:, None]


def noise_of(values):
    return Noise(torch.zeros(len(values), 0), torch.zeros(len(values), 0, 0), torch.tensor(values)[:, None, None])


def test_what_is_made_of_what():
    mel = torch.arange(4.0).view(4, 1, 1).repeat(1, 3, 5)
    f0 = torch.tensor([100.0, 200.0, 300.0, 400.0])[:, None].repeat(1, 5)
    shifts = Shifts(
        (0, 2),
        torch.tensor([0, 2]),
        torch.tensor([[12.0], [-12.0]]),
        torch.tensor([[0.0], [12.0]]),
        noise_of([1.0, 2, 3, 4, 5, 6]),
    )
    vocoder = Recorder()
    made = make_shifted(vocoder, lambda wave: 10 * wave[:, None], mel, f0, noise_of([-1.0, -2, -3, -4]), shifts, 500.0)
    (_, first_f0, first_noise), (second_mel, second_f0, second_noise) = vocoder.calls
    # Items 0 and 2 an octave up and down, 1 and 3 as they are, then a: as it is, and an octave up, cut at 500 Hz.
    assert first_f0[:, 0].tolist() == [200, 200, 150, 400, 100, 500]
    assert first_noise.features_BCF.flatten().tolist() == [-1, -2, -3, -4, 1, 4]
    assert second_f0[:, 0].tolist() == [100, 300, 200, 150]  # The shifts back to the recording and on to c.
    assert second_noise.features_BCF.flatten().tolist() == [2, 5, 3, 6]
    assert torch.allclose(second_mel[:, 0, 0], 10 * torch.tensor([200.00, 150.02, 100.00, 500.02]))
    paired, once, half, twice = made.tensor_split([4, 6, 8])
    assert torch.allclose(paired[:, 0, 0], torch.tensor([120.0, 200.01, 315.002, 400.03]))
    assert torch.allclose(once[:, 0, 0], torch.tensor([200.0, 150.02]))
    assert torch.allclose(half[:, 0, 0], torch.tensor([100.0, 500.02]))
    assert torch.allclose(twice[:, 0, 0], torch.tensor([210.0, 200.002]))


def test_a_part_has_the_shifts_of_its_items():
    shifts = Shifts(
        (0, 2, 5),
        torch.tensor([0, 2, 5]),
        torch.tensor([[1.0], [2.0], [3.0]]),
        torch.zeros(3, 1),
        noise_of([float(n) for n in range(9)]),
    )
    part = shifts.part(2, 6)
    assert part.places == (0, 3)
    assert part.items_S.tolist() == [0, 3]
    assert part.once_S1.flatten().tolist() == [2, 3]
    assert part.noise.features_BCF.flatten().tolist() == [3, 4, 5, 6, 7, 8]
    assert shifts.part(3, 5).places == ()
