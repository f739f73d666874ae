"""Pretrained weights: all sources and tensor names, and files that cannot be used."""

import copy
import dataclasses
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from gputrain.config import flatten
from gputrain.engine import checkpoint
from gputrain.errors import UserError
from gputrain.vae.architecture import PRESETS, VaeArchitecture, VaePreset
from gputrain.vae.architecture import vae_architecture as built
from gputrain.vae.config import Data, Model, TrainVae
from gputrain.vae.diffusers_folder import save_diffusers
from gputrain.vae.export import refuse_other_layers, write_single_file
from gputrain.vae.latents import LatentScaling, PatchStatistics
from gputrain.vae.model import AutoencoderKL
from gputrain.vae.pretrained import load_pretrained, options_for, read_pretrained
from tests.tables import check_rows, each_row
from tests.toy import whole_checkpoint
from tests.vae.test_model import stock_autoencoder

WIDTHS = (32, 64, 96, 64)  # those of the first latent diffusion models have 32 groups
SD = dataclasses.replace(PRESETS["sd"], block_out_channels=WIDTHS)
FLUX = dataclasses.replace(PRESETS["flux"], block_out_channels=WIDTHS)
FLUX2 = dataclasses.replace(PRESETS["flux2"], block_out_channels=WIDTHS, decoder_block_out_channels=(32, 32, 64, 96))
TINY = VaeArchitecture((8, 16), 4, norm_num_groups=4, layers_per_block=1)
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def stock() -> dict[VaeArchitecture, diffusers.AutoencoderKL]:
    """Returns diffusers' autoencoders with random tensors, so that missing or swapped norms are detected."""
    torch.manual_seed(1)
    made = {}
    for architecture in (SD, FLUX, FLUX2, TINY):
        made[architecture] = stock_autoencoder(architecture)
        for tensor in (*made[architecture].parameters(), *made[architecture].buffers()):
            with torch.no_grad():
                tensor.add_((0.1 * torch.randn_like(tensor.float())).abs().to(tensor.dtype))
    return made


def old_names(levels: int = 4, layers: int = 2) -> dict[str, str]:
    """Returns the first latent diffusion models' module names by diffusers' names: an independent table."""
    table = {"encoder.conv_norm_out": "encoder.norm_out", "decoder.conv_norm_out": "decoder.norm_out"}
    for coder in ("encoder", "decoder"):
        for number in (0, 1):
            table[f"{coder}.mid_block.resnets.{number}"] = f"{coder}.mid.block_{number + 1}"
        attention = f"{coder}.mid_block.attentions.0"
        table |= {f"{attention}.to_{letter}": f"{coder}.mid.attn_1.{letter}" for letter in "qkv"}
        table |= {
            f"{attention}.group_norm": f"{coder}.mid.attn_1.norm",
            f"{attention}.to_out.0": f"{coder}.mid.attn_1.proj_out",
        }
    for level in range(levels):
        below = levels - 1 - level
        for layer in range(layers):
            table[f"encoder.down_blocks.{level}.resnets.{layer}"] = f"encoder.down.{level}.block.{layer}"
        for layer in range(layers + 1):
            table[f"decoder.up_blocks.{level}.resnets.{layer}"] = f"decoder.up.{below}.block.{layer}"
        table[f"encoder.down_blocks.{level}.downsamplers.0.conv"] = f"encoder.down.{level}.downsample.conv"
        table[f"decoder.up_blocks.{level}.upsamplers.0.conv"] = f"decoder.up.{below}.upsample.conv"
    return table


def aged(weights: Weights, prefix: str = "", *, matrices: bool = False) -> Weights:
    """Returns weights of diffusers with the old names, attention's as 1x1 convolutions unless `matrices`."""
    modules = old_names()
    made = {}
    for name, tensor in weights.items():
        module, part = name.rsplit(".", 1)
        inside = next((new for new in modules if module == new or module.startswith(new + ".")), None)
        old = module if inside is None else modules[inside] + module[len(inside) :]
        old = old.replace("conv_shortcut", "nin_shortcut")
        if tensor.ndim == 2 and not matrices:
            tensor = tensor[:, :, None, None]
        made[f"{prefix}{old}.{part}"] = tensor.clone()
    return made


def assert_reads(
    weights: Weights, architecture: VaeArchitecture, reference: diffusers.AutoencoderKL, size: int = 32
) -> None:
    """Asserts that reconstructions with the weights equal diffusers', in fp64 to exclude rounding errors."""
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    model = AutoencoderKL(architecture)
    model.load_state_dict(weights)
    model, reference = model.double(), copy.deepcopy(reference).double()
    images = torch.rand(2, 3, size, size, dtype=torch.float64) * 2 - 1
    with torch.no_grad():
        ours = model.decode(model.encode(images).mean_BLhw)
        theirs = reference.decode(reference.encode(images).latent_dist.mean).sample
    assert theirs.std() > 0.01
    assert (ours - theirs).abs().max() < 1e-10


@each_row((SD, "", False), (SD, "first_stage_model.", True), (FLUX, "vae.", False))
def test_first_latent_diffusion_names(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL],
    tmp_path: Path,
    architecture: VaeArchitecture,
    prefix: str,
    matrices: bool,
) -> None:
    """diffusers' own converter reads the same weights from the file."""
    reference = stock[architecture]
    old = aged(reference.state_dict(), prefix, matrices=matrices)
    assert not any("_blocks" in name or ".attentions." in name for name in old)
    converted = convert_ldm_vae_checkpoint(dict(old), dict(reference.config))
    again = stock_autoencoder(architecture)
    again.load_state_dict(converted)
    rest = {"model.diffusion_model.out.2.bias": torch.ones(3), "cond_stage_model.encoder.bias": torch.ones(3)}
    save_file(old | (rest if prefix else {"loss.logvar": torch.ones(1)}), tmp_path / "ae.safetensors")
    weights = load_pretrained(tmp_path / "ae.safetensors", architecture).weights
    assert_reads(weights, architecture, again)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    assert read_pretrained(tmp_path / "ae.safetensors").architecture == architecture


@each_row(SD, FLUX)
def test_a_single_file_has_the_original_names(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path, architecture: VaeArchitecture
) -> None:
    """diffusers loads it as it is, and an independent table gives the same names, shapes and values."""
    model = AutoencoderKL(architecture)
    model.load_state_dict(stock[architecture].state_dict())
    (file,), _, difference = write_single_file(model, tmp_path / "my-vae")
    assert (file.name, difference, [path.name for path in file.parent.iterdir()]) == (
        "my-vae.safetensors", 0, ["my-vae.safetensors"],
    )  # fmt: skip
    written, expected = load_file(file), aged(stock[architecture].state_dict())
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    stock[architecture].save_config(tmp_path / "config")
    theirs = diffusers.AutoencoderKL.from_single_file(str(file), config=str(tmp_path / "config"))
    for name, tensor in stock[architecture].state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def test_layers_that_the_original_layout_lacks() -> None:
    refuse_other_layers(SD)
    with pytest.raises(UserError, match=r"statistics of patches, as FLUX\.2"):
        refuse_other_layers(PRESETS["flux2"])
    with pytest.raises(UserError, match="it has no attention"):
        refuse_other_layers(PRESETS["lite"])


@each_row(("", torch.float32), ("vae.", torch.bfloat16))
def test_files_of_flux2(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path, prefix: str, dtype: torch.dtype
) -> None:
    """By the names of Black Forest Labs, as diffusers' scripts/convert_flux2_to_diffusers.py lists them: the former
    names, with the quantising convolutions as parts of encoder and decoder. The decoder has widths of its own."""
    reference = stock[FLUX2].to(dtype).float()
    places = {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv"}
    old = {}
    for name, tensor in aged({name: tensor.to(dtype) for name, tensor in reference.state_dict().items()}).items():
        module = name.split(".")[0]
        old[prefix + name.replace(module, places.get(module, module), 1)] = tensor
    others = {"double_blocks.0.img_attn.norm.scale": torch.ones(2)} if prefix else {}
    save_file(old | others, tmp_path / "ae.safetensors")
    found = load_pretrained(tmp_path / "ae.safetensors", FLUX2)
    assert_reads(found.weights, FLUX2, reference)
    assert found.latents.scaling is not None
    assert found.latents.scaling.patches == PatchStatistics(
        reference.bn.running_mean.tolist(), reference.bn.running_var.tolist(), 1e-4, batches=0
    )
    assert found.latents.told_by == "its tensors bn.*"


def test_pickles_of_tensors(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A .ckpt of a Lightning run has its tensors under state_dict, in half precision. Others beside them are named."""
    halves = {name: tensor.half() for name, tensor in stock[SD].state_dict().items()}
    whole = aged(halves, "module.first_stage_model.") | {"cond_stage_model.x": torch.ones(1)}
    torch.save({"state_dict": whole, "global_step": 7}, tmp_path / "old.ckpt")
    with caplog.at_level(logging.INFO):
        load_pretrained(tmp_path / "old.ckpt", SD)
    assert "old.ckpt: not used: cond_stage_model (1)" in caplog.text
    weights = load_pretrained(tmp_path / "old.ckpt", SD).weights
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in halves.items())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_diffusers_folders_and_files(stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path) -> None:
    """A folder, a pipeline that contains it, and the file itself, with and without its configuration."""

    stock[TINY].save_pretrained(tmp_path / "vae")
    shutil.copy(tmp_path / "vae/diffusion_pytorch_model.safetensors", tmp_path / "alone.safetensors")

    def check(place: str) -> None:
        assert_reads(load_pretrained(tmp_path / place, TINY).weights, TINY, stock[TINY])

    check_rows([("vae",), (".",), ("vae/diffusion_pytorch_model.safetensors",), ("alone.safetensors",)], check)


def test_groups_that_only_the_configuration_tells(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path
) -> None:
    stock[TINY].save_pretrained(tmp_path)
    other = dataclasses.replace(TINY, norm_num_groups=8)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    for path in (tmp_path, file):
        with pytest.raises(UserError, match=r"different architecture: norm_num_groups 4, this run has 8$"):
            load_pretrained(path, other)
    assert read_pretrained(file).architecture == TINY
    save_file(load_file(file), tmp_path / "alone.safetensors")
    with pytest.raises(UserError, match="32 groups do not divide 8 channels"):
        read_pretrained(tmp_path / "alone.safetensors")


def test_groups_of_the_first_latent_diffusion_models(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path
) -> None:
    """Their files do not contain the number of groups, which is always 32 in their code."""
    save_file(aged(stock[FLUX].state_dict()), tmp_path / "ae.safetensors")
    with pytest.raises(UserError, match=r"different architecture: norm_num_groups 32, this run has 16$"):
        load_pretrained(tmp_path / "ae.safetensors", dataclasses.replace(FLUX, norm_num_groups=16))


def test_runs_of_ours(tmp_path: Path) -> None:
    """Runs give EMA weights if they have them, otherwise the trained ones; exports are read, too."""
    settings = TrainVae(data=Data(data_path=tmp_path), model=Model(preset="fast", channels=(8, 16), z_channels=4))
    architecture = settings.architecture
    trained, averaged = AutoencoderKL(architecture), AutoencoderKL(architecture)
    modules = {"autoencoder": trained.state_dict()}
    ema = {f"average.{name}": tensor for name, tensor in averaged.state_dict().items()}
    content = whole_checkpoint(kind="vae", config=flatten(settings), step=3)
    checkpoint.save(tmp_path, content | {"modules": modules | {"ema": ema}})
    save_diffusers(averaged, tmp_path / "export", LatentScaling(1.0), sample_size=16)
    for path in (tmp_path, tmp_path / "checkpoint_last.pt", tmp_path / "export"):
        weights = load_pretrained(path, architecture).weights
        assert weights.keys() == trained.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in averaged.state_dict().items())
        assert read_pretrained(path).architecture == architecture
    checkpoint.save(tmp_path, content | {"modules": modules})
    weights = load_pretrained(tmp_path, architecture).weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.state_dict().items())


OTHERS = {
    "stock sd": (
        SD, PRESETS["flux"],
        "block_out_channels 32,64,96,64, this run has 128,256,512,512; latent_channels 4, this run has 16; "
        "use_quant_conv on, this run has off; use_post_quant_conv on, this run has off",
        "train with --preset sd --channels 32,64,96,64",
    ),
    "reduced flux": (
        FLUX, dataclasses.replace(FLUX, latent_channels=8),
        "latent_channels 16, this run has 8", "train with --preset flux --channels 32,64,96,64",
    ),
    "flux2 of another decoder": (
        FLUX2, dataclasses.replace(PRESETS["flux2"], block_out_channels=WIDTHS),
        "decoder_block_out_channels 32,32,64,96, this run has those of the encoder",
        "train with --preset flux2 --channels 32,64,96,64 --decoder-channels 32,32,64,96",
    ),
    "flux for flux2": (
        FLUX, dataclasses.replace(PRESETS["flux2"], block_out_channels=WIDTHS),
        "latent_channels 16, this run has 32; use_quant_conv off, this run has on; use_post_quant_conv off, this run "
        "has on; patch_statistics off, this run has on", "train with --preset flux --channels 32,64,96,64",
    ),
    "fewer layers": (
        TINY, dataclasses.replace(TINY, layers_per_block=2), "layers_per_block 1, this run has 2",
        "no preset has these layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_another_architecture(name: str, stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path) -> None:
    theirs, ours, differences, hint = OTHERS[name]
    stock[theirs].save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"different architecture: {re.escape(differences)}$") as caught:
        load_pretrained(tmp_path, ours)
    assert caught.value.hint == hint


@each_row(
    (FLUX2, (), "decoder", "train with --preset flux2 --channels 32,64,96,64 --decoder-channels 32,32,64,96"),
    (
        FLUX2, (32, 32, 32, 32), "all",
        "train with --preset flux2 --channels 32,64,96,64 --decoder-channels 32,32,64,96; --train-part decoder begins "
        "with a new decoder of other channels",
    ),
    (
        FLUX, (32, 32, 32, 32), "decoder",
        "train with --preset flux --channels 32,64,96,64",
    ),
)  # fmt: skip
def test_a_trained_decoder_is_replaced_only_where_another_is_asked_for(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL],
    tmp_path: Path,
    theirs: VaeArchitecture,
    decoder: tuple[int, ...],
    train_part: str,
    hint: str,
) -> None:
    stock[theirs].save_pretrained(tmp_path / str(decoder))
    ours = dataclasses.replace(theirs, decoder_block_out_channels=decoder)
    with pytest.raises(UserError, match="different architecture") as caught:
        load_pretrained(tmp_path / str(decoder), ours, train_part)
    assert caught.value.hint == hint


@each_row(*PRESETS)
def test_hint_gives_the_architecture(preset: VaePreset) -> None:
    assert options_for(PRESETS[preset]) == f"--preset {preset}"
    assert options_for(built(preset, z_channels=12)) == f"--preset {preset} --z-channels 12"
    assert options_for(built(preset, (64, 64), 3)) == f"--preset {preset} --channels 64,64 --z-channels 3"


def attention_at_a_level(weights: Weights) -> Weights:
    return aged(weights) | {"encoder.down.3.attn.0.q.weight": torch.ones(64, 64, 1, 1)}


def one_missing(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in aged(weights).items() if name != "decoder.mid.block_2.conv2.bias"}


def not_finite(weights: Weights) -> Weights:
    return aged(weights) | {"decoder.conv_out.bias": torch.tensor([0.0, float("nan"), 0.0])}


UNFIT: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "attention": (attention_at_a_level, r"encoder\.down\.3\.attn\.0\.q\.weight is unknown"),
    "missing": (one_missing, r"decoder\.mid_block\.resnets\.1\.conv2\.bias is missing"),
    "not finite": (not_finite, r"decoder\.conv_out\.bias: not all weights are finite"),
    "no VAE": (lambda weights: {"lora.weight": torch.ones(2)}, "holds no autoencoder"),
    "decoder only": (
        lambda weights: {name: tensor for name, tensor in aged(weights).items() if name.startswith("decoder")},
        "holds a decoder without its encoder",
    ),
    "decoder by bare names": (
        lambda weights: {
            name.removeprefix("decoder."): tensor for name, tensor in weights.items() if name.startswith("decoder")
        },
        "holds a decoder without its encoder",
    ),
    "scalars": (lambda weights: aged(weights) | {"decoder.conv_in.weight": torch.ones(3)}, "not a supported"),
}


@each_row(*UNFIT)
def test_files_that_cannot_be_taken(
    stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path, name: str
) -> None:
    change, message = UNFIT[name]
    save_file(change(stock[FLUX].state_dict()), tmp_path / "ae.safetensors")
    with pytest.raises(UserError, match=message):
        load_pretrained(tmp_path / "ae.safetensors", FLUX)


def test_missing_and_damaged(stock: dict[VaeArchitecture, diffusers.AutoencoderKL], tmp_path: Path) -> None:
    file = tmp_path / "ae.safetensors"
    with pytest.raises(UserError, match=r"ae.safetensors: no such file or folder"):
        load_pretrained(file, TINY)
    with pytest.raises(UserError, match=r"holds no config.json, no vae/config.json and no checkpoint"):
        load_pretrained(tmp_path, TINY)
    save_file(stock[TINY].state_dict(), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        load_pretrained(file, TINY)
    torch.save({"state_dict": stock[TINY].state_dict()}, tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "cut.ckpt").read_bytes()[:5000])
    with pytest.raises(UserError, match="truncated or damaged"):
        load_pretrained(tmp_path / "cut.ckpt", TINY)
    torch.save(stock[TINY].state_dict(), tmp_path / "whole.pth", _use_new_zipfile_serialization=False)
    for place in range(60, 1400, 20):  # among the instructions that rebuild the tensors
        content = bytearray((tmp_path / "whole.pth").read_bytes())
        content[place] ^= 0xFF
        (tmp_path / "flipped.pth").write_bytes(content)
        with pytest.raises(UserError):
            load_pretrained(tmp_path / "flipped.pth", dataclasses.replace(TINY, latent_channels=3))
    (tmp_path / "page.bin").write_text("<html>404</html>")
    with pytest.raises(UserError, match=r"page.bin: "):
        load_pretrained(tmp_path / "page.bin", TINY)
    torch.save({"callbacks": Path("x")}, tmp_path / "old.ckpt")
    with pytest.raises(UserError, match="contains more than tensors") as caught:
        load_pretrained(tmp_path / "old.ckpt", TINY)
    assert "safetensors" in caught.value.hint
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="does not contain named tensors"):
        load_pretrained(tmp_path / "list.pt", TINY)
