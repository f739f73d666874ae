"""Grayscale pictures and pictures with transparency: decoding, preparation, losses, training, export."""

import json
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from gputrain.config import assemble
from gputrain.data_in.split import Split
from gputrain.errors import UserError
from gputrain.vae.architecture import VaeArchitecture, vae_architecture
from gputrain.vae.config import PictureEvaluation, Reconstruct, TrainVae, VaePrepareConfig
from gputrain.vae.data import plan_target, warn_of_opaque_pictures
from gputrain.vae.dataset import as_rgb, centre_crop, open_pictures, to_u8, to_unit
from gputrain.vae.evaluate import evaluate_pictures, to_rgb
from gputrain.vae.export import export_vae
from gputrain.vae.linear_start import signals_of
from gputrain.vae.losses import PatchDiscriminator
from gputrain.vae.pictures import read_picture
from gputrain.vae.prepare import prepare_images
from gputrain.vae.pretrained import load_model, options_for
from gputrain.vae.recipe import VaeRecipe
from gputrain.vae.reconstruct import reconstruct_folder
from tests.command import ProgressSeen
from tests.png import png
from tests.tables import slow
from tests.training import train_vae
from tests.vae.test_recipe import SMALL, cpu_runtime, settings_of

pytestmark = pytest.mark.usefixtures("flops_known")


def decoded(path, image, channels: int, **options):
    image.save(path, **options)
    return np.asarray(read_picture(path, channels=channels)).astype(int)


def test_gray_levels_stay_as_they_are(tmp_path):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    path = tmp_path / "a.png"
    assert (decoded(path, Image.fromarray(levels), 1) == levels).all()
    assert (decoded(path, Image.fromarray(np.stack([levels] * 3, axis=-1)), 1) == levels).all()
    # 16 bits are scaled to 8: 257 levels of 16 bits are one of 8.
    assert (decoded(path, Image.fromarray(levels.astype(np.uint16) * 257), 1) == levels).all()


def test_colours_become_luma_and_transparency_white_behind_gray(tmp_path):
    pixels = np.array(
        [[[255, 0, 0, 255], [0, 255, 0, 255], [0, 0, 255, 255], [10, 20, 30, 0], [0, 0, 0, 128]]], np.uint8
    )
    gray = decoded(tmp_path / "a.png", Image.fromarray(pixels), 1)
    assert gray.tolist() == [[76, 150, 29, 255, 127]]  # 0.299 R + 0.587 G + 0.114 B; 255 - 128


RGBA = np.array([[[250, 20, 30, 255], [250, 20, 30, 128], [9, 8, 7, 0], [0, 0, 0, 1]]], dtype=np.uint8)


def test_transparency_is_kept_and_not_composited(tmp_path):
    """In every form in which Pillow gives it: RGBA, gray with alpha, a palette with transparency, a transparent
    colour; with 16 bits; and without any."""
    path = tmp_path / "a.png"
    assert (decoded(path, Image.fromarray(RGBA), 4) == RGBA).all()
    assert (decoded(tmp_path / "a.webp", Image.fromarray(RGBA), 4, lossless=True, exact=True) == RGBA).all()
    gray = Image.fromarray(RGBA[..., [0, 3]], "LA")
    assert (decoded(path, gray, 4) == RGBA[..., [0, 0, 0, 3]]).all()
    palette = Image.fromarray(np.array([[0, 1, 2]], dtype=np.uint8), "P")
    palette.putpalette([1, 2, 3, 40, 50, 60, 7, 8, 9])
    found = decoded(path, palette, 4, transparency=bytes([255, 100, 0]))
    assert found.tolist() == [[[1, 2, 3, 255], [40, 50, 60, 100], [7, 8, 9, 0]]]
    found = decoded(path, Image.fromarray(RGBA[..., :3]), 4, transparency=(9, 8, 7))
    assert found.tolist() == [[[250, 20, 30, 255], [250, 20, 30, 255], [9, 8, 7, 0], [0, 0, 0, 255]]]
    opaque = decoded(path, Image.fromarray(RGBA[..., :3]), 4)
    assert opaque.tolist() == [[[*colour, 255] for colour in RGBA[0, :, :3].tolist()]]
    deep = b"\0" + (RGBA.astype(">u2") * 257).tobytes()  # Pillow reads 16 bits, and cannot write them.
    (tmp_path / "deep.png").write_bytes(png(4, 1, color=6, bits=16, rows=deep))
    assert (np.asarray(read_picture(tmp_path / "deep.png", channels=4)) == RGBA).all()


def test_hidden_colours_become_white_in_tensors(tmp_path):
    Image.fromarray(RGBA.repeat(4, axis=0)).save(tmp_path / "a.png")
    crop = centre_crop(tmp_path / "a.png", 4, channels=4)
    assert crop[:, 0].T.tolist() == [[250, 20, 30, 255], [250, 20, 30, 128], [255, 255, 255, 0], [0, 0, 0, 1]]
    gray = centre_crop(tmp_path / "a.png", 4, channels=1)
    assert gray.shape == (1, 4, 4)


@pytest.mark.parametrize("channels", [1, 4])
def test_prepared_pictures_keep_the_channels(tmp_path, channels):
    (tmp_path / "in").mkdir()
    Image.fromarray(np.tile(RGBA, (40, 20, 1))).save(tmp_path / "in/a.png")
    for mode in ("cover", "stretch"):
        config = VaePrepareConfig(target_size=48, resize_mode=mode, image_channels=channels)
        prepare_images(tmp_path / "in", tmp_path / mode, config)
        with Image.open(tmp_path / mode / "a.png") as made:
            assert made.mode == {1: "L", 4: "RGBA"}[channels]
            assert made.size == (48, 48)
    with pytest.raises(UserError, match=rf"image_channels {channels}, not 3"):
        prepare_images(tmp_path / "in", tmp_path / "cover", VaePrepareConfig(target_size=48))
    with pytest.raises(UserError, match="jpeg has no transparency"):
        VaePrepareConfig(image_channels=4, format="jpeg")


def test_networks_of_three_channels_see_gray_three_times_and_transparency_over_white():
    gray = torch.linspace(-1, 1, 8).view(1, 1, 2, 4)
    assert torch.equal(as_rgb(gray), torch.cat([gray] * 3, dim=1))
    pixels = to_unit(torch.tensor(RGBA).permute(2, 0, 1)[None])
    with Image.new("RGBA", (4, 1), "white") as ground:
        ground.alpha_composite(Image.fromarray(RGBA))
        expected = np.asarray(ground)[..., :3].astype(int)
    made = to_u8(as_rgb(pixels))[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(made - expected).max() <= 1
    colours = torch.rand(2, 3, 4, 4)
    assert as_rgb(colours) is colours


class SeenPictures(torch.nn.Module):
    """Stands for LPIPS, and keeps what it is given."""

    def forward(self, made_BCHW, target_BCHW):
        self.target_BCHW = target_BCHW
        return (made_BCHW - target_BCHW).square().flatten(1).mean(dim=1)


@pytest.mark.parametrize("channels", [1, 4])
def test_lpips_sees_three_channels(channels):
    lpips = SeenPictures()
    recipe = VaeRecipe(
        settings_of(image_channels=channels, adversarial_weight=0.0, perceptual_loss="lpips", lpips_weights=["unused"]),
        cpu_runtime(),
        lpips=lpips,
    )
    loaded = torch.randint(256, (8, channels, 24, 24), dtype=torch.uint8)
    terms = list(recipe.picture_terms(to_unit(loaded), to_unit(loaded), recipe.prepare(loaded, 0)))
    assert torch.equal(lpips.target_BCHW, as_rgb(to_unit(loaded)))
    assert terms[-1].name == "lpips"


def test_sheets_show_transparency_on_squares():
    picture = torch.zeros(4, 16, 16, dtype=torch.uint8)
    assert set(to_rgb(picture).flatten().tolist()) == {204, 255}
    assert to_rgb(picture)[0, 0].tolist() == [204] * 3
    assert to_rgb(picture)[0, 8].tolist() == [255] * 3
    picture[3], picture[0] = 255, 100
    assert to_rgb(picture)[5, 5].tolist() == [100, 0, 0]
    assert to_rgb(torch.full((1, 2, 2), 7, dtype=torch.uint8)).tolist() == [[[7] * 3] * 2] * 2


def test_the_model_the_discriminator_and_the_plan_have_the_channels():
    for preset in ("flux", "sd", "lite", "fast"):
        for channels in (1, 4):
            architecture = vae_architecture(preset, image_channels=channels)
            assert (architecture.in_channels, architecture.out_channels) == (channels, channels)
            assert signals_of(architecture)[-1] == min(16, architecture.latent_channels)
    settings = settings_of(image_channels=4)
    assert plan_target(settings).load(2).shape == (2, 4, 24, 24)
    assert PatchDiscriminator(16, 4)(torch.zeros(1, 4, 64, 64)).shape == (1, 1, 6, 6)
    assert options_for(vae_architecture("fast", image_channels=1)) == "--preset fast --image-channels 1"
    assert options_for(VaeArchitecture((128, 256), 4, in_channels=3, out_channels=4)) == ""


@pytest.fixture(scope="module", params=[slow(1), 4])
def trained(request, tmp_path_factory):
    """Returns a run of three steps with every loss on, its pictures, and their number of channels."""
    folder = tmp_path_factory.mktemp("channels")
    draws = np.random.default_rng(0)
    (folder / "pictures").mkdir()
    for number in range(6):
        coarse = Image.fromarray(draws.integers(0, 256, (6, 6, 4), dtype=np.uint8))
        coarse.resize((48, 48), Image.Resampling.BICUBIC).save(folder / "pictures" / f"{number}.png")
    run(folder / "run", folder / "pictures", request.param)
    return folder, request.param


def run(folder, pictures, channels, **changes):
    settings = {
        "data_path": str(pictures), "output_dir": str(folder), "image_channels": channels, "batch_size": 2,
        "num_epochs": 0, "num_steps": 3, "num_workers": 0, "device": "cpu", "discriminator_start": 0,
        "discriminator_warmup_steps": 0, "adversarial_weight": 0.5, "sample_every_steps": 3, "evaluate_every_steps": 3,
        "plan": False, "report": False, "held_out_share": 0.4,
    }  # fmt: skip
    train_vae(assemble(TrainVae, {**SMALL, **settings, **changes}), Console(quiet=True))


def test_a_run_trains_evaluates_and_samples(trained):
    folder, channels = trained
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert any("psnr_db" in str(row) for row in rows)
    assert list((folder / "run/samples").glob("*.png"))
    progress = ProgressSeen()
    figures = evaluate_pictures(
        folder / "run", folder / "pictures", PictureEvaluation(), device="cpu", progress=progress
    )
    assert figures.pictures >= 1
    assert progress.leads_to(figures.pictures)
    assert any(done % 1 for done, _ in progress)  # A batch of large pictures takes long, so its parts count, too.
    model = load_model(folder / "run", torch.device("cpu")).model
    (picture, *_) = open_pictures(folder / "pictures", held_out_share=0.4).held_out
    target = to_unit(centre_crop(picture.path, 24, channels)[None])
    with torch.no_grad():
        made = to_unit(to_u8(model.decode(model.encode(target).mean_BLhw)))
    if figures.pictures == 1:  # Otherwise it is a mean.
        assert figures.scalars["psnr_db"] == pytest.approx(float(10 * torch.log10(4 / (made - target).square().mean())))


def test_reconstructions_have_the_channels(trained, tmp_path):
    folder, channels = trained
    settings = Reconstruct(model=folder / "run", input=folder / "pictures/0.png", output_dir=tmp_path, device="cpu")
    progress = ProgressSeen()
    (written,), sheet, _, _ = reconstruct_folder(settings, progress)
    assert progress.leads_to(1)
    with Image.open(written) as made, Image.open(sheet) as drawn:
        assert (made.mode, made.size) == ({1: "L", 4: "RGBA"}[channels], (48, 48))
        assert drawn.mode == "RGB"


def test_stock_diffusers_gives_the_same_picture(trained, tmp_path):
    folder, channels = trained
    progress = ProgressSeen()
    measured = export_vae(folder / "run", tmp_path / "out", device="cpu", progress=progress).figures["measured on"]
    assert progress.leads_to(int(str(measured).split()[0]) + 1)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["in_channels"], config["out_channels"]) == (channels, channels)
    stock = diffusers.AutoencoderKL.from_pretrained(tmp_path / "out").eval().double()
    ours = load_model(folder / "run", torch.device("cpu")).model.double()
    image = to_unit(centre_crop(folder / "pictures/0.png", 48, channels)[None]).double()
    with torch.no_grad():
        theirs = stock.decode(stock.encode(image).latent_dist.mean).sample
        made = ours.decode(ours.encode(image).mean_BLhw)
    assert theirs.shape == (1, channels, 48, 48)
    assert (theirs - made).abs().max() < 1e-12
    read_back = load_model(tmp_path / "out", torch.device("cpu")).model
    assert read_back.architecture.in_channels == channels


def test_other_channels_are_refused_with_the_way_out(trained, tmp_path):
    folder, channels = trained
    with pytest.raises(UserError) as refused:
        run(folder / "run", folder / "pictures", 3, resume_from="auto")
    assert f"image_channels {channels}, and this run has 3" in str(refused.value)
    with pytest.raises(UserError) as refused:
        run(tmp_path, folder / "pictures", 3, init_from=str(folder / "run"))
    assert f"in_channels {channels}, this run has 3" in str(refused.value)
    assert refused.value.hint.endswith(f"--image-channels {channels}")


def test_pictures_without_transparency_are_said(tmp_path, caplog):
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    for channels in (1, 3):
        warn_of_opaque_pictures(channels, open_pictures(tmp_path))
    assert not caplog.messages
    warn_of_opaque_pictures(4, open_pictures(tmp_path))
    assert caplog.messages[0].startswith("image_channels is 4, and none of 1 pictures has transparency")
    Image.new("LA", (48, 48)).save(tmp_path / "b.png")
    caplog.clear()
    both = open_pictures(tmp_path)
    parts = Split([*both.train, *both.held_out], [], shared=False)
    warn_of_opaque_pictures(4, replace(both, split=replace(both.split, parts=parts)))
    assert not caplog.messages
