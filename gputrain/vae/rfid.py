"""rFID: Fréchet inception distance (Heusel et al. 2017, arXiv:1706.08500) of reconstructions and their originals.

The features are the 2048 of the Inception network that TensorFlow published in 2015, in torch-fidelity's
implementation, so results are comparable with published ones. Nothing else needs that package or its weights.

Shapes: B items, 3 colours, H x W pixels, F features, R rank of a covariance.
"""

import importlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.errors import UserError, first_line, require
from gputrain.vae.weights import how_to_fetch, read_published

log = logging.getLogger(__name__)

FEATURES = 2048
ENOUGH = 2048  # Minimum number of pictures: with fewer, covariances do not have full rank.
INCEPTION = "inception-fid"  # The short name of its weights.
Extractor = Callable[[Tensor], Tensor]  # uint8 pictures (B3HW) to features (BF)


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
        made, target = ((one_BF.mean(dim=0), one_BF.T.cov()) for one_BF in features)
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
