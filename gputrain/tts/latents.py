"""The posterior encoder of a recording, the flow between its latents and the prior, and the KL divergence of the
posterior from the prior (Kim, Kong and Son 2021, arXiv:2106.06103, sections 2.1.3 and 2.5).

The body of the first two is WaveNet's gated convolutions without causality (van den Oord et al. 2016, arXiv:1609.03499,
section 2.3; as in WaveGlow, Prenger et al. 2018, arXiv:1811.00002).

Shape suffixes: B items, N frequencies, C channels, H half of the channels, G channels of a speaker, T frames, 1 a
dimension to broadcast over.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.audio.weight_norm import WeightNormed
from gputrain.engine.recipe import at_least_fp32
from gputrain.tts.architecture import VoiceArchitecture


class Posterior(NamedTuple):
    """A normal distribution for each frame, and a sample of it; all fp32, zero beyond the end of an item."""

    latent_BCT: Tensor
    mean_BCT: Tensor
    log_scale_BCT: Tensor  # log standard deviation
    mask_B1T: Tensor  # True for frames inside an item


class PosteriorEncoder(nn.Module):
    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        hidden, latent = architecture.hidden_channels, architecture.latent_channels
        self.pre = nn.Conv1d(architecture.spectrogram_bins, hidden, 1)
        self.wavenet = WaveNet(architecture, architecture.posterior_layers, checkpointing=checkpointing)
        self.project = nn.Conv1d(hidden, 2 * latent, 1)

    def forward(
        self, spectrogram_BNT: Tensor, mask_B1T: Tensor, noise_BCT: Tensor, speaker_BG1: Tensor | None = None
    ) -> Posterior:
        hidden_BCT = self.wavenet(self.pre(spectrogram_BNT) * mask_B1T, mask_B1T, speaker_BG1)
        statistics = at_least_fp32(self.project(hidden_BCT)) * mask_B1T
        mean_BCT, log_scale_BCT = statistics.chunk(2, dim=1)
        latent_BCT = (mean_BCT + noise_BCT * log_scale_BCT.exp()) * mask_B1T
        return Posterior(latent_BCT, mean_BCT, log_scale_BCT, mask_B1T)


class Flow(nn.Module):
    """Maps latents to the space of the prior, and back with `inverse`. Its log-determinant is zero."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            Coupling(architecture, checkpointing=checkpointing) for _ in range(architecture.flow_couplings)
        )

    def forward(self, latent_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        for coupling in self.couplings:
            latent_BCT = coupling(latent_BCT, mask_B1T, speaker_BG1)
        return latent_BCT

    def inverse(self, prior_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        coupling: Any
        for coupling in reversed(self.couplings):
            prior_BCT = coupling.inverse(prior_BCT, mask_B1T, speaker_BG1)
        return prior_BCT


class Coupling(nn.Module):
    """Adds to one half of the channels a shift that it computes from the other half, and exchanges both by reversing
    the channels. The shift is fp32, and zero at first."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool) -> None:
        super().__init__()
        hidden, half = architecture.hidden_channels, architecture.latent_channels // 2
        self.pre = nn.Conv1d(half, hidden, 1)
        self.wavenet = WaveNet(architecture, architecture.flow_layers, checkpointing=checkpointing)
        self.post = nn.Conv1d(hidden, half, 1)
        nn.init.zeros_(self.post.weight)
        assert self.post.bias is not None
        nn.init.zeros_(self.post.bias)

    def forward(self, latent_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        first_BHT, second_BHT = latent_BCT.chunk(2, dim=1)
        second_BHT = second_BHT + self.shift(first_BHT, mask_B1T, speaker_BG1)
        return torch.cat([first_BHT, second_BHT], dim=1).flip(1)

    def inverse(self, latent_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        first_BHT, second_BHT = latent_BCT.flip(1).chunk(2, dim=1)
        second_BHT = second_BHT - self.shift(first_BHT, mask_B1T, speaker_BG1)
        return torch.cat([first_BHT, second_BHT], dim=1)

    def shift(self, half_BHT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        hidden_BCT = self.wavenet(self.pre(half_BHT) * mask_B1T, mask_B1T, speaker_BG1)
        return at_least_fp32(self.post(hidden_BCT)) * mask_B1T


def kl_loss(
    prior_latent_BCT: Tensor, log_scale_q_BCT: Tensor, mean_p_BCT: Tensor, log_scale_p_BCT: Tensor, mask_B1T: Tensor
) -> Tensor:
    """Returns the KL divergence of the posterior from the prior in nats, summed over channels and frames, (B,).

    As in arXiv:2106.06103, section 2.1.3, with the posterior's entropy in closed form and its cross-entropy at the
    one sample that was drawn, `prior_latent_BCT`, after the flow:
    log s_p - log s_q - 1/2 + (f(z) - m_p)^2 / (2 s_p^2). The caller divides it by the number of frames. It is computed
    in fp32 at least.
    """
    with torch.autocast(mask_B1T.device.type, enabled=False):
        log_scale_p_BCT = at_least_fp32(log_scale_p_BCT)
        distance_BCT = (at_least_fp32(prior_latent_BCT) - at_least_fp32(mean_p_BCT)) ** 2
        kl_BCT = (
            log_scale_p_BCT - at_least_fp32(log_scale_q_BCT) - 0.5 + 0.5 * distance_BCT * (-2 * log_scale_p_BCT).exp()
        )
        return (kl_BCT * mask_B1T).sum(dim=(1, 2))


class WaveNet(nn.Module):
    """Layers of a gated convolution, each of which adds to the next one's input and to the result.

    With `checkpointing`, a layer keeps only its input and is recomputed in the backward pass.
    """

    def __init__(self, architecture: VoiceArchitecture, layers: int, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        channels, kernel = architecture.hidden_channels, architecture.wavenet_kernel_size
        last = layers - 1  # The last layer has no residual output.
        self.layers = nn.ModuleList(GatedLayer(channels, kernel, last=index == last) for index in range(layers))
        if architecture.conditioned_channels:
            self.condition = WeightNormed(nn.Conv1d(architecture.conditioned_channels, 2 * channels * layers, 1))

    def forward(self, x_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        """Returns BCT, zero where the mask is False. `x_BCT` must be zero there as well."""
        offsets: Any = [None] * len(self.layers)
        if speaker_BG1 is not None:
            offsets = self.condition(speaker_BG1).chunk(len(self.layers), dim=1)
        sum_BCT: Tensor | None = None
        for layer, offset_BD1 in zip(self.layers, offsets, strict=True):
            run: Callable[..., tuple[Tensor, Tensor]] = layer
            if self.checkpointing and torch.is_grad_enabled():
                run = functools.partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
            x_BCT, skip_BCT = run(x_BCT, mask_B1T, offset_BD1)
            sum_BCT = skip_BCT if sum_BCT is None else sum_BCT + skip_BCT
        assert sum_BCT is not None
        return sum_BCT * mask_B1T


class GatedLayer(nn.Module):
    def __init__(self, channels: int, kernel: int, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.conv = WeightNormed(nn.Conv1d(channels, 2 * channels, kernel, padding=kernel // 2))
        self.out = WeightNormed(nn.Conv1d(channels, channels if last else 2 * channels, 1))

    def forward(self, x_BCT: Tensor, mask_B1T: Tensor, offset_BD1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the next layer's input and the skip output, both BCT."""
        gated_BDT = self.conv(x_BCT)
        if offset_BD1 is not None:
            gated_BDT = gated_BDT + offset_BD1
        out_BDT = self.out(gate(gated_BDT))
        if self.last:
            return x_BCT, out_BDT
        onward_BCT, skip_BCT = out_BDT.chunk(2, dim=1)
        return (x_BCT + onward_BCT) * mask_B1T, skip_BCT


def gate(x_BDT: Tensor) -> Tensor:
    """Returns the tanh of the first half of the channels times the sigmoid of the second: (B, 2 C, T) to (B, C, T)."""
    value_BCT, gate_BCT = x_BDT.chunk(2, dim=1)
    return torch.tanh(value_BCT) * torch.sigmoid(gate_BCT)
