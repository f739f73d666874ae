"""The discriminators of a vocoder by kind; those of HiFi-GAN and UnivNet are in `audio.discriminators`.

Shapes: B items, 1 channel, T samples, P period, C channels, K taps, L positions, N frequencies, F frames, R rows (all
positions of a batch). A discriminator takes waves B1T in [-1, 1] and returns logits B... and features, a list of B....
No discriminator couples the items of a batch.

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
from gputrain.audio.discriminators import DiscriminatorGroup, DiscriminatorOutput, pad_to_multiple, split_last
from gputrain.audio.mel import stft_magnitudes
from gputrain.vocoder.config import Discriminators

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
        tokens = self.tokens(wave_B1T)
        # As a matrix of rows: with more dimensions, a compiler may choose to transpose x between the blocks.
        shape, x_RC = tokens.shape[:-2], tokens.flatten(0, -2)
        normed_RC, features = unit_power(x_RC), []

        def residual(block: nn.Module) -> Tensor:
            made: Tensor = block(normed_RC.view(*shape, -1, normed_RC.shape[-1]))
            return x_RC + made.reshape(x_RC.shape)

        *earlier, last = getattr(self, self.blocks_name)
        for block, stride in zip(earlier, self.strides[1:], strict=True):
            x_RC = split_last(residual(block).flatten(), stride * x_RC.shape[-1])
            normed_RC = unit_power(x_RC)
            features.append(normed_RC.view(len(wave_B1T), -1, normed_RC.shape[1]))
        logits: Tensor = self.post(unit_power(residual(last)))
        return logits.reshape(len(wave_B1T), -1), features


class FastPeriodDiscriminator(FastDiscriminator):
    """Sees every P-th sample of a wave, at every offset."""

    blocks_name = "residual_layers"

    def __init__(self, period: int, sizes: Discriminators) -> None:
        super().__init__(sizes.fast_mpd_init_channel, sizes.fast_mpd_strides)
        self.period, kernel_size = period, sizes.fast_mpd_kernel_size

        groups = [1, *self.widths[1:]]
        self.residual_layers = nn.ModuleList(
            PeriodBlock(width, kernel_size, split) for width, split in zip(self.widths, groups, strict=True)
        )

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

        self.layers = nn.ModuleList(SpectrumBlock(width) for width in self.widths)

    def tokens(self, wave_B1T: Tensor) -> Tensor:
        """Returns tokens BNLC."""
        wave_B1T = pad_to_multiple(wave_B1T, self.resolution.hop_size * math.prod(self.strides))
        spectrum_BNF = stft_magnitudes(self.resolution, wave_B1T)[..., :-1]  # The last frame is centred on the end.
        spectrum_BNF = spectrum_BNF.clamp(min=1e-5).log10()
        split_BNLC = split_last(spectrum_BNF, self.strides[0]).contiguous()
        embedded_BNLC = F.linear(split_BNLC, self.pre.weight)
        # Both biases are added to the frequency's embedding, so that one sum of gradients over tokens serves all three.
        of_frequency_N1C: Tensor = self.freq(self.freq_coords) + self.pre.bias
        return embedded_BNLC + of_frequency_N1C.to(embedded_BNLC.dtype)


class PeriodBlock(nn.Module):
    """A convolution along the tokens and three linear layers, with a gate behind the first two of them: NLC to NLC."""

    def __init__(self, width: int, kernel_size: int, groups: int) -> None:
        """`groups` is 1 or the width."""
        super().__init__()
        conv = nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2, groups=groups)
        first, second, last = (nn.Linear(width, factor * width) for factor in (2, 2, 1))
        self.net = nn.ModuleDict({"1": conv, "3": first, "5": second, "7": last})  # openvpi's names.

    def forward(self, x_NLC: Tensor) -> Tensor:
        conv, first, second, last = self.net.values()
        x_NLC = first(conv(x_NLC.transpose(1, 2)).transpose(1, 2).contiguous())
        made: Tensor = last(gated(second(gated(x_NLC))))
        return made


class SpectrumBlock(nn.Module):
    """A convolution over the tokens, a gate and a linear layer: BNLC to BNLC."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv, last = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1), nn.Linear(width, width)
        self.net = nn.ModuleDict({"1": conv, "4": last})  # openvpi's names.

    def forward(self, x_BNLC: Tensor) -> Tensor:
        conv, last = self.net.values()
        convolved_BCNL = conv(x_BNLC.movedim(-1, 1))
        # A linear layer would copy the values too, but not in the same way for weights that are frozen.
        made: Tensor = last(gated(convolved_BCNL.movedim(1, -1).contiguous()))
        return made


def gated(x: Tensor) -> Tensor:
    """Multiplies half of the channels by the other half, each bounded by softsign: ...(2 C) to ...C."""
    made: Tensor = _SoftSignGate.apply(x)  # type: ignore[no-untyped-call]
    return made


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
        halves = torch.unflatten(x, -1, (2, -1))
        inverse = halves.abs().add_(1).reciprocal_()
        others = (halves * inverse).flip(-2)
        gradient: Tensor = (others * gradients[0].unsqueeze(-2)).mul_(inverse.square_())
        return gradient.flatten(-2)


def unit_power(x: Tensor) -> Tensor:
    """Divides ...C by the root of its mean square (Zhang and Sennrich 2019), summed in fp32, in the precision of x."""
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)
