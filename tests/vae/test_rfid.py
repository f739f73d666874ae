"""rFID: closed forms, scipy's matrix root, few pictures, and torch-fidelity itself if it is installed."""

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from gputrain.errors import UserError
from gputrain.vae.architecture import PRESETS
from gputrain.vae.config import PictureEvaluation
from gputrain.vae.dataset import centre_crop, open_pictures, to_u8, to_unit
from gputrain.vae.diffusers_folder import save_diffusers
from gputrain.vae.evaluate import ReconstructionFid, evaluate_pictures, frechet_distance, reconstruction_figures
from gputrain.vae.latents import LatentScaling
from gputrain.vae.model import AutoencoderKL
from tests.vae.test_use import TINY

CPU = torch.device("cpu")


def random_gaussian(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.randn(size, generator=generator, dtype=torch.float64), factor @ factor.T / size


def by_scipy(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    root = scipy.linalg.sqrtm((covariance @ other_covariance).numpy()).real
    apart = float((mean - other_mean).square().sum())
    return apart + float(covariance.trace() + other_covariance.trace()) - 2 * float(np.trace(root))


def basis(size: int, seed: int = 9) -> Tensor:
    square = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(square).Q


def test_distance_of_independent_features() -> None:
    """Diagonal covariances in a random basis: |m1 - m2|² + the sum of (deviation1 - deviation2)²."""
    mean, other_mean = torch.randn(2, 40, dtype=torch.float64)
    deviation, other = torch.rand(2, 40, dtype=torch.float64) * 3
    turn = basis(40)
    expected = float((mean - other_mean).square().sum() + (deviation - other).square().sum())
    covariances = [turn @ torch.diag(d**2) @ turn.T for d in (deviation, other)]
    found = frechet_distance(turn @ mean, covariances[0], turn @ other_mean, covariances[1])
    assert found == pytest.approx(expected, rel=1e-12)


def test_distance_is_scipys() -> None:
    one, other = random_gaussian(60, 1), random_gaussian(60, 2)
    expected = by_scipy(*one, *other)
    assert frechet_distance(*one, *other) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*other, *one) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*one, *one) == pytest.approx(0, abs=1e-11)


def test_covariances_short_of_full_rank() -> None:
    """The distance does not change if five features are embedded in two hundred."""
    one, other = random_gaussian(5, 1), random_gaussian(5, 2)
    along = basis(200)[:, :5]
    wide = [(along @ mean, along @ covariance @ along.T) for mean, covariance in (one, other)]
    assert frechet_distance(*wide[0], *wide[1]) == pytest.approx(by_scipy(*one, *other), rel=1e-10)
    across = basis(200)[:, 5:10]
    apart = frechet_distance(*wide[0], across @ other[0], across @ other[1] @ across.T)
    squares = sum(float(mean.square().sum() + covariance.trace()) for mean, covariance in (one, other))
    assert apart == pytest.approx(squares, rel=1e-10)
    nothing = (torch.zeros(200, dtype=torch.float64), torch.zeros(200, 200, dtype=torch.float64))
    alone = float(one[0].square().sum() + one[1].trace())
    assert frechet_distance(*wide[0], *nothing) == pytest.approx(alone, rel=1e-12)


def colours(images_B3HW: Tensor) -> Tensor:
    """Replaces the network by features with known moments."""
    return images_B3HW.float().flatten(2).mean(dim=2)


def test_rfid_is_among_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoencoderKL(TINY)
    crops = [torch.randint(0, 256, (3, 1, 1), dtype=torch.uint8).expand(3, 16, 16).contiguous() for _ in range(9)]
    with caplog.at_level(logging.WARNING):
        figures = reconstruction_figures(model, crops, CPU, batch_size=4, fid=ReconstructionFid(colours)).scalars
    assert "rFID of 9 pictures is biased" in caplog.text
    originals = torch.stack(crops)
    with torch.no_grad():
        made = to_u8(model.decode(model.encode(to_unit(originals)).mean_BLhw))
    gaussians = []
    for images in (made, originals):
        values = colours(images).double()
        gaussians += [values.mean(dim=0), torch.from_numpy(np.cov(values.numpy(), rowvar=False))]
    assert figures["rfid"] > 1
    assert figures["rfid"] == pytest.approx(by_scipy(*gaussians), rel=1e-6)
    assert "rfid" not in reconstruction_figures(model, crops, CPU).scalars


def test_warning_and_error_by_count(caplog: pytest.LogCaptureFixture) -> None:
    fid = ReconstructionFid(lambda images: images.float())
    fid.add(torch.rand(1, 2), torch.rand(1, 2))
    with pytest.raises(UserError, match="rFID of 1 picture"):
        fid.distance()
    features = torch.randn(2047, 2)
    fid.add(features, features)
    with caplog.at_level(logging.WARNING):
        fid.distance()
    assert not caplog.records


def test_file_and_extra_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "inception.pth"
    options = PictureEvaluation(rfid_weights=file)
    with pytest.raises(UserError, match=r"inception.pth: no such file") as caught:
        evaluate_pictures(tmp_path, tmp_path, options)
    assert "gputrain fetch inception-fid" in caught.value.hint
    torch.save({"fc.bias": torch.zeros(1008)}, file)
    missing = [name for name in ("torch_fidelity", "torchvision") if importlib.util.find_spec(name) is None]
    names = " ".join(missing).replace("_", "-")
    expected = "not installed" if missing else "not Inception's weights|cannot be imported"
    with pytest.raises(UserError, match=expected) as caught:
        evaluate_pictures(tmp_path, tmp_path, options)
    assert not missing or caught.value.hint == f"pip install {names}, or leave --rfid-weights out"


def torch_fidelity_works() -> bool:
    try:
        importlib.import_module("torch_fidelity")
    except (ImportError, RuntimeError):  # It is missing, or torchvision is of another build than torch.
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not torch_fidelity_works(), reason="needs gputrain[fid]")
def test_torch_fidelitys_figure(photographs: Path, tmp_path: Path) -> None:
    """With random weights of Inception, features and distance equal those of torch-fidelity."""
    inception: Any = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    metric: Any = importlib.import_module("torch_fidelity.metric_fid")

    class Random(inception.FeatureExtractorInceptionV3):  # type: ignore[misc]
        def load_state_dict(self, *arguments: Any, **options: Any) -> None:
            """Stores its arguments."""

    torch.save({}, tmp_path / "none.pth")
    network = Random("random", ["2048"], feature_extractor_weights_path=tmp_path / "none.pth")
    file = tmp_path / "inception.pth"
    torch.save(network.state_dict(), file)

    model = AutoencoderKL(PRESETS["fast"]).eval()
    save_diffusers(model, tmp_path / "vae", LatentScaling(1.0), sample_size=64)
    options = PictureEvaluation(image_size=64, batch_size=4, rfid_weights=file)
    found = evaluate_pictures(tmp_path / "vae", photographs, options, device="cpu", held_out_share=1.0).scalars["rfid"]

    pictures = open_pictures(photographs, held_out_share=1.0)
    originals = torch.stack([centre_crop(picture.path, 64) for picture in [*pictures.held_out, *pictures.train]])
    with torch.no_grad():
        made = to_u8(model.decode(model.encode(to_unit(originals)).mean_BLhw))
    statistics = [metric.fid_features_to_statistics(network(images)[0].double()) for images in (made, originals)]
    expected = metric.fid_statistics_to_metric(*statistics, verbose=False)[metric.KEY_METRIC_FID]
    assert expected > 0
    assert found == pytest.approx(expected, rel=1e-4)
