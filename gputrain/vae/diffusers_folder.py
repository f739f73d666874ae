"""Reads and writes the folders of stock diffusers: config.json and diffusion_pytorch_model.safetensors.

`AutoencoderKL.from_pretrained(folder)` of diffusers loads the output of `save_diffusers`, and `load_diffusers` loads
that of its `save_pretrained`, with the present or the older names of attention's tensors. Neither needs diffusers.
https://huggingface.co/docs/diffusers/api/models/autoencoderkl describes the configuration.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gputrain.engine.checkpoint import differences, format_list, load_weights, refuse_nonfinite
from gputrain.errors import UserError
from gputrain.files import written_aside
from gputrain.formatting import shell_command
from gputrain.vae.architecture import PATCH, VaeArchitecture
from gputrain.vae.latents import BATCH_NORM_EPS, STATISTICS, LatentScaling, PatchStatistics
from gputrain.vae.model import AutoencoderKL
from gputrain.weights import DIGEST, digest_of, read_safetensors

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
DOWN_BLOCK, UP_BLOCK = "DownEncoderBlock2D", "UpDecoderBlock2D"

# These are diffusers' defaults of keys that config.json leaves out, as the oldest files do, by class.
SHARED: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
    "decoder_block_out_channels": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {
        **SHARED,
        "down_block_types": [DOWN_BLOCK],
        "up_block_types": [UP_BLOCK],
        "block_out_channels": [64],
        "layers_per_block": 1,
        "latent_channels": 4,
        "sample_size": 32,
        "scaling_factor": 0.18215,
        "shift_factor": None,
        "force_upcast": True,
    },
    "AutoencoderKLFlux2": {
        **SHARED,
        "down_block_types": [DOWN_BLOCK] * 4,
        "up_block_types": [UP_BLOCK] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 32,
        "sample_size": 1024,
        "batch_norm_eps": BATCH_NORM_EPS,
        "patch_size": [PATCH, PATCH],
    },
}
NONE: Mapping[str, Any] = {}
LEAST_TILE = 512  # Pixels along each side of a tile, as in the autoencoders of Stable Diffusion 1.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def export_and_verify(
    model: AutoencoderKL, folder: Path, scaling: LatentScaling, *, sample_size: int, kept: Mapping[str, Any] = NONE
) -> float:
    """Exports with `save_diffusers`, then loads the folder and compares it with the model, as `verify` does.

    Raises UserError if weights are not finite or the folder cannot be written, RuntimeError if the loaded model
    differs.
    """
    refuse_nonfinite(stock_weights(model, scaling), str(folder))
    save_diffusers(model, folder, scaling, sample_size=sample_size, kept=kept)
    return verify(model, load_diffusers(folder)[0], folder / WEIGHTS)


def verify(model: AutoencoderKL, loaded: AutoencoderKL, file: Path) -> float:
    """Compares weights and a reconstruction of an exported model, as loaded from its file, with those of the model.

    Returns the largest difference of the reconstructions, whose pixels are in about [-1, 1]: zero up to rounding.
    Raises RuntimeError if the loaded model differs.
    """
    weights = stock_weights(model, LatentScaling())
    for name, tensor in loaded.state_dict().items():
        if not torch.equal(tensor, weights[name]):
            raise RuntimeError(f"{file}: {name} differs from the written tensor")
    difference = _difference(model, loaded)
    # The tolerance allows for TF32 and bf16; another architecture would differ by far more.
    if not difference < 0.05:
        raise RuntimeError(f"{file}: a reconstruction differs by {difference:.3g} from the model's")
    return difference


def save_diffusers(
    model: AutoencoderKL, folder: Path, scaling: LatentScaling, *, sample_size: int, kept: Mapping[str, Any] = NONE
) -> None:
    """Writes `model` as a folder for stock diffusers, in fp32. Each file is renamed into place when complete, and the
    weights have a digest, which `load_diffusers` verifies.

    `sample_size` is the side in pixels of the tiles that diffusers' enable_tiling makes; `kept` are the keys of the
    model's source by `kept_keys`, which come first. Raises UserError if writing fails.
    """
    architecture = model.architecture
    levels, shape = len(architecture.block_out_channels), dataclasses.asdict(architecture)
    if not (shape.pop("patch_statistics") and architecture.decoder_block_out_channels):
        del shape["decoder_block_out_channels"]  # AutoencoderKL and diffusers before 0.38 do not know it.
    config = {
        "_class_name": architecture.class_name,
        **shape,
        "act_fn": "silu",
        "down_block_types": [DOWN_BLOCK] * levels,
        "up_block_types": [UP_BLOCK] * levels,
        "sample_size": sample_size,
        **scaling.config(),
    }
    if architecture.patch_statistics:
        eps = scaling.patches.eps if scaling.patches else BATCH_NORM_EPS
        config |= {"batch_norm_eps": eps, "batch_norm_momentum": 0.1, "patch_size": [PATCH, PATCH]}
    else:
        config["force_upcast"] = True
    write_folder(folder, config | dict(kept), {WEIGHTS: stock_weights(model, scaling)})


def tile_size(image_size: int, architecture: VaeArchitecture) -> int:
    """Returns the sample_size of a model that has none of a source, from the side of its training pictures in pixels.

    diffusers makes tiles of this size, which overlap by a quarter, and normalises each by itself: small tiles differ in
    colour, and a quarter that is no whole number of latent positions shifts them.
    """
    step = 4 * architecture.downsampling
    return -(-max(image_size, LEAST_TILE) // step) * step


def kept_keys(path: Path) -> dict[str, Any]:
    """Returns the keys that a config.json states and an export does not make itself, unknown ones among them."""
    config = json.loads(path.read_text(encoding="utf-8"))
    made = {field.name for kind in (VaeArchitecture, LatentScaling) for field in dataclasses.fields(kind)}
    made |= {"act_fn", "down_block_types", "up_block_types", "patch_size", "padding_mode", "batch_norm_eps"}
    return {name: value for name, value in config.items() if name not in made and not name.startswith("_")}


def write_folder(folder: Path, config: Mapping[str, Any] | None, files: Mapping[str, dict[str, Tensor]]) -> None:
    """Writes configuration, if there is one, and weights, complete or not at all. Raises UserError if that fails, or
    if other weights than those of an export, which hold a digest, would be written over."""
    for path in [folder / name for name in files if (folder / name).is_file()]:
        with path.open("rb") as file:
            if DIGEST.encode() not in file.read(1 << 12):
                raise UserError(f"{path}: is there, and was not exported here", hint="name another --output-dir")
    try:
        with written_aside(folder) as aside:
            (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name, weights in files.items():
                save_file(weights, aside / name, metadata={"format": "pt", DIGEST: digest_of(weights)})
                shutil.copymode(aside / CONFIG, aside / name)  # safetensors makes files that nobody else can read.
            if config is None:
                (aside / CONFIG).unlink()
    except SafetensorError as error:
        raise UserError(
            f"{folder}: cannot be written: {error}", hint="free some space, or choose another folder"
        ) from None


def load_diffusers(folder: Path) -> tuple[AutoencoderKL, LatentScaling]:
    """Returns the autoencoder of a diffusers folder, in fp32 on the CPU, and the factors of its latents.

    Raises UserError if a file is missing or damaged, or is not of an autoencoder that this package supports.
    """
    config = read_config(folder / CONFIG)
    architecture = diffusers_architecture(config, folder / CONFIG)
    try:
        weights, patches = fit_weights(read_weights(folder / WEIGHTS), architecture)
    except Unfit as unfit:
        raise UserError(
            f"{folder / WEIGHTS}: does not fit {CONFIG}: {unfit}", hint="both files must come from the same model"
        ) from None
    with torch.device("meta"):  # This skips random initialisation.
        model = AutoencoderKL(architecture)
    load_weights(model.to_empty(device="cpu"), weights, str(folder / WEIGHTS))
    return model, LatentScaling.of_config(config, folder / CONFIG, patches)


class Unfit(Exception):
    """Raised for missing tensors, unknown tensors and other shapes; the message names the first ones."""


def fit_weights(
    weights: dict[str, Tensor], architecture: VaeArchitecture
) -> tuple[dict[str, Tensor], PatchStatistics | None]:
    """Converts tensors by diffusers' present names to those of the autoencoder: attention's 1x1 convolutions become
    matrices. The statistics of patches, if `architecture` has them, are returned apart.

    Raises Unfit, before memory is allocated, if they are not exactly those of `architecture`.
    """
    patches = None
    if architecture.patch_statistics:
        try:
            patches = PatchStatistics.of_tensors(weights, architecture.latent_channels)
        except KeyError as missing:
            raise Unfit(f"{missing.args[0]} is missing") from None
        except ValueError as odd_values:
            raise Unfit(str(odd_values)) from None
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{STATISTICS}.")}
    with torch.device("meta"):
        expected = AutoencoderKL(architecture).state_dict()
    matrices = {name for name, tensor in expected.items() if tensor.ndim == 2}
    fitted = {
        name: tensor.flatten(1) if set(tensor.shape[2:]) == {1} and name in matrices else tensor
        for name, tensor in weights.items()
    }
    if odd := differences(expected, fitted):
        raise Unfit(format_list(odd))
    return fitted, patches


def present_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors with diffusers' older names of attention to the present names."""
    old_name = re.compile(rf"(\.attentions\.\d+\.)({'|'.join(OLD_ATTENTION)})\.")
    return {old_name.sub(lambda m: f"{m[1]}{OLD_ATTENTION[m[2]]}.", name): tensor for name, tensor in weights.items()}


def stock_weights(model: AutoencoderKL, scaling: LatentScaling) -> dict[str, Tensor]:
    """Returns tensors by diffusers' names, in fp32 and NCHW on the CPU, the statistics of patches among them. Names of
    compiled modules contain `_orig_mod.`, which is removed."""
    weights = {
        name.replace("_orig_mod.", ""): tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
    }
    if model.architecture.patch_statistics:
        channels = model.architecture.latent_channels * PATCH**2
        # Statistics of a normalisation that changes nothing, as in a new BatchNorm.
        none = PatchStatistics([0.0] * channels, [1.0] * channels, batches=0)
        weights |= (scaling.patches or none).tensors()
    return weights


@torch.no_grad()
def _difference(model: AutoencoderKL, other: AutoencoderKL) -> float:
    """Returns the largest difference between two reconstructions of a small random picture, on the device of
    `model`."""
    reference = next(model.parameters())
    size = 8 * model.architecture.downsampling
    picture = torch.rand(1, model.architecture.in_channels, size, size, generator=torch.Generator().manual_seed(0))
    images_BCHW = (picture * 2 - 1).to(reference)
    made, remade = (
        autoencoder.decode(autoencoder.encode(images_BCHW).mean_BLhw.to(reference))
        for autoencoder in (model, other.to(reference))
    )
    return (made - remade).abs().max().item()


def read_config(path: Path) -> dict[str, Any]:
    """Returns a config.json of diffusers with its defaults. Raises UserError if it is missing, malformed or of another
    class."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", hint="name the folder that diffusers' save_pretrained wrote") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    found = config.get("_class_name") if isinstance(config, dict) else None
    if found not in DEFAULTS:
        raise UserError(
            f"{path}: describes {found or 'no diffusers model'}, expected an {' or '.join(DEFAULTS)}",
            hint="name the subfolder vae of a pipeline",
        )
    return {**DEFAULTS[found], **config}


def diffusers_architecture(config: dict[str, Any], path: Path) -> VaeArchitecture:
    """Parses a configuration. Raises UserError, naming the key, if it is malformed or its layers are unsupported."""
    patched = config["_class_name"] == "AutoencoderKLFlux2"
    shape: dict[str, Any] = {"patch_statistics": patched}
    stated = [field for field in dataclasses.fields(VaeArchitecture) if field.name not in shape]
    if not patched or config["decoder_block_out_channels"] is None:  # AutoencoderKL does not know the key.
        stated = [field for field in stated if field.name != "decoder_block_out_channels"]
    for field in stated:
        value = config[field.name]
        if field.type is bool:
            fits = isinstance(value, bool)
        elif field.type is int:
            fits = _is_count(value)
        else:
            fits = isinstance(value, list) and len(value) > 0 and all(map(_is_count, value))
            value = tuple(value) if fits else value
        if not fits:
            raise UserError(f"{path}: {field.name} is {value!r}", hint="use the file that belongs to the weights")
        shape[field.name] = value
    architecture = VaeArchitecture(**shape)

    levels = len(architecture.block_out_channels)
    built = {
        "act_fn": ("silu", "swish"),
        "down_block_types": ([DOWN_BLOCK] * levels,),
        "up_block_types": ([UP_BLOCK] * levels,),
        **({"patch_size": ([PATCH, PATCH],)} if patched else {}),
        # diffusers has no key for it: autoencoders whose convolutions reflect the border are marked by others.
        **({"padding_mode": ("zeros",)} if "padding_mode" in config else {}),
    }
    for key, values in built.items():
        if config[key] not in values:
            raise UserError(f"{path}: {key} is {config[key]!r}, but only {values[0]!r} is supported")
    if len(architecture.decoder_widths) != levels:
        raise UserError(f"{path}: decoder_block_out_channels has not the {levels} blocks of block_out_channels")
    for width in (*architecture.block_out_channels, *architecture.decoder_widths):
        if width % architecture.norm_num_groups:
            raise UserError(f"{path}: norm_num_groups {architecture.norm_num_groups} does not divide {width} channels")
    return architecture


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads tensors by diffusers' present names, from a file or from the several that `max_shard_size` makes of it."""
    shards = sorted(path.parent.glob(f"{path.stem}-[0-9]*-of-[0-9]*{path.suffix}"))
    if shards and not path.is_file():
        count = int(shards[0].stem.rpartition("-of-")[2])
        if len(shards) != count:
            raise UserError(
                f"{path.parent}: {len(shards)} of {count} files of the weights, such as {shards[0].name}",
                hint="copy the others there, too",
            )
        return present_names(
            {name: tensor for shard in shards for name, tensor in read_safetensors(shard).tensors.items()}
        )
    if not path.is_file():
        others = sorted(
            other for other in path.parent.glob(f"{path.stem}[.-]*") if other.suffix in (".safetensors", ".bin")
        )
        hint = "save it with diffusers' save_pretrained(folder, safe_serialization=True)"
        if others:
            hint = f"train-vae takes the file {others[0].name} itself: --init-from {shell_command(others[0])}"
        raise UserError(f"{path}: no such file", hint=hint)
    return present_names(read_safetensors(path).tensors)
