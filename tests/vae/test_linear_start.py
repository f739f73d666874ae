"""The start as a linear code: what the weights compute, in our layers and in stock diffusers, and how good it is."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data as photographs
from torch import Tensor

from gputrain.vae import linear_start
from gputrain.vae.architecture import PRESETS, VaeArchitecture, vae_architecture
from gputrain.vae.dataset import open_pictures, to_unit
from gputrain.vae.linear_start import (
    CONSTANT,
    LATENT_STD,
    LOGVAR,
    SCALE,
    LinearCode,
    Pairs,
    fit_code,
    signals_of,
    write_code,
)
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.norm_arithmetic import EAGER
from tests.command import gputrain_here
from tests.vae.test_model import stock_autoencoder

SMALL = {
    "two blocks": VaeArchitecture((32, 64), 4, norm_num_groups=8, mid_block_add_attention=False),
    "quant convs": VaeArchitecture((32, 32, 64), 4, norm_num_groups=8, use_quant_conv=True, use_post_quant_conv=True),
    "narrower than its latents": VaeArchitecture((24, 48, 48), 32, layers_per_block=1, norm_num_groups=6),
    "gray": VaeArchitecture((32, 32, 64), 4, norm_num_groups=8, in_channels=1, out_channels=1),
    "transparency": VaeArchitecture((32, 32, 64), 4, norm_num_groups=8, in_channels=4, out_channels=4),
    "five blocks": VaeArchitecture((32, 32, 64, 64, 64), 8, norm_num_groups=8),
}
PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket", "retina", "hubble_deep_field")


def fresh(architecture: VaeArchitecture, *, recompute_norms: bool = True) -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(architecture, recompute_norms=recompute_norms)


def code_for(architecture: VaeArchitecture, noise: float = 0.3) -> LinearCode:
    """Returns a code whose every weight matters, with latents of mean 0 and variance 1."""
    torch.manual_seed(1)
    code = LinearCode(signals_of(architecture), architecture.in_channels)
    code.start(smooth(4, 64, architecture.in_channels), torch.Generator().manual_seed(2))
    with torch.no_grad():
        for parameter in code.parameters():
            parameter.add_(noise * torch.randn_like(parameter) / math.sqrt(parameter[0].numel()))
    code.normalize(smooth(4, 16 * architecture.downsampling, architecture.in_channels))
    return code


def smooth(items: int, side: int, channels: int = 3) -> Tensor:
    """Returns pictures in [-1, 1] with more coarse detail than fine, as photographs have."""
    draws = torch.Generator().manual_seed(3)
    layers = [torch.randn(items, channels, side // n, side // n, generator=draws) * n / 16 for n in (16, 8, 4, 2, 1)]
    return sum(F.interpolate(layer, size=(side, side), mode="bilinear") for layer in layers).tanh()


@pytest.mark.parametrize("channels", [1, 3])
def test_flat_pictures_have_a_code(channels):
    """Of one level, and of two: their covariance is singular up to rounding."""
    flat = torch.linspace(-1, 1, 11)[:, None, None, None].expand(11, channels, 64, 64)
    two = torch.cat((flat[:, :, :32] - 0.3, flat[:, :, 32:]), dim=2)
    for pictures in (*flat.split(1), *two.split(1)):
        code = LinearCode(signals_of(PRESETS["fast"]), channels)
        code.start(pictures.expand(8, -1, -1, -1).contiguous(), torch.Generator().manual_seed(0))
        assert (code(pictures) - pictures).abs().mean() < 0.02


LARGE = [pytest.param(PRESETS[name], marks=pytest.mark.slow, id=name) for name in ("sd", "lite", "flux", "flux2")]


@pytest.mark.parametrize(
    "architecture", [*(pytest.param(one, id=name) for name, one in SMALL.items()), PRESETS["fast"], *LARGE]
)
def test_the_weights_compute_the_code(architecture):
    """Up to what the norms bend: c / K with |c| up to 1 for colours and 4 for latents; stock diffusers agrees."""
    model, code = fresh(architecture), code_for(architecture)
    write_code(code, model)
    images = smooth(2, 8 * architecture.downsampling, architecture.in_channels)
    signals = code.signals[-1]
    with torch.no_grad():
        latents, coded = model.encode(images), code.encode(images)
        means = latents.mean_BLhw[:, :signals] / LATENT_STD
        assert (means - coded).abs().max() <= 0.02 * coded.abs().max()
        assert bool((latents.logvar_BLhw == LOGVAR).all())
        made, linear = (
            model.decode(LATENT_STD * F.pad(coded, (0, 0, 0, 0, 0, means_beyond(architecture, code)))),
            code.decode(coded),
        )
        assert (made - linear).abs().max() <= 0.02 * max(1.0, float(linear.abs().max()))
        stock = stock_autoencoder(architecture)
        stock.load_state_dict({**stock.state_dict(), **model.state_dict()})
        whole = stock.decode(stock.encode(images).latent_dist.mean).sample
        assert (whole - model.decode(latents.mean_BLhw)).abs().max() < 1e-4 * max(1.0, float(whole.abs().max()))


def means_beyond(architecture: VaeArchitecture, code: LinearCode) -> int:
    return architecture.latent_channels - code.signals[-1]


def test_plain_layers_compute_the_same():
    architecture = SMALL["quant convs"]
    model, code = fresh(architecture), code_for(architecture)
    write_code(code, model)
    images = smooth(1, 64)
    with torch.no_grad():
        recomputed = model.decode(model.encode(images).mean_BLhw)
        model.use(None)
        assert torch.allclose(model.decode(model.encode(images).mean_BLhw), recomputed, atol=1e-4)
        model.use(EAGER)


def test_every_weight_learns():
    """No gradient is zero for good: after two steps, each parameter has moved that the loss depends on."""
    architecture = SMALL["quant convs"]
    model = fresh(architecture)
    write_code(code_for(architecture), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images = smooth(2, 32)
    for _ in range(3):
        moments = model.encode(images)
        latents = moments.mean_BLhw + (moments.logvar_BLhw / 2).exp() * torch.randn_like(moments.mean_BLhw)
        loss = (model.decode(latents) - images).abs().mean() + 1e-3 * moments.logvar_BLhw.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A shift of all keys by one vector changes no attention.
    unmoved = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert {name for name in unmoved if "to_k.bias" not in name} == set()


def test_pairs_have_mean_zero_and_the_stated_deviation():
    for width, groups, signals in ((32, 8, 3), (128, 32, 3), (256, 8, 16), (24, 6, 3), (64, 8, 7)):
        pairs = Pairs(width, groups, signals)
        channels = torch.zeros(width)
        for channel, value in pairs.constants.items():
            channels[channel] = value
        for signal in range(signals):
            plus, minus = pairs.pair(signal)
            assert plus // pairs.group_width == minus // pairs.group_width
            group = channels.view(groups, -1)[plus // pairs.group_width]
            assert float(group.mean()) == 0
            assert float(group.std(unbiased=False)) == pytest.approx(pairs.std(signal))
            assert pairs.std(signal) >= CONSTANT / math.sqrt(2)
        places = [channel for signal in range(signals) for channel in pairs.pair(signal)]
        assert len({*places, *pairs.constants}) == len(places) + len(pairs.constants) == len(pairs.channels)


def test_architectures_without_a_place():
    assert signals_of(VaeArchitecture((8, 16), 4, norm_num_groups=8)) == ()
    assert signals_of(VaeArchitecture((32, 64), 4, norm_num_groups=8, in_channels=1)) == ()
    assert signals_of(VaeArchitecture((16, 32), 4, norm_num_groups=4)) == ()  # Half of the groups have two places.
    assert signals_of(PRESETS["flux"]) == (6, 12, 16)
    assert signals_of(PRESETS["sd"]) == (6, 12, 4)
    assert signals_of(vae_architecture("flux", image_channels=1)) == (4, 12, 16)
    assert signals_of(vae_architecture("flux", image_channels=4)) == (8, 16, 16)


# --------------------------------------------------------------------------------------------------- the fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photographs")
    for name in PHOTOGRAPHS:
        Image.fromarray(getattr(photographs, name)()[..., :3]).resize((320, 320), Image.Resampling.LANCZOS).save(
            folder / f"{name}.png"
        )
    return folder


def psnr_db(made: Tensor, images: Tensor) -> float:
    return float(10 * torch.log10(4 / (made.clamp(-1, 1) - images).square().mean()))


@pytest.mark.slow
def test_a_code_of_photographs(folder, monkeypatch):
    """On pictures that it was not fitted to, it is far better than block averages, and close to the best 16 numbers
    that any linear transform of a block of 8 x 8 pixels has."""
    pictures = open_pictures(folder).train
    code = fit_code(pictures[1:], PRESETS["fast"], seed=0)
    unseen = to_unit(torch.stack([torch.from_numpy(photographs.coffee()[:256, :256]).permute(2, 0, 1).contiguous()]))
    with torch.no_grad():
        found = psnr_db(code(unseen), unseen)
        box = psnr_db(F.interpolate(F.avg_pool2d(unseen, 8), scale_factor=8.0), unseen)
    blocks = F.unfold(unseen, 8, stride=8)[0].T
    spectrum = torch.linalg.eigvalsh((blocks - blocks.mean(0)).T.cov().double())
    best = 10 * math.log10(4 / float(spectrum[:-16].sum() / 192))
    assert box + 2 < found < best
    monkeypatch.setattr(linear_start, "STEPS", 5)
    code, again = (fit_code(pictures[1:], PRESETS["fast"], seed=0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(code.state_dict().values(), again.state_dict().values(), strict=True))


def test_only_a_start_with_given_weights_is_evaluated_before_the_first_step(folder, tmp_path):
    small = ("--preset", "fast", "--channels", "32,32", "--image-size", 32, "--batch-size", 1, "--num-workers", 0)
    runs = {"linear": (), "given": ("--init-from", tmp_path / "linear")}
    for name, given in runs.items():
        done = gputrain_here(
            "train-vae", "--data-path", folder, "--output-dir", tmp_path / name, *small, "--max-steps", 1,
            "--evaluate-every-steps", 1, "--held-out-share", 0.34, "--no-plan", *given,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    rows = {name: map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()) for name in runs}
    steps = {name: [row["step"] for row in rows[name] if "eval/psnr_db" in row] for name in runs}
    assert steps == {"linear": [1], "given": [0, 1]}


@pytest.mark.slow
def test_training_never_falls_below_its_start(folder, tmp_path):
    """Held-out figures of the first 240 steps, through the warm-up; random weights are far behind."""
    found = {}
    for start in ("linear", "random"):
        done = gputrain_here(
            "train-vae", "--data-path", folder, "--output-dir", tmp_path / start, "--preset", "fast",
            "--image-size", 32, "--batch-size", 4, "--max-steps", 240, "--evaluate-every-steps", 30,
            "--held-out-share", 0.34,
            "--start", start, "--eval-first", "--num-workers", 0, "--no-plan",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / start / "metrics.jsonl").read_text().splitlines())
        found[start] = [row["eval/psnr_db"] for row in rows if "eval/psnr_db" in row]
    first = found["linear"][0]
    assert min(found["linear"]) >= first - 0.01
    assert found["linear"][-1] > first
    assert max(found["random"]) < first - 5


def test_scales_are_exact_in_16_bit():
    assert CONSTANT == torch.tensor(CONSTANT).bfloat16().item() == torch.tensor(CONSTANT).half().item()
    assert math.log2(SCALE) == int(math.log2(SCALE))
