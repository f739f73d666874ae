"""Samples of a training: held-out clips, recorded and synthesised, as pictures and audio.

Shapes: T samples, F frames.
"""

from collections.abc import Iterable
from itertools import islice

import torch

from gputrain.audio.mel import log_mel
from gputrain.audio.store import Wave
from gputrain.engine.metrics import Report, SoundSample
from gputrain.vocoder.config import TrainVocoder
from gputrain.vocoder.generator import Generator
from gputrain.vocoder.pictures import sheet
from gputrain.vocoder.store import Pitch

CLIPS = 4
SECONDS = 4.0


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
