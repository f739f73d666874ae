"""Evaluates an autoencoder: reconstruction metrics, rFID, and sheets of pictures.

Shapes: B items, C channels of a picture, 3 colours, H x W pixels, L latent channels, h x w latent positions, F
features, R rank of a covariance.
"""

import importlib
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gputrain.data_in.split import GivenFolders, format_folders
from gputrain.errors import UserError, first_line, require
from gputrain.files import Progress, no_progress
from gputrain.hw.plan import DeviceName
from gputrain.hw.runtime import Runtime, runtime_on
from gputrain.samples import Report, Sheet, SheetCell
from gputrain.vae import losses
from gputrain.vae.architecture import PATCH
from gputrain.vae.config import Data, PictureEvaluation
from gputrain.vae.dataset import Picture, as_rgb, centre_crop, open_pictures, to_u8, to_unit
from gputrain.vae.latents import LatentScaling, PatchStatistics
from gputrain.vae.losses import how_to_fetch, named_files, read_published
from gputrain.vae.model import AutoencoderKL, Moments
from gputrain.vae.pictures import UnusablePicture
from gputrain.vae.pretrained import load_model

log = logging.getLogger(__name__)

SAMPLES = 8  # Pictures on a sheet of samples.
EVALUATED = 64  # Maximum number of pictures evaluated during training.
CHEQUER = 8  # Pixels a side of a square of the ground behind transparent pictures.
SHOWN_SIDE = 256  # Pixels a side of a picture on a sheet, if it is smaller.
PIXELS_AT_ONCE = 1 << 20  # Pixels whose differences are in memory.
ENCODED, DECODED = 0.3, 0.9  # Shares of the time of a picture, for the progress that is shown.
FEATURES = 2048  # Of the Inception network.
ENOUGH = 2048  # Minimum number of pictures for rFID: with fewer, covariances do not have full rank.
INCEPTION = "inception-fid"  # The short name of its weights.
Extractor = Callable[[Tensor], Tensor]  # uint8 pictures (B3HW) to features (BF)


@dataclass
class VaeFigures:
    """Metrics of an autoencoder, averaged over the pictures.

    `scalars` has `psnr_db` in decibels, `ssim` and `ms_ssim` (at most 1), `structural` (the perceptual loss), `l1`, and
    `rfid` if Inception's weights are given; `std_of_latents` and `mean_of_latents`, of all channels together. Their
    means and standard deviations by channel are in `latents`; those of an AutoencoderKLFlux2's means of latents in
    patches of 2x2, as pipelines of FLUX.2 take them, in `patches`.
    """

    scalars: dict[str, float]
    latents: "LatentMoments"
    pictures: int
    patches: "LatentMoments | None" = None

    def to_json(self) -> dict[str, object]:
        return {
            "pictures": self.pictures,
            **self.scalars,
            "latent_mean": self.latents.mean_L.tolist(),
            "latent_deviation": self.latents.deviation_L.tolist(),
        }


@dataclass
class LatentMoments:
    """Mean and variance, by channel, of latents sampled from their distributions; accumulated in float64."""

    count: int = 0
    sums_L: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares_L: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, moments: Moments) -> None:
        mean_BLhw, variance_BLhw = moments.mean_BLhw.double().cpu(), moments.logvar_BLhw.double().exp().cpu()
        self.count += mean_BLhw.numel() // mean_BLhw.shape[1]
        self.sums_L = self.sums_L + mean_BLhw.sum(dim=(0, 2, 3))
        self.squares_L = self.squares_L + (mean_BLhw.square() + variance_BLhw).sum(dim=(0, 2, 3))

    @property
    def mean_L(self) -> Tensor:
        return self.sums_L / self.count

    @property
    def deviation_L(self) -> Tensor:
        return (self.squares_L / self.count - self.mean_L**2).clamp(min=0).sqrt()

    @property
    def mean(self) -> float:
        return float(self.mean_L.mean())

    @property
    def deviation(self) -> float:
        """Standard deviation over all channels together."""
        return math.sqrt(max(float((self.squares_L / self.count).mean()) - self.mean**2, 1e-12))

    @property
    def scaling(self) -> LatentScaling:
        """The factors that give the latents a mean of 0 and a standard deviation of 1."""
        return LatentScaling(scaling_factor=1 / self.deviation, shift_factor=self.mean)

    @property
    def statistics(self) -> PatchStatistics:
        """The statistics that do so by channel, if these are the moments of patches."""
        return PatchStatistics(self.mean_L.tolist(), self.deviation_L.square().tolist())


def patched(moments: Moments) -> Moments:
    """Returns the means of latents with the positions of a patch of 2x2 as channels, in the order of FLUX.2's
    pipelines: (B, 4L, h / 2, w / 2). A last row or column without a neighbour is left out."""
    height, width = (side // PATCH * PATCH for side in moments.mean_BLhw.shape[2:])
    mean_BLhw = F.pixel_unshuffle(moments.mean_BLhw[:, :, :height, :width], PATCH)
    return Moments(mean_BLhw, torch.full_like(mean_BLhw, -math.inf))


@torch.no_grad()
def reconstruction_figures(
    model: AutoencoderKL,
    crops: Iterable[Tensor],
    device: torch.device,
    batch_size: int = 4,
    fid: "ReconstructionFid | None" = None,
    progress: Callable[[float], None] = lambda pictures: None,
) -> VaeFigures:
    """Reconstructs uint8 crops (CHW, all of one size) from the means of their latents, and computes metrics.

    Reconstructions are quantised to 8 bits, as in a file; with `fid`, rFID is computed too. `progress` receives the
    number of pictures that are done, parts of them included. Raises UserError if there are no crops.
    """
    rows: list[Tensor] = []
    latents, done, rest = LatentMoments(), 0, iter(crops)
    patches = LatentMoments() if model.architecture.patch_statistics else None
    while batch := list(islice(rest, batch_size)):
        images_BCHW = torch.stack(batch).to(device)
        target_BCHW = to_unit(images_BCHW)
        moments = model.encode(target_BCHW)
        progress(done + ENCODED * len(batch))
        saved_BCHW = to_u8(model.decode(moments.mean_BLhw))
        progress(done + DECODED * len(batch))
        latents.add(moments)
        if patches:
            patches.add(patched(moments))
        with torch.autocast(device.type, enabled=False):
            rows.append(torch.stack([metric(to_unit(saved_BCHW), target_BCHW) for metric in METRICS.values()]).cpu())
        if fid:
            fid.add(*(to_u8(as_rgb(to_unit(pictures_BCHW))) for pictures_BCHW in (saved_BCHW, images_BCHW)))
        done += len(batch)
        progress(done)
    if not rows:
        raise UserError("no readable picture to evaluate", hint="gputrain validate names each fault")
    values = torch.cat(rows, dim=1).double()
    scalars = dict(zip(METRICS, values.mean(dim=1).tolist(), strict=True))
    scalars |= {"rfid": fid.distance()} if fid else {}
    # Not as factors: those that a pipeline uses are in the export, measured on other pictures or given by the source.
    scalars |= {"std_of_latents": latents.deviation, "mean_of_latents": latents.mean}
    return VaeFigures(scalars, latents, values.shape[1], patches)


# Each of the pictures (B), from reconstructions and originals in [-1, 1].
METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "psnr_db": losses.psnr_db,
    "ssim": lambda made_BCHW, target_BCHW: losses.ssim_terms(made_BCHW, target_BCHW)[0],
    "ms_ssim": losses.ms_ssim,
    "structural": losses.structural,
    "l1": partial(losses.pixel_distance, "l1"),
}


def to_rgb(image_CHW: Tensor) -> Tensor:
    """Returns a uint8 picture as colours, HW3; transparency shows a chequered ground."""
    if len(image_CHW) == 4:
        height, width = image_CHW.shape[1:]
        rows_H, columns_W = torch.arange(height) // CHEQUER, torch.arange(width) // CHEQUER
        ground_HW = 204 + 51 * ((rows_H[:, None] + columns_W) % 2)
        opacity_HW = image_CHW[3].cpu() / 255
        image_CHW = (image_CHW[:3].cpu() * opacity_HW + ground_HW * (1 - opacity_HW)).round().byte()
    return image_CHW.expand(3, -1, -1).permute(1, 2, 0)


def reconstruction_sheet(
    originals: Sequence[Tensor],
    made: Sequence[Tensor],
    names: Sequence[str] = (),
    title: str = "",
    psnrs_db: Sequence[float] = (),
) -> Sheet:
    """Returns a sheet of pairs of uint8 pictures (CHW, equal sizes in a pair): originals in the upper row, with their
    names if there are any, and reconstructions with their PSNR in the lower row. `psnrs_db` are those of the whole
    pictures, if only parts are shown. Small pictures are enlarged by whole factors."""
    psnrs = psnrs_db or [picture_psnr_db(b, a) for a, b in zip(originals, made, strict=True)]
    labels = names or [""] * len(originals)
    upper = [SheetCell(_enlarged(to_rgb(a)), name) for a, name in zip(originals, labels, strict=True)]
    lower = [SheetCell(_enlarged(to_rgb(b)), f"{psnr:.1f} dB") for b, psnr in zip(made, psnrs, strict=True)]
    mean = f"PSNR {sum(psnrs) / len(psnrs):.1f} dB on average"
    return Sheet(("original", "reconstruction"), (upper, lower), f"{title}, {mean}" if title else mean)


def picture_psnr_db(made_CHW: Tensor, target_CHW: Tensor) -> float:
    """Returns the peak signal-to-noise ratio of a uint8 picture of any size, as `psnr_db` does, in little memory."""
    squares, rows = 0.0, max(1, PIXELS_AT_ONCE // made_CHW.shape[2])
    for top in range(0, made_CHW.shape[1], rows):
        made_CYW, target_CYW = made_CHW[:, top : top + rows], target_CHW[:, top : top + rows]
        squares += float((made_CYW.float().cpu() - target_CYW.float().cpu()).square().sum(dtype=torch.float64))
    mean = squares / made_CHW.numel() / 127.5**2
    return 10 * math.log10(4 / max(mean, 1e-10))


def _enlarged(picture_HW3: Tensor) -> Tensor:
    factor = max(1, SHOWN_SIDE // max(picture_HW3.shape[:2]))
    return picture_HW3.repeat_interleave(factor, dim=0).repeat_interleave(factor, dim=1)


def evaluate_pictures(
    model: Path,
    data_path: GivenFolders,
    options: PictureEvaluation,
    *,
    device: DeviceName = "auto",
    held_out_share: float | None = None,
    progress: Progress = no_progress,
) -> VaeFigures:
    """Evaluates a trained model on centre crops of the held-out pictures of a folder.

    Raises UserError if there is no such model or no picture, if the size is not a multiple of the model's
    downsampling, and if rFID is requested but cannot be computed.
    """
    runtime = runtime_on(device)
    fid = None
    if options.rfid_weights:
        (inception,) = named_files((options.rfid_weights,), (INCEPTION,))
        fid = ReconstructionFid(load_extractor(inception, runtime.device))
    loaded = load_model(model, runtime.device)
    runtime.place(loaded.model)
    trained = loaded.settings.data if loaded.settings else Data()
    image_size = trained.image_size if options.image_size is None else options.image_size
    share = trained.held_out_share if held_out_share is None else held_out_share
    architecture = loaded.model.architecture
    if image_size % architecture.downsampling:
        raise UserError(
            f"image_size {image_size} is not a multiple of {architecture.downsampling}",
            hint="that is the downsampling factor of this autoencoder",
        )
    own = format_folders(data_path) == format_folders(trained.data_path)
    pictures = open_pictures(data_path, held_out_share=share, exclude=trained.exclude if own else ())
    chosen = pictures.held_out if share < 1 else [*pictures.held_out, *pictures.train]
    chosen = chosen[: options.max_pictures]
    crops = readable_crops(chosen, image_size, architecture.in_channels)
    total = len(chosen)
    progress(0, total)
    with runtime.autocast():
        return reconstruction_figures(
            loaded.model, crops, runtime.device, options.batch_size, fid, lambda done: progress(done, total)
        )


def readable_crops(pictures: Sequence[Picture], image_size: int, channels: int) -> Iterator[Tensor]:
    """Yields centre crops (uint8, CHW) of the readable pictures; logs a warning for each of the others."""
    for picture in pictures:
        try:
            yield centre_crop(picture.path, image_size, channels)
        except UnusablePicture as refused:
            log.warning("%s; left out", refused)


class HeldOutPictures:
    """The pictures by which a training is evaluated and shown. Each is decoded once: metrics stay comparable, and
    pictures that disappear later cause no error."""

    def __init__(self, data: Data, pictures: Sequence[Picture]) -> None:
        """Raises UserError if a picture that the user chose for the samples is unreadable: now, instead of in the
        middle of the training."""
        self.data, self.pictures = data, pictures
        self.chosen = [centre_crop(path, data.image_size, data.image_channels) for path in data.sample_pictures]

    @cached_property
    def crops(self) -> list[Tensor]:
        return list(readable_crops(self.pictures[:EVALUATED], self.data.image_size, self.data.image_channels))

    @torch.no_grad()
    def sample(self, model: AutoencoderKL, runtime: Runtime) -> Report:
        """Returns a sheet of crops, held-out or the user's, and their reconstructions."""
        crops = self.chosen or self.crops[:SAMPLES]
        if not crops:
            return Report()
        with runtime.autocast():
            made = [
                to_u8(model.decode(model.encode(to_unit(crop[None].to(runtime.device))).mean_BLhw))[0].cpu()
                for crop in crops
            ]
        title = "own pictures" if self.chosen else "held-out pictures"
        return Report(pictures={"reconstructions": reconstruction_sheet(crops, made, title=title)})

    def evaluate(self, model: AutoencoderKL, runtime: Runtime) -> Report:
        with runtime.autocast():
            figures = reconstruction_figures(model, self.crops, runtime.device)
        return Report({**figures.scalars, "score": figures.scalars["psnr_db"]})


# ---------------------------------------------------------------------------------------------------------------- rFID

# The Fréchet inception distance (Heusel et al. 2017, arXiv:1706.08500) of reconstructions and their originals. The
# features are those of the Inception network that TensorFlow published in 2015, in torch-fidelity's implementation, so
# results are comparable with published ones. Nothing else needs that package or its weights.


def frechet_distance(mean_F: Tensor, covariance_FF: Tensor, other_mean_F: Tensor, other_covariance_FF: Tensor) -> float:
    """Returns |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½) of two Gaussians, in float64 (Dowson and Landau 1982, eq. 16).

    With C1 = A Aᵀ and C2 = B Bᵀ, the trace of the root is the sum of the singular values of Aᵀ B. Unlike a root of
    C1 C2 itself, this is stable for covariances without full rank, such as those of few pictures.
    """
    a_FR, b_FR = map(_factor, (covariance_FF, other_covariance_FF))
    shared = float(torch.linalg.svdvals(a_FR.T @ b_FR).sum())
    apart = float((mean_F - other_mean_F).square().sum())
    return max(0.0, apart + float(a_FR.square().sum() + b_FR.square().sum()) - 2 * shared)


def _factor(covariance_FF: Tensor) -> Tensor:
    """Returns A (F, R), such that covariance = A Aᵀ, without directions whose variance is only rounding error."""
    values_F, vectors_FF = torch.linalg.eigh(covariance_FF)
    kept_F = values_F > values_F[-1] * len(values_F) * torch.finfo(values_F.dtype).eps
    factor_FR: Tensor = vectors_FF[:, kept_F] * values_F[kept_F].sqrt()
    return factor_FR


class ReconstructionFid:
    """Accumulates features of originals and reconstructions, and computes their distance."""

    def __init__(self, extract: Extractor) -> None:
        self.extract = extract
        self.made: list[Tensor] = []  # The features of each batch, fp32 on the CPU: 8 kB a picture.
        self.target: list[Tensor] = []

    def add(self, made_B3HW: Tensor, target_B3HW: Tensor) -> None:
        """Adds a batch of reconstructions and originals, both uint8 on the extractor's device."""
        self.made.append(self.extract(made_B3HW).detach().cpu())
        self.target.append(self.extract(target_B3HW).detach().cpu())

    def distance(self) -> float:
        """Returns rFID, with a warning if there are too few pictures. Raises UserError for fewer than two."""
        features = [torch.cat(batches).double() for batches in (self.made, self.target)]
        count = len(features[0])
        if count < 2:
            raise UserError(f"rFID of {count} picture: it compares distributions", hint=f"evaluate {ENOUGH} or more")
        if count < ENOUGH:
            log.warning(
                "rFID of %d pictures is biased upwards: compare it only with rFID of the same pictures, or use %d or "
                "more", count, ENOUGH,
            )  # fmt: skip
        made, target = ((features_BF.mean(dim=0), features_BF.T.cov()) for features_BF in features)
        return frechet_distance(*made, *target)


def load_extractor(path: Path, device: torch.device) -> Extractor:
    """Loads the Inception network with the weights in `path`; it runs in fp32, also under autocast.

    Raises UserError if torch-fidelity is not installed, or the file is missing, damaged, or of another network.
    """
    require("torch_fidelity", "torchvision", needed_by="rFID", otherwise="leave --rfid-weights out")
    # The package would unpickle the whole file and run code in it, so it gets a copy that has only the tensors.
    tensors = io.BytesIO()
    torch.save(read_published(path, (INCEPTION,)), tensors)
    tensors.seek(0)
    try:
        package = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"torch-fidelity cannot be imported: {error}", hint="install the torchvision of this torch version"
        ) from None
    try:
        network = package.FeatureExtractorInceptionV3(
            "inception", [str(FEATURES)], feature_extractor_weights_path=tensors
        )
    except RuntimeError as error:
        raise UserError(
            f"{path}: not Inception's weights: {first_line(error)}", hint=how_to_fetch((INCEPTION,))
        ) from None
    network.to(device)

    def extract(images_B3HW: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(images_B3HW.device.type, enabled=False):
            features_BF: Tensor = network(images_B3HW)[0]
        return features_BF

    return extract
