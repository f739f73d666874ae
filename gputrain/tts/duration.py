"""Stochastic duration predictor: the distribution of each symbol's number of frames (Kim, Kong and Son 2021,
arXiv:2106.06103, section 2.2.2). It computes in fp32 at least, under any autocast.

Durations are integers of one dimension, and a flow needs real numbers of several: noise u in [0, 1) is subtracted
(variational dequantization, Ho et al. 2019, arXiv:1902.00275), and a second noise v adds a dimension
(variational data augmentation, Chen et al. 2020, arXiv:2002.09741). Both are drawn by a flow that is conditioned on the
durations. The flow is monotonic rational-quadratic splines with linear tails (Durkan, Bekasov, Murray and Papamakarios
2019, arXiv:1906.04032, section 3.1).

Shape suffixes: B items, S symbols, C channels, G channels of a speaker, 1 and 2 so many channels. For splines, x and
the results are `...`; tensors that describe K bins have them as their last dimension.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gputrain.engine.recipe import at_least_fp32
from gputrain.tts.architecture import VoiceArchitecture

SHORTEST = 1e-5  # minimum number of frames before the logarithm
SMALLEST = 1e-3  # minimum relative width and height of a bin, and minimum slope of a knot


def spline(
    x: Tensor, knots_K: Tensor, bound: float, *, temperature: float = 1.0, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the spline of x on [-bound, bound] and the log of its slope (of the inverse spline with `inverse`), both
    `...`. The tails are the identity. Any value of x gives finite results and gradients, in both directions.

    Knots are unconstrained, (..., 3K - 1): widths and heights of K bins, of which softmax at a temperature makes sizes,
    and K - 1 of which softplus makes slopes at the inner knots. The outer ones have slope 1, as the tails do.
    """
    # Beyond the bounds, the spline is computed at the bound and not used: so no gradient there is infinite.
    inside, safe = x.abs() < bound, x.clamp(-bound, bound)
    left, low, width, height, slope, next_slope = bin_of(safe, knots_K, bound, temperature, of_y=inverse)
    # In the names of Durkan et al.: place is xi, steepness s, and bend delta(k+1) + delta(k) - 2 s.
    steepness = height / width
    bend = slope + next_slope - 2 * steepness
    if inverse:
        # The position within the bin, in [0, 1], is the root of a quadratic formula without cancellation.
        above = safe - low
        a = height * (steepness - slope) + above * bend
        b = height * slope - above * bend
        c = -steepness * above
        discriminant = (b**2 - 4 * a * c).clamp(min=0)  # negative only by rounding
        place = 2 * c / (-b - discriminant.sqrt())
    else:
        place = (safe - left) / width
    both, rest = place * (1 - place), 1 - place
    under = steepness + bend * both
    of_slope = next_slope * place**2 + 2 * steepness * both + slope * rest**2
    log_slope = ((steepness / under) ** 2 * of_slope).log()
    if inverse:
        return torch.where(inside, left + place * width, x), torch.where(inside, -log_slope, 0)
    y = low + height * (steepness * place**2 + slope * both) / under
    return torch.where(inside, y, x), torch.where(inside, log_slope, 0)


def bin_of(x: Tensor, knots_K: Tensor, bound: float, temperature: float, *, of_y: bool) -> tuple[Tensor, ...]:
    """Returns the bin that x is in, or y with `of_y`: its left and low end, width and height, and the slopes at both
    ends, each `...`."""
    bins = knots_K.shape[-1] // 3 + 1
    shares_2K = (torch.unflatten(knots_K[..., : 2 * bins], -1, (2, bins)) / temperature).softmax(dim=-1)
    sizes_2K = 2 * bound * SMALLEST + 2 * bound * (1 - SMALLEST * bins) * shares_2K
    ends_2K = sizes_2K.cumsum(dim=-1)
    index_1 = ((x + bound)[..., None] >= ends_2K[..., int(of_y), :-1]).sum(dim=-1, keepdim=True)
    index_21 = index_1[..., None].expand(*x.shape, 2, 1)
    size_2, end_2 = (values_2K.gather(-1, index_21).squeeze(-1) for values_2K in (sizes_2K, ends_2K))
    # The slopes at the bounds are those of the tails, 1.
    slopes_K = F.pad(knots_K[..., 2 * bins :], (1, 1), value=math.log(math.expm1(1 - SMALLEST)))
    slopes_2 = SMALLEST + F.softplus(slopes_K.gather(-1, torch.cat([index_1, index_1 + 1], dim=-1)))
    return *(end_2 - size_2 - bound).unbind(-1), *size_2.unbind(-1), *slopes_2.unbind(-1)


class DurationPredictor(nn.Module):
    """Predicts durations from detached text and speaker features, so that it gives no gradient to them.

    With `checkpointing`, a stack of convolutions keeps only its input and is recomputed in the backward pass.
    """

    def __init__(self, architecture: VoiceArchitecture, *, checkpointing: bool = False) -> None:
        super().__init__()
        channels, dropout = architecture.hidden_channels, architecture.duration_dropout
        stack = functools.partial(SeparableStack, architecture, checkpointing=checkpointing)
        self.text_pre = nn.Conv1d(channels, channels, 1)
        self.text_stack, self.text_post = stack(dropout), nn.Conv1d(channels, channels, 1)
        if architecture.conditioned_channels:
            self.condition = nn.Conv1d(architecture.conditioned_channels, channels, 1)
        self.flow = DurationFlow(architecture, stack)
        self.posterior_pre = nn.Conv1d(1, channels, 1)
        self.posterior_stack, self.posterior_post = stack(dropout), nn.Conv1d(channels, channels, 1)
        self.posterior_flow = DurationFlow(architecture, stack)

    def forward(
        self,
        hidden_BCS: Tensor,
        mask_B1S: Tensor,
        durations_BS: Tensor,
        noise_B2S: Tensor,
        speaker_BG1: Tensor | None = None,
    ) -> Tensor:
        """Returns an upper bound of the negative log-likelihood of the durations in nats, summed over symbols, (B,).

        As in arXiv:2106.06103, section 2.2.2, at the one sample of u and v that standard normal noise gives:
        log q(u, v | d, text) - log p(d - u, v | text). The caller divides it by the number of symbols.
        """
        with torch.autocast(hidden_BCS.device.type, enabled=False):
            text_BCS = self._text(hidden_BCS, mask_B1S, speaker_BG1)
            durations_B1S = durations_BS.to(text_BCS.dtype)[:, None] * mask_B1S
            noise_B2S = at_least_fp32(noise_B2S) * mask_B1S
            drawn_B2S, log_q_B = self._posterior(text_BCS, mask_B1S, durations_B1S, noise_B2S)
            before_B1S, v_B1S = drawn_B2S.chunk(2, dim=1)
            log_q_B = log_q_B - _summed((F.logsigmoid(before_B1S) + F.logsigmoid(-before_B1S)) * mask_B1S)
            left_B1S = (durations_B1S - before_B1S.sigmoid()).clamp(min=SHORTEST)
            log_left_B1S = left_B1S.log() * mask_B1S
            normal_B2S, log_det_B = self.flow(torch.cat([log_left_B1S, v_B1S], dim=1), text_BCS, mask_B1S)
            log_p_B = _log_normal(normal_B2S, mask_B1S) + log_det_B - _summed(log_left_B1S)
            loss_B: Tensor = log_q_B - log_p_B
            return loss_B

    def spline_couplings(self) -> list[Any]:
        return [*self.flow.couplings, *self.posterior_flow.couplings]

    def log_durations(
        self, hidden_BCS: Tensor, mask_B1S: Tensor, noise_B2S: Tensor, speaker_BG1: Tensor | None = None
    ) -> Tensor:
        """Samples log durations in frames from normal noise, (B, 1, S); smaller noise gives less variance. Values where
        the mask is False are undefined."""
        with torch.autocast(hidden_BCS.device.type, enabled=False):
            text_BCS = self._text(hidden_BCS, mask_B1S, speaker_BG1)
            log_B1S, _ = self.flow.inverse(at_least_fp32(noise_B2S), text_BCS, mask_B1S).chunk(2, dim=1)
            return log_B1S

    def _text(self, hidden_BCS: Tensor, mask_B1S: Tensor, speaker_BG1: Tensor | None) -> Tensor:
        text_BCS = self.text_pre(at_least_fp32(hidden_BCS.detach()))
        if speaker_BG1 is not None:
            text_BCS = text_BCS + self.condition(at_least_fp32(speaker_BG1.detach()))
        told_BCS: Tensor = self.text_post(self.text_stack(text_BCS, mask_B1S)) * mask_B1S
        return told_BCS

    def _posterior(
        self, text_BCS: Tensor, mask_B1S: Tensor, durations_B1S: Tensor, noise_B2S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns u before its sigmoid and v, (B, 2, S), and their log-density, (B,)."""
        known_BCS = self.posterior_stack(self.posterior_pre(durations_B1S), mask_B1S)
        known_BCS = text_BCS + self.posterior_post(known_BCS) * mask_B1S
        drawn_B2S, log_det_B = self.posterior_flow(noise_B2S, known_BCS, mask_B1S)
        return drawn_B2S, _log_normal(noise_B2S, mask_B1S) - log_det_B


class DurationFlow(nn.Module):
    """An affine map, then spline couplings that transform one of two numbers given the other, alternately."""

    def __init__(self, architecture: VoiceArchitecture, stack: Callable[[float], "SeparableStack"]) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(2, 1)), nn.Parameter(torch.zeros(2, 1))
        self.bound = architecture.duration_bound
        self.couplings = nn.ModuleList(SplineCoupling(architecture, stack) for _ in range(architecture.duration_flows))

    def forward(self, x_B2S: Tensor, text_BCS: Tensor, mask_B1S: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the transformed numbers, (B, 2, S), and the log-determinant summed over symbols, (B,)."""
        x_B2S = (self.shift + self.log_scale.exp() * x_B2S) * mask_B1S
        log_det_B = _summed(self.log_scale * mask_B1S)
        coupling: Any
        for coupling in self.couplings:
            x_B2S, log_slope_B = coupling.transform(x_B2S, text_BCS, mask_B1S, self.bound)
            log_det_B = log_det_B + log_slope_B
        return x_B2S, log_det_B

    def inverse(self, x_B2S: Tensor, text_BCS: Tensor, mask_B1S: Tensor) -> Tensor:
        """Maps noise to log durations. As in VITS, the first coupling is skipped: it only affects v."""
        for coupling in reversed(self.couplings[1:]):
            second_B1S, first_B1S = x_B2S.chunk(2, dim=1)
            second_B1S, _ = coupling(second_B1S, first_B1S, text_BCS, mask_B1S, self.bound, inverse=True)
            x_B2S = torch.cat([first_B1S, second_B1S], dim=1) * mask_B1S
        return (x_B2S.flip(1) - self.shift) * (-self.log_scale).exp() * mask_B1S


class SplineCoupling(nn.Module):
    """A spline for every symbol whose knots depend on the other number, initialised to equal bins."""

    def __init__(self, architecture: VoiceArchitecture, stack: Callable[[float], "SeparableStack"]) -> None:
        super().__init__()
        channels = architecture.hidden_channels
        self.pre, self.stack = nn.Conv1d(1, channels, 1), stack(0.0)
        self.project = nn.Conv1d(channels, 3 * architecture.duration_bins - 1, 1)
        nn.init.zeros_(self.project.weight)
        assert self.project.bias is not None
        nn.init.zeros_(self.project.bias)

    def forward(
        self, x_B1S: Tensor, first_B1S: Tensor, text_BCS: Tensor, mask_B1S: Tensor, bound: float, inverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the spline of x, or its inverse, and the log of its slope."""
        hidden_BCS = self.stack(self.pre(first_B1S) + text_BCS, mask_B1S)
        knots_B1SK = (self.project(hidden_BCS) * mask_B1S).transpose(1, 2)[:, None]
        return spline(x_B1S, knots_B1SK, bound, temperature=math.sqrt(self.project.in_channels), inverse=inverse)

    def transform(self, x_B2S: Tensor, text_BCS: Tensor, mask_B1S: Tensor, bound: float) -> tuple[Tensor, Tensor]:
        """Returns both numbers in exchanged order, the second one transformed, (B, 2, S), and the log of the spline's
        slope summed over symbols, (B,)."""
        first_B1S, second_B1S = x_B2S.chunk(2, dim=1)
        second_B1S, slope_B1S = self.forward(second_B1S, first_B1S, text_BCS, mask_B1S, bound)
        return torch.cat([second_B1S, first_B1S], dim=1) * mask_B1S, _summed(slope_B1S * mask_B1S)


class SeparableStack(nn.Module):
    """Residual layers of a dilated depthwise and a pointwise convolution, each followed by a LayerNorm."""

    def __init__(self, architecture: VoiceArchitecture, dropout: float, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        kernel, layers = architecture.duration_kernel_size, architecture.duration_layers
        self.layers = nn.ModuleList(
            SeparableLayer(architecture.hidden_channels, kernel, kernel**index, dropout) for index in range(layers)
        )

    def forward(self, x_BCS: Tensor, mask_B1S: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            kept: Tensor = checkpoint(self._run, x_BCS, mask_B1S, use_reentrant=False)
            return kept
        return self._run(x_BCS, mask_B1S)

    def _run(self, x_BCS: Tensor, mask_B1S: Tensor) -> Tensor:
        layer: Any
        for layer in self.layers:
            x_BCS = x_BCS + layer(x_BCS * mask_B1S)
        return x_BCS * mask_B1S


class SeparableLayer(nn.Module):
    def __init__(self, channels: int, kernel: int, dilation: int, dropout: float) -> None:
        super().__init__()
        padding = dilation * (kernel // 2)
        self.depthwise = nn.Conv1d(channels, channels, kernel, padding=padding, dilation=dilation, groups=channels)
        self.depthwise_norm = nn.LayerNorm(channels)
        self.pointwise = nn.Linear(channels, channels)
        self.pointwise_norm = nn.LayerNorm(channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BCS: Tensor) -> Tensor:
        x_BSC = F.gelu(self.depthwise_norm(self.depthwise(x_BCS).transpose(1, 2)))
        x_BSC = F.gelu(self.pointwise_norm(self.pointwise(x_BSC)))
        dropped: Tensor = self.dropout(x_BSC)
        return dropped.transpose(1, 2)


def _summed(x_BCS: Tensor) -> Tensor:
    return x_BCS.sum(dim=(1, 2))


def _log_normal(x_BCS: Tensor, mask_B1S: Tensor) -> Tensor:
    """Returns the log-density of the standard normal distribution, summed over symbols, (B,)."""
    return _summed(-0.5 * (math.log(2 * math.pi) + x_BCS**2) * mask_B1S)
