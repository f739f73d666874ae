"""Samples of a training: held-out clips, recorded and synthesised, as pictures and audio.

Shapes: T samples, M mel bands, F frames.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

from gputrain.audio.config import Mel
from gputrain.audio.f0 import interpolated
from gputrain.audio.mel import log_mel, mel_decades
from gputrain.audio.store import Pitch, Wave
from gputrain.engine.drawing import spectrogram_picture
from gputrain.engine.samples import Report, Sheet, SheetCell, SoundSample
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import Generator

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
        f0_1F = torch.from_numpy(interpolated(f0_F[:frames])).to(device)[None]
        recorded.append(real_1T[0].cpu())
        made.append(generator(log_mel(real_1T, mel), f0_1F)[0, 0].float().cpu())
    picture = sheet(recorded, made, mel, settings.saving.mel_vmin, settings.saving.mel_vmax)
    sounds = {
        f"clip_{number}": SoundSample(made_T, mel.sampling_rate, f"held-out clip {number}", real_T)
        for number, (made_T, real_T) in enumerate(zip(made, recorded, strict=True), start=1)
    }
    return Report(pictures={"spectrograms": picture}, sounds=sounds)


def sheet(real_waves: Sequence[Tensor], made_waves: Sequence[Tensor], mel: Mel, vmin: float, vmax: float) -> Sheet:
    """Returns spectrograms with a column for each clip (waves of T samples): from the top, the recording, the
    synthesised wave, and their difference. Low frequencies are at the bottom.

    `vmin` and `vmax` are the mel magnitudes that are shown darkest and brightest, as powers of ten. The difference is
    that of these powers, from 0 to DIFFERENCE_DECADES.
    """
    real, made, differences = [], [], []
    for number, (real_T, made_T) in enumerate(zip(real_waves, made_waves, strict=True), start=1):
        real_MF, made_MF = (mel_decades(wave_T, mel) for wave_T in (real_T, made_T))
        difference_MF = (real_MF - made_MF).abs()
        real.append(SheetCell(spectrogram_picture(real_MF, vmin, vmax), f"clip {number}"))
        made.append(SheetCell(spectrogram_picture(made_MF, vmin, vmax)))
        words = f"{float(difference_MF.mean()):.2f} decades"
        differences.append(SheetCell(spectrogram_picture(difference_MF, 0, DIFFERENCE_DECADES), words))
    return Sheet(("recording", "synthesised", "difference"), (real, made, differences), "mel spectrograms")
