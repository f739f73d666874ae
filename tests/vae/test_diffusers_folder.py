"""Folders written for and by stock diffusers, and damaged folders."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gputrain.errors import UserError
from gputrain.vae.architecture import PRESETS, VaeArchitecture, VaePreset
from gputrain.vae.diffusers_folder import (
    CONFIG,
    WEIGHTS,
    export_and_verify,
    load_diffusers,
    save_diffusers,
    tile_size,
    write_folder,
)
from gputrain.vae.latents import LatentScaling, PatchStatistics
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import read_pretrained
from gputrain.weights import DIGEST, digest_of, read_safetensors
from tests.tables import each_row
from tests.vae.test_model import SMALL, SMALL_FLUX2, stock_autoencoder

SCALING = LatentScaling(0.36, 0.12)
FACTORS = {"scaling_factor": 0.36, "shift_factor": 0.12, "sample_size": 256}


def reconstruct(model: AutoencoderKL, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.decode(model.encode(images).mean_BLhw)


def reconstruct_by_stock(model: diffusers.AutoencoderKL, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.decode(model.encode(images).latent_dist.mean).sample


def test_all_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_diffusers(AutoencoderKL(SMALL), tmp_path / "vae", SCALING, sample_size=256)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "vae").iterdir()}
    assert modes == {CONFIG: 0o640, WEIGHTS: 0o640}


def pictures(size: int = 32) -> Tensor:
    return torch.rand(2, 3, size, size) * 2 - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a small autoencoder saved by stock diffusers."""
    stock_autoencoder(SMALL).save_pretrained(tmp_path / "vae")
    return tmp_path / "vae"


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name == "fast" else [pytest.mark.slow]) for name in PRESETS]
)
def test_stock_loads_ours(preset: VaePreset, tmp_path: Path) -> None:
    model = AutoencoderKL(PRESETS[preset]).to(memory_format=torch.channels_last)
    save_diffusers(model, tmp_path / "deep" / "vae", SCALING, sample_size=256)
    kind = getattr(diffusers, PRESETS[preset].class_name)
    stock, report = kind.from_pretrained(tmp_path / "deep" / "vae", output_loading_info=True)
    assert not any(report.values())
    assert {key: stock.config[key] for key in FACTORS} == FACTORS
    assert {p.dtype for p in stock.parameters()} == {torch.float32}
    images = pictures().double()  # Our upsampling adds in another order, with other rounding errors in fp32.
    model.to(torch.float64, memory_format=torch.contiguous_format)
    assert (reconstruct_by_stock(stock.double(), images) - reconstruct(model, images)).abs().max() < 1e-10
    with safe_open(tmp_path / "deep" / "vae" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt", DIGEST: digest_of(load_file(tmp_path / "deep" / "vae" / WEIGHTS))}
    assert sorted(path.name for path in (tmp_path / "deep" / "vae").iterdir()) == [CONFIG, WEIGHTS]


def test_ours_loads_stock(folder: Path) -> None:
    stock = diffusers.AutoencoderKL.from_pretrained(folder)
    model, scaling = load_diffusers(folder)
    assert model.architecture == SMALL
    assert scaling == LatentScaling(0.18215)
    images = pictures()
    assert (reconstruct_by_stock(stock, images) - reconstruct(model, images)).abs().max() < 1e-5


def test_keys_that_flux2_leaves_out(tmp_path: Path) -> None:
    """Those of AutoencoderKLFlux2 have other defaults than those of AutoencoderKL."""
    architecture = replace(PRESETS["flux2"], block_out_channels=(32, 32, 32, 32), decoder_block_out_channels=())
    save_diffusers(AutoencoderKL(architecture), tmp_path, LatentScaling(), sample_size=256)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert "decoder_block_out_channels" not in config  # Earlier versions of diffusers do not know the key.
    kept = {name: config[name] for name in ("_class_name", "block_out_channels")}
    (tmp_path / CONFIG).write_text(json.dumps(kept))
    model, scaling = load_diffusers(tmp_path)
    assert model.architecture == architecture
    assert scaling.patches == PatchStatistics([0.0] * 128, [1.0] * 128, 1e-4, batches=0)
    stock = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path).config
    stated = {name: value for name, value in config.items() if name != "sample_size"}
    assert json.loads(json.dumps({name: stock[name] for name in stated})) == stated


def test_configuration_of_the_oldest_files(folder: Path) -> None:
    """Missing keys have diffusers' defaults, and half precision is converted to fp32."""
    config = json.loads((folder / CONFIG).read_text())
    for key in ("use_quant_conv", "use_post_quant_conv", "mid_block_add_attention", "scaling_factor", "shift_factor"):
        del config[key]
    (folder / CONFIG).write_text(json.dumps(config | {"act_fn": "swish"}))
    rewrite(folder, lambda weights: {name: tensor.half() for name, tensor in weights.items()})
    stock = diffusers.AutoencoderKL.from_pretrained(folder)
    model, scaling = load_diffusers(folder)
    assert scaling == LatentScaling(0.18215)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    images = pictures()
    assert (reconstruct_by_stock(stock, images) - reconstruct(model, images)).abs().max() < 1e-5


@pytest.mark.parametrize("ndim", [2, 4])
def test_old_names_of_attention(folder: Path, ndim: int) -> None:
    expected, _ = load_diffusers(folder)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def age(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        aged = {}
        for name, tensor in weights.items():
            for new, before in old.items():
                if f".{new}." in name:
                    name = name.replace(new, before)
                    tensor = tensor[:, :, None, None].contiguous() if ndim == 4 and tensor.ndim == 2 else tensor
            aged[name] = tensor
        return aged

    rewrite(folder, age)
    assert sum(".query." in name for name in load_file(folder / WEIGHTS)) == 4
    model, _ = load_diffusers(folder)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_tiles_of_stock_diffusers_give_nearly_the_whole_picture(tmp_path: Path) -> None:
    """Latents of 768 pixels a side are decoded in 4 tiles, not 121, and a training size that is no multiple of four
    latent positions shifts no tile."""
    architecture = VaeArchitecture((8, 8, 8, 8), 4, norm_num_groups=2, layers_per_block=1)
    for image_size, tiles in ((64, 4), (520, 4)):
        torch.manual_seed(0)
        size = tile_size(image_size, architecture)
        save_diffusers(AutoencoderKL(architecture), tmp_path, SCALING, sample_size=size)
        stock = diffusers.AutoencoderKL.from_pretrained(tmp_path).eval()
        latents, calls = torch.randn(1, 4, 96, 96), []
        stock.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with torch.no_grad():
            whole = stock.decode(latents).sample
            stock.enable_tiling()
            tiled = stock.decode(latents).sample
        assert (size, tiled.shape) == ({64: 512, 520: 544}[image_size], whole.shape)
        assert len(calls) == 1 + tiles
        assert (tiled - whole).abs().max() < 0.05 * (whole.max() - whole.min())


def test_export_and_verify(tmp_path: Path) -> None:
    model = AutoencoderKL(SMALL)
    assert export_and_verify(model, tmp_path, SCALING, sample_size=256) < 1e-6
    before = (tmp_path / WEIGHTS).read_bytes()
    with torch.no_grad():
        model.decoder.conv_in.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(UserError, match=r"decoder.conv_in.weight: not all weights are finite"):
        export_and_verify(model, tmp_path, SCALING, sample_size=256)
    assert (tmp_path / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize("place", ["a number", "a name"])
def test_damage_to_an_export_is_noticed(place: str, tmp_path: Path) -> None:
    """A valid file with a changed byte: of a number, or of the names of two tensors with equal shapes."""
    save_diffusers(AutoencoderKL(SMALL), tmp_path, SCALING, sample_size=256)
    load_diffusers(tmp_path)
    path = tmp_path / WEIGHTS
    content = path.read_bytes()
    if place == "a number":
        content = content[:-1] + bytes([content[-1] ^ 1])
    else:
        first, second = b"encoder.mid_block.resnets.0.conv1.bias", b"encoder.mid_block.resnets.1.conv1.bias"
        between = b"#" * len(first)
        content = content.replace(first, between).replace(second, first).replace(between, second)
    path.write_bytes(content)
    assert len(load_file(path)) == len(AutoencoderKL(SMALL).state_dict())  # Other libraries load it without an error.
    for read in (load_diffusers, lambda folder: read_safetensors(folder / WEIGHTS)):
        with pytest.raises(UserError, match="damaged: its tensors differ from those that were written"):
            read(tmp_path)


def test_export_and_verify_notices_another_model(tmp_path: Path) -> None:
    """Weights with a wrong configuration that fits their shapes: other numbers of groups in every norm."""
    model = AutoencoderKL(SMALL)
    model.architecture = VaeArchitecture(**{**vars(SMALL), "norm_num_groups": 2})
    with pytest.raises(RuntimeError, match="a reconstruction differs by"):
        export_and_verify(model, tmp_path, SCALING, sample_size=256)


def test_full_disk_leaves_the_old_export_whole(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")  # The module does not exist on Windows.
    save_diffusers(AutoencoderKL(SMALL), tmp_path, SCALING, sample_size=256)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            save_diffusers(AutoencoderKL(SMALL), tmp_path, SCALING, sample_size=256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "vae").write_text("")
    with pytest.raises(UserError, match=r"vae: cannot be written \(File exists"):
        save_diffusers(AutoencoderKL(SMALL), tmp_path / "vae", SCALING, sample_size=256)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | values))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda weights: {k: v for k, v in weights.items() if k != name})


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"config.json: no such file"),
    "no configuration": (lambda f: (f / CONFIG).unlink(), r"config.json: no such file"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), r"safetensors: no such file"),
    "not JSON": (lambda f: (f / CONFIG).write_text("{"), r"config.json: not valid JSON"),
    "not a mapping": (lambda f: (f / CONFIG).write_text("[1]"), r"describes no diffusers model"),
    "another model": (lambda f: configure(f, _class_name="UNet2DModel"), r"describes UNet2DModel"),
    "other blocks": (lambda f: configure(f, down_block_types=["AttnDownBlock2D"] * 2), r"down_block_types is \["),
    "too few blocks": (lambda f: configure(f, up_block_types=["UpDecoderBlock2D"]), r"up_block_types is \["),
    "another activation": (lambda f: configure(f, act_fn="gelu"), r"act_fn is 'gelu'"),
    "widths of text": (lambda f: configure(f, block_out_channels="8,16"), r"block_out_channels is '8,16'"),
    "no widths": (lambda f: configure(f, block_out_channels=[]), r"block_out_channels is \[\]"),
    "a null": (lambda f: configure(f, latent_channels=None), r"latent_channels is None"),
    "a number for a switch": (lambda f: configure(f, use_quant_conv=1), r"use_quant_conv is 1"),
    "groups": (lambda f: configure(f, norm_num_groups=3), r"norm_num_groups 3 does not divide 8 channels"),
    "absurd widths": (lambda f: configure(f, block_out_channels=[8, 1 << 20]), r"is \(.*\), expected \(1048576"),
    "another width": (lambda f: configure(f, latent_channels=3), r"is \(4, 16, 3, 3\), expected \(6, 16, 3, 3\)"),
    "a missing tensor": (without("quant_conv.bias"), r"does not fit config.json: quant_conv.bias is missing"),
    "tensors too many": (lambda f: configure(f, use_quant_conv=False), r"quant_conv.\w+ is unknown"),
    "truncated": (truncate, r"truncated or damaged"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), r"truncated or damaged"),
}
BROKEN_FLUX2: dict[str, tuple[Callable[[Path], object], str]] = {
    "patches": (lambda f: configure(f, patch_size=[4, 4]), r"patch_size is \[4, 4\], but only \[2, 2\] is supported"),
    "border": (lambda f: configure(f, padding_mode="reflect"), r"padding_mode is 'reflect', but only 'zeros'"),
    "no patches": (lambda f: configure(f, patch_size=None), r"patch_size is None, but only"),
    "no number": (lambda f: configure(f, batch_norm_eps="small"), r"config.json: batch_norm_eps is 'small'"),
    "fewer blocks": (lambda f: configure(f, decoder_block_out_channels=[16]), r"has not the 2 blocks of block_out_ch"),
    "odd blocks": (lambda f: configure(f, decoder_block_out_channels=[12, 6]), r"4 does not divide 6 channels"),
    "another decoder": (lambda f: configure(f, decoder_block_out_channels=None), r"does not fit config.json"),
    "the former class": (lambda f: configure(f, _class_name="AutoencoderKL"), r"does not fit config.json"),
    "without a mean": (without("bn.running_mean"), r"does not fit config.json: bn.running_mean is missing"),
    "other latents": (
        lambda f: rewrite(f, lambda weights: weights | {"bn.running_var": torch.ones(7)}),
        r"bn.running_var is \(7,\), expected \(8,\)",
    ),
    "negative": (
        lambda f: rewrite(f, lambda weights: weights | {"bn.running_var": -torch.ones(8)}),
        r"bn.running_var: not all values are those of a var",
    ),
}


@each_row(*BROKEN_FLUX2.items())
def test_broken_folder_of_flux2(tmp_path: Path, name: str, damage: tuple[Callable[[Path], object], str]) -> None:
    spoil, message = damage
    save_diffusers(AutoencoderKL(SMALL_FLUX2), tmp_path / name, SCALING, sample_size=256)
    spoil(tmp_path / name)
    with pytest.raises(UserError, match=message):
        load_diffusers(tmp_path / name)


@each_row(*BROKEN.items())
def test_broken_folder(folder: Path, tmp_path: Path, name: str, damage: tuple[Callable[[Path], object], str]) -> None:
    spoil, message = damage
    shutil.copytree(folder, tmp_path / name)
    spoil(tmp_path / name)
    with pytest.raises(UserError, match=message):
        load_diffusers(tmp_path / name)


def test_first_few_of_many_differences(folder: Path) -> None:
    configure(folder, mid_block_add_attention=False)
    with pytest.raises(UserError, match=r"fit config.json: (\S+ is unknown; ){6}and 14 more"):
        load_diffusers(folder)


@each_row("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.non_ema.safetensors")
def test_a_folder_of_another_variant_names_its_file(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(UserError, match=r"safetensors: no such file") as caught:
        load_diffusers(folder)
    assert caught.value.hint.endswith(f"--init-from {folder / name}")
    assert read_pretrained(folder / name).architecture == SMALL
    (folder / name).rename(folder / WEIGHTS)


def test_weights_that_diffusers_has_split_into_several_files(tmp_path: Path) -> None:
    stock = stock_autoencoder(SMALL)
    stock.save_pretrained(tmp_path / "vae", max_shard_size="100KB")
    shards = sorted((tmp_path / "vae").glob("*-of-*.safetensors"))
    assert len(shards) > 2
    model, _ = load_diffusers(tmp_path / "vae")
    images = pictures()
    torch.testing.assert_close(reconstruct(model, images), reconstruct_by_stock(stock, images), rtol=1e-3, atol=1e-4)
    shards[1].unlink()
    with pytest.raises(UserError, match=rf"{len(shards) - 1} of {len(shards)} files of the weights"):
        load_diffusers(tmp_path / "vae")


def test_weights_that_were_not_exported_here_stay(tmp_path):
    write_folder(tmp_path, {}, {WEIGHTS: {"a": torch.ones(1)}})
    write_folder(tmp_path, {}, {WEIGHTS: {"a": torch.zeros(1)}})
    save_file({"a": torch.ones(1)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match="is there, and was not exported here"):
        write_folder(tmp_path, {}, {WEIGHTS: {"a": torch.zeros(1)}})


def test_factors_by_channel_are_named():
    assert str(LatentScaling(1.0, latents_std=[1.0])) == "scaling_factor 1, no shift_factor, latents_std by channel"
