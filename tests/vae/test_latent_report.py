"""The report on the latents, against scipy and models whose latents are known."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.evaluate import reconstruction_figures
from gputrain.vae.latent_report import LatentReport, radial_spectra
from gputrain.vae.model import Moments

CPU = torch.device("cpu")


class Blocks(torch.nn.Module):
    """Encodes to averages of 4x4 pixels, which follow scales and turns, or to something else; decodes to squares."""

    architecture = VaeArchitecture((32, 32, 32), latent_channels=3)

    def __init__(self, change=lambda latents: latents):
        super().__init__()
        self.change = change

    def encode(self, images_BCHW):
        latents_BLhw = self.change(F.avg_pool2d(images_BCHW, 4))
        return Moments(latents_BLhw, torch.full_like(latents_BLhw, -30.0))

    def decode(self, latents_BLhw):
        return F.interpolate(latents_BLhw, scale_factor=4)


def pictures(count=3, side=64):
    coarse = torch.rand(count, 3, side // 4, side // 4, generator=torch.Generator().manual_seed(0))
    return (255 * F.interpolate(coarse, size=side)).byte()


def report_on(model, crops, batch_size=4):
    return reconstruction_figures(model, list(crops), CPU, batch_size, report=LatentReport()).report


def test_statistics_of_channels_are_scipys():
    crops = pictures()
    found = report_on(Blocks(lambda z: torch.cat([z[:, :2].exp(), 1e-4 * z[:, 2:]], 1)), crops)
    z = F.avg_pool2d(crops.float() / 127.5 - 1, 4)
    z = torch.cat([z[:, :2].exp(), 1e-4 * z[:, 2:]], 1).double().transpose(0, 1).flatten(1).numpy()
    expected = {
        "mean": z.mean(1), "std": z.std(1), "skewness": stats.skew(z, axis=1),
        "excess_kurtosis": stats.kurtosis(z, axis=1),
    }  # fmt: skip
    for name, values in found.channels.items():
        assert values == pytest.approx(expected[name].tolist(), rel=1e-4, abs=1e-6), name
    assert found.dead == [2]


def test_the_spectrum_shows_the_frequencies_of_the_latents():
    at = torch.arange(32, dtype=torch.float64)
    wave = torch.cos(2 * math.pi * 6 * at / 32).expand(1, 2, 32, 32)
    (first, second) = radial_spectra(wave + 5.0)
    assert torch.equal(first, second)
    assert int(first.argmax()) == 6
    assert float(first[5:8].sum() / first.sum()) > 0.999  # A Hann window spreads a wave to its neighbours.
    white = report_on(Blocks(lambda z: torch.randn(z.shape, generator=torch.Generator().manual_seed(1))), pictures())
    smooth = report_on(Blocks(), F.interpolate(pictures(side=16).float(), size=64, mode="bicubic").clamp(0, 255).byte())
    assert smooth.high(0) == pytest.approx(smooth.high(1), rel=1e-6)  # Latents that are the small picture.
    assert smooth.high(0) < 0.1 < 0.5 < white.high(0)
    assert sum(white.spectrum(0)) == pytest.approx(1)


def test_pictures_of_a_single_colour_have_no_power_at_any_frequency():
    black = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    report = report_on(Blocks(), black)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["spectrum"]["pictures"] == [0.0] * 8
    assert "nan" not in str(report.shown)


def test_errors_of_latents_that_follow_and_of_others():
    crops = pictures()
    follows = report_on(Blocks(), crops).turned
    assert max(one.relative_error for one in follows.values()) < 1e-6
    assert min(follows["turn"].psnrs_db) > 60
    ramp = torch.linspace(-1, 1, 16)[:, None].expand(16, 16)

    def add_ramp(z):  # Something that stays where it is.
        return z + F.interpolate(ramp[None, None], size=z.shape[-2:], mode="bilinear")

    found = report_on(Blocks(add_ramp), crops).turned["turn"].relative_error
    turned = torch.rot90(add_ramp(F.avg_pool2d(crops.float() / 127.5 - 1, 4)), 1, (2, 3))
    error = (ramp - torch.rot90(ramp, 1)).square().sum() * 9
    expected = (error / (turned - turned.mean((0, 2, 3), keepdim=True)).square().sum()).sqrt()
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_a_report_does_not_depend_on_the_batches():
    model = Blocks(lambda z: z.sin() + z)
    one, other = (report_on(model, pictures(5), batch_size).to_json() for batch_size in (1, 4))
    for name in ("channels", "spectrum", "upper_frequencies", "equivariance"):
        for part, values in one[name].items():
            assert values == pytest.approx(other[name][part], rel=1e-6, abs=1e-9), (name, part)


def test_a_single_latent_has_no_half():
    report, model, images = LatentReport(), Blocks(), torch.rand(2, 3, 4, 4)
    report.add(model, images, model.encode(images).mean_BLhw)
    assert list(report.turned) == ["turn"]
