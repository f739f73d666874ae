"""Losses compared with independent references: scikit-image, scipy's window, torch's KL, published formulas."""

import numpy as np
import pytest
import torch
from skimage.metrics import structural_similarity
from torch.distributions import Normal, kl_divergence

from gputrain.vae import losses


def pictures(size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.nn.functional.interpolate(torch.rand(2, 3, 9, 9, generator=generator), size=size, mode="bicubic")
    target = (target * 2 - 1).clamp(-1, 1)
    return (target + 0.1 * torch.randn(target.shape, generator=generator)).clamp(-1, 1), target


def reference_ssim(made, target):
    options = {"gaussian_weights": True, "sigma": 1.5, "win_size": 11, "use_sample_covariance": False}
    pairs = zip(made.double() / 2 + 0.5, target.double() / 2 + 0.5, strict=True)
    return [structural_similarity(a.numpy(), b.numpy(), channel_axis=0, data_range=1, **options) for a, b in pairs]


def test_ssim_is_scikit_images():
    made, target = pictures()
    found, _ = losses.ssim_terms(made.double(), target.double())
    assert found.numpy() == pytest.approx(reference_ssim(made, target), abs=1e-6)


def test_ms_ssim_of_one_scale_is_ssim():
    made, target = pictures(size=20)
    assert losses.ms_ssim(made.double(), target.double()).numpy() == pytest.approx(
        reference_ssim(made, target), abs=1e-6
    )


def test_ms_ssim_multiplies_the_scales():
    """At 64 pixels there are three scales: contrast of the first two, SSIM of the last, with renormalised weights."""
    made, target = (p.double() for p in pictures())
    terms = []
    for scale in range(3):
        full, contrast = losses.ssim_terms(made, target)
        terms.append(full if scale == 2 else contrast)
        made, target = (torch.nn.functional.avg_pool2d(p, 2) for p in (made, target))
    weights = np.array([0.0448, 0.2856, 0.3001])
    weights /= weights.sum()
    expected = np.prod([t.numpy() ** w for t, w in zip(terms, weights, strict=True)], axis=0)
    made, target = (p.double() for p in pictures())
    assert losses.ms_ssim(made, target).numpy() == pytest.approx(expected, rel=1e-9)


def test_structural_is_zero_for_equal_pictures_and_its_gradient_is_not_for_others():
    made, target = pictures()
    assert losses.structural(target, target).abs().max() < 1e-6
    made.requires_grad_()
    (gradient,) = torch.autograd.grad(losses.structural(made, target).sum(), made)
    assert gradient.isfinite().all()
    assert gradient.abs().mean() > 1e-6


def test_structural_gradient_is_finite_for_opposite_pictures():
    """A negative correlation, of which a fractional power would be undefined."""
    _, target = pictures()
    made = (-target).requires_grad_()
    (gradient,) = torch.autograd.grad(losses.structural(made, target).sum(), made)
    assert gradient.isfinite().all()


def test_gradient_distance_sees_edges_alone():
    _, target = pictures()
    assert losses.gradient_distance(target + 0.3, target).max() < 1e-6
    ramp = torch.linspace(0, 0.63, 64).expand(1, 3, 64, 64)  # 0.01 a pixel: 0.01, 0.02 and 0.04 at three scales
    assert float(losses.gradient_distance(ramp, torch.zeros_like(ramp))) == pytest.approx(0.07 / 3, rel=1e-4)


def test_kl_is_torchs():
    mean, logvar = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    expected = kl_divergence(Normal(mean, (0.5 * logvar).exp()), Normal(0.0, 1.0)).flatten(1).sum(dim=1)
    assert torch.allclose(losses.kl_divergence(mean, logvar, values=1), expected, rtol=1e-5)
    assert torch.allclose(losses.kl_divergence(mean, logvar, values=100), expected / 100, rtol=1e-5)


def test_pixel_distances():
    a, b = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[0.0, -0.5]]]])
    assert float(losses.pixel_distance("l1", a, b)) == 0.75
    assert float(losses.pixel_distance("l2", a, b)) == 0.625


def test_hinge_losses_by_hand():
    real, fake = torch.full((1, 1, 2, 2), 0.5), torch.full((1, 1, 2, 2), 1.5)
    assert float(losses.discriminator_loss(real, fake)) == pytest.approx(0.5 * (0.5 + 2.5))
    assert float(losses.generator_loss(fake)) == pytest.approx(-1.5)


def test_balance_is_the_ratio_of_norms_clamped_and_deaf_to_nonfinite_steps():
    balance, yes, no = losses.Balance(), torch.tensor(True), torch.tensor(False)
    assert float(balance.weight) == 0
    balance.measure(torch.tensor(36.0), torch.tensor(9.0), yes)
    assert float(balance.weight) == 2
    balance.measure(torch.tensor(36.0), torch.tensor(1e-9), yes)
    assert float(balance.weight) == 10
    balance.measure(torch.tensor(1.0), torch.tensor(1.0), no)
    balance.measure(torch.tensor(float("nan")), torch.tensor(1.0), yes)
    assert float(balance.weight) == 10


def test_lecam_anchors_to_the_other_sides_average():
    balance = losses.Balance(decay=0.5)
    balance.observe(torch.tensor(2.0), torch.tensor(-2.0), torch.tensor(True))
    real, fake = torch.full((1, 3), 1.0), torch.full((1, 3), 0.0)
    assert float(balance.lecam(real, fake)) == (1 + 1) ** 2 + (0 - 1) ** 2
