"""The factors of latents that an export writes: those of the source of a frozen encoder, otherwise measured ones."""

import json
import shutil

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from gputrain.errors import UserError
from gputrain.vae.dataset import centre_crop, open_pictures, to_unit
from gputrain.vae.diffusers_folder import CONFIG, WEIGHTS, save_diffusers
from gputrain.vae.export import export_vae
from gputrain.vae.latents import LatentScaling, family_of, nearest_family
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import read_pretrained
from tests.tables import check_rows, each_row
from tests.vae.test_model import stock_autoencoder
from tests.vae.test_pretrained import SD, aged
from tests.vae.test_recipe import settings_of
from tests.vae.test_train import few_layers, run

pytestmark = pytest.mark.usefixtures("flops_known")

SD_1, SDXL, SD_3, FLUX = (LatentScaling(*pair) for pair in ((0.18215,), (0.13025,), (1.5305, 0.0609), (0.3611, 0.1159)))


@pytest.fixture(autouse=True, scope="module")
def _few_layers():
    with few_layers():
        yield


@each_row(
    (["cond_stage_model.transformer.x", "decoder.conv_in.weight"], "model.ckpt", 4, SD_1),
    (["conditioner.embedders.0.x"], "model.safetensors", 4, SDXL),
    (["model.diffusion_model.joint_blocks.0.x"], "model.safetensors", 16, SD_3),
    (["double_blocks.0.img_attn.norm.key_norm.scale"], "model.safetensors", 16, FLUX),
    ([], "sdxl_vae.safetensors", 4, SDXL),
    ([], "sdxl.vae.safetensors", 4, SDXL),
    ([], "vae.safetensors stable-diffusion-xl-v1-base/vae", 4, SDXL),
    ([], "vae-ft-mse-840000-ema-pruned.ckpt", 4, SD_1),
    ([], "v1-5-pruned-emaonly.safetensors", 4, SD_1),
    ([], "flux-ae.safetensors flux-1-dev", 16, FLUX),
    ([], "sd3_medium.safetensors", 16, SD_3),
    ([], "ae.safetensors", 16, None),
    ([], "pixl.ckpt", 4, None),
    (["conditioner.embedders.0.x"], "flux.safetensors", 8, None),
)
def test_what_a_file_without_a_configuration_tells(names, words, channels, scaling):
    found = family_of(names, words, channels)
    assert (found and found.scaling) == scaling


@each_row((0.35, 16, FLUX), (1.2, 16, SD_3), (0.14, 4, SDXL), (0.19, 4, SD_1), (0.9, 4, None), (0.3, 8, None))
def test_the_nearest_published_factor(measured, channels, scaling):
    found = nearest_family(LatentScaling(measured, 0.0), channels)
    assert (found and found.scaling) == scaling


def test_the_factors_of_every_source(tmp_path):
    """Folders state them; files of pipelines tell them by tensors."""
    weights = {name: tensor.half() for name, tensor in AutoencoderKL(SD).state_dict().items()}
    old, one = aged(weights, "first_stage_model."), torch.ones(1)
    mean, std = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    torch.save({"state_dict": old | {"cond_stage_model.x": one}}, tmp_path / "old.ckpt")
    torch.save(old | {"scale_factor": torch.tensor(0.25)}, tmp_path / "own.pth")
    save_file(old | {"conditioner.x": one}, tmp_path / "base.safetensors")
    edm = {"conditioner.x": one, "edm_mean": torch.tensor(mean)[None, :, None, None], "edm_std": torch.tensor(std)}
    save_file(old | edm, tmp_path / "edm.safetensors")
    save_file(aged(weights), tmp_path / "bare.safetensors")
    save_file(aged(weights), tmp_path / "x.safetensors", metadata={"modelspec.architecture": "stable-diffusion-xl-v1"})
    save_diffusers(AutoencoderKL(SD), tmp_path / "pipe" / "vae", LatentScaling(0.5, 0.1, mean, std), sample_size=64)
    save_diffusers(AutoencoderKL(SD), tmp_path / "plain", SDXL, sample_size=64)
    assert "latents_mean" not in json.loads((tmp_path / "plain" / CONFIG).read_text())
    save_diffusers(AutoencoderKL(SD), tmp_path / "oldest", SDXL, sample_size=64)
    config = json.loads((tmp_path / "oldest" / CONFIG).read_text())
    del config["scaling_factor"], config["shift_factor"]
    (tmp_path / "oldest" / CONFIG).write_text(json.dumps(config))
    shutil.copy(tmp_path / "plain" / WEIGHTS, tmp_path / "ours.safetensors")

    def check(name, scaling, published):
        found = read_pretrained(tmp_path / name).latents
        assert (found.scaling, found.published, found.encoder_trained) == (scaling, published, False)

    check_rows(
        [
            ("old.ckpt", SD_1, True), ("own.pth", LatentScaling(0.25), True), ("base.safetensors", SDXL, True),
            ("edm.safetensors", LatentScaling(0.5, None, mean, std), True), ("bare.safetensors", None, True),
            ("x.safetensors", SDXL, True), ("pipe", LatentScaling(0.5, 0.1, mean, std), True), ("plain", SDXL, True),
            (f"plain/{WEIGHTS}", SDXL, True), ("oldest", SD_1, True), ("ours.safetensors", None, False),
        ],
        check,
    )  # fmt: skip
    (tmp_path / "oldest" / CONFIG).write_text(json.dumps(config | {"scaling_factor": "large"}))
    with pytest.raises(UserError, match="scaling_factor"):
        read_pretrained(tmp_path / "oldest")


OF_SOURCE = {"sample_size": 768, "force_upcast": False, "unknown_key": [1]}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A pretrained autoencoder whose factors are not those of its latents."""
    folder = tmp_path_factory.mktemp("pretrained") / "stock"
    torch.manual_seed(5)
    save_diffusers(AutoencoderKL(settings_of().architecture), folder, SD_1, sample_size=24, kept=OF_SOURCE)
    return folder


def written(folder):
    config = json.loads((folder / CONFIG).read_text())
    return config["scaling_factor"], config["shift_factor"]


def test_a_decoder_keeps_the_factors_of_its_source(photographs, stock, tmp_path):
    """Through a resume, through runs that begin with the run, and without the source and the pictures. The other keys
    of its configuration stay in every export."""
    first, again, third = tmp_path / "first", tmp_path / "again", tmp_path / "third"
    moved = tmp_path / "moved"
    shutil.copytree(stock, moved)
    pictures = tmp_path / "pictures"
    shutil.copytree(photographs, pictures)
    changes = {"train_part": "decoder", "num_epochs": 50}
    run(first, pictures, init_from=str(moved), max_steps=1, **changes)
    shutil.rmtree(moved)
    run(first, pictures, init_from=str(moved), max_steps=2, resume_from="auto", **changes)
    run(again, pictures, init_from=str(first), max_steps=1, **changes)
    shutil.rmtree(pictures)
    for made in (first, again):
        figures = export_vae(made, made / "export").figures
        assert written(made / "export") == (0.18215, None)
        assert figures[f"kept of {moved}"] == "sample_size 768, force_upcast False, unknown_key [1]"
        assert "whose encoder was not trained" in str(figures["these factors are"])
        assert load_file(made / "export" / WEIGHTS)["encoder.conv_in.weight"].equal(
            load_file(stock / WEIGHTS)["encoder.conv_in.weight"]
        )
    # Pictures that are named are measured, and the source's factors still are written.
    figures = export_vae(first, first / "measured", data_path=photographs).figures
    assert written(first / "measured") == (0.18215, None)
    assert "scaling_factor" in str(figures["measured there, not written"])
    # Once the encoder has been trained too, its latents are others.
    run(third, photographs, init_from=str(first), max_steps=1)
    figures = export_vae(third, third / "export").figures
    assert figures["these factors are"] == "measured"
    assert "scaling_factor 0.18215, no shift_factor" in str(figures["before training"])
    assert written(third / "export")[0] != 0.18215
    for made in (first, again, third):
        config = json.loads((made / "export" / CONFIG).read_text())
        assert {name: config.get(name) for name in OF_SOURCE} == OF_SOURCE


def test_a_decoder_of_a_run_keeps_what_the_run_exports(photographs, tmp_path):
    """A run from scratch has measured factors: another run with its encoder measures them on the same pictures."""
    other = tmp_path / "pictures"
    other.mkdir()
    for path in sorted(photographs.iterdir())[:3]:
        shutil.copy(path, other)
    run(tmp_path / "scratch", photographs, max_steps=1, ema_decay=0, start="random")
    changes = {"train_part": "decoder", "max_steps": 1, "ema_decay": 0}
    run(tmp_path / "decoder", other, init_from=str(tmp_path / "scratch"), **changes)
    for name in ("scratch", "decoder"):
        export_vae(tmp_path / name, tmp_path / name / "export")
    assert written(tmp_path / "decoder" / "export") == written(tmp_path / "scratch" / "export")


FLUX2_RUN = {"preset": "flux2", "max_steps": 1, "ema_decay": 0}


def normalised_patches(stock, photographs, size):
    """Returns the patches of the training pictures' latents as a pipeline of FLUX.2 gives them to its denoiser."""
    pictures = open_pictures(photographs, held_out_share=0.05).of_epoch
    images = torch.stack([to_unit(centre_crop(picture.path, size)) for picture in pictures]).double()
    with torch.no_grad():
        latents = stock.encode(images).latent_dist.mode()
        count, channels, height, width = latents.shape
        latents = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        return stock.bn(latents.flatten(1, 3))


def test_statistics_of_patches_are_measured_where_the_encoder_was_trained(photographs, tmp_path):
    run(tmp_path / "run", photographs, **FLUX2_RUN)
    exported = export_vae(tmp_path / "run", tmp_path / "export")
    assert exported.notes == [f'Load it: diffusers.AutoencoderKLFlux2.from_pretrained("{tmp_path / "export"}")']
    stock, report = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())
    assert "scaling_factor" not in stock.config
    patches = normalised_patches(stock.eval().double(), photographs, 24)
    std, mean = torch.std_mean(patches, dim=(0, 2, 3), correction=0)
    variance = stock.bn.running_var
    assert mean.abs().max() < 1e-5
    torch.testing.assert_close(std, (variance / (variance + 1e-4)).sqrt(), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_statistics_of_patches_are_kept_where_only_the_decoder_was_trained(photographs, tmp_path):
    """Through a run that begins with the run, and with an eps that is not the usual one."""
    architecture = settings_of(preset="flux2").architecture
    torch.manual_seed(5)
    source = stock_autoencoder(architecture)
    source.bn.running_mean.normal_()
    source.bn.running_var.uniform_(0.5, 2)
    source.bn.num_batches_tracked.fill_(77)
    source.register_to_config(batch_norm_eps=1e-3, batch_norm_momentum=0.3)
    source.save_pretrained(tmp_path / "pipeline" / "vae")
    run(tmp_path / "first", photographs, init_from=str(tmp_path / "pipeline"), train_part="decoder", **FLUX2_RUN)
    run(tmp_path / "again", photographs, init_from=str(tmp_path / "first"), train_part="decoder", **FLUX2_RUN)
    before = source.state_dict()
    for made in (tmp_path / "first", tmp_path / "again"):
        figures = export_vae(made, made / "export").figures
        assert "whose encoder was not trained" in str(figures["these factors are"])
        weights, config = load_file(made / "export" / WEIGHTS), json.loads((made / "export" / CONFIG).read_text())
        for name in ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "encoder.conv_in.weight"):
            assert torch.equal(weights[name], before[name]), name
        assert not torch.equal(weights["decoder.conv_out.weight"], before["decoder.conv_out.weight"])
        assert (config["batch_norm_eps"], "scaling_factor" in config) == (1e-3, False)
        assert config["batch_norm_momentum"] == 0.3
    run(tmp_path / "all", photographs, init_from=str(tmp_path / "pipeline"), **FLUX2_RUN)
    assert export_vae(tmp_path / "all", tmp_path / "export").figures["these factors are"] == "measured"
    assert not torch.equal(load_file(tmp_path / "export" / WEIGHTS)["bn.running_mean"], before["bn.running_mean"])
