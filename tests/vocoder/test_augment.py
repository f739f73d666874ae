"""Tests loudness and speed of crops: shares, limits, and the pitch after a change of speed."""

import math

import pytest
import torch

from gputrain.engine.distributed import BatchDraws
from gputrain.vocoder.augment import change_key, change_volume, play_at
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
