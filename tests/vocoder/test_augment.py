"""Tests loudness and speed of crops (shares, limits, and the pitch after a change of speed), and which items pc_aug
shifts, by how much, and the resulting waves."""

import itertools
import math

import pytest
import torch

from gputrain.engine.distributed import BatchDraws
from gputrain.vocoder.augment import (
    Shifts,
    change_key,
    change_volume,
    compared_pairs,
    draw_semitones,
    draw_shifts,
    make_shifted,
    play_at,
    shifted_pair,
)
from gputrain.vocoder.generator import Noise
from tests.tables import each_row

RATE, HOP = 16000, 160


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(items: int, seed: int = 0) -> BatchDraws:
    return BatchDraws(random(seed), items, (slice(0, items),))


def test_loudness_changes_within_full_scale():
    wave = 0.5 * torch.sin(torch.arange(400.0))[None].repeat(4000, 1)
    changed = change_volume(wave, 0.5, draws(len(wave)))
    factors = changed.abs().amax(dim=1) / wave.abs().amax(dim=1)
    alone = (factors - 1).abs() < 1e-6
    assert alone.float().mean() == pytest.approx(0.5, abs=0.03)
    assert changed.abs().max() <= 1.0
    assert factors[~alone].min() == pytest.approx(math.exp(-3), rel=0.02)
    assert factors[~alone].max() == pytest.approx(2.0, rel=0.02)
    middle = math.exp((-3 + math.log(2)) / 2)  # The factors are uniform in the logarithm.
    assert (factors[~alone] < middle).float().mean() == pytest.approx(0.5, abs=0.04)


def test_quiet_crops_get_no_louder_than_twentyfold_and_silence_stays():
    wave = torch.stack([1e-4 * torch.ones(8), torch.zeros(8)])
    changed = torch.stack([change_volume(wave, 1.0, draws(len(wave), seed)) for seed in range(300)])
    assert changed[:, 0].max() <= 1e-4 * math.exp(3) * 1.001
    assert (changed[:, 1] == 0).all()


def test_a_note_played_faster_is_higher_and_its_pitch_says_so():
    seconds = torch.arange(60 * HOP) / RATE
    wave = 0.5 * torch.sin(2 * math.pi * 440 * seconds)[None].repeat(3, 1)
    f0 = torch.full((3, 60), 440.0)
    f0[:, 30:] = 0
    played, pitch = change_key(wave, f0, 40, 1.0, 1.25, 1.25 + 1e-9, draws(len(wave)))
    assert played.shape == (3, 40 * HOP)
    spectrum = torch.fft.rfft(played[0] * torch.hann_window(40 * HOP)).abs()
    assert float(spectrum.argmax()) * RATE / (40 * HOP) == pytest.approx(550, abs=3)
    voiced = pitch[0] > 0
    assert pitch[0][voiced].tolist() == pytest.approx([550.0] * int(voiced.sum()), rel=1e-5)
    assert int(voiced.sum()) == 24  # Thirty frames take four fifths of the time.


def test_what_is_not_chosen_stays_as_it_is():
    wave, f0 = torch.randn(5, 60 * HOP, generator=random(1)), 300 * torch.rand(5, 60, generator=random(2))
    played, pitch = change_key(wave, f0, 40, 0.0, 0.9, 1.4, draws(len(wave)))
    assert (played - wave[:, : 40 * HOP]).abs().max() < 1e-5
    assert torch.equal(pitch, f0[:, :40])


def test_speeds_lie_where_they_should():
    ramp = torch.arange(64 * 8, dtype=torch.float64)[None].repeat(2000, 1)
    pitch = torch.ones(2000, 64, dtype=torch.float64)
    _, speed = change_key(ramp, pitch, 32, 0.5, 0.9, 1.4, draws(len(ramp)))
    speed = speed[:, 0]
    changed = speed[speed != 1]
    assert len(changed) / len(speed) == pytest.approx(0.5, abs=0.03)
    assert float(changed.min()) == pytest.approx(0.9, abs=0.005)
    assert float(changed.max()) == pytest.approx(1.4, abs=0.005)


@each_row(0.5, 0.8, 1.0, 1.3, 2.0)
def test_a_wave_played_at_another_speed_is_what_it_was_at_other_times(speed):
    """Compares tones below both cutoffs with their formula, except at the ends, which are padded with silence."""
    rate, samples = 16000, 8000
    wave = sum(
        torch.sin(2 * math.pi * hz * torch.arange(2 * samples, dtype=torch.float64) / rate) for hz in (150, 2900)
    )
    played = play_at(wave[None], torch.tensor([speed], dtype=torch.float64), samples, fastest=2.0)[0]
    times = speed * torch.arange(samples, dtype=torch.float64) / rate
    expected = sum(torch.sin(2 * math.pi * hz * times) for hz in (150, 2900))
    inside = slice(300, samples - 300)
    assert float((played - expected)[inside].abs().max()) < (1e-11 if speed == 1 else 2e-4)


def test_playing_faster_lets_nothing_fold_back():
    """At a rate of 16 kHz, 6 kHz at twice the speed would be 12 kHz and alias to 4 kHz."""
    wave = torch.sin(2 * math.pi * 6000 * torch.arange(16000, dtype=torch.float64) / 16000)
    played = play_at(wave[None], torch.tensor([2.0], dtype=torch.float64), 7000, fastest=2.0)[0]
    assert float(played[300:-300].abs().max()) < 1e-3


@each_row((8, 4), (8, 3), (5, 5), (32, 13), (1, 1), (4, 0))
def test_places_are_spread_evenly(items, count):
    shifts = draw_shifts(items, count, 5.0, random(0), torch.float32, lambda waves: noise_of(range(waves)))
    places = shifts.places
    assert shifts.items_S.tolist() == list(places)
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
        2,
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
    twice, once = shifted_pair(made, shifts)
    paired, half = made[:4], made[6:8]
    real, mels = torch.zeros(4, 1, 5), torch.zeros(4, 3, 5)
    pairs = compared_pairs(made, real, mels, shifts, lambda wave: wave.repeat(1, 3, 1))
    assert pairs.made_P1T.equal(torch.cat([paired, twice]))
    assert pairs.real_P1T.equal(torch.cat([real, once]))
    assert pairs.target_PMF[4:, 0].equal(once[:, 0])
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
        3,
    )
    part = shifts.part(2, 6)
    assert part.places == (0, 3)
    assert part.items_S.tolist() == [0, 3]
    assert part.once_S1.flatten().tolist() == [2, 3]
    assert part.noise.features_BCF.flatten().tolist() == [3, 4, 5, 6, 7, 8]
    assert shifts.part(3, 5).places == ()
