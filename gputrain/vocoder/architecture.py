"""Sizes of the vocoder's models, under the names of openvpi's config.json. Imports no torch."""

import math
from dataclasses import dataclass, field

from gputrain.audio.config import Mel, check_hifigan_sizes
from gputrain.errors import UserError

# Fields that are options, and keys of openvpi's config.json, of the same names.
SAME_OPTIONS = (
    "mini_nsf", "noise_sigma", "upsample_rates", "upsample_kernel_sizes", "upsample_initial_channel",
    "resblock_kernel_sizes",
)  # fmt: skip
STOCK_DILATIONS = 3  # Number of dilations of a residual block in openvpi's generator.


@dataclass(frozen=True)
class NsfHifiganArchitecture:
    """Sizes of an NSF-HiFiGAN generator. Raises UserError for invalid combinations."""

    mel: Mel = field(default_factory=Mel)
    upsample_rates: tuple[int, ...] = (8, 8, 2, 2, 2)
    upsample_kernel_sizes: tuple[int, ...] = (16, 16, 4, 4, 4)
    upsample_initial_channel: int = 512
    resblock_kernel_sizes: tuple[int, ...] = (3, 7, 11)
    resblock_dilation_sizes: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    mini_nsf: bool = False
    noise_sigma: float = 0.0
    pc_aug: bool = False

    def __post_init__(self) -> None:
        check_hifigan_sizes(self)
        if self.mini_nsf and len(self.upsample_rates) < 2:
            raise UserError("mini_nsf needs two upsampling stages", hint="name more upsample_rates")

    @property
    def stock_faults(self) -> list[str]:
        """Returns the reasons why openvpi's own generator code cannot load these sizes; empty if it can.

        Its ResBlock1 always has three pairs of convolutions. Its transposed convolutions have no output padding, and
        its noise convolutions pad by half of their stride, so that with odd numbers the lengths of a stage and its
        source differ.
        """
        faults = [
            f"resblock_dilation_sizes has a block of {len(row)} dilations, and the stock ResBlock1 has three"
            for row in self.resblock_dilation_sizes
            if len(row) != STOCK_DILATIONS
        ][:1]
        for kernel, rate in zip(self.upsample_kernel_sizes, self.upsample_rates, strict=True):
            if (kernel - rate) % 2:
                faults.append(f"an upsample kernel of {kernel} for a rate of {rate}: their difference is odd")
        if not self.mini_nsf:
            strides = [math.prod(self.upsample_rates[stage:]) for stage in range(1, len(self.upsample_rates))]
            faults += [
                f"upsample_rates leave {stride} samples for each of stage {stage}, an odd number"
                for stage, stride in enumerate(strides, start=1)
                if stride % 2
            ]
        return faults
