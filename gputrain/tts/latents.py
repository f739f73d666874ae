"""The posterior encoder of a recording, the flow between its latents and the prior, and the KL divergence of the
posterior from the prior (Kim, Kong and Son 2021, arXiv:2106.06103, sections 2.1.3 and 2.5).

Shape suffixes: B items, N frequencies, C channels, H half of the channels, G channels of a speaker, T frames.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gputrain.engine.gan import exact
from gputrain.tts.architecture import VoiceArchitecture
from gputrain.tts.wavenet import WaveNet


class Posterior(NamedTuple):
    """A normal distribution for each frame, and a sample of it; all fp32, zero beyond the end of an item."""

    latent_BCT: Tensor
    mean_BCT: Tensor
    log_scale_BCT: Tensor  # log standard deviation
    mask_B1T: Tensor  # True for frames inside an item


class PosteriorEncoder(nn.Module):
    """Encodes linear magnitudes into latents."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        hidden, latent = architecture.hidden_channels, architecture.latent_channels
        self.pre = nn.Conv1d(architecture.spectrogram_bins, hidden, 1)
        self.wavenet = WaveNet(
            hidden, architecture.wavenet_kernel_size, architecture.posterior_layers,
            architecture.conditioned_channels, checkpointing=checkpointing,
        )  # fmt: skip
        self.project = nn.Conv1d(hidden, 2 * latent, 1)

    def forward(
        self, spectrogram_BNT: Tensor, mask_B1T: Tensor, noise_BCT: Tensor, speaker_BG1: Tensor | None = None
    ) -> Posterior:
        hidden_BCT = self.wavenet(self.pre(spectrogram_BNT) * mask_B1T, mask_B1T, speaker_BG1)
        statistics = exact(self.project(hidden_BCT)) * mask_B1T
        mean_BCT, log_scale_BCT = statistics.chunk(2, dim=1)
        latent_BCT = (mean_BCT + noise_BCT * log_scale_BCT.exp()) * mask_B1T
        return Posterior(latent_BCT, mean_BCT, log_scale_BCT, mask_B1T)


class Flow(nn.Module):
    """Maps latents to the space of the prior, and back with `inverse`. It preserves volume: its log-determinant is
    zero."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(
            Coupling(architecture, checkpointing=checkpointing) for _ in range(architecture.flow_couplings)
        )

    def forward(self, latent_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        for coupling in self.couplings:
            first_BHT, second_BHT = latent_BCT.chunk(2, dim=1)
            second_BHT = second_BHT + coupling(first_BHT, mask_B1T, speaker_BG1)
            latent_BCT = torch.cat([first_BHT, second_BHT], dim=1).flip(1)
        return latent_BCT

    def inverse(self, prior_BCT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None = None) -> Tensor:
        for coupling in reversed(self.couplings):
            first_BHT, second_BHT = prior_BCT.flip(1).chunk(2, dim=1)
            second_BHT = second_BHT - coupling(first_BHT, mask_B1T, speaker_BG1)
            prior_BCT = torch.cat([first_BHT, second_BHT], dim=1)
        return prior_BCT


class Coupling(nn.Module):
    """Computes the shift of one half of the channels from the other half, in fp32; initialised to zero."""

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool) -> None:
        super().__init__()
        hidden, half = architecture.hidden_channels, architecture.latent_channels // 2
        self.pre = nn.Conv1d(half, hidden, 1)
        self.wavenet = WaveNet(
            hidden, architecture.wavenet_kernel_size, architecture.flow_layers,
            architecture.conditioned_channels, checkpointing=checkpointing,
        )  # fmt: skip
        self.post = nn.Conv1d(hidden, half, 1)
        nn.init.zeros_(self.post.weight)
        assert self.post.bias is not None
        nn.init.zeros_(self.post.bias)

    def forward(self, half_BHT: Tensor, mask_B1T: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        hidden_BCT = self.wavenet(self.pre(half_BHT) * mask_B1T, mask_B1T, speaker_BG1)
        return exact(self.post(hidden_BCT)) * mask_B1T


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
        log_scale_p_BCT = exact(log_scale_p_BCT)
        distance_BCT = (exact(prior_latent_BCT) - exact(mean_p_BCT)) ** 2
        kl_BCT = log_scale_p_BCT - exact(log_scale_q_BCT) - 0.5 + 0.5 * distance_BCT * (-2 * log_scale_p_BCT).exp()
        return (kl_BCT * mask_B1T).sum(dim=(1, 2))
