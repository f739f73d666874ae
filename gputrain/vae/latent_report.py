"""Reports what a denoiser meets in the latents of an autoencoder: their spectrum, the statistics of each channel, and
how far they follow pictures that are scaled or turned.

Shapes: B items, L latent channels, C channels of a picture, h x w latent positions, H x W pixels, R radial frequencies.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.vae.equivariance import Transformation
from gputrain.vae.losses import psnr_db
from gputrain.vae.tiny import Autoencoder

TRANSFORMED = 64  # Pictures that are encoded and decoded transformed, which takes as long as two more each.
DEAD = 0.01  # A channel whose standard deviation is a smaller share of the largest one carries hardly anything.


@dataclass
class Equivariance:
    """Sums for the error of one transformation T."""

    errors: float = 0.0  # |E(T x) - T E(x)|^2
    squares_L: Tensor | float = 0.0
    sums_L: Tensor | float = 0.0
    count: int = 0
    psnrs_db: list[float] = field(default_factory=list)

    @property
    def psnr_db(self) -> float:
        return sum(self.psnrs_db) / len(self.psnrs_db)

    @property
    def relative_error(self) -> float:
        """Returns |E(T x) - T E(x)| relative to the norm of T E(x) without its mean by channel."""
        squares = torch.as_tensor(self.squares_L - self.sums_L**2 / self.count).sum()
        return math.sqrt(self.errors / max(float(squares), 1e-12))


@dataclass
class LatentReport:
    """Figures of the means of latents, accumulated in float64 over batches of one size."""

    powers_4L: Tensor | float = 0.0  # Sums of the first four powers, by channel.
    count: int = 0
    spectra: list[Tensor | float] = field(default_factory=lambda: [0.0, 0.0])  # Of latents, LR, and pictures, CR.
    turned: dict[str, Equivariance] = field(default_factory=dict)
    pictures: int = 0

    @torch.no_grad()
    def add(self, model: Autoencoder, images_BCHW: Tensor, mean_BLhw: Tensor) -> None:
        """Adds square pictures in [-1, 1] and the means of their latents."""
        side = mean_BLhw.shape[-1]
        latents_BLhw = mean_BLhw.double()
        by_channel_LN = latents_BLhw.transpose(0, 1).flatten(1)
        self.powers_4L = self.powers_4L + torch.stack([by_channel_LN.pow(n).sum(1) for n in (1, 2, 3, 4)]).cpu()
        self.count += by_channel_LN.shape[1]
        small_BCHW = F.adaptive_avg_pool2d(images_BCHW.double(), side)
        added = (radial_spectra(planes).cpu() for planes in (latents_BLhw, small_BCHW))
        self.spectra = [before + more for before, more in zip(self.spectra, added, strict=True)]
        if self.pictures < TRANSFORMED:
            self._add_transformed(model, images_BCHW, mean_BLhw)
        self.pictures += len(images_BCHW)

    def _add_transformed(self, model: Autoencoder, images_BCHW: Tensor, mean_BLhw: Tensor) -> None:
        side = mean_BLhw.shape[-1]
        both = {"half": Transformation(side // 2, side, 0), "turn": Transformation(side, side, 1)}
        for name, transformation in both.items():
            if not transformation.side:
                continue  # A single latent has no half.
            sums = self.turned.setdefault(name, Equivariance())
            target_BCHW, latents_BLhw = transformation(images_BCHW), transformation(mean_BLhw)
            wanted_BLhw = latents_BLhw.double()
            sums.errors += float((model.encode(target_BCHW).mean_BLhw.double() - wanted_BLhw).square().sum())
            sums.squares_L = sums.squares_L + wanted_BLhw.square().sum((0, 2, 3)).cpu()
            sums.sums_L = sums.sums_L + wanted_BLhw.sum((0, 2, 3)).cpu()
            sums.count += wanted_BLhw[:, 0].numel()
            made_BCHW = model.decode(latents_BLhw).clamp(-1, 1).double()
            sums.psnrs_db += psnr_db(made_BCHW, target_BCHW).tolist()

    @property
    def channels(self) -> dict[str, list[float]]:
        """Returns mean, standard deviation, skewness and excess kurtosis of each channel."""
        first_L, second_L, third_L, fourth_L = torch.as_tensor(self.powers_4L) / self.count
        variance_L = (second_L - first_L**2).clamp(min=1e-12)
        third = third_L - 3 * first_L * second_L + 2 * first_L**3
        fourth = fourth_L - 4 * first_L * third_L + 6 * first_L**2 * second_L - 3 * first_L**4
        found = (first_L, variance_L.sqrt(), third / variance_L**1.5, fourth / variance_L**2 - 3)
        names = ("mean", "std", "skewness", "excess_kurtosis")
        return {name: values.tolist() for name, values in zip(names, found, strict=True)}

    @property
    def dead(self) -> list[int]:
        """Returns the channels that carry hardly anything."""
        stds = self.channels["std"]
        return [number for number, std in enumerate(stds) if std < DEAD * max(stds)]

    def spectrum(self, of: int) -> list[float]:
        """Returns the shares of the power at each radial frequency, without the mean, of the latents (0) or of the
        pictures (1): the average over the channels that are not dead."""
        power_LR = torch.as_tensor(self.spectra[of])[:, 1:]
        total_L = power_LR.sum(1)
        alive_L = total_L >= DEAD**2 * total_L.max()  # All of them in pictures of a single colour, which have no power.
        shares: list[float] = (power_LR[alive_L] / total_L[alive_L, None].clamp(min=1e-12)).mean(0).tolist()
        return shares

    def high(self, of: int) -> float:
        """Returns the share of the power in the upper half of the frequencies."""
        spectrum = self.spectrum(of)
        return sum(spectrum[len(spectrum) // 2 :])

    @property
    def shown(self) -> dict[str, object]:
        """The figures for the terminal."""
        channels = self.channels
        shown: dict[str, object] = {
            "std of a channel": f"{min(channels['std']):.3g} to {max(channels['std']):.3g}",
            "excess kurtosis": f"{min(channels['excess_kurtosis']):.3g} to {max(channels['excess_kurtosis']):.3g}",
            "dead channels": ", ".join(map(str, self.dead)) or "none",
            "power in upper frequencies": f"{100 * self.high(0):.3g} % (pictures of that size: "
            f"{100 * self.high(1):.3g} %)",
        }
        names = {"half": "half the size", "turn": "a quarter turn"}
        for name, sums in self.turned.items():
            off = f"off by {100 * sums.relative_error:.3g} %; decoded {sums.psnr_db:.4g} dB"
            shown[f"latents of {names[name]}"] = off
        return shown

    def to_json(self) -> dict[str, Any]:
        return {
            "channels": self.channels,
            "dead_channels": self.dead,
            "spectrum": {"latents": self.spectrum(0), "pictures": self.spectrum(1)},
            "upper_frequencies": {"latents": self.high(0), "pictures": self.high(1)},
            "equivariance": {
                name: {"relative_error": sums.relative_error, "decoded_psnr_db": sums.psnr_db}
                for name, sums in self.turned.items()
            },
        }


def radial_spectra(planes_BChw: Tensor) -> Tensor:
    """Returns the power of the channels of square planes, each without its mean, by radial frequency from 0 to half a
    cycle in a position: (channels, side // 2 + 1), summed over the items.

    A Hann window keeps the borders, which do not meet, from looking like high frequencies.
    """
    side, device = planes_BChw.shape[-1], planes_BChw.device
    centred_BChw = planes_BChw - planes_BChw.mean((2, 3), keepdim=True)
    if side > 3:  # The window of fewer positions is hardly more than one of them.
        window_h = torch.hann_window(side, dtype=planes_BChw.dtype, device=device)
        centred_BChw = centred_BChw * window_h * window_h[:, None]
    power_Chw: Tensor = torch.fft.fft2(centred_BChw).abs().square().sum(0)
    rows_h = torch.fft.fftfreq(side, 1 / side, device=device)
    radius_hw = torch.hypot(rows_h[:, None], rows_h).round().long()
    spectra_CR = power_Chw.new_zeros(len(power_Chw), int(radius_hw.max()) + 1)
    spectra_CR.index_add_(1, radius_hw.flatten(), power_Chw.flatten(1))
    return spectra_CR[:, : side // 2 + 1]
