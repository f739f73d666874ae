"""Samples of a training: the first held-out clips, at their rate, at most a few seconds long."""

import contextlib

import numpy as np
import torch

from gputrain.audio.mel import log_mel
from gputrain.config import assemble
from gputrain.vocoder import evaluate
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.evaluate import sample_clips
from gputrain.vocoder.generator import Generator
from tests.vocoder.conftest import HOP, RATE_HZ, TINY

CPU = torch.device("cpu")
SETTINGS = assemble(TrainVocoder, {"data_path": ".", **TINY})


def clips(count: int, frames: int) -> list[tuple[np.ndarray, np.ndarray]]:
    draws = np.random.default_rng(0)
    return [
        ((3000 * draws.standard_normal(frames * HOP)).astype(np.int16), np.full(frames, 200, dtype=np.float32))
        for _ in range(count)
    ]


def generator() -> Generator:
    torch.manual_seed(0)
    return Generator(SETTINGS.architecture)


def test_some_clips_are_sound_and_none_for_long():
    frames = int(evaluate.SAMPLE_SECONDS * RATE_HZ / HOP)
    report = sample_clips(generator(), clips(evaluate.CLIPS + 1, frames + 10), SETTINGS.saving, CPU)
    assert list(report.sounds) == ["clip_1", "clip_2", "clip_3", "clip_4"]
    for sound in report.sounds.values():
        assert sound.rate_hz == RATE_HZ
        assert sound.wave_T.shape == (frames * HOP,) == (4 * RATE_HZ,)
        assert float(sound.wave_T.abs().max()) <= 1
    short = sample_clips(generator(), clips(2, 30), SETTINGS.saving, CPU)
    assert {len(sound.wave_T) for sound in short.sounds.values()} == {30 * HOP}


def test_what_is_sound_is_made_of_the_clips_own_mel_and_pitch():
    (wave_T, f0_F), *_ = given = clips(2, 40)
    expected_F = f0_F.copy()
    f0_F[10:20] = 0  # The source goes on where it is unvoiced.
    made = generator()
    torch.manual_seed(1)
    sound = sample_clips(made, given, SETTINGS.saving, CPU).sounds["clip_1"].wave_T
    torch.manual_seed(1)
    real_1T = torch.from_numpy(wave_T / 32768).float()[None]
    with torch.no_grad():
        expected = made(log_mel(real_1T, SETTINGS.spectrogram.mel), torch.from_numpy(expected_F)[None])[0, 0]
    torch.testing.assert_close(sound, expected, rtol=0, atol=1e-4)
    assert float(sound.std()) > 1e-4


def test_the_picture_shows_recordings_beside_what_was_made():
    """More clips make it larger; a louder recording changes it; 16-bit arithmetic hardly does."""
    one, two = (
        sample_clips(generator(), clips(count, 40), SETTINGS.saving, CPU).pictures["spectrograms"] for count in (1, 2)
    )
    assert [len(row) for row in one.rows] == [1, 1, 1]
    assert [len(row) for row in two.rows] == [2, 2, 2]
    with torch.autocast("cpu", dtype=torch.bfloat16), contextlib.nullcontext():
        coarse = sample_clips(generator(), clips(1, 40), SETTINGS.saving, CPU)
    assert coarse.sounds["clip_1"].wave_T.dtype == torch.float32
    made, exact = (shown.rows[1][0].picture_HW3.float() for shown in (coarse.pictures["spectrograms"], one))
    assert float((made - exact).abs().mean()) < 10
