"""PatchGAN discriminator: scores overlapping patches of a picture (Isola et al. 2017, section 3.2.2).

Its normalisation never couples the items of a batch (no BatchNorm), so any split of a batch gives the same step.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class PatchDiscriminator(nn.Module):
    """Maps images BCHW in [-1, 1] to logits B1hw, one for each patch of 70 x 70 pixels."""

    def __init__(self, norm: Literal["group", "spectral"], channels: int, image_channels: int = 3) -> None:
        super().__init__()
        widths = [image_channels, channels, 2 * channels, 4 * channels, 8 * channels, 1]
        strides = [2, 2, 2, 1, 1]
        layers: list[nn.Module] = []
        for index, (before, after, stride) in enumerate(zip(widths, widths[1:], strides, strict=False)):
            inner = 0 < index < len(strides) - 1
            conv: nn.Module = nn.Conv2d(before, after, kernel_size=4, stride=stride, padding=1)
            layers.append(parametrizations.spectral_norm(conv) if norm == "spectral" else conv)
            if inner and norm == "group":
                layers.append(nn.GroupNorm(32, after))
            if index < len(strides) - 1:
                layers.append(nn.LeakyReLU(0.2, inplace=True))
        self.layers = nn.Sequential(*layers)
        self.eval()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_B1hw: Tensor = self.layers(images_BCHW)
        return logits_B1hw

    @torch.no_grad()
    def refresh_spectral_norms(self) -> None:
        """Runs one step of power iteration, once in each training step. (By default it would iterate in every forward
        pass, and the weights would depend on the split of the batch.)"""
        for layer in self.layers:
            if parametrize.is_parametrized(layer):
                layer.train()
                _ = layer.weight
                layer.eval()
