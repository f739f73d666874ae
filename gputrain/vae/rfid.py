"""rFID: Fréchet inception distance (Heusel et al. 2017, arXiv:1706.08500) of reconstructions and their originals.

The features are the 2048 of the Inception network that TensorFlow published in 2015, in torch-fidelity's
implementation, so results are comparable with published ones. Nothing else needs that package or its weights.

Shapes: B items, 3 colours, H x W pixels, F features, R rank of a covariance.
"""

import importlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.errors import UserError, first_line, require
from gputrain.vae.weights import how_to_fetch, read_tensors, verify_files

log = logging.getLogger(__name__)

FEATURES = 2048
ENOUGH = 2048  # Minimum number of pictures: with fewer, covariances do not have full rank.
INCEPTION = "inception-fid"  # The short name of its weights.
Extractor = Callable[[Tensor], Tensor]  # uint8 pictures (B3HW) to features (BF)


@dataclass
class FeatureMoments:
    """Mean and covariance of features, accumulated in float64 over batches (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean_F: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    scatter_FF: Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.float64))

    def add(self, features_BF: Tensor) -> None:
        features_BF = features_BF.detach().double()
        if not self.count:
            self.mean_F, self.scatter_FF = self.mean_F.to(features_BF), self.scatter_FF.to(features_BF)
        count = self.count + len(features_BF)
        mean_F = features_BF.mean(dim=0)
        centred_BF, apart_F = features_BF - mean_F, mean_F - self.mean_F
        between_FF = torch.outer(apart_F, apart_F) * (self.count * len(features_BF) / count)
        self.scatter_FF = self.scatter_FF + centred_BF.T @ centred_BF + between_FF
        self.mean_F = self.mean_F + apart_F * (len(features_BF) / count)
        self.count = count

    @property
    def covariance_FF(self) -> Tensor:
        return self.scatter_FF / (self.count - 1)


def frechet_distance(mean_F: Tensor, covariance_FF: Tensor, other_mean_F: Tensor, other_covariance_FF: Tensor) -> float:
    """Returns |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½) of two Gaussians, in float64 (Dowson and Landau 1982, eq. 16).

    With C1 = A Aᵀ and C2 = B Bᵀ, the trace of the root is the sum of the singular values of Aᵀ B. Unlike a root of
    C1 C2 itself, this is stable for covariances without full rank, such as those of few pictures.
    """
    a_FR, b_FR = (_factor(covariance.double().cpu()) for covariance in (covariance_FF, other_covariance_FF))
    shared = float(torch.linalg.svdvals(a_FR.T @ b_FR).sum())
    apart = float((mean_F.double() - other_mean_F.double()).square().sum())
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
        self.made, self.target = FeatureMoments(), FeatureMoments()

    def add(self, made_B3HW: Tensor, target_B3HW: Tensor) -> None:
        """Adds a batch of reconstructions and originals, both uint8 on the extractor's device."""
        for moments, images_B3HW in ((self.made, made_B3HW), (self.target, target_B3HW)):
            moments.add(self.extract(images_B3HW))

    def distance(self) -> float:
        """Returns rFID, with a warning if there are too few pictures. Raises UserError for fewer than two."""
        count = self.made.count
        if count < 2:
            raise UserError(f"rFID of {count} picture: it compares distributions", hint=f"evaluate {ENOUGH} or more")
        if count < ENOUGH:
            log.warning(
                "rFID of %d pictures is biased upwards: compare it only with rFID of the same pictures, or use %d or "
                "more",
                count, ENOUGH,
            )  # fmt: skip
        made, target = self.made, self.target
        return frechet_distance(made.mean_F, made.covariance_FF, target.mean_F, target.covariance_FF)


def load_extractor(path: Path, device: torch.device, sha256: str = "") -> Extractor:
    """Loads the Inception network with the weights in `path`; it runs in fp32, also under autocast.

    Raises UserError if torch-fidelity is not installed, or the file is missing, damaged, or neither the published one
    nor that of the given `sha256`.
    """
    verify_files((path,), (INCEPTION,), (sha256,) if sha256 else ())
    require("torch_fidelity", "torchvision", needed_by="rFID", otherwise="leave --rfid-weights out")
    # The package would unpickle the whole file and run code in it, so it gets a copy that has only the tensors.
    tensors = io.BytesIO()
    torch.save(read_tensors(path), tensors)
    tensors.seek(0)
    try:
        network = _inception()("inception", [str(FEATURES)], feature_extractor_weights_path=tensors)
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


def _inception() -> Any:
    """Returns torch-fidelity's class. Raises UserError if the torchvision that it imports does not fit torch."""
    try:
        return importlib.import_module("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # torchvision is of another build than torch.
        raise UserError(
            f"torch-fidelity cannot be imported: {error}", hint="install the torchvision of this torch version"
        ) from None
