"""The architecture of the vocoder, under the names of openvpi's config.json. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal

from gputrain.config import config, opt
from gputrain.errors import UserError


@config(panel="Sound, with --kind vocoder")
class Sound:
    """How recordings are prepared."""

    sampling_rate: int = opt(default=44100, help="Rate that recordings are resampled to, in Hz.", min=8000, max=192000)
    hop_size: int = opt(default=512, help="Samples between two frames of mel and pitch.", min=16)
    f0_method: Literal["auto", "parselmouth", "pyworld", "pyin", "swift-f0"] = opt(
        default="auto", help="What tracks the pitch; auto is parselmouth if it is installed (gputrain[f0]), else pyin."
    )
    trim_db: float = opt(
        default=0.0, help="Cut off both ends where they lie so many dB below the loudest; 0 is off.", min=0
    )
    loudness_db: float = opt(
        default=0.0, help="Root mean square to bring each file to, in dB below full scale (-20, say); 0 is off.",
        min=-60, max=0,
    )  # fmt: skip


@dataclass(frozen=True)
class Mel:
    """A log-mel spectrogram: Hann window, magnitude, Slaney's filter bank, natural logarithm. Rates and frequencies in
    Hz, sizes in samples."""

    sampling_rate: int = 44100
    num_mels: int = 128
    hop_size: int = 512
    win_size: int = 2048
    n_fft: int = 2048
    fmin: float = 40.0
    fmax: float = 16000.0


@dataclass(frozen=True)
class Architecture:
    """Shape of an NSF-HiFiGAN generator. Raises UserError for what makes none."""

    mel: Mel = Mel()
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4, 4)
    upsample_initial_channel: int = 512
    resblock: str = "1"
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    mini_nsf: bool = False
    noise_sigma: float = 0.0
    pc_aug: bool = False

    def __post_init__(self) -> None:
        for one, other in (
            ("upsample_rates", "upsample_kernel_sizes"), ("resblock_kernel_sizes", "resblock_dilation_sizes")
        ):  # fmt: skip
            if len(getattr(self, one)) != len(getattr(self, other)):
                raise UserError(f"{one} and {other} differ in length", hint="give each stage one of both")
        if self.resblock != "1":
            raise UserError(f"resblock {self.resblock!r} is not there", hint='use "1", which openvpi\'s models have')
        stages = len(self.upsample_rates)
        if self.upsample_initial_channel % (1 << stages):
            raise UserError(
                f"upsample_initial_channel {self.upsample_initial_channel} cannot be halved {stages} times",
                hint=f"use a multiple of {1 << stages}",
            )
        for kernel, rate in zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True):
            if kernel < rate:
                raise UserError(
                    f"an upsample kernel of {kernel} for a rate of {rate} leaves gaps", hint="use twice the rate"
                )
        if any(kernel % 2 == 0 for kernel in self.resblock_kernel_sizes):
            raise UserError("an even number among resblock_kernel_sizes", hint="use odd ones, such as 3, 7, 11")
        if self.mini_nsf and stages < 2:
            raise UserError("mini_nsf needs two upsampling stages", hint="name more upsample_rates")
        made = math.prod(self.upsample_rates)
        if made != self.mel.hop_size:
            raise UserError(
                f"upsample_rates {', '.join(map(str, self.upsample_rates))} make {made} samples of a frame, and "
                f"hop_size is {self.mel.hop_size}",
                hint="choose rates whose product is hop_size",
            )
