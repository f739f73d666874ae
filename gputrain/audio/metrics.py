"""Distances between a made wave and a recording. Pure functions; all arithmetic is on the CPU, in fp32 or better.

Shape suffixes: B items, T samples, F frames, M mel bands, N frequencies of a transform, C coefficients, L lags.
"""

import importlib
import math
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gputrain.audio.config import Mel, Resolution
from gputrain.audio.f0 import Floats, voiced
from gputrain.audio.io import Samples, resample
from gputrain.audio.mel import log_mel, stft_magnitudes
from gputrain.errors import is_installed

CEPSTRUM = 25  # Number of coefficients, without that of loudness.
RESOLUTIONS = (Resolution(1024, 120, 600), Resolution(2048, 240, 1200), Resolution(512, 50, 240))
QUIETEST_POWER = 1e-8  # Lower power of a spectrum is raised to this.
PESQ_RATE_HZ = 16000
SHORTEST_PESQ_SECONDS = 0.25


def log_mel_of(wave_T: Samples, mel: Mel) -> NDArray[np.float32]:
    """Returns the log-mel of a wave, (M, F), natural logarithm."""
    log_mel_MF: NDArray[np.float32] = log_mel(torch.from_numpy(wave_T)[None], mel)[0].numpy()
    return log_mel_MF


def mel_cepstral_distortion(made_MF: Floats, real_MF: Floats) -> float:
    """Returns the MCD in dB (Kubichek 1993, https://doi.org/10.1109/PACRIM.1993.407206): frame by frame
    10 sqrt(2) / ln 10 * sqrt(sum over c = 1 .. 25 of the squared differences of mel-cepstra), averaged over frames.

    The mel-cepstrum is the cosine series of the log-mel: ln magnitude = c_0 / 2 + sum of c_n cos(n w), w being the
    place of a band on the mel axis, from 0 to pi. So MCD is the root mean square difference, in dB, of spectra smoothed
    to 25 coefficients, without loudness. Frames are compared in order, without time warping.

    It is comparable only with figures of the same mel settings. Published ones (BigVGAN-v2 .2903) use other cepstra:
    SPTK's mel-generalised ones of order 25 at 22.05 kHz (alpha 0.41, gamma -1/5), with loudness (c_0) and frames warped
    in time (https://github.com/sony/bigvsan_eval).
    """
    bands = len(real_MF)
    order_C1 = np.arange(1, min(CEPSTRUM, bands - 1) + 1)[:, None]
    cosines_CM = 2 / bands * np.cos(math.pi * order_C1 * (np.arange(bands) + 0.5) / bands)
    difference_CF = cosines_CM @ (made_MF.astype(np.float64) - real_MF)
    return float(10 * math.sqrt(2) / math.log(10) * np.sqrt((difference_CF**2).sum(axis=0)).mean())


@dataclass(frozen=True)
class ClipMetrics:
    """Metrics of held-out clips by name, and the number of clips."""

    scalars: dict[str, float]
    clips: int

    def to_json(self) -> dict[str, object]:
        return {"clips": self.clips, **self.scalars}


@dataclass(frozen=True)
class PitchMatch:
    """Agreement of a generated pitch with the requested one: sums over frames, which can be added over clips."""

    both: int = 0  # Frames that are voiced in both.
    asked_only: int = 0
    made_only: int = 0
    squared_cents: float = 0.0  # Sum over `both`.

    def __add__(self, other: "PitchMatch") -> "PitchMatch":
        return PitchMatch(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rmse_cents(self) -> float | None:
        """Returns the RMS error over frames voiced in both; a semitone is 100. None without such a frame."""
        return math.sqrt(self.squared_cents / self.both) if self.both else None

    @property
    def voicing_f1(self) -> float | None:
        """Returns the harmonic mean of the precision and recall of voiced frames, up to 1 (Morrison et al. 2022,
        CARGAN, arXiv:2110.10139, section 4). None where neither has a voiced frame."""
        wrong = self.asked_only + self.made_only
        return 2 * self.both / (2 * self.both + wrong) if self.both or wrong else None


def pitch_match(made_F: Floats, asked_F: Floats) -> PitchMatch:
    """Compares pitches in Hz, 0 where unvoiced, of the same frames."""
    made, asked = voiced(made_F), voiced(asked_F)
    ours, theirs = (track_F[made & asked].astype(np.float64) for track_F in (made_F, asked_F))
    return PitchMatch(
        both=int((made & asked).sum()),
        asked_only=int((asked & ~made).sum()),
        made_only=int((made & ~asked).sum()),
        squared_cents=float((1200**2 * np.log2(ours / theirs) ** 2).sum()),
    )


def multi_resolution_stft(made_T: Samples, real_T: Samples) -> float:
    """Returns spectral convergence plus mean absolute difference of the natural logarithms of magnitudes, averaged over
    three resolutions (Yamamoto et al. 2020, arXiv:1910.11480, equations 4 to 6). No unit; 0 is equal.

    The settings are the defaults of auraloss 0.4's `MultiResolutionSTFTLoss`, with which M-STFT is published
    (BigVGAN-v2 .7026 on LibriTTS dev at 24 kHz, https://github.com/NVIDIA/BigVGAN), so the figure is comparable with
    others of the same recordings at the same rate. Both waves have one length; short ones are padded with silence.
    """
    missing = max(0, max(resolution.fft_size for resolution in RESOLUTIONS) - len(real_T))
    waves_21T = torch.from_numpy(np.stack([np.pad(wave, (0, missing)) for wave in (made_T, real_T)]))[:, None]
    return float(np.mean([_stft_distance(*stft_magnitudes(resolution, waves_21T)) for resolution in RESOLUTIONS]))


def _stft_distance(made_NF: Tensor, real_NF: Tensor) -> float:
    made_NF, real_NF = (magnitude_NF.clamp(min=QUIETEST_POWER**0.5) for magnitude_NF in (made_NF, real_NF))
    convergence = torch.linalg.vector_norm(real_NF - made_NF) / torch.linalg.vector_norm(real_NF)
    return float(convergence + (real_NF.log() - made_NF.log()).abs().mean())


def mel_distance(made_MF: Floats, real_MF: Floats) -> float:
    """Returns the mean absolute difference of log-mels, in nepers (1 is a factor of e, 8.7 dB): the unweighted mel
    loss, if the mel is that of the loss."""
    return float(np.abs(made_MF - real_MF).mean())


def pesq(made_T: Samples, real_T: Samples, rate_hz: int) -> float | None:
    """Returns wide-band PESQ at 16 kHz, 1.04 to 4.64 (ITU-T P.862.2), computed by the package `pesq`.

    Returns None if the package is not installed, or finds no utterance: in less than a quarter of a second, or silence.
    """
    if not is_installed("pesq") or len(real_T) < SHORTEST_PESQ_SECONDS * rate_hz or not real_T.any():
        return None
    package = importlib.import_module("pesq")
    real_16k, made_16k = (resample(wave_T, rate_hz, PESQ_RATE_HZ) for wave_T in (real_T, made_T))
    value = float(package.pesq(PESQ_RATE_HZ, real_16k, made_16k, "wb", on_error=package.PesqError.RETURN_VALUES))
    return value if value > 0 else None  # An error is a negative number or NaN.
