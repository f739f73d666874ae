"""Use of a trained VAE: evaluation, reconstruction in tiles, loading, export, and their commands."""

import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from torch.utils._python_dispatch import TorchDispatchMode

from gputrain.vae.architecture import VaeArchitecture
from gputrain.vae.dataset import centre_crop, open_pictures, to_u8, to_unit
from gputrain.vae.evaluate import (
    LatentMoments,
    picture_psnr_db,
    reconstruction_figures,
    reconstruction_sheet,
)
from gputrain.vae.losses import psnr_db
from gputrain.vae.model import AutoencoderKL, Moments
from gputrain.vae.reconstruct import reconstruct
from tests.command import gputrain_here
from tests.tables import each_row

pytestmark = pytest.mark.usefixtures("flops_known")

CPU = torch.device("cpu")
TINY = VaeArchitecture((32, 32), latent_channels=4, norm_num_groups=8, mid_block_add_attention=False)


class Echo(torch.nn.Module):
    """Replaces a model: decoding returns the encoded picture."""

    architecture = VaeArchitecture((32, 32, 32, 32), latent_channels=3)

    def encode(self, images_BCHW):
        return Moments(images_BCHW, torch.full_like(images_BCHW, -30.0))

    def decode(self, latents_BLhw):
        return latents_BLhw


class Shade(Echo):
    """Each tile has another brightness, as norm statistics cause it."""

    def decode(self, latents_BLhw):
        return latents_BLhw + 0.1 * latents_BLhw.mean()


def gradient_picture(height, width):
    rows, columns = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    return (255 * torch.stack([rows, columns, 0.5 * (rows + columns)])).byte()


def test_figures_are_scikit_images():
    torch.manual_seed(0)
    model = AutoencoderKL(TINY)
    crops = [gradient_picture(64, 64), gradient_picture(64, 64).flip(1)]
    figures = reconstruction_figures(model, crops, CPU).scalars
    psnr, ssim = [], []
    for crop in crops:
        with torch.no_grad():
            made = to_u8(model.decode(model.encode(to_unit(crop)[None]).mean_BLhw))[0]
        a, b = crop.numpy(), made.numpy()
        psnr.append(peak_signal_noise_ratio(a, b, data_range=255))
        ssim.append(
            structural_similarity(
                a, b, channel_axis=0, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
            )
        )
    assert figures["psnr_db"] == pytest.approx(np.mean(psnr), abs=1e-4)
    assert figures["ssim"] == pytest.approx(np.mean(ssim), abs=1e-4)


def test_latent_moments_are_those_of_samples():
    generator = torch.Generator().manual_seed(0)
    mean = 3 + 2 * torch.randn(1, 2, 200, 200, generator=generator)
    logvar = torch.full_like(mean, float(np.log(0.25)))
    gathered = LatentMoments()
    for part in (slice(0, 120), slice(120, 200)):
        gathered.add(Moments(mean[:, :, part], logvar[:, :, part]))
    samples = (mean + 0.5 * torch.randn(mean.shape, generator=generator)).double()
    assert gathered.mean_L.tolist() == pytest.approx(samples.mean(dim=(0, 2, 3)).tolist(), abs=0.02)
    assert gathered.deviation_L.tolist() == pytest.approx(samples.std(dim=(0, 2, 3)).tolist(), rel=0.01)
    assert gathered.scaling.shift_factor == pytest.approx(float(samples.mean()), abs=0.02)
    assert gathered.scaling.scaling_factor == pytest.approx(1 / float(samples.std()), rel=0.01)


@each_row(((64, 64),), ((129, 131),), ((7, 300),), ((200, 513),), ((8, 8),))
def test_any_size_comes_back_whole(size):
    picture = gradient_picture(*size)
    assert torch.equal(reconstruct(Echo(), picture, CPU, tile_size=128), picture)


class LargestFloats(TorchDispatchMode):
    """Records the number of values of the largest tensor of floats that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return made


def test_a_large_picture_takes_the_memory_of_one_row_of_tiles():
    picture, shares = gradient_picture(1501, 300), []
    with LargestFloats() as floats:
        made = reconstruct(Echo(), picture, CPU, 128, shares.append)
    assert torch.equal(made, picture)
    assert floats.largest == 3 * 128 * 304  # 304 is 300 rounded up to a multiple of 8.
    # Tiles begin every 96 pixels: 16 in the height, 3 in the width.
    assert shares == pytest.approx([(done + 1) / 48 for done in range(48)])


def test_larger_tiles_overlap_by_no_more_pixels():
    shares = []
    reconstruct(Echo(), gradient_picture(64, 1000), CPU, 512, shares.append)
    assert len(shares) == 3  # 0 to 512, 448 to 960, and the end.


def test_tiles_leave_no_seams():
    """Tiles of different brightness are blended, without a visible step between neighbouring pixels."""
    picture = gradient_picture(256, 1024)
    made = reconstruct(Shade(), picture, CPU, tile_size=128).int()
    alone = torch.cat([reconstruct(Shade(), tile, CPU, 128) for tile in picture.split(128, dim=2)], dim=2).int()
    assert (alone - picture.int()).diff(dim=2).abs().max() >= 2  # Tiles without blending have such a step.
    assert (made - picture.int()).diff(dim=2).abs().max() <= 1


def test_sheet_lays_pairs_below_each_other_with_their_psnr():
    a, b = torch.zeros(3, 10, 6, dtype=torch.uint8), torch.full((3, 8, 4), 9, dtype=torch.uint8)
    sheet = reconstruction_sheet([a, b], [a + 1, b + 4], ["a.png", "b.png"])
    originals, made = sheet.rows
    assert sheet.heads == ("original", "reconstruction")
    # Small pictures are enlarged by whole factors to at most 256 pixels.
    assert [cell.picture_HW3.shape for cell in originals] == [(250, 150, 3), (256, 128, 3)]
    assert [int(cell.picture_HW3.unique()) for cell in (*originals, *made)] == [0, 9, 1, 13]
    assert [cell.caption for cell in originals] == ["a.png", "b.png"]
    # A difference of d in 255 is 20 log10(255 / d) dB.
    assert [cell.caption for cell in made] == ["48.1 dB", "36.1 dB"]
    assert sheet.title == "PSNR 42.1 dB on average"


def test_a_sheet_shows_parts_with_the_psnr_of_whole_pictures():
    picture, made = gradient_picture(600, 400), gradient_picture(600, 400)
    made[:, :100] = 255 - made[:, :100]
    expected = peak_signal_noise_ratio(picture.numpy(), made.numpy(), data_range=255)
    assert picture_psnr_db(made, picture) == pytest.approx(expected, abs=1e-4)
    assert picture_psnr_db(picture, picture) == pytest.approx(float(psnr_db(*[to_unit(picture)[None]] * 2)))
    parts = [part[:, 200:456, 72:328] for part in (picture, made)]
    sheet = reconstruction_sheet(parts[:1], parts[1:], ["a.png"], psnrs_db=[expected])
    assert [cell.caption for row in sheet.rows for cell in row] == ["a.png", f"{expected:.1f} dB"]
    assert torch.equal(sheet.rows[0][0].picture_HW3, parts[0].permute(1, 2, 0))


@pytest.fixture(scope="module")
def run(photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    result = gputrain_here(
        "train-vae", "--data-path", photographs, "--output-dir", folder, "--preset", "fast", "--image-size", 32,
        "--channels", "32,32,32,32", "--no-plan", "--batch-size", 2, "--max-steps", 3, "--num-workers", 0,
        "--learning-rate", 1e-3, "--warmup-steps", 1, "--start", "random",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
def test_a_run_ends_with_a_report(run):
    page = (run / "report.html").read_text()
    assert "best PSNR on held-out data" in page
    assert page.count("data:image/jpeg;base64,") == 2  # A held-out picture and its reconstruction.
    last = json.loads((run / "history.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"], last["outcome"]) == ("end", 3, "stopped")  # By max_steps.


def test_commands_from_a_run_to_stock_diffusers(run, photographs, tmp_path):
    from diffusers import AutoencoderKL as Stock

    export = tmp_path / "export"
    result = gputrain_here("export", "--model", run, "--output-dir", export)
    assert result.returncode == 0, result.stderr
    figures = {}
    for name, model in (("run", run), ("file", run / "checkpoint_best.pt"), ("export", export)):
        path = tmp_path / f"{name}.json"
        result = gputrain_here(
            "evaluate", "--model", model, "--data-path", photographs, "--image-size", 64, "--json", path
        )
        assert result.returncode == 0, result.stderr
        figures[name] = json.loads(path.read_text())
    assert figures["run"]["psnr_db"] == pytest.approx(figures["export"]["psnr_db"], abs=1e-3)
    assert len(figures["run"]["latent_mean"]) == 16

    result = gputrain_here("reconstruct", "--model", run, "--input", photographs, "--output-dir", tmp_path / "looks")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "looks" / "sheet.png").exists()
    stock = Stock.from_pretrained(export)
    original = np.array(Image.open(photographs / "chelsea.png"))
    images = to_unit(torch.from_numpy(original).permute(2, 0, 1))[None]
    images = torch.nn.functional.pad(images, (0, -images.shape[3] % 8, 0, -images.shape[2] % 8), mode="replicate")
    with torch.no_grad():
        theirs = to_u8(stock(images).sample)[0, :, : original.shape[0], : original.shape[1]]
    ours = np.array(Image.open(tmp_path / "looks" / "chelsea.png"))
    assert np.abs(ours.astype(int) - theirs.permute(1, 2, 0).numpy().astype(int)).max() <= 1
    assert stock.config.sample_size == 512  # Tiles of 32 pixels would be decoded one by one.
    crops = [centre_crop(picture.path, 32) for picture in open_pictures(photographs).train]
    with torch.no_grad():
        latents = stock.encode(torch.stack([to_unit(crop) for crop in crops])).latent_dist
    mean = latents.mean.double()
    deviation = ((mean - mean.mean()).square() + latents.var.double()).mean().sqrt()
    assert stock.config.shift_factor == pytest.approx(float(mean.mean()), abs=1e-4)
    assert stock.config.scaling_factor == pytest.approx(1 / float(deviation), rel=1e-4)


@each_row(
    (["evaluate", "--model", "missing", "--data-path", "."], "missing: no such file or folder"),
    (["evaluate", "--model", "RUN", "--data-path", ".", "--image-size", "36"], "image_size 36 is not a multiple of 8"),
    (["reconstruct", "--model", "RUN", "--input", "none.png", "--output-dir", "out"], "none.png"),
    (["reconstruct", "--model", ".", "--input", "PHOTOS", "--output-dir", "out"], "holds no checkpoint"),
    (["reconstruct", "--model", "RUN", "--input", "PHOTOS", "--output-dir", "PHOTOS"], "holds the pictures that are"),
    (["reconstruct", "--model", "RUN", "--input", "a.png", "--output-dir", "."], "choose another --output-dir"),
    (["export", "--model", "RUN", "--output-dir", "out", "--data-path", "gone"], "gone"),
    (["prepare-data", "--input-dir", "."], "output_dir is missing"),
    (["prepare-data", "--input-dir", ".", "--output-dir", "out", "--target-size", "100"], "multiple of 8"),
    (["validate", "--input-dir", "gone"], "gone: no such folder"),
)
def test_bad_input_of_the_other_commands(run, photographs, typed, words, message):
    code, output = typed(*[{"RUN": run, "PHOTOS": photographs}.get(word, word) for word in words])
    assert code == 2, output
    assert message in output


def test_a_few_pictures_are_reconstructed_small_under_their_own_names(run, tmp_path, typed):
    sources = tmp_path / "sources"
    for number, name in enumerate(("a.jpg", "a.png", "deep/b.tif", "deep/c.png", "sheet.jpg", "z.webp")):
        path = sources / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(gradient_picture(60, 90 + number).permute(1, 2, 0).numpy()).save(path)

    def names_of(folder, *options):
        code, output = typed("reconstruct", "--model", run, "--input", sources, "--output-dir", folder, *options)
        assert code == 0, output
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")), output

    names, output = names_of(tmp_path / "all")
    assert names == [
        "a.png",
        "a.png.png",
        "deep/b.png",
        "deep/c.png",
        "sheet.html",
        "sheet.jpg.png",
        "sheet.png",
        "z.png",
    ]
    assert re.search(r"6 pictures, PSNR [\d.]+ dB on average over whole pictures \(evaluate takes centre crops", output)
    for _ in range(2):  # Those of the first time, in a subfolder, are no sources of the second.
        names, output = names_of(sources / "few", "--pictures", 2, "--max-side", 48)
        assert names == ["a.png", "deep/c.png", "sheet.html", "sheet.png"]
        assert "reconstructing 2 of 6 pictures" in output
    with Image.open(sources / "few/deep/c.png") as image:
        assert image.size == (48, 31)
    page = (sources / "few/sheet.html").read_text()
    shown = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)" width="48" height="\d+" alt="([^"]+)"', page)
    assert [alt for _, alt in shown] == [
        "original of a.jpg", "reconstruction of a.jpg", "original of deep/c.png", "reconstruction of deep/c.png",
    ]  # fmt: skip
    made = np.array(Image.open(sources / "few/deep/c.png")).astype(float)
    in_page = np.array(Image.open(io.BytesIO(b64decode(shown[3][0]))))
    assert np.abs(in_page - made).mean() < 4
    assert "default-src &#39;none&#39;" in page
    assert page.count('id="viewer"') == 1


def test_the_page_has_the_centres_of_large_pictures_and_their_whole_psnr(run, tmp_path, typed, monkeypatch):
    picture = gradient_picture(60, 90).permute(1, 2, 0).numpy()
    Image.fromarray(picture).save(tmp_path / "a.png")
    monkeypatch.setattr("gputrain.vae.reconstruct.PAGE_SIDE", 16)
    code, output = typed("reconstruct", "--model", run, "--input", "a.png", "--output-dir", "made")
    assert code == 0, output
    page = (tmp_path / "made/sheet.html").read_text()
    shown, _ = re.findall(
        r'<img src="data:image/jpeg;base64,([^"]+)" width="16" height="16" alt="\w+ of a.png, the', page
    )
    in_page = np.array(Image.open(io.BytesIO(b64decode(shown)))).astype(int)
    assert np.abs(in_page - picture[22:38, 37:53]).mean() < 4
    made = np.array(Image.open(tmp_path / "made/a.png"))
    assert f"<span>{peak_signal_noise_ratio(picture, made):.1f} dB</span>" in page
