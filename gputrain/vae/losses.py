"""Losses of a reconstruction. Every loss returns one value for each picture, from tensors in fp32 or fp64.

Shapes: B items, C colours, H x W pixels, L latent channels, h x w latent positions. Pictures are in [-1, 1].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Weights of the scales, finest first: Wang, Simoncelli and Bovik 2003, section 3.2.
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
WINDOW, SIGMA = 11, 1.5  # Wang et al. 2004, section III-C


def pixel_distance(kind: str, made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """Returns the mean absolute ("l1") or squared ("l2") difference, (B,)."""
    difference = made_BCHW - target_BCHW
    return (difference.abs() if kind == "l1" else difference.square()).flatten(1).mean(dim=1)


def kl_divergence(mean_BLhw: Tensor, logvar_BLhw: Tensor, values: int) -> Tensor:
    """Returns the KL divergence of N(mean, var) from N(0, 1), summed over a picture and divided by its `values`
    (C x H x W), (B,).

    The objective of latent diffusion (Rombach et al. 2022, appendix G) also sums over the pixels. With both divided by
    the number of pixel values, its weight of 1e-6 has the same effect relative to a mean over pixels, at any size.
    """
    divergence_BLhw = 0.5 * (mean_BLhw.square() + logvar_BLhw.exp() - 1 - logvar_BLhw)
    return divergence_BLhw.flatten(1).sum(dim=1) / values


def structural(made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """Returns 1 - MS-SSIM plus the gradient distance at three scales, (B,): a perceptual loss without weights.

    It penalises misplaced edges and textures, whereas L1 alone favours blur.
    """
    with torch.autocast(made_BCHW.device.type, enabled=False):  # Variances are differences of close numbers.
        return 1 - ms_ssim(made_BCHW, target_BCHW) + gradient_distance(made_BCHW, target_BCHW)


def gradient_distance(made_BCHW: Tensor, target_BCHW: Tensor, scales: int = 3) -> Tensor:
    """Returns the mean absolute difference of horizontal and vertical image gradients, averaged over scales 1, 1/2 and
    1/4, (B,)."""
    difference = made_BCHW - target_BCHW
    total = difference.new_zeros(len(difference))
    for scale in range(scales):
        if scale:
            difference = F.avg_pool2d(difference, 2)
        total = total + difference.diff(dim=-1).abs().flatten(1).mean(dim=1)
        total = total + difference.diff(dim=-2).abs().flatten(1).mean(dim=1)
    return total / scales


def ms_ssim(made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """Returns the multi-scale structural similarity, (B,). Pictures under 176 pixels have fewer scales, with
    renormalised weights."""
    scales = min(len(MS_SSIM_WEIGHTS), 1 + int(math.log2(min(made_BCHW.shape[-2:]) / WINDOW)))
    weights = [weight / sum(MS_SSIM_WEIGHTS[:scales]) for weight in MS_SSIM_WEIGHTS[:scales]]
    similarity = made_BCHW.new_ones(len(made_BCHW))
    for scale, weight in enumerate(weights):
        if scale:
            made_BCHW, target_BCHW = F.avg_pool2d(made_BCHW, 2), F.avg_pool2d(target_BCHW, 2)
        full, contrast = ssim_terms(made_BCHW, target_BCHW)
        term = full if scale == scales - 1 else contrast
        # A fractional power has no finite gradient at 0; for such different pictures the other losses remain.
        similarity = similarity * term.clamp(min=1e-3) ** weight
    return similarity


def ssim(made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    return ssim_terms(made_BCHW, target_BCHW)[0]


def ssim_terms(made_BCHW: Tensor, target_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Returns SSIM and its contrast-structure term (Wang et al. 2004, equations 12 and 13), over complete windows:
    (B,) each."""
    c1, c2 = 0.01**2, 0.03**2
    channels = made_BCHW.shape[1]
    x, y = 0.5 * made_BCHW + 0.5, 0.5 * target_BCHW + 0.5  # Luminance is compared as a ratio, so black must be 0.
    moments = torch.cat([x, y, x**2, y**2, x * y], dim=1)
    mx, my, mxx, myy, mxy = torch.split(_blur(moments), channels, dim=1)
    contrast = (2 * (mxy - mx * my) + c2) / (mxx - mx**2 + myy - my**2 + c2)
    full = contrast * (2 * mx * my + c1) / (mx**2 + my**2 + c1)
    return full.flatten(1).mean(dim=1), contrast.flatten(1).mean(dim=1)


def _blur(x_BCHW: Tensor) -> Tensor:
    """Convolves with a Gaussian window, which is computed on the device to avoid a copy from the host."""
    at = torch.arange(WINDOW, device=x_BCHW.device, dtype=torch.float64) - WINDOW // 2
    window = torch.exp(-0.5 * (at / SIGMA) ** 2)
    window = (window / window.sum()).to(x_BCHW.dtype)
    channels = x_BCHW.shape[1]
    x_BCHW = F.conv2d(x_BCHW, window.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(x_BCHW, window.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)
