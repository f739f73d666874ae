"""The discriminators of a vocoder by kind; those of HiFi-GAN and UnivNet are in `audio.discriminators`.

Shapes: B items, 1 channel, T samples, P period, C channels, L positions, N frequencies, F frames. A discriminator
takes waves B1T in [-1, 1] and returns logits B... and features, a list of B.... No discriminator couples the items
of a batch.

Within a kind, tensors have the names and shapes of openvpi's checkpoints (whose fast task calls fast_mrd and fast_mpd
`mrd` and `mpd`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.audio import discriminators as shared
from gputrain.audio.config import Resolution
from gputrain.audio.cpu_convolutions import applies
from gputrain.audio.discriminators import DiscriminatorGroup, DiscriminatorOutput, pad_to_multiple, split_last
from gputrain.audio.mel import stft_magnitudes
from gputrain.vocoder.config import Discriminators
from gputrain.vocoder.cpu_blocks import BlockwiseGate, BlockwiseUnitPower

KINDS: dict[str, Callable[[Discriminators], DiscriminatorGroup]] = {
    "msd": lambda sizes: shared.multi_scale(sizes.msd_channels),
    "mpd": lambda sizes: shared.multi_period(sizes.discriminator_periods, sizes.mpd_channels),
    "mrd": lambda sizes: shared.multi_resolution(sizes.mrd_resolutions, sizes.mrd_channels),
    # openvpi's: residual blocks over few, wide tokens of every P-th sample, or of each frequency's log magnitudes.
    "fast_mpd": lambda sizes: DiscriminatorGroup(
        FastPeriodDiscriminator(period, sizes) for period in sizes.discriminator_periods
    ),
    "fast_mrd": lambda sizes: DiscriminatorGroup(
        FastSpectrumDiscriminator(resolution, sizes) for resolution in sizes.fast_mrd_resolutions
    ),
}


class FastDiscriminator(nn.Module):
    """Residual blocks over tokens. Before each block but the first, `stride` tokens are concatenated into one. The
    inputs of these blocks are the features."""

    blocks_name: str  # The name of the residual blocks in openvpi's checkpoints.

    def __init__(self, channels: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.strides = strides
        self.widths = [channels * math.prod(strides[: index + 1]) for index in range(len(strides))]
        self.pre = nn.Linear(strides[0], self.widths[0])
        self.post = nn.Linear(self.widths[-1], 1)

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """Returns tokens ...LC; all strides divide L."""
        raise NotImplementedError

    def forward(self, wave_B1T: Tensor) -> DiscriminatorOutput:
        x = self.tokens(wave_B1T)
        normed, features = unit_power(x), []
        *earlier, last = getattr(self, self.blocks_name)
        for block, stride in zip(earlier, self.strides[1:], strict=True):
            x = x + block(normed)
            x = split_last(x.flatten(-2), stride * x.shape[-1])
            normed = unit_power(x)
            features.append(normed.reshape(len(wave_B1T), -1))
        logits: Tensor = self.post(unit_power(x + last(normed)))
        return logits.reshape(len(wave_B1T), -1), features


class FastPeriodDiscriminator(FastDiscriminator):
    """Sees every P-th sample of a wave, at every offset."""

    blocks_name = "residual_layers"

    def __init__(self, period: int, sizes: Discriminators) -> None:
        super().__init__(sizes.fast_mpd_init_channel, sizes.fast_mpd_strides)
        self.period, kernel_size = period, sizes.fast_mpd_kernel_size

        def block(width: int, groups: int) -> nn.Module:
            return nn.Sequential(
                MoveAxis(-1, 1),
                nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2, groups=groups),
                MoveAxis(1, -1),
                nn.Linear(width, 2 * width),
                SoftSignGate(),
                nn.Linear(width, 2 * width),
                SoftSignGate(),
                nn.Linear(width, width),
            )

        groups = [1, *self.widths[1:]]
        self.residual_layers = nn.ModuleList(Net(block(*sizes)) for sizes in zip(self.widths, groups, strict=True))

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """Returns tokens (B P)LC."""
        wave_B1T = pad_to_multiple(wave_B1T, self.period * math.prod(self.strides))
        offsets_BPL = split_last(wave_B1T.squeeze(1), self.period).transpose(1, 2)
        return F.gelu(self.pre(split_last(offsets_BPL.flatten(0, 1), self.strides[0])))


class FastSpectrumDiscriminator(FastDiscriminator):
    """Sees the log magnitudes of a wave at one resolution."""

    blocks_name = "layers"
    window: Tensor
    freq_coords: Tensor

    def __init__(self, resolution: Resolution, sizes: Discriminators) -> None:
        super().__init__(sizes.fast_mrd_init_channel, sizes.fast_mrd_strides)
        self.resolution = resolution
        self.freq = nn.Linear(1, self.widths[0])
        frequencies = resolution.fft_size // 2 + 1
        # The window is unused; openvpi's checkpoints hold it.
        self.register_buffer("window", torch.hann_window(resolution.win_length))
        self.register_buffer("freq_coords", torch.linspace(-1, 1, frequencies).view(-1, 1, 1))

        def block(width: int) -> nn.Module:
            return nn.Sequential(
                MoveAxis(-1, 1),
                nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
                MoveAxis(1, -1),
                SoftSignGate(),
                nn.Linear(width, width),
            )

        self.layers = nn.ModuleList(Net(block(width)) for width in self.widths)

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """Returns tokens BNLC."""
        wave_B1T = pad_to_multiple(wave_B1T, self.resolution.hop_size * math.prod(self.strides))
        spectrum_BNF = stft_magnitudes(self.resolution, wave_B1T)[..., :-1]  # The last frame is centred on the end.
        spectrum_BNF = spectrum_BNF.clamp(min=1e-5).log10()
        split_BNLC = split_last(spectrum_BNF, self.strides[0]).contiguous()
        embedded: Tensor = self.pre(split_BNLC) + self.freq(self.freq_coords)
        return embedded


class Net(nn.Module):
    """Wraps a module under the name `net`, as in openvpi's checkpoints."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class MoveAxis(nn.Module):
    def __init__(self, source: int, destination: int) -> None:
        super().__init__()
        self.source, self.destination = source, destination

    def forward(self, x: Tensor) -> Tensor:
        # A linear layer would copy the values too, but not in the same way for weights that are frozen.
        moved = x.movedim(self.source, self.destination)
        return moved.contiguous() if self.destination == -1 else moved


class SoftSignGate(nn.Module):
    """Multiplies half of the channels by the other half, each bounded by softsign: ...(2 C) to ...C."""

    def forward(self, x: Tensor) -> Tensor:
        function = BlockwiseGate if applies(x) else _SoftSignGate
        gated: Tensor = function.apply(x)  # type: ignore[no-untyped-call]
        return gated


class _SoftSignGate(torch.autograd.Function):
    """Saves only its input and no intermediate values for the backward pass: a third of the memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        value, gate = (x / x.abs().add_(1)).chunk(2, dim=-1)
        return value * gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        # Softsign is x / (1 + |x|), its slope 1 / (1 + |x|)^2. On a CPU a power takes as long as all the rest.
        inverse = x.abs().add_(1).reciprocal_()
        value, gate = (x * inverse).chunk(2, dim=-1)
        gradient = torch.cat([gate * gradients[0], value * gradients[0]], dim=-1)
        return gradient.mul_(inverse).mul_(inverse)


def unit_power(x: Tensor) -> Tensor:
    """Divides ...C by the root of its mean square (Zhang and Sennrich 2019), summed in fp32, in the precision of x."""
    eps = torch.finfo(torch.float32).eps
    if applies(x):
        normed: Tensor = BlockwiseUnitPower.apply(x, eps)  # type: ignore[no-untyped-call]
        return normed
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], eps=eps)
