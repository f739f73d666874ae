"""Sound: files, rates, and the log-mel spectrogram. The only mel and the only resampler of the house.

Shape suffixes: B items, T samples, F frames, M mel bands, N frequencies of a transform.
"""

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gputrain.engine.gan import exact
from gputrain.errors import UserError

Samples = npt.NDArray[np.float32]

FLOOR = 1e-5  # of a mel magnitude, before the logarithm: silence is ln 1e-5 = -11.5
LOBES = 24  # of the sinc with which a wave is played at another speed, to each side
BLOCK = 1 << 20  # samples of a file that are decoded at once
TRIM_WINDOW = 2048  # samples whose mean power decides whether a place is silent
TRIM_HOP = 512
HOW_TO_CONVERT = "wav, flac, ogg and mp3 are understood; `ffmpeg -i FILE FILE.flac` converts most others"


class MelSettings(Protocol):
    """What a log-mel spectrogram depends on. Rates and frequencies in Hz, sizes in samples."""

    @property
    def sampling_rate(self) -> int: ...
    @property
    def num_mels(self) -> int: ...
    @property
    def hop_size(self) -> int: ...
    @property
    def win_size(self) -> int: ...
    @property
    def n_fft(self) -> int: ...
    @property
    def fmin(self) -> float: ...
    @property
    def fmax(self) -> float: ...


class Sound(NamedTuple):
    """One channel in [-1, 1], or beyond where the file is; its rate in Hz."""

    wave_T: Samples
    rate_hz: int


def log_mel(wave_BT: Tensor, mel: MelSettings, *, key_shift: float = 0.0) -> Tensor:
    """The natural logarithm of Slaney's mel bands of the magnitude spectrum: (B, M, F), F = T // hop_size.

    `key_shift` in semitones moves every frequency, and no moment in time: the sound is seen through windows longer by
    2 ** (key_shift / 12), whose n-th frequency is lower by as much, and is taken for the n-th of the plain window.
    Frame f is centred on the hop that it stands for; the ends are reflected, silence follows what is too short for
    that. Computed on the device of the wave, in fp32 at least under any autocast, and differentiable.
    """
    return to_log_mel(magnitudes(wave_BT, mel, key_shift=key_shift), mel)


def to_log_mel(magnitude_BNF: Tensor, mel: MelSettings) -> Tensor:
    """The log-mel of the magnitudes that `magnitudes` gives."""
    with torch.autocast(magnitude_BNF.device.type, enabled=False):
        bank_MN = mel_bank(mel, magnitude_BNF.device)[:, : magnitude_BNF.shape[1]]  # nothing above a shorter window's
        return (bank_MN.to(magnitude_BNF.dtype) @ magnitude_BNF).clamp(min=FLOOR).log()


def magnitudes(wave_BT: Tensor, mel: MelSettings, *, key_shift: float = 0.0) -> Tensor:
    """The magnitudes of the spectrum that `log_mel` sees: (B, N, F), N = n_fft // 2 + 1, or less with a key shift
    downwards."""
    factor = 2 ** (key_shift / 12)
    transform, window = round(mel.n_fft * factor), round(mel.win_size * factor)
    before, after = (transform - mel.hop_size) // 2, (transform - mel.hop_size + 1) // 2
    frames = wave_BT.shape[-1] // mel.hop_size
    with torch.autocast(wave_BT.device.type, enabled=False):
        missing = max(mel.hop_size, after + 1) - wave_BT.shape[-1]
        wave_BT = F.pad(exact(wave_BT), (0, max(0, missing)))
        spectrum_BNF = torch.stft(
            F.pad(wave_BT[:, None], (before, after), mode="reflect")[:, 0],
            transform,
            hop_length=mel.hop_size,
            win_length=window,
            window=torch.hann_window(window, dtype=wave_BT.dtype, device=wave_BT.device),
            center=False,
            return_complex=True,
        )
        magnitude_BNF = spectrum_BNF[..., :frames].abs()
        # A longer window sums more samples, so that the same sound has a larger magnitude.
        return magnitude_BNF[:, : mel.n_fft // 2 + 1] * (mel.win_size / window)


def mel_bank(mel: MelSettings, device: torch.device) -> Tensor:
    """Weights (M, N) of the n_fft // 2 + 1 frequencies in each band: triangles of equal area, evenly spaced on the
    mel scale of Slaney's Auditory Toolbox (1998), as in librosa. Made once for each setting and device."""
    return _bank(mel.sampling_rate, mel.n_fft, mel.num_mels, mel.fmin, mel.fmax, device)


@lru_cache(maxsize=16)
def _bank(rate_hz: int, n_fft: int, bands: int, fmin_hz: float, fmax_hz: float, device: torch.device) -> Tensor:
    edges_hz = _mel_to_hz(np.linspace(_hz_to_mel(fmin_hz), _hz_to_mel(fmax_hz), bands + 2))
    low_M1, centre_M1, high_M1 = (edges_hz[first : bands + first, None] for first in range(3))
    hz_N = np.arange(n_fft // 2 + 1) * (rate_hz / n_fft)
    triangles_MN = np.minimum((hz_N - low_M1) / (centre_M1 - low_M1), (high_M1 - hz_N) / (high_M1 - centre_M1))
    bank_MN = (2 / (high_M1 - low_M1) * triangles_MN.clip(min=0)).astype(np.float32)
    # It outlives its first caller, who may compute without gradients, or on shapes alone.
    with torch.inference_mode(False), unset_fake_temporarily():
        return torch.from_numpy(bank_MN).to(device)


def _hz_to_mel(hz: float) -> float:
    """Slaney's scale: linear up to 1000 Hz, which is 15 mel, then 27 mel for each factor of 6.4."""
    return 15 * hz / 1000 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def _mel_to_hz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The inverse of `_hz_to_mel`."""
    return np.where(mel < 15, 1000 * mel / 15, 1000 * 6.4 ** ((mel - 15) / 27))


def resample(wave_T: Samples, from_hz: float, to_hz: float) -> Samples:
    """The same sound at another rate, ceil(T * to_hz / from_hz) samples long, through soxr's high-quality filter."""
    if from_hz == to_hz:
        return wave_T
    resampled_T = soxr.resample(wave_T, from_hz, to_hz, quality="HQ")
    length = math.ceil(len(wave_T) * (to_hz / from_hz))
    return np.asarray(np.pad(resampled_T, (0, max(0, length - len(resampled_T))))[:length])  # soxr rounds the length


def trim(wave_T: Samples, top_db: float) -> Samples:
    """A view of the wave without the silence at both ends: frames whose power lies `top_db` below the loudest frame's.

    Frames of TRIM_WINDOW samples stand TRIM_HOP apart, each centred on its position, as in librosa.effects.trim.
    """
    squares_T = np.pad(np.square(wave_T), TRIM_WINDOW // 2)
    power_F = np.lib.stride_tricks.sliding_window_view(squares_T, TRIM_WINDOW)[::TRIM_HOP].mean(axis=1)
    # Below 1e-10, which is -100 dB, everything counts as equally silent.
    level_F = power_F.clip(min=1e-10)
    loud = np.flatnonzero(level_F > level_F.max() * 10 ** (-top_db / 10))
    return wave_T[loud[0] * TRIM_HOP : (loud[-1] + 1) * TRIM_HOP]


def play_at(wave_BR: Tensor, speed_B: Tensor, samples: int, *, fastest: float) -> Tensor:
    """The first `samples` of each wave, played `speed_B` times as fast: (B, samples). Silence lies beyond its ends.

    Each sample is a sum over a Hann-windowed sinc (Smith, Digital Audio Resampling, https://ccrma.stanford.edu/~jos/
    resample/) of LOBES zero crossings a side, which is wider where the speed asks for a lower cutoff. At speed 1 the
    wave is what it was. No speed may be above `fastest`.
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


def read_sound(path: Path) -> Sound:
    """The mean of the channels of a sound file: wav, flac, ogg, mp3 and whatever else libsndfile decodes.

    Raises UserError, naming the file, if it is missing, damaged or of an unknown kind, empty, or holds NaN or infinity.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file", hint="name a sound file: wav, flac, ogg or mp3")
    try:
        with soundfile.SoundFile(path) as file:
            blocks = [block.mean(axis=1) for block in file.blocks(BLOCK, dtype="float32", always_2d=True)]
            rate_hz = file.samplerate
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path}: cannot be decoded: {error.error_string}", hint=HOW_TO_CONVERT) from None
    wave_T = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
    if not wave_T.size:
        raise UserError(f"{path}: holds no sound", hint="remove the file, or record it again")
    if not np.isfinite(wave_T).all():
        first = int(np.argmin(np.isfinite(wave_T)))
        raise UserError(
            f"{path}: a sample is no finite number, the first at {first / rate_hz:.3f} seconds",
            hint="export it again as 16-bit wav or flac",
        )
    return Sound(wave_T, rate_hz)
