"""Loads a trained autoencoder for inference, and reads the weights of a pretrained one for fine-tuning.

Sources are folders and pipelines of diffusers; single files with the tensor names of diffusers or of the first latent
diffusion models (github.com/CompVis/latent-diffusion, which the published files of Stable Diffusion and FLUX use), of
the autoencoder alone or of a whole pipeline; and runs of gputrain.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gputrain.engine import checkpoint
from gputrain.engine.checkpoint import load_trained, refuse_nonfinite
from gputrain.errors import UserError
from gputrain.fetch.names import local_path, refuse_graph
from gputrain.vae.architecture import PRESETS, VaeArchitecture
from gputrain.vae.config import PUBLISHED, TrainVae
from gputrain.vae.diffusers_folder import (
    CONFIG,
    NONE,
    SHARED,
    WEIGHTS,
    Unfit,
    diffusers_architecture,
    fit_weights,
    kept_keys,
    load_diffusers,
    present_names,
    read_config,
)
from gputrain.vae.latents import STATISTICS, LatentScaling, LatentSource, PatchStatistics, TrainedPictures, family_of
from gputrain.vae.model import AutoencoderKL
from gputrain.weights import DIGEST, WeightsFile, format_parts, log_unused, read_weights_file

log = logging.getLogger(__name__)

ENCODER = ("encoder.", "quant_conv.")  # Beginnings of the names of tensors that make latents.
ARCHITECTURE = "modelspec.architecture"  # Key in the header, by github.com/Stability-AI/ModelSpec.
PREFIXES = ("", "first_stage_model.", "vae.", "model.")  # prefixes of the autoencoder's tensors in a file
PREFIX = rf"^({'|'.join(map(re.escape, PREFIXES))})"
AUTOENCODER = rf"{PREFIX}(((en|de)coder|(post_)?quant_conv)\.|{STATISTICS}\.(running|num)_)"
# Beside the autoencoder, few files have the factors of its latents: those that a training of CompVis's code measured,
# and those of Playground 2.5, whose scaling factor diffusers' code states.
MEASURED_FACTOR, EDM_MEAN, EDM_STD, EDM_SCALING = "scale_factor", "edm_mean", "edm_std", 0.5
PARTS = rf"{AUTOENCODER}|^({MEASURED_FACTOR}|{EDM_MEAN}|{EDM_STD})$"
# Parts of names in the first latent diffusion models, and diffusers' for them; # is a number. Up blocks are numbered in
# reverse there.
ORIGINAL = (
    ("encoder.down.#.block.", "encoder.down_blocks.#.resnets."),
    ("encoder.down.#.downsample.", "encoder.down_blocks.#.downsamplers.0."),
    ("decoder.up.#.block.", "decoder.up_blocks.#.resnets."),
    ("decoder.up.#.upsample.", "decoder.up_blocks.#.upsamplers.0."),
    ("coder.mid.block_1.", "coder.mid_block.resnets.0."),
    ("coder.mid.block_2.", "coder.mid_block.resnets.1."),
    ("coder.mid.attn_1.norm.", "coder.mid_block.attentions.0.group_norm."),
    *((f"coder.mid.attn_1.{letter}.", f"coder.mid_block.attentions.0.to_{letter}.") for letter in "qkv"),
    ("coder.mid.attn_1.proj_out.", "coder.mid_block.attentions.0.to_out.0."),
    (".nin_shortcut.", ".conv_shortcut."),
    ("coder.norm_out.", "coder.conv_norm_out."),
)


@dataclass(frozen=True)
class LoadedVae:
    """An autoencoder ready for inference."""

    model: AutoencoderKL  # EMA weights if the run has them; in eval mode, without gradients
    settings: TrainVae | None  # settings of the run; None for an exported folder
    step: int  # number of optimizer steps; 0 for an exported folder
    latents: LatentSource | None = None  # the pretrained model that a run began with


def load_model(path: Path, device: torch.device) -> LoadedVae:
    """Loads a model for inference. Raises UserError if it doesn't exist, is damaged or is of another kind."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder", hint="--model takes a run folder, a checkpoint or an export")
    if not (path / CONFIG).is_file() and (path / "vae" / CONFIG).is_file():
        path = path / "vae"  # A pipeline of diffusers.
    if (path / CONFIG).is_file():
        return LoadedVae(_ready(load_diffusers(path)[0], device), None, 0)
    source, content = checkpoint.find_named(path, "vae", ["autoencoder"])
    settings = checkpoint.saved_settings(TrainVae, content, source)
    model = AutoencoderKL(settings.architecture)
    load_trained(model, content, "autoencoder", str(source))
    latents = LatentSource.of_facts(content["facts"], source)
    return LoadedVae(_ready(model, device), settings, content["progress"]["step"], latents)


def _ready(model: AutoencoderKL, device: torch.device) -> AutoencoderKL:
    return model.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Pretrained:
    """Weights and architecture of an autoencoder, and what is known of the factors of its latents."""

    weights: dict[str, Tensor]  # Tensors in fp32 on the CPU, by diffusers' present names.
    architecture: VaeArchitecture
    latents: LatentSource


def load_pretrained(name: str | Path, architecture: VaeArchitecture, train_part: str = "all") -> Pretrained:
    """Returns a pretrained autoencoder, whose weights `AutoencoderKL(architecture).load_state_dict` takes.

    `name` means a folder of diffusers (of an autoencoder or a pipeline), a file of weights, or a run folder or
    checkpoint of gputrain, whose EMA weights are read if it has them; it may be a published one. If only the decoder is
    trained and has other widths than the found one, the weights are those of the encoder. Raises UserError if it is
    missing or damaged, or has another architecture; the message then gives the options that fit.
    """
    found = read_pretrained(name, architecture.norm_num_groups)
    decoder = architecture.decoder_block_out_channels
    own_decoder = dataclasses.replace(found.architecture, decoder_block_out_channels=decoder)
    is_new = found.architecture != architecture == own_decoder and bool(decoder)  # Asked for by its channels.
    if train_part == "decoder" and is_new and found.architecture.patch_statistics:
        log.info("the decoder is new, with channels %s, and begins with random weights", _shown(decoder))
        encoder = {name: tensor for name, tensor in found.weights.items() if name.startswith(ENCODER)}
        found = dataclasses.replace(found, weights=encoder, architecture=architecture)
    if found.architecture != architecture:
        options = options_for(found.architecture)
        hint = f"train with {options}" if options else "no preset has these layers"
        if is_new and found.architecture.patch_statistics:
            hint += "; --train-part decoder begins with a new decoder of other channels"
        raise UserError(f"{name}: different architecture: {_differences(found.architecture, architecture)}", hint=hint)
    refuse_nonfinite(found.weights, str(name))
    return found


def read_pretrained(name: str | Path, norm_num_groups: int = SHARED["norm_num_groups"]) -> Pretrained:
    """Reads the autoencoder of a path or a published name.

    `norm_num_groups` is for files that do not specify it: those with diffusers' names but no config.json. Raises
    UserError if it is missing or damaged, or not a supported AutoencoderKL.
    """
    path = local_path(name, PUBLISHED)
    refuse_graph(path)
    if path.is_dir():
        found = _read_folder(path)
    elif path.suffix == ".pt" and path.name.startswith("checkpoint_"):
        found = _read_run(path)
    else:
        found = _read_file(path, norm_num_groups)
    if found.latents.source == str(path):  # The user knows a published model by its name, and not by its place.
        return dataclasses.replace(found, latents=dataclasses.replace(found.latents, source=str(name)))
    return found


def _read_folder(path: Path) -> Pretrained:
    for folder in (path, path / "vae"):  # folder of an autoencoder, or of a pipeline
        if (folder / CONFIG).is_file():
            model, scaling = load_diffusers(folder)
            source = _source_of_config(path, scaling, kept_keys(folder / CONFIG))
            return Pretrained(_in_fp32(model.state_dict()), model.architecture, source)
    if any(path.glob("checkpoint_*.pt")):
        return _read_run(path)
    raise UserError(
        f"{path}: holds no {CONFIG}, no vae/{CONFIG} and no checkpoint",
        hint="name a folder that diffusers' save_pretrained wrote, a run folder, or the file of weights",
    )


def _source_of_config(path: Path, scaling: LatentScaling, config: Mapping[str, Any] = NONE) -> LatentSource:
    told_by = f"its {CONFIG}" if scaling.patches is None else f"its tensors {STATISTICS}.*"
    return LatentSource(str(path), scaling, told_by, published=True, config=dict(config))


def _read_run(path: Path) -> Pretrained:
    """A run that kept the encoder of its own source has the factors of that source."""
    loaded = load_model(path, torch.device("cpu"))
    latents, settings = loaded.latents, loaded.settings
    if settings is not None and (latents is None or latents.encoder_trained):
        data = settings.data
        pictures = TrainedPictures(list(map(str, data.data_path)), data.image_size, data.held_out_share)
        latents = LatentSource(str(path), pictures=pictures, config=latents.config if latents else {})
    return Pretrained(
        _in_fp32(loaded.model.state_dict()), loaded.model.architecture, latents or LatentSource(str(path))
    )


def _read_file(path: Path, norm_num_groups: int) -> Pretrained:
    file = read_weights_file(path, PARTS)
    tensors = {name: tensor for name, tensor in file.tensors.items() if re.search(AUTOENCODER, name)}
    inside = [prefix for prefix in PREFIXES if f"{prefix}decoder.conv_in.weight" in tensors]
    blocks = {match[1] for name in file.names if (match := re.search(r"(?:^|\.)(up|down)(?:_blocks)?\.\d+\.", name))}
    if blocks == {"up"}:
        raise UserError(
            f"{path}: holds a decoder without its encoder",
            hint="name a file that has both, such as FLUX.2's full_encoder_small_decoder.safetensors",
        )
    if not inside:
        raise UserError(
            f"{path}: holds no autoencoder, but {format_parts(file.names) or 'no tensors by name'}",
            hint="name the file of the VAE, or of a pipeline that has one",
        )
    weights = {name.removeprefix(inside[0]): tensor for name, tensor in tensors.items() if name.startswith(inside[0])}
    used = {inside[0] + name for name in weights} | {MEASURED_FACTOR, EDM_MEAN, EDM_STD}
    log_unused(path, (name for name in file.names if name not in used))
    if "encoder.down.0.block.0.conv1.weight" in weights:
        weights, norm_num_groups = renamed(weights), 32  # All those models have 32 groups.
    weights = present_names(weights)
    config_file = path.with_name(CONFIG)
    try:
        if path.name.startswith(Path(WEIGHTS).stem) and config_file.is_file():
            config = read_config(config_file)
            architecture = diffusers_architecture(config, config_file)
            fitted, patches = fit_weights(weights, architecture)
            latents = _source_of_config(
                path, LatentScaling.of_config(config, config_file, patches), kept_keys(config_file)
            )
        else:
            architecture = _deduce(weights, norm_num_groups)
            fitted, patches = fit_weights(weights, architecture)
            latents = _source_of_file(path, file, architecture.latent_channels, patches)
        return Pretrained(_in_fp32(fitted), architecture, latents)
    except (Unfit, KeyError, IndexError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path}: its autoencoder is not a supported AutoencoderKL: {reason}",
            hint="the autoencoders of Stable Diffusion 1 to 3, SDXL, FLUX.1 and FLUX.2 are supported",
        ) from None


def _source_of_file(
    path: Path, file: WeightsFile, latent_channels: int, patches: PatchStatistics | None
) -> LatentSource:
    """Returns what a file without a configuration tells of the factors of its latents: by tensors that hold them, or by
    those of the whole pipeline, its header or its name."""
    if patches:
        return _source_of_config(path, LatentScaling(patches=patches))
    if MEASURED_FACTOR in file.tensors:
        scaling = LatentScaling(float(file.tensors[MEASURED_FACTOR]))
        return LatentSource(str(path), scaling, told_by=f"its tensor {MEASURED_FACTOR}", published=True)
    if {EDM_MEAN, EDM_STD} <= file.tensors.keys():
        mean, std = (file.tensors[name].float().flatten().tolist() for name in (EDM_MEAN, EDM_STD))
        scaling = LatentScaling(EDM_SCALING, None, mean, std)
        return LatentSource(str(path), scaling, told_by=f"its tensors {EDM_MEAN} and {EDM_STD}", published=True)
    words = f"{path.name} {file.metadata.get(ARCHITECTURE, '')}"
    family = family_of(file.names, words, latent_channels)
    if family is None:  # Files of gputrain have a digest, and factors of their own.
        return LatentSource(str(path), published=DIGEST not in file.metadata)
    return LatentSource(str(path), family.scaling, told_by=f"it is of {family.name}", published=True)


def renamed(weights: dict[str, Tensor], *, to_original: bool = False) -> dict[str, Tensor]:
    """Renames tensors of the first latent diffusion models to diffusers' names, or the other way round, where the
    matrices of attention are 1x1 convolutions."""
    levels = [int(match[1]) for name in weights if (match := re.match(r"decoder\.up(?:_blocks)?\.(\d+)\.", name))]

    def rename(name: str) -> str:
        name = re.sub(
            r"(?<=^decoder\.up\.)\d+|(?<=^decoder\.up_blocks\.)\d+", lambda m: f"{max(levels) - int(m[0])}", name
        )
        for pair in ORIGINAL:
            old, new = reversed(pair) if to_original else pair
            name = re.sub(re.escape(old).replace(r"\#", r"(\d+)"), new.replace("#", r"\1"), name)
        # In the files of FLUX.2, these convolutions are parts of encoder and decoder.
        return re.sub(r"^(encoder|decoder)\.(?=(post_)?quant_conv\.)", "", name)

    return {
        rename(name): tensor[..., None, None] if to_original and tensor.ndim == 2 else tensor
        for name, tensor in weights.items()
    }


def _deduce(weights: dict[str, Tensor], norm_num_groups: int) -> VaeArchitecture:
    """Infers the architecture from the shapes of tensors. Raises Unfit, KeyError or IndexError if that fails."""
    layers = sum(bool(re.fullmatch(r"encoder\.down_blocks\.0\.resnets\.\d+\.conv1\.weight", name)) for name in weights)
    widths = {}
    for blocks in ("encoder.down_blocks", "decoder.up_blocks"):
        pattern = rf"{re.escape(blocks)}\.\d+\.resnets\.0\.conv1\.weight"
        levels = sum(bool(re.fullmatch(pattern, name)) for name in weights)
        first = [weights[f"{blocks}.{level}.resnets.0.conv1.weight"] for level in range(max(1, levels))]
        widths[blocks] = tuple(kernel.shape[0] for kernel in first)
        for width in widths[blocks]:
            if width % norm_num_groups:
                raise Unfit(f"{norm_num_groups} groups do not divide {width} channels")
    return VaeArchitecture(
        block_out_channels=widths["encoder.down_blocks"],
        decoder_block_out_channels=widths["decoder.up_blocks"][::-1],
        patch_statistics=f"{STATISTICS}.running_mean" in weights,
        latent_channels=weights["decoder.conv_in.weight"].shape[1],
        layers_per_block=layers,
        norm_num_groups=norm_num_groups,
        mid_block_add_attention="encoder.mid_block.attentions.0.group_norm.weight" in weights,
        use_quant_conv="quant_conv.weight" in weights,
        use_post_quant_conv="post_quant_conv.weight" in weights,
        in_channels=weights["encoder.conv_in.weight"].shape[1],
        out_channels=weights["decoder.conv_out.weight"].shape[0],
    )


def _in_fp32(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in weights.items()}


def _differences(found: VaeArchitecture, wanted: VaeArchitecture) -> str:
    theirs, ours = dataclasses.asdict(found), dataclasses.asdict(wanted)
    return "; ".join(
        f"{name} {_shown(theirs[name])}, this run has {_shown(ours[name])}"
        for name in ours
        if theirs[name] != ours[name]
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (",".join(map(str, value)) or "those of the encoder") if isinstance(value, tuple) else str(value)


def options_for(wanted: VaeArchitecture) -> str:
    """Returns the options of train-vae that give an architecture; "" if no preset has its layers."""
    widths, latent, image = wanted.block_out_channels, wanted.latent_channels, wanted.in_channels
    decoder = wanted.decoder_block_out_channels
    for preset, base in PRESETS.items():
        changed = dataclasses.replace(base, block_out_channels=widths, latent_channels=latent)
        changed = dataclasses.replace(changed, decoder_block_out_channels=decoder)
        if dataclasses.replace(changed, in_channels=image, out_channels=image) == wanted:
            channels = f" --channels {_shown(widths)}" if widths != base.block_out_channels else ""
            decoder_channels = f" --decoder-channels {_shown(decoder)}" if decoder else ""
            z_channels = f" --z-channels {latent}" if latent != base.latent_channels else ""
            pictures = f" --image-channels {image}" if image != base.in_channels else ""
            return f"--preset {preset}{channels}{decoder_channels}{z_channels}{pictures}"
    return ""
