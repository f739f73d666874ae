"""Losses and metrics of a reconstruction: distances of pixels and structure, LPIPS, and the discriminator. Each returns
one value for each picture, from tensors in fp32 or fp64.

Shapes: B items, C channels or colours, H x W pixels, S the side of a crop, L latent channels, h x w latent positions.
Pictures are in [-1, 1].
"""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pooch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gputrain.engine.checkpoint import load_weights
from gputrain.engine.recipe import at_least_fp32, per_item
from gputrain.errors import UserError
from gputrain.fetch.names import catalogue, close_names, find_published, local_path
from gputrain.vae.config import MEASURES
from gputrain.weights import read_weights_file

log = logging.getLogger(__name__)

# Weights of the scales, finest first: Wang, Simoncelli and Bovik 2003, section 3.2.
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
WINDOW, SIGMA = 11, 1.5  # Wang et al. 2004, section III-C


def pixel_distance(kind: str, made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """Returns the mean absolute ("l1") or squared ("l2") difference, (B,)."""
    difference = made_BCHW - target_BCHW
    return (difference.abs() if kind == "l1" else difference.square()).flatten(1).mean(dim=1)


def psnr_db(made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of each picture in decibels (B), for values in [-1, 1]."""
    squared_B = pixel_distance("l2", made_BCHW, target_BCHW)
    return 10 * torch.log10(4 / squared_B.clamp(min=1e-10))  # The range of [-1, 1] is 2, its square 4.


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


# ------------------------------------------------------------------------------------------------ adversarial losses
# Logits have the shape B...: pictures, then patches, over which they are averaged.


def discriminator_loss(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    """Returns the discriminator's hinge loss of each picture, B (Lim and Ye 2017)."""
    real_B, fake_B = per_item(F.relu(1 - at_least_fp32(real_logits))), per_item(F.relu(1 + at_least_fp32(fake_logits)))
    return 0.5 * real_B + 0.5 * fake_B


def generator_loss(fake_logits: Tensor) -> Tensor:
    """Returns the adversarial loss of each reconstruction, B."""
    return -per_item(fake_logits)


class Balance(nn.Module):
    """Statistics of earlier batches for the adversarial losses: part of every checkpoint, constant within a step.

    - `weight` balances the adversarial loss with the other losses by the norms of their gradients on the output, as
      in the loss balancer of EnCodec (Défossez et al. 2022, section 3.4) and, on the last layer, VQGAN (Esser et al.
      2021, section 3.2): weight = |other| / |adversarial|, clamped. It is 0 until the first measurement.
    - `real` and `fake` are moving averages of the discriminator's logits, which LeCam regularisation uses (Tseng et al.
      2021, equation 3).
    """

    weight: Tensor
    real: Tensor
    fake: Tensor

    def __init__(self, limit: float = 10.0, decay: float = 0.99) -> None:
        """`limit` is the largest weight."""
        super().__init__()
        self.limit, self.decay = limit, decay
        self.register_buffer("weight", torch.tensor(0.0))
        self.register_buffer("real", torch.tensor(0.0))
        self.register_buffer("fake", torch.tensor(0.0))

    def measure(self, other_squares: Tensor, adversarial_squares: Tensor, finite: Tensor) -> None:
        """Update the weight from the squared norms of the gradients over the whole batch; ignores non-finite steps."""
        measured = (other_squares.sqrt() / (adversarial_squares.sqrt() + 1e-12)).clamp(max=self.limit)
        self.weight.copy_(torch.where(finite & measured.isfinite(), measured, self.weight))

    def observe(self, real_mean: Tensor, fake_mean: Tensor, finite: Tensor) -> None:
        """Update the averages from the mean logits over the whole batch."""
        for average, seen in ((self.real, real_mean), (self.fake, fake_mean)):
            average.copy_(torch.where(finite, self.decay * average + (1 - self.decay) * seen, average))

    def lecam(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """B: squared distances of real logits from the average of fake ones, and vice versa."""
        real_distance = (at_least_fp32(real_logits) - self.fake) ** 2
        return per_item(real_distance) + per_item((at_least_fp32(fake_logits) - self.real) ** 2)


# -------------------------------------------------------------------------------------------------------- discriminator


class PatchDiscriminator(nn.Module):
    """Maps images BCHW in [-1, 1] to logits B1hw, one for each patch of 70 x 70 pixels (Isola et al. 2017, section
    3.2.2). Its normalisation never couples the items of a batch, so any split of a batch gives the same step."""

    def __init__(self, channels: int, image_channels: int = 3) -> None:
        super().__init__()
        widths = [image_channels, channels, 2 * channels, 4 * channels, 8 * channels, 1]
        strides = [2, 2, 2, 1, 1]
        layers: list[nn.Module] = []
        for index, (before, after, stride) in enumerate(zip(widths, widths[1:], strides, strict=False)):
            layers.append(nn.Conv2d(before, after, kernel_size=4, stride=stride, padding=1))
            if 0 < index < len(strides) - 1:
                layers.append(nn.GroupNorm(32, after))
            if index < len(strides) - 1:
                layers.append(nn.LeakyReLU(0.2, inplace=True))
        self.layers = nn.Sequential(*layers)
        self.eval()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_B1hw: Tensor = self.layers(images_BCHW)
        return logits_B1hw


# --------------------------------------------------------------------------------------------------------------- LPIPS

# Version 0.1 of the perceptual distance of two pictures in the features of VGG16 (Zhang et al. 2018, arXiv:1801.03924):
# features after the last ReLU of each of five stages are scaled to unit length at every pixel; the squared differences
# are weighted by channel with heads that were fitted to human ratings, averaged over the pixels, and summed over the
# stages.

# Stages of VGG16 (Simonyan and Zisserman 2014, table 1, column D) up to its last convolution: the indices of the
# convolutions in torchvision's list of layers, and their channels. There is a 2x2 max-pooling between stages.
STAGES = (((0, 2), 64), ((5, 7), 128), ((10, 12, 14), 256), ((17, 19, 21), 512), ((24, 26, 28), 512))
# Normalisation of inputs in [-1, 1] with ImageNet's mean and deviation by colour, as version 0.1 rounds them.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
EPS = 1e-10  # added to the length of a feature vector

# The short names of torchvision's VGG16, and of lpips/weights/v0.1/vgg.pth of the Python package lpips.
PUBLISHED_FILES = ("lpips-vgg16", "lpips-heads")


class Lpips(nn.Module):
    """The distance, with frozen weights. `load_lpips` loads them; until then they take no memory."""

    shift: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        width_in = 3
        self.features = nn.ModuleDict()  # The names are those of torchvision's file.
        self.heads = nn.ParameterList()
        for places, width in STAGES:
            for place in places:
                self.features[str(place)] = nn.Conv2d(width_in, width, 3, padding=1, device="meta")
                width_in = width
            self.heads.append(nn.Parameter(torch.empty(1, width, 1, 1, device="meta")))
        self.register_buffer("shift", torch.tensor(SHIFT).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False)

    @classmethod
    def without_values(cls) -> "Lpips":
        """Returns LPIPS with uninitialised weights, for fake tensors."""
        made = cls()
        weights = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in made.state_dict().items()}
        made.load_state_dict(weights, assign=True)  # to_empty does not work with fake tensors.
        return made.requires_grad_(False)

    def forward(self, made_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Returns the distance of each pair, (B,), in the dtype of the weights (fp32), also under autocast.

        Only `made_BCHW` gets a gradient. H and W are 16 or more. Each stage is compared as soon as it is computed, so
        only the outputs of made's convolutions and one difference for each stage are kept for the backward pass.
        """
        with torch.autocast(made_BCHW.device.type, enabled=False):
            made_BCHW = self._normalise(made_BCHW)
            target_BCHW = self._normalise(target_BCHW.detach())
            total_B: Tensor = made_BCHW.new_zeros(len(made_BCHW))
            for number, ((places, _), head_1C11) in enumerate(zip(STAGES, self.heads, strict=True)):
                if number:
                    made_BCHW, target_BCHW = F.max_pool2d(made_BCHW, 2), F.max_pool2d(target_BCHW, 2)
                for place in places:
                    convolution = self.features[str(place)]
                    # The in-place ReLU avoids a second tensor of the size of a convolution's output.
                    made_BCHW, target_BCHW = F.relu_(convolution(made_BCHW)), F.relu_(convolution(target_BCHW))
                difference_BCHW = _unit(made_BCHW) - _unit(target_BCHW)
                total_B += (difference_BCHW.square() * head_1C11).sum(dim=1).mean(dim=(1, 2))
        return total_B

    def _normalise(self, images_BCHW: Tensor) -> Tensor:
        return (images_BCHW.to(self.shift.dtype) - self.shift) / self.scale


def _unit(features_BCHW: Tensor) -> Tensor:
    """Scales the feature vector of every pixel to length 1."""
    length_B1HW: Tensor = torch.linalg.vector_norm(features_BCHW, dim=1, keepdim=True)
    return features_BCHW / (length_B1HW + EPS)


def load_lpips(files: tuple[Path, ...]) -> Lpips:
    """Loads LPIPS on the CPU from `files`: torchvision's VGG16 and the heads, in either order or in one file.

    Files are .pth or .safetensors, with tensors named as in the two published files or in the state of the lpips
    package's own network. Raises UserError if a file is damaged, or a tensor is missing or has another shape.
    """
    found = {_name(name): tensor for path in files for name, tensor in read_published(path, PUBLISHED_FILES).items()}
    model = Lpips()
    where = " and ".join(map(str, files)) or "no file"
    hint = f"name two files: --lpips-weights {','.join(PUBLISHED_FILES)}; {how_to_fetch(PUBLISHED_FILES)}"
    given = {name: found[name].float() for name in model.state_dict() if name in found}
    load_weights(model, given, f"{where}: LPIPS with VGG16", hint=hint, assign=True)
    return model.eval()


def _name(name: str) -> str:
    """Maps the name of a tensor in the published files, or in the lpips package's network (net.slice2.5.weight), to
    the name in `Lpips`."""
    name = re.sub(r"^net\.slice\d\.", "features.", name)
    return re.sub(r"^lin(\d)\.model\.1\.weight$", r"heads.\1", name)


def crop_corners(count: int, height: int, width: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws the top and left, (B,) each, of `count` crops with `size` pixels a side in pictures of height x width, on
    the generator's device. They are drawn for the whole batch, so that they can be split with it."""
    places = [
        torch.randint(side - size + 1, (count,), generator=generator, device=generator.device)
        for side in (height, width)
    ]
    return places[0], places[1]


def crop(images_BCHW: Tensor, top_B: Tensor, left_B: Tensor, size: int) -> Tensor:
    """Crops a square of each picture at its own position: (B, C, S, S). Differentiable, and without a device sync.

    The crops must lie within the pictures: 0 <= top <= H - size, 0 <= left <= W - size.
    """
    steps_S = torch.arange(size, device=images_BCHW.device)
    rows_B1S1 = (top_B[:, None] + steps_S)[:, None, :, None]
    columns_B11S = (left_B[:, None] + steps_S)[:, None, None, :]
    return images_BCHW.take_along_dim(rows_B1S1, dim=2).take_along_dim(columns_B11S, dim=3)


# ------------------------------------------------------------------------------------------ weights of measures


def named_files(names: Sequence[str | Path], known: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files of paths and published names, of which `known` are those with a short name that fit.

    Raises UserError, before anything is downloaded, if one of them is neither a file nor a name.
    """
    for name in names:
        if not Path(name).exists() and find_published(name) is None:
            close = close_names(str(name))
            hint = f"short names like it: {', '.join(close)}" if close else how_to_fetch(known)
            raise UserError(f"{name}: no such file", hint=hint)
    return tuple(local_path(name, MEASURES) for name in names)


def read_published(path: Path, known: Sequence[str]) -> dict[str, Tensor]:
    """Returns the tensors of a file, with a warning if it is none of those with a short name in `known`: figures of
    other weights are not comparable with published ones. Raises UserError as `read_weights_file` does."""
    tensors = read_weights_file(path).tensors
    published = {digest for name in known for digest in catalogue()[name].sha256.values()}
    if (found := pooch.file_hash(path)) not in published:
        log.warning(
            "%s: not the published weights (its SHA-256 is %s, theirs %s): figures of it compare with no others; %s",
            path, found, " or ".join(sorted(published)), how_to_fetch(known),
        )  # fmt: skip
    return tensors


def how_to_fetch(known: Sequence[str]) -> str:
    """Returns the command that loads the files with these short names."""
    files = " and ".join(catalogue()[name].file_name for name in known)
    return f"gputrain fetch {' '.join(known)} loads {files}"
