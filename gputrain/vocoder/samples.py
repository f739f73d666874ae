"""Samples of a training: held-out clips, recorded and synthesised, as pictures and audio.

Shapes: T samples, M mel bands, F frames, H x W pixels, 3 colours.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.mel import log_mel
from gputrain.audio.pictures import GAP_PIXELS, coloured
from gputrain.audio.store import Wave
from gputrain.engine.metrics import Report, SoundSample
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.store import Pitch

CLIPS = 4
SECONDS = 4.0
DIFFERENCE_DECADES = 2.0  # Difference shown brightest: a factor of 100 in magnitude.


@torch.no_grad()
def sample_clips(
    generator: Generator, clips: Iterable[tuple[Wave, Pitch]], settings: TrainVocoder, device: torch.device
) -> Report:
    """Returns one picture of the spectrograms of the first CLIPS clips, and the synthesised audio of each."""
    mel = settings.spectrogram.mel
    frames = int(SECONDS * mel.sampling_rate / mel.hop_size)
    recorded, made = [], []
    for wave_T, f0_F in islice(clips, CLIPS):
        real_1T = torch.from_numpy(wave_T[: frames * mel.hop_size] / 32768).float().to(device)[None]
        f0_1F = torch.from_numpy(f0_F[:frames]).to(device)[None]
        recorded.append(real_1T[0].cpu())
        made.append(generator(log_mel(real_1T, mel), f0_1F)[0, 0].float().cpu())
    picture = sheet(recorded, made, mel, settings.saving.mel_vmin, settings.saving.mel_vmax)
    sounds = {f"clip_{number}": SoundSample(wave_T, mel.sampling_rate) for number, wave_T in enumerate(made, start=1)}
    return Report(pictures={"spectrograms": picture}, sounds=sounds)


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Tensor:
    """Returns a uint8 picture (HW3) with a column for each clip (waves of T samples): from the top, the recording, the
    synthesised wave, and their difference. Low frequencies are at the bottom.

    `vmin` and `vmax` are the mel magnitudes that are shown darkest and brightest, as powers of ten. The difference is
    that of these powers, from 0 to DIFFERENCE_DECADES.
    """
    columns = []
    for real_T, made_T in zip(real_waves, made_waves, strict=True):
        real_MF, made_MF = (_decades(wave_T, mel) for wave_T in (real_T, made_T))
        rows = [
            coloured((real_MF - vmin) / (vmax - vmin)),
            coloured((made_MF - vmin) / (vmax - vmin)),
            coloured((real_MF - made_MF).abs() / DIFFERENCE_DECADES),
        ]
        columns.append(_joined(rows, dim=0))
    tallest = max(len(column) for column in columns)
    columns = [torch.nn.functional.pad(column, (0, 0, 0, 0, 0, tallest - len(column)), value=255) for column in columns]
    return _joined(columns, dim=1)


def _decades(wave_T: Tensor, mel: Mel) -> Tensor:
    """Returns mel magnitudes (M, F) as powers of ten."""
    return log_mel(wave_T[None].float().cpu(), mel)[0] / math.log(10)


def _joined(pictures: Sequence[Tensor], dim: int) -> Tensor:
    """Joins pictures next to each other (dim 1) or below each other (dim 0), with white gaps."""
    shape = list(pictures[0].shape)
    shape[dim] = GAP_PIXELS
    gap = torch.full(shape, 255, dtype=torch.uint8)
    return torch.cat([part for picture in pictures for part in (gap, picture)][1:], dim=dim)
