"""The architecture of the vocoder, under the names of openvpi's config.json. Imports no torch."""

import math
from dataclasses import dataclass

from gputrain.errors import UserError


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
    """Shape of an NSF-HiFiGAN generator. Raises UserError where its upsampling does not make a hop of its frames."""

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
        made = math.prod(self.upsample_rates)
        if made != self.mel.hop_size:
            raise UserError(
                f"upsample_rates {', '.join(map(str, self.upsample_rates))} make {made} samples of a frame, and "
                f"hop_size is {self.mel.hop_size}",
                hint="choose rates whose product is hop_size",
            )
